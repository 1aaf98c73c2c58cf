"""The training run of an experiment: RUNS/GRID/NAME."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from angle_llm.experiments.grid import RUNS, Experiment, Grid, experiments
from angle_llm.experiments.provenance import grid_command
from angle_llm.settings import CheckpointSettings, save_settings


class ExperimentError(RuntimeError):
    """An experiment that could not be finished."""


def folder_of(experiment: Experiment, runs: Path) -> Path:
    """Where an experiment's run is."""
    return runs / experiment.grid / experiment.name


def model_here(model: str, runs: Path) -> str:
    """A model's path or name, with what RUNS/ stands for."""
    if not model.startswith(RUNS):
        return model
    path = runs / model.removeprefix(RUNS)
    if not path.is_dir():
        grid, row = path.parts[-3:-1] if path.name == "model" else ("GRID", "ROW-seedN")
        name, _, seed = row.rpartition("-seed")
        raise ExperimentError(
            f"{path} is not there: it is what another row leaves. To train it: {grid_command(grid)} --rows {name} "
            f"--seeds {seed} --train-only"
        )
    return str(path.resolve())


def train(grid: Grid, experiment: Experiment, data_dir: Path, runs: Path, launch: str) -> Path:
    """Trains in a process of its own, which a launcher may multiply; goes on from a checkpoint if there is one.

    A row that goes on from another one's model has that trained first, if it is not here. Returns the model's folder.

    Raises:
        ExperimentError: for training that failed.
    """
    folder = folder_of(experiment, runs)
    run = replace(experiment.settings, run_dir=str(folder), resume="auto")
    if not run.checkpoint.every_steps:
        run = replace(run, checkpoint=CheckpointSettings(every_steps=25, keep=1))
    start = model_here(run.model.path, runs)
    if experiment.after is not None:
        stage_one = runs / experiment.grid / f"{experiment.after}-seed{experiment.seed}" / "model"
        if not stage_one.is_dir():
            print(f"  {experiment.name} goes on from {stage_one}, which is not here: training that first", flush=True)
            before = experiments(grid, data_dir, [experiment.after], [experiment.seed])
            if not before:
                raise ExperimentError(
                    f"{experiment.name} goes on from row {experiment.after}, which has no seed {experiment.seed}."
                )
            train(grid, before[0], data_dir, runs, launch)
        start = str(stage_one.resolve())
    run = replace(run, model=replace(run.model, path=start))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    save_settings(run, config)
    launcher = shlex.split(launch) or [sys.executable]
    done = subprocess.run([*launcher, "-m", "angle_llm.cli", "train", "--config", str(config)], check=False)
    if done.returncode:
        raise ExperimentError(
            f"training {experiment.name} ended with exit code {done.returncode}; its messages stand above. Its checkpoints are "
            f"in {folder}; the same command goes on from there."
        )
    return folder / "model"


def training_facts(folder: Path) -> dict[str, Any]:
    """Of a finished run: how long it was, and where the loss began and ended."""
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
