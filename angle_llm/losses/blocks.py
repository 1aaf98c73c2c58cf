"""Vectors computed from rows in blocks, so that the memory of an objective does not grow with the batch.

Shapes: N rows, D columns, P scored pairs, B of a block, V the entries of any vector.

An objective reads only a few short vectors from an embedding matrix: the cosine of each pair, the angle of each pair,
the repulsion of each anchor. Only the intermediate results are large, P × D for pairs and A × C for a contrast. So each
vector is computed in blocks, forward without a graph and backward again with one, and all vectors add their gradient to
one (N, D) matrix. The rest of the objective is ordinary autograd.

A batch whose vectors take one block each, such as 2,000 texts of 1,024 dimensions, keeps its graph: the same code, run
once.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from angle_llm.losses.similarity import Similarity

BLOCK_ELEMENTS = 2**22
"""Maximum of numbers in the rows of a block, and in its similarity matrix; a block has at least one row per side.

A block uses about fifteen arrays of that size or half of it, a quarter of a GB in float32. Smaller blocks are limited
by memory bandwidth (at D = 4096 a block compares 512 rows with 512); larger ones gain little."""


class RowVector(Protocol):
    """A vector that is a function of rows, computed in blocks."""

    def fits(self, columns: int) -> bool:
        """Return whether one block is enough for rows of so many columns."""

    def value(self, x_ND: Tensor) -> Tensor:
        """Return the vector (V,), differentiable under autograd; without a graph, each block is freed after use."""

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        """Add to `into_ND` the gradient with respect to the rows, given that with respect to `value(x_ND)`."""


def from_rows(x_ND: Tensor, *vectors: RowVector) -> tuple[Tensor, ...]:
    """Return the value of every vector, differentiable once, in the precision of the rows also under autocast."""
    with torch.autocast(x_ND.device.type, enabled=False):
        if all(vector.fits(x_ND.shape[1]) for vector in vectors):
            return tuple(vector.value(x_ND) for vector in vectors)
        values: tuple[Tensor, ...] = _InBlocks.apply(x_ND, vectors)  # type: ignore[no-untyped-call]
    return values


@dataclass(frozen=True)
class PairSimilarity:
    """One similarity per pair, (P,): of row left_P[p] with row right_P[p]."""

    similarity: Similarity
    left_P: Tensor
    right_P: Tensor

    def fits(self, columns: int) -> bool:
        return len(self.left_P) <= rows_a_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        # Results are allocated before the blocks: between them they would fragment the memory that blocks reuse.
        value_P = x_ND.new_empty(len(self.left_P))
        for block, sides in self._blocks(x_ND):
            value_P[block] = self.similarity(*sides)
        return value_P

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        for block, sides in self._blocks(x_ND):
            left_BD, right_BD = pull_back(self.similarity, sides, gradient_V[block])
            add_rows(into_ND, self.left_P[block], left_BD)
            add_rows(into_ND, self.right_P[block], right_BD)

    def _blocks(self, x_ND: Tensor) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        for block in slices(len(self.left_P), rows_a_side(x_ND.shape[1])):
            yield block, (rows(x_ND, self.left_P[block]), rows(x_ND, self.right_P[block]))


def rows_a_side(columns: int) -> int:
    """Return the number of rows of a block on each of its two sides."""
    return max(1, BLOCK_ELEMENTS // (2 * max(columns, 1)))


def square_side(columns: int) -> int:
    """Return the number of rows on each side of a block that compares every row of one side with all of the other."""
    return max(1, min(rows_a_side(columns), math.isqrt(BLOCK_ELEMENTS)))


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover 0 .. length; one empty slice if the length is 0."""
    for start in range(0, max(length, 1), size):
        yield slice(start, min(start + size, length))


def rows(x_ND: Tensor, index_B: Tensor) -> Tensor:
    """Return x_ND[index_B]. Unlike indexing, this sums the gradients of a row in the same order on every run."""
    return torch.nn.functional.embedding(index_B, x_ND)


def add_rows(into_ND: Tensor, index_B: Tensor, x_BD: Tensor) -> None:
    """Add x_BD to into_ND[index_B], with repeated rows added each time, in the same order on every run."""
    if into_ND.device.type == "cpu":
        into_ND.index_add_(0, index_B, x_BD)
    else:  # index_add_ is not deterministic there; this sorts
        into_ND.index_put_((index_B,), x_BD, accumulate=True)


def pull_back(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients by each argument, given the gradient by the value of the function."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    with torch.enable_grad():
        value = function(*leaves)
    return torch.autograd.grad(value, leaves, gradient)


class _InBlocks(torch.autograd.Function):
    """Several vectors as one function, so that their gradients share one matrix."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, vectors: tuple[RowVector, ...]) -> tuple[Tensor, ...]:
        values = tuple(vector.value(x_ND) for vector in vectors)
        ctx.vectors = vectors
        ctx.save_for_backward(x_ND, *values)  # a reference to the rows, no copy
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        x_ND, *values = ctx.saved_tensors
        into_ND = torch.zeros_like(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):  # backward may run inside autocast
            for vector, value_V, gradient_V in zip(ctx.vectors, values, gradients, strict=True):
                if gradient_V is not None:
                    vector.add_gradient(x_ND, value_V, gradient_V, into_ND)
        return into_ND, None
