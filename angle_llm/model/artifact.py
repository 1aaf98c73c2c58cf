"""The saved folder of an encoder: weights or adapter, tokenizer, and a card with prompt, pooling and base.

adapter_model.safetensors + adapter_config.json     an adapter, on the base that the card names
model.safetensors + config.json                     or a whole backbone
tokenizer.json …                                    the tokenizer
angle_llm.json                                      the card
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from angle_llm.io import json_text, write_folder
from angle_llm.model import hub
from angle_llm.model.backbone import BackboneLocation, load_backbone, load_tokenizer, locate, weights_fingerprint
from angle_llm.model.checks import (
    CARD_NAME,
    ArtifactError,
    as_artifact_error,
    check_loaded,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.foreign import fitted, no_backbone, read_foreign
from angle_llm.model.library_folder import LibraryFolder
from angle_llm.model.lora import LoraAdapter, is_adapted, read_adapter
from angle_llm.model.quantization import QuantizationError, bits_of
from angle_llm.model.tokenizer import Tokenizer, count_positions
from angle_llm.prompts import SidePrompts
from angle_llm.settings_io import unknown_name

FORMAT_VERSION = 1


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class EncoderCard:
    """How a saved encoder is used."""

    prompt: SidePrompts
    """In JSON: one prompt for both sides, or {"query": …, "document": …}."""
    pooling: str
    max_length: int
    """Tokens of a text, prompt and special tokens included."""
    dtype: str
    """Dtype of the base weights in training."""
    base: str | None
    """The backbone of an adapter, as `locate` reads it; None if the folder holds the whole backbone."""
    base_revision: str | None = None
    """Revision of the base, for a hub id."""
    base_fingerprint: str | None = None
    """`weights_fingerprint` of the base before it was quantized: an adapter on other weights is refused."""
    bits: Literal[4, 8] | None = None
    """Bits of the base in training: 4 (NF4), 8 (int8), None if it was not quantized."""
    dimensions: Annotated[int, Ge(1)] | None = None
    """Number of leading dimensions that are kept; None: all."""
    layers: Annotated[int, Ge(1)] | None = None
    """Number of leading layers of the base that the adapter uses; None: all."""
    normalize: bool = False
    """Whether vectors have length 1."""

    def write(self, folder: Path) -> None:
        """Write the card into a folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"prompt": self.prompt.to_dict()}
        if not self.normalize:  # earlier versions refuse the key
            del values["normalize"]
        (folder / CARD_NAME).write_text(json_text({"format_version": FORMAT_VERSION, **values}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EncoderCard:
        """Read the card of a folder.

        Raises:
            ArtifactError: for a missing or malformed card, or another format version.
            PromptError: for an invalid prompt in it.
        """
        path = folder / CARD_NAME
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} has no {CARD_NAME}, so it is not a saved encoder.") from error
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: expected format_version {FORMAT_VERSION}, got {version!r:.80}. Upgrade angle_llm, or save the "
                "encoder again with this version."
            )
        if isinstance(values.get("prompt"), dict):
            values["prompt"] = SidePrompts.from_dict(values["prompt"], where=str(path))
        try:
            return cls(**values)
        except ValidationError as error:
            raise ArtifactError(f"{path}: {_explain(cls, error.errors()[0])} Save the encoder again.") from error


def _explain(kind: type[EncoderCard], problem: Any) -> str:
    key = str(problem["loc"][0])
    if problem["type"] == "unexpected_keyword_argument":
        return unknown_name("key", key, [item.name for item in fields(kind)])
    if problem["type"] == "missing":
        return f"`{key}` is missing."
    return f"`{key}`: {problem['msg']}, got {problem['input']!r:.80}."


class Parts(NamedTuple):
    """The loaded parts of an encoder."""

    folder: str | Path
    """What errors name: the saved folder, the adapter or the backbone."""
    backbone: nn.Module
    tokenizer: Tokenizer
    base: str
    base_revision: str | None
    base_fingerprint: str | None = None
    card: EncoderCard | None = None
    """None for a bare backbone; of a folder of sentence-transformers, as it says."""
    adapter: LoraAdapter | None = None
    """Fits the backbone; not applied yet."""


def load_parts(
    path: str,
    *,
    adapter: str | Path | None,
    prompt: SidePrompts | None,
    dtype: str,
    device: torch.device,
    revision: str | None,
    bits: int | Literal["auto"] | None,
) -> Parts:
    """Load a saved folder, here or on the hub, or a backbone. Arguments and errors as in
    `SentenceEncoder.from_pretrained`."""
    other = Path(adapter or "").expanduser()
    foreign = None if adapter is None else read_foreign(other, path, prompt)
    found = hub.find(path, revision)
    library = None if found.library is None else LibraryFolder.read(found.library, prompt)
    if found.folder is not None:
        if foreign is not None:
            raise no_backbone(path)
        return _load_saved(path, found.folder, found.commit, dtype, bits, device)
    revision = found.commit or revision
    location = locate(path)
    # On the device: the probes run where the model will run.
    backbone = load_backbone(
        location, dtype=dtype, revision=revision, bits=None if bits == "auto" else bits, device=device
    )
    tokenizer = load_tokenizer(location, revision)
    with as_artifact_error(path):
        check_loaded(backbone, tokenizer, path)
        card = None if library is None else card_of(library, tokenizer, backbone, dtype)
    if foreign is None:
        return Parts(path, backbone, tokenizer, path, revision, card=card)
    with as_artifact_error(other):
        update = fitted(foreign, other, backbone, path)
    return Parts(other, backbone, tokenizer, path, revision, weights_fingerprint(backbone), card, update)


