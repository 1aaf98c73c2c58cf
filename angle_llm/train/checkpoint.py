"""Checkpoints: the state of a run between two optimizer steps, in `checkpoints/step-000120/`.

    weights.safetensors      trainable weights by parameter name
    optimizer.safetensors    optimizer state: PARAMETER/exp_avg, …
    manifest.json            progress, random generators of every rank, size and SHA-256 of the other files

Later batches and learning rates follow from the settings and the step. `resumable` handles kills and damage.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from angle_llm.config import SettingsError, TrainSettings
from angle_llm.io import FolderError, log, plain
from angle_llm.resumable import ResumableFolder
from angle_llm.train.memory import TokenBudget
from angle_llm.train.rng import random_state, seed_rank, set_random_state
from angle_llm.train.strategies import Strategy


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
    start: float | None = None
    """The score before the first step."""
    best: float | None = None
    """The best score after it, that of `model/`."""
    budget: TokenBudget | None = None
    """Token budget after out-of-memory halvings; None before the first step."""


@dataclass(frozen=True)
class _Snapshot:
    """The state of a run, independent of the strategy: full tensors on the CPU."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: list[dict[str, Any]]
    """Generators of every rank."""
    progress: Progress

    def write(self, folder: Path) -> None:
        for name, tensors in (("weights", self.weights), ("optimizer", self.optimizer)):
            save_file(dict(tensors), folder / f"{name}.safetensors")
            check_saved(folder / f"{name}.safetensors", tensors)

    @property
    def values(self) -> dict[str, Any]:
        """What the manifest holds."""
        return {"progress": plain(asdict(self.progress)), "random": self.random}

    @classmethod
    def read(cls, folder: Path, values: dict[str, Any]) -> _Snapshot:
        progress = dict(values["progress"])
        budget = progress.pop("budget")
        return cls(
            load_file(folder / "weights.safetensors"),
            load_file(folder / "optimizer.safetensors"),
            values["random"],
            Progress(**progress, budget=None if budget is None else TokenBudget(**budget)),
        )


class Checkpoints:
    """The checkpoints of a run. Rank 0 reads and writes the files; all ranks call `resume` and `write`."""

    def __init__(self, settings: TrainSettings, identity: Mapping[str, str | None], strategy: Strategy) -> None:
        """`identity` is equal for runs that compute the same; a checkpoint of another one is refused."""
        self.folder = checkpoint_folder(settings)
        self._settings, self._identity, self._strategy = settings, identity, strategy

    def resume(self) -> Progress:
        """Load the checkpoint that `--resume` selects, and remove later ones. Without one, return `Progress()`.

        Raises:
            CheckpointError: if the selected checkpoint is damaged, or all are, or they are of another run.
            SettingsError: if `--resume` names no checkpoint.
        """
        processes, found = self._strategy.processes, list[_Snapshot]()
        if not processes.from_main(lambda: self._find(found)):
            return Progress()
        try:
            return self._load(found[0] if found else None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {error}. Start over with --resume never."
            ) from error

    def _load(self, snapshot: _Snapshot | None) -> Progress:
        """Load the snapshot of rank 0; the other ranks have none."""
        processes = self._strategy.processes
        self._strategy.load_state(
            processes.broadcast(snapshot.weights if snapshot else None),
            processes.broadcast(snapshot.optimizer if snapshot else None),
        )
        progress, states = processes.from_main(lambda: (snapshot.progress, snapshot.random))  # type: ignore[union-attr]
        if processes.rank < len(states):
            set_random_state(states[processes.rank], processes.device)
        else:  # the run has more ranks now
            seed_rank(self._settings.seed, processes.rank, progress.step)
        return progress

    def write(self, progress: Progress) -> Path:
        """Write a checkpoint, then remove all but the newest ones.

        Raises:
            CheckpointError: if the disk is full or the folder is not writable; earlier checkpoints are untouched.
        """
        strategy, processes = self._strategy, self._strategy.processes
        optimizer = strategy.optimizer_state()
        states = processes.gather(random_state(processes.device))
        with strategy.gather_params():
            weights = {name: one.detach().cpu().contiguous() for name, one in strategy.weights.items()}
        return processes.from_main(lambda: self._write(_Snapshot(weights, optimizer, states, progress)))

    @contextmanager
    def _open(self, *, start_over: bool = False) -> Iterator[ResumableFolder]:
        with ExitStack() as stack:
            folder = ResumableFolder(self.folder, self._identity, option="--run-dir", start_over=start_over)
            try:
                stack.enter_context(folder)
            except FolderError as error:
                newest = (checkpoint_names(self.folder) or ["a checkpoint"])[-1]
                raise CheckpointError(f"cannot resume from {newest}: {error}") from error
            yield folder

    def _find(self, found: list[_Snapshot]) -> bool:
        """Append the snapshot to resume from, if there is one."""
        for path in self.folder.glob(".step-*"):  # incomplete, of a killed run
            shutil.rmtree(path, ignore_errors=True)
        names, resume = checkpoint_names(self.folder), self._settings.resume
        if resume == "never":
            if names:
                log(f"starting over: removing the checkpoints up to {names[-1]} from {self.folder}")
                with self._open(start_over=True) as parts:
                    _retain(parts, 0, 0)
            return False
        if resume != "auto":
            names = [named_checkpoint(self.folder, resume)]
        elif not names:
            log(f"no checkpoint in {self.folder}: starting at step 1")
            return False
        damaged: list[str] = []
        with self._open() as parts:
            for name in reversed(names):
                try:
                    found.append(self._read(parts, name))
                except CheckpointError as error:
                    damaged.append(str(error))
                    continue
                for problem in damaged:
                    log(f"warning: {problem}. Resuming from {name}.")
                _retain(parts, step_of(name), self._settings.checkpoint.keep)
                return True
        raise CheckpointError(
            f"no checkpoint is complete: {'; '.join(damaged)}. Restore the files, or start over with --resume never."
        )

    def _read(self, parts: ResumableFolder, name: str) -> _Snapshot:
        try:
            snapshot = _Snapshot.read(self.folder / name, parts.check(name))
            if {key: tensor.shape for key, tensor in snapshot.weights.items()} != dict(self._strategy.shapes):
                raise ValueError("its weights have other names or shapes than those of this model")
        except (ValueError, OSError, SafetensorError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                str(error) if isinstance(error, FolderError) else f"{self.folder / name}: {error}"
            ) from error
        return snapshot

    def _write(self, snapshot: _Snapshot) -> Path:
        step = snapshot.progress.step
        name = f"step-{step:06d}"
        try:
            with self._open() as parts:
                if not parts.is_whole(name):  # else the run resumed from it and has taken no step since
                    parts.write(name, snapshot.write, snapshot.values)
                    parts.check(name)
                _retain(parts, step, self._settings.checkpoint.keep)
        except (OSError, SafetensorError) as error:
            names = checkpoint_names(self.folder)
            kept = f"{names[-1]} is kept: resume with --resume auto" if names else "There is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint {self.folder / name} could not be written: {error}. Make the folder writable or free disk space. "
                f"{kept}."
            ) from error
        return self.folder / name


