"""Vectors of length 1."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def unit_rows(rows_ND: Array, dtype: type[np.floating[Any]] = np.float64) -> Array:
    """Return rows (N, D) scaled to length 1, computed in `dtype`. Zero rows stay zero; rows that are not finite become NaN."""
    rows = np.asarray(rows_ND, dtype=dtype)
    length_N1: Array = np.linalg.norm(rows, axis=1, keepdims=True)
    length_N1[length_N1 == 0] = 1
    unit_ND: Array = rows / length_N1
    return unit_ND
