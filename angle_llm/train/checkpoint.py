"""Checkpoints: the state of a training run after an optimizer step, saved in `checkpoints/step-000120/`.

    weights.safetensors      trainable weights by parameter name
    optimizer.safetensors    optimizer state, as PARAMETER/exp_avg, …
    manifest.json            progress, random generators of every rank, gradient scale, size and SHA-256 of all other files

Batches and learning rates of later steps follow from the settings and the step. A checkpoint does not depend on the
number of processes or the ZeRO stage, except for the random generators. `ResumableFolder` detects incomplete and
damaged checkpoints. The functions at the end of this module read, set and seed random generators.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from angle_llm.io import FolderError, log, plain
from angle_llm.resumable_folder import ResumableFolder
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings
from angle_llm.train.strategies import DataParallelStrategy, GradientScale
from angle_llm.train.token_budget import TokenBudget

FOLDER = "checkpoints"
"""Name of the folder with the checkpoints in a run directory."""
FILES = ("weights", "optimizer")
"""Names of the safetensors files in a checkpoint."""
Tensors = dict[str, dict[str, Tensor]]
"""Content of the safetensors files of a checkpoint: name in `FILES` → tensors by name."""
Contents = dict[str, Callable[[], dict[str, Tensor]]]
"""Functions that return the content of the safetensors files of a checkpoint, by name in `FILES`."""


class CheckpointFileError(RuntimeError):
    """Raised when a checkpoint cannot be written or read; the message names the file and what to do."""


@dataclass(frozen=True)
class Progress:
    """Training progress saved in a checkpoint."""

    step: int = 0
    """Number of completed optimizer steps; 0 without a checkpoint."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl in bytes at the checkpoint; a resumed run removes later lines."""
    evaluated: int | None = None
    """Optimizer step of the last evaluation; None before the first evaluation."""
    start: dict[str, float] | None = None
    """Metrics of the encoder before training, by name; None if not evaluated."""
    best: dict[str, float] | None = None
    """Metrics of the best encoder so far, which is saved in `model/`; None if no encoder was saved, or if `model/` may have
    another encoder."""
    budget: TokenBudget | None = None
    """Token budget of a process, lower than at the start if memory ran out; None without a checkpoint."""
    stopped: str | None = None
    """Reason why a callback stopped the run after this step; None if the run goes on."""


