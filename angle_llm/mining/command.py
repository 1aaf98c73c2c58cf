"""`angle-llm data mine`: from settings to triples, and what is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angle_llm.data.corpus import Corpus
from angle_llm.data.formats import DataError
from angle_llm.data.readers import BadRow
from angle_llm.data.sources import load_examples
from angle_llm.io import progress_bar
from angle_llm.mining.job import FORMAT_VERSION, MiningError, Output
from angle_llm.mining.pairs import Material, gather
from angle_llm.mining.report import Account, shown
from angle_llm.mining.search import INDEXES
from angle_llm.mining.selection import Miner
from angle_llm.mining.settings import MineSettings
from angle_llm.mining.vectors import described, vectors_of
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.vectors import Array

_CHOICES = (
    "positive_above", "ranks", "margin", "relative_margin", "max_score", "min_score", "same_cluster", "negatives", "sampling",
    "seed", "short", "index", "shard_rows",
)  # fmt: skip
"""Settings that decide which triples come out; where things lie and how many are held at a time do not, but for
`shard_rows`: texts that are embedded together decide a vector's last digits."""
_NAMED = (
    "pairs", "format", "columns", "score_range", "where", "limit", "shuffle_seed", "corpus", "column", "model", "judge",
)  # fmt: skip
"""Settings that name what is mined from; what they stand for decides, by its content."""


def mine_main(settings: MineSettings) -> None:
    """Mines, or goes on with it, and prints what came of it.

    Raises:
        DataError: for pairs or a corpus that cannot be used; before a model is loaded.
        MiningError: for an output of other settings, and a window that is larger than the candidates.
        MissingIndexError: for `--index faiss` without faiss.
    """
    loaded = load_examples(settings.source)
    print(loaded.report.summary())
    corpus = None if settings.corpus is None else corpus_texts(settings.corpus, settings.column)
    material = gather(loaded.examples, corpus, settings.positive_above)
    check_window(settings, material)
    print(
        f"{len(material.pairs):,} positive pairs ({material.repeated:,} repeated and {material.judged:,} scored lower were left "
        f"out), {len(material.candidates_C):,} candidates, {len(material.texts):,} texts; the largest cluster has "
        f"{material.largest_cluster():,}",
        flush=True,
    )
    print(shown(mined(settings, material)))
    print(f"\n{settings.out}")


def mined(settings: MineSettings, material: Material) -> dict[str, Any]:
    """Writes the triples and their report, which it returns; reads it, if all is there already."""
    encoder = SentenceEncoder.from_pretrained(
        settings.model,
        prompt=settings.prompt,
        pooling=settings.pooling,
        max_length=settings.max_length,
        dtype=settings.dtype,
    )
    judge = None if settings.judge is None else SentenceEncoder.from_pretrained(settings.judge)
    output = Output(settings.out.expanduser(), _job(settings, material, encoder, judge))
    if (report := output.begin()) is not None:
        print(f"{settings.out} is there already, of the same pairs, encoder and settings", file=sys.stderr)
        return report

    folder = settings.vectors.expanduser() if settings.vectors is not None else output.folder

    def vectors(of: SentenceEncoder, name: str) -> Array:
        return vectors_of(material.texts, of, name, folder, settings.shard_rows, material.whose)

    vectors_TD = vectors(encoder, settings.model)
    miner = Miner(
        material,
        settings,
        vectors_TD,
        INDEXES[settings.index](vectors_TD, material.candidates_C, settings.block_candidates),
        None if judge is None else vectors(judge, str(settings.judge)),
    )
    account = Account(len(material.pairs), settings.negatives)
    parts = output.parts(miner.parts, settings.block_pairs, miner.part)
    named = {name: str(value) if isinstance(value := getattr(settings, name), Path) else value for name in _NAMED}
    with progress_bar("mine", miner.parts, "part") as bar:
        counted = (part for part in parts if bar.update() or True)
        return output.finish(account.lines(counted), lambda: {"named": named} | account.report())


def check_window(settings: MineSettings, material: Material) -> None:
    """Refuses ranks beyond the candidates.

    Raises:
        MiningError: if there are fewer candidates than ranks.
    """
    first, last = settings.ranks
    if (needed := last or first + settings.negatives - 1) > (there := len(material.candidates_C)):
        raise MiningError(
            f"--ranks {first} {last} needs at least {needed:,} candidates, and there are {there:,}. Lower the ranks, or give a "
            "larger --corpus."
        )


def corpus_texts(path: Path, column: str | None) -> Iterator[str]:
    """The texts of a corpus, row by row.

    Raises:
        DataError, SettingsError: for a file that cannot be read, and a row without a text.
    """
    corpus = Corpus.open(path, column)
    for row in corpus:
        if isinstance(row, BadRow):
            raise DataError(f"{row.place}: {row.reason}. Fix the row, or remove it")
        yield row.text


def _job(
    settings: MineSettings, material: Material, encoder: SentenceEncoder, judge: SentenceEncoder | None
) -> dict[str, Any]:
    values = asdict(settings)
    return {
        "format_version": FORMAT_VERSION,
        "material": {
            "sha256": material.digest(),
            "pairs": len(material.pairs),
            "repeated": material.repeated,
            "scored_lower": material.judged,
            "candidates": len(material.candidates_C),
            "texts": len(material.texts),
        },
        "model": described(encoder),
        "judge": None if judge is None else described(judge),
        "settings": {name: list(values[name]) if name == "ranks" else values[name] for name in _CHOICES},
    }
