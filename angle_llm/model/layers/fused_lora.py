"""LoRA layers that replace the LoRA layers of peft and need fewer passes over memory; the base may be quantized.

    y = base(x) + s (drop(x) Aᵀ) Bᵀ        s: scaling; drop: dropout in training, including the factor 1/(1 - p)

Legend: T tokens (any leading shape, flattened), I inputs, O outputs, R rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.model.layers.quantized_layers import bits_of_layer, input_gradient, set_scale
from angle_llm.model.layers.swiglu import product, slopes, swiglu


class PlainLora(NamedTuple):
    """A LoRA layer with a frozen linear layer: base(x) + scaling · (drop(x) Aᵀ) Bᵀ, with matrices A (R, I) and B (O, R)."""

    base: nn.Module
    lora_a: Tensor
    lora_b: Tensor
    scaling: float
    dropout: float = 0.0


class _LoraLinears(torch.autograd.Function):
    """Autograd function for LoRA layers of one input, with one product for their matrices A (`lora_linears`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        up_TI: Tensor | None,
        bases: Sequence[nn.Module],
        scaling: float,
        dropout: float,
        *matrices: Tensor,
    ) -> tuple[Tensor, ...]:
        lora_a = matrices[: len(bases)]
        lora_b = [matrix.to(x_TI.dtype) for matrix in matrices[len(bases) :]]
        input_TI = x_TI if up_TI is None else product(x_TI, up_TI)
        mask_TI = torch.empty_like(input_TI, dtype=torch.uint8).bernoulli_(1 - dropout) if dropout else None
        ctx.set_materialize_grads(False)  # a layer whose output is not used has no gradients
        ctx.bases = bases
        ctx.scaling = scaling / (1 - dropout)
        ctx.ranks = [len(matrix) for matrix in lora_a]
        all_a_RI = torch.cat(lora_a).to(x_TI.dtype)
        hidden_TR = (_dropped(input_TI, mask_TI) @ all_a_RI.T).mul_(ctx.scaling)
        parts = zip(bases, hidden_TR.split_with_sizes(ctx.ranks, dim=1), lora_b, strict=True)
        outputs = tuple(base(input_TI).addmm_(part_TR, b_OR.T) for base, part_TR, b_OR in parts)
        # The matrices are saved rounded, so that it happens once.
        ctx.save_for_backward(x_TI, up_TI, mask_TI, hidden_TR, all_a_RI, *lora_b)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if all(gradient_TO is None for gradient_TO in gradients):
            return (None,) * len(ctx.needs_input_grad)
        x_TI, up_TI, mask_TI, hidden_TR, all_a_RI, *lora_b = ctx.saved_tensors
        layers = list(zip(gradients, lora_b, hidden_TR.split_with_sizes(ctx.ranks, dim=1), strict=True))
        gradient_parts = [torch.zeros_like(part) if g is None else g @ b for g, b, part in layers]
        gradient_TR = torch.cat(gradient_parts, dim=1).mul_(ctx.scaling)
        # autograd casts the gradient of a matrix to the dtype of the matrix.
        gradients_b = [None if g is None else g.T @ part for g, _, part in layers]
        # Gradients of the inputs; for a product, silu(x) · up is computed in the same kernel.
        gradient_TI: Any = None
        gradient_up = input_TI = None
        if any(ctx.needs_input_grad[:2]):
            for base, gradient_TO in zip(ctx.bases, gradients, strict=True):
                if gradient_TO is not None:
                    gradient_TI = input_gradient(base, gradient_TO, gradient_TI)
            if mask_TI is None:
                gradient_TI.addmm_(gradient_TR, all_a_RI)
            else:
                gradient_TI += _dropped(gradient_TR @ all_a_RI, mask_TI)
            if up_TI is not None:
                gradient_TI, gradient_up, input_TI = slopes(x_TI, up_TI, gradient_TI, True)
        if input_TI is None:
            input_TI = x_TI if up_TI is None else product(x_TI, up_TI)
        parts_a = (gradient_TR.T @ _dropped(input_TI, mask_TI)).split_with_sizes(ctx.ranks)
        gradients_a = [None if g is None else part for g, part in zip(gradients, parts_a, strict=True)]
        return gradient_TI, gradient_up, None, None, None, *gradients_a, *gradients_b  # None: bases, scaling, dropout


def _dropped(x_TI: Tensor, mask_TI: Tensor | None) -> Tensor:
    """Return `x_TI` with zeros where the dropout mask is 0; None: `x_TI` itself.

    The dropout factor 1/(1 - p) is not applied here. `_LoraLinears` multiplies the smaller product (T, R) by the factor.
    """
    # torch.where(mask, x, 0) would copy the 0 from the CPU to a GPU, and wait.
    return x_TI if mask_TI is None else x_TI * mask_TI


