"""Correlations, percentile bootstrap intervals over test items, and paired comparison of two models.

A test item is a pair, a query or an example. The bootstrap draws as many items as the test has, with replacement, and
computes the metric again (Efron & Tibshirani 1993, chapter 13). An interval covers the choice of independent test
items. It does not cover another training seed, prompt, training dataset or kind of task.

Two models make errors on the same items, so their intervals can overlap although the difference is clear. `compare` and
`mean_difference` use the same resamples for both models, and return the interval and p-value of the difference.

A resample is a vector of counts: how often each item is drawn. Metrics are computed from counts, for a block of
resamples at once. Counts depend only on the number of items, the number of resamples, the seed and `stream` (a name,
such as the task). So models share resamples, and the interval of a task does not depend on other tasks.

Dimensions: P items, B resamples, M models, K distinct values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from angle_llm.evaluate.encoding import RESAMPLES
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS

CONFIDENCE = 0.95
"""Confidence level of all intervals."""

_BLOCK = 128  # resamples computed at once: 128 × 4,000 numbers fit in the cache
_EQUAL_TOLERANCE = 1e-13  # largest range, relative to the largest value, of a list whose values count as equal

Floats = NDArray[np.float64]


class UndefinedCorrelationError(ValueError):
    """Error for a correlation that has no value, such as for constant scores; the message gives the reason."""


class PairScores(NamedTuple):
    """Cosine similarities (P,), gold scores (P,) and names of sub-tasks (P,) of the P sentence pairs of an STS task."""

    cosine: Floats
    gold: Floats
    subtask: NDArray[np.str_] | None = None

    def by_subtask(self) -> dict[str, PairScores]:
        """Return the scores of each sub-task by its name, in order of first appearance; {} without sub-tasks."""
        if self.subtask is None:
            return {}
        names = dict.fromkeys(self.subtask.tolist())
        return {name: PairScores(*(values_P[self.subtask == name] for values_P in self[:2])) for name in names}


@dataclass(frozen=True)
class Interval:
    """Ends of the 95 % confidence interval of a metric; NaN if the metric is undefined in a bootstrap resample."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Metric of two models on the same test items, such as Spearman × 100 on sentence pairs, and their difference.

    `items` is the number of items, `value` the metric of the first model, `other` the metric of the second model, and
    `difference` is `value - other`. `interval` is the 95 % interval of the difference, and `p_value` its two-sided
    p-value. The difference, its interval and its p-value are NaN if a correlation is undefined.
    """

    items: int
    value: float
    other: float
    difference: float
    interval: Interval
    p_value: float


@dataclass(frozen=True)
class PairedDifferences:
    """Differences in Spearman between two models, by STS task and on average.

    `average` is over the tasks in `averaged`; it is None if `averaged` is empty. `means` maps a task with sub-tasks to the
    difference in the mean over its sub-tasks. `left_out` names the tasks on which only one model was evaluated.
    `resamples` is the number of bootstrap resamples. p-values are not corrected for multiple tests.
    """

    tasks: dict[str, Difference]
    averaged: tuple[str, ...]
    average: Difference | None
    means: dict[str, Difference]
    left_out: tuple[str, ...]
    resamples: int


# ---------------------------------------------------------------------------------------------------- correlations


def spearman(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Return Spearman's rank correlation in [-1, 1] of two lists of P values, computed by `scipy.stats.spearmanr`.

    Equal values get their average rank.

    Raises:
        ValueError: for lists of different lengths.
        UndefinedCorrelationError: for fewer than two values, values that are not finite, or a constant list. A list is
            constant if its relative range is at most 1e-13; its ranks would come from rounding errors.
    """
    from scipy.stats import spearmanr

    return float(spearmanr(*_checked_lists(x_P, y_P)).statistic)


