"""Rows of one file, by file type. `readers.open_rows` is the entry point; a new type is a subclass and an entry in `FILE_TYPES`.

A row that cannot be read (broken JSON, invalid bytes, too many fields) raises `RowError` in `parse`. Damage that hides an
unknown number of rows raises `DataError` in `raw`.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from angle_llm.data.formats import DataError, RowError

Unit = Literal["line", "row"]

_PARQUET_ROWS = 1024
"""Rows of a Parquet file that are in memory together."""


class FileReader:
    """Rows of one file, from the start, as often as needed; only the row at hand is in memory.

    Args:
        name: File name in messages.
        open: Opens the unpacked bytes of the file.
        delimiter: Between fields of CSV and TSV files; None: detected.
        encoding: Of text files; a Python codec name.
    """

    unit: ClassVar[Unit] = "line"
    """What row numbers count."""
    has_columns: ClassVar[bool] = True
    label_names: Mapping[str, list[str]] = {}
    """Column → names of its integer labels; only `datasets` data sets have them."""
    path: Path | None = None
    """The file; None for standard input and data sets."""
    beside: tuple[Path, ...] = ()
    """Further files that are read with this one."""

    def __init__(
        self, name: str, open: Callable[[], BinaryIO], *, delimiter: str | None = None, encoding: str = "utf-8"
    ) -> None:
        self.name = name
        self.open = open
        self.encoding = encoding
        self.delimiter = delimiter

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns. JSON files are read whole for it: a key that only later rows have counts too."""
        return self.first_columns

    @cached_property
    def first_columns(self) -> list[str]:
        """Names of the columns of the header, or of the first object of a JSON file."""
        raise NotImplementedError

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        """Line or row numbers from 1, and rows before they are parsed. Parquet files read only `columns`."""
        raise NotImplementedError

    def parse(self, raw: Any) -> dict[str, Any]:
        """Values of a raw row by column. Raises `RowError` if it cannot be read."""
        if isinstance(raw, RowError):
            raise raw
        row: dict[str, Any] = raw
        return row

    def lines(self, newline: str | None = "\n", path: Path | None = None) -> Iterator[tuple[int, str]]:
        """Line numbers from 1, and lines with their ends. Invalid bytes become lone surrogates, see `refuse_bad_bytes`."""
        number, name = 0, str(path or self.name)
        codec = "utf-8-sig" if self._is_utf8 else self.encoding
        try:
            with path.open("rb") if path is not None else self.open() as stream:
                if self._is_utf8:
                    _refuse_utf_16(name, stream.read1(64))  # type: ignore[attr-defined]  # files and GzipFile have it
                    stream.seek(0)
                with io.TextIOWrapper(stream, codec, "surrogateescape", newline) as text:
                    for number, line in enumerate(text, 1):
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{name}:{number + 1}: the gzip file is truncated or damaged ({error}); fetch it again, or unpack the part "
                "that can be read"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number + 1}: cannot be decoded as {self.encoding}: {error}") from None

    @property
    def _is_utf8(self) -> bool:
        return self.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")

    def refuse_bad_bytes(self, text: str) -> None:
        """Raises `RowError` if the text holds bytes that the encoding does not have."""
        if text.isascii():
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            hint = (
                "; if the file is Windows-1252, set encoding to cp1252, or convert it with `iconv -f cp1252 -t utf-8`"
                if self._is_utf8
                else "; set encoding to that of the file"
            )
            raise RowError(f"byte 0x{byte:02x} is not {'UTF-8' if self._is_utf8 else self.encoding}{hint}") from None


def _refuse_utf_16(name: str, start: bytes) -> None:
    """UTF-16 and UTF-32 files: without this check every row would be reported as broken, without the reason."""
    marked = start.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    if marked or start.count(0) * 3 > len(start) > 1:  # without a byte order mark: every second byte of English is 0
        raise DataError(
            f"{name}:1: the file is in UTF-16 or UTF-32, expected UTF-8 (it begins with {start[:4].hex(' ')}); set encoding to "
            "utf-16, or convert the file with `iconv -f utf-16 -t utf-8`"
        )


class TextFile(FileReader):
    """One text per line, column `text`. Lines end with \\n, \\r\\n or \\r; an empty line is a row."""

    has_columns = False
    first_columns = ["text"]  # noqa: RUF012

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        return ((number, line.removesuffix("\n")) for number, line in self.lines(newline=None))

    def parse(self, raw: Any) -> dict[str, Any]:
        self.refuse_bad_bytes(raw)
        return {"text": raw}


# ------------------------------------------------------------------------------------------------ JSON


