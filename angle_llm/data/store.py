"""Examples that do not fit in memory: written once to an Arrow file in a cache folder, then memory-mapped.

    CACHE/examples/NAME-KEY/
        examples.arrow     the examples
        account.json       the report of the rows, and a hash of the examples

The folder is written completely or not at all. KEY is a hash of the paths, sizes and modification times of the source
files, and of the settings that affect reading. `datasets.Dataset.from_generator` would also work, but it takes 27 µs
per row instead of 12, 4 s to import, and does not store the report.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path
from typing import Any, get_args

from angle_llm.data.formats import Example, texts_of
from angle_llm.data.order import Order
from angle_llm.io import filled_folder, swap_folder

CACHE_VARIABLE = "ANGLE_LLM_CACHE"
"""Environment variable with the path of the cache folder."""
MEMORY_LIMIT = 100_000_000
"""Maximum estimated size in bytes of the examples of a dataset in memory; larger datasets are stored on disk."""

_ROWS_PER_BATCH = 1024
_BYTES_PER_OBJECT = 300
_CLASSES: dict[str, Callable[..., Example]] = {kind.__name__: kind for kind in get_args(Example)}


def cache_folder() -> Path:
    """Return the path of the cache folder: the environment variable `ANGLE_LLM_CACHE`, else `~/.cache/angle_llm`.

    `XDG_CACHE_HOME` replaces `~/.cache` if set. The folder can be deleted at any time.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "angle_llm"
    return Path(os.environ.get(CACHE_VARIABLE) or usual).expanduser()


def bytes_of(example: Example) -> int:
    """Return an estimate of the memory that a training example needs, in bytes."""
    return _BYTES_PER_OBJECT + sum(map(len, texts_of(example)))


def digest_of(examples: Iterable[Example]) -> str:
    """Return a hash of training examples and their order, as 16 hexadecimal digits."""
    if isinstance(examples, StoredExamples):
        return examples.digest
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()[:16]


class StoredExamples(Sequence[Example]):
    """Memory-mapped training examples in a folder written by `write_store`.

    With `order`, an array of indices, the sequence contains only the examples at these indices, in this order.
    """

    def __init__(self, folder: Path, order: Order | None = None) -> None:
        import pyarrow

        self.folder = folder
        written = json.loads((folder / "account.json").read_text(encoding="utf-8"))
        self.account: dict[str, Any] = written["account"]
        """JSON object that `write_store` stored with the examples (its argument `account`)."""
        self.digest: str = written["digest"]
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / "examples.arrow")))
        self._example_class = _CLASSES[reader.schema.metadata[b"kind"].decode()]
        self._names = reader.schema.names
        self._columns = reader.read_all().columns
        self._order = order
        if order is not None:
            self.digest = hashlib.sha256(self.digest.encode() + order.tobytes()).hexdigest()[:16]

    def select(self, order: Order) -> StoredExamples:
        """Return a sequence of the examples at the given indices, in the order of the indices."""
        return StoredExamples(self.folder, order)

    def __len__(self) -> int:
        return len(self._columns[0]) if self._order is None else len(self._order)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        row = index if self._order is None else int(self._order[index])
        values = (column[row].as_py() for column in self._columns)
        values = (tuple(value) if isinstance(value, list) else value for value in values)
        return self._example_class(**dict(zip(self._names, values, strict=True)))


def write_store(folder: Path, examples: Iterable[Example], account: Callable[[], dict[str, Any]]) -> StoredExamples:
    """Write training examples to a folder as an Arrow file, and return the examples memory-mapped.

    Args:
        examples: At least one example; all of the same type.
        account: Called after the last example; returns a JSON object that is stored with the examples.
    """
    # The class of the first example gives the columns.
    digest = hashlib.sha256()
    rows = iter(examples)
    first = next(rows)
    rows = chain([first], rows)
    names = [item.name for item in fields(first)]

    def fill(target: Path) -> None:
        import pyarrow

        text = pyarrow.large_string()
        number = pyarrow.float64()
        types = {
            "score": number, "scores": pyarrow.list_(number),
            "positives": pyarrow.list_(text), "negatives": pyarrow.list_(text),
        }  # fmt: skip
        schema = pyarrow.schema([(name, types.get(name, text)) for name in names], {"kind": type(first).__name__})
        with pyarrow.ipc.new_file(str(target / "examples.arrow"), schema) as writer:
            while batch := list(islice(rows, _ROWS_PER_BATCH)):
                digest.update("".join(map(repr, batch)).encode())
                values = [{name: getattr(example, name) for name in names} for example in batch]
                writer.write_batch(pyarrow.RecordBatch.from_pylist(values, schema))
        content = {"digest": digest.hexdigest()[:16], "account": account()}
        (target / "account.json").write_text(json.dumps(content), encoding="utf-8")

    with filled_folder(folder, fill, None) as temporary:
        if not folder.exists():  # otherwise another process has written it, and may have mapped it
            swap_folder(temporary, folder)
    return StoredExamples(folder)
