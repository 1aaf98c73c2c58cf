"""Examples on disk: a source that is too large for memory is read once, and looked up by number from then on.

    CACHE/examples/NAME-KEY/
        examples.arrow     the examples in record batches, memory-mapped (Arrow IPC)
        account.json       what became of every row, and a digest of the examples; written last

KEY stands for the file as it is (its place, size and time of change) and for the settings that decide how it is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from angle_llm.data.formats import DataError, Example, PositivePair, ScoredPair, Triple
from angle_llm.data.order import Order
from angle_llm.io import log

CACHE_VARIABLE = "ANGLE_LLM_CACHE"
MEMORY_LIMIT = 100_000_000
"""Examples that take fewer bytes than this, counted roughly, stay in memory and are written nowhere."""

_ROWS_TOGETHER = 4096
_BYTES_TOGETHER = 32_000_000
"""Whichever comes first ends a record batch."""
_BYTES_OF_AN_OBJECT = 300
_SECONDS_LEFT = 24 * 3600
"""What a killed process has left is removed after so long."""
_KINDS: dict[str, type[Example]] = {kind.__name__: kind for kind in (ScoredPair, PositivePair, Triple)}


def cache_folder() -> Path:
    """Where stores are kept: `ANGLE_LLM_CACHE`, else the user's cache folder. It may be removed at any time."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "angle_llm"


def bytes_of(example: Example) -> int:
    """About what an example takes in memory."""
    return _BYTES_OF_AN_OBJECT + sum(len(value) for value in _values(example) if isinstance(value, str))


def digest_of(examples: Iterable[Example]) -> str:
    """Equal for equal examples in the same order."""
    if isinstance(examples, ExampleStore | Selected):
        return examples.digest
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()[:16]


class ByNumber(Sequence[Example], ABC):
    """Examples that are looked up one by one: numbers from the end, slices, and what is out of range, as of a list."""

    @abstractmethod
    def _at(self, number: int) -> Example:
        """The example of a number from 0 to below the length."""

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[index]
        return [self._at(number) for number in numbers] if isinstance(numbers, range) else self._at(numbers)


class ExampleStore(ByNumber):
    """Examples of a folder that `write_store` has written; they are read from disk one by one."""

    def __init__(self, folder: Path) -> None:
        import pyarrow

        self.folder = folder
        written = json.loads((folder / "account.json").read_text(encoding="utf-8"))
        self.account: dict[str, Any] = written["account"]
        """What `write_store` was given."""
        self.digest: str = written["digest"]
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / "examples.arrow")))
        self._kind = _KINDS[reader.schema.metadata[b"kind"].decode()]
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _at(self, number: int) -> Example:
        which = bisect_right(self._ends, number)
        batch = self._batches[which]
        row = number - (self._ends[which] - batch.num_rows)
        return self._kind(*(column[row].as_py() for column in batch.columns))


class Selected(ByNumber):
    """Some examples of others, in an order of its own."""

    def __init__(self, examples: ExampleStore, order: Order) -> None:
        self._examples = examples
        self._order = order

    @property
    def digest(self) -> str:
        """Of the examples it is chosen from, and of the choice."""
        return hashlib.sha256(self._examples.digest.encode() + self._order.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._order)

    def _at(self, number: int) -> Example:
        return self._examples[int(self._order[number])]


class StoreWriter:
    """Writes examples of one kind into a folder that is whole or not there. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[Example] = []
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._writer: Any = None

    def __enter__(self) -> StoreWriter:
        with self._told():
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            for left in self._folder.parent.glob(".*-left-*"):  # by a killed process
                if time.time() - left.stat().st_mtime > _SECONDS_LEFT:
                    shutil.rmtree(left, ignore_errors=True)
            self._place = Path(tempfile.mkdtemp(prefix=".filling-left-", dir=self._folder.parent))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk it has been told
            if self._writer is not None:
                self._writer.close()
        shutil.rmtree(self._place, ignore_errors=True)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"data of this size is kept on disk, and could not be written to {self._folder.parent}: {error}. Give it room, "
                f"or name another folder in the environment variable {CACHE_VARIABLE}"
            ) from error

    def add(self, example: Example) -> None:
        """The next example, of the kind of the first."""
        self._digest.update(repr(example).encode())
        self._waiting.append(example)
        self._bytes += bytes_of(example)
        if len(self._waiting) == _ROWS_TOGETHER or self._bytes > _BYTES_TOGETHER:
            self._flush()

    def finish(self, account: dict[str, Any]) -> ExampleStore:
        """Puts the folder in its place, unless another process was faster, and opens it."""
        self._flush()
        told = json.dumps({"digest": self._digest.hexdigest()[:16], "account": account})
        with self._told():
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            (self._place / "account.json").write_text(told, encoding="utf-8")
            self._place.chmod(0o777 & ~_umask())  # a temporary folder is its maker's alone; a cache may be shared
            store = ExampleStore(self._place)  # whatever becomes of the folder, what is mapped stays
            try:
                self._place.replace(self._folder)
            except OSError:
                if not (self._folder / "account.json").is_file():
                    raise
        return store

    def _flush(self) -> None:
        import pyarrow

        if not self._waiting:
            return
        kind = type(self._waiting[0])
        schema = pyarrow.schema(
            [
                (field.name, pyarrow.float64() if field.name == "score" else pyarrow.large_string())
                for field in fields(kind)
            ],
            metadata={"kind": kind.__name__},
        )
        with self._told():
            if self._writer is None:
                self._writer = pyarrow.ipc.new_file(str(self._place / "examples.arrow"), schema)
            rows = zip(*map(_values, self._waiting), strict=True)
            columns = [pyarrow.array(values, field.type) for values, field in zip(rows, schema, strict=True)]
            self._writer.write_batch(pyarrow.record_batch(columns, schema=schema))
        self._waiting.clear()
        self._bytes = 0


def open_store(folder: Path) -> ExampleStore | None:
    """The store of a folder, None if there is none or it is damaged; then it is put out of the way."""
    if not folder.exists():
        return None
    try:
        return ExampleStore(folder)
    except (OSError, ValueError, LookupError) as error:  # pyarrow's and json's errors are such
        # The system may refuse to open or map a sound file; pyarrow's own errors about what is in it have no number.
        if getattr(error, "errno", None) not in (None, errno.ENOENT):
            raise DataError(f"{folder} cannot be opened: {error}. Remove it to have it made anew") from error
        remove_store(folder, str(error))
        return None


def remove_store(folder: Path, why: str) -> None:
    """Out of sight at once, then deleted; who has it open keeps what it has."""
    log(f"warning: {folder} is damaged ({why}); it is written anew")
    with suppress(OSError):  # another process was faster
        hidden = tempfile.mkdtemp(prefix=".broken-left-", dir=folder.parent)
        folder.replace(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _values(example: Example) -> tuple[str | float, ...]:
    return tuple(getattr(example, field.name) for field in fields(example))
