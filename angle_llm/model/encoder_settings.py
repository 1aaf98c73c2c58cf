"""Flags for opening an encoder, for all commands that embed texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from angle_llm.settings_io import Positive


@dataclass(frozen=True, kw_only=True)
class EncoderName:
    """Where an encoder is loaded from."""

    model: str
    """The encoder: a saved directory, a model folder, a hub id, a .gguf file, or package:NAME/path/inside."""


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How an encoder is loaded and reads texts."""

    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file, or `query NAME document NAME`. None: as saved with the model, or the default of its kind."""
    pooling: str | None = None
    """Pooling of token states to a vector: last, mean, cls, … None: as saved with the model, or the default of its kind."""
    max_length: Positive | None = None
    """Maximum tokens of a text, prompt included. None: as saved with the model, or the default."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. auto: of training for a saved encoder, as stored for a model."""
    bits: Literal["auto", 4, 8] | None = "auto"
    """Quantise the linear layers to 4 or 8 bits, which needs bitsandbytes. auto: as in training for a saved encoder, else
    not at all."""
    device: str | None = None
    """Device, such as cpu or cuda:0. None: the best available."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of `SentenceEncoder.from_pretrained` beside the path."""
        return {item.name: getattr(self, item.name) for item in fields(EncoderOptions)}
