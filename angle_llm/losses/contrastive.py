"""Partners shall be closer than everyone else in the batch: the in-batch contrastive loss, over rows.

Shapes: N rows (unique texts), D columns, P scored pairs, M (anchor, positive) edges, A anchors, C candidates, K cases of
a candidate that an anchor skips. In blocks: a anchors, c candidates, and B blocks of candidates.

Rows are texts, and a text is one row however often it occurs. So all that the paper's detection of identical sentences
asks for holds by construction: a text is never its own negative, and its partners are positives wherever it occurs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.losses.blocks import PairSimilarity, add_rows, from_rows, pull_back, rows, slices, square_side
from angle_llm.losses.ranking import check_scores, check_temperature
from angle_llm.losses.similarity import cosine, unit


class Comparison(NamedTuple):
    """Who is compared with whom, in rows of the embedding matrix."""

    anchor: Tensor  # (M,) edges, each once and ordered by anchor: this row ...
    positive: Tensor  # (M,) ... shall be close to this one
    candidate: Tensor  # (C,) rows that serve as negatives, each once; an anchor skips itself and its partners


ContrastiveForm = Callable[[Tensor, Tensor, Tensor, int], Comparison]
"""(left_P, right_P, is_positive_P, rows N) -> Comparison"""


def symmetric(left_P: Tensor, right_P: Tensor, is_positive_P: Tensor, rows: int) -> Comparison:
    """Both ends of every positive pair are anchors, and every row is a candidate.

    On pairs without repeated texts this is angle-emb 0.6.1's ``in_batch_negative_loss`` (arXiv 2309.12871, in-batch
    negative objective, with both directions), except for the mean: angle-emb divides by all 2P rows, of which those of
    label 0 add nothing; here the mean is over anchors, so the loss does not shrink when a batch holds fewer positives.
    """
    left_M, right_M = left_P[is_positive_P], right_P[is_positive_P]
    anchor_M, positive_M = _distinct(torch.cat((left_M, right_M)), torch.cat((right_M, left_M)), rows)
    return Comparison(anchor_M, positive_M, torch.arange(rows, device=left_P.device))


def forward(left_P: Tensor, right_P: Tensor, is_positive_P: Tensor, rows: int) -> Comparison:
    """The left end of every positive pair is an anchor; rows on the right of any pair are candidates.

    Queries against [positives; hard negatives], as in supervised SimCSE (Gao et al. 2021) and angle-emb 0.6.1's
    ``contrastive_with_negative_loss``. Queries do not repel each other. Where p is a partner only by (p, a, 1), p is
    neither a positive nor a negative of a.
    """
    two_ends_P = left_P != right_P
    anchor_M, positive_M = _distinct(left_P[is_positive_P], right_P[is_positive_P], rows)
    return Comparison(anchor_M, positive_M, torch.unique(right_P[two_ends_P]))


CONTRASTIVE_FORMS: dict[str, ContrastiveForm] = {"symmetric": symmetric, "forward": forward}


def contrastive_loss(
    embeddings_ND: Tensor,
    left_P: Tensor,
    right_P: Tensor,
    score_P: Tensor,
    *,
    temperature: float,
    positive_above: float,
    form: ContrastiveForm,
) -> Tensor:
    """Mean over anchors of the mean over their positives of the cross-entropy against their negatives; a scalar >= 0.

        loss_ap = -log( exp(s_ap) / (exp(s_ap) + Σ_k exp(s_ak)) ),   s = cosine / temperature

    A pair is positive if its score exceeds ``positive_above``; ``form`` (a value of ``CONTRASTIVE_FORMS``) says which
    rows are anchors and candidates. k runs over the candidates that are neither a nor a partner of a, in either
    direction; so a pair given both as positive and as negative is positive. Pairs of a row with itself say nothing and
    are dropped. An anchor's other positives are not in the denominator of loss_ap: there they do not repel.

    Without a positive pair the loss is exactly 0, its gradient too, and ``backward`` works. An anchor without negatives
    adds 0 to the mean.

    Raises ``ValueError`` if a score is NaN or infinite, or the temperature is not a positive number.

    Memory: one gradient as large as the embeddings, and a block (``blocks``) of the A × C similarities at a time.
    Source: arXiv 2309.12871, in-batch negative objective; ``symmetric`` and ``forward`` say how they relate to
    angle-emb 0.6.1.
    """
    contrast = Contrast.of(
        left_P, right_P, score_P, len(embeddings_ND), temperature=temperature, positive_above=positive_above, form=form
    )
    return contrast.loss(*from_rows(embeddings_ND, PairSimilarity(cosine, left_P, right_P), contrast.repulsion))


@dataclass(frozen=True)
class Contrast:
    """What the loss takes from the relation; the embeddings come in as two vectors."""

    temperature: float
    pair_M: Tensor  # the scored pair each edge comes from
    anchor_of_M: Tensor  # an edge's anchor, counted in A
    positives_A: Tensor  # how many edges each anchor has
    repulsion: "Repulsion"

    @classmethod
    def of(
        cls,
        left_P: Tensor,
        right_P: Tensor,
        score_P: Tensor,
        rows: int,
        *,
        temperature: float,
        positive_above: float,
        form: ContrastiveForm,
    ) -> "Contrast":
        """The arguments of ``contrastive_loss``, and the number of rows in place of the rows."""
        check_temperature("temperature", temperature)
        check_scores(score_P)
        is_positive_P = (score_P > positive_above) & (left_P != right_P)
        edges = form(left_P, right_P, is_positive_P, rows)
        anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor, return_inverse=True, return_counts=True)
        repulsion = Repulsion(temperature, anchor_A, edges.candidate, *_skips(edges, anchor_A, rows))
        pair_M = _pairs(edges, left_P, right_P, rows)
        return cls(temperature, pair_M, anchor_of_M, positives_A, repulsion)

    def loss(self, cosine_P: Tensor, repulsion_A: Tensor) -> Tensor:
        """The mean, from the cosine of every scored pair and the value of ``repulsion``."""
        attraction_M = cosine_P[self.pair_M] / self.temperature
        loss_M: Tensor = -logsigmoid(attraction_M - repulsion_A[self.anchor_of_M])
        return loss_M.div(self.positives_A[self.anchor_of_M] * len(self.positives_A)).sum()


@dataclass(frozen=True)
class Repulsion:
    """log Σ_k exp(cosine / temperature) of each anchor over the candidates k it does not skip, (A,); a ``RowVector``."""

    temperature: float
    anchor_A: Tensor
    candidate_C: Tensor
    skipping_K: Tensor  # this anchor, counted in A ...
    skipped_K: Tensor  # ... skips this candidate, counted in C

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
        """A log-sum-exp sends back to each of its terms s: exp(s - value) of what it receives."""
        value_A = value_V.masked_fill(value_V == -math.inf, 0)  # nobody to repel: exp(-inf - 0) is 0 as it should be
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
        """Cosine / temperature of a block, (a, c); -inf where an anchor skips a candidate."""
        similarity_ac = (unit_aD / self.temperature) @ unit_cD.T
        of_K, who_K = self.skipping_K - a.start, self.skipped_K - c.start
        here_K = (of_K >= 0) & (of_K < len(unit_aD)) & (who_K >= 0) & (who_K < len(unit_cD))
        # In place: the product's backward does not need its result, and this is the one large matrix.
        similarity_ac[of_K[here_K], who_K[here_K]] = -math.inf
        return similarity_ac


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Edges, each once, ordered by anchor."""
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _pairs(edges: Comparison, left_P: Tensor, right_P: Tensor, rows: int) -> Tensor:
    """A scored pair of the two rows of each edge, (M,), in whichever direction it was given."""

    def key(one: Tensor, other: Tensor) -> Tensor:
        return torch.minimum(one, other) * rows + torch.maximum(one, other)

    key_P, pair_P = key(left_P, right_P).sort(stable=True)
    return pair_P[torch.searchsorted(key_P, key(edges.anchor, edges.positive))]


def _skips(edges: Comparison, anchor_A: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Anchors, counted in A, and candidates, counted in C, (K,) each: the anchor itself and its partners, in whichever
    direction the pair was given."""
    index_A = _positions(anchor_A, rows)
    index_C = _positions(edges.candidate, rows)
    of = index_A[torch.cat((edges.anchor, edges.positive, anchor_A))]
    who = index_C[torch.cat((edges.positive, edges.anchor, anchor_A))]
    both = (of >= 0) & (who >= 0)
    return of[both], who[both]


def _positions(row_K: Tensor, rows: int) -> Tensor:
    """Where each of the N rows stands in ``row_K``, -1 where it does not; shape (N,)."""
    position_N = torch.full((rows,), -1, device=row_K.device)
    position_N[row_K] = torch.arange(len(row_K), device=row_K.device)
    return position_N
