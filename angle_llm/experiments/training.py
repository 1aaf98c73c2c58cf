"""The training run of an experiment: RUNS/GRID/NAME."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from angle_llm.config import CheckpointSettings, save_settings
from angle_llm.experiments.grid import RUNS, Experiment, Grid, experiments
from angle_llm.experiments.provenance import grid_command


class ExperimentError(RuntimeError):
    """An experiment that could not be finished."""


def folder_of(experiment: Experiment, runs: Path) -> Path:
    """Where an experiment's run is."""
    return runs / experiment.grid / experiment.name


def model_here(model: str, runs: Path) -> str:
    """A model's path or name, with what RUNS/ stands for.

    Raises:
        ExperimentError: if nothing is there, with the command that trains it.
    """
    if not model.startswith(RUNS):
        return model
    path = runs / model.removeprefix(RUNS)
    if not path.is_dir():
        row = re.fullmatch(r"([^/]+)/([^/]+)-seed(\d+)/model", model.removeprefix(RUNS))
        command = row and f"{grid_command(row[1])} --rows {row[2]} --seeds {row[3]} --train-only"
        raise ExperimentError(
            f"{path} is not there: it is what a row of another grid leaves."
            + (f" To train it: {command}" if command else f" A grid names it as {RUNS}GRID/ROW-seedN/model.")
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
    if experiment.after is not None:
        (before,) = experiments(grid, data_dir, [experiment.after], [experiment.seed])
        start = folder_of(before, runs) / "model"
        with _alone_in(start.parent):  # whoever trains it now is waited for
            there = start.is_dir()
        if not there:
            train(grid, before, data_dir, runs, launch)
        run = replace(run, model=replace(run.model, path=str(start.resolve())))
    else:
        run = replace(run, model=replace(run.model, path=model_here(run.model.path, runs)))
    with _alone_in(folder):
        print(f"  training {experiment.name}", flush=True)
        config = folder / "config.yaml"
        save_settings(run, config)
        launcher = shlex.split(launch) or [sys.executable]
        code = run_to_its_end([*launcher, "-m", "angle_llm.cli", "train", "--config", str(config)])
        if code:
            raise ExperimentError(
                f"training {experiment.name} ended with exit code {code}; its messages stand above. Its checkpoints "
                f"are in {folder}; the same command goes on from there."
            )
    return folder / "model"


def run_to_its_end(command: list[str]) -> int:
    """Runs a command and returns its exit code. SIGINT, SIGTERM and SIGHUP end this program once what it runs has ended.

    The first is passed on as SIGTERM, which asks a training run to stop when it has written a checkpoint; later ones as they
    are, so a second SIGINT ends it at once. `subprocess.run` would kill it a moment after Ctrl-C, before its checkpoint, and
    SIGTERM would leave it running by itself. The command gets a process group of its own, for launchers that pass nothing on;
    torch's launcher of several processes passes on, and gives them 30 seconds.

    Raises:
        SystemExit: after such a signal, with 128 and its number.
    """
    asked: list[int] = []
    before: dict[signal.Signals, Any] = {}
    process: subprocess.Popen[bytes] | None = None

    def tell(number: int) -> None:
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def pass_on(number: int, _: Any) -> None:
        asked.append(number)
        tell(number if len(asked) > 1 else signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():  # no other may install handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
    try:
        process = subprocess.Popen(command, start_new_session=True)
        if asked:  # while it was being started
            tell(signal.SIGTERM)
        code = process.wait()
        while asked and _is_alive(process.pid):  # its launcher has ended first
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if asked:
        raise SystemExit(128 + asked[0])
    return code


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two rows may want the same first stage at one time: the second waits, and finds it trained."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"  waiting for another process that trains in {folder}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def training_facts(folder: Path) -> dict[str, Any]:
    """Of a finished run: how long it was, and where the loss began and ended. Nothing without its metrics."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return {}
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    tenth = max(1, len(steps) // 10)
    return {
        "steps": len(steps),
        "seconds": round(sum(line["seconds"] for line in steps), 1),
        "first_loss": round(sum(line["loss"] for line in steps[:tenth]) / tenth, 4),
        "last_loss": round(sum(line["loss"] for line in steps[-tenth:]) / tenth, 4),
        "computed_tokens": sum(line["computed_tokens"] for line in steps),
    }
