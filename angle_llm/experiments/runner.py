"""Runs what of a grid has not been run yet: trains, measures, keeps one result file for each experiment.

    grid ──► experiments ──► train (a process of its own, goes on where it was killed) ──► measure ──► RESULTS/GRID/NAME.json

Killed anywhere, the same command goes on: what has a result is not run again, and a measure that a result lacks is added.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angle_llm.config import TrainSettings, changed_settings, merged_settings, settings_to_dict
from angle_llm.evaluate import PairScores
from angle_llm.experiments.comparisons import comparisons, reference_of
from angle_llm.experiments.grid import Experiment, Grid, GridError, Measures, experiments, load_grid
from angle_llm.experiments.measure import KINDS, each_set, measure, sts_tasks
from angle_llm.experiments.provenance import grid_command, machine, portable, versions
from angle_llm.experiments.results import COMPARISONS, Result, ResultError
from angle_llm.experiments.scores import Gold, load_scores, scores_path
from angle_llm.experiments.training import ExperimentError, folder_of, model_here, train, training_facts
from angle_llm.io import plain, write_json


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """A table of experiments: trains and measures what has no result yet."""

    grid: Path
    """The grid, such as recipes/grids/ablation.yaml."""
    data_dir: Path
    """The folder that DATA/ in a grid stands for."""
    results: Path = Path("docs/results")
    """Where results are kept, a small JSON file for each row and seed."""
    runs: Path = Path("runs")
    """Where models are kept: RUNS/GRID/ROW-seedN."""
    rows: tuple[str, ...] = ()
    """Only these rows."""
    seeds: tuple[int, ...] = ()
    """Only these seeds."""
    launch: str = ""
    """What starts a training process, such as "accelerate launch --num_processes 8". Empty: this Python."""
    device: str | None = None
    """Where to measure. None: the best there is."""
    again: bool = False
    """Measure the chosen rows though they have results, and train those whose models are not in RUNS. To have one trained
    anew that is, remove its folder."""
    train_only: bool = False
    """Train those of the chosen rows whose models are not in RUNS, with or without results, and measure nothing."""
    list: bool = False
    """Tell what has a result and what has not, and do nothing."""


def run_grid(settings: RunnerSettings) -> list[Result]:
    """Runs a grid's missing experiments one after another; returns all results of those chosen.

    Raises:
        GridError: for a grid that cannot be run; before anything is.
        ExperimentError: for a training run that failed; what is done stays.
    """
    if not settings.data_dir.expanduser().is_dir():
        raise GridError(f"there is no data directory at {settings.data_dir}. README.md tells what it holds.")
    grid = load_grid(settings.grid)
    data_dir = settings.data_dir.expanduser().resolve()
    chosen = experiments(grid, data_dir, settings.rows, settings.seeds)
    if settings.list:
        for experiment in chosen:
            missing = missing_measures(experiment, _known(experiment, settings), data_dir)
            print(f"{experiment.name:40} {'missing: ' + ', '.join(missing) if missing else 'has its result'}")
        return []
    results = []
    made_by = versions()  # before training: the checkout may be another by its end
    try:
        for number, experiment in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {grid.name}: {experiment.name}", flush=True)
            result = _run(grid, experiment, settings, data_dir, made_by)
            if result is not None:
                results.append(result)
    except Exception:
        _compare(grid, settings, data_dir)  # what was measured before another row failed
        raise
    _compare(grid, settings, data_dir)
    return results


def _compare(grid: Grid, settings: RunnerSettings, data_dir: Path) -> None:
    """Writes the grid's comparisons."""
    if settings.train_only or not any(reference_of(grid, name) for name in grid.rows):
        return
    path = settings.results / grid.name / COMPARISONS
    known = None
    if path.is_file():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            known = {"reference": known["reference"], "rows": dict(known["rows"])}
        except (ValueError, KeyError, TypeError) as error:
            print(f"nothing was compared: {path} is damaged ({error!r}). Mend it or remove it, and run this again.")
            return
    gold = GoldScores(data_dir)

    def scores(experiment: Experiment) -> dict[str, PairScores] | None:
        return load_scores(
            scores_path(settings.results, experiment.grid, experiment.name), lambda: gold.of(experiment.measures)
        )

    measured = _measured(grid, settings, data_dir)
    if measured is None:
        return
    found = comparisons(grid, measured, scores, known)
    if found["rows"]:
        write_json(path, plain(found))


