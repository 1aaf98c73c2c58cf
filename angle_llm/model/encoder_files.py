"""How an encoder is opened and saved: what `SentenceEncoder.from_pretrained` and `save_pretrained` do.

path ──► a saved encoder's folder (here, or on the hub)? ──► card, base, tokenizer, adapter
     └─► else a backbone, alone or with a foreign adapter
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from angle_llm.model import adapters, hub
from angle_llm.model.artifact import (
    CARD_NAME,
    ArtifactError,
    EncoderCard,
    check_writable,
    told_as_damage,
    write_directory,
)
from angle_llm.model.backbone import BackboneLocation, load_backbone, load_tokenizer, locate, weights_fingerprint
from angle_llm.model.foreign import ForeignAdapter, no_backbone, on_backbone, open_foreign
from angle_llm.model.quantized import QuantisationError
from angle_llm.model.soundness import check_states, check_vocabulary
from angle_llm.prompts import PromptTemplate

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder


class Reading(NamedTuple):
    """How texts are to become vectors; None: as saved, or as is usual for the backbone."""

    prompt: PromptTemplate | None
    pooling: str | None
    max_length: int | None


def open_encoder(
    kind: type[SentenceEncoder],
    path: str,
    *,
    adapter: str | Path | None,
    reading: Reading,
    dtype: str,
    device: torch.device,
    revision: str | None,
    bits: int | Literal["auto"] | None,
) -> SentenceEncoder:
    """The encoder of a saved directory, or of a backbone. Arguments and errors are those of `from_pretrained`."""
    foreign = None if adapter is None else open_foreign(Path(adapter).expanduser(), path, reading.prompt)
    found = hub.find(path, revision)
    if found.folder is None:
        revision = found.commit or revision
        bits = None if bits == "auto" else bits
        return _of_backbone(kind, path, foreign, reading, dtype, revision, bits, device)
    if foreign is not None:
        raise no_backbone(path)
    card = EncoderCard.read(found.folder)
    dtype = card.dtype if dtype == "auto" else dtype
    bits = card.bits if bits == "auto" else bits
    encoder = _of_saved(kind, found.folder, card, reading, dtype, bits, device)
    if found.commit is not None and card.base is None:
        encoder.base, encoder.base_revision = path, found.commit  # not the place it has in the cache
    return encoder


def _of_backbone(
    kind: type[SentenceEncoder],
    path: str,
    foreign: ForeignAdapter | None,
    reading: Reading,
    dtype: str,
    revision: str | None,
    bits: int | None,
    device: torch.device,
) -> SentenceEncoder:
    location = locate(path)
    # On the device: it is probed where it will run.
    backbone = load_backbone(location, dtype=dtype, revision=revision, bits=bits, device=device)
    tokenizer = load_tokenizer(location, revision)
    with told_as_damage(path):
        check_vocabulary(backbone, tokenizer, path)
        encoder = kind(backbone, tokenizer, **reading._asdict(), base=path, base_revision=revision)
    if foreign is not None:
        encoder.base_fingerprint = weights_fingerprint(backbone)
        with told_as_damage(foreign.folder):
            encoder.model.backbone = adapters.apply_lora(backbone, on_backbone(foreign, backbone, path))
            check_states(encoder.model.backbone)
    return encoder


def _of_saved(
    kind: type[SentenceEncoder],
    folder: Path,
    card: EncoderCard,
    reading: Reading,
    dtype: str,
    bits: int | None,
    device: torch.device,
) -> SentenceEncoder:
    try:
        location = locate(card.base or str(folder))
    except FileNotFoundError as error:
        hint = f" {folder / CARD_NAME} names it as the base; if it moved, change it there." if card.base else ""
        raise FileNotFoundError(f"{error}{hint}") from error
    backbone = load_backbone(location, dtype=dtype, revision=card.base_revision, bits=bits, device=device)
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    with told_as_damage(folder):
        check_vocabulary(backbone, tokenizer, folder)
        encoder = kind(
            backbone,
            tokenizer,
            prompt=reading.prompt or card.prompt,
            pooling=reading.pooling or card.pooling,
            max_length=reading.max_length or card.max_length,
            base=card.base or str(folder),
            base_revision=card.base_revision,
        )
    if card.base is not None:
        fingerprint = weights_fingerprint(backbone)
        # Rounding to float16 and then on to the fingerprint's bfloat16 is not rounding to bfloat16 at once.
        comparable = dtype == card.dtype or "float16" not in (dtype, card.dtype)
        if comparable and card.base_fingerprint not in (None, fingerprint):
            raise ArtifactError(
                f"{folder} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
                f"{fingerprint}. Put the original base there, or name the right one in {folder / CARD_NAME}."
            )
        encoder.base_fingerprint = fingerprint
    if card.dimensions is not None or card.layers is not None:
        try:
            encoder = encoder.truncated(dimensions=card.dimensions, layers=card.layers)
        except ValueError as error:
            raise ArtifactError(f"{folder / CARD_NAME} does not fit its weights: {error}") from error
    if card.base is not None:
        with told_as_damage(folder):
            encoder.model.backbone = adapters.load_lora(encoder.model.backbone, folder)
            check_states(encoder.model.backbone)
    return encoder


def check_savable(encoder: SentenceEncoder, folder: str | Path) -> None:
    """Raises what `save_encoder` would refuse, before the work that is to be saved is done."""
    target = Path(folder).expanduser()
    check_writable(target)
    if not adapters.is_adapted(encoder.model.backbone):
        if encoder.bits is not None:
            raise QuantisationError(
                f"this encoder is a base held in {encoder.bits} bits without an adapter, so there is nothing of its own to "
                "save. Add an adapter, or save the base as it is, loaded with bits=None."
            )
        return
    if encoder.base is None:
        raise ValueError("the adapter's base has no name. Construct the encoder with base=…, or from_pretrained.")
    base = Path(encoder.base)
    if base.is_absolute() and base.resolve().is_relative_to(target.resolve()):
        raise ValueError(f"{folder} holds the base of this adapter. Save the adapter in another directory.")


def save_encoder(encoder: SentenceEncoder, folder: str | Path, check: Callable[[Path], None] | None) -> None:
    """Writes the directory, whole or not at all. Arguments and errors are those of `save_pretrained`."""
    check_savable(encoder, folder)
    backbone: Any = encoder.model.backbone
    adapted = adapters.is_adapted(backbone)
    card = EncoderCard(
        prompt=encoder.prompt,
        pooling=encoder.pooling,
        max_length=encoder.max_length,
        dtype=str(encoder.dtype).removeprefix("torch."),
        base=encoder.base if adapted else None,
        base_revision=encoder.base_revision if adapted else None,
        base_fingerprint=encoder.base_fingerprint if adapted else None,
        bits=encoder.bits,
        dimensions=encoder.model.dimensions,
        layers=encoder.model.cut_to if adapted else None,
    )

    def fill(target: Path) -> None:
        # peft would ask the hub whether the vocabulary was resized; nothing here resizes it.
        backbone.save_pretrained(target, **({"save_embedding_layers": False} if adapted else {}))
        encoder.tokenizer.save_pretrained(target)
        (target / "README.md").unlink(missing_ok=True)  # peft's empty model card
        card.write(target)
        if check is not None:
            check(target)

    write_directory(Path(folder), fill)
