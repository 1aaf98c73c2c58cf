"""Rows of Parquet and Arrow files, decoded in parts by pyarrow."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import IO, Any

from angle_llm.data.files.reader import FileReader, label_names_in
from angle_llm.data.formats import DataError

_PARQUET_ROWS = 1024
"""Number of rows of a Parquet file that are decoded at a time."""


class ParquetFile(FileReader):
    """Reader of Parquet files; decodes `_PARQUET_ROWS` rows at a time."""

    unit = "row"

    @cached_property
    def columns(self) -> list[str]:
        columns = list(self._schema.names)
        if len(set(columns)) < len(columns):
            raise DataError(f"{self.name}: expected different column names, got {columns}")
        return columns

    @cached_property
    def label_names(self) -> dict[str, list[str]]:
        """Column name → names of its integer labels, from a dataset card beside the file and from its schema."""
        described = json.loads((self._schema.metadata or {}).get(b"huggingface", "{}"))
        names = label_names_in(described.get("info", {}).get("features") or {})
        return names | self._label_names_beside(names)

    def _records(self) -> Iterator[tuple[int, Any]]:
        with self._as_data_error():
            yield from enumerate((row for batch in self._batches() for row in batch.to_pylist()), 1)

    @property
    def _input(self) -> str | IO[bytes]:
        """Argument of pyarrow to open the file."""
        return self.name if self.content is None else io.BytesIO(self.content)

    @cached_property
    def _schema(self) -> Any:
        """Arrow schema of the file."""
        from pyarrow import parquet

        with self._as_data_error():
            return parquet.read_schema(self._input)

    def _batches(self) -> Iterator[Any]:
        """Yield the rows as Arrow record batches of at most `_PARQUET_ROWS` rows."""
        from pyarrow import parquet

        # Without these options, a whole row group, often the whole file, is in memory; with them, a page at a time.
        with parquet.ParquetFile(self._input, pre_buffer=False, buffer_size=1 << 20) as file:
            yield from file.iter_batches(_PARQUET_ROWS, use_threads=False)

    @contextmanager
    def _as_data_error(self) -> Iterator[None]:
        """Context manager that converts errors of pyarrow to `DataError` with the name of the file."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
            raise DataError(f"{self.name}: cannot be read as {self.path.suffix}: {error}") from error


class ArrowFile(ParquetFile):
    """Reader of Arrow files: the streaming format (`Dataset.save_to_disk`) and the file format (polars)."""

    @cached_property
    def _schema(self) -> Any:
        with self._as_data_error():
            return self._open().schema

    def _batches(self) -> Iterator[Any]:
        for batch in self._open():
            yield from (batch.slice(start, _PARQUET_ROWS) for start in range(0, len(batch), _PARQUET_ROWS))

    def _open(self) -> Any:
        """Open the file as a reader of record batches."""
        import pyarrow

        file = pyarrow.memory_map(self.name) if self.content is None else pyarrow.BufferReader(self.content)
        if file.read_at(6, 0) != b"ARROW1":
            return pyarrow.ipc.open_stream(file)
        reader = pyarrow.ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
        return pyarrow.RecordBatchReader.from_batches(reader.schema, batches)
