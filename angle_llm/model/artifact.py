"""The saved directory of an encoder: weights or adapter, tokenizer, and a card with everything needed to use it the way
it was trained.

    adapter_model.safetensors + adapter_config.json     an adapter, on the base the card names
    model.safetensors + config.json                     or a whole backbone
    tokenizer.json …                                    the tokenizer
    angle_llm.json                                      the card
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from angle_llm.config import unknown_name
from angle_llm.io import json_text, write_folder
from angle_llm.model import hub
from angle_llm.model.backbone import BackboneLocation, load_backbone, load_tokenizer, locate, weights_fingerprint
from angle_llm.model.checks import (
    CARD_NAME,
    ArtifactError,
    as_artifact_error,
    check_vocabulary,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.foreign import no_backbone, on_backbone, open_foreign
from angle_llm.model.lora import LoraAdapter, is_adapted, read_adapter
from angle_llm.model.tokenizer import Tokenizer
from angle_llm.prompts import PromptTemplate

FORMAT_VERSION = 1


@dataclass(frozen=True)
class EncoderCard:
    """How a saved encoder wants to be used."""

    prompt: PromptTemplate
    """How sentences are worded and tokenised."""
    pooling: str
    """Which states make the embedding."""
    max_length: int
    """Tokens of a worded sentence, prompt and special tokens included."""
    dtype: str
    """Dtype the base weights had in training."""
    base: str | None
    """The backbone an adapter belongs on, as `locate` reads it; None when the directory holds the whole backbone."""
    base_revision: str | None = None
    """Revision of the base, for a hub id."""
    base_fingerprint: str | None = None
    """`weights_fingerprint` of the base before it was quantized: an adapter put on other weights is refused."""
    bits: int | None = None
    """Bits the base was held in while the adapter trained: 4 (NF4), 8 (int8), None if it was not quantized."""
    dimensions: int | None = None
    """How many dimensions of a vector are kept, the first ones; None: all."""
    layers: int | None = None
    """How many layers of the base the adapter is for, the first ones; None: all that are there."""

    def write(self, folder: Path) -> None:
        """Writes the card into a folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"prompt": self.prompt.to_dict()}
        (folder / CARD_NAME).write_text(json_text({"format_version": FORMAT_VERSION, **values}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EncoderCard:
        """Reads the card of a folder.

        Raises:
            ArtifactError: for a missing, malformed or newer card.
            PromptError: for a prompt in it that cannot be used.
        """
        path = folder / CARD_NAME
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} has no {CARD_NAME}, so it is not a saved encoder.") from error
        if values.pop("format_version", None) != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: this version of angle_llm reads format_version {FORMAT_VERSION}. Upgrade angle_llm, or save "
                "the encoder again with this version."
            )
        return cls(**_checked(values, path))


_CARD_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (dict,),
    "pooling": (str,),
    "max_length": (int,),
    "dtype": (str,),
    "base": (str, type(None)),
    "base_revision": (str, type(None)),
    "base_fingerprint": (str, type(None)),
    "bits": (int, type(None)),
    "dimensions": (int, type(None)),
    "layers": (int, type(None)),
}

_SINCE_THEN = {"bits": None, "dimensions": None, "layers": None}
"""Keys that cards of earlier versions lack, and what they mean by it."""


def _checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    values = _SINCE_THEN | values
    for key in values:
        if key not in _CARD_TYPES:
            raise ArtifactError(f"{path}: {unknown_name('key', key, _CARD_TYPES)}")
    for key, kinds in _CARD_TYPES.items():
        if key not in values:
            raise ArtifactError(f"{path}: `{key}` is missing. Save the encoder again.")
        if type(values[key]) not in kinds:  # not isinstance: true is no number
            raise ArtifactError(
                f"{path}: `{key}` must be {' or '.join(k.__name__ for k in kinds)}, got {values[key]!r}."
            )
    if values["bits"] not in (None, 4, 8):
        raise ArtifactError(f"{path}: `bits` must be 4, 8 or null, got {values['bits']}.")
    for key in ("dimensions", "layers"):
        if values[key] is not None and values[key] < 1:
            raise ArtifactError(f"{path}: `{key}` must be 1 or more, or null, got {values[key]}.")
    return values | {"prompt": PromptTemplate.from_dict(values["prompt"], where=str(path))}


