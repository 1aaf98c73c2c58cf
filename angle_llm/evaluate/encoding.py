"""Open an encoder for an evaluation, encode every distinct text once, print and write the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import numpy as np
import tyro
from numpy.typing import NDArray

from angle_llm.io import plain, write_json
from angle_llm.model.encoder_settings import EncoderName, EncoderOptions
from angle_llm.prompts import SIDES, Side
from angle_llm.settings_io import NonNegative, Positive, SettingsError

Found = TypeVar("Found")

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

Rows: TypeAlias = NDArray[np.floating[Any]]
Encode: TypeAlias = Callable[[list[str]], Rows]
"""Texts (N,) → rows (N, D), in the order given."""

RESAMPLES = 1000
"""Default number of resamples: the ends of an interval vary between seeds by about 2 % of its length."""

OpenEncoder: TypeAlias = Callable[..., Any]
"""`SentenceEncoder.from_pretrained`, or a function that is called like it."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings(EncoderOptions, EncoderName):
    """The encoder of an evaluation, and a file for the results."""

    side: Annotated[Side | None, tyro.conf.arg(name="as")] = None
    """Encode all texts as queries, or all as documents (in YAML `side`). None: each with the prompt of its side; a task of
    single texts needs it if there are two prompts."""

    micro_batch_tokens: Positive | None = None
    """Maximum tokens of one forward pass. Changes memory and speed, not results."""

    json: Path | None = None
    """Also write model, settings and results to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class ComparedSettings(EvalSettings):
    """Intervals, and a second encoder."""

    against: str | None = None
    """Compare with another model, pair by pair or query by query: differences with 95 % interval and p-value. A model,
    opened with the same flags (prompt, pooling, …), or a .json file written by --json."""

    resamples: NonNegative = RESAMPLES
    """Bootstrap resamples of the pairs or queries for each 95 % interval. 0: no intervals."""

    seed: NonNegative = 0
    """Seed of the resamples. Changes intervals slightly, scores not at all."""

    def __post_init__(self) -> None:
        if self.against is not None and not self.resamples:
            raise SettingsError("--against needs --resamples for intervals and p-values, got 0.")


@dataclass(frozen=True)
class EncodedTexts:
    """Distinct texts and their vectors: text t is row `row_of[t]` of `embeddings_ND`, as a document `document_row_of[t]`.
    With one encoding for both sides, the two are equal."""

    row_of: dict[str, int]
    document_row_of: dict[str, int]
    embeddings_ND: Rows
    seconds: float

    def index(self, texts: Iterable[str], side: Side = "query") -> NDArray[np.intp]:
        """Return the rows (M,) of the texts, in their order, repeats included."""
        row_of = self.row_of if side == "query" else self.document_row_of
        return np.array([row_of[text] for text in texts], dtype=np.intp)

    def rows(self, texts: Iterable[str], side: Side = "query") -> Rows:
        """Return the vectors (M, D) of the texts."""
        return self.embeddings_ND[self.index(texts, side)]

    def facts(self) -> dict[str, Any]:
        """Return the numbers of texts, dimensions and zero vectors, and the time, as fields of `Results`."""
        return {
            "texts": len(self.embeddings_ND),
            "dimensions": self.embeddings_ND.shape[1],
            "zero_vectors": int((~self.embeddings_ND.any(axis=1)).sum()),
            "encode_seconds": self.seconds,
        }


def encode_sides(
    encode: Encode, encode_document: Encode | None, queries: Iterable[str], documents: Iterable[str]
) -> EncodedTexts:
    """Encode the distinct texts of both sides; without `encode_document` in one call of `encode`, queries first."""
    if encode_document is None:
        return encode_distinct(encode, (*queries, *documents))
    one, other = encode_distinct(encode, queries), encode_distinct(encode_document, documents)
    rows_ND = np.concatenate([one.embeddings_ND, other.embeddings_ND])
    after = {text: len(one.embeddings_ND) + row for text, row in other.row_of.items()}
    return EncodedTexts(one.row_of, after, rows_ND, one.seconds + other.seconds)


def encode_distinct(encode: Encode, texts: Iterable[str]) -> EncodedTexts:
    """Call `encode` once with the distinct texts in order of first appearance. A blank text has a zero vector.

    Raises:
        ValueError: for no texts, and if `encode` does not return one finite row per text.
    """
    everything = list(dict.fromkeys(texts))
    distinct = [text for text in everything if text.strip()]
    if not distinct:
        raise ValueError("expected at least one text, got none.")
    started = time.perf_counter()
    embeddings_ND = np.asarray(encode(list(distinct)))
    seconds = time.perf_counter() - started
    if (
        embeddings_ND.ndim != 2
        or len(embeddings_ND) != len(distinct)
        or embeddings_ND.shape[1] == 0
        or not np.issubdtype(embeddings_ND.dtype, np.floating)
    ):
        raise ValueError(
            f"encode: expected floating-point rows, one per text, shape ({len(distinct)}, D), got "
            f"{embeddings_ND.dtype} of shape {embeddings_ND.shape}."
        )
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(distinct)} vectors hold NaN or infinity, the first for {distinct[bad[0]]!r}. Possible "
            "causes: overflow in float16, a damaged adapter, a diverged run."
        )
    if blank := [text for text in everything if not text.strip()]:
        embeddings_ND = np.pad(embeddings_ND, ((0, len(blank)), (0, 0)))
    row_of = {text: row for row, text in enumerate([*distinct, *blank])}
    return EncodedTexts(row_of, row_of, embeddings_ND, seconds)


@dataclass(frozen=True)
class Used:
    """Prompt, pooling and maximum length of an evaluated encoder.

    `prompt` holds the values of the template, or of both templates by side.
    """

    prompt: dict[str, Any]
    pooling: str
    max_length: int

    @classmethod
    def of(cls, encoder: Any) -> Used:
        """Return those of an encoder."""
        prompt = encoder.prompts if encoder.side is None else encoder.prompt
        return cls(prompt.to_dict(), encoder.pooling, encoder.max_length)

    @property
    def prompt_name(self) -> str:
        """Name of the prompt, or both names: that of queries / that of documents."""
        names = [self.prompt["name"]] if "name" in self.prompt else [self.prompt[side]["name"] for side in SIDES]
        return " / ".join(names)

    def columns(self) -> dict[str, object]:
        """Return prompt, pooling and maximum length by name, for a table."""
        return {"prompt": self.prompt_name, "pooling": self.pooling, "tokens": self.max_length}

    def __str__(self) -> str:
        return f"Prompt {self.prompt_name}, pooling {self.pooling}, at most {self.max_length} tokens."


def check_names(names: Sequence[str]) -> None:
    """Raise `ValueError` unless there are tasks and their names are unique."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected tasks with unique names, got {', '.join(names) or 'none'}.")


