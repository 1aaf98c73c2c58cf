"""Losses against a teacher: its scores of the pairs of a group, or its vectors of the texts.

Shapes: P scored pairs, Q groups, W pairs of the largest group, N rows, D columns, T columns of the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.losses.blocks import pull_back, rows_a_side, slices
from angle_llm.losses.contrastive import equal_entries
from angle_llm.losses.relation import Relation, on_device
from angle_llm.losses.similarity import Similarity, cosine


def dot(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Return x·y, shape (P,)."""
    return (left_PD * right_PD).sum(dim=1)


SCORE_SIMILARITIES: dict[str, Similarity] = {"cosine": cosine, "dot": dot}


def kl_loss(score_P: Tensor, relation: Relation, teacher_temperature: float) -> Tensor:
    """Return the mean over groups of KL(softmax(teacher / temperature) ‖ softmax(score)), a scalar >= 0.

    `score_P` are similarities divided by the temperature of the student. A softmax is over the pairs of a group with a
    teacher score. Groups with fewer than two of them are skipped; without groups the loss and its gradient are 0.

    Source: `DistillKLDivLoss` in sentence-transformers 6.2, which multiplies by the square of the student's temperature.
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


def margin_mse_loss(score_P: Tensor, relation: Relation, teacher_temperature: float, positive_above: float) -> Tensor:
    """Return the mean of ((s_p - s_n) - (t_p - t_n) / temperature)² over the positives p and negatives n of each group.

    `score_P` are similarities divided by the temperature of the student, t the teacher scores; a pair is positive if its
    own score is above a threshold. Pairs without a teacher score are skipped; without a comparison the loss is 0.

    Source: arXiv 2010.02666, `MarginMSELoss` in sentence-transformers 6.2.
    """
    teacher_P, group_P = _scored(relation)
    has_teacher_P = ~teacher_P.isnan()
    is_positive_P = relation.score > positive_above
    positive, negative = (has_teacher_P & is_positive_P).nonzero(), (has_teacher_P & ~is_positive_P).nonzero()
    of_positive, of_negative = equal_entries(group_P[positive[:, 0]], group_P[negative[:, 0]])
    positive, negative = positive[of_positive, 0], negative[of_negative, 0]
    margin = (teacher_P[positive] - teacher_P[negative]) / teacher_temperature
    positive, negative, margin = (on_device(tensor, score_P.device) for tensor in (positive, negative, margin))
    error = score_P[positive] - score_P[negative] - margin
    return error.square().sum() / max(len(error), 1)


def _scored(relation: Relation) -> tuple[Tensor, Tensor]:
    if relation.teacher is None or relation.group is None:
        raise ValueError(
            "kl_weight, margin_mse_weight: expected a relation with teacher scores and groups, got none. Use data with "
            "scores, or set these weights to 0."
        )
    return relation.teacher, relation.group


def _log_softmax(x_QW: Tensor, in_group_QW: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the pairs of each group, 0 for padding."""
    return x_QW.masked_fill(~in_group_QW, -torch.inf).log_softmax(dim=1).masked_fill(~in_group_QW, 0.0)


def cosine_distance(x_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Return 1 - cosine of each row, (N,)."""
    return 1 - cosine(x_ND, teacher_ND)


def squared_distance(x_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Return the mean squared difference of each row, (N,)."""
    return (x_ND - teacher_ND).square().mean(dim=1)


VECTOR_DISTANCES: dict[str, Similarity] = {"cosine": cosine_distance, "mse": squared_distance}


def split_projection(x_NC: Tensor, relation: Relation) -> tuple[Tensor, Tensor]:
    """Return the vectors (N, D) and their projections (N, T) of rows that hold both, T being the width of the teacher.

    Rows without a projection are not noticed if they are longer than the vectors of the teacher.

    Raises:
        ValueError: without teacher vectors in the relation, or for rows that are too short to hold both.
    """
    if relation.teacher_vectors is None:
        raise ValueError("teacher_projection: expected teacher vectors in the relation, got none.")
    width = relation.teacher_vectors.shape[1]
    if width >= x_NC.shape[1]:
        raise ValueError(
            f"teacher_projection: expected rows of a vector and its projection to the {width} columns of the teacher; got "
            f"{x_NC.shape[1]} columns. Call add_projection on the model first."
        )
    return x_NC[:, :-width], x_NC[:, -width:]


@dataclass(frozen=True)
class TeacherDistance:
    """Distance of each row to the teacher's vector of its text, (N,); a `RowVector`.

    The narrower of both decides how many leading columns are compared. The mean over the rows equals `EmbedDistillLoss`
    of sentence-transformers 6.2 (arXiv 2301.12005, eq. 7 and 8), with its projection if the rows are projected ones.
    """

    distance: Similarity
    """A value of `VECTOR_DISTANCES`."""
    teacher_NT: Tensor

    def fits(self, columns: int) -> bool:
        return len(self.teacher_NT) <= rows_a_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        value_N = x_ND.new_empty(len(x_ND))
        for block, x_BC, teacher_BC in self._blocks(x_ND):
            value_N[block] = self.distance(x_BC, teacher_BC)
        return value_N

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        for block, x_BC, teacher_BC in self._blocks(x_ND):
            distance = partial(self.distance, teacher_BC)  # symmetric
            (gradient_BC,) = pull_back(distance, (x_BC,), gradient_V[block])
            into_ND[block, : gradient_BC.shape[1]] += gradient_BC

    def _blocks(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        width = min(x_ND.shape[1], self.teacher_NT.shape[1])
        for block in slices(len(x_ND), rows_a_side(x_ND.shape[1])):
            teacher_BC = on_device(self.teacher_NT[block, :width], x_ND.device).to(x_ND.dtype)
            yield block, x_ND[block, :width], teacher_BC