class GoldScores:
    """Gold scores of tasks that are here, each read once."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._known: dict[str, NDArray[np.float64] | None] = {}

    def of(self, measures: Measures) -> Gold:
        """Task → gold scores. A set that is not here, or cannot be read, is told and left out."""
        gold = {}
        for one in each_set(measures):
            key = repr(one)
            if key not in self._known:
                self._known[key] = self._read(one)
            scores = self._known[key]
            if scores is not None:
                gold[(*one.sts, *one.pairs)[0]] = scores
        return gold

    def _read(self, one: Measures) -> NDArray[np.float64] | None:
        try:
            (task,) = sts_tasks(one, self._data_dir)
        except (OSError, ValueError) as error:
            print(f"not compared pair by pair: {error}")
            return None
        return np.array([pair.score for pair in task.pairs])


def _measured(grid: Grid, settings: RunnerSettings, data_dir: Path) -> list[tuple[Experiment, Result]] | None:
    """All experiments of the grid whose result is of the settings and the sets that the grid names now; None if one of the
    results cannot be read."""
    measured = []
    for experiment in experiments(grid, data_dir):
        try:
            result = _known(experiment, settings)
        except ResultError as error:  # what was run now must not be lost over it, nor what is known of the others
            print(f"nothing was compared: {error}")
            return None
        told = portable(settings_told(experiment), data_dir)
        if result is None or changed(result, told):
            continue
        if "sts" not in missing_measures(experiment, result, data_dir):
            measured.append((experiment, result))
    return measured


def _run(
    grid: Grid, experiment: Experiment, settings: RunnerSettings, data_dir: Path, made_by: dict[str, str]
) -> Result | None:
    folder = folder_of(experiment, settings.runs)
    if settings.train_only:
        if experiment.trains:
            train(grid, experiment, data_dir, settings.runs, settings.launch)
        return None
    known = None if settings.again else _known(experiment, settings)
    told = portable(settings_told(experiment), data_dir)
    if known is not None and (other := changed(known, told)):
        path = settings.results / grid.name / f"{experiment.name}.json"
        raise ExperimentError(
            f"{path} was made with other settings than the grid has now: {', '.join(other)}. Remove it and the run in "
            f"{folder} to have it made anew, or give the row another name."
        )
    missing = missing_measures(experiment, known, data_dir)
    if known is not None and not missing:
        return known
    if experiment.trains:
        model = str(train(grid, experiment, data_dir, settings.runs, settings.launch))
    else:
        model = model_here(experiment.settings.model.path, settings.runs)
        if model != experiment.settings.model.path:
            told |= {"trained": training_facts(Path(model).parent)}  # which model that was
    facts = training_facts(folder) if experiment.trains else None
    if known is not None and (known.train, known.settings.get("trained")) != (facts, told.get("trained")):
        # Of another model, if only by its last digits or its seconds: a file is of one.
        known, missing = None, missing_measures(experiment, None, data_dir)
    result = known or Result(
        grid=grid.name,
        row=experiment.row,
        label=experiment.label,
        seed=experiment.seed,
        command=_command(experiment, settings),
        date=datetime.now(timezone.utc).date().isoformat(),
        machine=machine(),
        versions=made_by,
        settings=told,
        train=facts,
    )
    if not missing:  # a first stage that is measured by none
        result.write(settings.results)
        return result
    figures = measure(
        experiment.measures,
        missing,
        model,
        as_saved=experiment.trains,
        model_settings=experiment.settings.model,
        data_dir=data_dir,
        device=settings.device,
        scores=scores_path(settings.results, grid.name, experiment.name),
    )
    for kind, of_kind in figures:
        measures = result.measures | {kind: portable(of_kind, data_dir)}
        result = replace(result, label=experiment.label, measures=measures)
        result.write(settings.results)  # each kind at once: the next may fail
    return result


def settings_told(experiment: Experiment) -> dict[str, Any]:
    """The settings that decide what was run, and the row whose model it went on from."""
    if not experiment.trains:
        return {"model": settings_to_dict(experiment.settings.model)}
    return settings_to_dict(replace(experiment.settings, run_dir="")) | {"after": experiment.after}


def changed(result: Result, told: dict[str, Any]) -> list[str]:
    """The settings a result was not made with, though the grid has them now."""
    defaults = settings_to_dict(TrainSettings())
    trained = result.train is not None
    defaults = defaults | {"after": None} if trained else {"model": defaults["model"]}
    return changed_settings(merged_settings(defaults, result.settings), told)


def _known(experiment: Experiment, settings: RunnerSettings) -> Result | None:
    path = settings.results / experiment.grid / f"{experiment.name}.json"
    return Result.read(path) if path.is_file() else None


def missing_measures(experiment: Experiment, known: Result | None, data_dir: Path) -> list[str]:
    """The kinds of measure that are asked for and have no figures yet, or figures on other sets."""
    done = known.measures if known is not None else {}
    asked = {kind.name: portable(kind.asked(experiment.measures), data_dir) for kind in KINDS}
    return [name for name, what in asked.items() if what and what != (done.get(name) or {}).get("asked")]


def _command(experiment: Experiment, settings: RunnerSettings) -> str:
    seed = f" --seeds {experiment.seed}" if experiment.trains else ""
    return f"{grid_command(settings.grid.stem)} --rows {experiment.row}{seed}"
