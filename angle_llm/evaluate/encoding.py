"""Open an encoder for an evaluation and encode every distinct text once."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.results import results_json
from angle_llm.io import write_json

Encode: TypeAlias = Callable[[list[str]], NDArray[np.floating[Any]]]
"""Texts (N,) → rows (N, D), in the order given."""


class Encoder(Protocol):
    """An object with `encode`, such as `SentenceEncoder`."""

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> NDArray[np.floating[Any]]:
        """One row per text, in the order given."""
        ...


@dataclass(frozen=True)
class EncodedTexts:
    """Distinct texts in order of first appearance and their vectors: text t is row `row_of[t]` of `embeddings_ND`."""

    row_of: dict[str, int]
    embeddings_ND: NDArray[np.floating[Any]]
    seconds: float

    def rows(self, texts: Iterable[str]) -> NDArray[np.floating[Any]]:
        """The vectors (M, D) of the texts, in their order, repeats included."""
        return self.embeddings_ND[np.array([self.row_of[text] for text in texts], dtype=np.intp)]

    @property
    def dimensions(self) -> int:
        """D."""
        return int(self.embeddings_ND.shape[1])

    @property
    def zero_vectors(self) -> int:
        """Number of texts with a zero vector."""
        return int((~self.embeddings_ND.any(axis=1)).sum())


def encode_distinct(encode: Encode, texts: Iterable[str]) -> EncodedTexts:
    """Call `encode` once with the distinct texts in order of first appearance.

    Raises `ValueError` for no texts, and if `encode` does not return one finite row per text.
    """
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        raise ValueError("expected at least one text, got none.")
    started = time.perf_counter()
    embeddings_ND = np.asarray(encode(list(distinct)))
    seconds = time.perf_counter() - started
    _check(embeddings_ND, distinct)
    return EncodedTexts({text: row for row, text in enumerate(distinct)}, embeddings_ND, seconds)


def _check(embeddings_ND: NDArray[Any], texts: list[str]) -> None:
    if embeddings_ND.ndim != 2 or embeddings_ND.shape[0] != len(texts) or embeddings_ND.shape[1] == 0:
        raise ValueError(
            f"encode: expected one row per text, shape ({len(texts)}, D), got shape {embeddings_ND.shape}."
        )
    if not np.issubdtype(embeddings_ND.dtype, np.floating):
        raise ValueError(f"encode: expected floating-point rows, got {embeddings_ND.dtype}.")
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(texts)} vectors hold NaN or infinity, the first for {texts[bad[0]]!r}. Possible "
            "causes: overflow in float16, a damaged adapter, a diverged run."
        )


class MissingLibraryError(RuntimeError):
    """A library that is needed is not installed."""


class OpenedEncoder(Encoder, Protocol):
    """An encoder with its prompt, pooling and maximum length, which are reported with results."""

    @property
    def prompt(self) -> Any:
        """A dataclass with a `name`."""

    @property
    def pooling(self) -> str:
        """Name of the pooling."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens."""


class OpenEncoder(Protocol):
    """Opens an encoder, such as `SentenceEncoder.from_pretrained`."""

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
        """The encoder at `path_or_id`; None: as saved."""
        ...


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The encoder of an evaluation."""

    model: str
    """The encoder: a saved directory, a hub id, a .gguf file, or package:NAME/path/inside."""

    revision: str | None = None
    """Commit, tag or branch of a hub id."""

    prompt: str | None = None
    """Prompt name or YAML file. None: the one saved with the model."""

    pooling: str | None = None
    """Pooling: last, mean, cls, … None: the one saved with the model."""

    max_length: int | None = None
    """Maximum tokens of a text, prompt included. None: the one saved with the model."""

    micro_batch_tokens: int | None = None
    """Maximum tokens of one forward pass. Changes memory and speed, not results."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights."""

    device: str | None = None
    """Device, such as cpu or cuda:0. None: the best available."""

    json: Path | None = None
    """Also write model, settings and results to this JSON file."""

    def __post_init__(self) -> None:
        for flag, value in (("--max-length", self.max_length), ("--micro-batch-tokens", self.micro_batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{flag}: expected 1 or more, got {value}.")


def open_from(settings: EncoderSettings, open_encoder: OpenEncoder) -> OpenedEncoder:
    """Open the encoder of the settings."""
    return open_encoder(
        settings.model,
        prompt=settings.prompt,
        pooling=settings.pooling,
        max_length=settings.max_length,
        dtype=settings.dtype,
        device=settings.device,
        revision=settings.revision,
    )


def encode_with(encoder: Encoder, micro_batch_tokens: int | None, show_progress: bool = True) -> Encode:
    """A function from texts to rows."""

    def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
        return encoder.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress)

    return encode


def used_by(encoder: OpenedEncoder) -> dict[str, Any]:
    """Prompt, pooling and maximum length that are used, for JSON."""
    return {"prompt": asdict(encoder.prompt), "pooling": encoder.pooling, "max_length": encoder.max_length}


def remark_on(encoder: OpenedEncoder) -> str:
    """The same as text."""
    return f"Prompt {encoder.prompt.name}, pooling {encoder.pooling}, at most {encoder.max_length} tokens."


def make_folders(*files: Path | None) -> None:
    """Create the folders of output files, so that a wrong path fails before the model is opened."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


Results = TypeVar("Results")


def evaluation_main(
    settings: EncoderSettings,
    open_encoder: OpenEncoder,
    evaluate: Callable[[Any], Results],
    report: Callable[[Results, str, Sequence[str]], str],
    metric: str,
    content: Callable[[Results], Mapping[str, Any]],
) -> Results:
    """Open the encoder, evaluate, print the report, write the JSON file.

    Args:
        settings: Encoder and JSON file; written to the file.
        open_encoder: Opens the encoder.
        evaluate: The encoder → results.
        report: Results, model name and remarks → Markdown.
        metric: What the numbers are, for the file.
        content: Results → JSON values.
    """
    make_folders(settings.json)
    encoder = open_from(settings, open_encoder)
    results = evaluate(encoder)
    print(report(results, settings.model, [remark_on(encoder)]), end="")
    if settings.json is not None:
        used = used_by(encoder)
        values = results_json(settings.model, metric, content(results), settings=asdict(settings), encoder=used)
        write_json(settings.json, values)
    return results


def check_library(package: str, what: str, extra: str) -> None:
    """Raise `MissingLibraryError` if `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingLibraryError(f"{what} need {package}: pip install 'angle_llm[{extra}]'.")
