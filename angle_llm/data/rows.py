"""Rows with their file and line, the base class of all types of files, and a source of one or several files.

A row that cannot be read (broken JSON, invalid bytes, too many fields) is a `BadRow`. Damage that hides an unknown
number of rows raises `DataError`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from angle_llm.data.formats import DataError, RowError
from angle_llm.io import sha256_of

Unit = Literal["line", "row"]


def place(file: str, line: int, unit: Unit) -> str:
    """Return the location of a row, for messages: `x.tsv:3`, or `x.parquet row 3`."""
    return f"{file}:{line}" if unit == "line" else f"{file} row {line}"


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


class FileReader:
    """Rows of one file, from the start, as often as needed; only the current row is in memory.

    Args:
        path: The file; .gz is unpacked.
        name: File name in messages.
        delimiter: Between fields of CSV and TSV files; None: detected.
        encoding: Of text files, as Python names it.
    """

    unit: ClassVar[Unit] = "line"
    """What row numbers count."""
    label_names: Mapping[str, list[str]] = {}
    """Column → names of its integer labels; only `datasets` datasets have them."""
    beside: tuple[Path, ...] = ()
    """Further files that are read with this one."""

    def __init__(
        self, path: Path, *, name: str | None = None, delimiter: str | None = None, encoding: str = "utf-8"
    ) -> None:
        self.path = path
        self.name = name or str(path)
        self.delimiter = delimiter
        self.encoding = encoding
        self._codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding

    @property
    def identity(self) -> str:
        """Name that does not depend on the working directory."""
        return str(self.path.resolve())

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns."""
        raise NotImplementedError

    def rows(self, columns: list[str] | None = None) -> Iterator[Row | BadRow]:
        """Return all rows. Parquet files read only `columns`."""
        return (parse() for parse in self.unparsed(columns))

    def unparsed(self, columns: list[str] | None = None) -> Iterator[Callable[[], Row | BadRow]]:
        """Yield all rows, each as a function that parses it, so that skipped rows take little time."""
        for number, record in self._records(columns):
            yield partial(self._row, number, record)

    def _row(self, number: int, record: Any) -> Row | BadRow:
        try:
            return Row(self._parse(record), self.name, number, self.unit)
        except RowError as error:
            return BadRow(self.name, number, str(error), self.unit)

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        """Return line or row numbers from 1, and rows before they are parsed."""
        raise NotImplementedError

    def _parse(self, record: Any) -> dict[str, Any]:
        """Return the values of a record by column. Raises `RowError` if it cannot be read."""
        row: dict[str, Any] = record
        return row

    def lines(self, newline: str | None = "\n") -> Iterator[tuple[int, str]]:
        """Yield line numbers from 1, and lines with their ends.
        Invalid bytes become lone surrogates, see `_refuse_bad_bytes`."""
        number = 0
        try:
            with gzip.open(self.path) if self.path.suffix.lower() == ".gz" else self.path.open("rb") as stream:
                if self._codec == "utf-8-sig":
                    _refuse_utf_16(self.name, stream.read1(64))
                    stream.seek(0)
                with io.TextIOWrapper(stream, self._codec, "surrogateescape", newline) as text:
                    for number, line in enumerate(text, 1):
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            advice = "fetch it again, or unpack the part that can be read"
            raise DataError(
                f"{self.name}:{number + 1}: the gzip file is truncated or damaged ({error}); {advice}"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name}:{number + 1}: cannot be decoded as {self.encoding}: {error}") from None

    def wrong_encoding(self) -> str | None:
        """Return why a text file seems to have another encoding: lines cannot be decoded, and all others are ASCII."""
        bad = 0
        for _, line in self.lines() if self.unit == "line" else ():
            if not line.isascii():
                if line == line.encode(errors="ignore").decode():
                    return None
                bad += 1
        advice = "If it is Windows-1252, set --encoding cp1252"
        problem = f"{self.name}: {bad:,} lines have bytes that are not {self.encoding}, all others are ASCII"
        return f"{problem}. {advice}" if bad else None

    def _refuse_bad_bytes(self, text: str) -> None:
        """Raise `RowError` if the text holds bytes that the encoding does not have."""
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as error:
            encoding, advice = self.encoding, "set the encoding of the file, or convert it to UTF-8"
            if self._codec == "utf-8-sig":
                encoding, advice = (
                    "UTF-8",
                    "if the file is Windows-1252, set --encoding cp1252 (train: --data.encoding), or convert it to UTF-8",
                )
            raise RowError(f"byte 0x{ord(text[error.start]) - 0xDC00:02x} is not {encoding}; {advice}") from None


def _refuse_utf_16(name: str, start: bytes) -> None:
    """Refuse UTF-16 and UTF-32 files; without this check, every row would be reported as broken without the reason."""
    marked = start.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    if marked or start.count(0) * 3 > len(start) > 1:  # without a byte order mark: every second byte of English is 0
        raise DataError(
            f"{name}:1: the file is in UTF-16 or UTF-32, expected UTF-8 (it begins with {start[:4].hex(' ')}); set "
            "--encoding utf-16 (train: --data.encoding), or convert it to UTF-8"
        )


class RowSource:
    """Rows of a source, read from its start as often as it is iterated."""

    def __init__(
        self, name: str, files: Sequence[FileReader], ignored: Sequence[str] = (), path: Path | None = None
    ) -> None:
        self.name = name
        self.files = list(files)
        self.ignored = list(ignored)
        """Names of files in a folder that are of no known type."""
        self.path = path
        """The file or folder; None for standard input and datasets."""

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns of all files; reads the whole of JSON files."""
        return list(dict.fromkeys(column for file in self.files for column in file.columns))

    def __iter__(self) -> Iterator[Row | BadRow]:
        return (row for file in self.files for row in file.rows())

    def good_rows(self, columns: Iterable[str] = ()) -> Iterator[Row]:
        """Yield the rows of a source that must have no bad ones.

        Raises:
            DataError: for the first bad row, with file and line, and if a file lacks one of `columns`.
        """
        names = list(columns)
        for file in self.files if names else ():
            if missing := [name for name in names if name not in file.columns]:
                raise DataError(
                    f"{file.name}: expected columns {', '.join(names)}; missing {', '.join(missing)}, found "
                    f"{', '.join(file.columns)}"
                )
        for row in self:
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            yield row

    def stamps(self) -> list[tuple[int, int]]:
        """Return the size in bytes and modification time in ns of each file that is read; cheap."""
        paths = [path for file in self.files for path in (file.path, *file.beside)]
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths if path.exists())]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return the name, size in bytes and SHA-256 of each file (packed, as on disk): equal for the same rows."""
        return [
            {"name": Path(file.name).name, "size": file.path.stat().st_size, "sha256": sha256_of(file.path)}
            for file in self.files
        ]
