"""Reads what is saved: grids, results, comparisons, text lengths, speed. What cannot be used is named, and the rest is used.

The folder of results holds GRID/NAME.json, GRID/comparisons.json, lengths.json and speed*.json; each may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from angle_llm.experiments import Experiment, Grid, GridError, Result, load_grid
from angle_llm.experiments.grid import RUNS, experiments
from angle_llm.experiments.provenance import portable
from angle_llm.experiments.results import COMPARISONS, ResultError
from angle_llm.experiments.runner import changed, missing_measures, settings_told
from angle_llm.report.checking import FiguresError, checked, finite
from angle_llm.report.measured import (
    Comparisons,
    Lengths,
    Nested,
    Retrieval,
    Saturation,
    Speed,
    Sts,
    Transfer,
)
from angle_llm.report.outdated import outdated

ORDER = ("nli", "prompts", "ablation", "graded", "nontransfer", "bert", "nested", "transfer", "retrieval")
"""Grids in the order they are told; any other comes after them, by name."""

KINDS: dict[str, type] = {
    "sts": Sts,
    "transfer": Transfer,
    "retrieval": Retrieval,
    "saturation": Saturation,
    "nested": Nested,
}
"""Kinds of measure this report has a form for. Others are told number by number."""

DATA_DIR = Path("DATA")
"""What stands for the data directory in results."""

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Measured:
    """A result, its figures checked: those of `KINDS` as dataclasses by kind, all others as plain values."""

    result: Result
    known: dict[str, Any]
    other: dict[str, Any]

    def of(self, kind: type[Kind]) -> Kind | None:
        """Its figures of a kind, None where it has none."""
        return next((figures for figures in self.known.values() if isinstance(figures, kind)), None)


@dataclass(frozen=True)
class MaterialRow:
    """A row of a grid and its results, the grid's first seed first."""

    name: str
    label: str
    results: tuple[Measured, ...]

    @property
    def trained(self) -> bool:
        """Whether any of its results comes from a training run."""
        return any(one.result.train is not None for one in self.results)

    @property
    def elsewhere(self) -> str | None:
        """The seed of another grid's model that this row measures, if it does that."""
        path = str(self.results[0].result.settings.get("model", {}).get("path", ""))
        if self.trained or not path.startswith(RUNS):
            return None
        seed = re.search(r"-seed(\d+)/", path)
        return seed[1] if seed else "one"

    @property
    def learnt(self) -> bool:
        """Whether what it measures comes from training, here or of another grid."""
        return self.trained or self.elsewhere is not None

    @property
    def seeds(self) -> str:
        """As the tables tell them."""
        own = ", ".join(str(one.result.seed) for one in self.results) if self.trained else "none"
        return self.elsewhere or own

    def of(self, kind: type[Kind]) -> list[tuple[int, Kind]]:
        """(seed, figures) of all results that have this kind."""
        return [(one.result.seed, figures) for one in self.results if (figures := one.of(kind)) is not None]


@dataclass(frozen=True)
class MaterialGrid:
    """A grid and what has come of it."""

    name: str
    title: str
    about: str
    reference: str | None
    rows: tuple[MaterialRow, ...]
    """Those with results, in the grid's order."""
    expected: tuple[str, ...] = ()
    """Names of all its experiments."""
    missing: tuple[str, ...] = ()
    """Those without a result."""
    comparisons: Comparisons | None = None
    problems: tuple[str, ...] = ()
    """Files that cannot be used, and what does not fit together."""
    in_file: bool = True
    """False: results only, no grid file of that name."""

    def row(self, name: str | None) -> MaterialRow | None:
        """The row of that name, if it has results."""
        return next((row for row in self.rows if row.name == name), None)


