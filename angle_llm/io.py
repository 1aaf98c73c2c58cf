"""Atomic writes of files and folders, folders that resume after a kill, and progress of long commands.

    write_file, write_text, write_json   write a file completely or not at all
    write_json_lines                     write the rows of a JSON Lines file completely or not at all
    write_folder                         write a folder completely or not at all
    checksums, check_files               sizes and SHA-256 of the files of a folder
    ResumableFolder                      results of long work, written part by part
    progress_bar, log                    a progress bar on a terminal, lines in a log file

Data is written under a hidden name, flushed to disk, and then renamed, which is atomic. A killed process leaves a
hidden `.NAME.WRITER.tmp` at most.

Layout of a resumable folder:

    identity.json          input, model and settings of the work; a folder never mixes parts of different work
    PART/…                 the files of a part
    PART/manifest.json     name and values of the part, sizes and SHA-256 of its files, and a SHA-256 over all of this
    .lock-RANK             lock of the process that writes; removed at the end

In a folder with an index, the files of all parts lie in the folder itself, and the manifest of a part is `.PART.json`.
When all parts are complete, the index file replaces `identity.json` and the manifests.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from tqdm import tqdm


class FolderError(ValueError):
    """Error for a folder of results that cannot be resumed or read; the message names the file and what to do."""


# ------------------------------------------------------------------------------------------------ files


def write_file(path: Path, fill: Callable[[BinaryIO], object], writer: str | None = None) -> None:
    """Write a file atomically: completely or not at all.

    The target of a symbolic link is replaced, the link stays. A pipe or a device is written directly.

    Args:
        fill: Function that gets the open binary file and writes the content.
        writer: Part of the temporary file name; None: the process id, so that several processes can write the same
            file. With a fixed value, the temporary file of a killed process is overwritten.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            fill(file)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden(path, writer)
    try:
        with temporary.open("wb") as file:
            fill(file)
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # a full disk: the system names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _hidden(path: Path, writer: str | None) -> Path:
    """Return the temporary path for writing `path`: `.NAME.WRITER.tmp` in the same folder.

    `writer` None is the process id; an empty `writer` gives `.NAME.tmp`.
    """
    writer = str(os.getpid()) if writer is None else writer
    return path.with_name(f".{path.name}{f'.{writer}' if writer else ''}.tmp")


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk (fsync)."""
    if os.name == "nt":  # Windows opens no folder, and flushes no file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk (fsync), if the file system supports this."""
    with suppress(OSError):  # some network file systems cannot flush a folder
        sync(path)


def write_text(path: str | Path, text: str, writer: str | None = None) -> None:
    """Write a text file atomically, in UTF-8, with unchanged line ends; `writer` is described at `write_file`."""
    content = text.encode()
    write_file(Path(path), lambda file: file.write(content), writer)


def write_json(path: str | Path, values: Any, writer: str | None = None) -> None:
    """Write a value as an indented JSON file, atomically; `writer` is described at `write_file`."""
    write_text(path, json_text(values), writer)


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]], writer: str | None = None) -> None:
    """Write rows as a JSON Lines file, atomically, compressed if its name ends in .gz; lone surrogates are escaped.

    Equal rows give equal bytes. `writer` is described at `write_file`.
    """
    lines = (json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for row in rows)

    def fill(file: BinaryIO) -> None:
        with (
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) if str(path).endswith(".gz") else nullcontext(file) as target
        ):
            target.writelines(lines)

    write_file(Path(path), fill, writer)


def json_text(values: Any) -> str:
    """Return a value as indented JSON text. Lone surrogates (from file names that are not UTF-8) are escaped.

    Raises:
        ValueError: for NaN or infinity, which JSON cannot represent.
    """
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that contains an object; return None if the file does not exist.

    Raises:
        FolderError: if the file does not contain a JSON object.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}. Remove it, and run the command again.") from None
    return values


