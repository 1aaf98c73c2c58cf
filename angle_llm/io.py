"""Atomic writes of files and folders, JSON, checksums, and progress of long commands.

write_file, write_text, write_json   one file, written whole or not at all
write_folder                         one folder, written whole or not at all
checksums, check_files               sizes and SHA-256 of the files of a folder
progress_bar, log                    a bar on a terminal, lines in a log file

Data is written under a hidden name, flushed to disk, and then renamed, which is atomic. `resumable` uses this.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_EVERY_SECONDS = 60


class FolderError(ValueError):
    """A folder that cannot be resumed or read, with the file and what to do."""


def write_file(path: Path, fill: Callable[[BinaryIO], object], writer: str | None = None) -> None:
    """Write a file whole or not at all. A link keeps its target; a pipe or a device is written directly.

    The hidden name contains `writer`, by default the process id, so that several processes can write one file. A fixed
    `writer` overwrites what a killed process left.
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
    sync_folder(path.parent)


def write_text(path: str | Path, text: str, writer: str | None = None) -> None:
    """Write a text as UTF-8 with its line ends unchanged; see `write_file`."""
    content = text.encode()
    write_file(Path(path), lambda file: file.write(content), writer)


def write_json(path: str | Path, values: Any, writer: str | None = None) -> None:
    """Write a JSON value; see `write_file` and `json_text`."""
    write_text(path, json_text(values), writer)


def json_text(values: Any) -> str:
    """Return a JSON value as indented text. Lone surrogates (of file names that are not UTF-8) are escaped.

    Raises:
        ValueError: for NaN or infinity, which JSON cannot represent.
    """
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """Return plain JSON values: dataclasses and mappings as objects, paths as strings, NaN and infinity as null."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on disk."""
    if os.name == "nt":  # Windows opens no folder, and flushes no file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # some network file systems cannot flush a folder
        sync(path)


def _hidden(path: Path, writer: str | None) -> Path:
    writer = str(os.getpid()) if writer is None else writer
    return path.with_name(f".{path.name}{f'.{writer}' if writer else ''}.tmp")


def write_folder(target: Path, fill: Callable[[Path], object], writer: str | None = None) -> None:
    """Write a folder whole or not at all; an existing folder is replaced with everything in it.

    `fill` gets an empty folder beside the target. All files get the mode of ordinary files, 0666 less the umask:
    libraries create some with 0600. `writer` as in `write_file`.
    """
    target = Path(os.path.realpath(target))
    with filled(target, fill, writer) as temporary:
        swap(temporary, target)


def restore_folder(folder: Path) -> None:
    """Repair a folder after a killed `write_folder`: restore the old one if none exists, and remove hidden remains."""
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists() and not folder.exists():
        retired.replace(folder)
    for remains in (retired, *folder.parent.glob(f".{folder.name}.*tmp")):
        shutil.rmtree(remains, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, or the remains of a killed removal:
    rename it to a hidden name first, so that no partial folder keeps its name."""
    swap(None, folder)


@contextmanager
def filled(target: Path, fill: Callable[[Path], object], writer: str | None) -> Iterator[Path]:
    """Yield a hidden folder beside the target, filled and flushed to disk; remove it at the end if it still exists."""
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


def swap(new: Path | None, target: Path) -> None:
    """Rename `new` to `target`, if given. An existing target is first renamed to a hidden name, and deleted last."""
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
    sync_folder(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def sha256_of(file: Path | BinaryIO) -> str:
    """Return the SHA-256 of a file, or of what is left of a stream, as hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path) -> list[dict[str, Any]]:
    """Return name, size in bytes and SHA-256 of every file of a folder, sorted by name; names are relative to it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {"name": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in paths
    ]


def check_files(folder: Path, listed: Iterable[Mapping[str, Any]]) -> None:
    """Compare the files of a folder with the `checksums` from when they were written.

    Raises:
        FolderError: naming the first file that is missing or damaged, is a link, or leads out of the folder.
    """
    for entry in listed:
        path = folder / entry["name"]
        if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):  # it could name any file
            raise FolderError(f"{path} is not a file of this folder")
        if not path.is_file():
            raise FolderError(f"{path} is missing")
        if path.stat().st_size != entry["size"] or sha256_of(path) != entry["sha256"]:
            raise FolderError(f"{path} is damaged: its size or SHA-256 differs from that of the file that was written")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if there is no file.

    Raises:
        FolderError: if the file contains anything else.
    """
    if not path.is_file():  # opening a pipe would block
        return None
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is damaged: {error}. Remove it, and run the command again.") from None
    return values


def log(line: str) -> None:
    """Print a line, beside a progress bar if there is one. A closed pipe is ignored: work continues."""
    from tqdm import tqdm

    with suppress(OSError, ValueError, AttributeError):  # AttributeError: stdout is None, older tqdm
        tqdm.write(line)
    discard_closed_pipes()


def discard_closed_pipes() -> None:
    """Flush stdout and stderr. If the reader of one has ended, redirect it to the null device: otherwise the flush at
    the end of the program would fail and change its exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, AttributeError):  # a stream of a notebook has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):  # closed, or None
            continue


def has_terminal() -> bool:
    """Return whether a bar can be drawn on stderr: a terminal or a notebook."""
    return sys.stderr is not None and not sys.stderr.closed and (sys.stderr.isatty() or "ipykernel" in sys.modules)


def progress_bar(
    name: str, total: int, unit: str, *, done: int = 0, enabled: bool = True, transient: bool = False
) -> tqdm[Any]:
    """Return a tqdm bar on stderr; without a terminal, it prints lines at the start, once a minute and at the end.

    Args:
        done: pieces done before; they count as done, but not for the rate.
        enabled: whether this process prints; of several processes, the main one does.
        transient: a part of something larger: the bar disappears at the end, and a log gets lines only after a minute.
    """
    from tqdm import tqdm  # not at the top: it reads TQDM_DISABLE on import, which the program sets for other libraries

    options: dict[str, Any] = {"total": total, "desc": name, "unit": unit, "initial": done, "leave": not transient}
    if has_terminal():
        return tqdm(**options, smoothing=0.1, disable=not enabled)
    delay = LOG_EVERY_SECONDS if transient else 0
    options |= {"mininterval": LOG_EVERY_SECONDS, "miniters": 1, "ncols": 0, "delay": delay, "smoothing": 0}
    return tqdm(**options, file=_Lines(), disable=not enabled)


@contextmanager
def paused(bar: tqdm[Any]) -> Iterator[None]:
    """Exclude the time inside from the rate of a bar."""
    started = time.time()
    yield
    if not bar.disable:
        bar.start_t += time.time() - started
        bar.last_print_t += time.time() - started


class _Lines:
    """A stream for tqdm that prints every state of a bar as a line to stderr; a closed pipe is ignored."""

    def write(self, text: str) -> None:
        if line := text.strip():
            with suppress(OSError, ValueError, AttributeError):  # closed, or None
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def flush(self) -> None:
        pass
