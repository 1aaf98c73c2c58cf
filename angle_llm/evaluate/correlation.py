"""Cosines of pairs of rows, and Spearman and Pearson correlation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from angle_llm.vectors import unit_rows

_PAIRS_AT_ONCE = 4096
_CONSTANT = 1e-13


class UndefinedCorrelationError(ValueError):
    """A correlation is undefined; the message is the reason."""


class PairScores(NamedTuple):
    """Cosine (P,) and gold score (P,) of each pair of a task, in order."""

    cosine: NDArray[np.float64]
    gold: NDArray[np.float64]


def pair_cosines(
    embeddings_ND: NDArray[np.floating[Any]], left_P: NDArray[np.intp], right_P: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return the cosine (P,) of rows `left_P` with rows `right_P`, in float64. The cosine with a zero vector is 0."""
    cosines_P = np.empty(len(left_P), dtype=np.float64)
    for start in range(0, len(left_P), _PAIRS_AT_ONCE):  # a float64 copy of a 7B model's matrix would be gigabytes
        chunk = slice(start, start + _PAIRS_AT_ONCE)
        left_CD, right_CD = unit_rows(embeddings_ND[left_P[chunk]]), unit_rows(embeddings_ND[right_P[chunk]])
        cosines_P[chunk] = np.einsum("cd,cd->c", left_CD, right_CD)
    return cosines_P


def spearman(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Return Spearman's rank correlation in [-1, 1] with average ranks for ties: `scipy.stats.spearmanr`.

    Raises:
        UndefinedCorrelationError: for fewer than two pairs, values that are not finite, or a constant side (relative
            range up to 1e-13: such ranks would be those of rounding errors).
    """
    from scipy.stats import spearmanr

    return float(spearmanr(*_checked(x_P, y_P)).statistic)


def pearson(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Return Pearson's correlation in [-1, 1]: `scipy.stats.pearsonr`. Raises like `spearman`."""
    from scipy.stats import pearsonr

    return float(pearsonr(*_checked(x_P, y_P)).statistic)


def _checked(x_P: ArrayLike, y_P: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"expected two lists of equal length, got shapes {x.shape} and {y.shape}.")
    if len(x) < 2:
        raise UndefinedCorrelationError(f"expected at least two pairs, got {len(x)}")
    for side, values in (("first", x), ("second", y)):
        if not np.isfinite(values).all():
            raise UndefinedCorrelationError(f"the {side} list has values that are not finite")
        if np.ptp(values) <= _CONSTANT * np.abs(values).max():
            raise UndefinedCorrelationError(f"all values of the {side} list are equal ({values[0]:g})")
    return x, y
