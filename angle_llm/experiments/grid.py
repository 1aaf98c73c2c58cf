"""A grid: the rows of a table, what they share, and what is measured on each.

    name, title, about          what the table is called, and what it asks
    train                       settings of a training run that all rows share (those of `angle-llm train`)
    seeds                       each row is run once for each
    rows                        name → what differs from `train`; a row without training is the backbone as it is
    measures                    what is measured on every row
    reference                   the row others are compared with; a row may name another

A text that starts with `DATA/` in a grid is a path below the data directory that the run is given, and a model that
starts with `RUNS/` one that a row of a grid has left, so that a grid holds no machine's paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.dataclasses import dataclass

from angle_llm.config import (
    STRICT,
    DataSource,
    SettingsError,
    TrainSettings,
    merged_settings,
    settings_from_dict,
)
from angle_llm.errors import unknown

DATA = "DATA/"
RUNS = "RUNS/"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class GridError(ValueError):
    """A grid that cannot be run, with the row and what to change."""


@dataclass(frozen=True, config=STRICT)
class NestedMeasure:
    """Spearman of the encoder after its first layers, at its first dimensions."""

    tasks: tuple[str, ...]
    """STS tasks; the figure is their mean."""
    layers: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, config=STRICT)
class Measures:
    """What is measured on an encoder. All figures are × 100."""

    sts: tuple[str, ...] = ()
    """STS tasks by name, such as stsb; see `eval/sts.py`."""
    variant: Literal["raw", "senteval"] = "raw"
    """Their text: raw, or senteval as the published tables."""
    pairs: dict[str, DataSource] = field(default_factory=dict)
    """Name → scored pairs; Spearman of the cosine with the score, which may be a label."""
    saturation: DataSource | None = None
    """Scored pairs on which to ask where each term's gradient goes; see `saturation`."""
    transfer: tuple[str, ...] = ()
    """Transfer tasks by name, such as mr; see `eval/transfer.py`."""
    transfer_limit: int | None = None
    """At most so many training sentences of a transfer task."""
    transfer_drop_repeated: bool = False
    """Leave out training examples whose text is tested elsewhere."""
    retrieval: str | None = None
    """flickr30k, or a file of groups of texts; see `eval/retrieval.py`."""
    nested: NestedMeasure | None = None
    """Cuts of the encoder; see `eval/nested.py`."""


@dataclass(frozen=True, config=STRICT)
class Row:
    """One row of the table."""

    train: dict[str, Any] | None = field(default_factory=dict)
    """Training settings that differ from the grid's. null: no training, the backbone is measured as it is."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the model that differ from the grid's: those of `train.model`, for rows without training too."""
    label: str | None = None
    """How the table names it. null: its name."""
    after: str | None = None
    """A row whose model, of the same seed, this one goes on from: its second stage."""
    seeds: tuple[int, ...] | None = None
    """Its own seeds. null: the grid's; without training, one."""
    measures: Measures | None = None
    """What is measured on this row. null: the grid's."""
    reference: str | None = None
    """The row this one is compared with, where it is not the grid's; its own name: none."""


@dataclass(frozen=True, config=STRICT)
class Grid:
    """A table of experiments."""

    title: str
    about: str = ""
    """What it asks, and what all rows have in common, in words."""
    train: dict[str, Any] = field(default_factory=dict)
    """Training settings of all rows."""
    seeds: tuple[int, ...] = (42,)
    rows: dict[str, Row] = field(default_factory=dict)
    measures: Measures = field(default_factory=Measures)
    reference: str | None = None
    """The row all others are compared with, pair by pair."""
    name: str = ""
    """Its file's name."""


@dataclass(frozen=True, config=STRICT)
class Experiment:
    """One row with one seed: what to train, and what to measure on it."""

    grid: str
    row: str
    label: str
    seed: int
    settings: TrainSettings
    """Of the training; of a row without training its `model` alone counts."""
    trains: bool
    after: str | None
    measures: Measures

    @property
    def name(self) -> str:
        """Its file and folder: `in-batch-seed42`; without training just the row."""
        return f"{self.row}-seed{self.seed}" if self.trains else self.row


