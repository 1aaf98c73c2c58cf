"""Rows of a matrix by index, with a gradient that is exact and equal on every run.

Legend: T rows of D columns, I indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gather(torch.autograd.Function):
    """states_TD[index_I]. The gradients of a node that several texts share are summed in float32 and rounded once, in
    the same order on every run; torch's own indexing does so on a CPU only."""

    @staticmethod
    def forward(ctx: Any, states_TD: Tensor, index_I: Tensor) -> Tensor:
        ctx.save_for_backward(index_I)
        ctx.nodes = len(states_TD)
        return states_TD.index_select(0, index_I)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ID: Tensor) -> tuple[Tensor, None]:
        (index_I,) = ctx.saved_tensors
        wide = torch.promote_types(gradient_ID.dtype, torch.float32)
        sum_TD = gradient_ID.new_zeros(ctx.nodes, gradient_ID.shape[1], dtype=wide)
        for some in range(0, len(index_I), BLOCK_ROWS):
            index, terms = index_I[some : some + BLOCK_ROWS], gradient_ID[some : some + BLOCK_ROWS].to(wide)
            if sum_TD.device.type == "cpu":
                sum_TD.index_add_(0, index, terms)
            else:  # index_add_ is not deterministic there; this sorts
                sum_TD.index_put_((index,), terms, accumulate=True)
        return sum_TD.to(gradient_ID.dtype), None


BLOCK_ROWS = 8192
"""Rows converted to float32 at a time."""


def gathered(states_TD: Tensor, index_I: Tensor) -> Tensor:
    """Return `states_TD[index_I]` by `_Gather`."""
    rows_ID: Tensor = _Gather.apply(states_TD, index_I)  # type: ignore[no-untyped-call]
    return rows_ID
