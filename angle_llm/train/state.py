"""What a run's future depends on, between two optimizer steps: weights, optimizer, generators, and how far it has come.

Batches and learning rates to come follow from the settings and the step. Everything is written as safetensors or JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from angle_llm.config import TrainSettings
from angle_llm.train.generators import device_state, set_device_state
from angle_llm.train.memory import TokenBudget
from angle_llm.train.processes import Processes
from angle_llm.train.strategy import Spread

Run = Mapping[str, str | None]
"""What two runs that compute the same have in common, from `run_identity`."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    measured: int | None = None
    """The step after which the encoder was measured last."""
    start: float | None = None
    """The score before the first step."""
    best: float | None = None
    """The best score since, that of `model/`."""
    budget: TokenBudget | None = None
    """What memory has had room for; None before it was known."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Progress:
        """From the values of a JSON file."""
        budget = values.pop("budget", None)
        return cls(**values, budget=None if budget is None else TokenBudget(**budget))


@dataclass(frozen=True)
class Snapshot:
    """A run's state in whole tensors on the CPU: what a checkpoint's files hold, whoever wrote it."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Sequence[Mapping[str, Any]]
    """The generators of each process."""
    progress: Progress

    def write(self, folder: Path) -> None:
        """Fills an empty folder, and reads the tensors again."""
        for name, tensors in (("weights", self.weights), ("optimizer", self.optimizer)):
            save_file(dict(tensors), folder / f"{name}.safetensors")
            check_saved(folder / f"{name}.safetensors", tensors)
        for process, state in enumerate(self.random):
            (folder / f"random-{process:05d}.json").write_text(json.dumps(state))
        (folder / "progress.json").write_text(json.dumps(asdict(self.progress)))

    @classmethod
    def read(cls, folder: Path) -> Snapshot:
        """What `write` wrote."""
        return cls(
            load_file(folder / "weights.safetensors"),
            load_file(folder / "optimizer.safetensors"),
            [json.loads(path.read_bytes()) for path in sorted(folder.glob("random-*.json"))],
            Progress.of(json.loads((folder / "progress.json").read_bytes())),
        )


@dataclass(frozen=True)
class TrainingState:
    """The live objects that a checkpoint is taken from and put back into, by all processes together."""

    weights: Mapping[str, nn.Parameter]
    """The trainable weights by name, in the optimizer's order."""
    shapes: Mapping[str, torch.Size]
    """Theirs; weights that are divided among processes do not show it."""
    spread: Spread
    run: Run
    seed: int

    @classmethod
    def of(cls, model: nn.Module, spread: Callable[[], Spread], run: Run, seed: int) -> TrainingState:
        """Before the model is spread over its processes, which `spread` does."""
        weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        shapes = {name: parameter.shape for name, parameter in weights.items()}
        return cls(weights, shapes, spread(), run, seed)

    @property
    def processes(self) -> Processes:
        """Of the run."""
        return self.spread.processes

    def snapshot(self, progress: Progress) -> Snapshot | None:
        """The state now; whole in the main process, None in the others."""
        optimizer = self.spread.optimizer_tensors()
        random_states = self.processes.gather(random_state(self.processes.device))
        with self.spread.whole():
            if not self.processes.is_main:
                return None
            return Snapshot(_on_cpu(self.weights), optimizer, random_states, progress)

    def check_fits(self, snapshot: Snapshot) -> None:
        """Refuses the weights of another model.

        Raises:
            ValueError: if names or shapes differ.
        """
        if {name: tensor.shape for name, tensor in snapshot.weights.items()} != dict(self.shapes):
            raise ValueError("its weights have other names or shapes than this model's")

    def restore(self, snapshot: Snapshot | None) -> Progress:
        """Puts back what the main process has read; the others give None.

        A run may go on with another number of processes: batches and update are the same. A process that was not there
        draws its dropout masks from a seed of its own.

        """
        processes = self.processes
        self.spread.fill(
            processes.tensors_from_main(None if snapshot is None else snapshot.weights),
            processes.tensors_from_main(None if snapshot is None else snapshot.optimizer),
        )
        came: Progress
        came, states = processes.from_main(lambda: (snapshot.progress, snapshot.random))  # type: ignore[union-attr]
        if processes.rank < len(states):
            set_random_state(states[processes.rank], processes.device)
        else:
            seed_process(self.seed, processes.rank, came.step)
        return came


def seed_process(seed: int, rank: int, step: int = 0) -> None:
    """Generators of a process's own, so that no two draw the same masks. The main one keeps those of the whole run."""
    if rank:
        from accelerate.utils import set_seed

        set_seed(int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:4], "little"))


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


class SavedWeightsError(RuntimeError):
    """A file does not hold the weights that were to be saved in it."""


def check_saved(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Reads a safetensors file again and compares it with what was to be saved.

    Raises:
        SavedWeightsError: naming a tensor that is missing, too many, empty, of another shape, or of other values.
    """
    with safe_open(path, framework="pt") as file:
        odd = set(file.keys()) ^ set(weights)
        if odd:
            raise SavedWeightsError(f"{path} was to hold {len(weights)} tensors; {min(odd)} is missing or too many.")
        for name, tensor in weights.items():
            saved, expected = file.get_tensor(name), tensor.detach().cpu()
            if not saved.numel() or saved.shape != expected.shape:
                raise SavedWeightsError(f"{path}: {name} was to be {tuple(expected.shape)}, got {tuple(saved.shape)}.")
            if not torch.equal(saved, expected):
                raise SavedWeightsError(f"{path}: {name} is not as it is in memory. Look at the disk it lies on.")


def run_identity(settings: TrainSettings, examples: str, base: str | None, device: torch.device) -> Run:
    """A checkpoint is put back into a run with the same one alone; the keys are words for messages. `examples` is their
    digest."""
    return {
        "settings": settings.fingerprint(),
        "examples": examples,
        "base weights": base,
        "kind of device": device.type,
    }


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that training may draw from: Python's, numpy's, torch's, and the device's if it has its own."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002  # the global one, which libraries draw from
    on_device = device_state(device)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "device": None if on_device is None else on_device.tolist(),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what `random_state` gave.

    Raises:
        ValueError: for anything else.
    """
    try:
        _set_random_state(state, device)
    except (RuntimeError, LookupError, TypeError, OverflowError) as error:  # each generator has its own
        raise ValueError(f"a generator's state is damaged ({error})") from error


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["device"] is not None:
        set_device_state(device, torch.tensor(state["device"], dtype=torch.uint8))
