"""Read a saved LoRA adapter, check that it fits a backbone, and apply it.

Adapters with anything but LoRA, rsLoRA or DoRA on linear layers (trained embeddings, biases, a rank per layer) raise an
error, because a merge would ignore it. Only safetensors files are read; no code from the folder runs.

`read_peft_adapter` reads an adapter that peft or angle-emb saved:

    adapter_config.json  adapter_model.safetensors     prompt, pooling and maximum length are arguments

Such a folder has no `angle_llm.json`, in contrast to an adapter of this package. The tensor names contain the path of a
layer in the trained model: with a language-model head (`CAUSAL_LM`: base_model.model.**model.**layers.0…) or without
(`FEATURE_EXTRACTION`: base_model.model.layers.0…). If only a part of an adapter were applied, embeddings would be wrong
without an error. So every tensor must match a layer and its shape, the rank must equal the rank in the configuration, and
the base model must have the name in the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.io import sha256_of, write_json
from angle_llm.model.layers.fused_lora import use_fused_lora
from angle_llm.model.layers.lora import LoraUpdate, is_transposed, peft_model
from angle_llm.model.layers.quantization import bits_of
from angle_llm.model.source.backbone import absolute_name
from angle_llm.model.source.checks import (
    CARD_NAME,
    ArtifactError,
    as_artifact_error,
    check_settings,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.source.composite import COMPOSITE, Composite, text_name
from angle_llm.settings.parsing import similar_paths

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_ROOT = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_UNCHECKED = (
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
)  # fmt: skip
_SUPPORTED: dict[str, Sequence[object] | None] = {
    **dict.fromkeys(_UNCHECKED),
    "peft_type": ["LORA"],
    "init_lora_weights": [True, "gaussian", "orthogonal"],  # with these, the base keeps its weights
    "bias": ["none"],
}
"""Keys of `adapter_config.json` that this module reads, or that do not change the adapted weights, and the values that are
supported (see `check_settings`)."""


@dataclass(frozen=True)
class LoraAdapter:
    """The contents of a saved adapter: an update for every adapted layer, and the configuration."""

    updates: dict[str, LoraUpdate]
    """Path of a layer in the backbone (also of an adapter for a composite model) → update of its weight."""
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
        layers: dict[str, Any] = dict(backbone.named_modules())
        for path, update in self.updates.items():
            layer = layers.get(path)
            if layer is None and getattr(backbone, COMPOSITE, None) is not None:
                raise ArtifactError(
                    f"{name} changes {path}, which is not in the text model of {base}. Only adapters of the text model can be "
                    "opened: train it again without other layers (exclude_modules in peft), or use its base."
                )
            if layer is None:
                raise ArtifactError(
                    f"{name} changes {path}, but {base} has no such layer. Use the base of the adapter."
                )
            shape = None
            if is_transposed(layer):
                shape = tuple(layer.weight.shape)[::-1]
            elif isinstance(layer, nn.Linear):  # the weight of a 4-bit layer is packed, so its shape is not (O, I)
                shape = (layer.out_features, layer.in_features)
            if shape != update.shape:
                raise ArtifactError(
                    f"{name} changes {path} by {update.shape}, but in {base} it is a {type(layer).__name__} of shape {shape}. "
                    "Use the base of the adapter."
                )


def apply_lora(backbone: nn.Module, adapter: LoraAdapter) -> nn.Module:
    """Return a backbone with a saved adapter added, for inference; `lora.make_trainable` prepares it for training.

    `read_adapter` reads the files, because peft would import modules that the configuration names.

    Raises:
        ArtifactError: if peft does not change exactly the layers of the adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    # Tensors by their names in peft.
    config = adapter.config
    if config.get("use_dora") and bits_of(backbone) == "fp8":  # peft would read the bytes of the weights
        raise ArtifactError("bits fp8: expected a LoRA adapter, got DoRA. Use bits 8, 4 or None.")
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
    if difference := needed.keys() ^ tensors.keys():
        raise ArtifactError(f"peft would change other layers than the adapter, such as {min(difference)}.")
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
    from safetensors.torch import load_file

    # Files.
    if not folder.is_dir():
        raise FileNotFoundError(f"no adapter at {folder}. {similar_paths(folder)}")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}, so it contains no adapter in safetensors. Load an adapter_model.bin, a pickle, with "
                "peft where you trust it, and save it with save_pretrained."
            )
    file = folder / WEIGHTS_NAME
    config = read_json(folder / CONFIG_NAME)
    check_settings(folder / CONFIG_NAME, config, _SUPPORTED)
    with as_artifact_error(folder / CONFIG_NAME):
        rank = config["r"]
        scaling = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    with as_artifact_error(file):
        tensors = {key: tensor.float() for key, tensor in load_file(file).items()}
    # Updates, one for each adapted layer.
    paths = [key.removeprefix(_ROOT).removesuffix(_A) for key in tensors if key.startswith(_ROOT) and key.endswith(_A)]
    updates: dict[str, LoraUpdate] = {}
    for path in paths:
        a_RI = tensors.pop(_ROOT + path + _A)
        b_OR = tensors.pop(_ROOT + path + _B, torch.empty(0))  # a missing B is refused below, by its shape
        magnitude_O = tensors.pop(_ROOT + path + _MAGNITUDE, None)
        fits = a_RI.ndim == b_OR.ndim == 2 and len(a_RI) == b_OR.shape[1] == rank
        shape_of_magnitude = None if magnitude_O is None else magnitude_O.shape
        fits = fits and shape_of_magnitude == (b_OR.shape[:1] if config.get("use_dora") else None)
        parts = [part for part in (a_RI, b_OR, magnitude_O) if part is not None]
        if not fits or not all(bool(part.isfinite().all()) for part in parts):
            raise ArtifactError(
                f"{file}: the update of {path} is incomplete, is not finite, or does not have the rank {rank} of {CONFIG_NAME}. "
                "Save the adapter again."
            )
        updates[text_name(path)] = LoraUpdate(a_RI, b_OR, scaling, magnitude_O)
    # All tensors must belong to an update.
    if tensors or not updates:
        rest = min(tensors, default="no update")
        raise ArtifactError(f"{file} contains {rest}; expected updates of linear layers alone. Save the adapter again.")
    return LoraAdapter(updates, sha256_of(file), config)


