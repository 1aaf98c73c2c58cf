"""An append-only file of JSON rows, for results of requests that must not be repeated."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from angle_llm.data import DataError

Row = dict[str, Any]


class Journal:
    """Rows of a JSON Lines file. Appended rows are on disk when `append` returns, so a kill loses none of them.

    A last line that a kill cut off is removed. One process at a time can open a file; its threads can append together.

    Raises:
        DataError: if another process has the file open, or a line is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock, self._thread_lock = FileLock(f"{path}.lock"), threading.Lock()
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise DataError(f"{path}: another process is writing this file; wait for it, or end it") from None
        try:
            self._file: BinaryIO = path.open("ab")
            content = path.read_bytes()
            self._file.truncate(content.rfind(b"\n") + 1)
            self.rows = [self._parsed(number, line) for number, line in enumerate(content.split(b"\n")[:-1], 1)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let other processes open it."""
        if hasattr(self, "_file"):
            self._file.close()
        self._lock.release()

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows to the file and to `rows`."""
        with self._thread_lock:
            added = list(rows)
            self._file.writelines(json.dumps(row).encode() + b"\n" for row in added)  # ASCII: halves of characters, too
            self._file.flush()
            os.fsync(self._file.fileno())
            self.rows += added

    def _parsed(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError(
                f"{self.path}:{number}: expected a JSON object; remove this line to request its content again"
            )
        return row
