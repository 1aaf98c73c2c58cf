"""How a row stands to its reference: what is sure, what is not shown, and what too few seeds leave open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from angle_llm.evaluate.tasks import PUBLISHED_TASKS
from angle_llm.report.document import Cell, Group, Table
from angle_llm.report.material import MaterialGrid
from angle_llm.report.measured import RowDifference, Span
from angle_llm.report.numbers import PLAIN, SEEDS_FOR_AN_INTERVAL, excludes_zero, number, signed, span
from angle_llm.report.sts_figures import mean_of, tasks_of

Verdict = Literal[
    "surely higher",
    "surely lower",
    "over seeds, pairs not kept",
    "over seeds alone",
    "not told apart",
    "too few seeds",
    "pairs not kept",
    "undefined",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
SURE = (
    "the intervals of the difference over the pairs of every seed, and over seeds, exclude 0, of three seeds at least if "
    "anything was trained"
)


def verdict(grid: MaterialGrid, name: str, row: RowDifference) -> Verdict:
    """What a row's difference shows. One seed has shown what the next one took back; only what nobody trained needs none."""
    beside = row.reference or (grid.comparisons.reference if grid.comparisons is not None else None)
    trained = any(one is not None and one.learnt for one in (grid.row(name), grid.row(beside)))
    over_pairs = [seed.interval for seed in row.per_seed.values()]
    if row.mean_difference is None:
        return "undefined"
    if not over_pairs or (trained and len(over_pairs) < SEEDS_FOR_AN_INTERVAL):
        return "too few seeds"
    if trained and not excludes_zero(row.interval):
        return "not told apart"
    if not all(excludes_zero(interval) for interval in over_pairs if interval is not None):
        return "over seeds alone" if trained else "not told apart"
    if None in over_pairs:
        return "over seeds, pairs not kept" if trained else "pairs not kept"
    return "surely higher" if row.mean_difference > 0 else "surely lower"


def shown_interval(row: RowDifference) -> Span | None:
    """Over pairs of one seed, over seeds of three and more; two may happen to agree."""
    if len(row.per_seed) == 1:
        return next(iter(row.per_seed.values())).interval
    return row.interval if len(row.per_seed) >= SEEDS_FOR_AN_INTERVAL else None


def difference_cell(row: RowDifference | None) -> Cell:
    """A row's difference, below it the interval."""
    return PLAIN if row is None else Cell(signed(row.mean_difference), span(shown_interval(row)))


def findings(grids: Sequence[MaterialGrid]) -> Table | None:
    """All comparisons, together those beside one reference row on one figure; the surest first. None without comparisons."""
    groups = []
    for grid in grids:
        if grid.comparisons is None:
            continue
        together: dict[tuple[str, tuple[str, ...]], dict[str, RowDifference]] = {}
        for name, row in grid.comparisons.rows.items():
            beside = (row.reference or grid.comparisons.reference or "", _differing(row))
            together.setdefault(beside, {})[name] = row
        for (reference, tasks), rows in together.items():
            told = sorted(
                ((verdict(grid, *item), *item) for item in rows.items()), key=lambda of: VERDICTS.index(of[0])
            )
            lines = [(Cell(_label(grid, name)), Cell(kind), difference_cell(row)) for kind, name, row in told]
            groups.append(Group(tuple(lines), f"{grid.title}, beside {_reference(grid, reference, tasks)}"))
    if not groups:
        return None
    return Table(
        "Each row beside its reference",
        "Spearman × 100 of the row minus that of its reference, mean over seeds, and its 95 % interval (over seeds of three and "
        f"more, over pairs of one). Sure: {SURE}. Over seeds alone: the interval over seeds excludes 0, that over the pairs "
        "of some seed does not. Pairs not kept: there is no interval over them, for the scores of one of the two rows were "
        "not kept, or are of another training, or the set was not at hand. Too few seeds: one or two, however large the "
        "difference. Each row is taken by itself: of twenty, one at the edge is no wonder.",
        ("row", "what it shows", "difference"),
        tuple(groups),
        words=2,
    )


def _label(grid: MaterialGrid, name: str) -> str:
    known = grid.row(name)
    return known.label if known is not None else name


def _differing(row: RowDifference) -> tuple[str, ...]:
    """The tasks whose mean differs."""
    known = next(iter(row.per_seed.values())).tasks if row.per_seed else {}
    if row.figure != "average":
        return (row.figure,)
    return tuple(name for name in PUBLISHED_TASKS if name in known)


def _reference(grid: MaterialGrid, name: str, tasks: tuple[str, ...]) -> str:
    """The reference row, on what it is compared, and its figure there."""
    row = grid.row(name)
    if row is None:
        return name
    labels = {task: of.label for task, of in tasks_of([row]).items()}
    on = ", ".join(labels.get(task, task) for task in tasks)
    figure = mean_of(row, tasks) if tasks else None
    if figure is None:
        return f"“{row.label}”" + (f" on {on}" if on else "")
    spread = "" if figure.deviation is None else f" ± {number(figure.deviation)}"
    mean = "the mean of " if len(tasks) > 1 else ""
    return f"“{row.label}” on {mean}{on}, {number(figure.mean)}{spread}"
