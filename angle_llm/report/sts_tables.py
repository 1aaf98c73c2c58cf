"""Tables of the STS figures: one row for each row of the grid, then every figure of every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from angle_llm.report.document import Block, Cell, Figure, Folded, Group, Notice, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.measured import RowDifference, Sts, StsTaskFigures
from angle_llm.report.numbers import (
    PLAIN,
    UNDEFINED,
    OverSeeds,
    excludes_zero,
    number,
    over_seeds,
    signed,
    span,
)
from angle_llm.report.plots import DotRow, density_figure, dots
from angle_llm.report.published import STS_MARK, sts_beside
from angle_llm.report.sts_details import compared, details

TEXTS = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, as the published tables: Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}
INTERVALS = (
    "Large: the mean over seeds ± their standard deviation, or the figure of the one seed. Small: 95 % interval over the "
    "pairs of the test set, of the first seed named. Intervals over pairs take the pairs as independent; they share sentences, "
    "and STS-B shares pairs with STS12 to 15, so the true ones are somewhat wider."
)
SEEDS_FOR_AN_INTERVAL = 3
"""Two seeds may happen to agree."""


def sts_blocks(grid: MaterialGrid, untrained: Callable[[MaterialRow, str], Sts | None]) -> list[Block]:
    """The STS part of a grid; `untrained` finds the figures of a row's backbone before training, with some task's density."""
    rows = [row for row in grid.rows if row.of(Sts)]
    if not rows:
        return []
    blocks: list[Block] = [*_undefined(rows)]
    drawing = _dots(grid, rows)
    blocks += [drawing] if drawing is not None else []
    blocks.append(_wide(grid, rows) if _shared_tasks(rows) or len(rows) == 1 else _long(rows))
    blocks += [figure for figure in [_density(grid, rows, untrained)] if figure is not None]
    blocks.append(Folded("Every STS figure of every seed", (details(rows),)))
    if grid.comparisons is not None and grid.comparisons.rows:
        blocks.append(Folded("Every paired comparison", (compared(grid, grid.comparisons.rows),)))
    return blocks


def _tasks(rows: Sequence[MaterialRow]) -> dict[str, StsTaskFigures]:
    """Every task of these rows, in the order of first appearance."""
    tasks: dict[str, StsTaskFigures] = {}
    for row in rows:
        for _, sts in row.of(Sts):
            for name, task in sts.tasks.items():
                tasks.setdefault(name, task)
    return tasks


def _averages(rows: Sequence[MaterialRow]) -> list[tuple[str, ...]]:
    """The different sets of tasks that rows are averaged over; an average over one task is that task, and no column."""
    sets = [sts.average.tasks for row in rows for _, sts in row.of(Sts) if sts.average is not None]
    return list(dict.fromkeys(tasks for tasks in sets if len(tasks) > 1))


def _average(row: MaterialRow, tasks: tuple[str, ...]) -> OverSeeds | None:
    averages = [sts.average for _, sts in row.of(Sts)]
    return over_seeds([(a.spearman, a.interval) for a in averages if a is not None and a.tasks == tasks])


def _task(row: MaterialRow, name: str) -> OverSeeds | None:
    found = [sts.tasks[name] for _, sts in row.of(Sts) if name in sts.tasks]
    return over_seeds([(task.spearman, task.interval) for task in found])


def _shared_tasks(rows: Sequence[MaterialRow]) -> list[str]:
    """Tasks of two rows and more: where there are none, a column for each task would be nearly empty."""
    return [name for name in _tasks(rows) if sum(_task(row, name) is not None for row in rows) > 1]


def _wide(grid: MaterialGrid, rows: Sequence[MaterialRow]) -> Table:
    """A column for each task."""
    tasks, averages = _tasks(rows), _averages(rows)
    differences = grid.comparisons.rows if grid.comparisons is not None else {}
    headings = [f"average of {len(tasks)}" for tasks in averages]
    columns = [
        "row",
        "seeds",
        *headings,
        *(["against reference"] if differences else []),
        *(t.label for t in tasks.values()),
    ]
    best = {figure: _best(grid, rows, figure) for figure in ("average", *tasks)}
    body = []
    for row in rows:
        cells = [
            Cell(row.label, "the reference" if differences and row.name == grid.reference else ""),
            Cell(row.seeds),
        ]
        cells += [_cell(_average(row, over), bold=best["average"] == row.name) for over in averages]
        cells += [_difference(differences.get(row.name))] if differences else []
        cells += [_cell(_task(row, name), bold=best[name] == row.name) for name in tasks]
        body.append(tuple(cells))
    groups = [Group(tuple(body))]
    foreign = []
    for published in sts_beside(grid.name):
        over = [published.average_over(tasks) for tasks in averages]
        figures = [published.spearman.get(name) for name in tasks]
        cells = [Cell(published.model), PLAIN, *(_published(value) for value in over)]
        cells += [PLAIN] if differences else []
        foreign.append((*cells, *(_published(value) for value in figures)))
    if foreign:
        groups.append(Group(tuple(foreign), STS_MARK, foreign=True))
    return Table(
        "STS",
        f"Spearman correlation × 100 of cosine similarity with human scores; higher is better. {_texts(tasks)} {INTERVALS}",
        tuple(columns),
        tuple(groups),
        tuple(_notes(grid, rows, averages, tasks)),
        words=2,
    )


def _notes(
    grid: MaterialGrid, rows: Sequence[MaterialRow], averages: list[tuple[str, ...]], tasks: dict[str, StsTaskFigures]
) -> list[str]:
    notes = []
    for over in averages:
        named = ", ".join(tasks[name].label if name in tasks else name for name in over)
        notes.append(f"“average of {len(over)}”: {named}; its interval draws the pairs of each set anew.")
    notes += [_one_seed(rows)] if _one_seed(rows) else []
    if grid.comparisons is None:
        notes.append("Nothing is in bold: rows have not been compared pair by pair yet.")
        return notes
    reference = grid.row(grid.comparisons.reference)
    named = reference.label if reference is not None else grid.comparisons.reference
    notes.append(
        f"“against reference”: the row minus {named}, of equal seeds, on the average of the sets both were measured on, mean "
        "over seeds. Small: 95 % interval over seeds (t) where there are three or more, over pairs where there is one (none "
        "where its pairs' scores were not kept), none of two, which may happen to agree. Each row is taken by itself: of twenty, "
        "one at the edge is no wonder."
    )
    notes.append(
        "Bold: the highest of its column, and surely unlike the reference (for the reference: every other row is surely unlike "
        "it), which means that the intervals of the difference over the pairs of every seed, and over seeds, exclude 0, of three "
        "seeds at least if anything was trained. Two rows other than the reference are not compared with each other."
    )
    return notes


def _one_seed(rows: Sequence[MaterialRow]) -> str:
    single = [row.label for row in rows if row.trained and len(row.results) == 1]
    return f"One seed only, so nothing is known of another: {', '.join(single)}." if single else ""


def _best(grid: MaterialGrid, rows: Sequence[MaterialRow], figure: str) -> str | None:
    """The highest row of a column if that is sure; a column that was not compared has none."""
    compared = grid.comparisons
    if compared is None or (figure == "average" and len(_averages(rows)) != 1):
        return None
    of = {name: row for name, row in compared.rows.items() if row.figure == figure}
    in_column = [row for row in rows if row.name in of or row.name == compared.reference]
    means = {row.name: _mean(row, figure) for row in in_column}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2 or len(known) < len(rows):
        return None
    best = max(known, key=lambda name: known[name])
    if best != compared.reference:
        return best if _sure(of[best]) else None
    return best if all(map(_sure, of.values())) else None


def _mean(row: MaterialRow, figure: str) -> float | None:
    if figure != "average":
        found = _task(row, figure)
    else:
        averages = _averages([row])
        found = _average(row, averages[0]) if len(averages) == 1 else None
    return found.mean if found is not None else None


def _sure(row: RowDifference) -> bool:
    """One seed has shown what the next one took back; only what nobody trained needs none."""
    spans = [seed.interval for seed in row.per_seed.values()]
    if row.per_seed.keys() != {"none"}:
        if len(spans) < SEEDS_FOR_AN_INTERVAL:
            return False
        spans.append(row.interval)
    return bool(spans) and all(map(excludes_zero, spans))


def _difference(row: RowDifference | None) -> Cell:
    if row is None:
        return PLAIN
    if len(row.per_seed) == 1:
        return Cell(signed(row.mean_difference), span(next(iter(row.per_seed.values())).interval))
    return Cell(signed(row.mean_difference), span(row.interval if len(row.per_seed) >= SEEDS_FOR_AN_INTERVAL else None))


def _cell(figure: OverSeeds | None, *, bold: bool = False) -> Cell:
    return PLAIN if figure is None else figure.cell(bold=bold)


def _published(value: float | None) -> Cell:
    return PLAIN if value is None else Cell(number(value))


def _texts(tasks: dict[str, StsTaskFigures]) -> str:
    """The text the figures are on, in a sentence."""
    by_text: dict[str, list[str]] = {}
    for task in tasks.values():
        by_text.setdefault(task.variant, []).append(task.label)
    meanings = {text: TEXTS.get(text.split(",")[0], "") for text in by_text}
    told = [
        f"`{text}`"
        + (f" ({meanings[text]})" if meanings[text] else "")
        + (f": {', '.join(of)}" if len(by_text) > 1 else "")
        for text, of in by_text.items()
    ]
    return f"Text: {'; '.join(told)}."


def _long(rows: Sequence[MaterialRow]) -> Table:
    """Rows that share no task: a line for each figure."""
    body = []
    for row in rows:
        for name, task in _tasks([row]).items():
            figure = _task(row, name)
            cells = (Cell(row.label), Cell(row.seeds), Cell(task.label), Cell(f"{task.pairs:,}"), _cell(figure))
            body.append(cells)
    return Table(
        "Each row on its own set",
        f"Spearman correlation × 100 of cosine similarity with the score or label. {_texts(_tasks(rows))} {INTERVALS}",
        ("row", "seeds", "measured on", "pairs", "Spearman"),
        (Group(tuple(body)),),
        tuple(filter(None, [_one_seed(rows)])),
        words=3,
    )


def _undefined(rows: Sequence[MaterialRow]) -> list[Block]:
    """A figure that does not exist is told with its reason."""
    found = []
    for row in rows:
        for seed, sts in row.of(Sts):
            for task in sts.tasks.values():
                if task.spearman is None or task.undefined:
                    reason = task.undefined or "the file gives no reason"
                    found.append(
                        Notice(f"{row.label}, seed {seed}, {task.label}: {UNDEFINED}, as {reason}.", "problem")
                    )
    return list(found)


def _dots(grid: MaterialGrid, rows: Sequence[MaterialRow]) -> Figure | None:
    """The rows on the figure that all of them have: the average, else the first task."""
    if len(rows) < 2:
        return None
    averages = [over for over in _averages(rows) if all(_average(row, over) is not None for row in rows)]
    tasks = _tasks(rows)
    shared = [name for name in tasks if all(_task(row, name) is not None for row in rows)]
    if averages:
        what = f"Average of {', '.join(tasks[name].label for name in averages[0] if name in tasks)}"
        figures = [_average(row, averages[0]) for row in rows]
    elif shared:
        what = tasks[shared[0]].label
        figures = [_task(row, shared[0]) for row in rows]
    else:
        return None
    drawn = [DotRow(row.label, figure) for row, figure in zip(rows, figures, strict=True) if figure is not None]
    return dots(what, drawn)


def _density(
    grid: MaterialGrid, rows: Sequence[MaterialRow], untrained: Callable[[MaterialRow, str], Sts | None]
) -> Figure | None:
    """Cosines by gold score before and after training, of the reference row or the first that was trained."""
    trained = [row for row in rows if row.trained]
    trained.sort(key=lambda row: row.name != grid.reference)
    for row in trained:
        seed, sts = row.of(Sts)[0]
        for task in sorted(sts.density, key=lambda name: name != "stsb"):
            before = untrained(row, task)
            label = sts.tasks[task].label if task in sts.tasks else task
            panels = [("before training", before.density[task])] if before is not None else []
            panels.append((f"after training: {row.label}, seed {seed}", sts.density[task]))
            return density_figure(f"Cosines of {label} by gold score", panels)
    return None
