"""Grid files: the rows of a results table, the settings they share, and what is measured on each.

    title, about       heading of the table and a short description
    train              training settings shared by all rows (those of `angle-llm train`)
    seeds              each trained row runs once per seed
    rows               name → settings that differ from `train`; `train: null` measures a model as it is, once, or once
                       per seed if its path contains {seed}
    measures           what is measured on every row
    reference          the row that others are compared with; a row may name another one

Two prefixes keep machine paths out of a grid: `DATA/` is the folder given as --data-dir, and a model path that starts
with `RUNS/` is the model that a row of a grid has trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from angle_llm.config import DataSource, TrainSettings
from angle_llm.settings_io import (
    SettingsError,
    changed_settings,
    merged_settings,
    settings_class,
    settings_from_dict,
    unknown_name,
)

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
    """Spearman of the encoder cut to its first layers and first dimensions: the mean over `tasks` of each cut."""

    tasks: tuple[str, ...]
    layers: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()


@settings_class
class Measures:
    """What is measured on an encoder. All values are × 100."""

    sts: tuple[str, ...] = ()
    """STS tasks by name, such as stsb."""
    variant: Literal["raw", "senteval"] = "raw"
    """Text of the STS tasks: raw, or senteval as in the published tables."""
    pairs: dict[str, DataSource] = field(default_factory=dict)
    """Name → scored pairs; the metric is Spearman between cosine and score."""
    saturation: DataSource | None = None
    """Scored pairs on which the gradient of each loss term is measured by the pair's cosine."""
    transfer: tuple[str, ...] = ()
    """Transfer tasks by name, such as mr."""
    transfer_limit: int | None = None
    """Largest number of training sentences of a transfer task."""
    transfer_drop_repeated: bool = False
    """Drop training examples whose text is also in the test split."""
    retrieval: str | tuple[str, ...] = ()
    """flickr30k, files of groups of texts, and BEIR folders (FOLDER@NAME: qrels/NAME.tsv)."""
    nested: NestedMeasure | None = None


@settings_class
class Row:
    """One row of the table."""

    train: dict[str, Any] | None = field(default_factory=dict)
    """Training settings that differ from the grid's. null: no training."""
    model: dict[str, Any] = field(default_factory=dict)
    """Model settings that differ from the grid's, also for rows without training."""
    label: str | None = None
    after: str | None = None
    """The row whose model (of the same seed) this row trains further: its first stage."""
    seeds: tuple[int, ...] | None = None
    measures: dict[str, Any] | None = None
    reference: str | None = None


@settings_class
class Grid:
    """A table of experiments."""

    title: str
    about: str = ""
    train: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (42,)
    rows: dict[str, Row] = field(default_factory=dict)
    measures: dict[str, Any] = field(default_factory=dict)
    """Fields of `Measures`."""
    reference: str | None = None
    name: str = ""
    """Stem of the file name."""


@settings_class
class Experiment:
    """One row with one seed: what to train, and what to measure on the result."""

    grid: str
    row: str
    label: str
    seed: int | None
    """None: the row has one model, which is not trained."""
    given: dict[str, Any]
    """Settings as the grid states them; recorded with the result, to recognise a result of other settings."""
    settings: TrainSettings
    """The same, complete and with real paths. Only `model` counts for a row without training."""
    after: str | None
    measures: Measures
    stated: dict[str, dict[str, Any]]
    """Kind → what the grid states about it; recorded with the result, to recognise measurements on other data."""
    reference: str | None

    @property
    def is_trained(self) -> bool:
        """Whether the row trains its model."""
        return "seed" in self.given

    @property
    def name(self) -> str:
        """Folder name: `in-batch-seed42`, or the row alone without a seed."""
        return self.row if self.seed is None else f"{self.row}-seed{self.seed}"

    @property
    def key(self) -> tuple[str, str, str]:
        """Grid, row and seed, as in the columns of the results file."""
        return (self.grid, self.row, "" if self.seed is None else str(self.seed))


def load_grid(path: str | Path) -> Grid:
    """Read a grid file.

    Raises:
        SettingsError: if the file is missing or malformed, or a row refers to a row or seed that does not exist.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise SettingsError(f"no grid file at {path}. Give the path of a YAML file, such as recipes/grids/nli.yaml.")
    try:
        grid = settings_from_dict(Grid, yaml.safe_load(path.read_text(encoding="utf-8")), where=str(path))
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
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
    """Follow `after` to the first stage: each stage exists, is trained, has the seeds, and occurs once."""
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
    """Return the rows × seeds in the order of the file, with paths below `data_dir`; `rows` and `seeds` select some.

    Raises:
        SettingsError: for a row that is not in the grid, or settings that cannot be used.
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
                        given=given,
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
    stated = {kind: {name: measures[name] for name in names if measures.get(name)} for kind, names in KINDS.items()}
    return {kind: values for kind, values in stated.items() if {*values} - {"variant"}}


def _given(grid: Grid, row: Row, seed: int | None, where: str) -> dict[str, Any]:
    """Return the settings of a row as stated in the grid. The seed sets sample, initial adapter and order of training."""
    values = merged_settings(merged_settings(grid.train, row.train or {}), {"model": row.model})
    data = values.get("data") or {}
    for part in (values, data, *data.get("sets", [])):
        for key in ("run_dir", "resume", "seed", "shuffle_seed"):
            if key in part:
                raise SettingsError(f"{where}: remove {key!r}; the runner sets it from `seeds`.")
    model = values.get("model") or {}
    if SEED in str(model.get("path")):
        values = values | {"model": model | {"path": model["path"].replace(SEED, str(seed))}}
    if row.train is None:
        return {"model": values.get("model") or {}}
    drawn = {"shuffle_seed": seed}
    data = data | ({"sets": [each | drawn for each in data["sets"]]} if data.get("sets") else drawn)
    return values | {"seed": seed, "data": data}


def below(value: Any, data_dir: Path) -> Any:
    """Return a plain value with `DATA/` replaced by the data folder, also in a list of sets `DATA/a:2,DATA/b`."""
    if isinstance(value, dict):
        return {key: below(item, data_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [below(item, data_dir) for item in value]
    return re.sub(f"(?<![^,]){DATA}", lambda _: f"{data_dir}/", value) if isinstance(value, str) else value


def changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the dotted names of the settings that differ, in either direction."""
    return sorted({*changed_settings(then, now), *changed_settings(now, then)})
