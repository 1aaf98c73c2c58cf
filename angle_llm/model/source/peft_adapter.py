"""Read LoRA adapters that peft or angle-emb saved.

    adapter_config.json  adapter_model.safetensors     prompt, pooling and maximum length are arguments

Such a folder has no `angle_llm.json`, in contrast to an adapter of this package. The tensor names contain the path of a
layer in the trained model: with a language-model head (`CAUSAL_LM`: base_model.model.**model.**layers.0…) or without
(`FEATURE_EXTRACTION`: base_model.model.layers.0…).

If only a part of an adapter were applied, embeddings would be wrong without an error. So every tensor must match a layer
and its shape, and the rank must equal the rank in the configuration. Only LoRA, rsLoRA and DoRA on linear layers are
accepted (see `lora`). The base model must have the name in the configuration. Only safetensors files are read; no code
from the folder runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath

from torch import nn

from angle_llm.model.source.backbone import absolute_name
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.source.saved_adapter import CONFIG_NAME, LoraAdapter, read_adapter


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
