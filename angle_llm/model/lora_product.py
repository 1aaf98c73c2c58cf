"""LoRA layers of peft in fewer passes over memory, for plain and for quantized base layers.

    y = base(x) + s (drop(x) Aᵀ) Bᵀ        s = scaling; drop: dropout of training, 1/(1 - p) included

Legend: T tokens (any leading shape, flattened), I inputs, O outputs, R rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from angle_llm.model.fast_paths import bits_of_layer, set_scale


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _swiglu_backward(gradient, gate, up, functional.silu(gate))


def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor, silu: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`; overwrites `silu`."""
    gradient_up = silu.mul_(gradient)
    return torch.ops.aten.silu_backward(gradient * up, gate), gradient_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up; keeps the two, and computes silu(gate) again in the backward pass."""
    product: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        base: nn.Module,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        x_TI = (x if up is None else functional.silu(x).mul_(up)).flatten(0, -2)
        mask_TI = torch.empty_like(x_TI, dtype=torch.uint8).bernoulli_(1 - dropout) if dropout else None
        ctx.base, ctx.scaling = base, scaling / (1 - dropout)
        hidden_TR = (_dropped(x_TI, mask_TI) @ lora_a.to(x.dtype).T).mul_(ctx.scaling)
        y_TO: Tensor = base(x_TI).addmm_(hidden_TR, lora_b.to(x.dtype).T)
        ctx.save_for_backward(x, up, mask_TI, hidden_TR, lora_a, lora_b)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, up, mask_TI, hidden_TR, lora_a, lora_b = ctx.saved_tensors
        gradient_TO = gradient.flatten(0, -2)
        gradient_TR = (gradient_TO @ lora_b.to(x.dtype)).mul_(ctx.scaling)
        gradient_b = (gradient_TO.T @ hidden_TR).to(lora_b.dtype)
        silu = None if up is None else functional.silu(x)
        x_TI = (x if silu is None else silu * up).flatten(0, -2)
        gradient_a = (gradient_TR.T @ _dropped(x_TI, mask_TI)).to(lora_a.dtype)
        del x_TI
        gradient_x = gradient_up = None
        if any(ctx.needs_input_grad[:2]):
            gradient_TI = gradient_TO @ frozen_weight(ctx.base, x.dtype)
            if mask_TI is None:
                gradient_TI.addmm_(gradient_TR, lora_a.to(x.dtype))
            else:
                gradient_TI += _dropped(gradient_TR @ lora_a.to(x.dtype), mask_TI)
            gradient_x = gradient_TI.view_as(x)
            if silu is not None:
                gradient_x, gradient_up = _swiglu_backward(gradient_x, x, up, silu)
        return gradient_x, gradient_up, None, gradient_a, gradient_b, None, None


def _dropped(x_TI: Tensor, mask_TI: Tensor | None) -> Tensor:
    """Return dropout of `x_TI` without its scale, which applies to the smaller (T, R) products."""
    # Not torch.where(mask, x, 0): on a GPU it copies the 0 from the CPU, and waits.
    return x_TI if mask_TI is None else x_TI * mask_TI


def lora_linear(
    x: Tensor,
    base: nn.Module,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    dropout: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:
    """Return base(x) + scaling · (drop(x) Aᵀ) Bᵀ for x (…, I), lora_a (R, I), lora_b (O, R), and a frozen linear layer.

    Step by step, the update needs as many passes over (T, O) as the layer itself. Here, the scaling applies to the
    (T, R) product, and the matrix products add up. Value and gradients are those of peft up to the order of additions.
    Dropout draws the random numbers that peft draws on a CPU; its mask is kept in a byte per element, and drop(x) is
    computed again in the backward pass. All is computed in the dtype of `x`; a wider adapter is rounded for its
    products, as under autocast (peft computes the update of a half-precision base in float32 and rounds the sum).

    With `up`, the input is silu(x) · up, which is computed again in the backward pass, too.

    The gradient of a quantized base is that of bitsandbytes: the product with the dequantized weight. No second
    derivative.
    """
    y: Tensor = _LoraLinear.apply(x, up, base, lora_a, lora_b, scaling, dropout)  # type: ignore[no-untyped-call]
    return y


def frozen_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, I) of a linear layer, plain or quantized, in the dtype of its products."""
    bits = bits_of_layer(layer)
    if bits is None:
        plain: Tensor = layer.weight
        return plain
    if bits == 8:
        scale_O1 = layer.scale_O.unsqueeze(1).mul(1.0 / 127.0)
        values: Tensor = layer.weight.data.to(dtype).mul_(scale_O1)
        return values
    bnb: Any = importlib.import_module("bitsandbytes")
    values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return values.to(dtype)


_PEFT_LAYERS = {
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit", "peft.tuners.lora.bnb.Linear8bitLt",
}  # fmt: skip
"""By name: without bitsandbytes, peft has no module `bnb`."""


def use_short_lora(adapted: nn.Module) -> None:
    """Make plain LoRA layers of peft compute with `lora_linear`; everything else is unchanged."""
    for layer in adapted.modules():
        kind: Any = type(layer)
        if f"{kind.__module__}.{kind.__qualname__}" in _PEFT_LAYERS:
            layer.__class__ = _short_lora_class(kind)


@cache
def _short_lora_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (ShortLora, kind), {})


class ShortLora(nn.Module):
    """A layer of peft, with `lora_linear` where only plain LoRA is needed."""

    def forward(self, x: Tensor, *args: Any, up: Tensor | None = None, **named: Any) -> Tensor:
        """Return the layer's output for x; for silu(x) · up, given `up`."""
        layer: Any = self
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        if len(active) == 1 and not (args or named or layer.disable_adapters or layer.merged):
            (name,) = active
            lora_a, lora_b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
            share: float = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
            plain = name not in layer.lora_variant and lora_b.bias is None and share < 1
            if plain and _is_frozen_linear(layer.base_layer, x):
                return lora_linear(x, layer.base_layer, lora_a.weight, lora_b.weight, layer.scaling[name], share, up)
        result: Tensor = super().forward(x if up is None else swiglu(x, up), *args, **named)
        return result


def _is_frozen_linear(layer: Any, x: Tensor) -> bool:
    """Return whether a base layer is a frozen linear layer that computes in the dtype of `x`."""
    bits = bits_of_layer(layer)
    if bits is None:
        known = type(layer) is nn.Linear and x.dtype == layer.weight.dtype
    elif bits == 4:  # a repacked weight cannot be dequantized: see `patch_bitsandbytes`
        known = layer.compute_dtype in (None, x.dtype) and not layer.support_avx512bf16_for_cpu
    else:
        known = hasattr(layer, "scale_O") and not layer.state.has_fp16_weights
    return (
        known
        and not _is_patched(layer)
        and not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        and not hasattr(layer.weight, "ds_id")  # ZeRO-3 gathers the weights of a layer when it is called
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
    )


def _is_patched(layer: nn.Module) -> bool:
    """Return whether a layer has a forward of its own, or hooks other than that of `patch_bitsandbytes`."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks: list[Mapping[int, Callable[..., Any]]] = [getattr(layer, name) for name in names]
    return "forward" in vars(layer) or any(hook is not set_scale for each in hooks for hook in each.values())
