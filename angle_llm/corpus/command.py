"""The commands `angle-llm embed` and `angle-llm search`: their settings, and what is printed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from angle_llm.config import SettingsError
from angle_llm.data.corpus import Corpus
from angle_llm.data.readers import STANDARD_INPUT

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

_OF_FILES = (
    ".txt",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".parquet",
    ".gz",
    ".npz",
    ".pt",
    ".bin",
    ".index",
    ".safetensors",
)
"""Endings that a folder hardly has: whoever gives one expects a file."""
_TEXT_SHOWN = 200


@dataclass(frozen=True)
class EmbedSettings:
    """What `angle-llm embed` reads and writes.

    Under torchrun or accelerate launch the work is shared by all processes. A command that was killed goes on where it was
    when it is given again.
    """

    model: str
    """The encoder: a saved directory, a hub id, a .gguf file, or package:NAME/path/inside."""
    input: Path
    """UTF-8 text, one text a line; or .jsonl, .csv, .tsv (these also .gz) or .parquet; a folder of such files; `-` reads
    text from standard input."""
    output: Path
    """A folder for shards and their index; or one .npy file, a row for each text."""
    column: str | None = None
    """The column of a table that holds the text. None: `text`, `sentence`, or the only one."""
    id_column: str | None = None
    """A column of a table that is kept beside the vectors, as text."""
    prompt: str | None = None
    """Prompt name or YAML file. None: the one saved with the model."""
    pooling: str | None = None
    """How token states become a vector. None: the one saved with the model."""
    normalize: bool = False
    """Scale every row to length 1."""
    dim: int | None = None
    """Keep so many dimensions, the first ones; cut before rows are scaled. None: all."""
    precision: Literal["float32", "float16", "int8", "binary"] = "float32"
    """int8: with a scale for each row, its largest magnitude / 127. binary: the signs, packed eight to a byte."""
    complex: bool = False
    """Store the two halves of a vector as real and imaginary parts: two columns, or complex64 in .npy."""
    format: Literal["parquet", "npy"] = "parquet"
    """How vectors lie in a folder: a column of the Parquet shards, or a .npy file beside each."""
    shard_rows: int = 8192
    """Rows in a shard; so many are in memory at a time, and at most so many are embedded again after a kill."""
    store_text: bool = False
    """Keep the texts beside the vectors."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a text that is empty or not UTF-8 does. skip: leave it out, and list it beside the
    shard, or the .npy file, in a .skipped.jsonl file."""

    def __post_init__(self) -> None:
        for option, number in (("--dim", self.dim), ("--shard-rows", self.shard_rows)):
            if number is not None and number < 1:
                raise SettingsError(f"{option} must be at least 1, got {number}.")
        if self.complex and self.dim is not None:
            raise SettingsError("--dim would cut a vector in whose halves --complex sees pairs. Choose one.")
        if self.complex and self.precision not in ("float32", "float16"):
            raise SettingsError(f"--complex needs --precision float32 or float16, got {self.precision}.")
        if self.complex and self.precision == "float16" and (self.one_file or self.format == "npy"):
            raise SettingsError("a .npy file holds no complex numbers of float16. Use float32, or --format parquet.")
        if self.one_file:
            for option, given in (
                ("--id-column", self.id_column is not None),
                ("--store-text", self.store_text),
                ("--precision int8, which has a scale for each row,", self.precision == "int8"),
            ):
                if given:
                    raise SettingsError(f"{option} needs more than one .npy file. Name a folder as --output.")

    @property
    def one_file(self) -> bool:
        """Whether the output is one .npy file."""
        return self.output.suffix == ".npy"


@dataclass(frozen=True)
class SearchSettings:
    """What `angle-llm search` looks for."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """A folder that `angle-llm embed` wrote."""
    queries: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="QUERY [QUERY …]")]
    """Texts to look for."""
    top: int = 5
    """How many rows to show for each."""
    model: str | None = None
    """The encoder, if it has moved. None: the one the folder was made by."""
    prompt: str | None = None
    """Prompt name or YAML file for the queries. None: the one the folder was made with."""

    def __post_init__(self) -> None:
        if not self.queries or not all(query.strip() for query in self.queries):
            raise SettingsError("search needs a text to look for, in quotes if it has spaces.")
        if self.top < 1:
            raise SettingsError(f"--top must be at least 1, got {self.top}.")


def embed_main(settings: EmbedSettings) -> None:
    """Embeds a corpus, or goes on with it, and says what lies where.

    Raises:
        SettingsError, ShardsError, DataError: for what cannot be read or written; before the model is loaded, where it can.
    """
    import torch

    from angle_llm.corpus.embed import Keeping, embed_corpus
    from angle_llm.corpus.shards import Worker, check_free
    from angle_llm.corpus.vectors import VectorForm
    from angle_llm.model.encoder import SentenceEncoder

    worker = Worker(*(int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))))
    if worker.count > 1 and str(settings.input) == STANDARD_INPUT:
        raise SettingsError("--input - is for one process. Give several a file that each of them can read.")
    output = settings.output.expanduser()
    folder = output.with_name(output.name + ".parts") if settings.one_file else output
    _check_output(output, settings.input)
    check_free(folder)
    corpus = Corpus.open(settings.input, settings.column, settings.id_column)
    if corpus.source.ignored and worker.is_main:
        names = ", ".join(corpus.source.ignored[:5]) + (", …" if len(corpus.source.ignored) > 5 else "")
        print(f"not read, for their endings are not known: {names}", file=sys.stderr)
    survey = corpus.survey(skip_bad=settings.on_bad_row == "skip")

    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if worker.count > 1 and torch.cuda.is_available() else None
    encoder = SentenceEncoder.from_pretrained(
        settings.model, prompt=settings.prompt, pooling=settings.pooling, device=device
    )
    _check_dimensions(settings, encoder)
    form = VectorForm(encoder.dimensions, settings.dim, settings.normalize, settings.precision, settings.complex)
    rows = embed_corpus(
        corpus,
        survey,
        encoder,
        settings.model,
        form,
        Keeping(
            format="bare npy" if settings.one_file else settings.format,
            shard_rows=settings.shard_rows,
            store_text=settings.store_text,
            skip_bad=settings.on_bad_row == "skip",
        ),
        folder,
        target=output if settings.one_file else None,
        worker=worker,
    )
    if worker.is_main:
        left_out = survey.rows - rows
        told = f"; {left_out} bad rows were left out: see *.skipped.jsonl there" if left_out else ""
        print(f"{rows} rows of {form.kept} dimensions in {settings.output}{told}")


def search_main(settings: SearchSettings) -> None:
    """Prints the nearest rows of a corpus for each query.

    Raises:
        ShardsError: if the folder is not finished or damaged, or made by another model.
    """
    from angle_llm.corpus.embed import fingerprint
    from angle_llm.corpus.finished import read_index
    from angle_llm.corpus.search import search, texts_of_source
    from angle_llm.corpus.shards import ShardsError
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.prompts import PromptTemplate

    folder = settings.out.expanduser()
    index = read_index(folder)
    made_by = index["model"]
    encoder = SentenceEncoder.from_pretrained(
        settings.model or made_by["name"],
        prompt=settings.prompt or PromptTemplate.from_dict(made_by["prompt"], where=str(folder)),
        pooling=made_by["pooling"],
        max_length=made_by["max_length"],
        bits=made_by["bits"],
    )
    if (weights := fingerprint(encoder)) != made_by["weights"]:
        raise ShardsError(
            f"{folder} was made by {made_by['name']} with weights {made_by['weights']}, and these are {weights}. Vectors of "
            "different models cannot be compared: name the right one with --model, or embed again."
        )
    found = search(folder, index, encoder.encode(settings.queries), settings.top)
    texts = texts_of_source(index, {hit.row for hits in found for hit in hits if hit.text is None})
    for query, hits in zip(settings.queries, found, strict=True):
        print(f"\n{query}\n  {'cosine':>7}  {'id' if any(hit.id is not None for hit in hits) else 'row'}  text")
        for hit in hits:
            text = hit.text or texts.get(hit.row) or "(the text is not stored, and its file is gone or changed)"
            line = " ".join(text.split())
            shown = line if len(line) <= _TEXT_SHOWN else f"{line[:_TEXT_SHOWN]}…"
            print(f"  {hit.score:7.4f}  {hit.row if hit.id is None else hit.id}  {shown}")
    print(
        f"\nThis read all {index['rows']} vectors. For many queries, give the shards to an index that does not: FAISS, "
        "hnswlib, LanceDB, Qdrant, Milvus, pgvector …; all take float32 rows with ids.",
        file=sys.stderr,
    )


def _check_output(path: Path, input: Path) -> None:
    """Refuses a place that could not be written; asked before the model loads, not after."""
    if path.suffix in _OF_FILES:
        raise SettingsError(f"--output must end in .npy, or name a folder; got {path}.")
    if path.suffix == ".npy" and path.is_dir():
        raise SettingsError(f"--output names the file to write, and {path} is a folder. Name a file in it.")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise SettingsError(f"--output {path} needs a folder to lie in, and {nearest} is a file. Choose another place.")
    if not os.access(path if path.is_dir() else nearest, os.W_OK | os.X_OK):
        raise SettingsError(f"--output {path} needs a folder you may write in; {nearest} is not. Choose another place.")
    if input.is_dir() and path.resolve().is_relative_to(input.resolve()):
        raise SettingsError(
            f"--output {path} lies in --input {input}, and would be read as part of it. Choose another place."
        )


def _check_dimensions(settings: EmbedSettings, encoder: SentenceEncoder) -> None:
    if settings.dim is not None and settings.dim > encoder.dimensions:
        raise SettingsError(
            f"--dim {settings.dim} is more than the {encoder.dimensions} dimensions of {settings.model}."
        )
    if settings.complex and encoder.dimensions % 2:
        raise SettingsError(f"--complex needs an even number of dimensions; {settings.model} has {encoder.dimensions}.")
