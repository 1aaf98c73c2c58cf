"""Read the weights of a backbone one tensor at a time, to save memory; count floating-point operations per token.

For safetensors files, the backbone is built without memory for its weights, and each tensor is read from its file.
Other models are loaded completely, with the same result: GGUF files, models whose tensors `transformers` renames or packs
while loading, and classes that keep some layers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.layers.fingerprint import fingerprint_of, weights_fingerprint
from angle_llm.model.layers.lora import is_transposed
from angle_llm.model.layers.quantization import bits_of, check_bits, dequantize, is_quantizable, quantize
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.source.backbone import BackboneLocation, empty_backbone, load_backbone, load_config, torch_dtype
from angle_llm.model.source.composite import text_name

_PLAIN = {"F32", "BF16", "F16", "I64", "I32", "BOOL"}
"""Names of safetensors dtypes whose values need no unpacking."""


@dataclass(frozen=True)
class BaseWeights:
    """Read access to the tensors of a backbone by name, without loading all tensors if possible."""

    skeleton: nn.Module
    """The backbone, with config, layer types and shapes. Its tensors can be on the meta device (no values)."""
    read: Callable[[str], Tensor]
    """Function that returns the tensor with a name in `skeleton.state_dict()`, not quantized, on the CPU; read-only."""
    dtype: torch.dtype
    bits: Bits | None
    """Bits of the linear layers in the forward pass.

    None if the layers are not quantized, or if `read` already returns dequantized values.
    """
    known_fingerprint: str | None = None
    """Result of `weights_fingerprint`, if it is already computed."""

    def values(self, name: str) -> Tensor:
        """Return the weight with a name as the forward pass uses it, read-only.

        With `bits`, the weight of a linear layer is quantized, and then dequantized to float32.
        """
        path, _, parameter = name.rpartition(".")
        layer: Any = self.skeleton.get_submodule(path) if self.bits is not None and parameter == "weight" else None
        if self.bits is None or layer is None or not is_quantizable(self.skeleton, path, layer):
            return self.read(name)
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        linear.weight = nn.Parameter(self.read(name), requires_grad=False)
        # `dequantize` reads the dtype of the forward pass from the bias, because quantized weights are integers.
        linear.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=self.dtype), requires_grad=False)
        model = nn.Sequential(linear)
        quantize(model, self.bits)
        dequantize(model, torch.float32)
        weight: Tensor = model[0].weight.data  # type: ignore[assignment]
        return weight

    def fingerprint(self) -> str:
        """Return the hash of the original weights that `weights_fingerprint` computes for the backbone."""
        return self.known_fingerprint or fingerprint_of(self.skeleton.state_dict(), self.read)


def open_base(
    location: BackboneLocation, *, dtype: str, revision: str | None = None, bits: Bits | None = None
) -> BaseWeights:
    """Open the weights of a backbone to read single tensors; the values equal the weights that `load_backbone` loads.

    Tensors are read from the files on demand where possible; otherwise the backbone is loaded.

    Raises:
        ArtifactError, QuantizationError, ValueError: the errors of `load_backbone`.
    """
    if bits is not None:
        check_bits(bits)
    streamed = None if location.gguf_file else _streamed(location, torch_dtype(dtype), revision, bits)
    if streamed is not None:
        return streamed
    backbone = load_backbone(location, dtype=dtype, revision=revision)
    fingerprint = weights_fingerprint(backbone)
    if bits_of(backbone) is not None:  # the files are quantized
        dequantize(backbone, torch.float32)
        bits = None
    read = backbone.state_dict().__getitem__
    return BaseWeights(backbone, read, torch_dtype(dtype), bits, known_fingerprint=fingerprint)


def _streamed(
    location: BackboneLocation, dtype: torch.dtype, revision: str | None, bits: Bits | None
) -> BaseWeights | None:
    """Return the weights of a backbone, to be read from safetensors files on demand; None if this is not possible.

    It is not possible if the files lack a tensor or have another shape, or if `transformers` changes tensors while loading.
    """
    from safetensors import safe_open

    files = safetensors_files(location.name, revision)
    config = load_config(location, revision)
    if not files or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        skeleton = empty_backbone(config)
    in_float32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    if dtype != torch.float32 and any(getattr(skeleton, name, None) for name in in_float32):
        return None
    stored = find_tensors([safe_open(path, framework="pt") for path in files], skeleton)
    if stored is None:
        return None

    def read(name: str) -> Tensor:
        file, key = stored[name]
        tensor: Tensor = file.get_tensor(key)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return BaseWeights(skeleton.eval(), read, dtype, bits)


def find_tensors(files: Sequence[Any], backbone: nn.Module) -> dict[str, tuple[Any, str]] | None:
    """Return the file and the key of every tensor of a backbone by its name in `state_dict()`.

    `files` are open safetensors files of the backbone, of a model with a head, or of a composite model. The result is None
    if a tensor is missing or has another shape, because `transformers` then changes tensors while loading.
    """
    # Names as in the text model, if the files contain a composite model.
    file_and_key = {text_name(key): (file, key) for file in files for key in file.keys()}  # noqa: SIM118  # no mapping
    stored: dict[str, tuple[Any, str]] = {}
    for name, needed in backbone.state_dict().items():
        # A model with a head stores the tensors of the backbone under its prefix, `model.` or `bert.`.
        keys = [key for key in (name, f"{backbone.base_model_prefix}.{name}") if key in file_and_key]
        if len(keys) != 1:
            return None
        file, key = file_and_key[keys[0]]
        tensor = file.get_slice(key)
        if tuple(tensor.get_shape()) != tuple(needed.shape) or tensor.get_dtype() not in _PLAIN:
            return None
        stored[name] = file, key
    return stored


def model_file(name: str, file: str, revision: str | None) -> str | None:
    """Return the path of a file of the model in a folder or at a hub id; None if the model has no such file."""
    from transformers.utils import hub

    path: str | None = hub.cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return path


def safetensors_files(name: str, revision: str | None) -> list[Path]:
    """Return the paths of the safetensors files that `transformers` reads for a folder or hub id."""
    from transformers.utils import hub

    single = model_file(name, "model.safetensors", revision)
    if single is not None:
        return [Path(single)]
    index = model_file(name, "model.safetensors.index.json", revision)
    if index is None:
        return []
    listing: Any = hub.get_checkpoint_shard_files
    shards, _ = listing(name, index, revision=revision)
    return [Path(shard) for shard in shards]


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations of the linear layers per token.

    Attention scores are not counted (2 % at 7B and 50 tokens).
    """

    forward: int
    """Operations of the forward pass: two per weight."""
    backward: int
    """Operations of the backward pass: two per weight for the gradient of the input, two more per trainable weight."""

    @classmethod
    def of(cls, backbone: nn.Module, passes: int = 1) -> FlopsPerToken:
        """Count the operations of a backbone from the shapes of its linear layers.

        `passes` is the number of times that the backbone computes a token: 2 with SimCSE.
        """
        forward = backward = 0
        for module in backbone.modules():
            # Conv1D of GPT-2 is a linear layer with a transposed weight.
            if isinstance(module, nn.Linear) or is_transposed(module):
                weight: Tensor = module.weight  # type: ignore[assignment]
                # Two weights of a 4-bit layer are packed into one byte.
                size = module.in_features * module.out_features if isinstance(module, nn.Linear) else weight.numel()
                forward += 2 * size
                backward += 2 * size * (2 if weight.requires_grad else 1)
        return cls(passes * forward, passes * backward)
