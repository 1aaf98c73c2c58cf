"""A folder of parts for long work: after a kill, the same command resumes. For checkpoints, embed and mine."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from angle_llm.io import (
    FolderError,
    check_files,
    checksums,
    filled,
    json_text,
    read_object,
    remove_folder,
    swap,
    sync_folder,
    write_json,
)

IDENTITY, MANIFEST = "identity.json", "manifest.json"


def differences(then: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> list[str]:
    """Return a line for every field of `now`, a nested JSON object, that differs in `then`: `a.0.b 1 (now 2)`."""
    found = []
    for key, value in now.items():
        before = then.get(key)
        if isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
            before, value = ({str(place): item for place, item in enumerate(side)} for side in (before, value))
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            found += differences(before, value, f"{above}{key}.")
        elif before != value:
            left, right = (f"{json.dumps(side, ensure_ascii=False):.100}" for side in (before, value))
            found.append(f"{above}{key} {left} (now {right})")
    return found


def check_resumable(path: Path, option: str, index: str | None = None, *, flat: bool = True) -> None:
    """Check that a path is free for a `ResumableFolder` of this kind: new, empty, or written by one.

    Raises:
        FolderError: naming `option`, the flag of the path.
    """
    if path.exists() and not path.is_dir():
        raise FolderError(f"{option} {path} is a file. Give the name of a folder that is new or empty.")
    names = {item.name for item in path.iterdir()} if path.is_dir() else set()
    known = names & {IDENTITY, index} or (not flat and any(path.glob(f"*/{MANIFEST}")))
    if not known and (others := sorted(name for name in names if not name.startswith("."))):
        raise FolderError(
            f"{option} {path} contains other files ({', '.join(others[:3])}). Give the name of a folder that is new, empty, or "
            "was written by this command."
        )


class ResumableFolder:
    """A folder of parts for long work. Killed at any moment, the same command resumes with the parts that are whole.

        identity.json         what the work computes; parts of other work are never mixed with it
        NAME/…                the files of a part
        NAME/manifest.json    values of the part, sizes and SHA-256 of its files

    A part is a folder, renamed into place when complete (checkpoints). With `flat`, the files of all parts are in the
    folder itself, and `.NAME.json`, the manifest, is renamed last: a part without it does not count (embed, mine).
    Identity and values are JSON values. Usage, here for checkpoints:

        with ResumableFolder(run_dir / "checkpoints", {"settings": …}, option="--run-dir") as folder:
            for name in reversed(folder.names()):                        # newest first
                values = folder.check(name)                              # FolderError if it is damaged
            folder.write("step-000120", snapshot.write, {"step": 120})   # snapshot.write(path) fills an empty folder
            folder.remove("step-000100")

    As a context manager it holds a lock, which ends with the process.

    Raises (on entering):
        FolderError: if the folder contains other files, another process writes it, or its parts have another identity;
            the message names the fields that differ.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        option: str,
        flat: bool = False,
        index: str | None = None,
        rank: int = 0,
    ) -> None:
        """`option` is the flag that names the folder, for messages; `index` the file that `finish` writes. Processes of
        different `rank` can write different parts at one time."""
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._option, self._flat, self._index, self._rank = option, flat, index, rank
        self._indexed: dict[str, dict[str, Any]] = {}  # manifests in the index

    def __enter__(self) -> ResumableFolder:
        check_resumable(self.path, self._option, self._index, flat=self._flat)
        self._acquire()
        try:
            index = (read_object(self.path / self._index) if self._index is not None else None) or {}
            try:
                self._indexed = {part["name"]: part for part in index.get("parts", ())}
            except (LookupError, TypeError):
                raise FolderError(f"{self.path / str(self._index)} is damaged. Remove the folder.") from None
            written = read_object(self.path / IDENTITY) or index
            changed = differences(written, self.identity)
            if changed and self.names() and (written or not any(map(self._is_signed, self.names()))):
                readable = [line for line in changed if ".sha256 " not in line and ".size " not in line] or changed
                fields = "; ".join(readable[:5]) if written else f"{IDENTITY} is missing"
                raise FolderError(
                    f"{self.path} (up to {self.names()[-1]}) was started with other input, model or settings. Choose another "
                    f"{self._option}, or remove the folder; to resume, give the same. Different: {fields}"
                )
            if changed:
                write_json(self.path / IDENTITY, self.identity, writer=str(self._rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _acquire(self) -> None:
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / f".lock-{self._rank:05d}", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise FolderError(
                f"another process is writing {self.path}: another command, or a process of a launcher that was killed. Wait "
                "for it, or end it."
            ) from None

    def __exit__(self, *_: object) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)  # a refused command leaves a folder as it was
        self._lock.release()

    def names(self) -> list[str]:
        """Return the names of all parts with a manifest, sorted; `check` finds out whether they are whole."""
        found = self.path.glob(".*.json") if self._flat else self.path.glob(f"*/{MANIFEST}")
        names = [path.stem[1:] if self._flat else path.parent.name for path in found]
        return sorted({*names, *self._indexed})

    def unwritten(self, names: Iterable[str]) -> list[str]:
        """Return the names without a part. One of an earlier index counts if its files are as they were written."""
        written = set(self.names())
        return [name for name in names if name not in written or (name in self._indexed and not self.is_whole(name))]

    def check(self, name: str) -> dict[str, Any]:
        """Return the values of a part after comparing all its files with its manifest.

        Raises:
            FolderError: naming the file that is missing or damaged.
        """
        manifest, path = self.manifest(name), self._manifest_path(name)
        check_files(self.path if self._flat else path.parent, manifest["files"])
        values: dict[str, Any] = manifest["values"]
        return values

    def is_whole(self, name: str) -> bool:
        """Return whether all files of a part are as they were written."""
        with suppress(FolderError):
            self.check(name)
            return True
        return False

    def write(self, name: str, fill: Callable[[Path], object], values: Mapping[str, Any] | None = None) -> None:
        """Write a part: `fill` gets an empty folder and creates the files. `values` are kept in the manifest.

        Raises:
            OSError: if the disk is full or the folder is not writable; all other parts are untouched.
        """

        def complete(folder: Path) -> None:
            fill(folder)
            body = {"name": name, "values": dict(values or {}), "files": checksums(folder)}
            text = json_text({**body, "sha256": self._signature(body)})
            (folder / MANIFEST).write_text(text, encoding="utf-8")

        with filled(self.path / name, complete, writer="") as temporary:
            if not self._flat:
                swap(temporary, self.path / name)
                return
            for path in sorted(temporary.iterdir()):
                if path.name != MANIFEST:
                    path.replace(self.path / path.name)
            sync_folder(self.path)
            (temporary / MANIFEST).replace(self._manifest_path(name))
            sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Remove a part; of a flat folder its manifest, without which it does not count."""
        if self._flat:
            self._manifest_path(name).unlink(missing_ok=True)
        elif (self.path / name).exists():
            remove_folder(self.path / name)

    def clear(self, names: Iterable[str]) -> None:
        """Remove parts of any identity.

        Raises:
            FolderError: if another process writes the folder.
        """
        if self.path.exists():
            self._acquire()
            try:
                for name in names:
                    self.remove(name)
            finally:
                self.__exit__()

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write the index (identity, `values` and all manifests), then remove files that are needed to resume only."""
        assert self._index is not None, "the folder has no index"
        parts = [self.manifest(name) for name in self.names()]
        write_json(self.path / self._index, {**self.identity, **values, "parts": parts}, writer="")
        for pattern in (".*.json", ".lock-*", IDENTITY, ".*.tmp"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        sync_folder(self.path)

    def _is_signed(self, name: str) -> bool:
        """Return whether the manifest of a part is of this work; needs no identity file."""
        with suppress(FolderError):
            return bool(self.manifest(name))
        return False

    def _manifest_path(self, name: str) -> Path:
        return self.path / (f".{name}.json" if self._flat else f"{name}/{MANIFEST}")

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of a part: `name`, `values`, `files`. Its own SHA-256 is checked, its files are not."""
        path = self._manifest_path(name)
        manifest = read_object(path) or self._indexed.get(name)
        if manifest is None:
            raise FolderError(f"{path} is missing")
        body = {key: manifest.get(key) for key in ("name", "values", "files")}
        if body["name"] != name or manifest.get("sha256") != self._signature(body):
            raise FolderError(f"{path} is damaged, or belongs to other work: its own SHA-256 differs")
        return manifest

    def _signature(self, body: Mapping[str, Any]) -> str:
        """Return the SHA-256 of a manifest and of the identity it belongs to."""
        return hashlib.sha256(json.dumps([self.identity, body], sort_keys=True).encode()).hexdigest()
