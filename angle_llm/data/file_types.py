"""Rows of one text file, by file type. `readers.open_rows` is the entry point; a new type is a subclass and an entry in
`readers.FILE_TYPES`.

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
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from angle_llm.data.formats import DataError, RowError

Unit = Literal["line", "row"]


class FileReader:
    """Rows of one file, from the start, as often as needed; only the current row is in memory.

    Args:
        name: File name in messages.
        open: Opens the unpacked bytes of the file.
        delimiter: Between fields of CSV and TSV files; None: detected.
        encoding: Of text files, as Python names it.
    """

    unit: ClassVar[Unit] = "line"
    """What row numbers count."""
    has_columns: ClassVar[bool] = True
    label_names: Mapping[str, list[str]] = {}
    """Column → names of its integer labels; only `datasets` datasets have them."""
    path: Path | None = None
    """The file; None for standard input and datasets."""
    beside: tuple[Path, ...] = ()
    """Further files that are read with this one."""

    def __init__(
        self, name: str, open: Callable[[], BinaryIO], *, delimiter: str | None = None, encoding: str = "utf-8"
    ) -> None:
        self.name = name
        self.open = open
        self.delimiter = delimiter
        self.encoding = encoding
        self._codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding

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
        row: dict[str, Any] = raw
        return row

    def lines(self, newline: str | None = "\n", path: Path | None = None) -> Iterator[tuple[int, str]]:
        """Line numbers from 1, and lines with their ends. Invalid bytes become lone surrogates, see `refuse_bad_bytes`."""
        number, name = 0, str(path or self.name)
        try:
            with path.open("rb") if path is not None else self.open() as stream:
                if self._codec == "utf-8-sig":
                    _refuse_utf_16(name, stream.read1(64))  # type: ignore[attr-defined]
                    stream.seek(0)
                with io.TextIOWrapper(stream, self._codec, "surrogateescape", newline) as text:
                    for number, line in enumerate(text, 1):
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{name}:{number + 1}: the gzip file is truncated or damaged ({error}); fetch it again, or unpack the part "
                "that can be read"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number + 1}: cannot be decoded as {self.encoding}: {error}") from None

    def refuse_bad_bytes(self, text: str) -> None:
        """Raises `RowError` if the text holds bytes that the encoding does not have."""
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as error:
            byte = f"byte 0x{ord(text[error.start]) - 0xDC00:02x}"
            if self._codec != "utf-8-sig":
                raise RowError(f"{byte} is not {self.encoding}; set encoding to that of the file") from None
            raise RowError(
                f"{byte} is not UTF-8; if the file is Windows-1252, set encoding to cp1252, or convert it with "
                "`iconv -f cp1252 -t utf-8`"
            ) from None


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
        return self.lines(newline=None)

    def parse(self, raw: Any) -> dict[str, Any]:
        self.refuse_bad_bytes(raw)
        return {"text": raw.removesuffix("\n")}


class JsonLinesFile(FileReader):
    """One JSON object per line; blank lines are skipped. Only \\n ends a line."""

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip())

    def parse(self, raw: Any) -> dict[str, Any]:
        self.refuse_bad_bytes(raw)
        try:
            return self.checked(json.loads(raw.rstrip(" \t\r\n"), object_pairs_hook=_object))
        except RowError:
            raise
        except (ValueError, RecursionError) as error:
            hint = "; a list of objects is a .json file" if raw.lstrip().startswith("[") else ""
            raise RowError(f"not a JSON object: {_json_problem(error)}{hint}") from None

    def checked(self, found: Any) -> dict[str, Any]:
        """A parsed JSON value. Raises `RowError` if it is not an object, or has a key twice."""
        if not isinstance(found, dict):
            raise found if isinstance(found, RowError) else RowError(f"expected an object, got {type(found).__name__}")
        return found

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain.from_iterable(self._objects())))

    @cached_property
    def first_columns(self) -> list[str]:
        return list(next(self._objects()))

    def _objects(self) -> Iterator[dict[str, Any]]:
        """The readable objects. Raises `DataError` if there are none."""
        problem, found = "", False
        for number, raw in self.raw():
            try:
                yield self.parse(raw)
                found = True
            except RowError as error:
                problem = problem or f": {place(self.name, number, self.unit)}: {error}"
        if not found:
            raise DataError(f"{self.name}: no usable row{problem}")


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
            raise DataError(
                f"{at}: not JSON: {_json_problem(error)}. A file with one object per line is .jsonl"
            ) from None
        if not isinstance(objects, list):
            raise DataError(f"{self.name}: expected a list of objects, got {type(objects).__name__}")
        return iter(enumerate(objects, 1))

    def parse(self, raw: Any) -> dict[str, Any]:
        return self.checked(raw)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowError:
    """An object, or the error for one with a key twice: the json module would keep the last value silently."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return RowError(f"the object has keys twice: {sorted({key for key in keys if keys.count(key) > 1})}")