def write_composite_names(folder: Path, composite: Composite) -> None:
    """Rewrite a saved adapter of a text model with the layer names of the composite model that the text model is part of.

    `AutoPeftModel` of peft then opens the composite model with this adapter, and vLLM applies it to the composite model.
    vLLM would ignore the names of the text model without an error.
    """
    from safetensors.torch import load_file, save_file

    file = folder / WEIGHTS_NAME
    root = f"{_ROOT}{composite.path}."
    tensors = {root + key.removeprefix(_ROOT): tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    changes = {
        "auto_mapping": {"base_model_class": composite.model_class, "parent_library": "transformers"},
        "task_type": None,  # `AutoPeftModel` refuses a task
        "exclude_modules": rf"(?!{re.escape(composite.path)}\.).*",  # the names of the targets are also in the towers
    }
    write_json(folder / CONFIG_NAME, read_json(folder / CONFIG_NAME) | changes)


# --- adapters of other libraries --------------------------------------------------------------------------------------


def read_peft_adapter(folder: Path, base: str, prompt: object) -> LoraAdapter:
    """Read and check an adapter that peft or angle-emb saved, before its base model is loaded.

    `base` and the base name in the adapter configuration match if they are the same path or hub id, or have the same last
    part. So `/models/Name`, a local copy, matches `org/Name`.

    Raises:
        FileNotFoundError: if the folder contains no adapter.
        ArtifactError: for a damaged or unsupported adapter, or a base with another name.
        ValueError: if `folder` is a saved encoder of this package, or `prompt` is None.
    """
    if is_saved_encoder(folder):
        raise ValueError(
            f"{folder} is a saved encoder, and its {CARD_NAME} names its base. Open it without a base: "
            f"from_pretrained({str(folder)!r})."
        )
    check_adapter_prompt(folder, prompt)
    adapter = read_adapter(folder)
    # The adapter must belong to the base.
    trained = str(adapter.config.get("base_model_name_or_path") or base)
    same_name = PurePath(base).name.lower() == PurePath(trained).name.lower()
    if absolute_name(base) != absolute_name(trained) and not same_name:
        raise ArtifactError(
            f"the adapter {folder} was trained on {trained}, not on {base}. If {base} is the same model under another name, "
            f"write this name as base_model_name_or_path in {folder / CONFIG_NAME}."
        )
    return adapter


def check_adapter_prompt(folder: Path, prompt: object) -> None:
    """Raise `ValueError` if `prompt`, the prompt for an adapter in a folder without a card, is None."""
    if prompt is None:
        raise ValueError(
            f"prompt: {folder} has no {CARD_NAME}, so the prompt of the adapter is unknown. Set --prompt (train: "
            "--model.prompt; Python: prompt=…) to the prompt of its training, or to plain for the bare text."
        )


def fitted(adapter: LoraAdapter, folder: Path, backbone: nn.Module, base: str) -> LoraAdapter:
    """Check that an adapter fits a backbone, and return it with the layer names of the backbone.

    An adapter that was trained on a model with a head has a prefix before every layer name, which is removed.

    Raises:
        ArtifactError: if a layer is missing or has another shape; the message names adapter, base and layer.
    """
    root = f"{backbone.base_model_prefix}."
    # For all layers or none: a model with a head has its whole backbone under the prefix.
    if root[:-1] not in dict(backbone.named_modules()) and all(path.startswith(root) for path in adapter.updates):
        updates = {path.removeprefix(root): update for path, update in adapter.updates.items()}
        adapter = replace(adapter, updates=updates)
    adapter.check_fits(backbone, f"the adapter {folder}", f"{base} ({type(backbone).__name__})")
    return adapter