def encode_with(
    encoder: SentenceEncoder, micro_batch_tokens: int | None, show_progress: bool = True
) -> tuple[Encode, Encode | None]:
    """Return functions from texts to rows: of queries, and of documents if they have another prompt, else None. An encoder
    with a chosen side reads all texts as that side."""

    def made(one: SentenceEncoder) -> Encode:
        return lambda texts: one.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=show_progress)

    if encoder.side is not None or not encoder.prompts.differ:
        return made(encoder), None
    return made(encoder.for_side("query")), made(encoder.for_side("document"))


def evaluated(
    settings: EvalSettings,
    open_encoder: OpenEncoder,
    evaluate: Callable[[Any, Encode, Encode | None], Found],
    *,
    single_texts: bool = False,
) -> tuple[Found, Used]:
    """Open the encoder of the settings and call `evaluate` with it and its two functions of `encode_with`; the encoder is
    released on return.

    The folder of the JSON file is created first, so that a wrong path fails before the model is opened.

    Raises:
        ValueError: for tasks of `single_texts` with an encoder that has two prompts.
    """
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
    encoder = open_encoder(settings.model, **settings.options())
    if settings.side is not None:
        encoder = encoder.for_side(settings.side)
    elif single_texts and encoder.prompts.differ:
        raise ValueError(
            f"--as: expected query or document, because {settings.model} has {encoder.prompts} and these tasks have single "
            "texts."
        )
    return evaluate(encoder, *encode_with(encoder, settings.micro_batch_tokens)), Used.of(encoder)


def finish(settings: EvalSettings, metric: str, report: str, content: Mapping[str, Any], used: Used) -> None:
    """Print the report; write model, metric, content, encoder and settings as JSON, with null for NaN."""
    print(report, end="")
    if settings.json is not None:
        head = {"model": settings.model, "metric": metric}
        write_json(settings.json, plain({**head, **content, "encoder": asdict(used), "settings": asdict(settings)}))