def load_grid(path: str | Path) -> Grid:
    """Reads a grid file; its name is the file's.

    Raises:
        GridError: for a file that is missing, malformed, or has a row that cannot be meant.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise GridError(f"no grid file at {path}. Give the path of a YAML file, such as recipes/grids/nli.yaml.")
    try:
        grid = settings_from_dict(Grid, yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))
    except (yaml.YAMLError, SettingsError) as error:
        raise GridError(f"{path} cannot be read: {error}") from error
    grid = replace(grid, name=path.stem)
    if not grid.rows:
        raise GridError(f"{path} has no rows. Name at least one.")
    for what, name in [("file name", grid.name), *(("row", name) for name in grid.rows)]:
        if not _NAME.fullmatch(name):
            raise GridError(f"{path}: {what} {name!r} names a folder: use a-z, 0-9, '-', '_' and '.'.")
    for name, row in grid.rows.items():
        goes_on = row.after is not None and row.train is not None
        if row.after is not None and not (goes_on and _ends(grid, name) and _trains(grid, row.after)):
            raise GridError(f"{path}: row {name} goes on from another row of the grid; {row.after!r} cannot be that.")
        first = grid.rows[row.after] if row.after is not None else row
        if lacking := sorted(set(row.seeds or grid.seeds) - set(first.seeds or grid.seeds)):
            raise GridError(f"{path}: row {name} goes on from {row.after}, which has no seed {lacking[0]}.")
    for name in filter(None, (grid.reference, *(row.reference for row in grid.rows.values()))):
        if name not in grid.rows:
            raise GridError(f"{path}: {unknown('row', name, grid.rows)}, named as reference")
    return grid


def _ends(grid: Grid, name: str | None) -> bool:
    """Whether a chain of stages has a first one."""
    seen: set[str] = set()
    while name is not None and name in grid.rows and name not in seen:
        seen.add(name)
        name = grid.rows[name].after
    return name not in seen


def _trains(grid: Grid, name: str) -> bool:
    return name in grid.rows and grid.rows[name].train is not None


def experiments(grid: Grid, data_dir: Path, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Experiment]:
    """Rows × seeds, in the order of the file, with paths below `data_dir`; `rows` and `seeds` choose some of them.

    Raises:
        GridError: for a row that is not in the grid, or whose settings cannot be used.
    """
    for name in rows:
        if name not in grid.rows:
            raise GridError(unknown("row", name, grid.rows))
    chosen = []
    for name, row in grid.rows.items():
        if rows and name not in rows:
            continue
        trains = row.train is not None
        for seed in row.seeds or (grid.seeds if trains else grid.seeds[:1]):
            if seeds and trains and seed not in seeds:
                continue
            chosen.append(
                Experiment(
                    grid=grid.name,
                    row=name,
                    label=row.label or name,
                    seed=seed,
                    settings=_settings(grid, name, row, seed, data_dir),
                    trains=trains,
                    after=row.after,
                    measures=_measures(row.measures or grid.measures, data_dir),
                )
            )
    return chosen


def _settings(grid: Grid, name: str, row: Row, seed: int, data_dir: Path) -> TrainSettings:
    """A seed decides the sample of the data, the adapter's start and the order."""
    values = merged_settings(merged_settings(grid.train, row.train or {}), {"model": row.model})
    for key in ("run_dir", "resume", "seed"):
        if key in values:
            raise GridError(
                f"grid {grid.name}, row {name}: {key} is set by the run. Leave it away; seeds stand in `seeds`."
            )
    data = values.get("data") or {}
    sets = data.get("sets") or []
    if any(isinstance(each, dict) and each.get("shuffle_seed") is not None for each in (data, *sets)):
        raise GridError(f"grid {grid.name}, row {name}: data.shuffle_seed follows the seed. Leave it away.")
    if sets:
        shuffled = [each | {"shuffle_seed": seed} if isinstance(each, dict) else each for each in sets]
        values = values | {"seed": seed, "data": data | {"sets": shuffled}}
    else:
        values = merged_settings(values, {"seed": seed, "data": {"shuffle_seed": seed}})
    try:
        return settings_from_dict(TrainSettings, _below(values, data_dir), where=f"grid {grid.name}, row {name}")
    except SettingsError as error:
        raise GridError(str(error)) from error


def _measures(measures: Measures, data_dir: Path) -> Measures:
    pairs = {name: replace(source, path=_below(source.path, data_dir)) for name, source in measures.pairs.items()}
    saturation = measures.saturation and replace(measures.saturation, path=_below(measures.saturation.path, data_dir))
    return replace(measures, pairs=pairs, saturation=saturation, retrieval=_below(measures.retrieval, data_dir))


def _below(value: Any, data_dir: Path) -> Any:
    if isinstance(value, dict):
        return {key: _below(item, data_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [_below(item, data_dir) for item in value]
    if isinstance(value, str):
        # A list of sets, DATA/a:2,DATA/b, has several.
        return ",".join(
            str(data_dir / one.removeprefix(DATA)) if one.startswith(DATA) else one for one in value.split(",")
        )
    return value
