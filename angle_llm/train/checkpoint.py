"""Checkpoints: a run's state in a folder that is whole or does not count.

    run_dir/checkpoints/step-000120/
        weights.safetensors      the trainable weights, by parameter name
        optimizer.safetensors    the optimizer's tensors: PARAMETER/exp_avg …
        random-00000.json        the generators of process 0, and so on
        progress.json            the step, the length of metrics.jsonl, the scores so far
        manifest.json            written last: whose checkpoint it is, size and SHA-256 of every other file, and its own

A folder is filled under a hidden name, put on disk, and renamed; older ones go when it has been read again.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from angle_llm.config import SettingsError, TrainSettings
from angle_llm.io import sync
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget
from angle_llm.train.strategies import Strategy

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SLOW_SECONDS = 10
_START_OVER = "Use the versions it was written with, or start over with --resume never."


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the file and what to do."""


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    @classmethod
    def of(cls, settings: TrainSettings) -> Checkpoints:
        """Those that a run with these settings writes."""
        return cls(settings.run_path / "checkpoints", settings.checkpoint.keep)

    def all(self) -> list[Path]:
        """Oldest first, whole or not."""
        return sorted((path for path in self.folder.glob("step-*") if step_of(path) >= 0), key=step_of)

    def check_named(self, resume: str) -> Path | None:
        """The checkpoint that `--resume` names, None for auto and never.

        Raises:
            SettingsError: if it is none of this run directory.
        """
        if resume in ("auto", "never"):
            return None
        path = self.folder / resume if Path(resume).name == resume else Path(resume).expanduser()
        known = {one.resolve(): one for one in self.all()}
        if path.resolve() in known:
            return known[path.resolve()]
        names = ", ".join(one.name for one in known) or "none"
        raise SettingsError(
            f"--resume needs auto, never, or a checkpoint in {self.folder} (there: {names}), got {resume!r}. Name one of "
            "those, or the --run-dir it belongs to."
        )

    def find(self, resume: str) -> Path | None:
        """The whole checkpoint to go on from: the one named, for auto the newest, None to start.

        Raises:
            CheckpointError: if the one named is damaged, or all are.
        """
        if resume == "never":
            return None
        named = self.check_named(resume)
        damaged: list[str] = []
        for path in [named] if named else reversed(self.all()):
            try:
                verified(path)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for problem in damaged:
                tqdm.write(f"warning: {problem}. Going on from {path.name}.")
            return path
        if damaged:
            raise CheckpointError(
                f"no checkpoint to go on from is whole: {'; '.join(damaged)}. Put back what was written, or start over with "
                "--resume never."
            )
        return None

    def begin(self, origin: Path | None, state: TrainingState) -> Progress:
        """Goes on from a checkpoint, or starts over and leaves nothing that a later run could go on from."""
        state.processes.from_main(lambda: self._clear(origin))
        return self.read(origin, state) if origin else Progress()

    def _clear(self, origin: Path | None) -> None:
        for path in self.folder.glob(".step-*"):  # what a killed run was writing or removing
            shutil.rmtree(path, ignore_errors=True)
        if origin:
            return
        if paths := self.all():
            tqdm.write(f"starting over: removing the checkpoints up to {paths[-1].name} from {self.folder}")
        for path in paths:
            _remove(path)

    def read(self, path: Path, state: TrainingState) -> Progress:
        """Puts a checkpoint back into the live objects. Later ones, which are damaged or given up, are removed.

        The main process reads and tells the others, which need not see its disk.

        Raises:
            CheckpointError: if it is damaged, or another run's.
        """
        snapshots: list[Snapshot] = []
        state.processes.from_main(lambda: snapshots.append(self._read(path, state)))
        try:
            progress = state.restore(snapshots[0] if snapshots else None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} does not hold the state of a run like this one: {error}. {_START_OVER}"
            ) from error
        state.processes.from_main(lambda: self._retain(path))
        return progress

    def _read(self, path: Path, state: TrainingState) -> Snapshot:
        written = verified(path)["run"]
        for what, here in state.run.items():
            if written.get(what) != here:
                raise CheckpointError(
                    f"{path} was written with other {what} ({written.get(what)}; this run: {here}). Use the same, or another "
                    "--run-dir."
                )
        try:
            snapshot = Snapshot.read(path)
            state.check_fits(snapshot)
        except (ValueError, OSError, SafetensorError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. {_START_OVER}") from error
        return snapshot

    def write(self, state: TrainingState, progress: Progress) -> Path:
        """Writes a checkpoint whole or not at all, then removes all but the newest ones; the main process does.

        Raises:
            CheckpointError: if the place is full or closed; the checkpoints before it are untouched.
        """
        snapshot = state.snapshot(progress)
        return state.processes.from_main(lambda: self._write(snapshot, state.run))

    def _write(self, snapshot: Snapshot | None, run: Run) -> Path:
        assert snapshot is not None, "the main process has it"
        started = time.perf_counter()
        step = snapshot.progress.step
        target = self.folder / f"step-{step:06d}"
        with suppress(CheckpointError):
            verified(target)
            return target  # the run went on from it and has not taken a step since
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".step-", dir=self.folder, ignore_cleanup_errors=True) as place:
                filled = Path(place) / target.name
                filled.mkdir()
                snapshot.write(filled)
                _write_manifest(filled, step, run)
                if target.exists():
                    _remove(target)  # it is damaged
                filled.replace(target)
            sync(self.folder)
            sync(self.folder.parent)
            verified(target)
            self._retain(target)
        except (OSError, SafetensorError) as error:
            left = [path.name for path in self.all()]
            kept = f"{left[-1]} is kept: go on from there with --resume auto" if left else "No checkpoint is there yet"
            raise CheckpointError(
                f"checkpoint {target} could not be written: {error}. Make the folder writable and give it room. {kept}."
            ) from error
        if (seconds := time.perf_counter() - started) > SLOW_SECONDS:
            tqdm.write(f"checkpoint of step {step} took {seconds:.0f} seconds")
        return target

    def _retain(self, good: Path) -> None:
        """Removes what is later than a checkpoint known to be good, and of the rest all but the newest."""
        kept = [path for path in self.all() if step_of(path) <= step_of(good)][-self.keep :]
        for path in set(self.all()) - set(kept):
            _remove(path)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


