"""Plot helpers of the report: select lines of the summary, and draw values with intervals in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY = "#010101", "#8a8f98"
"""Colours of text and of baselines. The page replaces INK by the text colour of its theme."""
COLOURS = BLUE, ORANGE, *_ = ("#3f83c8", "#e0803c", "#3b9f72", "#9273c4", "#cf5b6b")
mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "grid.color": GREY,
        "grid.alpha": 0.3,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "xaxis.labellocation": "right",
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "figure.constrained_layout.use": True,
    }
)

Drawn = tuple[Figure, str]
"""A figure and a sentence that describes the figure."""
SPEARMAN = "Spearman × 100"
DIFFERENCE = "difference in Spearman × 100"


def pick(
    data: pd.DataFrame, grid: str, rows: str = "", task: str = "", kind: str = "sts", metric: str = "spearman"
) -> pd.DataFrame:
    """Select lines of the summary by grid, rows, task, kind and metric.

    `rows` are names separated by spaces; lines are in their order. Empty: all rows.

    Raises:
        LookupError: if a row is missing.
    """
    found = data[(data.grid == grid) & (data.kind == kind) & (data.metric == metric)]
    found = found[found.task == task] if task else found
    names = rows.split()
    if names:
        found = found[found.row.isin(names)].sort_values("row", key=lambda s: s.map(names.index), kind="stable")
    if found.empty or not set(names) <= set(found.row):
        missing = sorted(set(names) - set(found.row)) or ["any row"]
        raise LookupError(f"grid {grid}: no {metric} {task} of {', '.join(missing)}")
    return found


def one(data: pd.DataFrame, grid: str, row: str, task: str, **more: Any) -> Any:
    """Return the line of the summary for a row and task; `more` are arguments of `pick`."""
    return next(pick(data, grid, row, task, **more).itertuples())


def axes(height: float, width: float = 5.4, columns: int = 1) -> tuple[Figure, Any]:
    """Make a figure of a size in inches, and return the figure and its axes."""
    fig = Figure(figsize=(width, height))
    return fig, fig.subplots(1, columns)


def dots(ax: Axes, found: pd.DataFrame, y: Sequence[float], colour: str, label: str | None = None) -> None:
    """Draw values at the heights `y`, with their intervals. A point is hollow if a trained row has a single seed."""
    for place, line in zip(y, found.itertuples(), strict=True):
        hollow = line.trained and line.seeds < 2
        ax.plot([line.low, line.high], [place, place], color=colour, lw=1.5)
        ax.plot(line.value, place, "o", ms=5, color=colour, mfc="none" if hollow else colour, label=label)
        label = None


def legend(ax: Axes, columns: int = 3) -> None:
    """Add a legend above the axes, where it covers nothing."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=8, columnspacing=1.2, borderpad=0.2)


def series(
    data: pd.DataFrame, tasks: dict[str, str], rows: dict[str, tuple[str, str]], xlabel: str, **where: Any
) -> Figure:
    """Draw the values of at most three rows of grids on several tasks: a line per task, a colour per row.

    `tasks` maps a task to its label, `rows` maps a label to grid and row. `where` are arguments of `pick`.
    """
    fig, ax = axes(0.36 * len(tasks) + 0.9)
    y = list(range(len(tasks)))[::-1]
    for index, ((label, (grid, row)), colour) in enumerate(zip(rows.items(), (GREY, ORANGE, BLUE), strict=False)):
        found = pd.concat([pick(data, grid, row, task, **where) for task in tasks])
        dots(ax, found, [place + 0.22 * (1 - index) for place in y], colour, label)
    ax.set_yticks(y, list(tasks.values()))
    ax.set_ylim(-0.6, len(tasks) - 0.4)
    ax.set_xlabel(xlabel)
    ax.grid(axis="x")
    legend(ax)
    return fig
