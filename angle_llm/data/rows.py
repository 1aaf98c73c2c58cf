"""Rows with their file and line, and a source of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.data.arrow_types import DatasetReader
from angle_llm.data.file_types import FileReader, Unit, place
from angle_llm.data.formats import DataError, RowError
from angle_llm.io import sha256_of


class Row(NamedTuple):
    """A row that was read."""

    values: dict[str, Any]
    """Column → value."""
    file: str
    line: int
    """Number in the file, from 1: of the line, or for Parquet, .json and datasets of the row."""
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return place(self.file, self.line, self.unit)


class BadRow(NamedTuple):
    """A row that cannot be read or used, and why."""

    file: str
    line: int
    reason: str
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return place(self.file, self.line, self.unit)


class RowSource:
    """Rows of a source, read from its start as often as it is iterated."""

    def __init__(self, name: str, files: Sequence[FileReader], ignored: Sequence[str] = ()) -> None:
        self.name = name
        self.files = list(files)
        self.ignored = list(ignored)
        """Names of files in a folder that are of no known type."""

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns of all files; JSON files are read whole for it."""
        return list(dict.fromkeys(column for file in self.files for column in file.columns))

    @cached_property
    def label_names(self) -> Mapping[str, list[str]]:
        """Column → names of its integer labels; only of datasets."""
        return {column: names for file in self.files for column, names in file.label_names.items()}

    @property
    def unit(self) -> Unit:
        """What row numbers count."""
        return self.files[0].unit

    def __iter__(self) -> Iterator[Row | BadRow]:
        return self.rows()

    def rows(self, columns: list[str] | None = None) -> Iterator[Row | BadRow]:
        """All rows. Of Parquet files only `columns` are read."""
        return (_parsed(*each) for each in self._raw(columns))

    def blocks(
        self, size: int, wanted: Callable[[int], bool], columns: list[str] | None = None
    ) -> Iterator[tuple[int, list[Row | BadRow]]]:
        """Number and rows of the blocks of `size` rows whose number is wanted; the last block may be shorter.

        The rows of other blocks are not parsed, so that a resumed process reaches its first block quickly.
        """
        raw = self._raw(columns)
        for number in itertools.count():
            if not (part := list(itertools.islice(raw, size))):
                return
            if wanted(number):
                yield number, [_parsed(*each) for each in part]

    def good_rows(self, columns: Iterable[str] = ()) -> Iterator[Row]:
        """Rows of a source that must have no bad ones.

        Raises `DataError` for the first bad row, with file and line, and if one of `columns` is missing.
        """
        self.require(columns)
        for row in self:
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            yield row

    def require(self, columns: Iterable[str]) -> None:
        """Raises `DataError` if a file lacks one of these columns."""
        names = list(columns)
        for file in self.files if names else ():
            if missing := [name for name in names if name not in file.columns]:
                raise DataError(
                    f"{file.name}: expected columns {', '.join(names)}; missing {', '.join(missing)}, found "
                    f"{', '.join(file.columns)}"
                )

    def _raw(self, columns: list[str] | None = None) -> Iterator[tuple[FileReader, int, Any]]:
        return ((file, number, raw) for file in self.files for number, raw in file.raw(columns))

    def stamps(self) -> list[tuple[int, int]]:
        """Size in bytes and modification time in ns of each file that is read; cheap. Standard input cannot change."""
        paths = [path for file in self.files if file.path is not None for path in (file.path, *file.beside)]
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths if path.exists())]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size in bytes and SHA-256 of each file (packed, as on disk): equal for the same rows."""
        found: list[dict[str, Any]] = []
        for file in self.files:
            if isinstance(file, DatasetReader):
                found.append({"name": file.name, "fingerprint": file.fingerprint})
                continue
            with file.path.open("rb") if file.path is not None else file.open() as stream:
                digest = sha256_of(stream)
                found.append({"name": Path(file.name).name, "size": stream.tell(), "sha256": digest})
        return found


def _parsed(file: FileReader, number: int, raw: Any) -> Row | BadRow:
    try:
        return Row(file.parse(raw), file.name, number, file.unit)
    except RowError as error:
        return BadRow(file.name, number, error.reason, file.unit)