def _json_problem(error: ValueError | RecursionError) -> str:
    """Why a text is not JSON, with the start of the line."""
    if not isinstance(error, json.JSONDecodeError):
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    cut = error.pos >= len(error.doc.rstrip())
    reason = "it ends before it is complete" if cut else f"{error.msg.lower()} at column {error.colno}"
    line = error.doc.split("\n")[error.lineno - 1].strip()
    start = "".join(character if character.isprintable() else "�" for character in line[:60])
    return f"{reason}; the line begins `{start}{'…' if len(line) > 60 else ''}`"


class TsvFile(FileReader):
    """A header line and tab-separated fields without quoting: a quote is a character. Blank lines are skipped."""

    header: ClassVar[tuple[str, ...]] = ()
    """Columns of a type without a header line."""

    @cached_property
    def first_columns(self) -> list[str]:
        if self.header:
            return list(self.header)
        number, record = next(self.records(), (1, RowError("the file is empty, expected a header line")))
        try:
            columns = self.fields(record)
            if repeated := sorted({name for name in columns if columns.count(name) > 1}):
                raise RowError(f"the header has column names twice: {repeated}")
        except RowError as error:
            raise DataError(f"{self.name}:{number}: {error}") from None
        return columns

    def raw(self, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        header_lines = len(self.first_columns[:1]) - len(self.header[:1])  # an unusable header raises here
        return itertools.islice(self.records(), header_lines, None)

    def parse(self, raw: Any) -> dict[str, Any]:
        fields = self.fields(raw)
        if len(fields) != len(self.first_columns):
            raise RowError(f"{len(fields)} fields, expected {len(self.first_columns)}: {', '.join(self.first_columns)}")
        return dict(zip(self.first_columns, fields, strict=True))

    def records(self) -> Iterator[tuple[int, Any]]:
        """Lines, or lists of fields, or a `RowError`, with line numbers; the header is the first."""
        return ((number, line) for number, line in self.lines() if line.strip("\r\n"))

    def fields(self, record: Any) -> list[str]:
        """The fields of a record. Raises `RowError` if it cannot be read."""
        if isinstance(record, RowError):
            raise record
        self.refuse_bad_bytes(record if isinstance(record, str) else "".join(record))
        if isinstance(record, str):
            return record.removesuffix("\n").removesuffix("\r").split(self.delimiter or "\t")
        return list(record)


class CsvFile(TsvFile):
    """A header line and RFC 4180 quoting. A quoted field may span lines; the row has the number of its first line.

    The delimiter is a comma. Without a comma in the header it is the first of ; tab | that the header has.
    """

    def records(self) -> Iterator[tuple[int, Any]]:
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long texts
        reader = csv.reader((line for _, line in self.lines()), strict=True, delimiter=self._separator)
        while True:
            first = reader.line_num + 1
            try:
                if record := next(reader):
                    yield first, record
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num > first:
                    raise DataError(
                        f"{self.name}:{first}: a quoted field starts here and is not closed correctly on line {reader.line_num} "
                        f'({error}); close the quote, and write a quote inside a field twice ("")'
                    ) from None
                advice = 'write a quote inside a field twice (""), or set delimiter'
                yield first, RowError(f"broken quoting with delimiter {self._separator!r}: {error}; {advice}")

    @cached_property
    def _separator(self) -> str:
        header = next((line for _, line in self.lines() if line.strip()), "")
        unquoted = re.sub(r'"[^"]*"', "", header)
        return self.delimiter or next((sign for sign in ",;\t|" if sign in unquoted), ",")


class StsBenchmarkFile(TsvFile):
    """`sts-train.csv` of the STS benchmark: tab-separated without a header; fields after the sentences are not read."""

    header = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")

    @classmethod
    def matches(cls, reader: FileReader) -> bool:
        """Whether the first line of a file has a score as its fifth tab-separated field."""
        fields = next((line for _, line in reader.lines()), "").split("\t")
        return len(fields) >= len(cls.header) and re.fullmatch(r"\d(\.\d+)?", fields[4].strip()) is not None

    def fields(self, record: Any) -> list[str]:
        return super().fields(record)[: len(self.header)]


class StsPartFile(TsvFile):
    """`STS.input.NAME.txt`: two sentences per line; `STS.gs.NAME.txt` beside it: their scores. A pair without score is no row."""

    header = ("sentence1", "sentence2", "score")

    def records(self) -> Iterator[tuple[int, Any]]:
        (gold,) = self.beside
        if not gold.is_file():
            raise DataError(f"{self.name}: no {gold.name} with its scores in the same folder")
        counts = sum(1 for _ in self.lines()), sum(1 for _ in self.lines(path=gold))
        if counts[0] != counts[1]:
            raise DataError(
                f"{self.name} has {counts[0]} lines, but {gold.name} has {counts[1]}; expected the same number"
            )
        for (number, line), (_, score) in zip(self.lines(), self.lines(path=gold), strict=True):
            if score.strip():
                yield number, [*line.rstrip("\r\n").split("\t")[:2], score.strip()]


def place(name: str, number: int, unit: Unit) -> str:
    """Where a row is, for messages: `x.tsv:3`, or `x.parquet row 3`."""
    return f"{name}:{number}" if unit == "line" else f"{name} row {number}"
