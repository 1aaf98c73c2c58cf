"""Differences in a comparisons file that are not those of the results beside it, and those it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from angle_llm.evaluate.tasks import PUBLISHED_TASKS
from angle_llm.experiments.comparisons import reference_of
from angle_llm.experiments.results import COMPARISONS
from angle_llm.report.measured import Comparisons, RowDifference, Sts

if TYPE_CHECKING:
    from angle_llm.experiments import Grid
    from angle_llm.report.material import MaterialRow

_ROUNDING = 0.005
"""Less than the tables show."""


def outdated(grid: Grid, compared: Comparisons | None, rows: Sequence[MaterialRow]) -> list[str]:
    """What is wrong with a grid's comparisons, in words; nothing where there is no file."""
    if compared is None:
        return []
    by_row = {row.name: row for row in rows}
    stale, lacking = [], []
    for name, of in compared.rows.items():
        for seed, told in of.per_seed.items():
            here = _difference(by_row.get(name), by_row.get(of.reference or compared.reference or ""), seed, of.figure)
            if here is not None and told.difference is not None and abs(here - told.difference) > _ROUNDING:
                stale.append(f"{name} (seed {seed})")
    for row in rows:
        known = compared.rows.get(row.name)
        own = known.reference if known is not None and row.name not in grid.rows else None
        reference = by_row.get(own or reference_of(grid, row.name) or compared.reference or "")
        if reference is None or reference.name == row.name:
            continue
        same = known is not None and (known.reference or compared.reference) == reference.name
        for seed in _seeds(row, reference):
            figure = known.figure if known is not None and same else None
            if _difference(row, reference, seed, figure) is not None and not (same and seed in _told(known)):
                lacking.append(f"{row.name} (seed {seed})")
    again = "Run any row of the grid again."
    return [
        *([f"{grid.name}/{COMPARISONS} is not of these results: {', '.join(stale)}. {again}"] if stale else []),
        *([f"{grid.name}/{COMPARISONS} lacks what has a result: {', '.join(lacking)}. {again}"] if lacking else []),
    ]


def _told(known: RowDifference | None) -> set[str]:
    return set(known.per_seed) if known is not None else set()


def _seeds(row: MaterialRow, reference: MaterialRow) -> Iterator[str]:
    """The seeds under which the two are compared, as comparisons name them."""
    if not row.trained and not reference.trained:
        yield "none"
    for one in (row if row.trained else reference).results:
        if one.result.train is not None:
            yield str(one.result.seed)


def _difference(ours: MaterialRow | None, theirs: MaterialRow | None, seed: str, figure: str | None) -> float | None:
    """Row minus reference on a figure (None: any they share), as the comparisons are made; None where there is none."""
    one, other = _sts(ours, seed), _sts(theirs, seed)
    if one is None or other is None:
        return None
    shared = {
        name: task.spearman - there.spearman
        for name, task in one.tasks.items()
        if (there := other.tasks.get(name)) is not None
        and (task.variant, task.pairs) == (there.variant, there.pairs)
        and task.spearman is not None
        and there.spearman is not None
    }
    averaged = [name for name in PUBLISHED_TASKS if name in shared]
    names = averaged if figure == "average" else list(shared)[:1] if figure is None else [figure]
    if not names or any(name not in shared for name in names):
        return None
    return sum(shared[name] for name in names) / len(names)


def _sts(row: MaterialRow | None, seed: str) -> Sts | None:
    """The figures of a seed; of a row without training, whatever the seed."""
    results = [one for one in row.results if one.result.train is None or str(one.result.seed) == seed] if row else []
    return results[0].of(Sts) if results else None
