"""Quantized layers of bitsandbytes: number of bits, dequantized weights, and changes that make training correct."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from angle_llm.model.layers.fp8 import Fp8Linear

Bits = Literal[4, 8, "fp8"]
"""Form of quantized weights: NF4, int8 (both of bitsandbytes) or FP8."""
_BITS_BY_CLASS: dict[str, Bits] = {
    "Linear4bit": 4, "LinearNF4": 4, "LinearFP4": 4, "Linear8bitLt": 8, "Fp8Linear": "fp8",
}  # fmt: skip
"""Class name of a quantized layer → form of its weights. Names, because bitsandbytes may not be installed."""


def bits_text(bits: int | str) -> str:
    """Return the form of quantized weights as text, such as `4 bits`."""
    return "8 bits (FP8)" if bits == "fp8" else f"{bits} bits"


def bits_of_layer(layer: nn.Module) -> Bits | None:
    """Return 4, 8 or fp8 for a quantized layer, and None for any other layer."""
    # LoRA layers of peft have the same class names, but are not subclasses of nn.Linear.
    return _BITS_BY_CLASS.get(type(layer).__name__) if isinstance(layer, nn.Linear) else None


def patch_bitsandbytes(model: nn.Module) -> None:
    """Change the bitsandbytes layers of a model in place so that training is correct; call before the first forward pass.

    In 4-bit layers, repacking of the weights is disabled. On a CPU with AVX512-BF16, bitsandbytes 0.50.2 repacks weights
    in evaluation, for a kernel without a backward pass. Later training steps would have wrong gradients without an error.

    In 8-bit layers, the scales become a buffer. The library keeps the scales in an object that does not move to another
    device with the layer. This object is also lost when the weight is set again, as peft does for DoRA on a CPU.
    """
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if bits_of_layer(layer) == 4:
            layer.support_avx512bf16_for_cpu = False
        elif bits_of_layer(layer) == 8 and not hasattr(layer, "scale_O"):
            # A forward pass moves the scales from the weight to the state. `set_scale` puts them back before each pass.
            scale_O = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
            layer.register_buffer("scale_O", scale_O, persistent=False)
            layer.register_forward_pre_hook(set_scale)


def set_scale(layer: Any, _: object) -> None:
    """Forward pre-hook of an 8-bit bitsandbytes layer: restore weight and scales in the layer's state from its buffers."""
    layer.state.CB, layer.state.SCB = layer.weight.data, layer.scale_O.float()
    layer.weight.CB = layer.weight.SCB = None


def frozen_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight (outputs, inputs) of a frozen linear layer; a quantized weight is dequantized to `dtype`."""
    bits = bits_of_layer(layer)
    if bits is None:
        plain: Tensor = layer.weight
        return plain
    if isinstance(layer, Fp8Linear):
        return layer.dequantized(dtype)
    if bits == 8:
        scale_O1 = layer.scale_O.unsqueeze(1).mul(1.0 / 127.0)
        values: Tensor = layer.weight.data.to(dtype).mul_(scale_O1)
        return values
    bnb: Any = importlib.import_module("bitsandbytes")
    values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return values.to(dtype)


def input_gradient(layer: Any, gradient_TO: Tensor) -> Tensor:
    """Return the gradient at the input of a frozen linear layer, (T, I), for a gradient at its output, (T, O)."""
    if isinstance(layer, Fp8Linear):
        return layer.input_gradient(gradient_TO)
    return gradient_TO @ frozen_weight(layer, gradient_TO.dtype)
