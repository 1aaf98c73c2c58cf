"""STS results for programs: JSON that can be compared with later, figures as CSV, scores pair by pair."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from angle_llm.evaluate.comparison import Comparison
from angle_llm.evaluate.pairs import StsTask
from angle_llm.evaluate.sts import Figures, PairScores, StsResults, TaskResult
from angle_llm.io import plain


class SavedScores(NamedTuple):
    """What a results file says of a model: its name, and the scores of its pairs by task."""

    model: str
    scores: dict[str, PairScores]


def results_dict(
    results: StsResults,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """Everything measured as plain JSON values: NaN becomes null, and the reason stands in `undefined`.

    `settings` are those asked for, `encoder` what they came to be for this model (prompt, pooling, length).
    `variant` is the text the figures are on, the variants joined by " + " when tasks differ; each task names its own.
    `pairs` holds every cosine beside its gold score, for `read_scores` and so for a comparison with another model.
    """
    average = {"tasks": results.averaged, "spearman": results.average, "interval": results.average_interval}
    content = {
        "model": model,
        "variant": " + ".join(dict.fromkeys(task.variant for task in results.tasks.values())),
        "metric": "Spearman and Pearson correlation × 100 of cosine similarity; sub-tasks of a year concatenated",
        "average": average,
        "tasks": {name: _task(task) for name, task in results.tasks.items()},
        "comparison": comparison,
        "sentences": results.sentences,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
        "encoder": encoder or {},
        "settings": settings or {},
        "pairs": {
            name: {"cosine": scores.cosine.tolist(), "gold": scores.gold.tolist()}
            for name, scores in results.scores.items()
        },
    }
    return {key: plain(value) for key, value in content.items()}


def read_scores(path: str | Path) -> SavedScores:
    """The scores in a results file that `--json` wrote.

    Raises `FileNotFoundError`, or `ValueError` for a file that is something else or was cut.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no results file at {path}. Give a model, or a file that --json wrote.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores = {
            name: PairScores(*(np.asarray(pairs[side], dtype=np.float64) for side in ("cosine", "gold")))
            for name, pairs in content["pairs"].items()
        }
        saved = SavedScores(str(content["model"]), scores)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no results file with scores of pairs ({type(error).__name__}: {error}). Needed: a file that --json "
            "wrote, with `model` and `pairs`; measure that model again."
        ) from error
    for name, (cosine, gold) in scores.items():
        if (
            cosine.ndim != 1
            or cosine.shape != gold.shape
            or not (np.isfinite(cosine).all() and np.isfinite(gold).all())
        ):
            raise ValueError(f"{path}: the scores of {name!r} are not a finite cosine and gold score for each pair.")
    return saved


def figures_csv(results: StsResults, model: str) -> str:
    """One line per figure: `all`, `mean` and `weighted mean` of each task, each `subtask`, and the `average`."""
    columns = ["model", "task", "subtask", "figure", "text", "pairs"]
    columns += ["spearman", "spearman_low", "spearman_high", "pearson", "undefined"]
    return _csv(columns, ({"model": model, **line} for line in _figure_lines(results)))


def _figure_lines(results: StsResults) -> Iterator[dict[str, object]]:
    for task in results.tasks.values():
        of_task = {"task": task.name, "text": task.text, "pairs": task.pairs}
        yield of_task | {"figure": "all"} | _cells(task)
        for figure, means in (("mean", task.mean_over_subtasks), ("weighted mean", task.weighted_mean_over_subtasks)):
            if means is not None:
                yield of_task | {"figure": figure} | means._asdict()
        for name, figures in task.subtasks.items():
            yield of_task | {"figure": "subtask", "subtask": name, "pairs": figures.pairs} | _cells(figures)
    if results.average is not None:
        interval = results.average_interval
        ends = {} if interval is None else {"spearman_low": interval.low, "spearman_high": interval.high}
        yield {"task": " ".join(results.averaged), "figure": "average", "spearman": results.average} | ends


def _cells(figures: Figures) -> dict[str, object]:
    cells: dict[str, object] = {
        "spearman": figures.spearman,
        "pearson": figures.pearson,
        "undefined": figures.undefined,
    }
    if figures.interval is not None:
        cells |= {"spearman_low": figures.interval.low, "spearman_high": figures.interval.high}
    return cells


def pair_lines(results: StsResults, tasks: Sequence[StsTask], with_text: bool) -> Iterator[dict[str, object]]:
    """Task, sub-task, place in the task (from 0), cosine and gold score of every pair; the sentences where asked
    for."""
    for task in tasks:
        for index, (pair, cosine) in enumerate(zip(task.pairs, results.scores[task.name].cosine.tolist(), strict=True)):
            line = {"task": task.name, "subtask": pair.subtask, "index": index, "cosine": cosine, "gold": pair.score}
            yield line | {"sentence1": pair.sentence1, "sentence2": pair.sentence2} if with_text else line


def _csv(columns: Sequence[str], lines: Iterator[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _pairs_as_csv(lines: Iterator[dict[str, object]]) -> str:
    first = next(lines)
    return _csv(list(first), (line for part in ((first,), lines) for line in part))


def _pairs_as_jsonl(lines: Iterator[dict[str, object]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


PAIR_FORMATS: dict[str, Callable[[Iterator[dict[str, object]]], str]] = {
    ".csv": _pairs_as_csv,
    ".jsonl": _pairs_as_jsonl,
}
"""File ending → how `pair_lines` are written."""


def _task(task: TaskResult) -> dict[str, Any]:
    of_task = {key: getattr(task, key) for key in ("name", "label", "variant", "edits", "source", "official_pairs")}
    means = {
        "mean_over_subtasks": task.mean_over_subtasks,
        "weighted_mean_over_subtasks": task.weighted_mean_over_subtasks,
    }
    return {
        **of_task,
        **_figures(task),
        **{name: None if mean is None else mean._asdict() for name, mean in means.items()},
        "subtasks": {name: _figures(figures) for name, figures in task.subtasks.items()},
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "pairs": figures.pairs,
        "spearman": figures.spearman,
        "interval": None if figures.interval is None else asdict(figures.interval),
        "pearson": figures.pearson,
        "undefined": figures.undefined,
    }
