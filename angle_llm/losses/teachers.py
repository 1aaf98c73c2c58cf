"""Distillation losses: learn the scores that a teacher gives to the pairs of a group, or its vectors of the texts.

A group is the pairs of a query with its positives and negatives in an example.

Shapes: P scored pairs, Q groups, W pairs of the largest group, N rows, D columns, T columns of the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.losses.blocks import pull_back, rows_a_side, slices
from angle_llm.losses.relation import Relation, on_device
from angle_llm.losses.similarity import cosine


def kl_loss(score_P: Tensor, relation: Relation, teacher_temperature: float) -> Tensor:
    """Compute the distillation loss: mean KL divergence between teacher and student scores of each query's pairs.

        loss = mean over groups of KL(softmax(teacher / teacher_temperature) ‖ softmax(score)),   a scalar >= 0

    A group is the pairs of a query with its positives and negatives in a training example. `score_P` are student
    similarities divided by the temperature of the student. The softmax is over the pairs of a group that have a teacher
    score. Groups with fewer than two such pairs are skipped; without groups, loss and gradient are 0.

    Source: `DistillKLDivLoss` in sentence-transformers 6.2, which multiplies by the square of the student's
    temperature.
    """
    teacher_P, group_P = _scored(relation)
    pair_K = (~teacher_P.isnan()).nonzero().squeeze(1)
    _, group_K, size_Q = torch.unique(group_P[pair_K], return_inverse=True, return_counts=True)
    pair_K = pair_K[group_K.argsort(stable=True)]
    size_Q1, first_Q1 = size_Q[:, None], (size_Q.cumsum(0) - size_Q)[:, None]
    place_W = torch.arange(int(size_Q.max()) if len(size_Q) else 0, device=size_Q.device)
    compared_Q = size_Q >= 2
    in_group_QW = (place_W < size_Q1)[compared_Q]
    pair_QW = pair_K[(first_Q1 + place_W.clamp(max=size_Q1 - 1))[compared_Q]]
    teacher_QW = _log_softmax(teacher_P[pair_QW] / teacher_temperature, in_group_QW)
    pair_QW, in_group_QW, teacher_QW = (
        on_device(tensor, score_P.device) for tensor in (pair_QW, in_group_QW, teacher_QW.to(score_P.dtype))
    )
    difference_QW = teacher_QW - _log_softmax(score_P[pair_QW], in_group_QW)
    return (teacher_QW.exp() * difference_QW * in_group_QW).sum() / max(len(pair_QW), 1)


def _scored(relation: Relation) -> tuple[Tensor, Tensor]:
    """Return the teacher scores (P,) of the pairs, and the number of the training example (P,) of each pair.

    Raises:
        ValueError: if the relation has no teacher scores or no example numbers.
    """
    if relation.teacher is None or relation.group is None:
        raise ValueError(
            "kl_weight: expected a relation with teacher scores and groups, got none. Use data with scores, or set "
            "kl_weight to 0."
        )
    return relation.teacher, relation.group


def _log_softmax(x_QW: Tensor, in_group_QW: Tensor) -> Tensor:
    """Compute the log-softmax over the true entries of each row, shape (Q, W); 0 where `in_group_QW` is false.

    A row contains the pairs of a query; false entries are padding.
    """
    return x_QW.masked_fill(~in_group_QW, -torch.inf).log_softmax(dim=1).masked_fill(~in_group_QW, 0.0)


def cosine_distance(x_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Compute 1 - cosine between each embedding and the teacher vector of the same text, shape (N,)."""
    return 1 - cosine(x_ND, teacher_ND)


@dataclass(frozen=True)
class TeacherDistance:
    """1 - cosine between each embedding and the teacher vector of the same text, shape (N,); a `RowVector`.

    If D and T differ, only the first min(D, T) columns are compared. The mean over the rows equals `EmbedDistillLoss`
    of sentence-transformers 6.2 (arXiv 2301.12005, eq. 7 and 8).
    """

    teacher_NT: Tensor
    """(N, T) vectors of the texts from a teacher encoder, in the order of the embedding rows."""

    def fits(self, columns: int) -> bool:
        return len(self.teacher_NT) <= rows_a_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        value_N = x_ND.new_empty(len(x_ND))
        for block, x_BC, teacher_BC in self._blocks(x_ND):
            value_N[block] = cosine_distance(x_BC, teacher_BC)
        return value_N

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        for block, x_BC, teacher_BC in self._blocks(x_ND):
            distance = partial(cosine_distance, teacher_BC)  # the order of the arguments has no effect
            (gradient_BC,) = pull_back(distance, (x_BC,), gradient_V[block])
            into_ND[block, : gradient_BC.shape[1]] += gradient_BC

    def _blocks(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each block of rows its slice, and the compared columns of its embeddings and teacher vectors."""
        width = min(x_ND.shape[1], self.teacher_NT.shape[1])
        for block in slices(len(x_ND), rows_a_side(x_ND.shape[1])):
            teacher_BC = on_device(self.teacher_NT[block, :width], x_ND.device).to(x_ND.dtype)
            yield block, x_ND[block, :width], teacher_BC