def lora_linears(x: Tensor, layers: Sequence[PlainLora], up: Tensor | None = None) -> list[Tensor]:
    """Return base(x) + scaling · (drop(x) Aᵀ) Bᵀ for LoRA layers with the same input and scaling, with little memory.

    For T tokens and rank R, the scaling is applied to the (T, R) product. The last product is added to the output (T, O) in
    place, where peft needs several passes. Products with the matrices A of all layers are one product, and the gradient at
    the input is summed in one tensor. Values and gradients equal the results of peft up to the order of additions.
    Everything is computed in the dtype of `x`, and a wider adapter is rounded, as under autocast. In contrast, peft
    computes the update of a half-precision base in float32. Second derivatives are not available.

    Dropout draws the same random numbers as peft on a CPU, for one layer only. The mask takes a byte per element, and
    drop(x) is computed again in the backward pass. For a quantized base, the gradient is computed with the dequantized
    weight, as in bitsandbytes.

    Args:
        x: input (…, I).
        up: (…, I); if given, the input is silu(x) · up, which is also computed again in the backward pass.
    """
    x_TI = x.flatten(0, -2)
    up_TI = None if up is None else up.flatten(0, -2)
    bases, lora_a, lora_b, scalings, rates = zip(*layers, strict=True)
    outputs = _LoraLinears.apply(x_TI, up_TI, bases, scalings[0], rates[0], *lora_a, *lora_b)  # type: ignore[no-untyped-call]
    # Outside the function, because autograd refuses to change in place a view that a custom function returns.
    return [y_TO.view(*x.shape[:-1], -1) for y_TO in outputs]


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

    Weights and names of layers are unchanged. Layers of one input are computed together (see `SharedInput`).
    """
    if are_plain():
        return
    for layer in adapted.modules():
        layer_class: Any = type(layer)
        if f"{layer_class.__module__}.{layer_class.__qualname__}" in _PEFT_LAYERS:
            layer.__class__ = mixed_class(FusedLora, layer_class)
    for parent in adapted.modules():
        if len(_layers_of_one_input(parent)) > 1 and _share_input not in parent._forward_pre_hooks.values():
            parent.register_forward_pre_hook(_share_input)
            parent.register_forward_hook(_unshare_input, always_call=True)


@cache
def mixed_class(mixin: type[nn.Module], original: type[nn.Module]) -> Any:
    """Return a subclass of the layer class `original`, with the same name, whose forward method is `mixin.forward`."""
    return type(original.__name__, (mixin, original), {})


class FusedLora(nn.Module):
    """Mixin for LoRA layers of peft: computes plain LoRA by `lora_linears`, and all else (DoRA, merged weights) by peft."""

    shared: SharedInput | None = None
    """Outputs of layers with the same input, during a forward pass of their parent module."""

    def plain(self, x: Tensor) -> PlainLora | None:
        """Return this layer for `lora_linears` with the input `x`; None if peft must compute it."""
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
        return PlainLora(layer.base_layer, lora_a.weight, lora_b.weight, layer.scaling[name], rate)

    def forward(self, x: Tensor, *args: Any, up: Tensor | None = None, **named: Any) -> Tensor:
        """Return the output of the LoRA layer for the input `x`, or for silu(x) · up if `up` is given."""
        layer: Any = self
        if not (args or named):
            if self.shared is not None and (y := self.shared.output(self, x)) is not None:
                return y
            if (plain := self.plain(x)) is not None:
                return lora_linears(x, [plain], up)[0]
        x = x if up is None else swiglu(x, up)
        # peft computes the update of a half-precision base in float32, which is slow on a GPU. ZeRO-3 needs its layers.
        partitioned = hasattr(getattr(layer.base_layer, "weight", None), "ds_id")
        half = partitioned and x.dtype in (torch.bfloat16, torch.float16)
        half = half and torch.amp.is_autocast_available(x.device.type)  # not for a forecast on the meta device
        with torch.autocast(x.device.type, x.dtype, cache_enabled=False) if half else nullcontext():
            result: Tensor = super().forward(x, *args, **named)
        return result


class SharedInput:
    """LoRA layers of a module that have the same input, such as q, k and v, in one forward pass of the module.

    The layer that is called first computes the outputs of all by `lora_linears`. Layers are computed alone if one has
    dropout or is not plain LoRA, and for a tensor other than the first input.
    """

    def __init__(self, layers: list[FusedLora]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[FusedLora, Tensor] = {}

    def output(self, layer: FusedLora, x: Tensor) -> Tensor | None:
        """Return the output of a layer for the input `x`, once; None if the layer must be computed alone."""
        layers, self._layers = self._layers, []  # only the first call computes the outputs
        # In inference mode, changes of a tensor are not counted. torch.compile cannot trace this check.
        if layers and not (torch.compiler.is_compiling() or x.is_inference()):
            plain = [lora for member in layers if (lora := member.plain(x)) is not None and not lora.dropout]
            if len(plain) < len(layers) or len({lora.scaling for lora in plain}) > 1:
                return None
            self._input, self._version = x, x._version
            self._outputs = dict(zip(layers, lora_linears(x, plain), strict=True))
        is_same = x is self._input and x._version == self._version
        return self._outputs.pop(layer, None) if is_same else None


def _layers_of_one_input(parent: nn.Module) -> list[FusedLora]:
    """Return the LoRA layers of a module that `transformers` calls with the same tensor."""
    layers = [parent._modules.get(name) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")]
    return [layer for layer in layers if isinstance(layer, FusedLora)]


def _share_input(parent: nn.Module, _: object) -> None:
    """Forward pre-hook of a module whose LoRA layers have the same input."""
    layers = _layers_of_one_input(parent)
    shared = SharedInput(layers)
    for layer in layers:
        layer.shared = shared


def _unshare_input(parent: nn.Module, *_: object) -> None:
    """Forward hook, also after an error, that frees the outputs that were not used."""
    for layer in _layers_of_one_input(parent):
        layer.shared = None


def _is_frozen_linear(layer: Any, x: Tensor) -> bool:
    """Return whether `lora_linears` can compute a base layer: a frozen, unpatched linear layer in the dtype of `x`.

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
