"""Supervised contrastive loss: texts of a class should be closer to each other than to texts of other classes.

Shapes: T labelled texts (distinct pairs of a row and its class), A anchors, C classes or candidates.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import WholeMatrix, rows
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
    text, so never its own positive. A text with two classes is an anchor of both, and one text of A(i).

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
        # Distinct labelled texts; anchors have another text of their class.
        label_P = pairs.relation.required("label", "class_weight")
        row_T, label_T = torch.unique(torch.stack((pairs.relation.left, label_P))[:, label_P >= 0], dim=1)
        _, class_T, texts_C = torch.unique(label_T, return_inverse=True, return_counts=True)
        anchor_A, candidate_C = row_T[texts_C[class_T] > 1], torch.unique(row_T)
        anchors = max(len(anchor_A), 1)
        # The log-sum-exp over A(i).
        skips = MaskIndices(*equal_entries(anchor_A, candidate_C))
        compared = on_device(anchor_A, pairs.device), on_device(candidate_C, pairs.device)
        others = NegativeLogSum(self.temperature, *compared, skips)
        # The sum over positives, with 1 / |P(i)| of each class.
        weight_C = (1 / (texts_C - 1).double()).masked_fill(texts_C == 1, 0)
        of_T = on_device(row_T, pairs.device), on_device(class_T, pairs.device)
        positives = WholeMatrix(partial(cohesion, *of_T, weight_C))

        def value(positives_1: Tensor, others_A: Tensor) -> Tensor:
            return (others_A.sum() - positives_1.squeeze() / self.temperature) / anchors

        return BatchTerm((positives, others), value)


def cohesion(row_T: Tensor, class_T: Tensor, weight_C: Tensor, x_ND: Tensor) -> Tensor:
    """Return Σ_i weight_i · Σ_p cosine(i, p) over the other texts p with the class of text i, a scalar.

    Σ_p cosine(i, p) = z_i·(s - z_i), where s is the sum of the vectors z of length 1 of the class. So a class of n texts
    takes n products, not n². `weight_C` is on the CPU: not every device has float64.
    """
    unit_TD = unit(rows(x_ND, row_T))
    member_CT = (torch.arange(len(weight_C), device=class_T.device)[:, None] == class_T).to(x_ND.dtype)
    sum_TD = rows(member_CT @ unit_TD, class_T)  # a product adds in a fixed order on every device
    weight_T = on_device(weight_C.to(x_ND.dtype), x_ND.device)[class_T]
    return (weight_T * (unit_TD * (sum_TD - unit_TD)).sum(dim=1)).sum()
