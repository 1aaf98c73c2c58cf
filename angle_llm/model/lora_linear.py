"""A linear layer with a LoRA update, in as few passes over memory as it takes.

    y = x Wᵀ + bias + s · (x Aᵀ) Bᵀ

The update needs few operations (rank over width of the layer's) but, done step by step, as many passes over (T, out) as
the layer itself: multiply by s, add, and again on the way back. Here s is applied to (T, rank), and sums are made by the
products that follow. Value and gradients are peft's, up to the order of additions; on a half-precision base peft computes
the update in float32 and rounds the sum, here the products are rounded too (docs/LOG.md has the scores of both).

Legend: T tokens (any leading shape, flattened).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        hidden_TR = (x_TI @ lora_a.to(x.dtype).T).mul_(scaling)
        y_TO = torch.nn.functional.linear(x_TI, weight, bias).addmm_(hidden_TR, lora_b.to(x.dtype).T)
        ctx.save_for_backward(x, hidden_TR, weight, lora_a, lora_b)
        ctx.scaling = scaling
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden_TR, weight, lora_a, lora_b = ctx.saved_tensors
        x_TI, gradient_TO = x.flatten(0, -2), gradient.flatten(0, -2)
        gradient_TR = (gradient_TO @ lora_b.to(x.dtype)).mul_(ctx.scaling)
        gradient_b = (gradient_TO.T @ hidden_TR).to(lora_b.dtype)
        gradient_a = (gradient_TR.T @ x_TI).to(lora_a.dtype)
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = (gradient_TO @ weight).addmm_(gradient_TR, lora_a.to(x.dtype)).view_as(x)
        return gradient_x, None, None, gradient_a, gradient_b, None


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """The layer above: x (…, in), weight (out, in) and bias (out,) frozen, lora_a (rank, in), lora_b (out, rank).

    `x` has the weight's dtype, and all is computed in it; a wider adapter is rounded for its products alone, as autocast
    does, and gets its gradient, and keeps its value, in its own dtype. Has no second derivative.
    """
    y: Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, scaling)  # type: ignore[no-untyped-call]
    return y
