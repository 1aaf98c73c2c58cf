"""Tables of the STS figures: one row for each row of the grid, then every figure of every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from angle_llm.report.against import SURE, difference_cell, verdict
from angle_llm.report.document import Block, Cell, Figure, Folded, Group, Notice, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.measured import RowDifference, Sts, StsTaskFigures
from angle_llm.report.numbers import (
    PLAIN,
    SPREAD,
    UNDEFINED,
    OverSeeds,
    number,
)
from angle_llm.report.plots import DotRow, density_figure, dots
from angle_llm.report.published import STS_MARK, sts_beside
from angle_llm.report.sts_details import compared, details
from angle_llm.report.sts_figures import average_of, averages_of, figure_of, task_of, tasks_of

TEXTS = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, as the published tables: Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}
INTERVALS = (
    f"{SPREAD} Small: 95 % interval over the pairs of the test set, its ends averaged over seeds. Intervals over pairs take "
    "the pairs as independent; they share sentences, and STS-B shares pairs with STS12 to 15, so the true ones are somewhat "
    "wider."
)


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


def _shared_tasks(rows: Sequence[MaterialRow]) -> list[str]:
    """Tasks of two rows and more: where there are none, a column for each task would be nearly empty."""
    return [name for name in tasks_of(rows) if sum(task_of(row, name) is not None for row in rows) > 1]


def _wide(grid: MaterialGrid, rows: Sequence[MaterialRow]) -> Table:
    """A column for each task."""
    tasks, averages = tasks_of(rows), averages_of(rows)
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
        cells = [Cell(row.label, _beside_whom(grid, row) if differences else ""), Cell(row.seeds)]
        cells += [_cell(average_of(row, over), bold=best["average"] == row.name) for over in averages]
        cells += [difference_cell(differences.get(row.name))] if differences else []
        cells += [_cell(task_of(row, name), bold=best[name] == row.name) for name in tasks]
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
        f"Spearman correlation × 100 of cosine similarity with human scores; higher is better. {_texts(rows)} {INTERVALS}",
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
    named = reference.label if reference is not None else grid.comparisons.reference or "its reference"
    notes.append(
        f"“against reference”: the row minus {named} (or the row named below its own name), of equal seeds, on the average of "
        "the sets both were measured on, mean over seeds. Small: 95 % interval over seeds (t) where there are three or more, "
        "over pairs where there is one (none where its pairs' scores were not kept), none of two, which may happen to agree. "
        "Each row is taken by itself: of twenty, one at the edge is no wonder."
    )
    notes.append(
        "Bold: the highest of its column, and surely unlike the reference (for the reference: every other row is surely unlike "
        f"it), which means that {SURE}. Two rows other than the reference are not compared with each other."
    )
    return notes


def _one_seed(rows: Sequence[MaterialRow]) -> str:
    single = [row.label for row in rows if row.learnt and len(row.results) == 1]
    return f"One seed only, so nothing is known of another: {', '.join(single)}." if single else ""


def _best(grid: MaterialGrid, rows: Sequence[MaterialRow], figure: str) -> str | None:
    """The highest row of a column if that is sure; a column that was not compared has none."""
    compared = grid.comparisons
    if compared is None or (figure == "average" and len(averages_of(rows)) != 1):
        return None
    reference = compared.reference
    of = {
        name: row
        for name, row in compared.rows.items()
        if (row.figure, row.reference or reference) == (figure, reference)
    }
    in_column = [row for row in rows if row.name in of or row.name == compared.reference]
    means = {row.name: None if (of_row := figure_of(row, figure)) is None else of_row.mean for row in in_column}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2 or len(known) < len(rows):
        return None
    best = max(known, key=lambda name: known[name])
    if best != compared.reference:
        return best if _sure(grid, best, of[best]) else None
    return best if all(_sure(grid, name, row) for name, row in of.items()) else None


def _sure(grid: MaterialGrid, name: str, row: RowDifference) -> bool:
    return verdict(grid, name, row) in ("surely higher", "surely lower")


def _beside_whom(grid: MaterialGrid, row: MaterialRow) -> str:
    """Small print of a row: whether it is the reference, or compared with another one than most."""
    known = grid.comparisons
    if known is None:
        return ""
    if row.name == known.reference:
        return "the reference"
    if any(row.name == other.reference for other in known.rows.values()):
        return "a reference"
    own = known.rows[row.name].reference if row.name in known.rows else None
    if own is None or own == known.reference:
        return ""
    other = grid.row(own)
    return f"against: {other.label if other is not None else own}"


def _cell(figure: OverSeeds | None, *, bold: bool = False) -> Cell:
    return PLAIN if figure is None else figure.cell(bold=bold)


def _published(value: float | None) -> Cell:
    return PLAIN if value is None else Cell(number(value))


def _texts(rows: Sequence[MaterialRow]) -> str:
    """The text the figures are on, in a sentence."""
    by_text: dict[str, list[str]] = {}
    for row in rows:
        for _, sts in row.of(Sts):
            for task in sts.tasks.values():
                if task.label not in by_text.setdefault(task.variant, []):
                    by_text[task.variant].append(task.label)
    meanings = {text: TEXTS.get(text.split(",")[0], "") for text in by_text}
    labels = [label for of in by_text.values() for label in of]
    mixed = len(labels) > len(set(labels))  # one set in two forms, as the rows' names say
    told = [
        f"`{text}`"
        + (f" ({meanings[text]})" if meanings[text] else "")
        + (f": {', '.join(of)}" if len(by_text) > 1 and not mixed else "")
        for text, of in by_text.items()
    ]
    which = (
        " Which of them a row is on stands in its name; rows on different text are no comparison of models."
        if mixed
        else ""
    )
    return f"Text: {'; '.join(told)}.{which}"


def _long(rows: Sequence[MaterialRow]) -> Table:
    """Rows that share no task: a line for each figure."""
    body = []
    for row in rows:
        for name, task in tasks_of([row]).items():
            figure = task_of(row, name)
            cells = (Cell(row.label), Cell(row.seeds), Cell(task.label), Cell(f"{task.pairs:,}"), _cell(figure))
            body.append(cells)
    return Table(
        "Each row on its own set",
        f"Spearman correlation × 100 of cosine similarity with the score or label. {_texts(rows)} {INTERVALS}",
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
    averages = [over for over in averages_of(rows) if all(average_of(row, over) is not None for row in rows)]
    tasks = tasks_of(rows)
    shared = [name for name in tasks if all(task_of(row, name) is not None for row in rows)]
    if averages:
        what = f"Average of {', '.join(tasks[name].label for name in averages[0] if name in tasks)}"
        figures = [average_of(row, averages[0]) for row in rows]
    elif shared:
        what = tasks[shared[0]].label
        figures = [task_of(row, shared[0]) for row in rows]
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
