"""Distillation losses: learn a teacher's scores of the pairs of a group, its vectors, or the cosines of its vectors.

A group is the pairs of a query with its positives and negatives in an example.

Shapes: P scored pairs, Q groups, W pairs of the largest group, N rows, D columns, T columns of the teacher. In a block: a
rows, compared with c rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import WholeMatrix, pull_back, slices, square_side
from angle_llm.losses.contrastive import equal_entries
from angle_llm.losses.negatives import MaskIndices, NegativeLogSum
from angle_llm.losses.relation import Relation
from angle_llm.losses.similarity import cosine, unit
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


def kl_loss(cosine_P: Tensor, relation: Relation, temperature: float, teacher_temperature: float) -> Tensor:
    """Compute the distillation loss: mean KL divergence between teacher and student scores of each query's pairs.

        loss = mean over groups of KL(softmax(teacher / teacher_temperature) ‖ softmax(cosine / temperature)),   >= 0

    A group is the pairs of a query with its positives and negatives in a training example. The softmax is over the pairs
    of a group that have a teacher score. Groups with fewer than two such pairs are skipped; without groups, loss and
    gradient are 0.

    Source: `DistillKLDivLoss` in sentence-transformers 6.2, which multiplies by the square of the student's temperature.
    """
    teacher_P, group_P = (relation.required(name, "kl_weight") for name in ("teacher", "group"))
    # K pairs with a teacher score, ordered by group.
    pair_K = (~teacher_P.isnan()).nonzero().squeeze(1)
    _, group_K, size_Q = torch.unique(group_P[pair_K], return_inverse=True, return_counts=True)
    pair_K = pair_K[group_K.argsort(stable=True)]
    # Matrices with a row per group of at least two pairs. In a shorter row, the last pair is repeated, outside `in_group`.
    size_Q1, first_Q1 = size_Q[:, None], (size_Q.cumsum(0) - size_Q)[:, None]
    column_W = torch.arange(int(size_Q.max()) if len(size_Q) else 0, device=size_Q.device)
    compared_Q = size_Q >= 2
    in_group_QW = (column_W < size_Q1)[compared_Q]
    pair_QW = pair_K[(first_Q1 + column_W.clamp(max=size_Q1 - 1))[compared_Q]]
    teacher_QW = _log_softmax(teacher_P[pair_QW] / teacher_temperature, in_group_QW)
    pair_QW, in_group_QW, teacher_QW = (
        on_device(tensor, cosine_P.device) for tensor in (pair_QW, in_group_QW, teacher_QW.to(cosine_P.dtype))
    )
    difference_QW = teacher_QW - _log_softmax(cosine_P[pair_QW] / temperature, in_group_QW)
    return (teacher_QW.exp() * difference_QW * in_group_QW).sum() / max(len(pair_QW), 1)


def _log_softmax(x_QW: Tensor, in_group_QW: Tensor) -> Tensor:
    """Compute the log-softmax over the true entries of each row, shape (Q, W); 0 where `in_group_QW` is false.

    A row contains the pairs of a query; false entries are padding.
    """
    return x_QW.masked_fill(~in_group_QW, -torch.inf).log_softmax(dim=1).masked_fill(~in_group_QW, 0.0)


def margin_mse_loss(cosine_P: Tensor, relation: Relation, teacher_scale: float, positive_above: float) -> Tensor:
    """Compute the mean squared difference of the student's and the teacher's margins, a scalar.

    A margin is the score of a positive minus the score of a negative of the same query and training example. Margins of
    the teacher are multiplied by `teacher_scale`. Pairs without a teacher score are skipped; without margins, loss and
    gradient are 0.

    Source: Hofstätter et al., arXiv 2010.02666; `MarginMSELoss` in sentence-transformers 6.2 with
    `similarity_fct=pairwise_cos_sim`.
    """
    teacher_P, group_P = (relation.required(name, "margin_mse_weight") for name in ("teacher", "group"))
    positive_P = relation.score > positive_above
    positives, negatives = ((~teacher_P.isnan() & side).nonzero().squeeze(1) for side in (positive_P, ~positive_P))
    i, j = equal_entries(group_P[positives], group_P[negatives])
    positive_M, negative_M = positives[i], negatives[j]
    teacher_M = on_device((teacher_P[positive_M] - teacher_P[negative_M]) * teacher_scale, cosine_P.device)
    positive_M, negative_M = on_device(positive_M, cosine_P.device), on_device(negative_M, cosine_P.device)
    return mean_of_rows((cosine_P[positive_M] - cosine_P[negative_M] - teacher_M.to(cosine_P.dtype)).square())


@dataclass(frozen=True, eq=False)
class _TeacherExpectation:
    """Part of the KL divergence between teacher and model that is a sum over the teacher's probabilities; a `RowVector`.

        value_i = Σ_j p_ij · (log p_ij - cosine(x_i, x_j) / temperature),   shape (N,)

    p_ij is the softmax of the teacher's cosines. The sum is over the rows j with another text than row i. The
    divergence is this value plus the log-sum-exp of the model's logits.
    """

    temperature: float
    teacher_NT: Tensor
    """(N, T) vectors of the teacher, scaled to length 1 and divided by the square root of its temperature."""
    log_sum_N: Tensor
    """(N,) log-sum-exp of the teacher's logits of each text."""
    skips: MaskIndices
    """Pairs of rows with the same text, as indices into a matrix (N, N)."""

    def fits(self, columns: int) -> bool:
        return len(self.teacher_NT) <= square_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        value_N = x_ND.new_zeros(len(x_ND))
        for a, c, function in self._blocks(x_ND):
            value_N[a] += function(x_ND[a], x_ND[c])
        return value_N

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        for a, c, function in self._blocks(x_ND):
            for block, gradient in zip((a, c), pull_back(function, (x_ND[a], x_ND[c]), gradient_V[a]), strict=True):
                into_ND[block] += gradient

    def _blocks(self, x_ND: Tensor) -> Iterator[tuple[slice, slice, Callable[[Tensor, Tensor], Tensor]]]:
        """Yield row slices a and c, and a function of x[a] and x[c] that returns their part of the sums, (a,)."""
        side = square_side(max(x_ND.shape[1], self.teacher_NT.shape[1]))
        for a in slices(len(x_ND), side):
            for c in slices(len(x_ND), side):
                log_p_ac = self.teacher_NT[a] @ self.teacher_NT[c].T - self.log_sum_N[a, None]
                p_ac = log_p_ac.exp()
                p_ac[self.skips.inside(a, c, x_ND.device)] = 0
                yield a, c, partial(self._part, p_ac, log_p_ac)

    def _part(self, p_ac: Tensor, log_p_ac: Tensor, x_aD: Tensor, x_cD: Tensor) -> Tensor:
        """Return the sum of p · (log p - cosine / temperature) over the columns of a block, shape (a,)."""
        return (p_ac * (log_p_ac - unit(x_aD) / self.temperature @ unit(x_cD).T)).sum(dim=1)


