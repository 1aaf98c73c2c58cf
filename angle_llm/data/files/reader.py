"""Rows of a file: `FileReader`, the base class of all readers, with the location of every row.

A row that cannot be parsed becomes a `BadRow` with file, line and reason. Damage that hides an unknown number of rows,
such as a truncated gzip file, raises `DataError`.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

from angle_llm.data.formats import DataError, RowError, read_text

Unit = Literal["line", "row"]


def place(file: str, line: int, unit: Unit) -> str:
    """Return the location of a row for error messages: `x.tsv:3`, or `x.parquet row 3`."""
    return f"{file}:{line}" if unit == "line" else f"{file} row {line}"


class Row(NamedTuple):
    """The values of a row of a data file, and the location of the row."""

    values: dict[str, Any]
    """Column name → value of the row."""
    file: str
    line: int
    """Line number of the row, from 1; for Parquet files, .json files and datasets the row number."""
    unit: Unit = "line"
    """Whether `line` counts lines ("line") or rows ("row") of the file."""

    @property
    def place(self) -> str:
        """Location of the row for error messages: `x.tsv:3`, or `x.parquet row 3`."""
        return place(self.file, self.line, self.unit)

    def text(self, column: str) -> str:
        """Return the text in a column; raise `DataError` with file and line if it is missing, blank or a list."""
        try:
            return read_text(self.values, column)
        except RowError as error:
            raise DataError(f"{self.place}: {error}") from None

    def number(self, column: str) -> float:
        """Return the number in a column; raise `DataError` with file and line if it is not a finite number."""
        value: Any = self.values.get(column)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{self.place}: {column} is {value!r}, expected a finite number")
        return number


class BadRow(NamedTuple):
    """A row of a data file that cannot be read or used: its location and the reason."""

    file: str
    line: int
    reason: str
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """Location of the row for error messages: `x.tsv:3`, or `x.parquet row 3`."""
        return place(self.file, self.line, self.unit)


class FileReader:
    """Base class for readers of data files; iterates over the rows repeatedly, with one row in memory at a time.

    Args:
        path: Path of the file; a .gz file is decompressed while it is read.
        name: Name of the file in messages; None: the path.
        encoding: Encoding of text files, as Python names it.
        content: Bytes of the file, which is then not opened; None: every iteration opens the file.
    """

    unit: ClassVar[Unit] = "line"
    """Whether row numbers in messages count lines ("line") or rows ("row") of the file."""
    beside: tuple[Path, ...] = ()
    """Paths of other files that are read together with this file, such as a file with the scores."""

    def __init__(
        self, path: Path, *, name: str | None = None, encoding: str = "utf-8", content: bytes | None = None
    ) -> None:
        self.path = path
        self.content = content
        self.name = name or str(path)
        self.encoding = encoding
        self._codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding

    @property
    def identity(self) -> str:
        """Absolute path of the file, or fingerprint of a dataset: an identifier for caches."""
        return str(self.path.resolve())

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns of the file."""
        raise NotImplementedError

    @cached_property
    def label_names(self) -> dict[str, list[str]]:
        """Column name → names of its integer labels, as `ClassLabel` of the library `datasets` stores them."""
        return self._label_names_beside()

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield all rows of the file, including bad rows."""
        for number, record in self._records():
            try:
                yield Row(self._parse(record), self.name, number, self.unit)
            except RowError as error:
                yield BadRow(self.name, number, str(error), self.unit)

    def good_rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """Yield all rows of the file; stop with an error at the first bad row.

        Raises:
            DataError: for a bad row, with file and line, or if one of `columns` is missing.
        """
        if columns and (missing := [name for name in columns if name not in self.columns]):
            raise DataError(
                f"{self.name}: expected columns {', '.join(columns)}; missing {', '.join(missing)}, found "
                f"{', '.join(self.columns)}"
            )
        for row in self.rows():
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            yield row

    def _records(self) -> Iterator[tuple[int, Any]]:
        """Return an iterator over (line or row number from 1, record); a record is an unparsed row."""
        raise NotImplementedError

    def _parse(self, record: Any) -> dict[str, Any]:
        """Parse a record (an unparsed row), and return column name → value. Raises `RowError` if parsing fails."""
        row: dict[str, Any] = record
        return row

    def _open(self) -> IO[bytes]:
        """Open the content of the file, as it is stored, for reading."""
        return self.path.open("rb") if self.content is None else io.BytesIO(self.content)

    def lines(self, *, any_line_end: bool = False) -> Iterator[tuple[int, str]]:
        """Yield (line number from 1, line with its line end) for every line of a text file.

        A line ends with \\n, or with \\r if the start of the file has \\r and no \\n. With `any_line_end`, a line ends with
        \\n, \\r\\n or \\r, each of which becomes \\n. Invalid bytes become lone surrogates; `_refuse_bad_bytes` detects them.

        Raises:
            DataError: for a damaged gzip file, or a file that cannot be decoded at all.
        """
        number = 0
        try:
            with self._open() as file:
                stream: Any = gzip.GzipFile(fileobj=file) if self.path.suffix.lower() == ".gz" else file
                newline = None
                if not any_line_end:
                    start = stream.read1(1 << 16)
                    stream.seek(0)
                    newline = "\r" if b"\r" in start and b"\n" not in start else "\n"  # \r: as Excel for Mac writes
                with io.TextIOWrapper(stream, self._codec, "surrogateescape", newline) as text:
                    for number, line in enumerate(text, 1):
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.name}:{number + 1}: the gzip file is truncated or damaged: {error}") from None
        except (UnicodeDecodeError, LookupError) as error:  # LookupError: an unknown encoding
            raise DataError(f"{self.name}:{number + 1}: cannot be decoded as {self.encoding}: {error}") from None

    def _refuse_bad_bytes(self, text: str) -> None:
        """Raise `RowError` if a line or a table cell contains a byte that is invalid in the encoding of the file."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if text.startswith(("\udcff\udcfe", "\udcfe\udcff")):
                raise RowError(
                    "the file is UTF-16; convert it with angle-llm data check FILE --encoding utf-16 --fix FOLDER"
                ) from None
            if text.startswith("\x1f\udc8b"):
                raise RowError("the file is compressed with gzip: add .gz to its name") from None
            raise RowError(
                f"byte 0x{ord(text[error.start]) - 0xDC00:02x} is not {self.encoding.upper()}; convert the file to UTF-8, "
                "such as from Windows-1252 with angle-llm data check FILE --encoding cp1252 --fix FOLDER (single texts: "
                "also --format text)"
            ) from None

    def _label_names_beside(self, known: Collection[str] = ()) -> dict[str, list[str]]:
        """Return column → label names from the dataset card in the folder of a data file, or in the folder above.

        Columns in `known` are omitted. If the folder of the data file has the name of a configuration, only this one is read.

        Raises:
            DataError: if the card cannot be read, or a column has different label names in two configurations.
        """
        names: dict[str, list[str]] = {}
        for folder in self.path.absolute().parents[:2]:
            cards = [card for card in (folder / "README.md", folder / "dataset_infos.json") if card.is_file()]
            if any(re.search(r'\bclass_label:|"ClassLabel"', card.read_text("utf-8", "replace")) for card in cards):
                from datasets.info import DatasetInfosDict

                try:
                    infos = DatasetInfosDict.from_directory(str(folder))
                except Exception as error:  # many types: YAML, JSON, unknown features
                    raise DataError(f"{cards[0]}: label names cannot be read; correct the file: {error}") from error
                name = self.path.parent.name
                configurations = [infos[name]] if name in infos else infos.values()
                features = [info.features.to_dict() for info in configurations if info.features]
                columns = itertools.chain.from_iterable(label_names_in(feature).items() for feature in features)
                for column, labels in columns:
                    wanted = column in self.columns and column not in known
                    if wanted and names.setdefault(column, labels) != labels:
                        differing = f"two orders of the labels of column {column!r}: {names[column]} and {labels}"
                        raise DataError(f"{cards[0]} has {differing}. Replace the numbers in {self.path.name} by names")
        return names


def label_names_in(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return column → label names for the columns of labels, or of lists of labels; `features` is `Features.to_dict()`."""
    names: dict[str, list[str]] = {}
    for column, feature in features.items():
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        if feature.get("_type") == "ClassLabel" and feature.get("names"):
            names[column] = list(feature["names"])
    return names
