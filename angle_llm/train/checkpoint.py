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
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tqdm import tqdm

from angle_llm.config import SettingsError, TrainSettings
from angle_llm.files import sync
from angle_llm.train.state import Progress, Run, Snapshot, TrainingState

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
