"""SwiGLU, silu(gate) · up, which saves only `gate` and `up` for the backward pass, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, without a graph."""
    return functional.silu(gate).mul_(up)


def slopes(gate: Tensor, up: Tensor, gradient: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of silu(gate) · up with respect to `gate` and `up`, for an upstream `gradient`.

    The third value is the product itself, or None if not `with_product`.
    """
    silu = functional.silu(gate)
    value = silu * up if with_product else None
    return torch.ops.aten.silu_backward(gradient * up, gate), silu.mul_(gradient), value


class _SwiGlu(torch.autograd.Function):
    """Autograd function for silu(gate) · up that saves only `gate` and `up` for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Any:
        ctx.save_for_backward(gate, up)
        return product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return slopes(gate, up, gradient, False)[:2]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up. The backward pass computes silu(gate) again, so only `gate` and `up` are saved."""
    value: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return value