class Checkpoints:
    """Reads and writes checkpoints of a run. All ranks call `resume` and `write`; only rank 0 accesses files."""

    def __init__(
        self, settings: TrainSettings, identity: Mapping[str, str | None], strategy: DataParallelStrategy
    ) -> None:
        """Set the folder of the checkpoints, which need not exist yet.

        `identity` has hashes of settings, data and weights. `resume` raises `FolderError` for checkpoints with another
        identity, because the run would compute something else.
        """
        self.folder = settings.run_path / FOLDER
        self._settings, self._strategy = settings, strategy
        self._parts = ResumableFolder(self.folder, identity, option="--run-dir")
        self._unreadable: set[str] = set()
        """Names of checkpoints that the disk failed to read. They are kept, because a network disk can recover."""

    def resume(self) -> Progress:
        """Load the checkpoint that `--resume` selects into model, optimizer and random generators; return its progress.

        Later checkpoints are removed. Without a checkpoint, the result is `Progress()`.

        Raises:
            CheckpointFileError: if the selected checkpoint is damaged, or all checkpoints are damaged.
            FolderError: if the checkpoints belong to another run.
            SettingsError: if `--resume` names no checkpoint of this run.
        """
        strategy, processes = self._strategy, self._strategy.processes
        tensors: Tensors = {}  # filled on rank 0
        values = processes.from_main(lambda: self._find(tensors))
        if values is None:
            return Progress()
        weights, optimizer = (processes.broadcast(tensors.get(name)) for name in FILES)
        strategy.load_state(weights, optimizer)
        progress, states = values["progress"], values["random"]
        if values["scale"] is not None:
            strategy.scale = GradientScale(**values["scale"])
        if processes.rank < len(states):
            set_random_state(states[processes.rank], processes.device)
        else:  # the run has more ranks than before
            seed_rank(self._settings.seed, processes.rank, progress["step"])
        for name in ("start", "best"):  # JSON has no NaN
            if progress[name] is not None:
                progress[name] = {key: math.nan if value is None else value for key, value in progress[name].items()}
        if progress["budget"] is not None:
            progress["budget"] = TokenBudget(**progress["budget"])
        return Progress(**progress)

    def _find(self, tensors: Tensors) -> dict[str, Any] | None:
        """Return the manifest values of the checkpoint to resume from; None if there is none. Called on rank 0.

        The tensors of the checkpoint are added to `tensors`. Damaged and unreadable checkpoints are skipped with a warning.
        Incomplete, damaged and later checkpoints are removed.

        Raises:
            CheckpointFileError: if no checkpoint is complete.
        """
        # Start over, or list the candidates.
        for path in self.folder.glob(".step-*"):  # incomplete, from a killed run
            shutil.rmtree(path, ignore_errors=True)
        names = checkpoint_names(self.folder)
        resume = self._settings.resume
        if resume is None or resume == "never":  # None: `Run` has checked that there are no checkpoints
            if names:
                log(f"starting over: removing the checkpoints up to {names[-1]} from {self.folder}")
            for name in names:
                self._parts.remove(name)
            return None
        if resume != "auto":
            names = [named_checkpoint(self.folder, resume)]
        elif not names:
            log(f"starting at step 1: --resume auto found no checkpoint in {self.folder}")
            return None
        # Newest complete checkpoint.
        problems: list[str] = []
        with self._parts:
            for name in reversed(names):
                try:
                    values = self._read(name, tensors)
                except (FolderError, OSError) as error:
                    if isinstance(error, OSError):
                        self._unreadable.add(name)
                        error = OSError(f"{self.folder / name} cannot be read: {error}")
                    problems.append(str(error))
                    continue
                for problem in problems:
                    log(f"warning: {problem}. Resuming from {name}.")
                self._retain(_step_of(name))
                return values
        advice = "start over with --resume never" if resume == "auto" else "use the newest complete one: --resume auto"
        raise CheckpointFileError(f"no complete checkpoint: {'; '.join(problems)}. Restore the files, or {advice}.")

    def _read(self, name: str, tensors: Tensors) -> dict[str, Any]:
        """Return the manifest values of the checkpoint `name`, and add its tensors to `tensors`.

        Raises:
            FolderError: if the checkpoint is damaged, or the weights do not fit the model.
        """
        values = self._parts.check(name)
        tensors |= {file: load_file(self.folder / name / f"{file}.safetensors") for file in FILES}
        if {key: tensor.shape for key, tensor in tensors["weights"].items()} != self._strategy.shapes:
            raise FolderError(
                f"{self.folder / name}: names or shapes of the weights differ from the trainable weights of the model"
            )
        return values

    def write(self, progress: Progress) -> Path:
        """Write a checkpoint, remove all but the newest `checkpoint.keep` checkpoints, and return its path.

        Raises:
            CheckpointFileError: if the disk is full or the folder is not writable; earlier checkpoints are kept.
        """
        strategy, processes = self._strategy, self._strategy.processes
        contents: Contents = {"optimizer": strategy.optimizer_state, "weights": strategy.full_weights}
        if processes.zero_stage:  # all ranks must call these methods; else rank 0 has one result in memory at a time
            contents = {name: partial(dict, read()) for name, read in contents.items()}
        random_states = processes.gather(random_state(processes.device))
        values = {"progress": plain(progress), "random": random_states, "scale": plain(strategy.scale)}
        return processes.from_main(lambda: self._write(progress.step, contents, values))

    def _write(self, step: int, contents: Contents, values: dict[str, Any]) -> Path:
        """Write the checkpoint of an optimizer step, remove old checkpoints, and return its path. Called on rank 0.

        `values` goes to the manifest.

        Raises:
            CheckpointFileError: if the checkpoint cannot be written.
        """
        path = self.folder / f"step-{step:06d}"

        def fill(folder: Path) -> None:
            for name, read in contents.items():
                save_file(read(), folder / f"{name}.safetensors")

        try:
            with self._parts:
                # It exists if the run resumed from it and took no step, or could not read it.
                if path.name in self._unreadable or not self._parts.is_whole(path.name):
                    self._parts.write(path.name, fill, values)
                    self._unreadable.discard(path.name)
                self._retain(step)
        except (OSError, SafetensorError) as error:
            names = checkpoint_names(self.folder)
            kept = f"{names[-1]} is kept: resume with --resume auto" if names else "There is no earlier checkpoint"
            raise CheckpointFileError(
                f"checkpoint {path} could not be written: {error}. Make the folder writable or free disk space. {kept}."
            ) from error
        return path

    def _retain(self, step: int) -> None:
        """Remove checkpoints of later steps than `step`; keep only the newest `checkpoint.keep` other checkpoints.

        Unreadable checkpoints are kept too.
        """
        names = [name for name in checkpoint_names(self.folder) if name not in self._unreadable]
        kept = [name for name in names if _step_of(name) <= step][-self._settings.checkpoint.keep :]
        for name in set(names) - set(kept):
            self._parts.remove(name)


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of all checkpoints in a folder, such as `step-000120`, oldest first, even damaged ones."""
    return sorted((path.name for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=_step_of)


def _step_of(name: str) -> int:
    """Return the optimizer step in the name of a checkpoint: 120 for `step-000120`."""
    return int(name.removeprefix("step-"))


def named_checkpoint(folder: Path, resume: str) -> str:
    """Return the name of the checkpoint in `folder` that `resume`, a name or a path, refers to.

    Raises:
        SettingsError: if there is no such checkpoint in `folder`; names the flag `--resume`.
    """
    path = folder / resume if Path(resume).name == resume else Path(resume).expanduser()
    names = checkpoint_names(folder)
    if path.name in names and path.resolve() == (folder / path.name).resolve():
        return path.name
    raise SettingsError(
        f"--resume: expected auto, never, or a checkpoint in {folder} ({', '.join(names) or 'none'}), got {resume!r}."
    )


def torch_state(device: torch.device) -> list[Tensor]:
    """Return the states of the torch random generators of the CPU and, unless it is the CPU, of `device`."""
    if device.type == "cpu":
        return [torch.get_rng_state()]
    if device.type == "cuda":  # the device need not be the current one
        return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
    return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state()]


def set_torch_state(state: Sequence[Tensor], device: torch.device) -> None:
    """Set the torch random generators of the CPU and `device` to states returned by `torch_state`."""
    torch.set_rng_state(state[0])
    for on_device in state[1:]:
        if device.type == "cuda":
            torch.cuda.set_rng_state(on_device, device)
        else:
            torch.get_device_module(device).set_rng_state(on_device)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy and torch (CPU and `device`) as JSON values."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002  # libraries use the global generator
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
        "torch": [state.tolist() for state in torch_state(device)],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the global random generators of Python, numpy and torch to states returned by `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    set_torch_state([torch.tensor(values, dtype=torch.uint8) for values in state["torch"]], device)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the random generators of a rank other than 0, so that ranks use different dropout masks.

    On rank 0 nothing happens, because the run has already seeded its generators with `seed`. `step` is the step of the
    checkpoint that the run resumes from.
    """
    if rank:
        from accelerate.utils import set_seed

        set_seed(int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:4], "little"))
