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
        DataError: if another process writes to the file, or a line is not JSON.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, FileLock(f"{path}.lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise DataError(f"another process writes to {path}. Wait for it, or end it") from None
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill has cut off the last row
        self.rows: list[Row] = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.rows.append(json.loads(line))
            except ValueError as error:
                message = f"{path}:{number}: {error}. Remove this line; its content is requested again"
                raise DataError(message) from None
        self._file = path.open("ab")
        self._file.truncate(len(whole))

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
