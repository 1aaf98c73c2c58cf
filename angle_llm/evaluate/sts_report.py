"""STS results as Markdown, CSV and JSON; cosines of all pairs; published scores."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from angle_llm.evaluate.bootstrap import Comparison, Difference, Interval
from angle_llm.evaluate.correlation import PairScores
from angle_llm.evaluate.results import markdown_table, mean_over, notes_list, number, results_json, span
from angle_llm.evaluate.sts_results import Correlations, StsResults, TaskResult
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS, StsTask

METRIC = "Spearman and Pearson correlation × 100 of cosine similarity; sub-tasks of a year concatenated"


class PublishedRow(NamedTuple):
    """A model's Spearman × 100 by task name (empty if only the average is known), and its average over all seven."""

    model: str
    spearman: dict[str, float]
    average: float

    def average_over(self, tasks: Sequence[str]) -> float | None:
        """Mean over `tasks`, None if one is missing; over all seven the average as published."""
        return mean_over(self.spearman, tasks, PUBLISHED_TASKS, self.average)


def _row(model: str, *scores: float, average: float) -> PublishedRow:
    return PublishedRow(model, dict(zip(PUBLISHED_TASKS, scores, strict=True)) if scores else {}, average)


PUBLISHED = (
    _row("AnglE-LLaMA2-13B", 79.33, 90.65, 86.89, 90.45, 87.32, 89.69, 81.32, average=86.52),
    _row("AnglE-LLaMA2-7B v2", 79.00, 90.56, 85.79, 89.43, 87.00, 88.97, 80.94, average=85.96),
    _row("AnglE-LLaMA2-7B v1", 78.68, 90.58, 85.49, 89.56, 86.91, 88.92, 81.18, average=85.90),
    _row("PromptEOL LLaMA-7B", average=85.70),
    _row("PromptEOL OPT-2.7B", average=85.62),
    _row("SimCSE-LLaMA2-7B", average=85.24),
    _row("PromptEOL OPT-1.3B", average=84.79),
    _row("AnglE-BERT-base", 75.09, 85.56, 80.66, 86.44, 82.47, 85.16, 81.23, average=82.37),
    _row("sup-SimCSE-BERT-base", average=81.57),
    _row("LLaMA2-7B untuned, prompted", 50.66, 73.32, 62.76, 67.00, 70.98, 63.28, 67.40, average=65.06),
)
"""Published Spearman × 100 over all pairs, on SentEval's text; SICK-R is the test split.

Sources: Li & Li, AnglE (arXiv 2309.12871) and the cards of its LLaMA adapters; Jiang et al. (2023), PromptEOL; Gao et
al. (2021), SimCSE. The evaluation code of AnglE and PromptEOL edits sentences only with a prompt (`--edits
published`)."""

VARIANT_MEANING = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}
EDITS_MEANING = {
    "published": "with the edits of PromptEOL and AnglE in evaluation with a prompt (a full stop is added if there is no "
    ".?\"', double quotes become single, a final ? becomes a full stop)",
}
INTERVAL = "95 % interval"
_NAME_WIDTH = 26


def markdown_report(
    results: StsResults,
    model: str,
    remarks: Sequence[str] = (),
    *,
    comparison: Comparison | None = None,
    other: str = "the other",
) -> str:
    """Tables (published rows, Spearman, Pearson, sub-tasks, differences to `other`) and notes, `remarks` first."""
    tables = [_published(results, model), _spearman(results), _pearson(results)]
    tables += [_subtasks(results)] if any(task.subtasks for task in results.tasks.values()) else []
    notes = [f"Model: {model}.", *remarks, *_notes(results)]
    if comparison:
        tables.append(_differences(comparison, results))
        notes += _comparison_notes(comparison, other)
    return "\n\n".join([*tables, notes_list(notes)]) + "\n"


def _published(results: StsResults, model: str) -> str:
    header = ["model", "text", *(task.label for task in results.tasks.values())]
    texts = " + ".join(dict.fromkeys(task.text for task in results.tasks.values()))
    name = model if len(model) <= _NAME_WIDTH else "…" + model[1 - _NAME_WIDTH :]  # the table has to fit a terminal
    own = [f"**{name}**", texts, *(number(task.spearman) for task in results.tasks.values())]
    if results.averaged:
        header.append("average")
        own.append(number(results.average))
    rows = [own]
    for row in PUBLISHED:
        average = row.average_over(results.averaged)
        if average is not None:
            scores = (row.spearman.get(name) for name in results.tasks)
            rows.append([row.model, "senteval", *map(number, scores), number(average)])
    return markdown_table(header, rows, words=2)


