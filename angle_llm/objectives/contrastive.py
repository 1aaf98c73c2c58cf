"""Partners shall be closer than everyone else in the batch: the in-batch contrastive loss, over rows.

Shapes: N rows (unique texts), D columns, P scored pairs, M (anchor, positive) edges, A anchors, C candidates.

Rows are texts, and a text is one row however often it occurs. So all that the paper's detection of identical sentences
asks for holds by construction: a text is never its own negative, and its partners are positives wherever it occurs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.objectives.ranking import check_scores, check_temperature
from angle_llm.objectives.similarity import unit


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

    Memory: one A × C matrix of similarities, and a boolean one beside it. Source: arXiv 2309.12871, in-batch negative
    objective; ``symmetric`` and ``forward`` say how they relate to angle-emb 0.6.1.
    """
    check_temperature("temperature", temperature)
    check_scores(score_P)
    is_positive_P = (score_P > positive_above) & (left_P != right_P)
    edges = form(left_P, right_P, is_positive_P, len(embeddings_ND))
    anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor, return_inverse=True, return_counts=True)

    unit_ND = unit(embeddings_ND)
    attraction_M = (unit_ND[edges.anchor] * unit_ND[edges.positive]).sum(dim=1) / temperature
    similarity_AC = (unit_ND[anchor_A] / temperature) @ unit_ND[edges.candidate].T
    # In place: the product's backward does not need its result, and this is the one large matrix.
    similarity_AC.masked_fill_(_skipped(edges, anchor_A, len(embeddings_ND)), -math.inf)
    repulsion_A = similarity_AC.logsumexp(dim=1)

    loss_M: Tensor = -logsigmoid(attraction_M - repulsion_A[anchor_of_M])
    return loss_M.div(positives_A[anchor_of_M] * len(anchor_A)).sum()


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Edges, each once, ordered by anchor."""
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _skipped(edges: Comparison, anchor_A: Tensor, rows: int) -> Tensor:
    """True (A, C) where a candidate is the anchor itself or its partner, in whichever direction the pair was given."""
    index_A = _positions(anchor_A, rows)
    index_C = _positions(edges.candidate, rows)
    of = index_A[torch.cat((edges.anchor, edges.positive, anchor_A))]
    who = index_C[torch.cat((edges.positive, edges.anchor, anchor_A))]
    both = (of >= 0) & (who >= 0)
    skipped_AC = torch.zeros(len(anchor_A), len(edges.candidate), dtype=torch.bool, device=anchor_A.device)
    skipped_AC[of[both], who[both]] = True
    return skipped_AC


def _positions(row_K: Tensor, rows: int) -> Tensor:
    """Where each of the N rows stands in ``row_K``, -1 where it does not; shape (N,)."""
    position_N = torch.full((rows,), -1, device=row_K.device)
    position_N[row_K] = torch.arange(len(row_K), device=row_K.device)
    return position_N
