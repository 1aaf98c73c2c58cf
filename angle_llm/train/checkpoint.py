"""Checkpoints: the state of a run between two optimizer steps, in `checkpoints/step-000120/`.

    weights.safetensors      trainable weights by parameter name
    optimizer.safetensors    optimizer state: PARAMETER/exp_avg, …
    manifest.json            progress, random generators of every rank, size and SHA-256 of the other files

Later batches and learning rates follow from the settings and the step. `resumable` handles kills and damage.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from angle_llm.config import TrainSettings
from angle_llm.io import FolderError, log, plain
from angle_llm.resumable import ResumableFolder
from angle_llm.settings_io import SettingsError
from angle_llm.train.memory import TokenBudget
from angle_llm.train.rng import random_state, seed_rank, set_random_state
from angle_llm.train.strategies import DataParallelStrategy

FOLDER = "checkpoints"
FILES = ("weights", "optimizer")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file and what to do."""


class SavedWeightsError(RuntimeError):
    """A file does not contain the weights that were saved in it."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    evaluated: int | None = None
    """The step of the last evaluation."""
    start: dict[str, float] | None = None
    """Metrics before the first step, the deciding one first."""
    best: dict[str, float] | None = None
    """Metrics of the best evaluation after it, those of `model/`."""
    waited: int = 0
    """Number of evaluations since the best one."""
    budget: TokenBudget | None = None
    """Token budget, as set or chosen, and halved where memory ran out; None without a checkpoint."""


class Checkpoints:
    """The checkpoints of a run. Rank 0 reads and writes the files; all ranks call `resume` and `write`."""

    def __init__(
        self, settings: TrainSettings, identity: Mapping[str, str | None], strategy: DataParallelStrategy
    ) -> None:
        """`identity` is equal for runs that compute the same; checkpoints of another one are refused."""
        self.folder = settings.run_path / FOLDER
        self._settings, self._strategy = settings, strategy
        self._parts = ResumableFolder(self.folder, identity, option="--run-dir")

    def resume(self) -> Progress:
        """Load the checkpoint that `--resume` selects, and remove later ones. Without one, return `Progress()`.

        Raises:
            CheckpointError: if the selected checkpoint is damaged, or all are.
            FolderError: if the checkpoints are of another run.
            SettingsError: if `--resume` names no checkpoint.
        """
        strategy, processes = self._strategy, self._strategy.processes
        tensors: dict[str, dict[str, Tensor]] = {}  # on rank 0
        values = processes.from_main(lambda: self._find(tensors))
        if values is None:
            return Progress()
        strategy.load_state(*(processes.broadcast(tensors.get(name)) for name in FILES))
        progress, states = values["progress"], values["random"]
        if processes.rank < len(states):
            set_random_state(states[processes.rank], processes.device)
        else:  # the run has more ranks now
            seed_rank(self._settings.seed, processes.rank, progress["step"])
        budget = progress["budget"]
        for name in ("start", "best"):  # JSON has no NaN
            if progress[name] is not None:
                progress[name] = {key: math.nan if value is None else value for key, value in progress[name].items()}
        return Progress(**{**progress, "budget": None if budget is None else TokenBudget(**budget)})

    def _find(self, tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any] | None:
        """Return the values of the checkpoint to resume from and add its tensors to `tensors`; None without one."""
        for path in self.folder.glob(".step-*"):  # incomplete, of a killed run
            shutil.rmtree(path, ignore_errors=True)
        names, resume = checkpoint_names(self.folder), self._settings.resume
        if resume == "never":
            if names:
                log(f"starting over: removing the checkpoints up to {names[-1]} from {self.folder}")
            self._parts.clear(names)
            return None
        if resume != "auto":
            names = [named_checkpoint(self.folder, resume)]
        elif not names:
            log(f"starting at step 1: --resume auto found no checkpoint in {self.folder}")
            return None
        damaged: list[str] = []
        with self._parts:
            for name in reversed(names):
                try:
                    values = self._read(name, tensors)
                except (FolderError, OSError) as error:
                    damaged.append(str(error))
                    continue
                for problem in damaged:
                    log(f"warning: {problem}. Resuming from {name}.")
                self._retain(_step_of(name))
                return values
        raise CheckpointError(
            f"no checkpoint is complete: {'; '.join(damaged)}. Restore the files, or start over with --resume never."
        )

    def _read(self, name: str, tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        values = self._parts.check(name)
        tensors |= {file: load_file(self.folder / name / f"{file}.safetensors") for file in FILES}
        if {key: tensor.shape for key, tensor in tensors["weights"].items()} != self._strategy.shapes:
            raise FolderError(f"{self.folder / name}: its weights have other names or shapes than those of this model")
        return values

    def write(self, progress: Progress) -> Path:
        """Write a checkpoint, then remove all but the newest ones.

        Raises:
            CheckpointError: if the disk is full or the folder is not writable; earlier checkpoints are untouched.
        """
        strategy, processes = self._strategy, self._strategy.processes
        tensors = {"optimizer": strategy.optimizer_state()}
        values = {"progress": plain(progress), "random": processes.gather(random_state(processes.device))}
        with strategy.gather_params():
            tensors["weights"] = {name: one.detach().cpu().contiguous() for name, one in strategy.weights.items()}
        return processes.from_main(lambda: self._write(progress.step, tensors, values))

    def _write(self, step: int, tensors: Mapping[str, dict[str, Tensor]], values: dict[str, Any]) -> Path:
        path = self.folder / f"step-{step:06d}"

        def fill(folder: Path) -> None:
            for name, saved in tensors.items():
                save_file(saved, folder / f"{name}.safetensors")
                check_saved(folder / f"{name}.safetensors", saved)

        try:
            with self._parts:
                if not self._parts.is_whole(path.name):  # else the run resumed from it and has taken no step since
                    self._parts.write(path.name, fill, values)
                self._retain(step)
        except (OSError, SafetensorError) as error:
            names = checkpoint_names(self.folder)
            kept = f"{names[-1]} is kept: resume with --resume auto" if names else "There is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint {path} could not be written: {error}. Make the folder writable or free disk space. {kept}."
            ) from error
        return path

    def _retain(self, step: int) -> None:
        """Remove the checkpoints after a step, and of the others all but the newest."""
        names = checkpoint_names(self.folder)
        kept = [name for name in names if _step_of(name) <= step][-self._settings.checkpoint.keep :]
        for name in set(names) - set(kept):
            self._parts.remove(name)


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, oldest first, complete or not."""
    return sorted((path.name for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=_step_of)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def named_checkpoint(folder: Path, resume: str) -> str:
    """Return the name of the checkpoint that `--resume` gives as name or path.

    Raises:
        SettingsError: if it is no checkpoint of this folder.
    """
    path = folder / resume if Path(resume).name == resume else Path(resume).expanduser()
    names = checkpoint_names(folder)
    if path.name in names and path.resolve() == (folder / path.name).resolve():
        return path.name
    raise SettingsError(
        f"--resume: expected auto, never, or a checkpoint in {folder} ({', '.join(names) or 'none'}), got {resume!r}."
    )


def check_saved(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Read a safetensors file and compare it with the tensors that were saved.

    Raises:
        SavedWeightsError: names the file and a tensor that is missing, unexpected or different.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name in sorted({*names, *weights}):
            if name not in names or name not in weights:
                raise SavedWeightsError(f"{path}: {name} is {'missing' if name in weights else 'unexpected'}.")
            saved = file.get_tensor(name)
            if not saved.numel() or not torch.equal(saved, weights[name].detach().cpu()):
                raise SavedWeightsError(
                    f"{path}: {name} is empty or differs from the values in memory. Check the disk."
                )
