"""How a row stands to its reference: what is sure, what is not shown, and what too few seeds leave open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from angle_llm.report.document import Block, Cell, Paragraph
from angle_llm.report.material import MaterialGrid
from angle_llm.report.measured import RowDifference, Span
from angle_llm.report.numbers import PLAIN, SEEDS_FOR_AN_INTERVAL, excludes_zero, number, signed, span
from angle_llm.report.sts_figures import figure_of

Verdict = Literal["surely higher", "surely lower", "not told apart", "too few seeds to tell"]
VERDICTS: tuple[Verdict, ...] = ("surely higher", "surely lower", "not told apart", "too few seeds to tell")
SURE = (
    "the intervals of the difference over the pairs of every seed, and over seeds, exclude 0, of three seeds at least if "
    "anything was trained; of a seed whose pairs' scores were not kept, its own interval is not asked"
)


def verdict(row: RowDifference) -> Verdict:
    """One seed has shown what the next one took back; only what nobody trained needs none."""
    trained = row.per_seed.keys() != {"none"}
    spans = [seed.interval for seed in row.per_seed.values()]
    if trained and len(spans) < SEEDS_FOR_AN_INTERVAL:
        return "too few seeds to tell"
    # Of a seed whose pairs' scores were not kept, the seeds alone have to show it.
    known = [one for one in spans if one is not None] + ([row.interval] if trained else [])
    if not known or not all(map(excludes_zero, known)) or row.mean_difference is None:
        return "not told apart"
    return "surely higher" if row.mean_difference > 0 else "surely lower"


def shown_interval(row: RowDifference) -> Span | None:
    """Over pairs of one seed, over seeds of three and more; two may happen to agree."""
    if len(row.per_seed) == 1:
        return next(iter(row.per_seed.values())).interval
    return row.interval if len(row.per_seed) >= SEEDS_FOR_AN_INTERVAL else None


def difference_cell(row: RowDifference | None) -> Cell:
    """A row's difference, below it the interval."""
    return PLAIN if row is None else Cell(signed(row.mean_difference), span(shown_interval(row)))


def findings(grids: Sequence[MaterialGrid]) -> tuple[Block, ...]:
    """A paragraph for each reference row: how the rows that are compared with it stand to it. Nothing without comparisons."""
    told: list[Block] = []
    for grid in grids:
        if grid.comparisons is None:
            continue
        by_reference: dict[str, dict[str, RowDifference]] = {}
        for name, row in grid.comparisons.rows.items():
            by_reference.setdefault(row.reference or grid.comparisons.reference, {})[name] = row
        for reference, rows in by_reference.items():
            by_verdict: dict[Verdict, list[str]] = {}
            for name, row in rows.items():
                by_verdict.setdefault(verdict(row), []).append(_stands(grid, name, row))
            lists = [
                f"{kind[0].upper()}{kind[1:]}: {'; '.join(by_verdict[kind])}."
                for kind in VERDICTS
                if kind in by_verdict
            ]
            told.append(
                Paragraph(
                    f"{grid.title} (`{grid.name}`). Beside {_reference(grid, reference, rows)}: {' '.join(lists)}"
                )
            )
    if not told:
        return ()
    lead = (
        "Rows beside the row they are compared with: Spearman × 100 of the row minus that of its reference, mean over seeds, "
        f"and its 95 % interval (over seeds of three and more, over pairs of one). Sure: {SURE}. Each row is taken by itself: of "
        "twenty, one at the edge is no wonder."
    )
    return (Paragraph(lead), *told)


def _stands(grid: MaterialGrid, name: str, row: RowDifference) -> str:
    known, ends = grid.row(name), span(shown_interval(row))
    words = f"{known.label if known is not None else name} {signed(row.mean_difference)}"
    return f"{words} ({ends})" if ends else words


def _reference(grid: MaterialGrid, name: str, rows: dict[str, RowDifference]) -> str:
    """The reference row and its figure, if it is one for all rows."""
    row = grid.row(name)
    if row is None:
        return name
    figures = {difference.figure for difference in rows.values()}
    figure = figure_of(row, next(iter(figures))) if len(figures) == 1 else None
    if figure is None or figure.mean is None:
        return f"“{row.label}”"
    spread = "" if figure.deviation is None else f" ± {number(figure.deviation)}"
    return f"“{row.label}”, {number(figure.mean)}{spread}"