class JsonLinesFile(FileReader):
    """One JSON object per line; blank lines are skipped. Only \\n ends a line."""

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip())

    def parse(self, raw: Any) -> dict[str, Any]:
        self.refuse_bad_bytes(raw)
        try:
            found = json.loads(raw.rstrip(" \t\r\n"), object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RowError):
                raise
            hint = "; a list of objects is a .json file" if raw.lstrip().startswith("[") else ""
            raise RowError(f"not a JSON object: {json_problem(error, 'expected one object per line')}{hint}") from None
        return _checked_object(found)

    @cached_property
    def columns(self) -> list[str]:
        return self._columns(self.raw())

    @cached_property
    def first_columns(self) -> list[str]:
        return self._columns(self.raw(), first=True)

    def _columns(self, rows: Iterator[tuple[int, Any]], first: bool = False) -> list[str]:
        columns: dict[str, None] = {}
        problem = ""
        for number, raw in rows:
            try:
                columns.update(dict.fromkeys(self.parse(raw)))
            except RowError as error:
                problem = problem or f": {place(self.name, number, self.unit)}: {error}"
            if first and columns:
                break
        if not columns:
            raise DataError(f"{self.name}: no usable row{problem}")
        return list(columns)


class JsonFile(JsonLinesFile):
    """One list of JSON objects; it is in memory as a whole."""

    unit = "row"

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        text = "".join(line for _, line in self.lines())
        try:
            self.refuse_bad_bytes(text)
            objects = json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            at = f"{self.name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else self.name
            reason = error if isinstance(error, RowError) else json_problem(error, "expected one list of objects")
            raise DataError(f"{at}: not JSON: {reason}. Fix the file; one object per line is a .jsonl file") from None
        if not isinstance(objects, list):
            raise DataError(f"{self.name}: expected a list of objects, got {type(objects).__name__}")
        return iter(enumerate(objects, 1))

    def parse(self, raw: Any) -> dict[str, Any]:
        return _checked_object(raw)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowError:
    """An object, or the error for one with a key twice: the json module would keep the last value silently."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return RowError(f"the object has keys twice: {sorted({key for key in keys if keys.count(key) > 1})}")


def _checked_object(found: Any) -> dict[str, Any]:
    if isinstance(found, RowError):
        raise found
    if not isinstance(found, dict):
        raise RowError(f"expected a JSON object, got {type(found).__name__}")
    return found


def json_problem(error: ValueError | RecursionError, shape: str) -> str:
    """Why a text is not JSON, and the start of the line; `shape` names the expected content."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= len(error.doc.rstrip()):
        reason = f"it ends before it is complete; {shape}"
    else:
        more = f"; {shape}" if error.msg == "Extra data" else ""
        quote = "; write keys and texts in double quotes" if error.doc[error.pos] == "'" else ""
        reason = f"{error.msg[0].lower()}{error.msg[1:]} at column {error.colno}{quote}{more}"
    line = error.doc.split("\n")[error.lineno - 1].strip()
    start = "".join(character if character.isprintable() else "�" for character in line[:60])
    return f"{reason}; the line begins `{start}{'…' if len(line) > 60 else ''}`" if start else reason


# ------------------------------------------------------------------------------------------------ tables


class TsvFile(FileReader):
    """A header line and tab-separated fields without quoting: a quote is a character. Blank lines are skipped."""

    @cached_property
    def first_columns(self) -> list[str]:
        number, header = next(self._records(), (1, RowError("the file is empty, expected a header line")))
        try:
            columns = self._fields(header)
            if repeated := sorted({name for name in columns if columns.count(name) > 1}):
                raise RowError(f"the header has column names twice: {repeated}")
        except RowError as error:
            raise DataError(f"{self.name}:{number}: {error}") from None
        return columns

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        header = bool(self.first_columns)  # an unusable header raises here
        return itertools.islice(self._records(), int(header), None)

    def parse(self, raw: Any) -> dict[str, Any]:
        fields = self._fields(raw)
        if len(fields) != len(self.first_columns):
            raise RowError(f"{len(fields)} fields, but the header has {len(self.first_columns)}")
        return dict(zip(self.first_columns, fields, strict=True))

    def _records(self) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip("\r\n"))

    def _fields(self, record: Any) -> list[str]:
        if isinstance(record, RowError):
            raise record
        self.refuse_bad_bytes(record)
        return str(record).removesuffix("\n").removesuffix("\r").split(self.delimiter or "\t")


