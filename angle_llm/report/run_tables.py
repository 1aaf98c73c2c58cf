"""How the rows were run: the settings that tell them apart, those they share, commands, times, machines, versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from angle_llm.config import TrainSettings, settings_to_dict
from angle_llm.experiments import Result
from angle_llm.experiments.provenance import grid_command
from angle_llm.report.document import Block, Cell, Commands, Folded, Group, Notice, Paragraph, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.numbers import PLAIN, number

_OF_THE_RUN = {"run_dir", "seed", "resume", "data.shuffle_seed", "checkpoint.every_steps", "checkpoint.keep"}
"""Settings that tell nothing of what a row is."""
_OF_ONE_SET = {"path", "format", "limit", "columns", "where", "score_range"}
_ALWAYS = ("model.path", "model.prompt", "model.pooling", "data.path", "data.limit", "batch_size", "epochs")
"""Shared settings that are told even where they are the program's defaults."""


def run_blocks(grid: MaterialGrid) -> list[Block]:
    """Settings, runs, commands of a grid with results."""
    differing, shared = _settings(grid.rows)
    blocks: list[Block] = []
    if differing:
        body = [(Cell(row.label), *(Cell(_told(row, key)) for key in differing)) for row in grid.rows]
        blocks.append(
            Table(
                "What differs between the rows",
                "Settings by their names in `angle-llm train`; – : none, or the row is not trained.",
                ("row", *differing),
                (Group(tuple(body)),),
                words=1 + len(differing),
            )
        )
    how: list[Block] = []
    if shared:
        told = "; ".join(f"`{key}` {value}" for key, value in shared.items())
        how.append(Paragraph(f"All rows share: {told}."))
    how += [_runs(grid.rows), *_versions(grid.rows)]
    commands = list(dict.fromkeys(f"{one.result.command} --again" for row in grid.rows for one in row.results))
    lead = "Each row again, one command a result (DATA stands for the data directory; a row is trained where its model is not):"
    how.append(Commands(lead, tuple(commands)))
    blocks.append(Folded("How the rows were run: settings, times, machines, versions, commands", tuple(how)))
    return blocks


def missing_blocks(grid: MaterialGrid) -> list[Block]:
    """What a grid lacks, and the command that brings it."""
    if not grid.rows:
        return [Notice("Not run yet.", "missing"), Commands("To run it:", (grid_command(grid.name),))]
    if grid.missing:
        done = len(grid.expected) - len(grid.missing)
        text = f"{done} of {len(grid.expected)} experiments have results. Missing: {', '.join(grid.missing)}."
        return [Notice(text, "missing"), Commands("To run what is missing:", (grid_command(grid.name),))]
    return []


def _of(row: MaterialRow) -> dict[str, Any]:
    """The flat settings of a row's first result, without those of a data set that a list of sets stands for."""
    settings = row.results[0].result.settings
    data = settings.get("data", {})
    if data.get("sets"):
        settings = settings | {"data": {key: value for key, value in data.items() if key not in _OF_ONE_SET}}
    told = {key: value for key, value in settings.items() if key != "trained"}  # which model of another grid it was
    return {key: value for key, value in _flat(told) if key not in _OF_THE_RUN}


def _told(row: MaterialRow, key: str) -> str:
    """A setting of a row in words. One that is newer than the result was at its default."""
    trained = row.results[0].result.train is not None
    default = _defaults().get(key) if trained and key.rpartition(".")[2] not in _OF_ONE_SET else None
    return _plain(_of(row).get(key, default))


def _settings(rows: Sequence[MaterialRow]) -> tuple[list[str], dict[str, str]]:
    """Keys that differ between rows, and those that are shared and worth telling. What a trained row does not have is a
    difference too; a row without training has no such settings at all."""
    keys = list(dict.fromkeys(key for row in rows for key in _of(row)))
    seen = {
        key: {_told(row, key) for row in rows if row.results[0].result.train is not None or key in _of(row)}
        for key in keys
    }
    defaults = {key: _plain(value) for key, value in _defaults().items()}
    differing = [key for key in keys if len(seen[key]) > 1]
    shared = {key: next(iter(seen[key])) for key in keys if len(seen[key]) == 1}
    return differing, {
        key: value for key, value in shared.items() if key in _ALWAYS or value not in ("–", defaults.get(key))
    }


@cache
def _defaults() -> dict[str, Any]:
    return dict(_flat(settings_to_dict(TrainSettings())))


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def _plain(value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return " ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _runs(rows: Sequence[MaterialRow]) -> Table:
    body = []
    for row in rows:
        for one in row.results:
            result, train = one.result, one.result.train or {}
            figures = [
                _count(train.get("steps")),
                _count(train.get("seconds")),
                _loss(train.get("first_loss")),
                _loss(train.get("last_loss")),
                _count(train.get("computed_tokens")),
            ]
            seed = str(result.seed) if result.train is not None else "none"
            body.append((Cell(row.label), Cell(seed), Cell(result.date, _code(result)), Cell(result.machine), *figures))
    return Table(
        "Training runs",
        "Steps and seconds of training alone, on machines that other work shared, so the seconds compare nothing; the loss is "
        "the mean over the first and over the last tenth of the steps; tokens are those really computed. – : not trained.",
        ("row", "seed", "date", "machine", "steps", "seconds", "first loss", "last loss", "tokens"),
        (Group(tuple(body)),),
        words=4,
    )


def _code(result: Result) -> str:
    """The commit it was run with, where the result tells."""
    _, _, commit = result.versions.get("angle_llm", "").partition(" at ")
    return f"commit {commit}" if commit else ""


def _versions(rows: Sequence[MaterialRow]) -> list[Block]:
    told: dict[str, list[str]] = {}
    for row in rows:
        for one in row.results:
            versions = ", ".join(
                f"{name} {version.partition(' at ')[0]}" for name, version in one.result.versions.items()
            )
            told.setdefault(versions, []).append(one.result.name)
    if len(told) == 1:
        return [Paragraph(f"Versions: {next(iter(told))}.")]
    return [Paragraph(f"Versions of {', '.join(names)}: {versions}.") for versions, names in told.items()]


def _count(value: float | None) -> Cell:
    return PLAIN if value is None else Cell(f"{value:,.0f}")


def _loss(value: float | None) -> Cell:
    return PLAIN if value is None else Cell(number(value, 4))
