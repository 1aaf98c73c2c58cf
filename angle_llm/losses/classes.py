"""Supervised contrastive loss: texts of a class should be closer to each other than to texts of other classes.

Shapes: N rows, D columns, T labelled texts (distinct pairs of a row and its class), B of them in a block, A anchors, C
classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import add_rows, pull_back, rows, rows_a_side, slices
from angle_llm.losses.contrastive import equal_entries
from angle_llm.losses.negatives import MaskIndices, NegativeLogSum
from angle_llm.losses.similarity import unit
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


@dataclass(frozen=True, eq=False)
class ClassCohesion:
    """Weighted sum over classes of the cosines between their texts, shape (1,); a `RowVector`.

        value = Σ_c w_c Σ_{i≠j in c} cosine(i, j) = Σ_c w_c Σ_{i in c} z_i·(s_c - z_i),   s_c = Σ_{i in c} z_i, ‖z_i‖ = 1

    So a class of n texts takes n products, not n².
    """

    row_T: Tensor
    """(T,) row number of each labelled text in the embedding matrix."""
    class_T: Tensor
    """(T,) class number of each labelled text."""
    weight_C: Tensor
    """(C,) float64 weights of the classes, on the CPU, because not every device has float64."""

    def fits(self, columns: int) -> bool:
        return len(self.row_T) <= rows_a_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        sum_CD = self._sums(x_ND)
        return torch.stack([self._part(sum_CD, class_B, x_BD) for _, class_B, x_BD in self._blocks(x_ND)]).sum()[None]

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        sum_CD = self._sums(x_ND)
        for row_B, class_B, x_BD in self._blocks(x_ND):
            add_rows(into_ND, row_B, *pull_back(partial(self._part, sum_CD, class_B), (x_BD,), gradient_V[0]))

    def _part(self, sum_CD: Tensor, class_B: Tensor, x_BD: Tensor) -> Tensor:
        """Return the sum over a block. `sum_CD` has no graph: its gradient equals that of the first factor, hence 2."""
        weight_B = on_device(self.weight_C.to(x_BD.dtype), x_BD.device)[class_B]
        unit_BD, sum_BD = unit(x_BD), sum_CD[class_B]
        return (
            weight_B * ((unit_BD * (2 * sum_BD - unit_BD)).sum(dim=1) - (unit_BD.detach() * sum_BD).sum(dim=1))
        ).sum()

    @torch.no_grad()
    def _sums(self, x_ND: Tensor) -> Tensor:
        """Return the sum of the rows of length 1 of each class, (C, D)."""
        sum_CD = x_ND.new_zeros(len(self.weight_C), x_ND.shape[1])
        for _, class_B, x_BD in self._blocks(x_ND):
            add_rows(sum_CD, class_B, unit(x_BD))
        return sum_CD

    def _blocks(self, x_ND: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the row numbers, class numbers and embeddings of the texts of each block."""
        for block in slices(len(self.row_T), rows_a_side(x_ND.shape[1])):
            yield self.row_T[block], self.class_T[block], rows(x_ND, self.row_T[block])


@dataclass(frozen=True)
class ClassTerm(Term):
    """Supervised contrastive loss L_out (Khosla et al. 2020, arXiv 2004.11362, eq. 2), as a mean over A anchors, >= 0.

        L = 1/A Σ_i -1/|P(i)| Σ_{p in P(i)} log( exp(s_ip) / Σ_{a in A(i)} exp(s_ia) ),   s = cosine / temperature

    P(i) are the other texts with the class of text i; A(i) are all labelled texts except i, also the positives. A text
    without a positive is no anchor, but a negative of other texts. A text that occurs several times with a class is one
    text, so never its own positive. A text with two classes is an anchor of both, and one text of A(i).

    Pairs without a class (`Relation.label` -1) are ignored. Without an anchor, loss and gradient are 0. Memory: a gradient
    as large as the embeddings, a sum per class, and a block of similarities at a time (module `blocks`).
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
        anchor_A = row_T[texts_C[class_T] > 1]
        anchors = max(len(anchor_A), 1)
        # Σ_i 1/|P(i)| Σ_p cosine is a weighted sum over classes.
        weight_C = (texts_C > 1) / ((texts_C - 1).clamp(min=1) * anchors).double()
        cohesion = ClassCohesion(on_device(row_T, pairs.device), on_device(class_T, pairs.device), weight_C)
        # The log-sum-exp over A(i).
        candidate_C = torch.unique(row_T)
        skips = MaskIndices(*equal_entries(anchor_A, candidate_C))
        compared = on_device(anchor_A, pairs.device), on_device(candidate_C, pairs.device)
        others = NegativeLogSum(self.temperature, *compared, skips)

        def value(cohesion_1: Tensor, others_A: Tensor) -> Tensor:
            return others_A.sum() / anchors - cohesion_1.squeeze() / self.temperature

        return BatchTerm((cohesion, others), value)
