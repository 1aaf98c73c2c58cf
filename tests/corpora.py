"""Small corpora, and `embed_corpus` on them with the arguments of the command."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pyarrow import parquet

from angle_llm.data.corpus import Corpus
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.backbone import BackboneLocation
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.vectors import VectorForm
from angle_llm.settings.commands import EmbedSettings
from angle_llm.tools.embed import EmbedJob, embed_corpus


@dataclass(frozen=True)
class Options:
    """The flags of `embed` that change the shards."""

    format: Literal["parquet", "npy"] = "parquet"
    rows: int = 4
    store_text: bool = False
    skip_bad: bool = False


OPTIONS = Options()
TEXTS = [f"A {who} {does}." for who in ("man", "dog", "cat", "child") for does in ("runs", "eats", "sleeps")] + ["End"]
"""13: three blocks of four, and one of one."""


def write_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def embed(
    encoder: SentenceEncoder,
    input: Path,
    folder: Path,
    options: Options = OPTIONS,
    *,
    id_column: str | None = None,
    target: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    **form: Any,
) -> int:
    """Embed a corpus as the command does after it loads the encoder."""
    corpus = Corpus.open(input, id_column=id_column)
    survey = corpus.survey(skip_bad=options.skip_bad)
    settings = EmbedSettings(
        model="tiny",
        input=input,
        output=target or folder,
        format=options.format,
        shard_rows=options.rows,
        store_text=options.store_text,
        on_bad_row="skip" if options.skip_bad else "error",
    )
    source = ModelSource("tiny", BackboneLocation("tiny"))
    vectors = VectorForm(encoder.dimensions, **{"dim": encoder.dimensions, **form})
    return embed_corpus(EmbedJob(settings, corpus, survey, source, encoder, vectors, folder, rank, world_size))


def table(folder: Path) -> dict[str, list[Any]]:
    """The columns of all Parquet shards, in order."""
    index = json.loads((folder / "embeddings.json").read_text())
    names = [file["name"] for shard in index["parts"] for file in shard["files"] if file["name"].endswith(".parquet")]
    tables = [parquet.read_table(folder / name).to_pydict() for name in names]
    return {column: [value for one in tables for value in one[column]] for column in tables[0]}


def vectors(folder: Path) -> np.ndarray:
    return np.array(table(folder)["embedding"], dtype=np.float32)