def card_of(library: LibraryFolder, tokenizer: Tokenizer, backbone: nn.Module, dtype: str = "auto") -> EncoderCard:
    """Return how the encoder in a folder of sentence-transformers is used. Raises `ArtifactError`."""
    length = library.length_for(tokenizer, count_positions(backbone))
    return EncoderCard(library.prompt, library.pooling, length, dtype, None, normalize=library.normalize)


def locate_base(folder: Path, card: EncoderCard) -> BackboneLocation:
    """Return where the weights of a saved encoder are. Raises `FileNotFoundError` for an adapter whose base is missing."""
    try:
        return locate(card.base or str(folder))
    except FileNotFoundError as error:
        hint = f" It is the `base` in {folder / CARD_NAME}; if it moved, change it there." if card.base else ""
        raise FileNotFoundError(f"{error}{hint}") from error


def _load_saved(
    path: str, folder: Path, commit: str | None, dtype: str, bits: int | Literal["auto"] | None, device: torch.device
) -> Parts:
    card = EncoderCard.read(folder)
    dtype = card.dtype if dtype == "auto" else dtype
    bits = card.bits if bits == "auto" else bits
    location = locate_base(folder, card)
    backbone = load_backbone(location, dtype=dtype, revision=card.base_revision, bits=bits, device=device)
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    with as_artifact_error(folder):
        check_loaded(backbone, tokenizer, folder)
    if card.base is None:
        base = str(folder) if commit is None else path  # not its path in the cache
        return Parts(folder, backbone, tokenizer, base, commit, card=card)
    fingerprint = weights_fingerprint(backbone)
    # Rounding to float16 and then to the bfloat16 of the fingerprint is not rounding to bfloat16 directly.
    comparable = dtype == card.dtype or "float16" not in (dtype, card.dtype)
    if comparable and card.base_fingerprint not in (None, fingerprint):
        raise ArtifactError(
            f"{folder} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
            f"{fingerprint}. Restore the original base, or correct `base` in {folder / CARD_NAME}."
        )
    with as_artifact_error(folder):
        adapter = read_adapter(folder)
        adapter.check_fits(backbone, f"the adapter {folder}", card.base)
    return Parts(folder, backbone, tokenizer, card.base, card.base_revision, fingerprint, card, adapter)


def save_parts(
    folder: str | Path,
    backbone: Any,
    tokenizer: Tokenizer,
    card: EncoderCard,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a saved folder, whole or not at all: an adapted backbone as its adapter, any other with all its weights."""
    if not is_adapted(backbone):
        card = replace(card, base=None, base_revision=None, base_fingerprint=None, layers=None)

    def fill(target: Path) -> None:
        # Otherwise peft would query the hub for a resized vocabulary.
        backbone.save_pretrained(target, **({"save_embedding_layers": False} if is_adapted(backbone) else {}))
        tokenizer.save_pretrained(target)
        (target / "README.md").unlink(missing_ok=True)  # the empty model card of peft
        card.write(target)
        if check is not None:
            check(target)

    write_directory(Path(folder), fill)


def check_savable(folder: str | Path, backbone: nn.Module, base: str | None) -> None:
    """Raise the errors of saving, before the work that is to be saved.

    Raises:
        ValueError: if the base of an adapter has no name.
        QuantizationError: for a quantized base without an adapter.
        ArtifactError: as `check_writable`.
    """
    target = Path(folder).expanduser()
    if not is_adapted(backbone):
        if (bits := bits_of(backbone)) is not None:
            raise QuantizationError(
                f"this encoder is a base in {bits} bits without an adapter, so it has nothing to save. Add an adapter, or save "
                "the base itself, loaded with bits=None."
            )
        check_writable(target)
    elif base is None:
        raise ValueError("the base of the adapter has no name. Construct the encoder with base=…, or from_pretrained.")
    else:
        check_writable(target, base=base if Path(base).is_absolute() else "")


def check_writable(target: Path, **read: str | Path) -> None:
    """Refuse a target that must not be replaced; call it before hours of work, not after.

    Args:
        read: folders and files that are read, by what they are ("base", "adapter").

    Raises:
        ArtifactError: if `target` has content and is not a saved encoder, or if replacing it would delete what is read.
    """
    if target.exists() and not (target.is_dir() and (is_saved_encoder(target) or not any(target.iterdir()))):
        raise ArtifactError(f"{target} exists and is not a saved encoder, so it is left alone. Choose another folder.")
    for what, path in read.items():
        if path and Path(path).exists() and Path(path).resolve().is_relative_to(target.resolve()):
            raise ArtifactError(f"{target} would overwrite the {what}, {path}. Choose another folder.")


def write_directory(target: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder whole or not at all; see `io.write_folder`. Only a saved encoder or an empty folder is replaced.

    Raises:
        ArtifactError: if `target` has other content.
    """
    target = target.expanduser()
    check_writable(target)
    write_folder(target, fill)