def plain(value: Any) -> Any:
    """Convert a value to types that JSON can represent.

    Dataclasses and mappings become dictionaries, tuples lists, paths strings; NaN and infinity become None.
    """
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_of(file: Path | BinaryIO) -> str:
    """Return the SHA-256 of a file, or of the rest of an open binary stream, as hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ folders


def write_folder(target: Path, fill: Callable[[Path], object], writer: str | None = None) -> None:
    """Write a folder atomically: completely or not at all. An existing folder is replaced with all its files.

    `fill` gets an empty temporary folder and creates the files. All files get the usual mode, 0666 minus the umask,
    because some libraries create files with mode 0600. `writer` is described at `write_file`.
    """
    target = Path(os.path.realpath(target))
    with _filled(target, fill, writer) as temporary:
        _swap(temporary, target)


def restore_folder(folder: Path) -> None:
    """Repair a folder after a process was killed in `write_folder`.

    Restores the previous folder if `folder` does not exist, and deletes temporary files.
    """
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists() and not folder.exists():
        retired.replace(folder)
    for remains in (retired, *folder.parent.glob(f".{folder.name}.*tmp")):
        shutil.rmtree(remains, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder atomically: the folder is first renamed to a hidden name, then its files are deleted."""
    _swap(None, folder)


