"""Atomic writes of files and folders, and progress of long commands.

    write_file, write_text, write_json   write a file completely or not at all
    write_json_lines                     write the rows of a JSON Lines file completely or not at all
    write_folder                         write a folder completely or not at all
    checksums, check_files               sizes and SHA-256 of the files of a folder
    progress_bar, log                    a progress bar on a terminal, lines in a log file

Data is written under a hidden name, flushed to disk, and then renamed, which is atomic. A killed process leaves a
hidden `.NAME.WRITER.tmp` at most. `resumable_folder` writes results of long work part by part.
"""

from __future__ import annotations

import errno
import glob
import gzip
import hashlib
import json
import math
import os
import platform
import secrets
import shutil
import stat
import sys
import time
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

    The target of a symbolic link is replaced, the link stays. The permissions of a replaced file are kept. A pipe or a device
    is written directly, and /dev/stdout and /dev/stderr are continued, also if they are files.

    Args:
        fill: Function that gets the open binary file and writes the content.
        writer: Part of the temporary file name; None: the process id and random digits, so that several processes can
            write the same file. With a fixed value, the temporary file of a killed process is overwritten.
    """
    descriptor = {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))
    if descriptor is not None:
        sys.stdout.flush()
        with os.fdopen(os.dup(descriptor), "wb") as file:  # a file opened again would have another position
            fill(file)
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            fill(file)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden(path, writer)
    try:
        with temporary.open("wb") as file:
            with suppress(OSError):  # a new file, or a file system without permissions
                shutil.copymode(path, temporary)
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


_LEFT_SECONDS = 24 * 3600
"""Age from which the temporary folder of another process is removed: the process was killed."""


def _hidden(path: Path, writer: str | None) -> Path:
    """Return the temporary path for writing `path`: `.NAME.WRITER.tmp` in the same folder.

    `writer` None is the process id with random digits; an empty `writer` gives `.NAME.tmp`.
    """
    writer = f"{os.getpid()}-{secrets.token_hex(4)}" if writer is None else writer  # containers have equal process ids
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


def sync_folder(path: Path) -> None:
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

    Dataclasses and mappings become dictionaries, tuples and arrays lists, paths strings; NaN and infinity become None.
    """
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the SHA-256 of a value as JSON in ASCII, as hexadecimal digits; the JSON is not in memory as a whole."""
    digest = hashlib.sha256()
    for part in json.JSONEncoder().iterencode(value):
        digest.update(part.encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ folders


def write_folder(target: Path, fill: Callable[[Path], object], writer: str | None = None) -> None:
    """Write a folder atomically: completely or not at all. An existing folder is replaced with all its files.

    `fill` gets an empty temporary folder and creates the files. All files get the usual mode, 0666 minus the umask,
    because some libraries create files with mode 0600. `writer` is described at `write_file`.

    Raises:
        FolderError: for a mount or the working directory, which cannot be replaced.
    """
    target = check_replaceable(target)
    with filled_folder(target, fill, writer) as temporary:
        if target.is_dir():
            with suppress(OSError):
                shutil.copymode(target, temporary)
        swap_folder(temporary, target)


def check_replaceable(folder: Path) -> Path:
    """Return the absolute path of an output folder; raise `FolderError` for a mount or the working directory."""
    target = Path(os.path.realpath(folder.expanduser()))
    if os.path.ismount(target) or target == Path.cwd():  # `is_mount` raises on Windows with Python 3.10
        raise FolderError(
            f"{target} is a mount or the working directory, which cannot be replaced. Name a folder in it."
        )
    return target


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
    swap_folder(None, folder)


@contextmanager
def filled_folder(target: Path, fill: Callable[[Path], object], writer: str | None) -> Iterator[Path]:
    """Context manager: create a temporary folder beside `target`, fill it by `fill`, and flush all files to disk.

    The caller renames the temporary folder; otherwise the folder is deleted at the end. `writer` is described at
    `write_file`.
    """
    temporary = _hidden(target, writer)
    for remains in target.parent.glob(f".{glob.escape(target.name)}.*tmp") if writer is None else [temporary]:
        with suppress(FileNotFoundError):  # another process has just renamed its folder
            if remains == temporary or time.time() - remains.stat().st_mtime > _LEFT_SECONDS:
                shutil.rmtree(remains, ignore_errors=True)
    temporary.mkdir(parents=True)
    mode = temporary.stat().st_mode & 0o666
    try:
        fill(temporary)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                with suppress(PermissionError):  # a network file system whose files belong to another user
                    path.chmod(mode)
                sync(path)
            else:
                sync_folder(path)
        sync_folder(temporary)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def swap_folder(new: Path | None, target: Path) -> None:
    """Replace the folder `target` by the folder `new` with renames; delete `target` if `new` is None.

    The old folder is renamed to `.NAME.old` first, and deleted last. If the file system does not rename it (overlayfs, for
    a folder of a container image), it is copied, and a kill can leave a part of it.
    """
    retired = target.with_name(f".{target.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        try:
            target.replace(retired)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if new is not None:  # in a container, overlayfs renames no folder of an image
                shutil.copytree(target, retired, symlinks=True)
            shutil.rmtree(target)
    try:
        if new is not None:
            new.replace(target)
    except BaseException:
        if retired.exists():
            retired.replace(target)
        raise
    sync_folder(target.parent)
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


def differences(then: Mapping[str, Any], now: Mapping[str, Any], above: str = "", removed: bool = False) -> list[str]:
    """Return the fields in which two nested JSON objects differ, as lines such as `data.sets.0.weight 1 (now 2)`.

    Fields that only `then` has are returned if `removed` is set. `above` is the prefix of the field names.
    """
    lines = []
    for key in dict.fromkeys([*now, *(then if removed else ())]):
        before, value = then.get(key), now.get(key)
        if isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
            before, value = ({str(index): item for index, item in enumerate(side)} for side in (before, value))
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            lines += differences(before, value, f"{above}{key}.", removed=removed)
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


def is_closed(error: OSError) -> bool:
    """Return whether the reader of a stream is gone: a closed pipe (EPIPE) or a closed terminal (EIO)."""
    return error.errno in (errno.EPIPE, errno.EIO)


def _is_file(stream: Any) -> bool:
    """Return whether a stream is a file on a disk."""
    with suppress(OSError, AttributeError):
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


def discard_closed_pipes(*, at_exit: bool = False) -> None:
    """Flush stdout and stderr; redirect a stream to the null device if its reader is gone, or for any error `at_exit`.

    Otherwise the flush at the end of the program would fail and change its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if at_exit or (is_closed(error) and not _is_file(stream)):  # EIO of a file is a failing disk
                with suppress(OSError, AttributeError):  # a stream of a notebook has no descriptor
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):  # closed, or None
            continue


