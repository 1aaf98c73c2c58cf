"""Correlations, percentile bootstrap intervals over test items, and paired comparison of two models.

A test item is a pair, a query or an example. The bootstrap draws as many items as the test has, with replacement, and
computes the metric again (Efron & Tibshirani 1993, chapter 13). An interval covers the choice of independent test
items. It does not cover another training seed, prompt, training dataset or kind of task.

Two models make errors on the same items, so their intervals can overlap although the difference is clear. `compare` and
`mean_difference` use the same resamples for both models, and return the interval and p-value of the difference.

The drawn items depend only on the number of items, the number of resamples and `stream` (a name, such as the task). So
models share resamples, and the interval of a task does not depend on other tasks.

Dimensions: P items, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from angle_llm.evaluate.encoding import RESAMPLES
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
FEWEST_ITEMS = 6
"""Fewest items of a comparison. With five, the smallest two-sided p-value of a sign test is 2 / 2⁵ = 0.06."""

_BLOCK = 128  # resamples computed at once
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
        """Return the scores of each sub-task by its name, in order of first appearance, without the pairs of no sub-task."""
        if self.subtask is None:
            return {}
        names = dict.fromkeys(filter(None, self.subtask.tolist()))
        return {name: PairScores(*(values_P[self.subtask == name] for values_P in self[:2])) for name in names}


@dataclass(frozen=True)
class Interval:
    """Ends of the 95 % confidence interval of a metric; NaN for a single item, or if the metric is undefined in a
    bootstrap resample."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Metric of two models on the same test items, such as Spearman × 100 on sentence pairs, and their difference.

    `items` is the number of items, `value` the metric of the first model, `other` the metric of the second model, and
    `difference` is `value - other`. `interval` is the 95 % interval of the difference, and `p_value` its two-sided
    p-value. All three are NaN if a correlation is undefined; for fewer than `FEWEST_ITEMS` means, the last two are.
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

    `average` is the difference in the average over published tasks; None without a published task. `means` maps a task
    with sub-tasks to the difference in the mean over its sub-tasks. `left_out` names the tasks on which only one model was
    evaluated. p-values are not corrected for multiple tests.
    """

    tasks: dict[str, Difference]
    average: Difference | None
    means: dict[str, Difference]
    left_out: tuple[str, ...]


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


def resampled_spearman(x_P: ArrayLike, y_P: ArrayLike, *, resamples: int = RESAMPLES, stream: str = "") -> Floats:
    """Return Spearman's correlation in [-1, 1] of two lists of P finite values in each of B bootstrap resamples, (B,).

    Equal values, also of an item drawn twice, get their average rank. A correlation is NaN if all drawn values of a list
    are equal.
    """
    from scipy.stats import rankdata

    x, y = np.asarray(x_P), np.asarray(y_P)
    blocks = [np.empty(0)]  # the result without resamples
    for drawn_BP in _draws(len(x), resamples, stream):
        # Ranks minus their mean: multiples of 1/2, so that the sums are exact.
        x_BP, y_BP = (rankdata(values[drawn_BP], axis=1) - (len(x) + 1) / 2 for values in (x, y))
        norm_B = np.sqrt((x_BP**2).sum(axis=1)) * np.sqrt((y_BP**2).sum(axis=1))
        covariance_B = (x_BP * y_BP).sum(axis=1)
        blocks.append(np.divide(covariance_B, norm_B, out=np.full_like(norm_B, np.nan), where=norm_B > 0))
    return np.concatenate(blocks)


def _resampled_means(values_P: Floats, resamples: int, stream: str) -> Floats:
    """Return the mean of P values in each of B bootstrap resamples, shape (B,)."""
    draws = _draws(len(values_P), resamples, stream)
    return np.concatenate([values_P[drawn_BP].mean(axis=1) for drawn_BP in draws])


def _draws(size: int, resamples: int, stream: str) -> Iterator[NDArray[np.int64]]:
    """Yield blocks (B, P) with the item numbers of bootstrap resamples: P = `size` items, drawn with replacement.

    The blocks have `resamples` rows in total. `stream` (any name, such as the task name) determines the draws.
    """
    generator = np.random.default_rng([0, *stream.encode(errors="backslashreplace")])
    for start in range(0, resamples, _BLOCK):
        yield generator.integers(size, size=(min(_BLOCK, resamples - start), size))


# ------------------------------------------------------------------------------------------ intervals and p-values


def mean_interval(values_P: ArrayLike, *, resamples: int = RESAMPLES, stream: str = "") -> Interval:
    """Return the 95 % bootstrap interval of the mean of per-item values, such as the recall of each query.

    It is NaN for a single item.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if len(values) == 1:
        return Interval(math.nan, math.nan)
    return percentile_interval(_resampled_means(values, resamples, stream))


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


