"""The STS figures of a row, over its seeds."""

from __future__ import annotations

from collections.abc import Sequence

from angle_llm.report.material import MaterialRow
from angle_llm.report.measured import Sts, StsTaskFigures
from angle_llm.report.numbers import OverSeeds, over_seeds


def tasks_of(rows: Sequence[MaterialRow]) -> dict[str, StsTaskFigures]:
    """Every task of these rows, in the order of first appearance."""
    tasks: dict[str, StsTaskFigures] = {}
    for row in rows:
        for _, sts in row.of(Sts):
            for name, task in sts.tasks.items():
                tasks.setdefault(name, task)
    return tasks


def averages_of(rows: Sequence[MaterialRow]) -> list[tuple[str, ...]]:
    """The different sets of tasks that rows are averaged over; an average over one task is that task, and no column."""
    sets = [sts.average.tasks for row in rows for _, sts in row.of(Sts) if sts.average is not None]
    return list(dict.fromkeys(tasks for tasks in sets if len(tasks) > 1))


def average_of(row: MaterialRow, tasks: tuple[str, ...]) -> OverSeeds | None:
    averages = [sts.average for _, sts in row.of(Sts)]
    return over_seeds([(a.spearman, a.interval) for a in averages if a is not None and a.tasks == tasks])


def task_of(row: MaterialRow, name: str) -> OverSeeds | None:
    found = [sts.tasks[name] for _, sts in row.of(Sts) if name in sts.tasks]
    return over_seeds([(task.spearman, task.interval) for task in found])


def mean_of(row: MaterialRow, tasks: Sequence[str]) -> OverSeeds | None:
    """The mean of some tasks, over the seeds that have them all."""
    means = []
    for _, sts in row.of(Sts):
        values = [sts.tasks[name].spearman for name in tasks if name in sts.tasks]
        known = [value for value in values if value is not None]
        if known and len(known) == len(tasks):
            means.append((sum(known) / len(known), None))
    return over_seeds(means)


def figure_of(row: MaterialRow, figure: str) -> OverSeeds | None:
    """A task, or the average if the row has one alone."""
    if figure != "average":
        return task_of(row, figure)
    averages = averages_of([row])
    return average_of(row, averages[0]) if len(averages) == 1 else None