def pearson(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Return Pearson's correlation in [-1, 1] of two lists of P values, computed by `scipy.stats.pearsonr`.

    Raises the same errors as `spearman`.
    """
    from scipy.stats import pearsonr

    return float(pearsonr(*_checked_lists(x_P, y_P)).statistic)


def _checked_lists(x_P: ArrayLike, y_P: ArrayLike) -> tuple[Floats, Floats]:
    """Convert two lists of P values to float64 and check that their correlation is defined.

    Raises the errors of `spearman`.
    """
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"expected two lists of equal length, got shapes {x.shape} and {y.shape}.")
    if len(x) < 2:
        raise UndefinedCorrelationError(f"expected at least two pairs, got {len(x)}")
    for name, values in (("first", x), ("second", y)):
        if not np.isfinite(values).all():
            raise UndefinedCorrelationError(f"the {name} list has values that are not finite")
        if np.ptp(values) <= _EQUAL_TOLERANCE * np.abs(values).max():
            raise UndefinedCorrelationError(f"all values of the {name} list are equal ({values[0]:g})")
    return x, y


# ------------------------------------------------------------------------------------------------------- resamples


def resampled_spearman(
    scores_MP: ArrayLike, gold_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> Floats:
    """Return Spearman's correlation (M, B) of M lists of scores with the gold scores in B bootstrap resamples.

    Correlations are in [-1, 1]. A resample draws P items with replacement from the P items of a list. The resamples
    depend on P, `seed` and `stream` (any name, such as the task name), and all M lists share them. All scores must be
    finite. Equal values, also of an item drawn twice, get their average rank. Ranks follow from counts, without
    sorting. A correlation is NaN if all drawn scores, or all drawn gold scores, are equal.
    """
    gold_ranks, *score_ranks = (_centred_ranks(np.asarray(values)) for values in (gold_P, *np.asarray(scores_MP)))
    blocks = []
    for counts_PB in _counts(np.size(gold_P), resamples, seed, stream):
        gold_PB = gold_ranks(counts_PB)
        weighted_PB = counts_PB * gold_PB
        gold_square_B = np.einsum("pb,pb->b", weighted_PB, gold_PB)
        block = []
        for ranks in score_ranks:
            ranks_PB = ranks(counts_PB)
            covariance_B = np.einsum("pb,pb->b", weighted_PB, ranks_PB)
            square_B = np.einsum("pb,pb,pb->b", counts_PB, ranks_PB, ranks_PB)
            norm_B = np.sqrt(gold_square_B) * np.sqrt(square_B)
            block.append(np.divide(covariance_B, norm_B, out=np.full_like(norm_B, np.nan), where=norm_B > 0))
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def _centred_ranks(values_P: NDArray[np.generic]) -> Callable[[Floats], Floats]:
    """Return a function that computes the ranks of P values in bootstrap resamples, minus the mean rank.

    The returned function takes counts (P, B), how often each value is drawn in each resample, and returns ranks (P, B).
    Equal values get their average rank.

    If c equal values are drawn and the last has rank C, they have the ranks C - c + 1 to C: on average C - (c - 1) / 2.
    The mean of all ranks is (P + 1) / 2. The results are multiples of 1/2, so that their sums are exact.
    """
    order = np.argsort(values_P, kind="stable")
    _, kind_P, sizes_K = np.unique(values_P, return_inverse=True, return_counts=True)
    starts_K = np.cumsum(sizes_K) - sizes_K

    def ranks(counts_PB: Floats) -> Floats:
        drawn_KB = np.add.reduceat(counts_PB[order], starts_K, axis=0)
        ranks_KB: Floats = np.cumsum(drawn_KB, axis=0) - drawn_KB / 2 - len(counts_PB) / 2
        return ranks_KB[kind_P]

    return ranks


def _resampled_means(values_P: ArrayLike, resamples: int, seed: int, stream: str) -> Floats:
    """Return the mean of P values in each of B bootstrap resamples, shape (B,)."""
    values = np.asarray(values_P, dtype=np.float64)
    blocks = _counts(len(values), resamples, seed, stream)
    return np.concatenate([values @ counts_PB / len(values) for counts_PB in blocks])


def _counts(size: int, resamples: int, seed: int, stream: str) -> Iterator[Floats]:
    """Yield blocks (P, B) of bootstrap counts: how often each of `size` = P items is drawn in each of B resamples.

    The blocks have `resamples` columns in total. `seed` and `stream` (any name, such as the task name) determine the
    draws.
    """
    generator = np.random.default_rng([seed, *stream.encode(errors="backslashreplace")])
    for start in range(0, resamples, _BLOCK):
        width = min(_BLOCK, resamples - start)
        drawn_BP = generator.integers(size, size=(width, size))
        places = drawn_BP * width + np.arange(width)[:, None]
        yield np.bincount(places.ravel(), minlength=size * width).reshape(size, width).astype(np.float64)


# ------------------------------------------------------------------------------------------ intervals and p-values


def mean_interval(values_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = "") -> Interval:
    """Return the 95 % bootstrap interval of the mean of per-item values, such as the recall of each query."""
    return percentile_interval(_resampled_means(values_P, resamples, seed, stream))


def percentile_interval(values_B: ArrayLike) -> Interval:
    """Return the percentile bootstrap interval: the range of the middle 95 % of B resampled values."""
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.asarray(values_B, dtype=np.float64), [outside, 100 - outside])
    return Interval(float(low), float(high))


def two_sided_p(differences_B: ArrayLike) -> float:
    """Return the two-sided p-value of resampled differences: twice the fraction with the less frequent sign.

    At this level, the percentile interval of the difference touches zero (Efron & Tibshirani 1993, ch. 15; for
    dependent rank correlations Wilcox 2016, "Comparing dependent robust correlations"). One resample is added on each
    side of zero, so that the p-value is never 0 (Davison & Hinkley 1997, ch. 4). The result is 1 if all differences are
    0, and NaN if a difference is NaN.
    """
    differences = np.asarray(differences_B, dtype=np.float64)
    if np.isnan(differences).any():
        return math.nan
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * (int(beyond) + 1) / (len(differences) + 1))


# ---------------------------------------------------------------------------------------- comparison of two models


def mean_difference(
    ours_P: ArrayLike, theirs_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> Difference:
    """Compare the mean metrics of two models by a paired bootstrap: difference, 95 % interval and p-value.

    `ours_P` and `theirs_P` are the metric values of the two models for the same P test items. The difference is
    `ours_P` minus `theirs_P`.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (ours_P, theirs_P))
    resampled_B = _resampled_means(ours - theirs, resamples, seed, stream)
    value, their_value, difference = (float(values.mean()) for values in (ours, theirs, ours - theirs))
    interval, p_value = percentile_interval(resampled_B), two_sided_p(resampled_B)
    return Difference(len(ours), value, their_value, difference, interval, p_value)


