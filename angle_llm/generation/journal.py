"""What has been answered, on disk the moment it is: a request that was paid for is never made again.

    OUT.journal.jsonl       {"key": …, "text": …, "finished": true, "read_tokens": 61, "new_tokens": 40}     one a line

The key tells generator, message, sampling and seed, so other settings find nothing of theirs here and lose nothing either: the
answers of both stay. A model that changes under its name is not noticed; remove the journal then. A line that a kill cut off is
dropped; it was the last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from angle_llm.generation.generators import Answer

_FIELDS: dict[str, type] = {"key": str, "text": str, "finished": bool, "read_tokens": int, "new_tokens": int}


class JournalError(ValueError):
    """A journal that cannot be gone on with, with what to do."""


class Journal:
    """The answers there are, and a place to add to them. As a context manager it holds the right to write.

    Every line reaches the operating system at once, so killing the process loses none; `sync_every` lines, and at the end, the
    disk, so losing power loses no more than so many.
    """

    def __init__(self, path: Path, *, sync_every: int = 16) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        self._sync_every = sync_every
        self._unsynced = 0
        self._lock = Lock()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _sole_writer(self.path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def add(self, answered: Iterable[tuple[str, Answer]]) -> None:
        """Writes answers by their keys; those that are there already stay as they are. Threads may do so at once."""
        with self._lock:
            assert self._file is not None, "entered first"
            for key, answer in answered:
                if key not in self.answers:
                    line = json.dumps({"key": key, **asdict(answer)}).encode() + b"\n"
                    self._file.write(line)
                    self.answers[key] = answer
                    self._unsynced += 1
            self._file.flush()
            if self._unsynced >= self._sync_every:
                os.fsync(self._file.fileno())
                self._unsynced = 0

    def _read(self) -> None:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    if not isinstance(entry, dict) or {name: type(entry.get(name)) for name in _FIELDS} != _FIELDS:
                        raise ValueError("not an answer")
                except (ValueError, RecursionError):
                    raise JournalError(
                        f"{self.path}:{number} is not what was written there. Remove this line, and its request is made again; "
                        "or remove the file, and all are."
                    ) from None
                key = entry.pop("key")
                self.answers[key] = Answer(**{name: entry[name] for name in _FIELDS if name != "key"})


def _sole_writer(path: Path) -> BinaryIO:
    """The file opened to add to it, without what a killed process wrote of a line."""
    file = path.open("ab")
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JournalError(f"another process is writing {path}. Wait for it, or end it.") from None
    except (ImportError, OSError):
        pass  # some network file systems have no locks
    content = path.read_bytes()
    file.truncate(content.rfind(b"\n") + 1)
    return file
