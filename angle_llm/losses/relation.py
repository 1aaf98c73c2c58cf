"""The scored pairs of a batch, as row numbers of the embedding matrix, and optional teacher data.

Shapes: N rows (unique texts), P scored pairs, G columns of a guide, T columns of a teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# A new field of `Relation` belongs to one of the first two, by its axis, and perhaps to the last.
_OF_PAIRS = ("left", "right", "score", "group", "teacher", "label")
"""Names of the fields of `Relation` with an entry per pair, shape (P,)."""
_OF_ROWS = {"text": 1, "guide": 2, "teacher_vectors": 2}
"""Name → number of axes of the fields of `Relation` with an entry per embedding row, shape (N, …)."""
_INTEGERS = ("left", "right", "group", "text", "label")


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
    """(P,) integers: row number, in the embedding matrix, of the second text of each pair.

    It equals `left[p]` if both texts have the same token ids.
    """
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
    label: Tensor | None = None
    """(P,) integers: class number of the left text of each pair; -1 for a pair without a class."""

    def __post_init__(self) -> None:
        """Check shapes, dtypes and scores; the number of rows is checked in `check_rows`."""
        pairs = self.left.numel()
        for name, tensor in self._tensors():
            shape = tuple(tensor.shape)
            if name in _OF_PAIRS and shape != (pairs,):
                raise ValueError(f"{name}: expected one entry per pair, shape ({pairs},) as in left; got {shape}.")
            if name in _OF_ROWS and len(shape) != _OF_ROWS[name]:
                raise ValueError(
                    f"{name}: expected {_OF_ROWS[name]} axes, the first with an entry per row; got {shape}."
                )
            if name in _INTEGERS and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                raise ValueError(f"{name}: expected numbers of an integer dtype such as int64, got {tensor.dtype}.")
            if _OF_ROWS.get(name) == 2 and not tensor.is_floating_point():
                raise ValueError(f"{name}: expected floating-point vectors, got {tensor.dtype}.")
        if self.teacher is not None and self.teacher.isinf().any():
            raise ValueError(
                "teacher: expected finite numbers, or NaN for a pair without a teacher score; got infinity."
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
        for name, tensor in self._tensors():
            if name in _OF_ROWS and len(tensor) != rows:
                raise ValueError(f"{name}: expected {rows} rows, as there are {rows} embeddings; got {len(tensor)}.")

    def text_numbers(self, rows: int) -> Tensor:
        """Return the text number (N,) of each of N embedding rows, from 0 to number of texts - 1."""
        if self.text is None:
            return torch.arange(rows, device=self.left.device)
        number_N: Tensor = torch.unique(self.text, return_inverse=True)[1]
        return number_N

    def required(self, name: str, user: str) -> Tensor:
        """Return an optional field that `user`, a setting, needs.

        Raises:
            ValueError: if the relation does not have the field.
        """
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"{user}: expected a relation with {name}, got None. Add {name}, or unset {user}.")
        return tensor

    def widened(self) -> Relation:
        """Return a copy with all integers as int64, and half-precision scores and vectors as float32."""
        return replace(self, **{name: _widened(name, tensor) for name, tensor in self._tensors()})

    def subset(self, pairs: Tensor) -> tuple[Tensor, Relation]:
        """Select pairs by index; return the ascending embedding row numbers (n,) of these pairs, and a new `Relation`.

        Row numbers in the new `Relation` refer to the n returned rows.
        """
        rows, numbers = torch.unique(torch.cat([self.left[pairs], self.right[pairs]]), return_inverse=True)
        selected = {name: tensor[pairs if name in _OF_PAIRS else rows] for name, tensor in self._tensors()}
        selected["left"], selected["right"] = numbers.chunk(2)
        return rows, Relation(**selected)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of each field that is not None."""
        return [(name, tensor) for name, tensor in vars(self).items() if tensor is not None]


def _widened(name: str, tensor: Tensor) -> Tensor:
    """Return a field of `Relation` as int64, or as float32 or float64."""
    return tensor.long() if name in _INTEGERS else tensor.to(torch.promote_types(tensor.dtype, torch.float32))
