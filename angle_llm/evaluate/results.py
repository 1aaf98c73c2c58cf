"""Results as text and as JSON: Markdown tables that also read well in a terminal, one JSON form for every
evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from angle_llm.io import plain


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A padded Markdown table; the first `words` columns are left-aligned, the others right-aligned."""
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


def number(value: float | None) -> str:
    """Two decimals; a dash for None."""
    if value is None:
        return "–"
    return "nan" if math.isnan(value) else f"{value:.2f}"


def span(low: float, high: float) -> str:
    """An interval, such as 78.10–79.90."""
    return f"{low:.2f}–{high:.2f}"


def notes_list(notes: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {note}" for note in notes)


def mean_over(
    figures: Mapping[str, float], tasks: Sequence[str], published: Sequence[str], average: float
) -> float | None:
    """Mean of a published row over `tasks`: `average` for all published tasks, None if a figure is missing."""
    if set(tasks) == set(published):
        return average
    if not tasks or any(task not in figures for task in tasks):
        return None
    return sum(figures[task] for task in tasks) / len(tasks)


def results_json(
    model: str,
    metric: str,
    content: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Plain JSON values of an evaluation; NaN is null. `encoder` has the prompt, pooling and maximum length that were
    used."""
    values = {"model": model, "metric": metric, **content, "encoder": encoder or {}, "settings": settings or {}}
    return {key: plain(value) for key, value in values.items()}