def check_writable(target: Path) -> None:
    """Refuses a target that `write_directory` would leave alone; asked before hours of work, not after.

    Raises:
        ArtifactError: if `target` holds something that is not a saved encoder.
    """
    if target.exists() and not (target.is_dir() and (is_saved_encoder(target) or not any(target.iterdir()))):
        raise ArtifactError(
            f"{target} exists and is not a saved encoder, so it is left alone. Choose another directory."
        )


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Writes a directory whole or not at all: `fill` gets a temporary folder beside it, renamed into place at the end.

    An existing directory is replaced, with all that is in it, if it is a saved encoder; any other must be empty.

    Raises:
        ArtifactError: if `target` holds something that is not a saved encoder.
    """
    target = target.expanduser().resolve()  # a link goes on pointing there
    check_writable(target)
    write_folder(target, fill)


class Parts(NamedTuple):
    """The parts of an encoder, loaded. None where nothing was saved, as for a bare backbone."""

    backbone: nn.Module
    tokenizer: Tokenizer
    base: str
    base_revision: str | None
    base_fingerprint: str | None = None
    card: EncoderCard | None = None
    adapter: LoraAdapter | None = None
    """Fits the backbone, and is not on it yet."""


def load_parts(
    path: str,
    *,
    adapter: str | Path | None,
    prompt: PromptTemplate | None,
    dtype: str,
    device: torch.device,
    revision: str | None,
    bits: int | Literal["auto"] | None,
) -> Parts:
    """Loads a saved directory, here or on the hub, or a backbone. Arguments and errors are those of `from_pretrained`."""
    foreign = None if adapter is None else open_foreign(Path(adapter).expanduser(), path, prompt)
    found = hub.find(path, revision)
    if found.folder is not None:
        if foreign is not None:
            raise no_backbone(path)
        return _load_saved(path, found, dtype, bits, device)
    revision = found.commit or revision
    location = locate(path)
    # On the device: it is probed where it will run.
    backbone = load_backbone(
        location, dtype=dtype, revision=revision, bits=None if bits == "auto" else bits, device=device
    )
    tokenizer = load_tokenizer(location, revision)
    with as_artifact_error(path):
        check_vocabulary(backbone, tokenizer, path)
    if foreign is None:
        return Parts(backbone, tokenizer, path, revision)
    with as_artifact_error(foreign.folder):
        update = on_backbone(foreign, backbone, path)
    return Parts(backbone, tokenizer, path, revision, weights_fingerprint(backbone), adapter=update)


def _load_saved(
    path: str, found: hub.Found, dtype: str, bits: int | Literal["auto"] | None, device: torch.device
) -> Parts:
    folder = found.folder
    assert folder is not None
    card = EncoderCard.read(folder)
    dtype = card.dtype if dtype == "auto" else dtype
    bits = card.bits if bits == "auto" else bits
    try:
        location = locate(card.base or str(folder))
    except FileNotFoundError as error:
        hint = f" {folder / CARD_NAME} names it as the base; if it moved, change it there." if card.base else ""
        raise FileNotFoundError(f"{error}{hint}") from error
    backbone = load_backbone(location, dtype=dtype, revision=card.base_revision, bits=bits, device=device)
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    with as_artifact_error(folder):
        check_vocabulary(backbone, tokenizer, folder)
    if card.base is None:
        base = str(folder) if found.commit is None else path  # not the place it has in the cache
        return Parts(backbone, tokenizer, base, found.commit, card=card)
    fingerprint = weights_fingerprint(backbone)
    # Rounding to float16 and then on to the fingerprint's bfloat16 is not rounding to bfloat16 at once.
    comparable = dtype == card.dtype or "float16" not in (dtype, card.dtype)
    if comparable and card.base_fingerprint not in (None, fingerprint):
        raise ArtifactError(
            f"{folder} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
            f"{fingerprint}. Put the original base there, or name the right one in {folder / CARD_NAME}."
        )
    with as_artifact_error(folder):
        adapter = read_adapter(folder)
        adapter.check_fits(backbone)
    return Parts(backbone, tokenizer, card.base, card.base_revision, fingerprint, card, adapter)


def save_parts(
    folder: str | Path,
    backbone: Any,
    tokenizer: Tokenizer,
    card: EncoderCard,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Writes the directory, whole or not at all: an adapted backbone as its adapter, any other with all its weights."""

    def fill(target: Path) -> None:
        # peft would ask the hub whether the vocabulary was resized; nothing here resizes it.
        backbone.save_pretrained(target, **({"save_embedding_layers": False} if is_adapted(backbone) else {}))
        tokenizer.save_pretrained(target)
        (target / "README.md").unlink(missing_ok=True)  # peft's empty model card
        card.write(target)
        if check is not None:
            check(target)

    write_directory(Path(folder), fill)