@dataclass(frozen=True)
class Material:
    """All there is to report."""

    grids: tuple[MaterialGrid, ...]
    lengths: Lengths | None = None
    speeds: tuple[Speed, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """Files of no grid that cannot be used."""

    @property
    def all_problems(self) -> list[str]:
        """Those of the grids too."""
        return [*self.problems, *(problem for grid in self.grids for problem in grid.problems)]


def read_material(results: Path, grids: Path) -> Material:
    """Reads both folders; neither needs to exist."""
    problems: list[str] = []
    files = {path.stem: path for path in sorted(grids.glob("*.yaml"))}
    folders = {path.name: path for path in sorted(results.glob("*/")) if any(path.glob("*.json"))}
    names = sorted({*files, *folders}, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    found = tuple(_read_grid(name, files.get(name), results / name) for name in names)
    lengths = _read_one(results / "lengths.json", Lengths, problems)
    speeds = [_read_one(path, Speed, problems) for path in sorted(results.glob("speed*.json"))]
    return Material(found, lengths, tuple(speed for speed in speeds if speed is not None), tuple(problems))


def _read_grid(name: str, file: Path | None, folder: Path) -> MaterialGrid:
    problems: list[str] = []
    grid, planned = Grid(title=name, name=name), []
    if file is not None:
        try:
            grid = load_grid(file)
            planned = experiments(grid, DATA_DIR)
        except GridError as error:
            problems.append(str(error))
    by_row: dict[str, list[Measured]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != COMPARISONS:
            measured = _read_result(path, problems)
            if measured is not None:
                by_row.setdefault(measured.result.row, []).append(measured)
    compared = _read_one(folder / COMPARISONS, Comparisons, problems)
    order = [*grid.rows, *(row for row in sorted(by_row) if row not in grid.rows)]
    rows = tuple(_row(grid, row, by_row[row]) for row in order if row in by_row)
    there = {one.result.name for row in rows for one in row.results}
    mismatches = _mismatches(planned, rows)
    problems += [note for notes in mismatches.values() for note in notes]
    # What the grid does not ask for is not compared with anything.
    problems += outdated(grid, compared, _without(rows, mismatches))
    return MaterialGrid(
        name=name,
        title=grid.title,
        about=grid.about,
        reference=grid.reference or (compared.reference if compared is not None else None),
        rows=rows,
        expected=tuple(experiment.name for experiment in planned),
        missing=tuple(experiment.name for experiment in planned if experiment.name not in there),
        comparisons=compared,
        problems=tuple(problems),
        in_file=file is not None,
    )


def _row(grid: Grid, name: str, results: list[Measured]) -> MaterialRow:
    row = grid.rows.get(name)
    seeds = (row.seeds if row is not None else None) or grid.seeds
    ordered = sorted(results, key=lambda one: (seeds.index(s) if (s := one.result.seed) in seeds else len(seeds), s))
    label = (row.label if row is not None else ordered[0].result.label) or name
    return MaterialRow(name, label, tuple(ordered))


def _read_result(path: Path, problems: list[str]) -> Measured | None:
    where = f"{path.parent.name}/{path.name}"
    try:
        result = checked(Result, vars(Result.read(path)), where)
    except (ResultError, FiguresError, OSError) as error:
        problems.append(str(error).replace(str(path), where))
        return None
    known: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, values in result.measures.items():
        kind = KINDS.get(name)
        if kind is None:
            other[name] = finite(values)
            continue
        try:
            known[name] = checked(kind, values, f"{where}, {name}")
        except FiguresError as error:
            problems.append(f"{error} These figures are left out; take them again.")
    return Measured(result, known, other)


def _read_one(path: Path, kind: type[Kind], problems: list[str]) -> Kind | None:
    if not path.is_file():
        return None
    try:
        return checked(kind, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (FiguresError, OSError, ValueError) as error:
        problems.append(f"{path.parent.name}/{path.name} cannot be used: {error}")
        return None


def _without(rows: Sequence[MaterialRow], names: Container[str]) -> list[MaterialRow]:
    kept = [replace(row, results=tuple(one for one in row.results if one.result.name not in names)) for row in rows]
    return [row for row in kept if row.results]


def _mismatches(planned: Sequence[Experiment], rows: Sequence[MaterialRow]) -> dict[str, list[str]]:
    """Results that are not those the grid file now asks for: other settings, other measures, another row or seed."""
    by_name = {one.result.name: one.result for row in rows for one in row.results}
    notes: dict[str, list[str]] = {}
    for experiment in planned:
        result = by_name.pop(experiment.name, None)
        if result is None:
            continue
        name = f"{experiment.grid}/{experiment.name}.json"
        told = portable(settings_told(experiment), DATA_DIR)
        if other := changed(result, told):
            notes.setdefault(experiment.name, []).append(
                f"{name} was run with other settings than its grid file has now: {', '.join(sorted(other))}. Remove it, and "
                "run its experiment again."
            )
        if lacking := missing_measures(experiment, result, DATA_DIR):
            notes.setdefault(experiment.name, []).append(
                f"{name} lacks what its grid file asks for now: {', '.join(lacking)}. Run its experiment again."
            )
    if planned:
        notes |= {
            name: [f"{of.grid}/{name}.json is of no row and seed of its grid file."] for name, of in by_name.items()
        }
    return notes
