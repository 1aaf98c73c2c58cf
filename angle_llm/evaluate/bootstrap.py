"""Percentile bootstrap over test items (pairs, queries, examples): intervals, and differences of two models.

Items are drawn with replacement, as many as there are, and the metric is computed again (Efron & Tibshirani 1993,
chapter 13). An interval covers the choice of test items, taken as independent draws. It does not cover another training
seed, prompt, training dataset or kind of task.

Two models make errors on the same items, so their intervals can overlap although the difference is clear. `compare`
computes both on the same resamples and returns the interval and p-value of the difference.

A resample is a vector of counts: how often each item was drawn. All metrics are computed from counts, for a block of
resamples at once. Counts depend only on size, number of resamples, seed and `stream` (a name, such as that of the
task), so that models share resamples, and the interval of a task does not depend on other tasks.

Dimensions: P items, B resamples, M models, K distinct values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from angle_llm.evaluate.correlation import PairScores, UndefinedCorrelationError, spearman
from angle_llm.evaluate.encoding import RESAMPLES
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS

CONFIDENCE = 0.95
"""Share of the resamples inside an interval."""

_BLOCK = 128  # resamples computed at once: 128 × 4,000 numbers stay in the cache

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """The middle `CONFIDENCE` of the resampled values; NaN if a resampled value is undefined."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Spearman × 100 of two models and their difference, with 95 % interval and two-sided p-value.

    The difference, its interval and p-value are NaN if a correlation is undefined.
    """

    pairs: int
    spearman: float
    other: float
    difference: float
    interval: Interval
    p_value: float


@dataclass(frozen=True)
class MeanDifference:
    """Means of two models over the same items, and their difference with 95 % interval and two-sided p-value."""

    value: float
    other: float
    difference: float
    interval: Interval
    p_value: float


@dataclass(frozen=True)
class PairedDifferences:
    """Differences by task, and of the average over the tasks `averaged` (None if there are none).

    `left_out` are tasks that only one of the models was evaluated on. p-values are not corrected for the number of
    tasks.
    """

    tasks: dict[str, Difference]
    averaged: tuple[str, ...]
    average: Difference | None
    left_out: tuple[str, ...]
    resamples: int


def compare(
    ours: Mapping[str, PairScores], theirs: Mapping[str, PairScores], *, resamples: int = RESAMPLES, seed: int = 0
) -> PairedDifferences:
    """Return the differences `ours` minus `theirs` on every common task, and on the average over the published ones.

    Tasks are resampled independently, both models with the same resamples. Exchanging the models changes the signs and
    no p-value; two equal models differ by 0 with p-value 1.

    Raises:
        ValueError: if there is no common task, or the gold scores of a task differ (other pairs or another order).
    """
    common = [name for name in ours if name in theirs]
    if not common:
        raise ValueError(
            f"--against: the models have no task in common: {', '.join(ours) or 'none'} and "
            f"{', '.join(theirs) or 'none'}. Evaluate both on the same tasks."
        )
    both = {name: _both(name, ours[name], theirs[name], resamples, seed) for name in common}
    averaged = tuple(name for name in PUBLISHED_TASKS if name in common)
    average = None
    if averaged:
        pairs, scores_2, resampled_2B = zip(*(both[name] for name in averaged), strict=True)
        average = _difference(sum(pairs), np.mean(scores_2, axis=0), np.mean(resampled_2B, axis=0))
    left_out = tuple(name for name in (*ours, *theirs) if name not in common)
    return PairedDifferences(
        {name: _difference(*both[name]) for name in common}, averaged, average, left_out, resamples
    )


def _both(name: str, ours: PairScores, theirs: PairScores, resamples: int, seed: int) -> tuple[int, Floats, Floats]:
    """Return the number of pairs; Spearman × 100 (2,) of both models, and in each resample (2, B)."""
    if not np.array_equal(ours.gold, theirs.gold):
        raise ValueError(
            f"--against: task {name!r} has different pairs ({len(ours.gold)} and {len(theirs.gold)} gold scores). "
            "Evaluate both models on the same files."
        )
    scores_2, resampled_2B = np.full(2, math.nan), np.full((2, resamples), math.nan)
    for model, scores in enumerate((ours, theirs)):
        with suppress(UndefinedCorrelationError):
            scores_2[model] = 100 * spearman(scores.cosine, scores.gold)
    if not np.isnan(scores_2).any():
        cosines_2P = [ours.cosine, theirs.cosine]
        resampled_2B = 100 * resampled_spearman(cosines_2P, ours.gold, resamples=resamples, seed=seed, stream=name)
    return len(ours.gold), scores_2, resampled_2B


def _difference(pairs: int, scores_2: Floats, resampled_2B: Floats) -> Difference:
    differences_B = resampled_2B[0] - resampled_2B[1]
    one, other = map(float, scores_2)
    return Difference(pairs, one, other, one - other, percentile_interval(differences_B), two_sided_p(differences_B))


def resampled_spearman(
    scores_MP: ArrayLike, gold_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> Floats:
    """Return Spearman's correlation (M, B) in [-1, 1] of each of M lists of finite scores with finite gold scores.

    All lists share the resamples. Ties, also those of items drawn twice, have their average rank; ranks follow from
    counts, without sorting. NaN if all drawn scores, or all drawn gold scores, are equal.
    """
    ranks_of_gold, *ranks_of_scores = (
        _centred_ranks(np.asarray(values)) for values in (gold_P, *np.asarray(scores_MP))
    )
    blocks = []
    for counts_PB in _counts(np.size(gold_P), resamples, seed, stream):
        gold_PB = ranks_of_gold(counts_PB)
        weighted_PB = counts_PB * gold_PB
        gold_square = np.einsum("pb,pb->b", weighted_PB, gold_PB)
        block = []
        for ranks_of in ranks_of_scores:
            ranks_PB = ranks_of(counts_PB)
            covariance = np.einsum("pb,pb->b", weighted_PB, ranks_PB)
            square = np.einsum("pb,pb,pb->b", counts_PB, ranks_PB, ranks_PB)
            norm = np.sqrt(gold_square) * np.sqrt(square)
            block.append(np.divide(covariance, norm, out=np.full_like(norm, np.nan), where=norm > 0))
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def _centred_ranks(values_P: NDArray[np.generic]) -> Callable[[Floats], Floats]:
    """Return a function: counts (P, B) → average rank of each item in each resample, minus the mean rank:
    multiples of 1/2, sums are exact.

    c equal values with the last one at rank C have ranks C - c + 1 to C: on average C - (c - 1) / 2. The mean of all
    ranks is (P + 1) / 2.
    """
    order = np.argsort(values_P, kind="stable")
    _, kind_P, sizes_K = np.unique(values_P, return_inverse=True, return_counts=True)
    starts_K = np.cumsum(sizes_K) - sizes_K

    def ranks(counts_PB: Floats) -> Floats:
        of_kind_KB = np.add.reduceat(counts_PB[order], starts_K, axis=0)
        ranks_KB: Floats = np.cumsum(of_kind_KB, axis=0) - of_kind_KB / 2 - len(counts_PB) / 2
        return ranks_KB[kind_P]

    return ranks


def _counts(size: int, resamples: int, seed: int, stream: str) -> Iterator[Floats]:
    """Yield blocks of counts: how often each item (row) is drawn in each resample (column)."""
    if size < 1 or resamples < 1 or seed < 0:
        raise ValueError(
            "expected at least one item, one resample and a seed of at least 0, got "
            f"{size} items, {resamples} resamples, seed {seed}."
        )
    generator = np.random.default_rng([seed, *stream.encode()])
    for start in range(0, resamples, _BLOCK):
        width = min(_BLOCK, resamples - start)
        drawn_BP = generator.integers(size, size=(width, size))
        places = drawn_BP * width + np.arange(width)[:, None]
        yield np.bincount(places.ravel(), minlength=size * width).reshape(size, width).astype(np.float64)


def mean_interval(values_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = "") -> Interval:
    """Return the interval of the mean of one value per item: an accuracy, a recall, a reciprocal rank."""
    return percentile_interval(_resampled_means(values_P, resamples, seed, stream))


def mean_difference(
    ours_P: ArrayLike, theirs_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> MeanDifference:
    """Return the difference of the means of two models, from one value per item and model in the same order."""
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (ours_P, theirs_P))
    resampled_B = _resampled_means(ours - theirs, resamples, seed, stream)
    interval, p_value = percentile_interval(resampled_B), two_sided_p(resampled_B)
    return MeanDifference(float(ours.mean()), float(theirs.mean()), float((ours - theirs).mean()), interval, p_value)


def _resampled_means(values_P: ArrayLike, resamples: int, seed: int, stream: str) -> Floats:
    values = np.asarray(values_P, dtype=np.float64)
    blocks = _counts(len(values), resamples, seed, stream)
    return np.concatenate([values @ counts_PB / len(values) for counts_PB in blocks])


def accuracy_interval(right: int, tested: int) -> Interval:
    """Return Wilson's interval of an accuracy × 100 of `right` of `tested` items."""
    from scipy.stats import binomtest

    ends = binomtest(right, tested).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(100 * float(ends.low), 100 * float(ends.high))


def percentile_interval(values_B: ArrayLike) -> Interval:
    """Return the interval with the middle `CONFIDENCE` of the resampled values."""
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.asarray(values_B, dtype=np.float64), [outside, 100 - outside])
    return Interval(float(low), float(high))


def two_sided_p(differences_B: ArrayLike) -> float:
    """Return the p-value: twice the share of resampled differences on the other side of zero.

    This is the level at which the percentile interval of the difference touches zero (Efron & Tibshirani 1993, ch. 15;
    for dependent rank correlations Wilcox 2016, "Comparing dependent robust correlations"). One resample is added on
    each side, so that it is never 0 (Davison & Hinkley 1997, ch. 4). 1 if all differences are 0, NaN if one is NaN.
    """
    differences = np.asarray(differences_B, dtype=np.float64)
    if np.isnan(differences).any():
        return math.nan
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * (int(beyond) + 1) / (len(differences) + 1))
