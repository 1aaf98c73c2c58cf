"""What a run's future depends on, between two optimizer steps: weights, optimizer, generators, and how far it has come.

Batches and learning rates to come follow from the settings and the step. Everything is written as safetensors or JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from angle_llm.settings import TrainSettings

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


@dataclass(frozen=True)
class TrainingState:
    """The live objects that a checkpoint is taken from and put back into."""

    weights: Mapping[str, nn.Parameter]
    """The trainable weights by name, in the optimizer's order."""
    optimizer: Optimizer
    device: torch.device
    run: Run
    process: int = 0
    """Each process has generators of its own."""

    def write(self, folder: Path, progress: Progress) -> None:
        """Fills an empty folder, and reads the tensors again."""
        for name, tensors in (("weights", self.weights), ("optimizer", self._optimizer_tensors())):
            on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(on_cpu, folder / f"{name}.safetensors")
            check_saved(folder / f"{name}.safetensors", on_cpu)
        self._random_file(folder).write_text(json.dumps(random_state(self.device)))
        (folder / "progress.json").write_text(json.dumps(asdict(progress)))

    def read(self, folder: Path) -> Progress:
        """Puts back what `write` wrote.

        Raises:
            ValueError: if the weights are those of another model; nothing has changed then.
        """
        weights = load_file(folder / "weights.safetensors")
        shapes = {name: parameter.shape for name, parameter in self.weights.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != shapes:
            raise ValueError("its weights have other names or shapes than this model's")
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(weights[name])
        self._fill_optimizer(load_file(folder / "optimizer.safetensors"))
        set_random_state(json.loads(self._random_file(folder).read_bytes()), self.device)
        return Progress(**json.loads((folder / "progress.json").read_bytes()))

    def _random_file(self, folder: Path) -> Path:
        return folder / f"random-{self.process:05d}.json"

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """NAME/exp_avg and so on; the optimizer numbers its parameters in the order they were given."""
        names = list(self.weights)
        numbered: dict[int, dict[str, Tensor]] = self.optimizer.state_dict()["state"]
        return {f"{names[number]}/{key}": tensor for number, items in numbered.items() for key, tensor in items.items()}

    def _fill_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        number = {name: number for number, name in enumerate(self.weights)}
        numbered: dict[int, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            numbered.setdefault(number[name], {})[key] = tensor.clone()  # not a view of a file that will be removed
        groups = self.optimizer.state_dict()["param_groups"]  # they come from the settings
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


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


def run_identity(settings: TrainSettings, examples: Iterable[object], base: str | None, device: torch.device) -> Run:
    """A checkpoint is put back into a run with the same one alone; the keys are words for messages."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
    return {
        "settings": settings.fingerprint(),
        "examples": digest.hexdigest()[:16],
        "base weights": base,
        "kind of device": device.type,
    }


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that training may draw from: Python's, numpy's, torch's, and the device's if it has its own."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002  # the global one, which libraries draw from
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "device": None if on_device is None else on_device.tolist(),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what `random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["device"] is not None:
        torch.get_device_module(device).set_rng_state(torch.tensor(state["device"], dtype=torch.uint8))
