"""Files that are there whole, or not at all, and JSON that others can read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO


def write_file(path: Path, fill: Callable[[BinaryIO], object], by: str | None = None) -> None:
    """Writes a file whole or not at all, even if the power fails: under a hidden name beside it, put on disk, then renamed.

    The hidden name is of this process, so several may write one file at one time. What a killed one leaves is written over
    only under a name that the next one has too: `by`, which must then tell writers apart ("" where there is one). A link
    goes on pointing where it did; a pipe or a device is written to as it is.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            fill(file)
        return
    writer = str(os.getpid()) if by is None else by
    temporary = path.with_name(f".{path.name}{f'.{writer}' if writer else ''}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # some network file systems sync no folder
        sync(path.parent)


def write_text(path: str | Path, text: str, by: str | None = None) -> None:
    """Writes a text as UTF-8, with its line ends as they are; `by` as in `write_file`."""
    content = text.encode()
    write_file(Path(path), lambda file: file.write(content), by)


def write_json(path: str | Path, values: Any, by: str | None = None) -> None:
    """Writes a JSON value; `by` as in `write_file`.

    Raises:
        ValueError: for NaN or infinity, which JSON cannot say.
    """
    write_text(path, json_text(values), by)


def json_text(values: Any) -> str:
    """A JSON value as the project's files hold it. Half a character (of a file's name that is not UTF-8) is escaped.

    Raises:
        ValueError: for NaN or infinity, which JSON cannot say.
    """
    told = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return told.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """JSON values: dataclasses and mappings as objects, paths as text, numbers that are not finite as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    if os.name == "nt":  # Windows opens no folder, and flushes no file that is open to be read
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
