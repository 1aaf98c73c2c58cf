"""Figures as text: Markdown tables that also read well in a terminal, and plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
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


def number(value: float | None) -> str:
    """Two decimals; a dash for what is not there."""
    if value is None:
        return "–"
    return "nan" if math.isnan(value) else f"{value:.2f}"


def span(low: float, high: float) -> str:
    """An interval, such as 78.10–79.90."""
    return f"{low:.2f}–{high:.2f}"
