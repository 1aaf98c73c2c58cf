"""What is kept of a vector, and the way back from it.

Legend: N rows, D dimensions of the model, K dimensions that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Precision = Literal["float32", "float16", "int8", "binary"]

SCALE = "scale"
_INT8 = 127


class PrecisionError(ValueError):
    """Values that do not fit the numbers they were to be stored in."""


@dataclass(frozen=True)
class VectorForm:
    """How vectors are stored.

    * float32, float16: the values, rounded.
    * int8: value ≈ int8 · scale, where scale is the row's largest magnitude / 127. A scale for each row, not for each
      dimension: it needs no look at other rows, so shards and processes need none at each other, and it does not change
      a cosine.
    * binary: the signs, a bit for each dimension, 1 for what is above 0; eight to a byte, the first in the highest bit,
      the last byte filled up with 0 (as `numpy.packbits` does).
    """

    dimensions: int
    """D."""
    dim: int | None = None
    """K, None for all. Cut before they are scaled to length 1."""
    normalize: bool = False
    """To length 1."""
    precision: Precision = "float32"
    complex: bool = False
    """Store the first half of a vector as real and the second as imaginary parts."""

    @property
    def kept(self) -> int:
        """K."""
        return self.dim or self.dimensions

    def stored(self, rows_ND: Array) -> dict[str, Array]:
        """Columns by name: `embedding` (N, K), or `real` and `imaginary` (N, K/2); of int8 also `scale` (N,).

        Raises:
            PrecisionError: if a value is too large for float16.
        """
        rows = np.array(rows_ND[:, : self.kept], dtype=np.float32)
        if self.normalize:
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        if self.complex:
            real, imaginary = np.split(rows, 2, axis=1)
            return {"real": self._rounded(real), "imaginary": self._rounded(imaginary)}
        if self.precision == "binary":
            return {"embedding": np.packbits(rows > 0, axis=1)}
        if self.precision == "int8":
            scale = np.abs(rows).max(axis=1, initial=0) / np.float32(_INT8)
            unit = np.where(scale > 0, scale, 1)[:, None]
            return {"embedding": np.rint(rows / unit).clip(-_INT8, _INT8).astype(np.int8), SCALE: scale}
        return {"embedding": self._rounded(rows)}

    def restored(self, columns: dict[str, Array]) -> Array:
        """Vectors (N, K) float32 of what `stored` made; of binary, +1 and -1."""
        if self.complex:
            return np.concatenate([columns["real"], columns["imaginary"]], axis=1).astype(np.float32)
        rows: Array = columns["embedding"]
        if self.precision == "binary":
            return np.unpackbits(rows, axis=1, count=self.kept).astype(np.float32) * 2 - 1
        if self.precision == "int8":
            return rows.astype(np.float32) * columns[SCALE][:, None]
        return rows.astype(np.float32)

    def _rounded(self, rows: Array) -> Array:
        if self.precision != "float16":
            return rows
        largest = float(np.abs(rows).max(initial=0))
        if largest > float(np.finfo(np.float16).max):
            raise PrecisionError(
                f"float16 holds values up to 65504, and a vector has {largest:.4g}. Use --normalize, or --precision float32."
            )
        return rows.astype(np.float16)


def joined(matrices: dict[str, Array]) -> Array:
    """The one matrix of a .npy file: (N, K), or (N, K/2) complex."""
    if "real" in matrices:
        return (matrices["real"] + 1j * matrices["imaginary"]).astype(np.complex64)
    return matrices["embedding"]


def parted(matrix: Array) -> dict[str, Array]:
    """The way back: real and imaginary part, or the one matrix."""
    if np.iscomplexobj(matrix):
        return {"real": matrix.real, "imaginary": matrix.imag}
    return {"embedding": np.asarray(matrix)}
