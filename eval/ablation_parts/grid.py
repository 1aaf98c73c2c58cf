"""Read grid files: tables of experiments with shared settings, rows that change some settings, and measurements.

    title, about       heading and description of the table
    train              training settings shared by all rows (settings of `angle-llm train`)
    seeds              seeds of the trained rows; a row is trained once per seed
    rows               name of a row → settings that differ from `train`. `train: null` measures a model without training,
                       once, or once per seed if the path of the model contains {seed}
    measures           what to measure on every row
    reference          row that the other rows are compared with; a row can set another reference

Two prefixes keep paths of a machine out of a grid: `DATA/` is the folder of --data-dir, and a model or teacher that
starts with `RUNS/` is in the folder of --runs, where the rows of grids are trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from angle_llm.evaluate.sts_tasks import data_file
from angle_llm.io import differences
from angle_llm.settings.parsing import (
    SettingsError,
    merged_settings,
    read_yaml,
    settings_class,
    settings_from_dict,
    unknown_name,
)
from angle_llm.settings.train import DataSource, TrainSettings

DATA, RUNS, SEED = "DATA/", "RUNS/", "{seed}"
KINDS = {
    "sts": ("sts", "pairs", "variant"),
    "saturation": ("saturation",),
    "transfer": ("transfer", "transfer_limit", "transfer_drop_repeated"),
    "retrieval": ("retrieval",),
    "nested": ("nested", "variant"),
}
"""Kind of measurement → fields of `Measures` that describe it."""


@settings_class
class NestedMeasure:
    """Spearman correlation, averaged over `tasks`, of the encoder truncated to its first layers and dimensions."""

    tasks: tuple[str, ...]
    layers: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()


@settings_class
class Measures:
    """What to measure on an encoder."""

    sts: tuple[str, ...] = ()
    """Names of STS tasks, such as stsb."""
    variant: Literal["raw", "senteval"] = "raw"
    """Text of the STS tasks: raw, or senteval as in the published tables."""
    pairs: dict[str, DataSource] = field(default_factory=dict)
    """Name of a task → scored pairs. The metric is the Spearman correlation of cosine and score."""
    saturation: DataSource | None = None
    """Scored pairs for which the gradient of each loss term is summed by range of the cosine, see `saturation`."""
    transfer: tuple[str, ...] = ()
    """Names of transfer tasks, such as mr."""
    transfer_limit: int | None = None
    """Maximum number of training sentences of a transfer task. None: all."""
    transfer_drop_repeated: bool = False
    """Whether to drop training examples whose text is also in the test split."""
    retrieval: str | tuple[str, ...] = ()
    """Retrieval tasks: flickr30k, files of groups of texts, and BEIR folders (FOLDER@NAME uses qrels/NAME.tsv)."""
    nested: NestedMeasure | None = None
    """Measurement of the encoder with fewer layers and dimensions. None: not measured."""


@settings_class
class Row:
    """A row of a grid file: settings that differ from the shared settings, and what to measure."""

    train: dict[str, Any] | None = field(default_factory=dict)
    """Training settings that differ from the shared settings of the grid. null: no training."""
    model: dict[str, Any] = field(default_factory=dict)
    """Model settings that differ from the shared settings of the grid, also for rows without training."""
    label: str | None = None
    """Name of the row in tables. None: the name in the grid file."""
    after: str | None = None
    """Row whose model (with the same seed) this row trains further, as a second stage."""
    seeds: tuple[int, ...] | None = None
    """Seeds of the row. None: the seeds of the grid."""
    measures: dict[str, Any] | None = None
    """Fields of `Measures` for this row. None: the measures of the grid."""
    reference: str | None = None
    """Row that this row is compared with. None: the reference of the grid."""


@settings_class
class Grid:
    """A grid file: training settings shared by all rows, the rows, and what to measure."""

    title: str
    about: str = ""
    train: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (42,)
    rows: dict[str, Row] = field(default_factory=dict)
    measures: dict[str, Any] = field(default_factory=dict)
    """What to measure on every row, as fields of `Measures`."""
    reference: str | None = None
    name: str = ""
    """Name of the grid file without extension."""


@settings_class
class Experiment:
    """A row of a grid with a seed: what to train, and what to measure on the model."""

    grid: str
    row: str
    label: str
    seed: int | None
    """Seed of the row. None: the model is not trained and does not depend on a seed."""
    given: dict[str, Any]
    """Settings as stated in the grid, and under `after` the settings of the earlier stage. They are recorded with the
    results, to detect results of other settings."""
    settings: TrainSettings
    """All settings of the run with real paths. For a row without training, only `model` is used."""
    after: str | None
    measures: Measures
    stated: dict[str, dict[str, Any]]
    """Kind of measurement → its fields in the grid file. They are recorded with the results, to detect results on other
    data."""
    reference: str | None

    @property
    def is_trained(self) -> bool:
        """Whether the row trains its model."""
        return "seed" in self.given

    @property
    def name(self) -> str:
        """Name of the run directory: `in-batch-seed42`, or the name of the row if there is no seed."""
        return self.row if self.seed is None else f"{self.row}-seed{self.seed}"

    @property
    def key(self) -> tuple[str, str, str]:
        """Grid, row and seed, as written to the results file; without a seed, the seed is an empty string."""
        return (self.grid, self.row, "" if self.seed is None else str(self.seed))


def load_grid(path: str | Path) -> Grid:
    """Read a grid file.

    Raises:
        SettingsError: if the file is missing or malformed, or a row refers to a row or seed that does not exist.
    """
    path = Path(path).expanduser()
    grid = settings_from_dict(Grid, read_yaml(path, "eval/grids"), where=str(path))
    grid = replace(grid, name=path.stem)
    if not grid.rows:
        raise SettingsError(f"{path} has no rows. Add at least one below `rows`.")
    for name in (grid.name, *grid.rows):
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
            raise SettingsError(f"{path}: {name!r} cannot name a folder: expected only a-z, 0-9, '-', '_' and '.'.")
    for name, row in grid.rows.items():
        if (reference := row.reference or grid.reference) and reference not in grid.rows:
            raise SettingsError(f"{path}: reference: {unknown_name('row', reference, grid.rows)}")
        _check_stages(path, grid, name)
    return grid


def _check_stages(path: Path, grid: Grid, name: str) -> None:
    """Check that the training stages before a row (its `after`) exist, have the seeds of the row, and form no cycle.

    Raises:
        SettingsError: if a stage is invalid.
    """
    seen: list[str] = []
    row = grid.rows[name]
    while row.after is not None:
        seen.append(name)
        before = grid.rows.get(row.after)
        if before is None or before.train is None or row.train is None or row.after in seen:
            raise SettingsError(f"{path}: row {name}: `after: {row.after}` must name another row that is trained.")
        if lacking := sorted(set(row.seeds or grid.seeds) - set(before.seeds or grid.seeds)):
            raise SettingsError(
                f"{path}: row {name}: seed {lacking[0]} is missing in row {row.after}, its first stage."
            )
        name, row = row.after, before


def experiments(grid: Grid, data_dir: Path, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Experiment]:
    """Return an experiment for each row and seed of a grid, in the order of the file.

    `DATA/` in paths is replaced by `data_dir`. `rows` and `seeds` limit the experiments; empty: all.

    Raises:
        SettingsError: if a row is not in the grid, or settings are invalid.
    """
    for name in rows:
        if name not in grid.rows:
            raise SettingsError(f"--rows: {unknown_name('row', name, grid.rows)}")
    found = []
    for name in rows or grid.rows:
        row, where = grid.rows[name], f"grid {grid.name}, row {name}"
        measures = {"variant": "raw"} | (grid.measures if row.measures is None else row.measures)
        by_seed = row.train is not None or SEED in str([grid.train.get("model"), row.model])
        for seed in (row.seeds or grid.seeds) if by_seed else (None,):
            if seed is None or not seeds or seed in seeds:
                given = _given(grid, row, seed, where)
                found.append(
                    Experiment(
                        grid=grid.name,
                        row=name,
                        label=row.label or name,
                        seed=seed,
                        given=given | _earlier_stage(grid, row, seed, where),
                        settings=settings_from_dict(TrainSettings, below(given, data_dir), where),
                        after=row.after,
                        measures=settings_from_dict(Measures, measures, f"{where}: measures"),
                        stated=_stated(measures),
                        reference=row.reference or grid.reference,
                    )
                )
    if not found:
        raise SettingsError(f"--seeds: no row of grid {grid.name} has the seed {', '.join(map(str, seeds))}.")
    return found


def _stated(measures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the measures in a grid file by kind of measurement: kind → name and value of its fields of `Measures`.

    Kinds that the grid file does not request are omitted.
    """
    stated = {kind: {name: measures[name] for name in names if measures.get(name)} for kind, names in KINDS.items()}
    return {kind: values for kind, values in stated.items() if {*values} - {"variant"}}