def compare(
    ours: Mapping[str, PairScores],
    theirs: Mapping[str, PairScores],
    *,
    averaged: Sequence[str] = PUBLISHED_TASKS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedDifferences:
    """Compare the Spearman correlations of two models on STS tasks by a paired bootstrap over sentence pairs.

    `ours` and `theirs` map task names to pair scores. The result has the differences, `ours` minus `theirs`, on every
    common task, on the mean over the sub-tasks that `ours` has, and on the average of the common tasks in `averaged`, by
    default the tasks of published tables.

    Tasks and sub-tasks are resampled independently; both models use the same resamples. If the models are exchanged,
    signs change and p-values do not. Two equal models differ by 0 with p-value 1.

    Raises:
        ValueError: if the models have no common task, or a task has different gold scores (other pairs or order).
    """
    common = [name for name in ours if name in theirs]
    if not common:
        raise ValueError(
            f"--against: the models have no task in common: {', '.join(ours) or 'none'} and "
            f"{', '.join(theirs) or 'none'}. Evaluate both on the same tasks."
        )
    resampled = {name: _spearman_of_two_models(name, ours[name], theirs[name], resamples, seed) for name in common}
    averaged = tuple(name for name in averaged if name in common)
    average = _difference(*(resampled[name] for name in averaged)) if averaged else None
    means = {}
    for name in common:
        parts = ours[name].by_subtask()
        their_parts = theirs[name]._replace(subtask=ours[name].subtask).by_subtask()
        if parts:
            tasks = (
                _spearman_of_two_models(f"{name}/{part}", parts[part], their_parts[part], resamples, seed)
                for part in parts
            )
            means[name] = _difference(*tasks)
    left_out = tuple(name for name in (*ours, *theirs) if name not in common)
    return PairedDifferences(
        {name: _difference(resampled[name]) for name in common}, averaged, average, means, left_out, resamples
    )


def _spearman_of_two_models(
    name: str, ours: PairScores, theirs: PairScores, resamples: int, seed: int
) -> tuple[int, Floats, Floats]:
    """Return the number of sentence pairs of a task, and Spearman × 100 of two models on all pairs and in resamples.

    Shapes: (2,) on all pairs, (2, B) in B = `resamples` bootstrap resamples. Undefined correlations are NaN. `name` is
    the task name, which selects the resamples.

    Raises:
        ValueError: if the gold scores of the two models differ.
    """
    if not np.array_equal(ours.gold, theirs.gold):
        counts = f"{len(ours.gold)} and {len(theirs.gold)} gold scores"
        if len(ours.gold) == len(theirs.gold):
            counts += " with different values"
        raise ValueError(
            f"--against: task {name!r} has different pairs ({counts}). Evaluate both models on the same files."
        )
    scores_2, resampled_2B = np.full(2, math.nan), np.full((2, resamples), math.nan)
    for model, scores in enumerate((ours, theirs)):
        with suppress(UndefinedCorrelationError):
            scores_2[model] = 100 * spearman(scores.cosine, scores.gold)
    if not np.isnan(scores_2).any():
        cosines_2P = [ours.cosine, theirs.cosine]
        resampled_2B = 100 * resampled_spearman(cosines_2P, ours.gold, resamples=resamples, seed=seed, stream=name)
    return len(ours.gold), scores_2, resampled_2B


def _difference(*tasks: tuple[int, Floats, Floats]) -> Difference:
    """Return the difference of two models in the mean over tasks, with the 95 % interval and p-value.

    A task is its number of pairs, and Spearman × 100 of both models on all pairs (2,) and in B resamples (2, B).
    """
    pairs, scores_2, resampled_2B = zip(*tasks, strict=True)
    ours, theirs = map(float, np.mean(scores_2, axis=0))
    differences_B = np.subtract(*np.mean(resampled_2B, axis=0))
    interval, p_value = percentile_interval(differences_B), two_sided_p(differences_B)
    return Difference(sum(pairs), ours, theirs, ours - theirs, interval, p_value)
