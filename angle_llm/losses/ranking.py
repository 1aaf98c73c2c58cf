"""Losses on the similarities of scored pairs: ranking (CoSENT) and regression.

Shapes: P scored pairs, R pairs whose score is above the score of at least one pair.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.similarity import Similarity
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


def ranking_loss(similarity_P: Tensor, score_P: Tensor, temperature: float) -> Tensor:
    """Compute the CoSENT ranking loss: pairs with a low score must be less similar than pairs with a high score.

        loss = log(1 + Σ exp((similarity_i - similarity_j) / temperature)),   sum over all i, j with score_i < score_j

    The result is a scalar >= 0. Only the order of the scores matters, so scores can be any finite numbers (0 to 1, 0 to
    5); pairs with equal scores are not compared. With fewer than two distinct scores, the loss and its gradient are
    exactly 0, and `backward` works.

    The sum over P² comparisons is a sum over j of exp(-similarity_j) times the sum of exp(similarity_i) over all pairs
    with a lower score. In order of score, the inner sum is a cumulative sum. So value and gradient take O(P log P) time
    and O(P) memory. All sums are log-sum-exp, so nothing overflows.

    Source: arXiv 2309.12871, cosine and angle objectives (eq. 1, 7); the loss is CoSENT (Su 2022). angle-emb 0.6.1
    (`cosine_loss`, `angle_loss`) builds the P × P matrix and multiplies by tau = 1 / temperature.
    """
    score_P, order_P = score_P.sort()
    below_P = torch.searchsorted(score_P, score_P)  # number of pairs with a strictly lower score; equal for ties
    ranked_R = below_P.nonzero().squeeze(1)
    order_P, ranked_R, below_R = (
        on_device(index, similarity_P.device) for index in (order_P, ranked_R, below_P[ranked_R] - 1)
    )
    logit_P = similarity_P[order_P] / temperature
    sum_up_to_P = logit_P.logcumsumexp(dim=0)
    violation_R = sum_up_to_P[below_R] - logit_P[ranked_R]
    return torch.nn.functional.pad(violation_R, (1, 0)).logsumexp(dim=0)  # the padded 0 is the 1 under the logarithm


def regression_loss(cosine_P: Tensor, score_P: Tensor) -> Tensor:
    """Compute the mean squared error between cosines and scores, Σ (cosine - score)² / P; 0 without pairs.

    The scores must be on the scale of the cosine: divide scores from 0 to 5 by 5.

    Source: the regression objective of SBERT (arXiv 1908.10084, section 3), `CosineSimilarityLoss` in
    sentence-transformers.

    Raises:
        ValueError: for a score outside of -1 .. 1.
    """
    beyond_P = score_P.abs() > 1
    if beyond_P.any():
        pair = int(beyond_P.int().argmax())
        raise ValueError(
            f"regression: expected scores from -1 to 1, the range of a cosine; got {score_P[pair].item()} for pair {pair}. "
            "Rescale the scores (data.score_range), or set regression_weight to 0."
        )
    return (cosine_P - on_device(score_P, cosine_P.device)).square().sum() / max(len(score_P), 1)


@dataclass(frozen=True)
class RankingTerm(Term):
    """`ranking_loss` of the similarities of the scored pairs."""

    name: str
    weight: float
    similarity: Similarity
    temperature: float

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        value = partial(ranking_loss, score_P=pairs.relation.score, temperature=self.temperature)
        return BatchTerm((pairs.similarities(self.similarity),), value)


@dataclass(frozen=True)
class RegressionTerm(Term):
    """`regression_loss` of the cosines of the scored pairs."""

    weight: float
    name: str = "regression"

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        return BatchTerm((pairs.similarities(),), partial(regression_loss, score_P=pairs.relation.score))