def _given(grid: Grid, row: Row, seed: int | None, where: str) -> dict[str, Any]:
    """Return the settings of a row as in the grid file. `seed` sets the sample, initial adapter and data order."""
    values = merged_settings(merged_settings(grid.train, row.train or {}), {"model": row.model})
    data = values.get("data") or {}
    for part in (values, data, *data.get("sets", [])):
        for key in ("run_dir", "resume", "seed", "shuffle_seed"):
            if key in part:
                raise SettingsError(f"{where}: remove {key!r}; the program sets it from `seeds`.")
    model = values.get("model") or {}
    if SEED in str(model.get("path")):
        values = values | {"model": model | {"path": model["path"].replace(SEED, str(seed))}}
    if row.train is None:
        return {"model": values.get("model") or {}}
    drawn = {"shuffle_seed": seed}
    data = data | ({"sets": [each | drawn for each in data["sets"]]} if data.get("sets") else drawn)
    return values | {"seed": seed, "data": data}


def _earlier_stage(grid: Grid, row: Row, seed: int | None, where: str) -> dict[str, Any]:
    """Return the settings of the row that a trained row continues, and of the rows before, under the key `after`."""
    if row.train is None:
        return {}
    if row.after is None:
        return {"after": None}
    before = grid.rows[row.after]
    return {"after": _given(grid, before, seed, where) | _earlier_stage(grid, before, seed, where)}


def below(value: Any, data_dir: Path) -> Any:
    """Replace `DATA/` by the data folder in a string, list or dictionary, also in a list of datasets `DATA/a:2,DATA/b`.

    A file that exists in another format replaces the path, such as stsb/train.jsonl (`data get`) for stsb/train.tsv.
    """
    if isinstance(value, dict):
        return {key: below(item, data_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [below(item, data_dir) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(f"(?<![^,]){DATA}([^,:]*)", lambda path: str(data_file(data_dir / path[1])), value)


def changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the dotted names of the settings that differ between recorded settings and the settings of a grid.

    `after` is compared if it is recorded.
    """
    now = {name: value for name, value in now.items() if name != "after" or name in then}
    return sorted({line.split()[0] for line in (*differences(then, now), *differences(now, then))})
