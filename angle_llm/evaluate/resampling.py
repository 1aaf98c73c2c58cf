"""How sure is a figure? Percentile bootstrap over what was measured one by one: pairs, queries, test sentences.

A test set is a sample of the texts one might have asked about. Drawing as many of its items again, with replacement,
and computing the figure anew shows how much it depends on which items were drawn (Efron & Tibshirani 1993, ch. 13).

What an interval covers: the choice of test items, taken as independent draws. What it does not cover: another training
seed, another prompt, other training data, or a task of another kind. Two models whose intervals overlap may still
differ surely: on the same items their figures move together, so compare them item by item (`two_sided_p`).

A resample is a vector of counts: how often each item was drawn. Everything here is computed from counts, for a block of
resamples at once. The same size, number of resamples, seed and `stream` (a name, such as the task's) give the same
counts, so two models can be compared on the same resamples, and a task's interval does not depend on the other tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
"""Part of the resamples that lies within an interval."""

RESAMPLES = 1000
"""Resamples unless told otherwise: the ends of an interval then vary between seeds by about a fiftieth of its
length."""

_BLOCK = 128  # resamples computed at once: 128 × 4,000 numbers stay in the cache


@dataclass(frozen=True)
class Interval:
    """The middle `CONFIDENCE` of the resampled figures; NaN where the figure of any resample does not exist."""

    low: float
    high: float


@dataclass(frozen=True)
class _Ties:
    """A list of values in ascending order: `order` sorts it, equal values start at `starts`, item i is of kind
    `kind[i]`."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    kind: NDArray[np.intp]


def resampled_spearman(
    scores_MP: ArrayLike, gold_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> NDArray[np.float64]:
    """Spearman's correlation (M, resamples) in [-1, 1] of each of M score lists with the gold scores, in each resample.

    The M lists share their resamples. Ties, those that drawing with replacement makes among them, share their average
    rank; a rank follows from counts alone, so nothing is sorted again. NaN where all drawn scores, or all drawn gold
    scores, are equal.

    Raises `ValueError` for lists of different length, no pairs, or numbers that are not finite.
    """
    scores, gold = np.asarray(scores_MP, dtype=np.float64), np.asarray(gold_P, dtype=np.float64)
    if scores.ndim != 2 or gold.ndim != 1 or scores.shape[1] != len(gold):
        raise ValueError(
            f"scores (M, P) and gold scores (P,) are needed, found shapes {scores.shape} and {gold.shape}."
        )
    if not (np.isfinite(scores).all() and np.isfinite(gold).all()):
        raise ValueError("scores and gold scores must be finite to be ranked; some are NaN or infinite.")
    ties_of_gold, ties_of_scores = _ties(gold), [_ties(values) for values in scores]
    blocks = []
    for counts_PB in _counts(len(gold), resamples, seed, stream):
        gold_PB = _centred_ranks(counts_PB, ties_of_gold)
        weighted_PB = counts_PB * gold_PB
        gold_square = np.einsum("pb,pb->b", weighted_PB, gold_PB)
        block = np.empty((len(scores), counts_PB.shape[1]))
        for row, ties in zip(block, ties_of_scores, strict=True):
            ranks_PB = _centred_ranks(counts_PB, ties)
            covariance = np.einsum("pb,pb->b", weighted_PB, ranks_PB)
            square = np.einsum("pb,pb,pb->b", counts_PB, ranks_PB, ranks_PB)
            norm = np.sqrt(gold_square) * np.sqrt(square)
            row[:] = np.divide(covariance, norm, out=np.full_like(norm, np.nan), where=norm > 0)
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def resampled_means(
    values_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = ""
) -> NDArray[np.float64]:
    """The mean (resamples,) of the values in each resample: right or wrong as 1 and 0 gives resampled accuracies.

    To compare two models on the same items, resample the differences and ask `two_sided_p`.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"a list of values (P,) is needed, found shape {values.shape}.")
    blocks = [values @ counts_PB / len(values) for counts_PB in _counts(len(values), resamples, seed, stream)]
    return np.concatenate(blocks)


def mean_interval(values_P: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, stream: str = "") -> Interval:
    """The interval of a mean of values measured one by one: an accuracy, a recall, a reciprocal rank."""
    return percentile_interval(resampled_means(values_P, resamples=resamples, seed=seed, stream=stream))


def percentile_interval(figures_B: ArrayLike) -> Interval:
    """The interval that holds the middle `CONFIDENCE` of the figures of all resamples."""
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.asarray(figures_B, dtype=np.float64), [outside, 100 - outside])
    return Interval(float(low), float(high))


def two_sided_p(differences_B: ArrayLike) -> float:
    """How often chance alone would part two models so: twice the share of resamples on the other side of zero.

    This is the level at which the percentile interval of the difference just touches zero (Efron & Tibshirani 1993,
    ch. 15; for dependent rank correlations, Wilcox 2016, "Comparing dependent robust correlations"), one resample added
    on each side so that it is never 0 (Davison & Hinkley 1997, ch. 4). Differences that are all 0 give 1; a NaN gives
    NaN.
    """
    differences = np.asarray(differences_B, dtype=np.float64)
    if np.isnan(differences).any():
        return float("nan")
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * (int(beyond) + 1) / (len(differences) + 1))


def _counts(size: int, resamples: int, seed: int, stream: str) -> Iterator[NDArray[np.float64]]:
    """How often each of `size` items (rows) is drawn in each resample (columns), a block of resamples at a time."""
    if size < 1 or resamples < 1 or seed < 0:
        raise ValueError(
            f"resampling needs at least one item and one resample, and a seed of at least 0; found {size} items, "
            f"{resamples} resamples, seed {seed}."
        )
    generator = np.random.default_rng([seed, *stream.encode()])
    for start in range(0, resamples, _BLOCK):
        width = min(_BLOCK, resamples - start)
        drawn_BP = generator.integers(size, size=(width, size))
        places = drawn_BP * width + np.arange(width)[:, None]
        yield np.bincount(places.ravel(), minlength=size * width).reshape(size, width).astype(np.float64)


def _ties(values_P: NDArray[np.float64]) -> _Ties:
    order = np.argsort(values_P, kind="stable")
    _, kind, sizes = np.unique(values_P, return_inverse=True, return_counts=True)
    return _Ties(order, np.cumsum(sizes) - sizes, kind)


def _centred_ranks(counts_PB: NDArray[np.float64], ties: _Ties) -> NDArray[np.float64]:
    """Each item's average rank in each resample, less the mean rank. Multiples of 1/2, so their sums are exact.

    c items of a kind, the last of them at place C, hold the places C - c + 1 to C: on average C - (c - 1) / 2, and
    (P + 1) / 2 is the mean of all.
    """
    of_kind_KB = np.add.reduceat(counts_PB[ties.order], ties.starts, axis=0)
    ranks_KB: NDArray[np.float64] = np.cumsum(of_kind_KB, axis=0) - of_kind_KB / 2 - len(counts_PB) / 2
    return ranks_KB[ties.kind]