def _spearman(results: StsResults) -> str:
    rows = [
        [*_whole(task), number(task.spearman), _interval(task.interval), *_means(task, "spearman")]
        for task in results.tasks.values()
    ]
    if results.averaged:
        rows.append(["average", "", "", number(results.average), _interval(results.average_interval), "", ""])
    return markdown_table(["Spearman", "text", "pairs", "all", INTERVAL, "mean", "weighted mean"], rows, words=2)


def _pearson(results: StsResults) -> str:
    rows = [[*_whole(task), number(task.pearson), *_means(task, "pearson")] for task in results.tasks.values()]
    return markdown_table(["Pearson", "text", "pairs", "all", "mean", "weighted mean"], rows, words=2)


def _whole(task: TaskResult) -> list[str]:
    return [task.label, task.text, f"{task.pairs:,}"]


def _means(task: TaskResult, metric: str) -> list[str]:
    both = (task.mean_over_subtasks, task.weighted_mean_over_subtasks)
    return [number(None if mean is None else getattr(mean, metric)) for mean in both]


def _subtasks(results: StsResults) -> str:
    rows = [
        [f"{task.label} · {name}", f"{one.pairs:,}", number(one.spearman), _interval(one.interval), number(one.pearson)]
        for task in results.tasks.values()
        for name, one in task.subtasks.items()
    ]
    return markdown_table(["sub-task", "pairs", "Spearman", INTERVAL, "Pearson"], rows, words=1)


def _differences(comparison: Comparison, results: StsResults) -> str:
    def row(label: str, one: Difference) -> list[str]:
        scores = [number(one.spearman), number(one.other), f"{one.difference:+.2f}"]
        interval = f"{one.interval.low:+.2f} … {one.interval.high:+.2f}"
        return [label, f"{one.pairs:,}", *scores, interval, f"{one.p_value:.3g}"]

    rows = [row(results.tasks[name].label, one) for name, one in comparison.tasks.items()]
    if comparison.average:
        rows.append(row("average", comparison.average))
    header = ["compared", "pairs", "this model", "the other", "difference", INTERVAL, "p"]
    return markdown_table(header, rows, words=1)


def _notes(results: StsResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Correlation × 100 of cosine similarity with the gold scores. The first table has Spearman over all pairs."
    ]
    if any(task.subtasks for task in tasks):
        notes.append(
            "`all`: one correlation over the pairs of all sub-tasks, as in the published rows. `mean`, `weighted mean`: over "
            "the correlations of sub-tasks, weighted by pairs. Papers differ in which they report."
        )
    if any(task.resampled is not None for task in tasks):
        notes.append("Intervals: percentile bootstrap over pairs; they do not cover another training seed.")
    for variant, edits in dict.fromkeys((task.variant, task.edits) for task in tasks):
        also = f", {EDITS_MEANING.get(edits, edits)}" if edits else ""
        notes.append(f"Text `{variant}{', edited' if edits else ''}`: {VARIANT_MEANING.get(variant, variant)}{also}.")
    if results.averaged:
        labels = ", ".join(results.tasks[name].label for name in results.averaged)
        notes.append(f"`average` is over {labels}, in all rows.")
        notes.append("Published rows: SentEval's text (`senteval`), with the edits for prompted models.")
        other = [results.tasks[name].label for name in results.averaged if results.tasks[name].variant != "senteval"]
        if other:
            notes.append(f"Different text than the published rows, so not directly comparable: {', '.join(other)}.")
    for task in tasks:
        if task.official_pairs not in (None, task.pairs):
            notes.append(f"{task.label}: {task.pairs:,} pairs here, {task.official_pairs:,} in the published task.")
        parts = {task.label: task, **{f"{task.label}, {name}": one for name, one in task.subtasks.items()}}
        for label, one in parts.items():
            if one.undefined:
                notes.append(f"{label}: undefined correlation: {one.undefined}.")
            elif one.interval and math.isnan(one.interval.low):
                notes.append(f"{label}: no interval: the correlation is undefined in some resamples.")
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors:,} of {results.sentences:,} sentences have a zero vector (cosine 0).")
    return notes


def _comparison_notes(comparison: Comparison, other: str) -> list[str]:
    notes = [
        f"The other: {other}. Difference: this model minus the other, both on the same {comparison.resamples:,} bootstrap "
        "resamples; p: two-sided, from these resamples, not corrected for the number of rows."
    ]
    if comparison.left_out:
        notes.append(f"Not compared, evaluated for only one of the models: {', '.join(comparison.left_out)}.")
    return notes


def _interval(interval: Interval | None) -> str:
    return number(None) if interval is None else span(interval.low, interval.high)


