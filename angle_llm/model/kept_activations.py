"""Frozen norms and MLPs of LLaMA-like decoders that keep fewer activations for the backward pass.

    RMSNorm   w · round(x / rms(x))       keeps x and one number per row, not x in float32
    SwiGLU    down(silu(gate) · up)       keeps gate and up; computes silu(gate) and the product again

Values are those of the unchanged layers, bit by bit, and gradients up to the order of sums. Layers are found by their
parts, and each must give the values of the unchanged layer on a small input. Weights are not copied or renamed, so a
saved or merged model does not change.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.model.lora_product import ShortLora, swiglu

_WIDTHS = 24, 40
"""Sizes of the layers for the comparison."""


class _FrozenNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        wide, gradient = x.float(), (gradient * weight).float()
        slope = (gradient * wide).sum(-1, keepdim=True).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return gradient.mul_(inverse).add_(wide * slope).to(x.dtype), None, None


def _fused_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the same by a kernel of torch for GPUs, which also keeps x and one number per row.

    Not given the weight, it rounds before the product with the weight, as LLaMA does.
    """
    return nn.functional.rms_norm(x, weight.shape, eps=epsilon) * weight


class _ShortNorm(nn.Module):
    """An RMSNorm; unchanged if its weight trains, or in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        weight = layer.weight
        known = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not known or weight.requires_grad or hasattr(weight, "ds_id"):  # ZeRO-3 gathers it when the layer is called
            result: Tensor = super().forward(x)
        elif x.is_cuda:
            result = _fused_norm(x, weight, layer.variance_epsilon)
        else:
            result = _FrozenNorm.apply(x, weight, layer.variance_epsilon)  # type: ignore[no-untyped-call]
        return result


class _ShortMlp(nn.Module):
    """A SwiGLU; a LoRA layer for `down_proj` computes the product itself."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        gate, up = layer.gate_proj(x), layer.up_proj(x)
        down = layer.down_proj
        rows: Tensor = down(gate, up=up) if isinstance(down, ShortLora) else down(swiglu(gate, up))
        return rows


def keep_fewer_activations(adapted: nn.Module) -> None:
    """Change the norms and MLPs of a backbone with frozen weights that have a known form; others stay."""
    for layer in adapted.modules():
        short = _ShortNorm if _is_norm(layer) else _ShortMlp if _is_mlp(layer) else None
        if short is not None:
            original: Any = type(layer)
            kind = _short_class(short, original)
            if _are_equal(layer, kind):
                layer.__class__ = kind


@cache
def _short_class(short: Any, kind: Any) -> Any:
    return type(kind.__name__, (short, kind), {})


def _is_norm(layer: Any) -> bool:
    return (
        type(layer).__name__.endswith("RMSNorm")
        and not layer._modules
        and not layer._buffers
        and list(layer._parameters) == ["weight"]
        and isinstance(getattr(layer, "variance_epsilon", None), float)
        and "forward" not in vars(layer)
    )


def _is_mlp(layer: nn.Module) -> bool:
    return (
        set(layer._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and not layer._parameters
        and not layer._buffers
        and "forward" not in vars(layer)
    )


def _are_equal(layer: nn.Module, kind: Any) -> bool:
    """Return whether a copy of the layer with small random weights gives equal values and gradients as `kind`."""
    try:
        return all(_difference(layer, kind, dtype) < 1e-6 for dtype in (torch.float32, torch.bfloat16))
    except Exception:  # another architecture can fail in any way
        return False


def _difference(layer: nn.Module, kind: Any, dtype: torch.dtype) -> float:
    """Return the largest difference of values and gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(dtype)

    narrow, wide = _WIDTHS
    small = copy.copy(layer)
    small._parameters = {"weight": nn.Parameter(draw(narrow), requires_grad=False)} if layer._parameters else {}
    small._modules = {**layer._modules}
    for name, sizes in {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}.items():
        if name in small._modules:
            linear = nn.Linear(*sizes[::-1], bias=False, device="meta")
            linear.weight = nn.Parameter(draw(*sizes), requires_grad=False)
            small._modules[name] = linear
    x, upstream = draw(2, 3, narrow).requires_grad_(), draw(2, 3, narrow)
    found = []
    with torch.enable_grad():
        for each in (type(layer), kind):
            small.__class__ = each
            value = small(x)
            found.append([value.detach(), *torch.autograd.grad(value, x, upstream)])
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
