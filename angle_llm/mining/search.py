"""The candidates nearest to each anchor: exact, and the same to the last bit whatever the blocks (see `corpus/exact.py`).

Legend: A anchors, C candidates, D dimensions, R ranks (the last that is asked for).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from angle_llm.data.formats import DataError
from angle_llm.search import STEPS, best, on_grid
from angle_llm.search import cosine_matrix as cosines_of_all
from angle_llm.vectors import Array

FAISS_SLACK = 64
"""How many more than asked for faiss is asked for, as its float32 may misplace those at the edge."""


class MissingIndexError(ImportError):
    """The index that was asked for is not installed."""


def grid_rows(rows_ND: Array) -> Array:
    """Vectors (N, D) of length 1 in steps of 2⁻²⁶, as whole numbers in float64.

    Raises:
        DataError: for a vector that is 0 or not finite, with its place.
    """
    grid = on_grid(rows_ND)
    good = np.isfinite(grid).all(axis=1) & grid.any(axis=1)
    if not good.all():
        raise DataError(
            f"vector {int(np.argmin(good))} of a block is 0 or not finite, so it has no cosine. Load the model in bfloat16 or "
            "float32, or mend its weights"
        )
    return grid


class ExactIndex:
    """Compares every anchor with every candidate, a block of candidates in memory at a time."""

    def __init__(self, vectors_TD: Array, candidates_C: Array, block: int) -> None:
        """`vectors_TD` may lie on disk; `candidates_C` are rows of it in ascending order."""
        self.vectors = vectors_TD
        self.candidates = candidates_C
        self.block = block

    def nearest(self, anchors_AD: Array, ranks: int) -> tuple[Array, Array]:
        """Places in `candidates_C` (A, R) and cosines (A, R), best first, of anchors on the grid; memory is A × (R + block)."""
        place_AR = np.empty((len(anchors_AD), 0), dtype=np.int64)
        score_AR = np.empty((len(anchors_AD), 0))
        for first in range(0, len(self.candidates), self.block):
            rows = self.candidates[first : first + self.block]
            score_AC = cosines_of_all(anchors_AD, grid_rows(self.vectors[rows]))
            place_AC = np.broadcast_to(np.arange(first, first + len(rows)), score_AC.shape)
            place_AR, score_AR = best(
                np.concatenate([place_AR, place_AC], axis=1), np.concatenate([score_AR, score_AC], axis=1), ranks
            )
        return place_AR, score_AR


class FaissIndex:
    """faiss's exact inner product in float32 finds somewhat more than is asked for, which is then ranked on the grid."""

    def __init__(self, vectors_TD: Array, candidates_C: Array, block: int) -> None:
        try:
            import faiss  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise MissingIndexError(
                "--index faiss needs faiss: pip install 'angle_llm[mining]'. Or --index exact, which needs nothing."
            ) from error
        self.vectors = vectors_TD
        self.candidates = candidates_C
        self.index: Any = faiss.IndexFlatIP(vectors_TD.shape[1])
        for first in range(0, len(candidates_C), block):
            self.index.add(_float32(grid_rows(vectors_TD[candidates_C[first : first + block]])))

    def nearest(self, anchors_AD: Array, ranks: int) -> tuple[Array, Array]:
        """As `ExactIndex.nearest`, but for candidates whose float32 cosine is off by more than the slack allows for."""
        wanted = min(ranks + FAISS_SLACK, len(self.candidates))
        place_AW = np.sort(self.index.search(_float32(anchors_AD), wanted)[1], axis=1)
        score_AW = np.empty(place_AW.shape)
        for anchor, places in enumerate(place_AW):
            (score_AW[anchor],) = cosines_of_all(anchors_AD[[anchor]], grid_rows(self.vectors[self.candidates[places]]))
        return best(place_AW, score_AW, ranks)


INDEXES: dict[str, Callable[[Array, Array, int], ExactIndex | FaissIndex]] = {"exact": ExactIndex, "faiss": FaissIndex}


def _float32(grid_ND: Array) -> Array:
    scaled: Array = (grid_ND / STEPS).astype(np.float32)
    return scaled