@dataclass(frozen=True)
class TeacherScoreTerm(Term):
    """A loss of the cosines of the scored pairs and the teacher scores: `kl_loss` or `margin_mse_loss`."""

    name: str
    weight: float
    loss: Callable[[Tensor, Relation], Tensor]
    needs: frozenset[str] = frozenset({"teacher", "group"})

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        return BatchTerm((pairs.similarities(),), lambda cosine_P: self.loss(cosine_P, pairs.relation))


@dataclass(frozen=True)
class TeacherVectorTerm(Term):
    """Mean over the texts of 1 - cosine between embedding and teacher vector.

    If the dimensions differ, only the first columns that both have are compared. Equals `EmbedDistillLoss`
    of sentence-transformers 6.2 (arXiv 2301.12005, eq. 7 and 8).
    """

    weight: float
    name: str = "teacher_vector"
    needs_pairs: bool = False
    needs: frozenset[str] = frozenset({"teacher_vectors"})

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        teacher_NT = pairs.relation.required("teacher_vectors", "teacher_vector_weight")

        def distance(x_ND: Tensor) -> Tensor:
            width = min(x_ND.shape[1], teacher_NT.shape[1])
            first_ND = on_device(teacher_NT[:, :width], x_ND.device).to(x_ND.dtype)
            return mean_of_rows(1 - cosine(x_ND[:, :width], first_ND))

        return BatchTerm((WholeMatrix(distance),), torch.squeeze)


@dataclass(frozen=True)
class TeacherSimilarityTerm(Term):
    """Mean KL divergence between teacher and model of the softmax over the cosines of a text to all other texts.

        loss = mean over texts i of KL(softmax_j(cos(t_i, t_j) / teacher_temperature) ‖ softmax_j(cos(x_i, x_j) / temperature))

    The softmax is over the rows j with another text than row i. Teacher vectors can have any number of
    dimensions. The divergence is the sum of two vectors that are computed in blocks, so no matrix (N, N) is stored. With
    fewer than two texts, loss and gradient are 0.

    Source: RankCSE (arXiv 2305.16726), ListNet, with the entropy of the teacher subtracted (its gradient is 0), and
    without the text itself.
    """

    weight: float
    temperature: float
    teacher_temperature: float
    name: str = "teacher_similarity"
    needs_pairs: bool = False
    needs: frozenset[str] = frozenset({"teacher_vectors"})

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        vectors_NT = pairs.relation.required("teacher_vectors", "teacher_similarity_weight")
        teacher_NT = unit(on_device(vectors_NT, pairs.device))
        # Each row is compared with all rows that have another text.
        all_N = on_device(torch.arange(pairs.rows), pairs.device)
        text_N = pairs.relation.text_numbers(pairs.rows)
        skips = MaskIndices(*equal_entries(text_N, text_N))
        teacher_log_sum_N = NegativeLogSum(self.teacher_temperature, all_N, all_N, skips).value(teacher_NT)
        scaled_NT = teacher_NT / self.teacher_temperature**0.5
        expectation = _TeacherExpectation(self.temperature, scaled_NT, teacher_log_sum_N, skips)
        model_log_sum = NegativeLogSum(self.temperature, all_N, all_N, skips)
        alone_N = teacher_log_sum_N == -torch.inf  # rows to which no other text is compared: loss 0

        def value(expectation_N: Tensor, model_log_sum_N: Tensor) -> Tensor:
            # KL = Σ p (log p - cos / temperature) + log Σ exp(cos / temperature), with the softmax p of the teacher.
            return mean_of_rows((expectation_N + model_log_sum_N).masked_fill(alone_N, 0.0))

        return BatchTerm((expectation, model_log_sum), value)


def mean_of_rows(value_N: Tensor) -> Tensor:
    """Return the mean of a vector, a scalar; 0 for an empty vector."""
    return value_N.sum() / max(len(value_N), 1)
