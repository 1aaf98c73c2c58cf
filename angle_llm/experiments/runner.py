"""Runs what of a grid has not been run yet: trains, measures, keeps one result file for each experiment.

    grid ──► experiments ──► train (a process of its own, goes on where it was killed) ──► measure ──► RESULTS/GRID/NAME.json

Killed anywhere, the same command goes on: what has a result is not run again, and a measure that a result lacks is added.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from angle_llm.experiments.comparisons import comparisons
from angle_llm.experiments.grid import DATA, Experiment, Grid, GridError, experiments, load_grid
from angle_llm.experiments.measure import KINDS, measure
from angle_llm.experiments.results import COMPARISONS, Result, ResultError
from angle_llm.files import plain, write_json
from angle_llm.settings import CheckpointSettings, changed_settings, save_settings, settings_to_dict

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "scipy")


class ExperimentError(RuntimeError):
    """An experiment that could not be finished."""


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
    train_only: bool = False
    """Train and leave measuring for later, by the same command without this."""
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
    for number, experiment in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {grid.name}: {experiment.name}", flush=True)
        result = _run(grid, experiment, settings, data_dir)
        if result is not None:
            results.append(result)
    if grid.reference is not None and not settings.train_only:
        path = settings.results / grid.name / COMPARISONS
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        found = comparisons(grid.reference, _measured(grid, settings, data_dir), settings.runs, known)
        write_json(path, plain(found))
    return results


def _measured(grid: Grid, settings: RunnerSettings, data_dir: Path) -> list[tuple[Experiment, Result]]:
    """All experiments of the grid whose result is of the settings and the sets that the grid names now."""
    measured = []
    for experiment in experiments(grid, data_dir):
        try:
            result = _known(experiment, settings)
        except ResultError as error:  # what was run now must not be lost over it
            print(f"not compared: {error}")
            continue
        told = portable(settings_told(experiment), data_dir)
        if result is None or changed_settings(result.settings, told):
            continue
        if "sts" not in missing_measures(experiment, result, data_dir):
            measured.append((experiment, result))
    return measured


def _run(grid: Grid, experiment: Experiment, settings: RunnerSettings, data_dir: Path) -> Result | None:
    known = _known(experiment, settings)
    told = portable(settings_told(experiment), data_dir)
    if known is not None and (changed := changed_settings(known.settings, told)):
        path = settings.results / grid.name / f"{experiment.name}.json"
        raise ExperimentError(
            f"{path} was made with other settings than the grid has now: {', '.join(changed)}. Remove it and the run in "
            f"{_folder(experiment, settings)} to have it made anew, or give the row another name."
        )
    missing = missing_measures(experiment, known, data_dir)
    if known is not None and not missing:
        return known
    model = _train(experiment, settings) if experiment.trains else experiment.settings.model.path
    if settings.train_only:
        return None
    folder = _folder(experiment, settings)
    if known is not None and experiment.trains and known.train != _training_facts(folder):
        # Of another model, if only by its last digits or its seconds: a file is of one.
        known, missing = None, missing_measures(experiment, None, data_dir)
    used = experiment.settings.model
    figures = measure(
        experiment.measures,
        missing,
        str(model),
        as_saved=experiment.trains,
        model_settings=used,
        data_dir=data_dir,
        device=settings.device,
        keep_in=folder,
    )
    result = known or Result(
        grid=grid.name,
        row=experiment.row,
        label=experiment.label,
        seed=experiment.seed,
        command=_command(experiment, settings),
        date=datetime.now(timezone.utc).date().isoformat(),
        machine=machine(),
        versions={name: version(name) for name in ("angle_llm", *_PACKAGES)},
        settings=told,
        train=_training_facts(folder) if experiment.trains else None,
    )
    result = replace(result, label=experiment.label, measures=result.measures | portable(figures, data_dir))
    result.write(settings.results)
    return result


def settings_told(experiment: Experiment) -> dict[str, Any]:
    """The settings that decide what was run, and the row whose model it went on from."""
    if not experiment.trains:
        return {"model": settings_to_dict(experiment.settings.model)}
    return settings_to_dict(replace(experiment.settings, run_dir="")) | {"after": experiment.after}


def _known(experiment: Experiment, settings: RunnerSettings) -> Result | None:
    path = settings.results / experiment.grid / f"{experiment.name}.json"
    return Result.read(path) if path.is_file() else None


def missing_measures(experiment: Experiment, known: Result | None, data_dir: Path) -> list[str]:
    """The kinds of measure that are asked for and have no figures yet, or figures on other sets."""
    done = known.measures if known is not None else {}
    asked = {kind.name: portable(kind.asked(experiment.measures), data_dir) for kind in KINDS}
    return [name for name, what in asked.items() if what and what != (done.get(name) or {}).get("asked")]


def _folder(experiment: Experiment, settings: RunnerSettings) -> Path:
    return settings.runs / experiment.grid / experiment.name


def _train(experiment: Experiment, settings: RunnerSettings) -> Path:
    """Trains in a process of its own, which a launcher may multiply; goes on from a checkpoint if there is one."""
    folder = _folder(experiment, settings)
    run = replace(experiment.settings, run_dir=str(folder), resume="auto")
    if not run.checkpoint.every_steps:
        run = replace(run, checkpoint=CheckpointSettings(every_steps=25, keep=1))
    if experiment.after is not None:
        stage_one = settings.runs / experiment.grid / f"{experiment.after}-seed{experiment.seed}" / "model"
        if not stage_one.is_dir():
            raise ExperimentError(
                f"{experiment.name} goes on from {stage_one}, which is not there. Run row {experiment.after} first."
            )
        run = replace(run, model=replace(run.model, path=str(stage_one.resolve())))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    save_settings(run, config)
    launcher = shlex.split(settings.launch) or [sys.executable]
    done = subprocess.run([*launcher, "-m", "angle_llm.cli", "train", "--config", str(config)], check=False)
    if done.returncode:
        raise ExperimentError(
            f"training {experiment.name} ended with exit code {done.returncode}; its messages stand above. Its checkpoints are "
            f"in {folder}; the same command goes on from there."
        )
    return folder / "model"


def _training_facts(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    tenth = max(1, len(steps) // 10)
    return {
        "steps": len(steps),
        "seconds": round(sum(line["seconds"] for line in steps), 1),
        "first_loss": round(sum(line["loss"] for line in steps[:tenth]) / tenth, 4),
        "last_loss": round(sum(line["loss"] for line in steps[-tenth:]) / tenth, 4),
        "computed_tokens": sum(line["computed_tokens"] for line in steps),
    }


def _command(experiment: Experiment, settings: RunnerSettings) -> str:
    seed = f" --seeds {experiment.seed}" if experiment.trains else ""
    return f"python recipes/ablation.py --grid recipes/grids/{settings.grid.name} --data-dir DATA --rows {experiment.row}{seed}"


def portable(value: Any, data_dir: Path) -> Any:
    """Paths below the data directory as DATA/…, so that a result tells nothing of a machine."""
    if isinstance(value, dict):
        return {key: portable(item, data_dir) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, data_dir) for item in value]
    if isinstance(value, str) and value.startswith(f"{data_dir}/"):
        return DATA + value.removeprefix(f"{data_dir}/")
    return value


def machine() -> str:
    """What it ran on, in words."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU thread(s), {platform.machine()}"
