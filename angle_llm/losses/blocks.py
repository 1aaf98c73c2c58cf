"""Block-wise computation of vectors from embeddings, so that the memory of a loss does not grow with the batch.

Shapes: N rows, D columns, P scored pairs, B rows or pairs of a block, V entries of a vector.

A loss reads only a few short vectors from the matrix of embeddings: the cosine of each pair, the angle of each pair,
and the log-sum-exp over the negatives of each anchor. Only the intermediate results are large: P × D for pairs, and
anchors × candidates for negatives. So each vector is computed in blocks. The forward pass stores no graph; the backward
pass computes each block again with a graph, and adds the gradients of all vectors to one (N, D) matrix. The rest of the
loss is ordinary autograd.

If each vector fits in a single block, for example 2,000 texts of 1,024 dimensions, the forward pass keeps the graph,
and nothing is computed twice.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from angle_llm.losses.similarity import Similarity

BLOCK_ELEMENTS = 2**22
"""Maximum number of elements of the embedding rows, and of the similarity matrix, that a loss computes at a time.

A block (rows that are computed together) has at least one left row and one right row. A block uses about fifteen arrays
of this size or half this size, a quarter of a GB in float32. Smaller blocks are limited by memory bandwidth (at D =
4096, a block compares 512 rows with 512 rows); larger blocks are hardly faster."""


class RowVector(Protocol):
    """Interface of a vector (V,) that is computed from the rows of an embedding matrix, in blocks to save memory.

    A vector that several terms share is the same object, and is computed once.
    """

    def fits(self, columns: int) -> bool:
        """Return whether memory suffices to compute the whole vector at once, from embeddings with `columns` dimensions."""

    def value(self, x_ND: Tensor) -> Tensor:
        """Compute the vector (V,) from embeddings (N, D), differentiable by autograd.

        Under `no_grad`, the memory of a block is freed after the block is computed.
        """

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        """Backward pass: add the gradient with respect to the embeddings `x_ND` to `into_ND` in place.

        `value_V` is `value(x_ND)`, and `gradient_V` is the gradient with respect to `value_V`.
        """


def from_rows(x_ND: Tensor, *vectors: RowVector) -> tuple[Tensor, ...]:
    """Compute several vectors from an embedding matrix (N, D), in blocks if a vector does not fit in a single block.

    The results support one backward pass without second derivatives. The caller disables autocast.
    """
    if all(vector.fits(x_ND.shape[1]) for vector in vectors):
        return tuple(vector.value(x_ND) for vector in vectors)
    values: tuple[Tensor, ...] = _InBlocks.apply(x_ND, vectors)  # type: ignore[no-untyped-call]
    return values


@dataclass(frozen=True, eq=False)
class PairSimilarity:
    """Similarities (P,) of pairs of embedding rows, left_P[p] and right_P[p], computed in blocks; a `RowVector`."""

    similarity: Similarity
    left_P: Tensor
    right_P: Tensor

    def fits(self, columns: int) -> bool:
        return len(self.left_P) <= rows_a_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        # Allocated before the blocks: results between the blocks would fragment the memory that blocks reuse.
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
        """Yield for each block of B pairs the slice of the pairs, and their left and right embeddings (B, D)."""
        for block in slices(len(self.left_P), rows_a_side(x_ND.shape[1])):
            yield block, (rows(x_ND, self.left_P[block]), rows(x_ND, self.right_P[block]))


@dataclass(frozen=True)
class WholeMatrix:
    """Vector (1,) with the value of a function of the embedding matrix, computed without blocks; a `RowVector`."""

    function: Callable[[Tensor], Tensor]
    """Function that maps the embeddings (N, D) to a scalar."""

    def fits(self, columns: int) -> bool:
        return True

    def value(self, x_ND: Tensor) -> Tensor:
        return self.function(x_ND).reshape(1)

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        (gradient_ND,) = pull_back(self.value, (x_ND,), gradient_V)
        into_ND += gradient_ND


def rows_a_side(columns: int) -> int:
    """Return how many pairs of embeddings with `columns` dimensions are computed at a time."""
    return max(1, BLOCK_ELEMENTS // (2 * max(columns, 1)))


def square_side(columns: int) -> int:
    """Return the maximum number of rows and columns of a similarity matrix that is computed at a time.

    `columns` is the number of dimensions of the embeddings.
    """
    return max(1, min(rows_a_side(columns), math.isqrt(BLOCK_ELEMENTS)))


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` indices that cover range(length); an empty slice if length is 0."""
    for start in range(0, max(length, 1), size):
        yield slice(start, min(start + size, length))


def rows(x_ND: Tensor, index_B: Tensor) -> Tensor:
    """Return x_ND[index_B]. Unlike indexing, the backward pass adds the gradients of repeated rows in a fixed order."""
    return torch.nn.functional.embedding(index_B, x_ND)


def add_rows(into_ND: Tensor, index_B: Tensor, x_BD: Tensor) -> None:
    """Add row b of x_BD to row index_B[b] of into_ND, in place; repeated indices accumulate in a fixed order."""
    if into_ND.device.type == "cpu":
        into_ND.index_add_(0, index_B, x_BD)
    else:  # on GPUs, index_add_ is not deterministic; index_put_ sorts the indices
        into_ND.index_put_((index_B,), x_BD, accumulate=True)


def pull_back(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient with respect to each argument of a function: its vector-Jacobian product.

    `gradient` is the gradient with respect to the function value.
    """
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    with torch.enable_grad():
        value = function(*leaves)
    return torch.autograd.grad(value, leaves, gradient)


class _InBlocks(torch.autograd.Function):
    """Autograd function that computes several vectors from embeddings in blocks.

    The backward pass computes every block again, and adds the gradients of all vectors to a single (N, D) matrix.
    """

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
