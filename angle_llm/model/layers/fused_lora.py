"""LoRA layers that replace the LoRA layers of peft and need fewer passes over memory; the base may be quantized.

    y = base(x) + s (drop(x) Aᵀ) Bᵀ        s: scaling; drop: dropout in training, including the factor 1/(1 - p)

The input x may be a SwiGLU product, silu(gate) · up.

Legend: T tokens (any leading shape, flattened), I inputs, O outputs, R rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.model.layers.quantized_layers import bits_of_layer, input_gradient, set_scale


def swiglu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, without a graph."""
    return nn.functional.silu(gate).mul_(up)


def swiglu_slopes(
    gate: Tensor, up: Tensor, gradient: Tensor, with_product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of silu(gate) · up with respect to `gate` and `up`, for an upstream `gradient`.

    The third value is the product itself, or None if not `with_product`.
    """
    silu = nn.functional.silu(gate)
    value = silu * up if with_product else None
    return torch.ops.aten.silu_backward(gradient * up, gate), silu.mul_(gradient), value


class _SwiGlu(torch.autograd.Function):
    """Autograd function for silu(gate) · up that saves only `gate` and `up` for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Any:
        ctx.save_for_backward(gate, up)
        return swiglu_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return swiglu_slopes(gate, up, gradient, False)[:2]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up. The backward pass computes silu(gate) again, so only `gate` and `up` are saved."""
    value: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return value


class _LoraLinear(torch.autograd.Function):
    """Autograd function for a LoRA layer (`lora_linear`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        up_TI: Tensor | None,
        base: nn.Module,
        scaling: float,
        dropout: float,
        a_RI: Tensor,
        b_OR: Tensor,
    ) -> Tensor:
        a_RI, b_OR = a_RI.to(x_TI.dtype), b_OR.to(x_TI.dtype)
        input_TI = x_TI if up_TI is None else swiglu_product(x_TI, up_TI)
        mask_TI = torch.empty_like(input_TI, dtype=torch.uint8).bernoulli_(1 - dropout) if dropout else None
        ctx.base = base
        ctx.scaling = scaling / (1 - dropout)
        hidden_TR = (_dropped(input_TI, mask_TI) @ a_RI.T).mul_(ctx.scaling)
        # The matrices are saved rounded, so that it happens once.
        ctx.save_for_backward(x_TI, up_TI, mask_TI, hidden_TR, a_RI, b_OR)
        output_TO: Tensor = base(input_TI).addmm_(hidden_TR, b_OR.T)
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Any, ...]:
        x_TI, up_TI, mask_TI, hidden_TR, a_RI, b_OR = ctx.saved_tensors
        gradient_TR = (gradient_TO @ b_OR).mul_(ctx.scaling)
        # Gradients of the inputs; for a product, silu(x) · up is computed in the same kernel.
        gradient_TI: Any = None
        gradient_up = input_TI = None
        if any(ctx.needs_input_grad[:2]):
            gradient_TI = input_gradient(ctx.base, gradient_TO)
            if mask_TI is None:
                gradient_TI.addmm_(gradient_TR, a_RI)
            else:
                gradient_TI += _dropped(gradient_TR @ a_RI, mask_TI)
            if up_TI is not None:
                gradient_TI, gradient_up, input_TI = swiglu_slopes(x_TI, up_TI, gradient_TI, True)
        if input_TI is None:
            input_TI = x_TI if up_TI is None else swiglu_product(x_TI, up_TI)
        # autograd casts the gradient of a matrix to the dtype of the matrix.
        gradient_a, gradient_b = gradient_TR.T @ _dropped(input_TI, mask_TI), gradient_TO.T @ hidden_TR
        return gradient_TI, gradient_up, None, None, None, gradient_a, gradient_b  # None: base, scaling, dropout


def _dropped(x_TI: Tensor, mask_TI: Tensor | None) -> Tensor:
    """Return `x_TI` with zeros where the dropout mask is 0; None: `x_TI` itself.

    The dropout factor 1/(1 - p) is not applied here. `_LoraLinear` multiplies the smaller product (T, R) by the factor.
    """
    # torch.where(mask, x, 0) would copy the 0 from the CPU to a GPU, and wait.
    return x_TI if mask_TI is None else x_TI * mask_TI


