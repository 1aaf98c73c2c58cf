"""Data sources from Python objects: lists, datasets, data frames and functions that return an iterator of rows."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
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
            written to a temporary Arrow file, so they may be larger than memory.
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
        rows: Any = _written(data, data.features, name)
    elif isinstance(data, datasets.Dataset):
        rows = data
    elif hasattr(data, "__arrow_c_stream__"):
        table = pyarrow.table(data)
        rows = datasets.Dataset(
            table.select([column for column in table.column_names if not column.startswith("__index_level_")])
        )  # pandas exports an index as a column
    elif callable(data):
        rows = _written(data(), None, name)
    elif isinstance(data, list | tuple):
        rows = [{"text": row} if isinstance(row, str) else row for row in data]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise DataError(f"{name} row {number}: expected a dictionary or a text, got {type(row).__name__}")
    else:
        raise DataError(
            f"{name}: expected a path, a list of dictionaries, a Dataset, a data frame, or a function that returns an "
            f"iterator of dictionaries; got {type(data).__name__}"
        )
    if len(rows) == 0:
        raise DataError(f"{name}: there are no rows")
    return rows


def _written(rows: Iterable[Mapping[str, Any]], features: Any, name: str) -> Any:
    """Write rows to a temporary Arrow file, and return the `Dataset` that reads it; it is removed with the dataset."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        raise DataError(f"{name}: there are no rows")
    folder = Path(tempfile.mkdtemp(prefix="angle_llm-rows-"))
    path = folder / "rows.arrow"
    try:
        with ArrowWriter(path=str(path), features=features) as writer:
            for row in chain([first], iterator):
                writer.write(dict(row))
            writer.finalize()
        dataset = datasets.Dataset.from_file(str(path))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(dataset, shutil.rmtree, folder, ignore_errors=True)
    return dataset
