"""Retrieval results as Markdown, and the comparison of two models query by query."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from angle_llm.evaluate.bootstrap import MeanDifference, mean_difference
from angle_llm.evaluate.encoding import Used
from angle_llm.evaluate.results import report, short_name, table
from angle_llm.evaluate.retrieval_tasks import FLICKR30K

if TYPE_CHECKING:
    from angle_llm.evaluate.retrieval import RetrievalResults

METRIC = "exact retrieval by cosine similarity, × 100; ties go to the candidate that is not an answer"
PUBLISHED_STRICT = {"AnglE": 12.9, "SimCSE": 10.4, "SBERT": 5.2}
"""Strict accuracy × 100 on Flickr30k's test captions, from AnglE's paper (arXiv 2309.12871)."""


@dataclass(frozen=True)
class Compared:
    """A model of a comparison: by task, a hash of the task, and the values × 100 of each query by metric."""

    model: str
    used: Used
    digests: Mapping[str, str]
    values: Mapping[str, Mapping[str, tuple[float, ...]]]

    @classmethod
    def of(cls, model: str, used: Used, results: RetrievalResults) -> Compared:
        """Return the model with its results."""
        tasks = results.tasks.items()
        values = {name: {key: metric.values for key, metric in task.metrics.items()} for name, task in tasks}
        return cls(model, used, {name: task.digest for name, task in tasks}, values)


@dataclass(frozen=True)
class RetrievalComparison:
    """Differences of a model to the other, by task and metric, × 100. p-values are not corrected for their number."""

    other: str
    encoder: Used
    tasks: dict[str, dict[str, MeanDifference]]


def compare_figures(ours: Compared, theirs: Compared, *, resamples: int, seed: int) -> RetrievalComparison:
    """Return the differences of two models on all tasks of `ours`, both on the same resamples of the queries.

    Raises:
        ValueError: if the other was not evaluated on the same queries, candidates and grades of a task.
    """
    found: dict[str, dict[str, MeanDifference]] = {}
    for name, values in ours.values.items():
        if theirs.digests.get(name) != ours.digests[name] or theirs.values[name].keys() != values.keys():
            problem = f"other queries, candidates, grades or metrics of task {name!r}"
            if name not in theirs.digests:
                problem = f"{', '.join(theirs.digests)}, not on {name}"
            raise ValueError(
                f"--against: {theirs.model} was evaluated on {problem}. Evaluate both models on the same files with the same "
                "flags."
            )
        found[name] = {
            metric: mean_difference(own, theirs.values[name][metric], resamples=resamples, seed=seed, stream=name)
            for metric, own in values.items()
        }
    return RetrievalComparison(theirs.model, theirs.used, found)


def read_query_metrics(path: str | Path) -> Compared:
    """Return the model and its values of each query in a file written by `--json`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: for other or damaged files.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--against: no results file at {path}; expected a model, or a file written by --json.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tasks = content["tasks"].items()
        digests = {name: str(task["digest"]) for name, task in tasks}
        values = {
            name: {key: tuple(map(float, metric["values"])) for key, metric in task["metrics"].items()}
            for name, task in tasks
        }
        for name, metrics in values.items():
            queries = len(content["tasks"][name]["query_ids"])
            if any(len(each) != queries or not np.isfinite(each).all() for each in metrics.values()):
                raise ValueError(f"task {name!r}: expected a finite value of each query")
        return Compared(f"{content['model']} ({path})", Used(**content["encoder"]), digests, values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--against: {path}: expected a file written by `eval retrieval --json` ({type(error).__name__}: {error}). "
            "Evaluate that model again."
        ) from error


def retrieval_report(
    results: RetrievalResults, model: str, used: Used, comparison: RetrievalComparison | None = None
) -> str:
    """Return Markdown: a table for each task, with the prompt, pooling and maximum length of each model, and notes."""
    tables = []
    notes = [
        "Scores are × 100, of an exact search by cosine similarity; of candidates with equal cosines, answers come last. R@k: "
        "share of a query's answers among the first k hits. MRR: 1 / the place of the first answer. MAP@100: mean precision at "
        "the places of the answers. 95 %: interval by bootstrap over the queries.",
    ]
    if comparison is not None:
        notes.append(
            f"Compared with {comparison.other}. A positive difference: {model} is better. Interval and two-sided p are from the "
            "same resamples for both models, and not corrected for the number of metrics."
        )
        if comparison.encoder.max_length != used.max_length:
            notes.append(
                f"The models truncate texts at {used.max_length} and {comparison.encoder.max_length} tokens, which can change "
                "scores as much as training: set --max-length."
            )
    for task in results.tasks.values():
        header: list[str] = [task.label, short_name(model), "95 %"]
        rows: list[list[object]] = [[name, value, None] for name, value in used.columns().items()]
        rows += [[name, metric.value, metric.interval] for name, metric in task.metrics.items()]
        if comparison is not None:
            header += [short_name(comparison.other), "difference", "95 %", "p"]
            others: list[list[object]] = [[value, None, None, None] for value in comparison.encoder.columns().values()]
            for one in comparison.tasks[task.name].values():
                ends = f"{one.interval.low:+.2f} … {one.interval.high:+.2f}"
                others.append([one.other, f"{one.difference:+.2f}", ends, f"{one.p_value:.3g}"])
            rows = [[*row, *other] for row, other in zip(rows, others, strict=True)]
        tables.append(table(header, rows, words=1))
        notes.append(
            f"{task.label}: {task.queries:,} queries, {task.candidates:,} candidates, {task.answers:,} answers; "
            + (f"{task.skipped:,} queries are not compared with their own text or document; " if task.skipped else "")
            + f"searched in {task.search_seconds:.1f} s."
        )
        if "strict" in task.metrics:
            notes.append(
                "strict: share of queries whose R answers are the first R candidates; in top 5: share of queries whose answers "
                "are all in the first five."
            )
        if task.name == FLICKR30K:
            published = ", ".join(f"{name} {strict}" for name, strict in PUBLISHED_STRICT.items())
            notes.append(
                f"Published strict accuracy (AnglE's paper, arXiv 2309.12871): {published}. There the first caption of an image "
                "is the query, and the top 5 must be exactly its captions."
            )
    return report(model, tables, list(dict.fromkeys(notes)), results)
