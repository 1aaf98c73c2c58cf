"""LoRA adapters of other libraries: the folders that peft and angle-emb write, without a card.

    adapter_config.json  adapter_model.safetensors     prompt, pooling and length are arguments

The names of their tensors contain the path of a layer in the model they were trained on: with a language-model head
(`CAUSAL_LM`: base_model.model.**model.**layers.0…) or without (`FEATURE_EXTRACTION`: base_model.model.layers.0…).

An adapter that is applied in part gives other vectors without an error. So every tensor must have its layer, of its
shape; the rank is that of the configuration; parts other than LoRA, rsLoRA or DoRA on linear layers are refused (see
`lora`); and the base is the one that the adapter names. Only safetensors is read; no code of the folder runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath

from torch import nn

from angle_llm.model.layers.lora import CONFIG_NAME, WEIGHTS_NAME, LoraAdapter, read_adapter
from angle_llm.model.source.backbone import absolute_name
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, check_links, is_saved_encoder

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


def no_backbone(base: str) -> ValueError:
    """Return the error for `adapter=` together with a saved encoder."""
    return ValueError(
        f"adapter: expected a backbone as its base, but {base} is a saved encoder. Name the base instead."
    )


def read_peft_adapter(folder: Path, base: str, prompt: object) -> LoraAdapter:
    """Read a folder of peft or angle-emb, which has no card, before the base is loaded.

    The base can be named by a hub id or a local copy of it (`org/Name`, `/models/Name`): the last parts are compared.

    Raises:
        FileNotFoundError: if there is no adapter.
        ArtifactError: for pickles, a damaged or unsupported adapter, or a base of another name.
        ValueError: if the folder or the base is a saved encoder, or without a prompt.
    """
    if is_saved_encoder(base):
        raise no_backbone(base)
    if not folder.is_dir():
        raise FileNotFoundError(f"adapter: expected a folder with {CONFIG_NAME} and {WEIGHTS_NAME}; {folder} is none.")
    if is_saved_encoder(folder):
        raise ValueError(
            f"{folder} is a saved encoder, which has its base on its card. Open it without a base: "
            f"from_pretrained({str(folder)!r})."
        )
    if prompt is None:
        raise ValueError(
            f"prompt: {folder} has no {CARD_NAME}, so the prompt of the adapter is unknown. Pass prompt=… with the prompt of "
            "its training, or prompt='plain' for the bare text."
        )
    pickled = next((name for name in _PICKLES if (folder / name).exists()), None)
    if pickled is not None and not (folder / WEIGHTS_NAME).is_file():
        raise ArtifactError(
            f"{folder} contains {pickled}, a pickle, which can run any code when it is loaded. Load it where you trust it, "
            f"and save it with safe_serialization=True, which writes {WEIGHTS_NAME}."
        )
    check_links(folder)
    adapter = read_adapter(folder)
    trained = _trained_on(adapter)
    names = [] if trained is None else [absolute_name(trained), PurePath(trained).name.lower()]
    if names and absolute_name(base) != names[0] and PurePath(base).name.lower() != names[1]:
        raise ArtifactError(
            f"{_describe(adapter, folder)} does not belong to {base}. Name its own base; if that is the same model under "
            f"another name, write this name as base_model_name_or_path in {folder / CONFIG_NAME}."
        )
    return adapter


def fitted(adapter: LoraAdapter, folder: Path, backbone: nn.Module, base: str) -> LoraAdapter:
    """Rename the layers of an adapter to those of the backbone; adapters of models with a head have a prefix.

    Raises:
        ArtifactError: naming adapter and base, and the first layer that does not fit.
    """
    root = f"{backbone.base_model_prefix}."
    # For all layers or none: a model with a head has its whole backbone under the prefix.
    if root[:-1] not in dict(backbone.named_modules()) and all(path.startswith(root) for path in adapter.updates):
        updates = {path.removeprefix(root): update for path, update in adapter.updates.items()}
        adapter = replace(adapter, updates=updates)
    adapter.check_fits(backbone, _describe(adapter, folder), f"{base} ({type(backbone).__name__})")
    return adapter


def _trained_on(adapter: LoraAdapter) -> str | None:
    name = adapter.config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _describe(adapter: LoraAdapter, folder: Path) -> str:
    return f"the adapter {folder} (trained on {_trained_on(adapter) or 'an unnamed base'})"
