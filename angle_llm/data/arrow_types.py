"""Rows of Parquet files and of `datasets` datasets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from angle_llm.data.file_types import FileReader
from angle_llm.data.formats import DataError

_PARQUET_ROWS = 1024
"""Rows of a Parquet file that are in memory together."""


class ParquetFile(FileReader):
    """A Parquet file; some rows are decoded at a time."""

    unit = "row"

    @cached_property
    def first_columns(self) -> list[str]:
        from pyarrow import parquet

        with self._as_data_error():
            columns = list(parquet.read_schema(self.name).names)
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise DataError(f"{self.name}: the file has column names twice: {repeated}")
        return columns

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        from pyarrow import parquet

        numbers = itertools.count(1)
        # A column is read page by page: without these options a whole row group, often the whole file, is in memory.
        with self._as_data_error(), parquet.ParquetFile(self.name, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield next(numbers), row

    @contextmanager
    def _as_data_error(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.name}: cannot be read as Parquet: {error}") from error


class DatasetReader(FileReader):
    """A split of a `datasets` dataset: a local folder, or a hub id, the only source that uses the network."""

    unit = "row"

    def __init__(self, name: str, configuration: str | None, split: str, revision: str | None, hint: str) -> None:
        super().__init__(name, Path(name).open)  # type: ignore[arg-type]  # never called: a dataset has no bytes
        import datasets

        try:
            self._dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
        except Exception as error:  # of many types: no network, no such dataset, configuration or split, broken files
            of = f" of configuration {configuration!r}" if configuration else ""
            raise DataError(
                f"{name}: `datasets` could not load split {split!r}{of}: {error}. Check path, split and name. {hint}"
            ) from error
        self.label_names = {
            column: list(feature.names)
            for column, feature in self._dataset.features.items()
            if isinstance(feature, datasets.ClassLabel)
        }
        self.first_columns = list(self._dataset.column_names)
        self.fingerprint: str = self._dataset._fingerprint

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self._dataset, 1))
