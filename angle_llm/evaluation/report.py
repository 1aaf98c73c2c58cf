"""STS results for people (a Markdown table that also reads well in a terminal) and for programs (JSON)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angle_llm.evaluation.published import PUBLISHED
from angle_llm.evaluation.sts import Figures, StsResults

VARIANT_MEANING = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}


def markdown_report(results: StsResults, model: str, remarks: Sequence[str] = ()) -> str:
    """The comparison table, the figures of every task and sub-task, and notes on how to read them, `remarks` first."""
    notes = "\n".join(f"- {note}" for note in (*remarks, *_notes(results)))
    return "\n\n".join((_comparison(results, model), _details(results), notes)) + "\n"


def results_dict(
    results: StsResults,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything measured as plain JSON values: NaN becomes null, and the reason stands in `undefined`.

    `settings` are those asked for, `encoder` what they came to be for this model (prompt, pooling, length).
    `variant` is the text the figures are on, the variants joined by " + " when tasks differ; each task names its own.
    """
    content = {
        "model": model,
        "variant": _variants(results),
        "metric": "Spearman and Pearson correlation × 100 of cosine similarity; sub-tasks of a year concatenated",
        "average": {"tasks": list(results.averaged), "spearman": results.average},
        "tasks": {name: asdict(task) for name, task in results.tasks.items()},
        "sentences": results.sentences,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
        "encoder": dict(encoder or {}),
        "settings": dict(settings or {}),
    }
    return {key: _plain(value) for key, value in content.items()}


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` whole or not at all: into a temporary file beside it, then renamed over it.

    Raises `ValueError` when `content` holds NaN or infinity, which JSON cannot say.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _comparison(results: StsResults, model: str) -> str:
    averaged = results.averaged
    header = ["model", "text", *(task.label for task in results.tasks.values())]
    own = [f"**{model}**", _variants(results), *(_number(task.spearman) for task in results.tasks.values())]
    if averaged:
        header.append("avg")
        own.append(_number(results.average))
    rows = [own]
    for row in PUBLISHED:
        average = row.average_over(averaged)
        if average is not None:
            figures = (row.spearman.get(name) for name in results.tasks)
            rows.append([row.model, "senteval", *map(_number, figures), _number(average)])
    return _table(header, rows, words=2)


def _details(results: StsResults) -> str:
    def row(label: str, variant: str, figures: Figures) -> list[str]:
        return [label, variant, f"{figures.pairs:,}", _number(figures.spearman), _number(figures.pearson)]

    rows = []
    for task in results.tasks.values():
        rows.append(row(task.label, task.variant, task))
        rows += [row(f"· {name}", task.variant, figures) for name, figures in task.subtasks.items()]
    return _table(["task", "text", "pairs", "Spearman", "Pearson"], rows, words=2)


def _notes(results: StsResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Correlation × 100 of cosine similarity with the gold scores; the first table is Spearman over whole tasks."
    ]
    notes += [f"Text `{variant}`: {VARIANT_MEANING[variant]}." for variant in dict.fromkeys(t.variant for t in tasks)]
    if results.averaged:
        labels = ", ".join(results.tasks[name].label for name in results.averaged)
        notes.append(f"`avg` is over {labels}, for this model and for the published rows alike.")
        notes.append("Published rows are on SentEval's text (`senteval`).")
        other = [results.tasks[name].label for name in results.averaged if results.tasks[name].variant != "senteval"]
        if other:
            notes.append(f"Not the same text as the published rows: {', '.join(other)}. Compare with that in mind.")
    for task in tasks:
        if task.official_pairs not in (None, task.pairs):
            notes.append(f"{task.label}: {task.pairs:,} pairs here, {task.official_pairs:,} in the published task.")
        named = {task.label: task, **{f"{task.label}, {name}": figures for name, figures in task.subtasks.items()}}
        notes += [f"{label}: no correlation: {f.undefined}." for label, f in named.items() if f.undefined]
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors:,} of {results.sentences:,} sentences have the zero vector (cosine 0).")
    return notes


def _variants(results: StsResults) -> str:
    return " + ".join(dict.fromkeys(task.variant for task in results.tasks.values()))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "nan" if math.isnan(value) else f"{value:.2f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A padded Markdown table; the first `words` columns are words (left), the others numbers (right)."""
    safe = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in safe)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < words else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(safe[0]), line(rule), *(line(row) for row in safe[1:])])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
