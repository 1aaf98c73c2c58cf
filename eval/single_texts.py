"""Open an encoder for tasks of single texts, which have one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from angle_llm.evaluate.encoding import open_encoder
from angle_llm.settings.commands import EvalSettings

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder


def open_for_single_texts(settings: EvalSettings) -> SentenceEncoder:
    """Open the encoder of an evaluation. Raises `ValueError` for an encoder with two prompts and no `--as`."""
    encoder = open_encoder(settings, settings.model)
    if settings.side is None and encoder.prompts.differ:
        raise ValueError(
            f"--as: expected query or document, because {settings.model} has {encoder.prompts} and these tasks have single "
            "texts."
        )
    return encoder
