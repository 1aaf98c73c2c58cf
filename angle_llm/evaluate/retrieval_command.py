"""The retrieval command: settings, what happens between them and the printed table, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from angle_llm.evaluate.opening import EncoderSettings, OpenEncoder, encode_with, open_from, remark_on, used_by
from angle_llm.evaluate.resampling import RESAMPLES
from angle_llm.evaluate.retrieval import RetrievalResults, evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import FLICKR30K, RetrievalTask, read_flickr30k, read_groups, read_judged
from angle_llm.evaluate.tables import markdown_table, number, span
from angle_llm.io import plain, write_json

PUBLISHED_STRICT = {"AnglE": 12.9, "SimCSE": 10.4, "SBERT": 5.2}
"""Strict accuracy × 100 on Flickr30k's test captions, from AnglE's paper (arXiv 2309.12871)."""


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings(EncoderSettings):
    """Exact retrieval by cosine similarity: Flickr30k's captions as in AnglE's paper, groups of texts, judged queries."""

    data_dir: Path | None = None
    """Directory with flickr30k/test_2016.jsonl.gz; that task is then one of those measured."""

    groups: tuple[Path, ...] = ()
    """Files with a list of texts in each row: the first text asks for the others, among all texts of the file."""

    column: str | None = None
    """The column of the lists. None: captions, texts or set, whichever is there."""

    judged: tuple[Path, ...] = ()
    """Folders in BEIR's layout: queries.jsonl, corpus.jsonl, qrels/test.tsv."""

    resamples: int = RESAMPLES
    """Bootstrap resamples of the queries behind each interval."""

    seed: int = 0
    """Seed of the resamples."""


def retrieval_main(settings: RetrievalSettings, open_encoder: OpenEncoder) -> RetrievalResults:
    """Read the tasks, open the encoder, evaluate, print the report and write the JSON file where one is asked for.

    Data and output are checked before the model is opened, so that a typing mistake costs no waiting.
    """
    tasks = select_retrieval_tasks(settings)
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
    encoder = open_from(settings, open_encoder)
    encode = encode_with(encoder, settings.micro_batch_tokens)
    results = evaluate_retrieval(encode, tasks, resamples=settings.resamples, seed=settings.seed)
    print(retrieval_report(results, settings.model, [remark_on(encoder)]), end="")
    if settings.json is not None:
        content = retrieval_dict(results, settings.model, settings=asdict(settings), encoder=used_by(encoder))
        write_json(settings.json, content)
    return results


def select_retrieval_tasks(settings: RetrievalSettings) -> list[RetrievalTask]:
    """Every task the settings name. Raises `ValueError` when they name none."""
    tasks = [] if settings.data_dir is None else [read_flickr30k(settings.data_dir)]
    tasks += [read_groups(path, settings.column) for path in settings.groups]
    tasks += [read_judged(folder) for folder in settings.judged]
    if not tasks:
        raise ValueError("nothing to search: give --data-dir (Flickr30k), --groups FILE, or --judged FOLDER.")
    return tasks


def retrieval_report(results: RetrievalResults, model: str, remarks: Sequence[str] = ()) -> str:
    """A table for each task, and notes on how to read them, `remarks` first."""
    parts = []
    for task in results.tasks.values():
        header = [task.label, *task.figures]
        rows = [
            [f"**{model}**", *(number(figure.value) for figure in task.figures.values())],
            ["95 %", *(span(figure.interval.low, figure.interval.high) for figure in task.figures.values())],
        ]
        if task.name == FLICKR30K:
            rest = ["–"] * (len(task.figures) - 1)
            rows += [[name, number(strict), *rest] for name, strict in PUBLISHED_STRICT.items()]
        parts.append(markdown_table(header, rows, words=1))
    notes = "\n".join(f"- {note}" for note in (*remarks, *_notes(results)))
    return "\n\n".join((*parts, notes)) + "\n"


def retrieval_dict(
    results: RetrievalResults,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything measured as plain JSON values, the ranks of each query's answers included."""
    content = {
        "model": model,
        "metric": "exact retrieval by cosine similarity, × 100; ties go to the candidate that is no answer",
        "tasks": {name: asdict(task) for name, task in results.tasks.items()},
        "texts": results.texts,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
        "encoder": dict(encoder or {}),
        "settings": dict(settings or {}),
    }
    return {key: plain(value) for key, value in content.items()}


def _notes(results: RetrievalResults) -> list[str]:
    notes = [
        "Exact search by cosine similarity, figures × 100; a tie goes to the candidate that is no answer. strict: the first "
        "R candidates are exactly the query's R answers; in top 5: all of them are among the first five.",
        "95 %: bootstrap over the queries.",
    ]
    for task in results.tasks.values():
        notes.append(
            f"{task.label}: {task.queries:,} queries, {task.candidates:,} candidates (a query is none of its own), "
            f"{task.answers:,} answers; searched in {task.search_seconds:.1f} s."
        )
        if task.name == FLICKR30K:
            notes.append(
                "Published: strict accuracy of AnglE's paper (arXiv 2309.12871), where the first caption of an image asks for "
                "its captions and the top 5 must be exactly they."
            )
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors} of {results.texts} texts have the zero vector.")
    notes.append(
        f"{results.texts:,} distinct texts, {results.dimensions} dimensions, encoded in {results.encode_seconds:.1f} s."
    )
    return notes
