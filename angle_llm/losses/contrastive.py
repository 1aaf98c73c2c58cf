"""The in-batch contrastive loss: an anchor's positives are closer to it than the other rows of the batch.

Shapes: N rows (unique texts), D columns, P scored pairs, M (anchor, positive) edges, A anchors, C candidates, K pairs
of an anchor and a candidate that it skips. In blocks: a anchors, c candidates, and B blocks of candidates.

A text is one row however often it occurs. So the paper's detection of identical sentences holds by construction: a text
is never its own negative, and its partners are positives wherever it occurs. A text that is two rows, such as a query
and a document (`Relation.text`), is no negative of itself or of its partners either.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.losses.blocks import add_rows, pull_back, rows, slices, square_side
from angle_llm.losses.relation import Relation, on_device
from angle_llm.losses.similarity import unit


class Edges(NamedTuple):
    """Anchors with their positives, and the candidates for negatives, as row numbers of the embedding matrix."""

    anchor: Tensor
    """(M,) the anchor of each edge; edges are distinct and ordered by anchor."""
    positive: Tensor
    """(M,) the positive of each edge."""
    candidate: Tensor
    """(C,) rows that serve as negatives, distinct; an anchor skips itself and its partners."""


ContrastiveForm = Callable[[Relation, Tensor, int], Edges]
"""(relation, is_positive_P, rows N) -> Edges"""


def symmetric(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Return edges whose anchors are both ends of every positive pair; every row is a candidate.

    On pairs without repeated texts this is angle-emb 0.6.1's `in_batch_negative_loss` (arXiv 2309.12871, in-batch
    negative objective, with both directions), except for the mean: angle-emb divides by all 2P rows, of which those of
    label 0 add nothing; here the mean is over anchors, so the loss does not shrink when a batch holds fewer positives.
    """
    left_M, right_M = relation.left[is_positive_P], relation.right[is_positive_P]
    anchor_M, positive_M = _distinct(torch.cat((left_M, right_M)), torch.cat((right_M, left_M)), rows)
    return Edges(anchor_M, positive_M, torch.arange(rows, device=left_M.device))


