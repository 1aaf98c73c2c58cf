"""Folders of results that resume after a kill, written part by part.

Layout of a resumable folder:

    identity.json          input, model and settings of the work; a folder never mixes parts of different work
    PART/…                 the files of a part
    PART/manifest.json     name and values of the part, sizes and SHA-256 of its files, and a SHA-256 over all of this
    .lock-RANK             lock of the process that writes; removed at the end

In a folder with an index, the files of all parts lie in the folder itself, and the manifest of a part is `.PART.json`.
When all parts are complete, the index file replaces `identity.json` and the manifests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from angle_llm.io import (
    FolderError,
    check_files,
    checksums,
    differences,
    filled_folder,
    json_text,
    read_object,
    remove_folder,
    swap_folder,
    sync_folder,
    write_json,
)

IDENTITY, MANIFEST = "identity.json", "manifest.json"


class ResumableFolder:
    """Folder of results that are written part by part; after a kill, the same command resumes after the complete parts.

    A part is a named set of files, such as a checkpoint or the embeddings of some rows. Its manifest is a JSON file
    with the sizes and SHA-256 of these files. A part is a subfolder that is renamed into place when it is complete
    (checkpoints, stored vectors, mine). With an index, the files of all parts are in the folder itself, and a manifest is
    renamed into place last: a part without a manifest does not count (embed). The module docstring lists all files.
    Usage, for checkpoints:

        with ResumableFolder(run_dir / "checkpoints", {"settings": …}, option="--run-dir") as folder:
            for name in reversed(folder.names()):                        # newest first
                values = folder.check(name)                              # FolderError if it is damaged
            folder.write("step-000120", snapshot.write, {"step": 120})   # snapshot.write(path) fills an empty folder
            folder.remove("step-000100")

    The context manager holds a lock on the folder, which the system releases when the process ends.

    Raises (on entering):
        FolderError: if the folder contains other files, if another process writes to the folder, or if its parts were
            written with another input, model or settings (`identity`); the message names the fields that differ.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], *, option: str, index: str | None = None, rank: int = 0
    ) -> None:
        """Store the arguments; only entering the context manager reads or creates the folder.

        Args:
            identity: JSON object with the input, model and settings of the command; all parts must have the same values.
            option: Command line flag that names the folder, for error messages.
            index: Name of the file that `finish` writes when all parts are complete. The files of all parts are then in
                the folder itself. None: no such file, and each part is a subfolder.
            rank: Rank of this process; processes with different ranks can write different parts at the same time.
        """
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._option, self._index, self._rank = option, index, rank
        self._indexed: dict[str, dict[str, Any]] = {}  # name → manifest in the index

    def __enter__(self) -> ResumableFolder:
        check_resumable(self.path, self._option, self._index)
        self._lock = lock_folder(self.path, self._rank)
        try:
            index = {} if self._index is None else read_object(self.path / self._index) or {}
            stored = read_object(self.path / IDENTITY) or index  # `finish` moves the identity to the index
            if (index and "parts" not in index) or (stored and stored.keys().isdisjoint(self.identity)):
                raise FolderError(f"{self._option} {self.path} contains other files. Name a new or empty folder.")
            self._indexed = {part["name"]: part for part in index.get("parts", ())}
            changed = differences(stored, self.identity)
            if changed and self.names():
                raise FolderError(
                    f"{self.path} (up to {self.names()[-1]}) was started with other input, model or settings. Choose another "
                    f"{self._option}, or remove the folder; to resume, use the original values. Different: "
                    f"{'; '.join(changed[:5])}"
                )
            if changed:
                write_json(self.path / IDENTITY, self.identity, writer=str(self._rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        unlock_folder(self._lock)

    def names(self) -> list[str]:
        """Return the sorted names of all complete parts of the results; their files are not checked.

        A part is complete if it has a manifest.
        """
        if self._index is None:
            return sorted(path.parent.name for path in self.path.glob(f"[!.]*/{MANIFEST}"))
        return sorted({path.stem[1:] for path in self.path.glob(".*.json")} | self._indexed.keys())

    def unwritten(self, names: Iterable[str]) -> list[str]:
        """Return the names of the given parts of the results that must be written.

        A part must be written if it has no manifest (is incomplete), or if only the index file lists the part and its
        files are damaged.
        """
        written = set(self.names())
        return [name for name in names if name not in written or (name in self._indexed and not self.is_whole(name))]

    def check(self, name: str) -> dict[str, Any]:
        """Check the sizes and SHA-256 of all files of a part of the results; return the `values` given to `write`.

        Raises:
            FolderError: for the first file that is missing or damaged.
        """
        manifest = self.manifest(name)
        check_files(self.path if self._index is not None else self.path / name, manifest["files"])
        values: dict[str, Any] = manifest["values"]
        return values

    def is_whole(self, name: str) -> bool:
        """Return whether a part of the results is complete, and its files have the recorded sizes and SHA-256."""
        with suppress(FolderError):
            self.check(name)
            return True
        return False

    def write(self, name: str, fill: Callable[[Path], object], values: Mapping[str, Any] | None = None) -> None:
        """Write or replace a part of the results; `check` rejects a part whose writing was interrupted.

        Args:
            name: Name of the part.
            fill: Function that gets an empty folder and creates the files.
            values: JSON object that is stored with the part; `check` returns this object.

        Raises:
            OSError: if the disk is full or the folder is not writable; all other parts are unchanged.
        """

        def complete(folder: Path) -> None:
            fill(folder)
            body = {"name": name, "values": dict(values or {}), "files": checksums(folder)}
            text = json_text({**body, "sha256": self._signature(body)})
            (folder / MANIFEST).write_text(text, encoding="utf-8")

        with filled_folder(self.path / name, complete, writer="") as temporary:
            if self._index is None:  # one rename
                swap_folder(temporary, self.path / name)
                return
            for path in sorted(temporary.iterdir()):  # the manifest last
                if path.name != MANIFEST:
                    path.replace(self.path / path.name)
            sync_folder(self.path)
            (temporary / MANIFEST).replace(self._manifest_path(name))
            sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Delete a part of the results, in a folder without an index."""
        if (self.path / name).exists():
            remove_folder(self.path / name)

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write the index file when all parts are complete, then delete the files that are only needed to resume.

        The index file contains the identity, `values` and the manifests of all parts.
        """
        assert self._index is not None, "the folder has no index"
        parts = [self.manifest(name) for name in self.names()]
        write_json(self.path / self._index, {**self.identity, **values, "parts": parts}, writer="")
        for pattern in (".*.json", ".lock-*", IDENTITY, ".*.tmp"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        sync_folder(self.path)

    def _manifest_path(self, name: str) -> Path:
        """Return the path of the manifest of a part."""
        return self.path / (f"{name}/{MANIFEST}" if self._index is None else f".{name}.json")

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of a part of the results: `name`, `values`, `files`, and the `sha256` of these entries.

        `files` lists name, size and SHA-256 of every file; the files are not checked.

        Raises:
            FolderError: if the manifest is missing, damaged, or was written with another input, model or settings.
        """
        path = self._manifest_path(name)
        manifest = read_object(path) or self._indexed.get(name)
        if manifest is None:
            raise FolderError(f"{path} is missing")
        body = {key: manifest.get(key) for key in ("name", "values", "files")}
        if body["name"] != name or manifest.get("sha256") != self._signature(body):
            raise FolderError(f"{path} is damaged, or was written with other settings: its SHA-256 differs")
        return manifest

    def _signature(self, body: Mapping[str, Any]) -> str:
        """Return the SHA-256 of the identity of the folder and all further entries (`body`) of a manifest."""
        return hashlib.sha256(json.dumps([self.identity, body], sort_keys=True).encode()).hexdigest()


def lock_folder(folder: Path, rank: int = 0) -> FileLock | None:
    """Create a folder, and acquire the lock file of a rank in it, as `lock_file` does."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock_file(folder / f".lock-{rank:05d}", folder)


def lock_file(path: Path, target: Path) -> FileLock | None:
    """Acquire a lock on `target`; the system releases it when the process ends.

    Returns None on a file system without locks, such as some mounts of Lustre and NFS: the lock file that filelock would use
    there remains after a kill.

    Raises:
        FolderError: if another process holds the lock.
    """
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise FolderError(
            f"another process writes to {target}: another command, or a process whose launcher was killed. Wait for it, or "
            "end it."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        path.unlink(missing_ok=True)
        return None
    return lock


def unlock_folder(lock: FileLock | None) -> None:
    """Remove the lock file of `lock_file` or `lock_folder`, and release the lock."""
    if lock is not None:
        with suppress(PermissionError):  # Windows, where filelock removes the file
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def check_resumable(path: Path, option: str, index: str | None = None) -> None:
    """Check that a path can be a `ResumableFolder`: the path is new, empty, or was written by `ResumableFolder`.

    Args:
        option: Command line flag that names the path, for error messages.
        index: Name of the index file, if the folder has an index file.

    Raises:
        FolderError: if the path is a file, or a folder that contains other files.
    """
    if path.exists() and not path.is_dir():
        raise FolderError(f"{option} {path} is a file. Give the name of a folder that is new or empty.")
    names = {item.name for item in path.iterdir()} if path.is_dir() else set()
    known = names & {IDENTITY, index} or (index is None and any(path.glob(f"[!.]*/{MANIFEST}")))
    if not known and (others := sorted(name for name in names if not name.startswith("."))):
        raise FolderError(
            f"{option} {path} contains other files ({', '.join(others[:3])}). Give the name of a folder that is new, empty, or "
            "was written by this command."
        )