def lora_linear(
    x: Tensor, base: nn.Module, a_RI: Tensor, b_OR: Tensor, scaling: float, dropout: float, up: Tensor | None = None
) -> Tensor:
    """Return base(x) + scaling · (drop(x) Aᵀ) Bᵀ for a LoRA layer, with little memory.

    For T tokens and rank R, the scaling is applied to the (T, R) product. The last product is added to the output (T, O) in
    place, where peft needs several passes. Values and gradients equal the results of peft up to the order of additions.
    Everything is computed in the dtype of `x`, and a wider adapter is rounded, as under autocast. In contrast, peft
    computes the update of a half-precision base in float32. Second derivatives are not available.

    Dropout draws the same random numbers as peft on a CPU. The mask takes a byte per element, and drop(x) is computed again
    in the backward pass. For a quantized base, the gradient is computed with the dequantized weight, as in bitsandbytes.

    Args:
        x: input (…, I).
        up: (…, I); if given, the input is silu(x) · up, which is also computed again in the backward pass.
    """
    x_TI = x.flatten(0, -2)
    up_TI = None if up is None else up.flatten(0, -2)
    y_TO: Tensor = _LoraLinear.apply(x_TI, up_TI, base, scaling, dropout, a_RI, b_OR)  # type: ignore[no-untyped-call]
    # Outside the function, because autograd refuses to change in place a view that a custom function returns.
    return y_TO.view(*x.shape[:-1], -1)


_PEFT_LAYERS = {
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit", "peft.tuners.lora.bnb.Linear8bitLt",
}  # fmt: skip
"""Class paths of the LoRA layers of peft that are replaced. They are strings, because peft has no module `bnb` without
bitsandbytes."""


def are_plain() -> bool:
    """Return whether the environment variable ANGLE_LLM_PLAIN selects the layers and layouts of the libraries."""
    return os.environ.get("ANGLE_LLM_PLAIN", "").lower() in ("1", "true", "yes", "on")


def use_fused_lora(adapted: nn.Module) -> None:
    """Make all LoRA layers of peft in a model compute by `FusedLora`, by changing their class in place.

    Weights and names of layers are unchanged.
    """
    if are_plain():
        return
    for layer in adapted.modules():
        layer_class: Any = type(layer)
        if f"{layer_class.__module__}.{layer_class.__qualname__}" in _PEFT_LAYERS:
            layer.__class__ = mixed_class(FusedLora, layer_class)


@cache
def mixed_class(mixin: type[nn.Module], original: type[nn.Module]) -> Any:
    """Return a subclass of the layer class `original`, with the same name, whose forward method is `mixin.forward`."""
    return type(original.__name__, (mixin, original), {})


class FusedLora(nn.Module):
    """Mixin for LoRA layers of peft: computes plain LoRA by `lora_linear`, and all else (DoRA, merged weights) by peft."""

    def plain(self, x: Tensor) -> tuple[nn.Module, Tensor, Tensor, float, float] | None:
        """Return this layer for `lora_linear` with the input `x`; None if peft must compute it."""
        layer: Any = self
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        if len(active) != 1 or layer.disable_adapters or layer.merged:
            return None
        (name,) = active
        lora_a, lora_b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        rate: float = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        is_plain = name not in layer.lora_variant and lora_b.bias is None and rate < 1
        if not is_plain or not _is_frozen_linear(layer.base_layer, x):
            return None
        return layer.base_layer, lora_a.weight, lora_b.weight, layer.scaling[name], rate

    def forward(self, x: Tensor, *args: Any, up: Tensor | None = None, **named: Any) -> Tensor:
        """Return the output of the LoRA layer for the input `x`, or for silu(x) · up if `up` is given."""
        layer: Any = self
        if not (args or named) and (plain := self.plain(x)) is not None:
            return lora_linear(x, *plain, up)
        x = x if up is None else swiglu(x, up)
        # peft computes the update of a half-precision base in float32, which is slow on a GPU. ZeRO-3 needs its layers.
        partitioned = hasattr(getattr(layer.base_layer, "weight", None), "ds_id")
        half = partitioned and x.dtype in (torch.bfloat16, torch.float16)
        half = half and torch.amp.is_autocast_available(x.device.type)  # not for a forecast on the meta device
        with torch.autocast(x.device.type, x.dtype, cache_enabled=False) if half else nullcontext():
            result: Tensor = super().forward(x, *args, **named)
        return result


def _is_frozen_linear(layer: Any, x: Tensor) -> bool:
    """Return whether `lora_linear` can compute a base layer: a frozen, unpatched linear layer in the dtype of `x`.

    The layer may be quantized. ZeRO-3 and autocast must not be active.
    """
    bits = bits_of_layer(layer)
    if bits is None:
        is_supported = type(layer) is nn.Linear and x.dtype == layer.weight.dtype
    elif bits == 4:  # a repacked weight cannot be dequantized: see `patch_bitsandbytes`
        is_supported = layer.compute_dtype in (None, x.dtype) and not layer.support_avx512bf16_for_cpu
    else:
        is_supported = bits == "fp8" or (hasattr(layer, "scale_O") and not layer.state.has_fp16_weights)
    return (
        is_supported
        and not _is_patched(layer)
        and not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        and not hasattr(layer.weight, "ds_id")  # ZeRO-3 gathers the weights of a layer when it is called
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
    )


def _is_patched(layer: nn.Module) -> bool:
    """Return whether a layer has a replaced forward method or hooks, except the hook `set_scale` of this package."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks: list[Callable[..., Any]] = [hook for name in names for hook in getattr(layer, name).values()]
    return "forward" in vars(layer) or any(hook is not set_scale for hook in hooks)
