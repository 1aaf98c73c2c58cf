"""The scored pairs of a batch, as row numbers of the embedding matrix, and optional teacher data.

Shapes: N rows (unique texts), P scored pairs, G columns of a guide, T columns of a teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A new field of `Relation` belongs to one of the first two tuples, by its axis, and perhaps to one of the others.
_OF_PAIRS = ("group", "teacher")
"""Names of the optional fields of `Relation` with an entry per pair, shape (P,)."""
_OF_ROWS = ("text", "guide", "teacher_vectors")
"""Names of the optional fields of `Relation` with an entry per embedding row, shape (N, …)."""
_INTEGERS = ("left", "right", "group", "text")
_MATRICES = ("guide", "teacher_vectors")


@dataclass(frozen=True)
class Relation:
    """The P scored pairs of a batch: `score[p]` is the similarity of embedding rows `left[p]` and `right[p]`.

    The tensors should be on the CPU, also for embeddings on a GPU. Losses compute indices whose sizes depend on values
    of these tensors, and reading a value from a GPU waits for the GPU.

    Raises:
        ValueError: for tensors of different lengths, row numbers that are not integers, or scores that are not finite.
    """

    left: Tensor
    """(P,) integers: row number, in the embedding matrix, of the first text of each pair."""
    right: Tensor
    """(P,) integers: row number, in the embedding matrix, of the second text of each pair."""
    score: Tensor
    """(P,) finite similarity scores of the pairs; a higher score means more similar."""
    group: Tensor | None = None
    """(P,) integers: number of the training example that contains each pair.

    All pairs of a query with its positives and negatives in an example have equal numbers.
    """
    teacher: Tensor | None = None
    """(P,) teacher score of each pair, on any scale; NaN for a pair without a teacher score."""
    text: Tensor | None = None
    """(N,) integers: text number of each embedding row. None: all rows are embeddings of different texts.

    Rows with equal numbers embed the same text, for example as a query and as a document. Such rows are never negatives
    of each other, and a positive of a row is never a negative of another row with the same text.
    """
    guide: Tensor | None = None
    """(N, G) vectors of the texts from a guide encoder, whose cosines decide which candidates are false negatives."""
    teacher_vectors: Tensor | None = None
    """(N, T) vectors of the texts from a teacher encoder, which the model learns to imitate."""

    def __post_init__(self) -> None:
        shapes = {"left": self.left.shape, "right": self.right.shape, "score": self.score.shape}
        if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
            got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(
                f"left, right and score: expected vectors of one length (P,), one entry per pair; got {got}."
            )
        for name in _INTEGERS:
            index: Tensor | None = getattr(self, name)
            if index is not None and (index.is_floating_point() or index.dtype == torch.bool):
                raise ValueError(f"{name}: expected numbers of an integer dtype such as int64, got {index.dtype}.")
        for name in _OF_PAIRS:
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
        for name in _MATRICES:
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
        """Check that the pairs and all tensors with N rows fit an embedding matrix with `rows` rows.

        Raises:
            ValueError: for a row number outside of 0 .. rows - 1, or a tensor with another number of rows.
        """
        for name, index_P in (("left", self.left), ("right", self.right)):
            if len(index_P) and not 0 <= int(index_P.min()) <= int(index_P.max()) < rows:
                raise ValueError(
                    f"{name}: expected row numbers in 0 .. {rows - 1}, as there are {rows} embeddings; got "
                    f"{int(index_P.min())} .. {int(index_P.max())}. Check that texts and pairs are from the same batch."
                )
        for name in _OF_ROWS:
            of_row: Tensor | None = getattr(self, name)
            if of_row is not None and len(of_row) != rows:
                raise ValueError(f"{name}: expected {rows} rows, as there are {rows} embeddings; got {len(of_row)}.")

    def widened(self) -> Relation:
        """Return a copy with all integers as int64, and half-precision scores and vectors as float32."""

        def wide(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return x.long() if name in _INTEGERS else x.to(torch.promote_types(x.dtype, torch.float32))

        fields: dict[str, Any] = {name: wide(name, x) for name, x in vars(self).items()}
        return Relation(**fields)

    def subset(self, pairs: Tensor) -> tuple[Tensor, Relation]:
        """Select pairs by index; return the ascending embedding row numbers (n,) of these pairs, and a new `Relation`.

        Row numbers in the new `Relation` refer to the n returned rows.
        """
        rows, numbers = torch.unique(torch.cat([self.left[pairs], self.right[pairs]]), return_inverse=True)
        left, right = numbers.chunk(2)
        of_pairs = {name: _rows_of(getattr(self, name), pairs) for name in _OF_PAIRS}
        of_rows = {name: _rows_of(getattr(self, name), rows) for name in _OF_ROWS}
        return rows, Relation(left, right, self.score[pairs], **of_pairs, **of_rows)


def _rows_of(field: Tensor | None, index: Tensor) -> Tensor | None:
    """Return field[index], or None if field is None."""
    return None if field is None else field[index]
