"""Read a saved LoRA adapter, check that it fits a backbone, and apply it.

Adapters with anything but LoRA, rsLoRA or DoRA on linear layers (trained embeddings, biases, a rank per layer) raise an
error, because a merge would ignore it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.io import sha256_of
from angle_llm.model.layers.fused_lora import use_fused_lora
from angle_llm.model.layers.lora import LoraUpdate, is_transposed, peft_model, quiet_peft
from angle_llm.model.source.checks import ArtifactError, read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_ROOT = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_SUPPORTED = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type",
    "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of `adapter_config.json` that this module reads, or that do not change the adapted weights."""
_LARGEST_ALPHA = 1e6
"""Upper limit of the alpha of a saved adapter: far above real values, far below the range of float32."""


@dataclass(frozen=True)
class LoraAdapter:
    """The contents of a saved adapter: an update for every adapted layer, and the configuration."""

    updates: dict[str, LoraUpdate]
    """Path of a layer in the backbone → update of its weight."""
    sha256: str
    """SHA-256 of the file `adapter_model.safetensors`."""
    config: dict[str, Any]
    """Contents of `adapter_config.json`."""

    def check_fits(self, backbone: nn.Module, name: str = "the adapter", base: str = "the base") -> None:
        """Check that a backbone has a linear layer of the right shape for every update of the adapter.

        `name` and `base` are the names of the adapter and the backbone in the error message.

        Raises:
            ArtifactError: if a layer is missing or has another shape.
        """
        layers = dict(backbone.named_modules())
        for path, update in self.updates.items():
            layer = layers.get(path)
            if layer is None:
                raise ArtifactError(
                    f"{name} changes {path}, but {base} has no such layer. Use the base of the adapter."
                )
            if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
                raise ArtifactError(
                    f"{name} changes {path}, which in {base} is a {type(layer).__name__}, not a linear layer."
                )
            held: Any = layer  # the weight of a 4-bit layer is packed, so its shape is not (O, I)
            shape = tuple(held.weight.shape)[::-1] if is_transposed(layer) else (held.out_features, held.in_features)
            if shape != update.shape:
                raise ArtifactError(
                    f"{name} changes {path} by {update.shape}, but in {base} its shape is {shape}. Use the base of the adapter."
                )


