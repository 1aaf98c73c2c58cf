"""The long STS tables: every figure, and every difference, of every seed."""

from __future__ import annotations

from collections.abc import Sequence

from angle_llm.report.document import Cell, Group, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.measured import RowDifference, Sts
from angle_llm.report.numbers import PLAIN, SEEDS_FOR_AN_INTERVAL, number, signed, span


def details(rows: Sequence[MaterialRow]) -> Table:
    """Every STS figure of every seed."""
    body = []
    for row in rows:
        for one in row.results:
            sts = one.of(Sts)
            seed = str(one.result.seed) if one.result.train is not None else "none"
            for task in sts.tasks.values() if sts is not None else ():
                means = [
                    PLAIN if value is None else Cell(number(value))
                    for value in (task.subtask_mean, task.subtask_weighted)
                ]
                figures = [
                    Cell(number(task.spearman)),
                    Cell(span(task.interval) or "–"),
                    Cell(number(task.pearson)),
                    *means,
                ]
                words = [Cell(row.label), Cell(seed), Cell(task.label), Cell(task.variant)]
                body.append((*words, Cell(f"{task.pairs:,}"), *figures))
            if sts is not None and sts.average is not None:
                over = Cell(f"average of {len(sts.average.tasks)}")
                figures = [
                    Cell(number(sts.average.spearman)),
                    Cell(span(sts.average.interval) or "–"),
                    PLAIN,
                    PLAIN,
                    PLAIN,
                ]
                body.append((Cell(row.label), Cell(seed), over, PLAIN, PLAIN, *figures))
    return Table(
        "STS by seed",
        "Correlations × 100; interval: 95 % bootstrap over the pairs; sub-tasks: the mean of Spearman over the sub-tasks of a "
        "year, each counting the same or by its pairs. – : there is none.",
        ("row", "seed", "set", "text", "pairs", "Spearman", "interval", "Pearson", "sub-task mean", "weighted mean"),
        (Group(tuple(body)),),
        words=4,
    )


def compared(grid: MaterialGrid, rows: dict[str, RowDifference]) -> Table:
    """Every difference from the reference, of each seed and over seeds."""
    body = []
    for name, row in rows.items():
        known = grid.row(name)
        label = known.label if known is not None else name
        for seed, one in row.per_seed.items():
            p = "–" if one.p_value is None else "≤ 0.002" if one.p_value < 2.5e-3 else number(one.p_value, 3)
            body.append(
                (
                    Cell(label),
                    Cell(seed),
                    Cell(row.figure),
                    Cell(signed(one.difference)),
                    Cell(span(one.interval) or "–"),
                    Cell(p),
                )
            )
        if len(row.per_seed) != 1:
            ends = Cell((span(row.interval) if len(row.per_seed) >= SEEDS_FOR_AN_INTERVAL else "") or "–")
            body.append((Cell(label), Cell("mean"), Cell(row.figure), Cell(signed(row.mean_difference)), ends, PLAIN))
    return Table(
        "Against the reference, seed by seed",
        "Spearman × 100 of the row minus that of the reference with the same seed, on the same pairs. The interval of a seed and "
        "its two-sided p-value are over pairs (bootstrap), if its pairs' scores were kept; the interval of the mean is over "
        "seeds (t), of three at least.",
        ("row", "seed", "figure", "difference", "interval", "p"),
        (Group(tuple(body)),),
        words=3,
    )
