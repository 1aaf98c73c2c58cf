"""The cosine of a pair shall be its score: regression on cosine similarity.

Shapes: P scored pairs.
"""

from torch import Tensor

from angle_llm.losses.ranking import check_scores


def regression_loss(cosine_P: Tensor, score_P: Tensor) -> Tensor:
    """Σ (cosine - score)² / P, the mean over pairs; a scalar >= 0. Without pairs it is exactly 0, and ``backward`` works.

    Unlike the ranking loss it looks at the scores themselves, so they have to be on the cosine's scale: grades of 0 to 5
    are divided by 5 first.

    Raises ``ValueError`` if a score is NaN or infinite, or lies outside of -1 .. 1, where no cosine can reach it.

    Source: SBERT's regression objective (arXiv 1908.10084, section 3), ``CosineSimilarityLoss`` in sentence-transformers.
    """
    check_scores(score_P)
    beyond_P = score_P.abs() > 1
    if beyond_P.any():
        pair = int(beyond_P.int().argmax())
        raise ValueError(
            f"The regression term needs scores from -1 to 1, as cosines are; pair {pair} has {score_P[pair].item()}. "
            "Rescale them (setting data.score_range), or set regression_weight to 0."
        )
    return (cosine_P - score_P).square().sum() / max(len(score_P), 1)
