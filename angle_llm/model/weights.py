"""The weights of a backbone one tensor at a time, so that work on all of them needs the memory of one.

A folder or hub id in safetensors is read where it lies: the backbone is built without memory for its weights, and each of
its tensors is looked up in the files. What cannot be read that way (a GGUF file, tensors that `transformers` renames or
packs while loading, a class that keeps some layers in float32) is loaded whole, with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.backbone import BackboneLocation, load_backbone, torch_dtype, weights_fingerprint
from angle_llm.model.quantization import bits_of, check_bits, dequantize, quantize

_PLAIN = {"F32", "BF16", "F16", "I64", "I32", "BOOL"}
"""Stored types that are the numbers themselves; others (8 and 4 bits) need unpacking."""


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a backbone by their names in it."""

    skeleton: nn.Module
    """The backbone: its config, the kinds and shapes of its layers. Its own tensors have no values if `streamed`."""
    read: Callable[[str], Tensor]
    """A tensor of `skeleton.state_dict()` before it is quantized, on the CPU, not to be written into."""
    dtype: torch.dtype
    bits: int | None
    """Bits the linear layers are to be held in, None if they are not quantized or come out of their bits already."""
    streamed: bool
    """Whether each tensor is read from its file when it is asked for."""
    known_fingerprint: str | None = None

    def values(self, name: str) -> Tensor:
        """A tensor with the values the backbone computes with: a quantized layer's as they come out of its bits, in
        float32; any other as `read` gives it. Not to be written into."""
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
        """What `weights_fingerprint` says of the backbone with these weights, quantized or not."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = hashlib.sha256()
        for name in sorted(self.skeleton.state_dict()):
            tensor = self.read(name)
            flat = tensor.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16)
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(sample.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]


def open_base(
    location: BackboneLocation, *, dtype: str, revision: str | None = None, bits: int | None = None
) -> BaseWeights:
    """The weights of a backbone with the values `load_backbone`, given the same, would give them.

    Raises:
        ArtifactError, QuantizationError, ValueError: as `load_backbone` does.
    """
    if bits is not None:
        check_bits(bits)
    streamed = None if location.gguf_file else _streamed(location, torch_dtype(dtype), revision, bits)
    if streamed is not None:
        return streamed
    backbone = load_backbone(location, dtype=dtype, revision=revision)
    fingerprint = weights_fingerprint(backbone)
    if bits_of(backbone) is not None:  # it is stored so
        dequantize(backbone, torch.float32)
        bits = None
    read = backbone.state_dict().__getitem__
    return BaseWeights(backbone, read, torch_dtype(dtype), bits, streamed=False, known_fingerprint=fingerprint)


def _streamed(
    location: BackboneLocation, dtype: torch.dtype, revision: str | None, bits: int | None
) -> BaseWeights | None:
    """None if some tensor of the backbone is not in the files as it is in the backbone."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel

    files = _safetensors_files(location.name, revision)
    config = AutoConfig.from_pretrained(location.name, revision=revision, trust_remote_code=False)
    if not files or config.is_encoder_decoder or getattr(config, "quantization_config", None) is not None:
        return None
    build: Any = AutoModel.from_config
    with torch.device("meta"):
        skeleton = build(config, trust_remote_code=False)
    if getattr(skeleton, "pooler", None) is not None:
        skeleton.pooler = None  # as load_backbone does
    exceptions = getattr(skeleton, "_keep_in_fp32_modules", None) or getattr(
        skeleton, "_keep_in_fp32_modules_strict", None
    )
    if exceptions and dtype != torch.float32:
        return None

    opened: list[Any] = [safe_open(path, framework="pt") for path in files]
    holder = {key: file for file in opened for key in file.keys()}  # noqa: SIM118  # no mapping
    key_of: dict[str, str] = {}
    for name, wanted in skeleton.state_dict().items():
        # A model with a head stores the backbone's tensors under its prefix, `model.` or `bert.`.
        keys = [key for key in (name, f"{skeleton.base_model_prefix}.{name}") if key in holder]
        if len(keys) != 1:
            return None
        stored = holder[keys[0]].get_slice(keys[0])
        if tuple(stored.get_shape()) != tuple(wanted.shape) or stored.get_dtype() not in _PLAIN:
            return None
        key_of[name] = keys[0]

    def read(name: str) -> Tensor:
        tensor: Tensor = holder[key_of[name]].get_tensor(key_of[name])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return BaseWeights(skeleton.eval(), read, dtype, bits, streamed=True)


def _safetensors_files(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a folder or hub id, as `transformers` would find them; none if there are none."""
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
