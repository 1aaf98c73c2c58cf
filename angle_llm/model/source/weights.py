"""The weights of a backbone, one tensor at a time to save memory; and operations per token.

A folder or hub id in safetensors is read in place: the backbone is built without memory for its weights, and each
tensor is read from its file. Other sources (a GGUF file, tensors that `transformers` renames or packs while loading, a
class that keeps some layers in float32) are loaded as a whole, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.layers.lora import is_transposed
from angle_llm.model.source.backbone import (
    BackboneLocation,
    empty_backbone,
    fingerprint_of,
    load_backbone,
    load_config,
    torch_dtype,
    weights_fingerprint,
)
from angle_llm.model.source.quantization import bits_of, check_bits, dequantize, quantize

_PLAIN = {"F32", "BF16", "F16", "I64", "I32", "BOOL"}
"""Stored types that need no unpacking."""


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a backbone by parameter name."""

    skeleton: nn.Module
    """The backbone: config, kinds and shapes of layers. If `streamed`, its tensors have no values."""
    read: Callable[[str], Tensor]
    """A tensor of `skeleton.state_dict()` before quantization, on the CPU; read-only."""
    dtype: torch.dtype
    bits: int | None
    """Bits of the linear layers in use, None if they are not quantized, or if `read` returns dequantized values."""
    streamed: bool
    """Whether each tensor is read from its file on demand."""
    known_fingerprint: str | None = None

    def values(self, name: str) -> Tensor:
        """Return the read-only weight `name` as the forward pass uses it; 4 and 8 bits are dequantized to float32."""
        path, _, kind = name.rpartition(".")
        layer: Any = self.skeleton.get_submodule(path) if self.bits is not None and kind == "weight" else None
        if self.bits is None or type(layer) is not nn.Linear:
            return self.read(name)
        alone = nn.Linear(layer.in_features, layer.out_features, device="meta")
        alone.weight = nn.Parameter(self.read(name), requires_grad=False)
        alone.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=self.dtype), requires_grad=False)
        holder = nn.Sequential(alone)
        quantize(holder, self.bits)
        dequantize(holder, torch.float32)
        weight: Tensor = holder[0].weight.data  # type: ignore[assignment]
        return weight

    def fingerprint(self) -> str:
        """Return the `weights_fingerprint` of the backbone."""
        return self.known_fingerprint or fingerprint_of(self.skeleton.state_dict(), self.read)


def open_base(
    location: BackboneLocation, *, dtype: str, revision: str | None = None, bits: int | None = None
) -> BaseWeights:
    """Open the weights of a backbone for reading tensor by tensor, with the values that `load_backbone` would load.

    Tensors are read from the files on demand where possible; otherwise the backbone is loaded.

    Raises:
        ArtifactError, QuantizationError, ValueError: as `load_backbone`.
    """
    if bits is not None:
        check_bits(bits)
    streamed = None if location.gguf_file else _streamed(location, torch_dtype(dtype), revision, bits)
    if streamed is not None:
        return streamed
    backbone = load_backbone(location, dtype=dtype, revision=revision)
    fingerprint = weights_fingerprint(backbone)
    if bits_of(backbone) is not None:  # stored in bits
        dequantize(backbone, torch.float32)
        bits = None
    read = backbone.state_dict().__getitem__
    return BaseWeights(backbone, read, torch_dtype(dtype), bits, streamed=False, known_fingerprint=fingerprint)


def _streamed(
    location: BackboneLocation, dtype: torch.dtype, revision: str | None, bits: int | None
) -> BaseWeights | None:
    """Return weights that are read from the files on demand; None if the files lack a tensor or have another shape."""
    from safetensors import safe_open

    files = _safetensors_files(location.name, revision)
    config = load_config(location, revision)
    if not files or config.is_encoder_decoder or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        skeleton = empty_backbone(config)
    in_float32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    if dtype != torch.float32 and any(getattr(skeleton, name, None) for name in in_float32):
        return None

    opened: list[Any] = [safe_open(path, framework="pt") for path in files]
    holder = {key: file for file in opened for key in file.keys()}  # noqa: SIM118  # no mapping
    key_of: dict[str, str] = {}
    for name, needed in skeleton.state_dict().items():
        # A model with a head stores the tensors of the backbone under its prefix, `model.` or `bert.`.
        keys = [key for key in (name, f"{skeleton.base_model_prefix}.{name}") if key in holder]
        if len(keys) != 1:
            return None
        stored = holder[keys[0]].get_slice(keys[0])
        if tuple(stored.get_shape()) != tuple(needed.shape) or stored.get_dtype() not in _PLAIN:
            return None
        key_of[name] = keys[0]

    def read(name: str) -> Tensor:
        tensor: Tensor = holder[key_of[name]].get_tensor(key_of[name])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return BaseWeights(skeleton.eval(), read, dtype, bits, streamed=True)


def _safetensors_files(name: str, revision: str | None) -> list[Path]:
    """Return the safetensors files of a folder or hub id, as `transformers` finds them."""
    from transformers.utils import hub

    def found(file: str) -> str | None:
        path: str | None = hub.cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        return path

    single = found("model.safetensors")
    if single is not None:
        return [Path(single)]
    index = found("model.safetensors.index.json")
    if index is None:
        return []
    listing: Any = hub.get_checkpoint_shard_files
    shards, _ = listing(name, index, revision=revision)
    return [Path(shard) for shard in shards]


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations of the linear layers per token.

    Attention between tokens is not counted (2 % at 7B and 50 tokens).
    """

    forward: int
    """Two per weight."""
    backward: int
    """Two per weight that gradients pass through, and two per weight with a gradient."""

    @classmethod
    def of(cls, backbone: nn.Module) -> FlopsPerToken:
        """Count the operations by the shapes of the layers."""
        forward = backward = 0
        for module in backbone.modules():
            # Conv1D of GPT-2 is a linear layer with a transposed weight.
            if isinstance(module, nn.Linear) or is_transposed(module):
                weight: Tensor = module.weight  # type: ignore[assignment]
                # Two weights of a 4-bit layer are packed into one byte.
                size = module.in_features * module.out_features if isinstance(module, nn.Linear) else weight.numel()
                forward += 2 * size
                backward += 2 * size * (2 if weight.requires_grad else 1)
        return cls(forward, backward)
