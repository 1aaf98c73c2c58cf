"""LoRA adapters from elsewhere: the folders that plain peft and angle-emb write.

    adapter_config.json  adapter_model.safetensors     no card: prompt, pooling and length are for the user to name

Their tensors are named by the path of a layer in the model they were trained on: with a language-model head
(`CAUSAL_LM`: base_model.model.**model.**layers.0…) or without (`FEATURE_EXTRACTION`: base_model.model.layers.0…). Here they
go on the backbone, whose states are the same.

Strict, for an adapter that is put on in part gives other vectors without a word: every tensor has its layer, of its shape;
the rank is the configuration's; parts that are more than LoRA, rsLoRA or DoRA on linear layers are refused (see `merging`);
and the base is the one the adapter names. Only safetensors is read: nothing in the folder can run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from torch import nn

from angle_llm.model.backbone import absolute_name
from angle_llm.model.checks import ArtifactError, check_files, is_saved_encoder
from angle_llm.model.lora import CONFIG_NAME, WEIGHTS_NAME, LoraAdapter, is_transposed, linear_shape, read_adapter

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclass(frozen=True)
class ForeignAdapter:
    """An adapter as it was read; its layers are named as in the model it was trained on."""

    folder: Path
    adapter: LoraAdapter

    @property
    def base(self) -> str | None:
        """The model it says it was trained on."""
        name = self.adapter.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def __str__(self) -> str:
        return f"the adapter {self.folder} (trained on {self.base or 'a base it does not name'})"


def open_foreign(folder: Path, base: str, prompt: object) -> ForeignAdapter:
    """What can be refused before a base is loaded: see `read_foreign` and `check_base_name`.

    Raises:
        FileNotFoundError, ArtifactError: as they do.
        ValueError: for a base that is a saved encoder, or without a prompt.
    """
    if is_saved_encoder(base):
        raise no_backbone(base)
    if prompt is None:
        raise ValueError(
            "an adapter from elsewhere does not say how texts were worded. Name prompt=…: the one it was trained with, or "
            "'plain' for the bare text."
        )
    foreign = read_foreign(folder)
    check_base_name(foreign, base)
    return foreign


def no_backbone(base: str) -> ValueError:
    """The error for an adapter on a saved encoder, which is here or on the hub."""
    return ValueError(f"an adapter goes on a backbone, and {base} is a saved encoder. Name the base of the adapter.")


def read_foreign(folder: Path) -> ForeignAdapter:
    """Reads an adapter folder without a card; nothing in it is run.

    Raises:
        FileNotFoundError: if there is no adapter.
        ArtifactError: for pickle files, a damaged or incomplete adapter, or one that is more than LoRA on linear layers.
        ValueError: for a directory that is a saved encoder, which needs no base named.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"adapter needs a folder with {CONFIG_NAME} and {WEIGHTS_NAME}; there is none at {folder}."
        )
    if is_saved_encoder(folder):
        raise ValueError(
            f"{folder} is a saved encoder and knows its base. Open it by itself: from_pretrained({str(folder)!r})."
        )
    if not (folder / WEIGHTS_NAME).is_file():
        pickled = next((name for name in _PICKLES if (folder / name).exists()), None)
        if pickled is not None:
            raise ArtifactError(
                f"{folder} holds {pickled}, a pickle, which can run any code when it is loaded and is not opened. Load it where "
                f"you trust it and save it with safe_serialization=True, which writes {WEIGHTS_NAME}."
            )
    check_files(folder)
    return ForeignAdapter(folder, read_adapter(folder))


def check_base_name(foreign: ForeignAdapter, base: str) -> None:
    """Refuses a base that goes by another name than the one the adapter was trained on.

    A hub id and a local copy of it (`org/Name`, `/models/Name`) share their last part, and that is what is compared; an
    adapter that names no base fits any, as far as names go.

    Raises:
        ArtifactError: naming both.
    """
    trained = foreign.base
    if trained is None or absolute_name(trained) == absolute_name(base):
        return
    if PurePath(trained).name.lower() != PurePath(base).name.lower():
        raise ArtifactError(
            f"{foreign} does not belong on {base}. Give its own base; or if that is the same model under another name, write "
            f"this name as base_model_name_or_path in {foreign.folder / CONFIG_NAME}."
        )


def on_backbone(foreign: ForeignAdapter, backbone: nn.Module, base: str) -> LoraAdapter:
    """The adapter with its layers named as in the backbone, each of which is there, of its shape.

    Raises:
        ArtifactError: naming adapter and base, and the first layer that does not fit.
    """
    layers = dict(backbone.named_modules())
    root = str(backbone.base_model_prefix)
    head = f"{root}."
    updates = foreign.adapter.updates
    # The one or the other for all: a model with a head has its whole backbone under the prefix.
    with_head = root not in layers and all(path.startswith(head) for path in updates)
    renamed = {path.removeprefix(head) if with_head else path: update for path, update in updates.items()}
    for path, update in renamed.items():
        layer: Any = layers.get(path)
        if layer is None:
            raise ArtifactError(f"{foreign} changes {path}, and {base} ({type(backbone).__name__}) has no such layer.")
        if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
            raise ArtifactError(
                f"{foreign} changes {path}, which in {base} is no linear layer but a {type(layer).__name__}."
            )
        inside = linear_shape(layer)
        if inside != update.shape:
            raise ArtifactError(
                f"{foreign} changes {path} by {update.shape}, outputs by inputs, and in {base} it is {inside}: another model."
            )
    return replace(foreign.adapter, updates=renamed)
