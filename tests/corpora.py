"""Small corpora, and `embed_corpus` on them with the arguments of the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from angle_llm.data.corpus import Corpus
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import ShardOptions, VectorForm
from angle_llm.tools.embed import EmbedJob, embed_corpus

OPTIONS = ShardOptions(format="parquet", rows=4)
TEXTS = [f"A {who} {does}." for who in ("man", "dog", "cat", "child") for does in ("runs", "eats", "sleeps")] + ["End"]
"""13: three blocks of four, and one of one."""


def write_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def embed(
    encoder: SentenceEncoder,
    input: Path,
    folder: Path,
    options: ShardOptions = OPTIONS,
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
    options = ShardOptions("bare npy", options.rows, options.store_text, options.skip_bad) if target else options
    vectors = VectorForm(encoder.dimensions, **{"dim": encoder.dimensions, **form})
    return embed_corpus(EmbedJob(corpus, survey, encoder, "tiny", vectors, options, folder, target, rank, world_size))


def table(folder: Path) -> dict[str, list[Any]]:
    """The columns of all Parquet shards, in order."""
    index = json.loads((folder / "embeddings.json").read_text())
    names = [file["name"] for shard in index["parts"] for file in shard["files"] if file["name"].endswith(".parquet")]
    tables = [parquet.read_table(folder / name).to_pydict() for name in names]
    return {column: [value for one in tables for value in one[column]] for column in tables[0]}


def vectors(folder: Path) -> np.ndarray:
    return np.array(table(folder)["embedding"], dtype=np.float32)
