"""An append-only JSON Lines file for results of requests, so that a killed program does not repeat them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from angle_llm.data import DataError

Row = dict[str, Any]


class Journal:
    """An append-only JSON Lines file, as a context manager. Opening removes a row that a kill has cut off.

    Raises:
        DataError: if another process writes to the file, or a line is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, FileLock(f"{path}.lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise DataError(f"another process writes to {path}. Wait for it, or end it") from None
        self._file = path.open("ab")
        try:
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            self._file.truncate(whole)  # a kill has cut off the last row
            self.rows = [self._parsed(number, line) for number, line in enumerate(content[:whole].splitlines(), 1)]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.release()

    def append(self, *rows: Row) -> None:
        """Append rows to the file and to `rows`; return when they are on disk."""
        # ASCII escapes, because a text can contain a lone surrogate.
        self._file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.extend(rows)

    def _parsed(self, number: int, line: bytes) -> Row:
        """Parse a line of the file as a JSON object."""
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DataError(
                f"{self.path}:{number}: expected a JSON object. Remove this line; its content is requested again"
            )
        return row