def _retain(parts: ResumableFolder, step: int, keep: int) -> None:
    """Remove the checkpoints after a step, and of the others all but the newest."""
    names = checkpoint_names(parts.path)
    kept = [name for name in names if step_of(name) <= step][-keep:] if keep else []
    for name in set(names) - set(kept):
        parts.remove(name)


def checkpoint_folder(settings: TrainSettings) -> Path:
    """Folder of the checkpoints of a run."""
    return settings.run_path / "checkpoints"


def checkpoint_names(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder, oldest first, complete or not."""
    return sorted((path.name for path in folder.glob("step-*") if step_of(path.name) >= 0), key=step_of)


def step_of(name: str) -> int:
    """The step in the name of a checkpoint, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else -1


def named_checkpoint(folder: Path, resume: str) -> str:
    """The name of the checkpoint that `--resume` gives as name or path.

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


def run_identity(
    settings: TrainSettings, examples: str, base: str | None, device: torch.device
) -> dict[str, str | None]:
    """What runs that compute the same have in common. The keys appear in messages; `examples` is a digest."""
    return {
        "settings": settings.fingerprint(),
        "examples": examples,
        "base weights": base,
        "kind of device": device.type,
    }


def check_saved(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Read a safetensors file and compare it with the tensors that were saved.

    Raises:
        SavedWeightsError: names the file and a tensor that is missing, unexpected, empty, or has another shape or other values.
    """
    with safe_open(path, framework="pt") as file:
        odd = set(file.keys()) ^ set(weights)
        if odd:
            raise SavedWeightsError(
                f"{path}: expected {len(weights)} tensors; {min(odd)} is {'missing' if min(odd) in weights else 'unexpected'}."
            )
        for name, tensor in weights.items():
            saved, expected = file.get_tensor(name), tensor.detach().cpu()
            if not saved.numel() or saved.shape != expected.shape:
                raise SavedWeightsError(
                    f"{path}: {name}: expected shape {tuple(expected.shape)}, got {tuple(saved.shape)}."
                )
            if not torch.equal(saved, expected):
                raise SavedWeightsError(f"{path}: {name} differs from the values in memory. Check the disk.")
