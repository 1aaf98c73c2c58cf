"""Common steps of all evaluations: open the encoder, encode each distinct text once, print and write the results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from angle_llm.data.keys import printable
from angle_llm.io import plain, write_json
from angle_llm.prompts import SIDES, InstructedText, Side, split_instructions, usable_instructions
from angle_llm.settings.commands import EvalSettings
from angle_llm.settings.parsing import SettingsError

if TYPE_CHECKING:
    from angle_llm.data.sources import Source
    from angle_llm.model.encoder import SentenceEncoder

Rows: TypeAlias = NDArray[np.floating[Any]]

Encode: TypeAlias = Callable[..., Rows]
"""A function from N texts to their embeddings (N, D), in the same order.

If texts have instructions, the argument `instruction` is their list, None for a text without one, as in
`SentenceEncoder.encode`."""

RESAMPLES = 1000
"""Default number of bootstrap resamples. The ends of an interval then vary between draws by about 2 % of its length."""


def open_encoder(settings: EvalSettings, model: str) -> SentenceEncoder:
    """Open the encoder `model` with the flags of an evaluation.

    The path of the JSON file is checked first, and its folder is created.

    Raises:
        SettingsError: if the JSON file cannot be written.
    """
    from angle_llm.model.encoder import SentenceEncoder

    if settings.json is not None:
        path = settings.json.expanduser()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise SettingsError(
                f"--json {settings.json}: expected the path of a file, in a folder that can be written."
            )
    encoder = SentenceEncoder.from_pretrained(model, **settings.options())
    return encoder if settings.side is None else encoder.for_side(settings.side)


def check_names(names: Sequence[str]) -> None:
    """Raise `ValueError` if the list of task names is empty, or two names are equal."""
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected tasks with unique names, got {', '.join(names) or 'none'}.")


def unique_names(names: Sequence[str], sources: Sequence[Source | None], reserved: Sequence[str] = ()) -> list[str]:
    """Make task names unique: equal names get their folders as prefixes, such as stsb/test and sick/test.

    `sources` has the source of each task, None for a task without a file. A file with a name in `reserved` gets its folder
    too. Lone surrogates of file names that are not UTF-8 are escaped, because results with them cannot be stored.

    Raises:
        SettingsError: if two tasks have equal names in folders with equal names.
    """
    unique = [
        name if source is None or [*names, *reserved].count(name) == 1 else f"{source.folder.name}/{name}"
        for name, source in zip(names, sources, strict=True)
    ]
    if repeated := {name for name in unique if unique.count(name) > 1}:
        raise SettingsError(
            f"expected tasks with unique names, got {', '.join(sorted(repeated))} more than once. Rename a file or folder."
        )
    return list(map(printable, unique))


@dataclass(frozen=True)
class EncodedTexts:
    """Embeddings (N, D) of the distinct texts of all tasks, and the row number of each text.

    `row_of` maps queries to rows and documents to rows, by side; the mappings are equal if one function encodes both.
    `seconds` is the encoding time.
    """

    row_of: dict[Side, dict[InstructedText, int]]
    embeddings_ND: Rows
    seconds: float

    def rows(self, texts: Iterable[InstructedText], side: Side = "query") -> Rows:
        """Return the embeddings (M, D) of M texts in the given order; texts can repeat.

        `side` is whether the texts are queries or documents.
        """
        return self.embeddings_ND[[self.row_of[side][text] for text in texts]]

    def facts(self) -> dict[str, Any]:
        """Return the numbers of texts, dimensions and zero vectors and the encoding time, as arguments of `Results`."""
        return {
            "texts": len(self.embeddings_ND),
            "dimensions": self.embeddings_ND.shape[1],
            "zero_vectors": int((~self.embeddings_ND.any(axis=1)).sum()),
            "encode_seconds": self.seconds,
        }


def encode_sides(
    encode: Encode,
    encode_document: Encode | None,
    queries: Iterable[InstructedText],
    documents: Iterable[InstructedText],
) -> EncodedTexts:
    """Encode the distinct queries with `encode` and the distinct documents with `encode_document`.

    Without `encode_document`, `encode` is called once with queries and documents.

    Raises:
        ValueError: if a function does not return one finite floating-point row for each text.
    """
    if encode_document is None:
        return encode_distinct(encode, (*queries, *documents))
    query, document = encode_distinct(encode, queries), encode_distinct(encode_document, documents)
    rows_ND = np.concatenate([query.embeddings_ND, document.embeddings_ND])
    document_rows = {text: len(query.embeddings_ND) + row for text, row in document.row_of["document"].items()}
    row_of: dict[Side, dict[InstructedText, int]] = {"query": query.row_of["query"], "document": document_rows}
    return EncodedTexts(row_of, rows_ND, query.seconds + document.seconds)


def encode_distinct(encode: Encode, texts: Iterable[InstructedText]) -> EncodedTexts:
    """Encode the distinct texts with one call of `encode`, in order of first appearance.

    Blank texts get zero vectors, and come last.

    Raises:
        ValueError: if `encode` does not return one finite floating-point row for each text.
    """
    distinct = list(dict.fromkeys(texts))
    blank = {key for key, text in zip(distinct, split_instructions(distinct)[0], strict=True) if not text.strip()}
    distinct.sort(key=blank.__contains__)  # blank texts last, otherwise in order
    encoded, instructions = split_instructions(distinct[: len(distinct) - len(blank)])
    started = time.perf_counter()
    embeddings_ND = np.asarray(encode(encoded, instruction=instructions) if any(instructions) else encode(encoded))
    seconds = time.perf_counter() - started
    is_matrix = embeddings_ND.ndim == 2 and len(embeddings_ND) == len(encoded) and embeddings_ND.shape[1] > 0
    if not is_matrix or not np.issubdtype(embeddings_ND.dtype, np.floating):
        raise ValueError(
            f"encode: expected floating-point rows, one per text, shape ({len(encoded)}, D), got "
            f"{embeddings_ND.dtype} of shape {embeddings_ND.shape}."
        )
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(encoded)} vectors contain NaN or infinity, the first for {encoded[bad[0]]!r}. Possible causes: "
            "overflow in float16, a damaged adapter, a diverged run."
        )
    if blank:
        embeddings_ND = np.pad(embeddings_ND, ((0, len(blank)), (0, 0)))
    row_of = {text: row for row, text in enumerate(distinct)}
    return EncodedTexts(dict.fromkeys(SIDES, row_of), embeddings_ND, seconds)


Evaluated = TypeVar("Evaluated")


@dataclass(frozen=True)
class EncoderFacts:
    """Prompt, pooling and maximum length of an evaluated encoder, for reports and JSON files.

    `prompt` contains the values of the prompt template, or the templates for queries and documents if they differ.
    """

    prompt: dict[str, Any]
    pooling: str
    max_length: int
    weights: int
    """Number of weights."""

    @classmethod
    def of(cls, encoder: Any) -> EncoderFacts:
        """Create the facts (prompt, pooling, maximum length and size) of an encoder."""
        from angle_llm.model.layers.lora import count_parameters

        prompt = encoder.prompts if encoder.side is None else encoder.prompt
        return cls(prompt.to_dict(), encoder.pooling, encoder.max_length, count_parameters(encoder.model)[1])

    @property
    def prompt_name(self) -> str:
        """Name of the prompt, or `QUERY / DOCUMENT` if queries and documents have different prompts."""
        names = [self.prompt["name"]] if "name" in self.prompt else [self.prompt[side]["name"] for side in SIDES]
        return " / ".join(names)

    def columns(self) -> dict[str, object]:
        """Return the prompt name, pooling and maximum length of the encoder, by the label of a table row."""
        return {"prompt": self.prompt_name, "pooling": self.pooling, "tokens": self.max_length}

    def __str__(self) -> str:
        return f"Prompt {self.prompt_name}, pooling {self.pooling}, at most {self.max_length} tokens."


def encode_usable(
    encoder: SentenceEncoder, texts: Sequence[str], instructions: Sequence[str | None] = (), **options: Any
) -> Rows:
    """Return the embeddings of N texts, (N, D): `encoder.encode`, but with zero vectors for texts without a token.

    These texts are blank, or have only characters that the tokenizer drops, such as a zero-width space. `instructions`
    is empty, or has the instruction of each text.
    """
    from angle_llm.model.vectors import untokenizable

    # Only texts without letters and digits are tokenized here: nearly all others have tokens.
    usable = [
        index
        for index, text in enumerate(texts)
        if any(map(str.isalnum, text)) or (text.strip() and not untokenizable(encoder, text))
    ]
    if any(instructions):
        options["instruction"] = usable_instructions(encoder.prompt, [instructions[index] for index in usable])
    rows_ND: Rows
    if len(usable) == len(texts):
        rows_ND = encoder.encode(texts, **options)
        return rows_ND
    rows_ND = np.zeros((len(texts), encoder.dimensions), dtype=np.float32)
    if usable:
        rows_ND[usable] = encoder.encode([texts[index] for index in usable], **options)
    return rows_ND


def encode_functions(
    encoder: SentenceEncoder, micro_batch_tokens: int | None = None, show_progress: bool = True
) -> tuple[Encode, Encode | None]:
    """Return two functions, which encode queries and documents; the second is None if one function encodes all texts.

    One function encodes all texts if queries and documents have the same prompt, or if the encoder is set to queries
    only or documents only (`encoder.side`). `micro_batch_tokens` is the maximum number of tokens in a micro-batch.
    """

    def function_of(chosen: SentenceEncoder) -> Encode:
        def function(texts: list[str], instruction: Sequence[str | None] = ()) -> Any:
            options: Any = {"micro_batch_tokens": micro_batch_tokens, "show_progress": show_progress}
            return encode_usable(chosen, texts, instruction, **options)

        return function

    if encoder.side is not None or not encoder.prompts.differ:
        return function_of(encoder), None
    return function_of(encoder.for_side("query")), function_of(encoder.for_side("document"))


def evaluate_model(
    settings: EvalSettings, model: str, evaluate: Callable[..., Evaluated], tasks: Sequence[Any], **options: Any
) -> tuple[Evaluated, EncoderFacts]:
    """Open the encoder `model`; return the result of `evaluate` on tasks, and the facts of the encoder."""
    encoder = open_encoder(settings, model)
    encode, encode_document = encode_functions(encoder)
    return evaluate(encode, tasks, encode_document=encode_document, **options), EncoderFacts.of(encoder)


def write_results(
    settings: EvalSettings, metric: str, report: str, content: Mapping[str, Any], encoder: EncoderFacts
) -> None:
    """Write the results of an evaluation to the JSON file of `--json`, if it is set, and print the report.

    The file has the model, metric, `content` (the results), encoder and settings. NaN and infinity become null.
    """
    try:
        if settings.json is not None:
            head = {"model": settings.model, "metric": metric}
            facts = {"encoder": asdict(encoder), "settings": asdict(settings)}
            write_json(settings.json.expanduser(), plain({**head, **content, **facts}))
    finally:
        print(report, end="")
