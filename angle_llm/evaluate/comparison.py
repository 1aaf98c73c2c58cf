"""Is one model better than another? Both measured on the same pairs, compared pair by pair.

Two models err on the same pairs, so their figures move together, and the difference is surer than the two intervals let
one think. Both are therefore computed on the same bootstrap resamples, and the interval is that of the difference. As
everywhere in `resampling`, what varies is the choice of pairs: whether another training seed would give the same
difference takes other training runs to know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.correlation import UndefinedCorrelationError, spearman
from angle_llm.evaluate.resampling import (
    RESAMPLES,
    Interval,
    percentile_interval,
    resampled_spearman,
    two_sided_p,
)
from angle_llm.evaluate.sts import PairScores
from angle_llm.evaluate.tasks import PUBLISHED_TASKS


@dataclass(frozen=True)
class Difference:
    """Spearman × 100 (`all`) of one model and of the other, and one minus other: 95 % interval and two-sided p-value.

    NaN all along where a figure does not exist.
    """

    pairs: int
    spearman: float
    other: float
    difference: float
    interval: Interval
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """Differences by task name, and of the average over `averaged` (None when empty).

    `left_out` are the tasks only one of the two was measured on. p-values are of each task by itself: of seven tasks,
    one below 0.05 is no wonder.
    """

    tasks: dict[str, Difference]
    averaged: tuple[str, ...]
    average: Difference | None
    left_out: tuple[str, ...]
    resamples: int
    seed: int


def compare(
    ours: Mapping[str, PairScores], theirs: Mapping[str, PairScores], *, resamples: int = RESAMPLES, seed: int = 0
) -> Comparison:
    """How far `ours` is above `theirs` on every task that both have, and on the average of the published ones.

    Each task is resampled by itself, both models alike. Exchanging the two changes every sign and no p-value; two equal
    models differ by 0 with p-value 1.

    Raises `ValueError` when there is no common task, or the gold scores of one are not the same: other pairs, or in
    another order.
    """
    common = [name for name in ours if name in theirs]
    if not common:
        raise ValueError(
            f"no task in common: one has {', '.join(ours) or 'none'}, the other {', '.join(theirs) or 'none'}. "
            "Measure both on the same tasks."
        )
    figures_2 = {name: _both(name, ours[name], theirs[name]) for name in common}
    resampled_2B = {
        name: _resampled(name, ours[name], theirs[name], figures_2[name], resamples, seed) for name in common
    }
    averaged = tuple(name for name in PUBLISHED_TASKS if name in common)
    average = None
    if averaged:
        average = _difference(
            sum(len(ours[name].gold) for name in averaged),
            np.mean([figures_2[name] for name in averaged], axis=0),
            np.mean([resampled_2B[name] for name in averaged], axis=0),
        )
    return Comparison(
        tasks={name: _difference(len(ours[name].gold), figures_2[name], resampled_2B[name]) for name in common},
        averaged=averaged,
        average=average,
        left_out=tuple(name for name in (*ours, *theirs) if name not in common),
        resamples=resamples,
        seed=seed,
    )


def _both(name: str, ours: PairScores, theirs: PairScores) -> NDArray[np.float64]:
    if not np.array_equal(ours.gold, theirs.gold):
        raise ValueError(
            f"task {name!r}: the two were not measured on the same pairs ({len(ours.gold)} and {len(theirs.gold)} gold "
            "scores, not equal one by one). Measure both on the same files."
        )
    return np.array([_spearman_or_nan(ours), _spearman_or_nan(theirs)])


def _spearman_or_nan(scores: PairScores) -> float:
    try:
        return 100 * spearman(scores.cosine, scores.gold)
    except UndefinedCorrelationError:
        return math.nan


def _resampled(
    name: str, ours: PairScores, theirs: PairScores, figures_2: NDArray[np.float64], resamples: int, seed: int
) -> NDArray[np.float64]:
    if np.isnan(figures_2).any():
        return np.full((2, resamples), math.nan)
    cosines_2P = [ours.cosine, theirs.cosine]
    return 100 * resampled_spearman(cosines_2P, ours.gold, resamples=resamples, seed=seed, stream=name)


def _difference(pairs: int, figures_2: NDArray[np.float64], resampled_2B: NDArray[np.float64]) -> Difference:
    differences_B = resampled_2B[0] - resampled_2B[1]
    one, other = map(float, figures_2)
    return Difference(pairs, one, other, one - other, percentile_interval(differences_B), two_sided_p(differences_B))
