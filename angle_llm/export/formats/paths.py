"""Paths of an export: the saved encoder that is read, and the folder that is written."""

from __future__ import annotations

from pathlib import Path

from angle_llm.export.merge import check_target
from angle_llm.model.source.checks import ArtifactError, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate


def check_paths(run: str | Path, out: str | Path) -> tuple[Path, Path, EncoderCard]:
    """Return the folder of a saved encoder, the folder to write, and the card of the encoder.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`.
        ArtifactError: if `out` has files, or would overwrite the encoder or its base.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(f"{source} is not a saved encoder. Give the model folder of a run, or a merged model.")
    if target.is_dir() and any(target.iterdir()):
        raise ArtifactError(f"OUT {target} has files. Name a new folder.")
    card = EncoderCard.read(source)
    check_target(source, locate(card.base or str(source)), target)
    return source, target, card
