"""RMSNorm and SwiGLU layers with frozen weights, as in LLaMA, that save fewer activations for the backward pass.

    RMSNorm   w · round(x / rms(x))       saves x and a number per row, instead of x in float32
    SwiGLU    down(silu(gate) · up)       saves gate and up; the backward pass computes silu(gate) and the product again

Outputs are bitwise equal to the outputs of the original layers on a CPU, and equal up to the last digit on a GPU, where
sums have another order; gradients are equal up to the order of sums. A layer is replaced if it has the parameters and
submodules of a LLaMA layer, and gives equal values and gradients on a small input. Weights are not copied or renamed, so
saved and merged models do not change.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.device import is_gpu, largest, trial_problem
from angle_llm.model.layers.fused_lora import FusedLora, are_plain, mixed_class, swiglu


class _FrozenNorm(torch.autograd.Function):
    """Autograd function for RMSNorm with a frozen weight that saves only x and a number per row."""

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
        # The derivative of `inverse`, 1 / rms, by x is -x inverse³ / columns.
        slope = (gradient * wide).sum(-1, keepdim=True).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return gradient.mul_(inverse).add_(wide * slope).to(x.dtype), None, None


def _fused_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm of `x`, computed by the GPU kernel of torch, which saves only `x` and a number per row.

    LLaMA also rounds before the product with the weight; this kernel rounds once, which is more exact.
    """
    return nn.functional.rms_norm(x, weight.shape, weight, epsilon)


class LowMemoryNorm(nn.Module):
    """Mixin for RMSNorm layers that saves fewer activations for the backward pass.

    The original forward method is used if the weight is trained or partitioned by ZeRO-3, or if dtypes differ.
    """

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        weight = layer.weight
        has_known_dtype = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        trained = weight.requires_grad and torch.is_grad_enabled()
        if not has_known_dtype or trained or hasattr(weight, "ds_id"):  # ZeRO-3 gathers it when the layer is called
            result: Tensor = super().forward(x)
        elif is_gpu(x.device):
            result = _fused_norm(x, weight, layer.variance_epsilon)
        else:
            result = _FrozenNorm.apply(x, weight, layer.variance_epsilon)  # type: ignore[no-untyped-call]
        return result


class LowMemoryMlp(nn.Module):
    """Mixin for SwiGLU MLPs that saves fewer activations for the backward pass.

    If `down_proj` is a LoRA layer, silu(gate) · up is computed inside it, and again in its backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        gate, up = layer.gate_proj(x), layer.up_proj(x)
        down = layer.down_proj
        rows: Tensor = down(gate, up=up) if isinstance(down, FusedLora) else down(swiglu(gate, up))
        return rows


def use_low_memory_layers(adapted: nn.Module) -> None:
    """Make the RMSNorm and SwiGLU layers of a backbone save fewer activations, by changing their class in place.

    Layers whose outputs would change are not replaced.
    """
    if are_plain():
        return
    weight = next(adapted.parameters())
    device = torch.device("cpu") if weight.is_meta else weight.device
    for layer in adapted.modules():
        mixin = LowMemoryNorm if _is_norm(layer) else LowMemoryMlp if _is_mlp(layer) else None
        if mixin is not None and not isinstance(layer, mixin):
            original: Any = type(layer)
            replacement = mixed_class(mixin, original)
            if _are_equal(layer, replacement, device):
                layer.__class__ = replacement


def _is_norm(layer: Any) -> bool:
    """Return whether a layer has the name and parameters of an RMSNorm as in LLaMA, and no replaced forward method."""
    return (
        type(layer).__name__.endswith("RMSNorm")
        and list(layer._parameters) == ["weight"]
        and isinstance(getattr(layer, "variance_epsilon", None), float)
        and "forward" not in vars(layer)
    )


def _is_mlp(layer: nn.Module) -> bool:
    """Return whether a layer has the submodules of an MLP as in LLaMA, and no replaced forward method."""
    return set(layer._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and "forward" not in vars(layer)


def _are_equal(layer: nn.Module, replacement: Any, device: torch.device) -> bool:
    """Return whether the class `replacement` gives the same values and gradients as the class of a layer.

    Both classes are compared on a small copy of the layer with random weights, in float32 and bfloat16. An out-of-memory
    error is raised.
    """
    # A GPU adds in another order, which changes the last digit of values below 8.
    limits = {
        dtype: 1e-6 if device.type == "cpu" else 8 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)
    }
    differences = (_difference(layer, replacement, dtype, device) / limit for dtype, limit in limits.items())
    return trial_problem(differences, 1.0) is None


def _difference(layer: nn.Module, replacement: Any, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest absolute difference of values and input gradients between a layer and its replacement class.

    Both classes are applied to a small copy of the layer with random weights in `dtype`.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    narrow, wide = 24, 40  # hidden size and intermediate size
    small = copy.copy(layer)
    small.training = True  # so that dropout in its `forward` gives other values
    small._parameters = {"weight": nn.Parameter(draw(narrow), requires_grad=False)} if layer._parameters else {}
    small._modules = {**layer._modules}
    for name, sizes in {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}.items():
        if name in small._modules:
            linear = nn.Linear(*sizes[::-1], bias=False, device="meta")
            linear.weight = nn.Parameter(draw(*sizes), requires_grad=False)
            small._modules[name] = linear
    x, upstream = draw(2, 3, narrow).requires_grad_(), draw(2, 3, narrow)
    results = []
    with torch.enable_grad():
        for layer_class in (type(layer), replacement):
            small.__class__ = layer_class
            value = small(x)
            results.append([value.detach(), *torch.autograd.grad(value, x, upstream)])
    return largest(float((original - replaced).abs().max()) for original, replaced in zip(*results, strict=True))
