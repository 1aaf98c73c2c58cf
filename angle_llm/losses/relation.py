"""The relation of a batch: which rows of the embedding matrix form scored pairs.

Shapes: N rows (unique texts), P scored pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A copy to a GPU, from pinned memory, does not wait for the work in its queue."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Relation:
    """P scored pairs of rows: `score[p]` is the similarity of rows `left[p]` and `right[p]`.

    A relation on the CPU can be used with embeddings on any device. Losses compute indices from it on the CPU:
    their sizes depend on values, and reading a value from a GPU synchronises it.

    All losses read a batch through this class. Further fields (the side of a row, groups, teacher scores, excluded
    pairs) belong here, with a default that changes nothing.

    Raises:
        ValueError: for tensors of different lengths, row numbers that are not integers, or scores that are not finite.
    """

    left: Tensor
    """(P,) integer row numbers."""
    right: Tensor
    """(P,) integer row numbers."""
    score: Tensor
    """(P,) finite numbers; a higher score means more similar."""

    def __post_init__(self) -> None:
        shapes = {"left": self.left.shape, "right": self.right.shape, "score": self.score.shape}
        if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
            got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(
                f"left, right and score: expected vectors of one length (P,), one entry per pair; got {got}."
            )
        for name, index_P in (("left", self.left), ("right", self.right)):
            if index_P.is_floating_point() or index_P.dtype == torch.bool:
                raise ValueError(
                    f"{name}: expected row numbers of an integer dtype such as int64, got {index_P.dtype}."
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
        """Raise `ValueError` for row numbers outside of 0 .. rows - 1."""
        for name, index_P in (("left", self.left), ("right", self.right)):
            if len(index_P) and not 0 <= int(index_P.min()) <= int(index_P.max()) < rows:
                raise ValueError(
                    f"{name}: expected row numbers in 0 .. {rows - 1}, as there are {rows} embeddings; got "
                    f"{int(index_P.min())} .. {int(index_P.max())}. Check that texts and pairs are of the same batch."
                )

    def widened(self) -> Relation:
        """Return the relation with int64 row numbers and scores of float32 at least."""
        score_P = self.score.to(torch.promote_types(self.score.dtype, torch.float32))
        return Relation(self.left.long(), self.right.long(), score_P)

    def subset(self, pairs: Tensor) -> tuple[Tensor, Relation]:
        """Return the ascending rows (n,) of some of the pairs, and the relation of these pairs on those rows."""
        rows, numbers = torch.unique(torch.cat([self.left[pairs], self.right[pairs]]), return_inverse=True)
        left, right = numbers.chunk(2)
        return rows, Relation(left, right, self.score[pairs])
