"""The relation of a batch: which rows of the embedding matrix form scored pairs.

Shapes: N rows (unique texts), P scored pairs, G dimensions of another encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A copy to a GPU, from pinned memory, does not wait for work queued on it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Relation:
    """P scored pairs of rows: `score[p]` is the similarity of rows `left[p]` and `right[p]`.

    A relation on the CPU can be used with embeddings on any device. Losses compute indices from it on the CPU:
    their sizes depend on values, and reading a value from a GPU synchronises it.

    All losses read a batch through this class. The optional fields describe pairs (P) or rows (N); without them, every
    row is another text.

    Raises:
        ValueError: for tensors of different lengths, row numbers that are not integers, or scores that are not finite.
    """

    left: Tensor
    """(P,) integer row numbers."""
    right: Tensor
    """(P,) integer row numbers."""
    score: Tensor
    """(P,) finite numbers; a higher score means more similar."""
    group: Tensor | None = None
    """(P,) integers: number of the example of each pair. The pairs of a query with its positives and negatives have
    equal numbers."""
    teacher: Tensor | None = None
    """(P,) score of each pair by a teacher, on the teacher's scale; NaN for a pair without one."""
    text: Tensor | None = None
    """(N,) integers: rows with equal numbers are one text, such as on two sides. They are never each other's negatives,
    and the partners of one are no negatives of the other."""
    guide: Tensor | None = None
    """(N, G) vectors of the texts by a guide encoder; only their cosines are used."""
    teacher_vectors: Tensor | None = None
    """(N, T) vectors of the texts by a teacher."""

    def __post_init__(self) -> None:
        shapes = {"left": self.left.shape, "right": self.right.shape, "score": self.score.shape}
        if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
            got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(
                f"left, right and score: expected vectors of one length (P,), one entry per pair; got {got}."
            )
        for name in ("left", "right", "group", "text"):
            index: Tensor | None = getattr(self, name)
            if index is not None and (index.is_floating_point() or index.dtype == torch.bool):
                raise ValueError(f"{name}: expected numbers of an integer dtype such as int64, got {index.dtype}.")
        for name in ("group", "teacher"):
            of_pair: Tensor | None = getattr(self, name)
            if of_pair is not None and of_pair.shape != self.left.shape:
                raise ValueError(
                    f"{name}: expected one entry per pair, shape {tuple(self.left.shape)}; got {tuple(of_pair.shape)}."
                )
        if self.teacher is not None and self.teacher.isinf().any():
            raise ValueError(
                "teacher: expected finite numbers, or NaN for a pair without a teacher score; got infinity."
            )
        if self.text is not None and self.text.ndim != 1:
            raise ValueError(f"text: expected a vector (N,), one entry per row; got shape {tuple(self.text.shape)}.")
        for name in ("guide", "teacher_vectors"):
            vectors: Tensor | None = getattr(self, name)
            if vectors is not None and (vectors.ndim != 2 or not vectors.is_floating_point()):
                raise ValueError(
                    f"{name}: expected a floating-point matrix, one row per text; got {vectors.dtype} of shape "
                    f"{tuple(vectors.shape)}."
                )
        finite_P = self.score.isfinite()
        if not finite_P.all():
            pair = int((~finite_P).int().argmax())
            raise ValueError(
                f"score: expected finite numbers, got {self.score[pair].item()} for pair {pair}. "
                "Remove or correct rows of the data with an empty or non-numeric score."
            )

    def __len__(self) -> int:
        """Return P, the number of scored pairs."""
        return len(self.left)

    def check_rows(self, rows: int) -> None:
        """Raise `ValueError` for row numbers outside of 0 .. rows - 1, and fields of another number of rows."""
        for name, index_P in (("left", self.left), ("right", self.right)):
            if len(index_P) and not 0 <= int(index_P.min()) <= int(index_P.max()) < rows:
                raise ValueError(
                    f"{name}: expected row numbers in 0 .. {rows - 1}, as there are {rows} embeddings; got "
                    f"{int(index_P.min())} .. {int(index_P.max())}. Check that texts and pairs are of the same batch."
                )
        of_rows = {"text": self.text, "guide": self.guide, "teacher_vectors": self.teacher_vectors}
        for name, of_row in of_rows.items():
            if of_row is not None and len(of_row) != rows:
                raise ValueError(f"{name}: expected {rows} rows, as there are {rows} embeddings; got {len(of_row)}.")

    def widened(self) -> Relation:
        """Return the relation with int64 numbers, and scores and vectors of float32 at least."""

        numbers = ("left", "right", "group", "text")

        def wide(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return x.long() if name in numbers else x.to(torch.promote_types(x.dtype, torch.float32))

        fields: dict[str, Any] = {name: wide(name, x) for name, x in vars(self).items()}
        return Relation(**fields)

    def subset(self, pairs: Tensor) -> tuple[Tensor, Relation]:
        """Return the ascending rows (n,) of some of the pairs, and the relation of these pairs on those rows."""
        rows, numbers = torch.unique(torch.cat([self.left[pairs], self.right[pairs]]), return_inverse=True)
        left, right = numbers.chunk(2)
        of_pairs = {name: _rows_of(getattr(self, name), pairs) for name in ("group", "teacher")}
        of_rows = {name: _rows_of(getattr(self, name), rows) for name in ("text", "guide", "teacher_vectors")}
        return rows, Relation(left, right, self.score[pairs], **of_pairs, **of_rows)


def _rows_of(field: Tensor | None, index: Tensor) -> Tensor | None:
    return None if field is None else field[index]
