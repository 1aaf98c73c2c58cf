"""Quantize a backbone to 4 or 8 bits with bitsandbytes, or to FP8 (see `fp8`), as the base of a LoRA adapter.

4 bits are NF4 with double quantization (QLoRA, arXiv 2305.14314), 8 bits are LLM.int8() (arXiv 2208.07339). All linear
layers of the backbone are quantized, on any device; embeddings, norms and biases are not. The layers are replaced one by
one after loading. So this works for GGUF files as for folders, a GPU never holds all full weights, and the fingerprint of
the original weights is known.

bitsandbytes is optional; it is imported for a base in 4 or 8 bits only.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from angle_llm.model.layers.fingerprint import ORIGINAL
from angle_llm.model.layers.fp8 import Fp8Linear, fp8_problem
from angle_llm.model.layers.lora import is_read_directly, without_adapter
from angle_llm.model.layers.quantized_layers import Bits, bits_of_layer, bits_text, frozen_weight, patch_bitsandbytes
from angle_llm.settings.parsing import need_library

BITS: tuple[Bits, ...] = (4, 8, "fp8")
OUTLIER = 6.0
"""Outlier threshold of LLM.int8(), from the paper: dimensions with a larger activation are multiplied in 16 bits."""


class QuantizationError(ValueError):
    """Raised if weights cannot be quantized, dequantized, or saved in quantized form."""


def check_bits(bits: Bits) -> None:
    """Check that weights can be quantized to `bits`, before a model is loaded.

    Raises:
        QuantizationError: for other bits than 4, 8 or fp8, or if bitsandbytes is needed and cannot be imported.
    """
    if bits not in BITS:
        raise QuantizationError(f"bits: expected 4 (NF4), 8 (int8), fp8 or None (not quantized), got {bits!r}.")
    if bits != "fp8":
        _bitsandbytes()


def bits_of(backbone: nn.Module) -> Bits | None:
    """Return the bits of a backbone's quantized linear layers; None if no layer is quantized.

    The backbone can have an adapter.
    """
    return next((bits for layer in backbone.modules() if (bits := bits_of_layer(layer))), None)


def quantize(backbone: nn.Module, bits: Bits, device: torch.device | str = "cpu") -> None:
    """Quantize the linear layers of a backbone to 4 or 8 bits or FP8, in place; the new layers are frozen.

    Layers whose weight is read directly are not quantized (see `is_quantizable`). The new layers are on `device`; other
    layers do not move. Matrix products are computed in the original dtype of the weights. With 8 bits on a GPU, or in
    evaluation, they are computed in int8; activations are then rounded to float16 and quantized per token.

    Raises:
        QuantizationError: if `bits` is not 4, 8 or fp8, bitsandbytes cannot be imported, the device has no FP8, or the
            backbone has no `torch.nn.Linear` layer or is already quantized.
    """
    check_bits(bits)
    if stored := bits_of(backbone):
        raise QuantizationError(f"this backbone is already quantized to {bits_text(stored)}. Load the original one.")
    if bits == "fp8" and (problem := fp8_problem(torch.device(device))):
        raise QuantizationError(f"bits fp8: {problem}. Use bits 8 or 4, or None.")
    names = [name for name, layer in backbone.named_modules() if is_quantizable(backbone, name, layer)]
    if not names:
        raise QuantizationError(
            f"{type(backbone).__name__} has no torch.nn.Linear layers, so it cannot be quantized to {bits_text(bits)}. Unset "
            "bits, or use another backbone."
        )
    for name in names:  # by name: a list of layers would keep all full weights until the end
        layer: Any = backbone.get_submodule(name)
        quantized = _quantized(layer, bits, torch.device(device))
        quantized.bias = None if layer.bias is None else layer.bias.requires_grad_(False)
        patch_bitsandbytes(quantized)
        backbone.set_submodule(name, quantized.train(layer.training))
    if bits != "fp8":
        setattr(backbone, f"is_loaded_in_{bits}bit", True)  # peft needs this mark


def is_quantizable(backbone: nn.Module, name: str, layer: nn.Module) -> bool:
    """Return whether `quantize` replaces a layer of a backbone: a linear layer that is called, with the path `name`."""
    return type(layer) is nn.Linear and not is_read_directly(backbone, name)


def _quantized(layer: nn.Linear, bits: Bits, device: torch.device) -> Any:
    """Return a quantized layer on `device` with the weight of a linear layer, and without its bias."""
    if bits == "fp8":
        return Fp8Linear(layer, device)
    bnb = _bitsandbytes()
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    quantized: Any
    if bits == 4:
        quantized = bnb.nn.Linear4bit(*sizes, layer.weight.dtype, device="meta")
        weight = bnb.nn.Params4bit(layer.weight.data, compress_statistics=True, quant_type="nf4", module=quantized)
    else:  # only weights from the CPU are quantized on the way to a device
        quantized = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=OUTLIER, device="meta")
        weight = bnb.nn.Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
    quantized.weight = weight.to(device)
    return quantized


@contextmanager
def without_outliers(backbone: nn.Module) -> Iterator[None]:
    """Disable the outlier dimensions of 8-bit layers inside this context, so that tokens do not affect other tokens.

    LLM.int8() chooses outlier dimensions over all tokens of a micro-batch. So states of equal tokens differ by a few
    percent between micro-batches, and tests of an architecture could not compare them.
    """
    layers: list[Any] = [layer for layer in backbone.modules() if bits_of_layer(layer) == 8]
    before = [(layer.state, layer.state.threshold) for layer in layers]
    for state, _ in before:
        state.threshold = 0.0
    try:
        yield
    finally:
        for state, threshold in before:
            state.threshold = threshold


@torch.no_grad()
def dequantize(backbone: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace every quantized layer of a backbone by a `torch.nn.Linear` with the dequantized weights, in place.

    Dequantized weights differ from the original weights. An adapter that was trained on a quantized base must be merged
    into the dequantized weights, by `LoraUpdate`. The LoRA layers keep their class, so peft could not merge them.

    Args:
        dtype: dtype of the new weights; to merge an adapter, use float32. None: the dtype of the matrix products. Weights
            are always rounded to the dtype of the matrix products first, as in the forward pass. Other layers keep their
            dtype.
    """
    bits = bits_of(backbone)
    patch_bitsandbytes(backbone)
    computed_dtype = next(tensor.dtype for tensor in backbone.parameters() if tensor.is_floating_point())
    for name in [name for name, layer in backbone.named_modules() if bits_of_layer(layer)]:
        layer: Any = backbone.get_submodule(name)
        in_4_bits = bits_of_layer(layer) == 4  # such a layer has a dtype
        products = layer.compute_dtype or layer.weight.quant_state.dtype if in_4_bits else computed_dtype
        values = frozen_weight(layer, products)
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(values.to(dtype or values.dtype), requires_grad=False)
        if layer.bias is not None:
            plain.bias = nn.Parameter(layer.bias.to(plain.weight.dtype), requires_grad=False)
        backbone.set_submodule(name, plain.train(layer.training))
    for mark in (ORIGINAL, f"is_loaded_in_{bits}bit"):
        vars(without_adapter(backbone)).pop(mark, None)


def _bitsandbytes() -> Any:
    """Import and return the module bitsandbytes; raise `MissingLibraryError` if it is not installed."""
    need_library("bitsandbytes", "bits: a base in 4 or 8 bits", "quantization")
    return importlib.import_module("bitsandbytes")


_HIDDEN = ("Failed to load CPU gemm_4bit_forward", "MatMul8bitLt: inputs will be cast")
"""Messages of bitsandbytes on a CPU kernel that this package does not use (`patch_bitsandbytes`), and on int8 casts."""
for _logger in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    # At import: peft imports bitsandbytes where it is installed.
    logging.getLogger(_logger).addFilter(lambda record: not record.getMessage().startswith(_HIDDEN))