def mean_difference(ours_P: ArrayLike, theirs_P: ArrayLike, *, stream: str = "") -> Difference:
    """Compare the mean metrics of two models by a paired bootstrap: difference, 95 % interval and p-value.

    `ours_P` and `theirs_P` are the metric values of the two models for the same P test items. The difference is
    `ours_P` minus `theirs_P`. Interval and p-value are NaN for fewer than `FEWEST_ITEMS` items.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (ours_P, theirs_P))
    enough = len(ours) >= FEWEST_ITEMS
    resampled_B = _resampled_means(ours - theirs, RESAMPLES, stream) if enough else np.full(1, math.nan)
    return _difference(len(ours), float(ours.mean()), float(theirs.mean()), resampled_B)


def _difference(items: int, value: float, other: float, differences_B: Floats) -> Difference:
    """Return the difference between the metrics of two models, with the interval and p-value of resampled differences."""
    interval = percentile_interval(differences_B)
    return Difference(items, value, other, value - other, interval, two_sided_p(differences_B))


def compare(
    ours: Mapping[str, PairScores],
    theirs: Mapping[str, PairScores],
    *,
    averaged: Sequence[str] = PUBLISHED_TASKS,
    resamples: int = RESAMPLES,
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

    def spearman_of_both(name: str, our_scores: PairScores, their_scores: PairScores) -> tuple[int, Floats]:
        """Return the number of pairs, and Spearman × 100 of both models on all pairs and in B resamples, (2, 1 + B)."""
        if not np.array_equal(our_scores.gold, their_scores.gold):
            raise ValueError(f"--against: task {name!r} has different pairs. Evaluate both models on the same files.")
        scores = [spearman_of(scores, resamples, stream=name) for scores in (our_scores, their_scores)]
        return len(our_scores.gold), np.array([[value, *resampled_B] for value, resampled_B, _ in scores])

    tasks = {name: spearman_of_both(name, ours[name], theirs[name]) for name in common}
    means = {}
    for name in common:
        our_parts = ours[name].by_subtask()
        # Scores of a JSON file have no sub-tasks; the pairs are the same.
        their_parts = theirs[name]._replace(subtask=ours[name].subtask).by_subtask()
        if our_parts:
            of_parts = [spearman_of_both(f"{name}/{part}", our_parts[part], their_parts[part]) for part in our_parts]
            means[name] = _mean_difference_of(of_parts)
    in_average = [tasks[name] for name in averaged if name in common]
    return PairedDifferences(
        tasks={name: _mean_difference_of([task]) for name, task in tasks.items()},
        average=_mean_difference_of(in_average) if in_average else None,
        means=means,
        left_out=tuple(name for name in (*ours, *theirs) if name not in common),
    )


def spearman_of(scores: PairScores, resamples: int, stream: str) -> tuple[float, Floats, str | None]:
    """Return Spearman × 100 of scored pairs and of B bootstrap resamples (B,), and the reason if it is undefined (NaN)."""
    try:
        value = 100 * spearman(scores.cosine, scores.gold)
    except UndefinedCorrelationError as reason:
        return math.nan, np.full(resamples, math.nan), str(reason)
    return value, 100 * resampled_spearman(scores.cosine, scores.gold, resamples=resamples, stream=stream), None


def _mean_difference_of(tasks: Sequence[tuple[int, Floats]]) -> Difference:
    """Return the difference of two models in the mean of Spearman × 100 over tasks, with interval and p-value.

    A task is its number of pairs, and the Spearman × 100 of both models on all pairs and in B resamples, (2, 1 + B).
    """
    ours, theirs = np.mean([scores for _, scores in tasks], axis=0)
    return _difference(sum(pairs for pairs, _ in tasks), float(ours[0]), float(theirs[0]), ours[1:] - theirs[1:])
