"""Pairs with a higher score shall be more similar: the ranking loss of CoSENT, in sorted order.

Shapes: P scored pairs, R pairs that rank above at least one other.
"""

import math

import torch
from torch import Tensor


def ranking_loss(similarity_P: Tensor, score_P: Tensor, temperature: float) -> Tensor:
    """log(1 + Σ exp((similarity_i - similarity_j) / temperature)) over all i, j with score_i < score_j; a scalar >= 0.

    The sum over P² comparisons separates into a product: for each j, exp(-similarity_j) times the sum of
    exp(similarity_i) over the pairs scored lower. Sorted by score, that sum is a cumulative one, so value and gradient
    of the full sum take O(P log P) time and O(P) memory; nothing overflows, as all stays in logarithms.

    Only the order of the scores counts, so they may be any finite numbers (0-1, 0-5); equal scores are not compared.
    With fewer than two distinct scores there is nothing to rank: the loss is exactly 0, its gradient too, and
    ``backward`` works.

    Raises ``ValueError`` if a score is NaN or infinite, the shapes differ, or the temperature is not a positive number.

    Source: arXiv 2309.12871, cosine and angle objectives (eq. 8); the loss is CoSENT (Su 2022). angle-emb 0.6.1
    (``cosine_loss``, ``angle_loss``) builds the P × P matrix and multiplies by tau = 1 / temperature.
    """
    check_temperature("temperature", temperature)
    check_scores(score_P)
    if similarity_P.shape != score_P.shape or similarity_P.ndim != 1:
        raise ValueError(
            "The ranking loss needs one similarity and one score per pair, both of shape (P,); got similarities of "
            f"shape {tuple(similarity_P.shape)} and scores of shape {tuple(score_P.shape)}."
        )
    score_P, order_P = score_P.sort()
    logit_P = similarity_P[order_P] / temperature
    below_P = torch.searchsorted(score_P, score_P)  # how many pairs score strictly less; ties share the number
    sum_up_to_P = logit_P.logcumsumexp(dim=0)

    ranked_P = below_P > 0
    violation_R = sum_up_to_P[below_P[ranked_P] - 1] - logit_P[ranked_P]
    return torch.nn.functional.pad(violation_R, (1, 0)).logsumexp(dim=0)  # the padded 0 is the 1 under the logarithm


def check_scores(score_P: Tensor) -> None:
    """Raise ``ValueError`` naming the first pair whose score is no finite number."""
    finite_P = score_P.isfinite()
    if not finite_P.all():
        pair = int((~finite_P).int().argmax())
        raise ValueError(
            f"Every pair needs a finite score; pair {pair} has {score_P[pair].item()}. "
            "Look for empty or non-numeric score cells in the data, and drop or fix those rows."
        )


def check_temperature(name: str, temperature: float) -> None:
    """Raise ``ValueError`` unless the temperature is finite and greater than 0."""
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"{name} must be a finite number greater than 0, as similarities are divided by it; got {temperature!r}. "
            "angle-emb's tau multiplies instead: tau 20 there is a temperature of 1/20 = 0.05 here."
        )