def forward(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Return edges whose anchors are the left ends of positive pairs; rows on the right of any pair are candidates.

    Queries against [positives; hard negatives], as in supervised SimCSE (Gao et al. 2021) and angle-emb 0.6.1's
    `contrastive_with_negative_loss`. Queries do not repel each other. Where p is a partner only by (p, a, 1), p is
    neither a positive nor a negative of a.
    """
    anchor_M, positive_M = _distinct(relation.left[is_positive_P], relation.right[is_positive_P], rows)
    return Edges(anchor_M, positive_M, torch.unique(relation.right[relation.left != relation.right]))


CONTRASTIVE_FORMS: dict[str, ContrastiveForm] = {"symmetric": symmetric, "forward": forward}


@dataclass(frozen=True)
class Contrast:
    """Mean over anchors of the mean over their positives of the cross-entropy against their negatives; a scalar >= 0.

        loss_ap = -log( exp(s_ap) / (exp(s_ap) + Σ_k exp(s_ak)) ),   s = cosine / temperature

    A pair is positive if its score exceeds a threshold; the form (a value of `CONTRASTIVE_FORMS`) gives the anchors and
    the candidates. k runs over the candidates that are neither a nor a partner of a, in either direction and by text; so
    a pair given both as positive and as negative is positive. Pairs of a row with itself are dropped. An anchor's other
    positives are not in the denominator of loss_ap: there they do not repel.

    Without a positive pair the loss and its gradient are exactly 0, and `backward` works. An anchor without negatives
    adds 0 to the mean.

    The embeddings enter as two vectors: the cosine of every scored pair, and `repulsion`. Memory: one gradient as large
    as the embeddings, and a block (`blocks`) of the A × C similarities at a time.

    Source: arXiv 2309.12871, in-batch negative objective; `symmetric` and `forward` describe angle-emb 0.6.1's.
    """

    temperature: float
    pair_of_M: Tensor
    """A scored pair of the two rows of each edge."""
    anchor_of_M: Tensor
    """The anchor of each edge, as a position in A."""
    positives_A: Tensor
    """Number of edges of each anchor."""
    repulsion: "Repulsion"

    @classmethod
    def of(
        cls,
        relation: Relation,
        rows: int,
        temperature: float,
        positive_above: float,
        form: ContrastiveForm,
        device: torch.device,
    ) -> "Contrast":
        """Return the contrast of a relation on `rows` rows, for embeddings on a device."""
        is_positive_P = (relation.score > positive_above) & (relation.left != relation.right)
        edges = form(relation, is_positive_P, rows)
        anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor, return_inverse=True, return_counts=True)
        text_N = torch.arange(rows, device=relation.left.device)
        if relation.text is not None:
            text_N = torch.unique(relation.text, return_inverse=True)[1]
        skips = _skips(edges, anchor_A, text_N)
        repulsion = Repulsion(temperature, on_device(anchor_A, device), on_device(edges.candidate, device), *skips)
        pair_of_M, anchor_of_M, positives_A = (
            on_device(index, device) for index in (_pair_of_edge(edges, relation, rows), anchor_of_M, positives_A)
        )
        return cls(temperature, pair_of_M, anchor_of_M, positives_A, repulsion)

    def loss(self, cosine_P: Tensor, repulsion_A: Tensor) -> Tensor:
        """Return the loss, from the cosine of every scored pair and the value of `repulsion`."""
        attraction_M = cosine_P[self.pair_of_M] / self.temperature
        loss_M: Tensor = -logsigmoid(attraction_M - repulsion_A[self.anchor_of_M])
        return loss_M.div(self.positives_A[self.anchor_of_M] * len(self.positives_A)).sum()


@dataclass(frozen=True)
class Repulsion:
    """log Σ_k exp(cosine / temperature) of each anchor over the candidates k it does not skip, (A,); a `RowVector`."""

    temperature: float
    anchor_A: Tensor
    candidate_C: Tensor
    skipping_K: Tensor
    """On the device of the relation: position in A of an anchor …"""
    skipped_K: Tensor
    """… that skips the candidate at this position in C."""

    def fits(self, columns: int) -> bool:
        return max(len(self.anchor_A), len(self.candidate_C)) <= square_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        side = square_side(x_ND.shape[1])
        value_A = x_ND.new_empty(len(self.anchor_A))
        for a in slices(len(self.anchor_A), side):
            unit_aD = unit(rows(x_ND, self.anchor_A[a]))
            part_Ba = x_ND.new_empty(len(list(slices(len(self.candidate_C), side))), len(unit_aD))
            for part, (c, candidate_cD) in enumerate(self._candidates(x_ND)):
                part_Ba[part] = self._similarity(unit_aD, unit(candidate_cD), a, c).logsumexp(dim=1)
            value_A[a] = part_Ba.logsumexp(dim=0)
        return value_A

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        """Add the gradient: the derivative of a log-sum-exp by each of its terms s is exp(s - value)."""
        value_A = value_V.masked_fill(value_V == -math.inf, 0)  # no negatives: exp(-inf - 0) is 0
        for a in slices(len(self.anchor_A), square_side(x_ND.shape[1])):
            anchor_aD = rows(x_ND, self.anchor_A[a])
            unit_aD = unit(anchor_aD)
            to_unit_aD = torch.zeros_like(unit_aD)
            for c, candidate_cD in self._candidates(x_ND):
                unit_cD = unit(candidate_cD)
                similarity_ac = self._similarity(unit_aD, unit_cD, a, c)
                weight_ac = similarity_ac.sub_(value_A[a, None]).exp_().mul_(gradient_V[a, None] / self.temperature)
                to_unit_aD.addmm_(weight_ac, unit_cD)
                (to_candidate_cD,) = pull_back(unit, (candidate_cD,), weight_ac.T @ unit_aD)
                add_rows(into_ND, self.candidate_C[c], to_candidate_cD)
            (to_anchor_aD,) = pull_back(unit, (anchor_aD,), to_unit_aD)
            add_rows(into_ND, self.anchor_A[a], to_anchor_aD)

    def _candidates(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for c in slices(len(self.candidate_C), square_side(x_ND.shape[1])):
            yield c, rows(x_ND, self.candidate_C[c])

    def _similarity(self, unit_aD: Tensor, unit_cD: Tensor, a: slice, c: slice) -> Tensor:
        """Return the cosine / temperature of a block, (a, c); -inf where an anchor skips a candidate."""
        similarity_ac = (unit_aD / self.temperature) @ unit_cD.T
        row_K, column_K = self.skipping_K - a.start, self.skipped_K - c.start
        inside_K = (row_K >= 0) & (row_K < len(unit_aD)) & (column_K >= 0) & (column_K < len(unit_cD))
        # In place: the product's backward does not need its result, and this is the one large matrix.
        skip = tuple(on_device(index_K[inside_K], similarity_ac.device) for index_K in (row_K, column_K))
        similarity_ac[skip] = -math.inf
        return similarity_ac


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return edges, each once, ordered by anchor."""
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _pair_of_edge(edges: Edges, relation: Relation, rows: int) -> Tensor:
    """Return a scored pair of the two rows of each edge, (M,), in either direction."""

    def key(one: Tensor, other: Tensor) -> Tensor:
        return torch.minimum(one, other) * rows + torch.maximum(one, other)

    key_P, pair_P = key(relation.left, relation.right).sort(stable=True)
    return pair_P[torch.searchsorted(key_P, key(edges.anchor, edges.positive))]


def _skips(edges: Edges, anchor_A: Tensor, text_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of anchors in A and of candidates in C, (K,) each: an anchor skips the rows of its own text
    and of the texts of its partners, in either direction of the pair."""
    texts = int(text_N.max()) + 1 if len(text_N) else 1
    one = text_N[torch.cat((edges.anchor, edges.positive, anchor_A))]
    other = text_N[torch.cat((edges.positive, edges.anchor, anchor_A))]
    key = torch.unique(one * texts + other)
    skipping, link = equal_entries(text_N[anchor_A], key // texts)
    place, skipped = equal_entries((key % texts)[link], text_N[edges.candidate])
    return skipping[place], skipped


def equal_entries(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return all positions (i, j), (K,) each, with one[i] == other[j], ordered by i."""
    sorted_other, order = other.sort(stable=True)
    first = torch.searchsorted(sorted_other, one)
    count = torch.searchsorted(sorted_other, one, right=True) - first
    i = torch.arange(len(one), device=one.device).repeat_interleave(count)
    of_i = torch.arange(len(i), device=one.device) - (count.cumsum(0) - count)[i]
    return i, order[first[i] + of_i]
