"""Cosines of pairs of rows, and the correlations of two lists of numbers; a correlation that does not exist is an
error."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PAIRS_AT_ONCE = 4096
_CONSTANT = 1e-13


class UndefinedCorrelationError(ValueError):
    """The correlation of these numbers does not exist; the message is the reason."""


def pair_cosines(
    embeddings_ND: NDArray[np.floating[Any]], left_P: NDArray[np.intp], right_P: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Cosine (P,) of rows `left_P` with rows `right_P`, in float64. A zero vector has cosine 0 with everything."""
    cosines_P = np.empty(len(left_P), dtype=np.float64)
    for start in range(0, len(left_P), _PAIRS_AT_ONCE):  # a float64 copy of a 7B model's matrix would be gigabytes
        chunk = slice(start, start + _PAIRS_AT_ONCE)
        left_CD, right_CD = _unit_rows(embeddings_ND[left_P[chunk]]), _unit_rows(embeddings_ND[right_P[chunk]])
        cosines_P[chunk] = np.einsum("cd,cd->c", left_CD, right_CD)
    return cosines_P


def spearman(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Spearman's rank correlation in [-1, 1], ties sharing their average rank: `scipy.stats.spearmanr`.

    Raises `UndefinedCorrelationError` for fewer than two pairs, numbers that are not finite, or a side that is constant
    (up to 1e-13 of its size: ranks of rounding noise would be a number about nothing).
    """
    from scipy.stats import spearmanr

    return float(spearmanr(*_correlatable(x_P, y_P)).statistic)


def pearson(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Pearson's correlation in [-1, 1]: `scipy.stats.pearsonr`. Raises as `spearman` does."""
    from scipy.stats import pearsonr

    return float(pearsonr(*_correlatable(x_P, y_P)).statistic)


def _unit_rows(rows_CD: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    rows = rows_CD.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit


def _correlatable(x_P: ArrayLike, y_P: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"two lists of equal length are needed, found shapes {x.shape} and {y.shape}.")
    if len(x) < 2:
        raise UndefinedCorrelationError(f"at least two pairs are needed, found {len(x)}")
    for side, values in (("first", x), ("second", y)):
        if not np.isfinite(values).all():
            raise UndefinedCorrelationError(f"the {side} hold {int((~np.isfinite(values)).sum())} non-finite numbers")
        if np.ptp(values) <= _CONSTANT * np.abs(values).max():
            raise UndefinedCorrelationError(f"the {side} are all equal ({values[0]:g}), so there is nothing to rank")
    return x, y