@contextmanager
def _filled(target: Path, fill: Callable[[Path], object], writer: str | None) -> Iterator[Path]:
    """Context manager: create a temporary folder beside `target`, fill it by `fill`, and flush all files to disk.

    The caller renames the temporary folder; otherwise the folder is deleted at the end. `writer` is described at
    `write_file`.
    """
    temporary = _hidden(target, writer)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    mode = temporary.stat().st_mode & 0o666
    try:
        fill(temporary)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        sync(temporary)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path | None, target: Path) -> None:
    """Replace the folder `target` by the folder `new` with renames; delete `target` if `new` is None.

    The old folder is renamed to `.NAME.old` first, and deleted last.
    """
    retired = target.with_name(f".{target.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        target.replace(retired)
    try:
        if new is not None:
            new.replace(target)
    except BaseException:
        retired.replace(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def checksums(folder: Path) -> list[dict[str, Any]]:
    """Return the name, size in bytes and SHA-256 of every file in a folder and its subfolders, sorted by name.

    Names are relative to the folder.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {"name": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in paths
    ]


def check_files(folder: Path, listed: Iterable[Mapping[str, Any]]) -> None:
    """Check that files in a folder have the recorded sizes and SHA-256; `listed` is a result of `checksums`.

    Raises:
        FolderError: for the first file that is missing, damaged, a link, or outside of the folder.
    """
    for entry in listed:
        path = folder / entry["name"]
        if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):  # a manifest could name any file
            raise FolderError(f"{path}: expected a regular file inside {folder}, got a link or a path outside")
        if not path.is_file():
            raise FolderError(f"{path} is missing")
        if path.stat().st_size != entry["size"] or sha256_of(path) != entry["sha256"]:
            raise FolderError(f"{path} is damaged: its size or SHA-256 differs from the recorded value")


# ------------------------------------------------------------------------------------------------ resumable folders


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
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        option: str,
        index: str | None = None,
        rank: int = 0,
    ) -> None:
        """Store the arguments; only entering the context manager reads or creates the folder.

        Args:
            identity: JSON object with the input, model and settings of the command; all parts must have the same
                values.
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
        self._acquire()
        try:
            index = (read_object(self.path / self._index) if self._index is not None else None) or {}
            self._indexed = {part["name"]: part for part in index.get("parts", ())}
            written = read_object(self.path / IDENTITY) or index
            changed = differences(written, self.identity)
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

    def _acquire(self) -> None:
        """Create the folder, and acquire the lock file of this rank in the folder.

        Raises:
            FolderError: if another process holds the lock.
        """
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / f".lock-{self._rank:05d}", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise FolderError(
                f"another process writes to {self.path}: another command, or a process whose launcher was killed. Wait "
                "for it, or end it."
            ) from None

    def __exit__(self, *_: object) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)  # so that a refused command changes nothing
        self._lock.release()

    def names(self) -> list[str]:
        """Return the sorted names of all complete parts of the results; their files are not checked.

        A part is complete if it has a manifest.
        """
        if self._index is None:
            return sorted(path.parent.name for path in self.path.glob(f"*/{MANIFEST}"))
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
        """Write or replace a part of the results, completely or not at all.

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

        with _filled(self.path / name, complete, writer="") as temporary:
            if self._index is None:
                _swap(temporary, self.path / name)
                return
            for path in sorted(temporary.iterdir()):
                if path.name != MANIFEST:
                    path.replace(self.path / path.name)
            _sync_folder(self.path)
            (temporary / MANIFEST).replace(self._manifest_path(name))
            _sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Delete a part of the results; in a folder with an index only its manifest, so that the part no longer counts."""
        if self._index is not None:
            self._manifest_path(name).unlink(missing_ok=True)
        elif (self.path / name).exists():
            remove_folder(self.path / name)

    def clear(self, names: Iterable[str]) -> None:
        """Delete the parts of the results with the given names, also parts that were written with other settings.

        The context manager need not be entered.

        Raises:
            FolderError: if another process writes to the folder.
        """
        if self.path.exists():
            self._acquire()
            try:
                for name in names:
                    self.remove(name)
            finally:
                self.__exit__()

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write the index file when all parts are complete, then delete the files that are only needed to resume.

        The index file contains the identity, `values` and the manifests of all parts.
        """
        assert self._index is not None, "the folder has no index"
        parts = [self.manifest(name) for name in self.names()]
        write_json(self.path / self._index, {**self.identity, **values, "parts": parts}, writer="")
        for pattern in (".*.json", ".lock-*", IDENTITY, ".*.tmp"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        _sync_folder(self.path)

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
    known = names & {IDENTITY, index} or (index is None and any(path.glob(f"*/{MANIFEST}")))
    if not known and (others := sorted(name for name in names if not name.startswith("."))):
        raise FolderError(
            f"{option} {path} contains other files ({', '.join(others[:3])}). Give the name of a folder that is new, empty, or "
            "was written by this command."
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the fields in which two nested JSON objects differ, as lines such as `data.sets.0.weight 1 (now 2)`.

    Fields that only `then` has are ignored. `above` is the prefix of the field names.
    """
    lines = []
    for key, value in now.items():
        before = then.get(key)
        if isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
            before, value = ({str(index): item for index, item in enumerate(side)} for side in (before, value))
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            lines += differences(before, value, f"{above}{key}.")
        elif before != value:
            left, right = (f"{json.dumps(side, ensure_ascii=False):.100}" for side in (before, value))
            lines.append(f"{above}{key} {left} (now {right})")
    return lines


# ------------------------------------------------------------------------------------------------ progress


LOG_EVERY_SECONDS = 60
"""Seconds between the lines of a progress bar that is written to a log file instead of a terminal."""


def log(line: str) -> None:
    """Print a line to stdout, above the progress bar if one is shown; ignore a closed pipe."""
    from tqdm import tqdm

    with suppress(OSError, ValueError, AttributeError):  # AttributeError: stdout is None, older tqdm
        tqdm.write(line)
    discard_closed_pipes()


def discard_closed_pipes() -> None:
    """Flush stdout and stderr; redirect a stream to the null device if it is a pipe that the reader has closed.

    Otherwise the flush at the end of the program would fail and change its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, AttributeError):  # a stream of a notebook has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):  # closed, or None
            continue


def progress_bar(
    name: str, total: int, unit: str, *, done: int = 0, enabled: bool = True, transient: bool = False
) -> tqdm[Any]:
    """Return a tqdm progress bar on stderr. Without a terminal, the bar prints a line at start, per minute and at end.

    Args:
        done: Number of units that an earlier run completed; the rate does not count these units.
        enabled: Whether this process prints; of several processes, only the main process should print.
        transient: Whether the bar disappears at the end. It appears only after two seconds, in a log file after a minute.
    """
    from tqdm import tqdm  # not at the top: it reads TQDM_DISABLE on import, which the program sets for other libraries

    options: dict[str, Any] = {"total": total, "desc": name, "unit": unit, "initial": done, "leave": not transient}
    options["delay"] = 2 if transient else 0
    if "ipykernel" in sys.modules and enabled:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text
            from tqdm.auto import tqdm as notebook_tqdm

            return notebook_tqdm(**options, smoothing=0.1)
    if has_terminal():
        return tqdm(**options, smoothing=0.1, disable=not enabled)
    options |= {"mininterval": LOG_EVERY_SECONDS, "miniters": 1, "ncols": 0, "smoothing": 0}
    options["delay"] = LOG_EVERY_SECONDS if transient else 0
    return tqdm(**options, file=_Lines(), disable=not enabled)


def has_terminal() -> bool:
    """Return whether stderr can show a progress bar, because stderr is a terminal or the program runs in a notebook."""
    return sys.stderr is not None and not sys.stderr.closed and (sys.stderr.isatty() or "ipykernel" in sys.modules)


class _Lines:
    """Output stream for tqdm that prints each state of a progress bar as a line to stderr; ignores a closed pipe."""

    def write(self, text: str) -> None:
        if line := text.strip():
            with suppress(OSError, ValueError, AttributeError):  # closed, or None
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def flush(self) -> None:
        pass
