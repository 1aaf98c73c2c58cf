"""What the commands that measure an encoder share: the settings that open it, and how it is then asked."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.encoding import Encode, Encoder


class MissingLibraryError(RuntimeError):
    """A measurement needs a library that is not installed; the message says which."""


class OpenedEncoder(Encoder, Protocol):
    """An encoder that knows how it words, pools and cuts; a figure is told together with that."""

    @property
    def prompt(self) -> Any:
        """A dataclass with a `name`."""

    @property
    def pooling(self) -> str:
        """Name of the pooling."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest input."""


class OpenEncoder(Protocol):
    """What opens it, such as `SentenceEncoder.from_pretrained`."""

    def __call__(
        self,
        path_or_id: str,
        /,
        *,
        prompt: str | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
    ) -> OpenedEncoder:
        """The encoder at `path_or_id`; None means as it was saved."""
        ...


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Which encoder, and how it words, pools and cuts."""

    model: str
    """The encoder: a saved directory, a hub id, a .gguf file, or package:NAME/path/inside."""

    revision: str | None = None
    """Commit, tag or branch of a hub id."""

    prompt: str | None = None
    """Prompt name or YAML file. None: the one saved with the model."""

    pooling: str | None = None
    """How token states become a vector: last, mean, cls, … None: the one saved with the model."""

    max_length: int | None = None
    """Longest input in tokens, prompt included. None: the one saved with the model."""

    micro_batch_tokens: int | None = None
    """Tokens computed at once, padding included: memory and speed, not figures."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of the weights."""

    device: str | None = None
    """Where to compute, such as cpu or cuda:0. None: the best there is."""

    json: Path | None = None
    """Also write model, settings and figures to this file."""

    def __post_init__(self) -> None:
        for flag, value in (("--max-length", self.max_length), ("--micro-batch-tokens", self.micro_batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{flag} must be at least 1 token, found {value}.")


def open_from(settings: EncoderSettings, open_encoder: OpenEncoder) -> OpenedEncoder:
    """The encoder the settings name, opened as they say."""
    return open_encoder(
        settings.model,
        prompt=settings.prompt,
        pooling=settings.pooling,
        max_length=settings.max_length,
        dtype=settings.dtype,
        device=settings.device,
        revision=settings.revision,
    )


def encode_with(encoder: OpenedEncoder, micro_batch_tokens: int | None) -> Encode:
    """The plain function from texts to rows that measurements take; a bar shows how far it is, in a log a line a minute."""

    def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
        return encoder.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=True)

    return encode


def used_by(encoder: OpenedEncoder) -> dict[str, Any]:
    """What the settings came to be for this encoder; a figure is told together with that."""
    return {"prompt": asdict(encoder.prompt), "pooling": encoder.pooling, "max_length": encoder.max_length}


def remark_on(encoder: OpenedEncoder) -> str:
    """The same in a sentence."""
    return f"Prompt {encoder.prompt.name}, pooling {encoder.pooling}, at most {encoder.max_length} tokens."


def check_library(package: str, what: str, extra: str) -> None:
    """Raises `MissingLibraryError` where `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingLibraryError(f"{what} need {package}. Install it: pip install 'angle_llm[{extra}]'.")