def apply_lora(backbone: nn.Module, adapter: LoraAdapter) -> nn.Module:
    """Return a backbone with a saved adapter added, for inference; `saved_lora.make_trainable` prepares it for training.

    `read_adapter` reads the files, because peft would import modules that the configuration names.

    Raises:
        ArtifactError: if peft does not change exactly the layers of the adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    # Tensors by their names in peft.
    config = adapter.config
    tensors: dict[str, Tensor] = {}
    for path, update in adapter.updates.items():
        tensors |= {_ROOT + path + _A: update.a_RI, _ROOT + path + _B: update.b_OR}
        if update.magnitude_O is not None:
            tensors[_ROOT + path + _MAGNITUDE] = update.magnitude_O
    # Layers, then their weights.
    adapted = peft_model(
        backbone,
        inference_mode=True,
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        lora_dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=_targets(backbone, adapter),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
    )
    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if {key: tensor.shape for key, tensor in needed.items()} != {key: tensor.shape for key, tensor in tensors.items()}:
        odd = min(needed.keys() ^ tensors.keys(), default="a tensor with another shape")
        raise ArtifactError(
            f"the adapter has {len(adapter.updates)} layers, but peft would change other layers or shapes: {odd}."
        )
    with quiet_peft():
        set_peft_model_state_dict(adapted, tensors)
    use_fused_lora(adapted)
    return adapted.train(backbone.training)


def _targets(backbone: nn.Module, adapter: LoraAdapter) -> list[str]:
    """Return the LoRA targets for peft that select exactly the layers of a saved adapter.

    These are the names in the configuration of the adapter, or full paths if the names would select other layers.
    """
    names = adapter.config.get("target_modules")
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        ends = tuple(f".{name}" for name in names)
        if {path for path, _ in backbone.named_modules() if f".{path}".endswith(ends)} == set(adapter.updates):
            return names
    return sorted(adapter.updates)


def read_adapter(folder: Path) -> LoraAdapter:
    """Read and check the LoRA adapter in a folder: `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        FileNotFoundError: if the folder contains no adapter.
        ArtifactError: for damaged files, incomplete updates, or anything but LoRA, rsLoRA and DoRA on linear layers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # Files.
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, so it contains no adapter.")
    file = folder / WEIGHTS_NAME
    config = read_json(folder / CONFIG_NAME)
    try:
        tensors = {key: tensor.float() for key, tensor in load_file(file).items()}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"the adapter {file} cannot be read: {error} Save it again.") from error
    odd = next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if odd is not None:
        raise ArtifactError(f"{file}: {odd} has values that are not finite. Save the adapter again.")
    # Updates, one for each adapted layer.
    scaling = _scaling(config, folder / CONFIG_NAME)
    rank = config["r"]
    paths = [key.removeprefix(_ROOT).removesuffix(_A) for key in tensors if key.startswith(_ROOT) and key.endswith(_A)]
    updates: dict[str, LoraUpdate] = {}
    for path in paths:
        a_RI, b_OR = tensors.pop(_ROOT + path + _A), tensors.pop(_ROOT + path + _B, None)
        magnitude_O = tensors.pop(_ROOT + path + _MAGNITUDE, None)
        if b_OR is None or (magnitude_O is None) == bool(config.get("use_dora")):
            raise ArtifactError(f"{file}: the update of {path} is incomplete. Save the adapter again.")
        fits = a_RI.ndim == 2 and b_OR.ndim == 2 and a_RI.shape[0] == b_OR.shape[1] == rank
        if not fits or (magnitude_O is not None and magnitude_O.shape != b_OR.shape[:1]):
            raise ArtifactError(
                f"{file}: the update of {path}: expected A ({rank}, I) and B (O, {rank}), got {tuple(a_RI.shape)} and "
                f"{tuple(b_OR.shape)}. Save the adapter again."
            )
        updates[path] = LoraUpdate(a_RI, b_OR, scaling, magnitude_O)
    # All tensors must belong to an update.
    if tensors or not updates:
        odd = min(tensors, default=None)
        problem = "contains no update" if odd is None else f"contains {odd}, which is no update of a linear layer"
        raise ArtifactError(f"{file} {problem}. Save the adapter again.")
    return LoraAdapter(updates, sha256_of(file), config)


def _scaling(config: dict[str, Any], path: Path) -> float:
    """Return the scaling of LoRA updates for an adapter configuration: alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    `path` is the file of the configuration, for messages.

    Raises:
        ArtifactError: if the configuration is invalid, or describes anything but plain LoRA, rsLoRA or DoRA.
    """
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout") or 0.0
    initial = config.get("init_lora_weights", True)
    expected = {
        "init_lora_weights": (
            isinstance(initial, bool) or initial == "gaussian",
            "an initialization that keeps the base",
        ),
        "r": (type(rank) is int and rank > 0, "a positive integer"),
        "lora_alpha": (type(alpha) in (int, float) and abs(alpha) < _LARGEST_ALPHA, "a number"),  # type: ignore[arg-type]
        "lora_dropout": (type(dropout) in (int, float) and 0 <= dropout <= 1, "a number in 0 .. 1"),
    }
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: `peft_type`: expected LORA, got {config.get('peft_type')!r}.")
    for key, value in config.items():
        if key not in _SUPPORTED and value not in (None, False, {}, [], "none"):
            raise ArtifactError(f"{path}: `{key}` = {value!r} is not supported.")
    for key, (holds, description) in expected.items():
        if not holds:
            raise ArtifactError(f"{path}: `{key}`: expected {description}, got {config.get(key)!r}.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # type: ignore[arg-type,operator]