def results_dict(
    results: StsResults,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """All results as JSON values; `pairs` has cosine and gold score of each pair, for `read_scores`."""
    average = {"tasks": results.averaged, "spearman": results.average, "interval": results.average_interval}
    content = {
        "variant": " + ".join(dict.fromkeys(task.variant for task in results.tasks.values())),
        "average": average,
        "tasks": {name: _task(task) for name, task in results.tasks.items()},
        "comparison": comparison,
        "sentences": results.sentences,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
        "pairs": {
            name: {"cosine": scores.cosine.tolist(), "gold": scores.gold.tolist()}
            for name, scores in results.scores.items()
        },
    }
    return results_json(model, METRIC, content, settings=settings, encoder=encoder)


def _task(task: TaskResult) -> dict[str, Any]:
    means = {name: getattr(task, name) for name in ("mean_over_subtasks", "weighted_mean_over_subtasks")}
    return {
        **{key: getattr(task, key) for key in ("name", "label", "variant", "edits", "source", "official_pairs")},
        **_correlations(task),
        **{name: None if mean is None else mean._asdict() for name, mean in means.items()},
        "subtasks": {name: _correlations(one) for name, one in task.subtasks.items()},
    }


def _correlations(one: Correlations) -> dict[str, Any]:
    interval = None if one.interval is None else asdict(one.interval)
    return {key: getattr(one, key) for key in ("pairs", "spearman", "pearson", "undefined")} | {"interval": interval}


class SavedScores(NamedTuple):
    """Name of a model, and cosines and gold scores of its pairs by task."""

    model: str
    scores: dict[str, PairScores]


def read_scores(path: str | Path) -> SavedScores:
    """Scores in a file written by `--json`. Raises `FileNotFoundError`, or `ValueError` for other or damaged files."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--against: no results file at {path}; expected a model, or a file written by --json.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores = {
            name: PairScores(*(np.asarray(pairs[side], dtype=np.float64) for side in ("cosine", "gold")))
            for name, pairs in content["pairs"].items()
        }
        for name, (cosine, gold) in scores.items():
            if cosine.ndim != 1 or cosine.shape != gold.shape or not np.isfinite([cosine, gold]).all():
                raise ValueError(f"task {name!r}: expected a finite cosine and gold score of each pair")
        return SavedScores(str(content["model"]), scores)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--against: {path}: expected a file written by --json, with `model` and `pairs` ({type(error).__name__}: "
            f"{error}). Evaluate that model again."
        ) from error


def scores_csv(results: StsResults, model: str) -> str:
    """One line per score: `all`, `mean` and `weighted mean` of each task, each `subtask`, and the `average`."""
    columns = ["model", "task", "subtask", "figure", "text", "pairs"]
    columns += ["spearman", "spearman_low", "spearman_high", "pearson", "undefined"]
    return csv_text(columns, [{"model": model, **line} for line in _score_lines(results)])


def _score_lines(results: StsResults) -> Iterator[dict[str, object]]:
    def cells(one: Correlations) -> dict[str, object]:
        return {"spearman": one.spearman, "pearson": one.pearson, "undefined": one.undefined} | _ends(one.interval)

    for task in results.tasks.values():
        of_task = {"task": task.name, "text": task.text, "pairs": task.pairs}
        yield of_task | {"figure": "all"} | cells(task)
        for kind, means in (("mean", task.mean_over_subtasks), ("weighted mean", task.weighted_mean_over_subtasks)):
            if means is not None:
                yield of_task | {"figure": kind} | means._asdict()
        for name, one in task.subtasks.items():
            yield of_task | {"figure": "subtask", "subtask": name, "pairs": one.pairs} | cells(one)
    if results.average is not None:
        average = {"task": " ".join(results.averaged), "figure": "average", "spearman": results.average}
        yield average | _ends(results.average_interval)


def _ends(interval: Interval | None) -> dict[str, object]:
    return {} if interval is None else {"spearman_low": interval.low, "spearman_high": interval.high}


def pair_lines(results: StsResults, tasks: Sequence[StsTask], with_text: bool) -> Iterator[dict[str, object]]:
    """Task, sub-task, index in the task (from 0), cosine and gold score of each pair, optionally its sentences."""
    for task in tasks:
        for index, (pair, cosine) in enumerate(zip(task.pairs, results.scores[task.name].cosine.tolist(), strict=True)):
            line = {"task": task.name, "subtask": pair.subtask, "index": index, "cosine": cosine, "gold": pair.score}
            yield line | {"sentence1": pair.sentence1, "sentence2": pair.sentence2} if with_text else line


def csv_text(columns: Sequence[str], lines: Sequence[Mapping[str, object]]) -> str:
    """A CSV table with a header line; missing cells are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
