"""Cosines that are the same to the last bit whatever the blocks and the order of rows.

Sums of float products depend on their order, and so on the shape of a block and on a row's place in it. Here vectors of
length 1 are rounded to multiples of 2⁻²⁶, four times finer than float32 just below 1: their products are multiples of
2⁻⁵², and no partial sum is above 2 (Cauchy-Schwarz), so float64 holds all of them and no order rounds anything. Equal
vectors then have really equal cosines, and the earlier one comes first.

Legend: N rows, A anchors or queries, C candidates, D dimensions.
"""

from __future__ import annotations

import numpy as np

from angle_llm.corpus.vectors import Array

STEPS = 2.0**26


def on_grid(rows_ND: Array) -> Array:
    """Directions of vectors (N, D) in steps of 2⁻²⁶, as whole numbers in float64. A zero vector stays 0, one that is not
    finite has a NaN."""
    rows: Array = np.array(rows_ND, dtype=np.float64, order="C")
    length = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        rows /= np.where(length > 0, length, 1) / STEPS  # a power of two: not rounded again
    return np.rint(rows, out=rows)


def cosines_of_all(anchors_AD: Array, candidates_CD: Array) -> Array:
    """(A, C) cosine of each anchor with each candidate, of rows on the grid."""
    found: Array = anchors_AD @ candidates_CD.T / STEPS**2
    return found


def cosines(left_ND: Array, right_ND: Array) -> Array:
    """(N,) cosine of each row with the other's, of rows on the grid."""
    found: Array = (left_ND * right_ND).sum(axis=1) / STEPS**2
    return found


def best(place_AC: Array, score_AC: Array, ranks: int) -> tuple[Array, Array]:
    """The `ranks` largest scores of each row, largest first, with their places; of equal scores the first in the row."""
    if score_AC.shape[1] > ranks:
        edge_A1 = np.partition(score_AC, -ranks, axis=1)[:, -ranks, None]
        above, at_edge = score_AC > edge_A1, score_AC == edge_A1
        room_A1 = ranks - above.sum(axis=1, keepdims=True)
        kept = above | (at_edge & (at_edge.cumsum(axis=1) <= room_A1))
        score_AC = score_AC[kept].reshape(-1, ranks)
        place_AC = place_AC[kept].reshape(-1, ranks)
    order = np.argsort(-score_AC, axis=1, kind="stable")
    return np.take_along_axis(place_AC, order, axis=1), np.take_along_axis(score_AC, order, axis=1)
