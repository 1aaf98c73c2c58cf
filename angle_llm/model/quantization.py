"""A base held in 4 or 8 bits through bitsandbytes, for LoRA to train on.

4 bits are NF4 with double quantisation (QLoRA, arXiv 2305.14314), 8 bits LLM.int8() (arXiv 2208.07339). Every linear layer
of the backbone is held so, on any device; embeddings, norms and biases stay as they are. Layers are replaced after the
model is loaded, one by one, so a GGUF file and a folder go the same way, the full weights are never all on a GPU, and
their fingerprint can be taken first.

bitsandbytes is optional and is imported when a base is to be held in bits, not before.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from angle_llm.model import lora
from angle_llm.model.fast_paths import bits_of_layer, mend

BITS = (4, 8)

OUTLIER = 6.0
"""LLM.int8(): a dimension in which some token's activation is beyond this is multiplied in 16 bits (the paper's value)."""

ORIGINAL = "fingerprint_before_quantisation"
"""Where a quantized backbone carries the fingerprint of the weights it was made from."""


class QuantizationError(ValueError):
    """Weights cannot be held in so many bits, or be taken out of them."""


def check_bits(bits: int) -> None:
    """Refuses what cannot work, before a model is loaded for it.

    Raises:
        QuantizationError: for another number than 4 or 8, or without bitsandbytes.
    """
    if bits not in BITS:
        raise QuantizationError(
            f"bits are 4 (NF4) or 8 (int8), or None for a base that is not quantized, got {bits!r}."
        )
    _bitsandbytes()


def bits_of(backbone: nn.Module) -> int | None:
    """The bits the linear layers of a backbone, adapted or not, are held in; None if they are plain."""
    layers = [bits for layer in backbone.modules() if (bits := bits_of_layer(layer))]
    return max(layers, default=None)


def quantize(backbone: nn.Module, bits: int, device: torch.device | str = "cpu") -> None:
    """Holds every linear layer in 4 or 8 bits, in place; the new layers lie on `device`, all else stays where it is.

    Products are computed in the dtype the weights have now, and for 8 bits on a GPU, or in evaluation, in int8 with
    activations rounded to float16 and quantized token by token. The layers no longer train.

    Raises:
        QuantizationError: for another number of bits, without bitsandbytes, or if no layer is a `torch.nn.Linear`.
    """
    check_bits(bits)
    if held := bits_of(backbone):
        raise QuantizationError(f"this backbone is held in {held} bits already. Load the original one.")
    names = [name for name, layer in backbone.named_modules() if type(layer) is nn.Linear]
    if not names:
        raise QuantizationError(
            f"{type(backbone).__name__} has no torch.nn.Linear layers (GPT-2's are of another kind), so nothing can be held "
            f"in {bits} bits. Leave bits away, or take another backbone."
        )
    hold = _nf4 if bits == 4 else _int8
    for name in names:  # by name: a list of layers would keep all full weights until the end
        layer: Any = backbone.get_submodule(name)
        backbone.set_submodule(name, hold(layer, torch.device(device)).train(layer.training))
    setattr(backbone, f"is_loaded_in_{bits}bit", True)  # where peft looks


def _nf4(layer: nn.Linear, device: torch.device) -> nn.Module:
    bnb = _bitsandbytes()
    biased = layer.bias is not None
    held = bnb.nn.Linear4bit(layer.in_features, layer.out_features, biased, layer.weight.dtype, device="meta")
    weight = bnb.nn.Params4bit(layer.weight.data, compress_statistics=True, quant_type="nf4", module=held)
    return _with_weight(held, weight.to(device), layer)


def _int8(layer: nn.Linear, device: torch.device) -> nn.Module:
    bnb = _bitsandbytes()
    options: dict[str, Any] = {"has_fp16_weights": False, "threshold": OUTLIER, "device": "meta"}
    held = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, **options)
    # Only weights that come from the CPU are quantized on the way to a device.
    weight = bnb.nn.Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
    return _with_weight(held, weight.to(device), layer)


def _with_weight(held: nn.Module, weight: nn.Parameter, layer: nn.Linear) -> nn.Module:
    held.weight = weight
    held.bias = None if layer.bias is None else layer.bias.requires_grad_(False)
    mend(held)
    return held


@contextmanager
def without_outliers(backbone: nn.Module) -> Iterator[None]:
    """Within this, an 8-bit layer's product for a token does not depend on the tokens beside it.

    LLM.int8() chooses outlier dimensions over all tokens of a micro-batch: states of equal tokens differ by some percent
    with the company they are in. A probe that asks what an architecture computes would be told what its numbers are like.
    """
    states: list[Any] = [layer.state for layer in backbone.modules() if bits_of_layer(layer) == 8]
    before = [state.threshold for state in states]
    for state in states:
        state.threshold = 0.0
    try:
        yield
    finally:
        for state, threshold in zip(states, before, strict=True):
            state.threshold = threshold


@torch.no_grad()
def dequantize(backbone: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Turns every quantized layer back into a plain one, in place, with the values its forward pass used.

    These are not the original weights: an adapter trained on a quantized base belongs on these, and is merged into these.
    Before adapters are put on or after. `dtype` None keeps the dtype products were computed in; float32 is the one to
    merge in. A weight is rounded to the former first, as in use, and then widened. What was not quantized keeps its dtype.

    Raises:
        QuantizationError: if nothing is quantized, or bitsandbytes has repacked a layer (see `mend`).
    """
    bits = bits_of(backbone)
    if bits is None:
        raise QuantizationError("no layer of this backbone is quantized, so there is nothing to dequantize.")
    mend(backbone)
    computed = next(tensor.dtype for tensor in backbone.parameters() if tensor.is_floating_point())
    for name in [name for name, layer in backbone.named_modules() if bits_of_layer(layer)]:
        layer: Any = backbone.get_submodule(name)
        values = _values(layer, name, computed)
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(values.to(dtype or values.dtype), requires_grad=False)
        if layer.bias is not None:
            plain.bias = nn.Parameter(layer.bias.to(plain.weight.dtype), requires_grad=False)
        backbone.set_submodule(name, plain.train(layer.training))
    base: Any = backbone
    if lora.is_adapted(backbone):
        lora.on_plain_layers(backbone)
        base = base.get_base_model()
    for mark in (ORIGINAL, f"is_loaded_in_{bits}bit"):
        vars(base).pop(mark, None)


def _values(layer: Any, name: str, computed: torch.dtype) -> torch.Tensor:
    """The weight (out, in) a product is computed with."""
    if bits_of_layer(layer) == 8:
        scale_O = layer.scale_O.unsqueeze(1).mul(1.0 / 127.0)
        values: torch.Tensor = layer.weight.data.to(computed).mul_(scale_O)
        return values
    state = layer.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise QuantizationError(
            f"bitsandbytes has repacked the weights of {name}, which cannot be read as they are. Load the backbone again, "
            "through angle_llm, which keeps them as they come."
        )
    values = _bitsandbytes().functional.dequantize_4bit(layer.weight.data, state)
    return values.to(layer.compute_dtype or values.dtype)


def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise QuantizationError(
            f"a base in 4 or 8 bits needs bitsandbytes, which cannot be imported ({error}). Install it: "
            "pip install 'angle_llm[quantization]'. Or leave bits away."
        ) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Not a kernel that is missing and not used here (see `mend`), nor that int8 casts, which it says at every product."""
    return not record.getMessage().startswith(
        ("Failed to load CPU gemm_4bit_forward", "MatMul8bitLt: inputs will be cast")
    )


for _logger in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_logger).addFilter(_is_news)  # now: peft imports bitsandbytes wherever it is installed