def verified(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as written; files it does not list are never read.

    Raises:
        CheckpointError: naming the file that is missing, cut, or changed.
    """
    path = folder / MANIFEST
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError
        content = path.read_bytes()
        body: dict[str, Any] = json.loads(content)
        if not isinstance(body, dict) or body.pop("sha256", None) is None or _rendered(body) != content:
            raise ValueError("its own SHA-256 differs")
        if body["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {body['format_version']}; this version reads {FORMAT_VERSION}")
        if body["step"] != step_of(folder):
            raise ValueError(f"it is that of step {body['step']}")
        read = {"weights.safetensors", "optimizer.safetensors", "progress.json", *_names(folder.glob("random-*.json"))}
        if unlisted := read - body["files"].keys():
            raise ValueError(f"it does not list {min(unlisted)}")
        if not isinstance(body["run"], dict):
            raise ValueError("it does not say whose it is")
        for name, written in body["files"].items():
            path = folder / name
            if path.parent != folder or path.is_symlink():  # it could name any file of the machine
                raise ValueError("it is no file of this folder")
            if (size := path.stat().st_size) != written["size"]:
                raise ValueError(f"{size} bytes; {written['size']} were written")
            if _sha256(path) != written["sha256"]:
                raise ValueError("its SHA-256 is not that of what was written")
    except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise CheckpointError(f"{path} {what}") from error
    return body


def _names(paths: Iterable[Path]) -> set[str]:
    return {path.name for path in paths}


def _write_manifest(folder: Path, step: int, run: Run) -> None:
    """Puts every file on disk, then the manifest."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    body = {"format_version": FORMAT_VERSION, "step": step, "run": dict(run), "files": files}
    (folder / MANIFEST).write_bytes(_rendered(body))
    for path in (folder / MANIFEST, folder):
        sync(path)


def _rendered(body: dict[str, Any]) -> bytes:
    """A manifest's bytes; their end is the SHA-256 of the rest."""
    return json.dumps({**body, "sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}, indent=1).encode()


def _remove(folder: Path) -> None:
    """Out of sight at once, by replacing an empty hidden folder; then deleted."""
    hidden = tempfile.mkdtemp(prefix=".step-", dir=folder.parent)
    folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
    strategy: Strategy
    run: Run
    seed: int

    @classmethod
    def of(cls, model: nn.Module, strategy: Callable[[], Strategy], run: Run, seed: int) -> TrainingState:
        """Before the model is spread over its processes, which `strategy` does."""
        weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        shapes = {name: parameter.shape for name, parameter in weights.items()}
        return cls(weights, shapes, strategy(), run, seed)

    @property
    def processes(self) -> Processes:
        """Of the run."""
        return self.strategy.processes

    def snapshot(self, progress: Progress) -> Snapshot | None:
        """The state now; whole in the main process, None in the others."""
        optimizer = self.strategy.optimizer_tensors()
        random_states = self.processes.gather(random_state(self.processes.device))
        with self.strategy.gather_params():
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
        self.strategy.load_state(
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


def device_state(device: torch.device) -> Tensor | None:
    """Its state; None for the CPU, whose generator is torch's own."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":  # of this GPU, which need not be the current one
        return torch.cuda.get_rng_state(device)
    state: Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_device_state(device: torch.device, state: Tensor | None) -> None:
    """Puts back what `device_state` gave."""
    if state is None:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.get_device_module(device).set_rng_state(state)
