"""Data sources from Python objects: lists, datasets, data frames and functions that return an iterator of rows."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from angle_llm.data.files.file_types import RowsInMemory
from angle_llm.data.formats import DataError
from angle_llm.data.sources import MEMORY, Source


def source_in_memory(data: Any, name: str) -> Source:
    """Return a data source with the rows of a Python object.

    The text of the source, `memory:NAME-DIGEST`, identifies the rows: equal rows have equal texts.

    Args:
        data: A list of dictionaries or of texts; a `Dataset`, `IterableDataset` or `DatasetDict` (split `train`) of the
            library `datasets`; a data frame or table that exports Arrow data (pandas, polars, pyarrow, duckdb); or a
            function that returns an iterator of dictionaries. The rows of an iterable dataset or a function are
            written to a temporary file, so they may be larger than memory.
        name: Name of the source in messages, such as `data`.

    Raises:
        DataError: for another type, or an object without rows.
    """
    reader = RowsInMemory(_rows(data, name), name=name)
    return Source(name, "rows", (reader,), text=f"{MEMORY}{name}-{reader.identity[:16]}")


def _rows(data: Any, name: str) -> Any:
    """Return the rows of an object as a list of dictionaries or a `Dataset`; raises as `source_in_memory`."""
    import datasets
    import pyarrow

    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        if "train" not in data:
            raise DataError(
                f"{name}: expected one split, got the splits {', '.join(data)}; pass one, such as data['…']"
            )
        data = data["train"]
    if isinstance(data, datasets.IterableDataset):
        rows: Any = _StoredRows(data, data.features, name)
    elif isinstance(data, datasets.Dataset):
        rows = data
    elif hasattr(data, "__arrow_c_stream__"):
        table = pyarrow.table(data)
        rows = datasets.Dataset(
            table.select([column for column in table.column_names if not column.startswith("__index_level_")])
        )  # pandas exports an index as a column
    elif callable(data):
        rows = _StoredRows(data(), None, name)
    elif isinstance(data, list | tuple):
        rows = [_as_row(row, name, number) for number, row in enumerate(data, 1)]
    else:
        raise DataError(
            f"{name}: expected a path, a list of dictionaries, a Dataset, a data frame, or a function that returns an "
            f"iterator of dictionaries; got {type(data).__name__}"
        )
    if len(rows) == 0:
        raise DataError(f"{name}: there are no rows")
    return rows


class _StoredRows:
    """Rows that were iterated once, written to a temporary file as JSON lines; the file is removed with the object.

    A row is a dictionary, or a text, which gets the column `text`.
    """

    def __init__(self, rows: Iterable[Any], features: Any, name: str) -> None:
        self.features = features
        folder = tempfile.mkdtemp(prefix="angle_llm-rows-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder) / "rows.jsonl"
        self._count = 0
        with self._path.open("w", encoding="utf-8") as file:
            for self._count, row in enumerate(rows, 1):
                file.write(json.dumps(_as_row(row, name, self._count), default=_plain) + "\n")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _as_row(row: Any, name: str, number: int) -> dict[str, Any]:
    """Return a row as a dictionary; a text becomes the column `text`. Raises `DataError` for another type."""
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise DataError(f"{name} row {number}: expected a dictionary or a text, got {type(row).__name__}")
    return dict(row)


def _plain(value: Any) -> Any:
    """Return a number or array of numpy as a value of JSON; the text of other objects."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
