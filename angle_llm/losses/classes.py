"""Supervised contrastive loss: texts of a class should be closer to each other than to texts of other classes.

Shapes: T labelled rows (distinct pairs of a row and its class), A anchors, C classes or candidates, G texts of classes.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import WholeMatrix, add_rows, rows
from angle_llm.losses.contrastive import equal_entries
from angle_llm.losses.negatives import MaskIndices, NegativeLogSum
from angle_llm.losses.similarity import unit
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


@dataclass(frozen=True)
class ClassTerm(Term):
    """Supervised contrastive loss L_out (Khosla et al. 2020, arXiv 2004.11362, eq. 2), as a mean over A anchors, >= 0.

        L = 1/A Σ_i -1/|P(i)| Σ_{p in P(i)} log( exp(s_ip) / Σ_{a in A(i)} exp(s_ia) ),   s = cosine / temperature

    P(i) are the other texts with the class of text i; A(i) are all labelled texts except i, also the positives. A text
    without a positive is no anchor, but a negative of other texts. A text that occurs several times with a class is one
    text, so never its own positive. A text with two classes is an anchor of both, and one text of A(i). A text with two
    instructions has two rows (`Relation.text`), which are neither positives nor negatives of each other.

    Pairs without a class (`Relation.label` -1) are ignored. Without an anchor, loss and gradient are 0. Memory: a few
    matrices as large as the embeddings, and a block of similarities at a time (module `blocks`).
    """

    weight: float
    temperature: float
    name: str = "class"
    needs_pairs: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"label"})

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        # Distinct labelled rows; anchors have another text of their class.
        relation = pairs.relation
        label_P = relation.required("label", "class_weight")
        text_N = relation.text_numbers(pairs.rows)
        row_T, label_T = torch.unique(torch.stack((relation.left, label_P))[:, label_P >= 0], dim=1)
        _, class_T, rows_C = torch.unique(label_T, return_inverse=True, return_counts=True)
        text_key_T = class_T * pairs.rows + text_N[row_T]
        _, text_T, rows_G = torch.unique(text_key_T, return_inverse=True, return_counts=True)
        positives_T = rows_C[class_T] - rows_G[text_T]  # rows of the class, without those of the same text
        anchor_A, candidate_C = row_T[positives_T > 0], torch.unique(row_T)
        # The log-sum-exp over A(i).
        skips = MaskIndices(*equal_entries(text_N[anchor_A], text_N[candidate_C]))
        anchors_and_candidates = on_device(anchor_A, pairs.device), on_device(candidate_C, pairs.device)
        others = NegativeLogSum(self.temperature, *anchors_and_candidates, skips)
        # The sum over positives, with the weight 1 / |P(i)|.
        weight_T = (1 / positives_T.double()).masked_fill(positives_T == 0, 0)
        indices = (on_device(index_T, pairs.device) for index_T in (row_T, class_T, text_T))
        positives = WholeMatrix(partial(cohesion, weight_T, *indices))

        def value(positives_1: Tensor, others_A: Tensor) -> Tensor:
            return (others_A.sum() - positives_1.squeeze() / self.temperature) / max(len(anchor_A), 1)

        return BatchTerm((positives, others), value)


def cohesion(weight_T: Tensor, row_T: Tensor, class_T: Tensor, text_T: Tensor, x_ND: Tensor) -> Tensor:
    """Return Σ_i weight_i · Σ_p cosine(i, p) over the rows p of other texts with the class of row i, a scalar.

    Σ_p cosine(i, p) = z_i·(s - t), where s is the sum of the vectors z of length 1 of the class, and t the sum over the
    rows of the text in the class. So a class of n texts takes n products, not n². `weight_T` is on the CPU: not every
    device has float64.
    """
    unit_TD = unit(rows(x_ND, row_T))

    def sums(number_T: Tensor) -> Tensor:
        sum_TD = torch.zeros_like(unit_TD)
        add_rows(sum_TD, number_T, unit_TD)
        return rows(sum_TD, number_T)

    cohesion_T = (unit_TD * (sums(class_T) - sums(text_T))).sum(dim=1)
    return (on_device(weight_T.to(x_ND.dtype), x_ND.device) * cohesion_T).sum()