def uses_windows_driver() -> bool:
    """Return whether the driver of a GPU is a driver of Windows: on Windows, and in WSL2."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's GPU memory allocator, read when torch first uses a GPU.

`set_allocator` sets both: torch 2.9 reads the settings from PYTORCH_CUDA_ALLOC_CONF, but warns that this name is
deprecated unless PYTORCH_ALLOC_CONF is set too. Later versions read either variable.
"""


def set_allocator() -> None:
    """Set environment variables that make torch's GPU allocator use expandable segments, unless a variable is set.

    Micro-batches have many shapes, which fragment segments of a fixed size. Has no effect after the first use of a GPU. torch
    has no expandable segments on Windows, and on some WSL2 systems their first allocation fails (pytorch#192330).
    """
    torch = sys.modules.get("torch")
    is_late = torch is not None and torch.cuda.is_initialized()
    if not (is_late or uses_windows_driver() or any(variable in os.environ for variable in ALLOCATOR)):
        os.environ |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")


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
    if sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty():
        return tqdm(**options, smoothing=0.1, disable=not enabled)
    options |= {"mininterval": LOG_EVERY_SECONDS, "miniters": 1, "ncols": 0, "smoothing": 0}
    options["delay"] = LOG_EVERY_SECONDS if transient else 0
    return tqdm(**options, file=_Lines(), disable=not enabled)


class _Lines:
    """Output stream for tqdm that prints each state of a progress bar as a line to stderr; ignores a closed pipe."""

    def write(self, text: str) -> None:
        if line := text.strip():
            with suppress(OSError, ValueError, AttributeError):  # closed, or None
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def flush(self) -> None:
        pass