class CsvFile(TsvFile):
    """A header line and RFC 4180 quoting. A quoted field may span lines; the row has the number of its first line.

    The delimiter is a comma. Without a comma in the header it is the first of ; tab | that the header has.
    """

    def _records(self) -> Iterator[tuple[int, Any]]:
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long texts
        reader = csv.reader((line for _, line in self.lines()), strict=True, delimiter=self._delimiter)
        while True:
            first = reader.line_num + 1
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num > first:
                    raise DataError(
                        f"{self.name}:{first}: a quoted field starts here and is not closed correctly on line {reader.line_num} "
                        f'({error}); close the quote, and write a quote inside a field twice ("")'
                    ) from None
                yield (
                    first,
                    RowError(
                        f"broken quoting with delimiter {self._delimiter!r}: {error}; write a quote inside a field twice "
                        '(""), or set delimiter'
                    ),
                )
            else:
                if record:
                    yield first, record

    @cached_property
    def _delimiter(self) -> str:
        if self.delimiter is not None:
            return self.delimiter
        header = next((line for _, line in self.lines() if line.strip()), "")
        unquoted = re.sub(r'"[^"]*"', "", header)
        return next((sign for sign in ",;\t|" if sign in unquoted), ",")

    def _fields(self, record: Any) -> list[str]:
        if isinstance(record, RowError):
            raise record
        fields: list[str] = record
        self.refuse_bad_bytes("".join(fields))
        return fields


class ParquetFile(FileReader):
    """A Parquet file; some rows are decoded at a time."""

    unit = "row"

    @cached_property
    def first_columns(self) -> list[str]:
        from pyarrow import parquet

        with self._checked():
            columns = list(parquet.read_schema(self.name).names)
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise DataError(f"{self.name}: the file has column names twice: {repeated}")
        return columns

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        from pyarrow import parquet

        numbers = itertools.count(1)
        # A column is read page by page: without these options a whole row group, often the whole file, is in memory.
        with self._checked(), parquet.ParquetFile(self.name, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield next(numbers), row

    @contextmanager
    def _checked(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.name}: cannot be read as Parquet: {error}") from error


# ------------------------------------------------------------------------------------------------ SentEval's downloads


class StsPartFile(FileReader):
    """`STS.input.NAME.txt`: two sentences per line; `STS.gs.NAME.txt` beside it: their scores. A pair without score is no row."""

    first_columns = ["sentence1", "sentence2", "score"]  # noqa: RUF012

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        (gold,) = self.beside
        if not gold.is_file():
            raise DataError(f"{self.name}: no {gold.name} with its scores in the same folder")
        counts = sum(1 for _ in self.lines()), sum(1 for _ in self.lines(path=gold))
        if counts[0] != counts[1]:
            raise DataError(
                f"{self.name} has {counts[0]} lines and {gold.name} {counts[1]}; expected a score or a blank line for each line"
            )
        for (number, line), (_, score) in zip(self.lines(), self.lines(path=gold), strict=True):
            if score.strip():
                yield number, (line, score.strip())

    def parse(self, raw: Any) -> dict[str, Any]:
        line, score = raw
        return self.row_of([*line.rstrip("\r\n").split("\t")[:2], score])

    def row_of(self, fields: list[str]) -> dict[str, Any]:
        """A row of fields. Raises `RowError` for another number of fields than columns."""
        self.refuse_bad_bytes("".join(fields))
        if len(fields) != len(self.columns):
            raise RowError(f"expected {len(self.columns)} tab-separated fields, got {len(fields)}")
        return dict(zip(self.columns, fields, strict=True))


class StsBenchmarkFile(StsPartFile):
    """`sts-train.csv` of the STS benchmark: tab-separated without a header; fields after the sentences are not read."""

    first_columns = ["genre", "file", "year", "id", "score", "sentence1", "sentence2"]  # noqa: RUF012

    @classmethod
    def matches(cls, reader: FileReader) -> bool:
        """Whether the first line of a file has a score as its fifth tab-separated field."""
        fields = next((line for _, line in reader.lines()), "").split("\t")
        return len(fields) >= 7 and re.fullmatch(r"\d(\.\d+)?", fields[4].strip()) is not None

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip())

    def parse(self, raw: Any) -> dict[str, Any]:
        return self.row_of(raw.rstrip("\r\n").split("\t")[:7])


# ------------------------------------------------------------------------------------------------ data sets


class DatasetReader(FileReader):
    """A split of a `datasets` data set: a local folder, or a hub id, the only source that reaches the network."""

    unit = "row"

    def __init__(self, name: str, configuration: str | None, split: str, revision: str | None, hint: str) -> None:
        super().__init__(name, Path(name).open)  # type: ignore[arg-type]  # a data set has no bytes: never called
        import datasets

        try:
            self._dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
        except Exception as error:  # of many types: no network, no such data set, configuration or split, broken files
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


def place(name: str, number: int, unit: Unit) -> str:
    """Where a row is, for messages: `x.tsv:3`, or `x.parquet row 3`."""
    return f"{name}:{number}" if unit == "line" else f"{name} row {number}"


FILE_TYPES: dict[str, type[FileReader]] = {
    ".jsonl": JsonLinesFile,
    ".json": JsonFile,
    ".csv": CsvFile,
    ".tsv": TsvFile,
    ".parquet": ParquetFile,
    ".txt": TextFile,
}
"""File name extension → reader; all but Parquet also with .gz."""
