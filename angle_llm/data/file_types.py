"""The types of files. `readers.open_rows` is the entry point; a new type is a subclass of `FileReader` and an entry in
`readers.FILE_TYPES`.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from angle_llm.data.formats import DataError, RowError
from angle_llm.data.rows import FileReader, Row

_PARQUET_ROWS = 1024
"""Rows of a Parquet file that are in memory together."""


class TextFile(FileReader):
    """One text per line, column `text`. Lines end with \\n, \\r\\n or \\r; an empty line is a row."""

    columns = ["text"]  # noqa: RUF012

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        return self.lines(newline=None)

    def _parse(self, record: Any) -> dict[str, Any]:
        self._refuse_bad_bytes(record)
        return {"text": record.removesuffix("\n")}


# ------------------------------------------------------------------------------------------------ JSON


class JsonLinesFile(FileReader):
    """One JSON object per line; blank lines are skipped. Only \\n ends a line."""

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns. Reads the whole file, since later rows can have further keys."""
        names: dict[str, None] = {}
        first_bad, found = "", False
        for row in self.rows():
            if isinstance(row, Row):
                names |= dict.fromkeys(row.values)
                found = True
            else:
                first_bad = first_bad or f": {row.place}: {row.reason}"
        if not found:
            raise DataError(f"{self.name}: no usable row{first_bad}")
        return list(names)

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip())

    def _parse(self, record: Any) -> dict[str, Any]:
        self._refuse_bad_bytes(record)
        try:
            return _checked(json.loads(record.rstrip(" \t\r\n"), object_pairs_hook=_object))
        except RowError:
            raise
        except (ValueError, RecursionError) as error:
            hint = ""
            if not record.lstrip().startswith("{"):
                hint = '; expected an object in each line, such as {"text": "…"}'
            if record.lstrip().startswith("["):
                hint = "; a list of objects is a .json file"
            raise RowError(f"not a JSON object: {_json_problem(error)}{hint}") from None


class JsonFile(JsonLinesFile):
    """One list of JSON objects; it is in memory as a whole."""

    unit = "row"

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        text = "".join(line for _, line in self.lines())
        try:
            self._refuse_bad_bytes(text)
            objects = json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            at = f"{self.name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else self.name
            raise DataError(
                f"{at}: not JSON: {_json_problem(error)}. A file with one object per line is .jsonl"
            ) from None
        if not isinstance(objects, list):
            raise DataError(f"{self.name}: expected a list of objects, got {type(objects).__name__}")
        return iter(enumerate(objects, 1))

    def _parse(self, record: Any) -> dict[str, Any]:
        return _checked(record)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowError:
    """Return an object, or the error for a repeated key,
    of which the json module would silently keep the last value."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else RowError(f"the object has keys twice: {_twice(k for k, _ in pairs)}")


def _checked(found: Any) -> dict[str, Any]:
    """Return a parsed JSON value. Raises `RowError` if it is not an object, or has a key twice."""
    if not isinstance(found, dict):
        raise found if isinstance(found, RowError) else RowError(f"expected an object, got {type(found).__name__}")
    return found


def _json_problem(error: ValueError | RecursionError) -> str:
    """Return why a text is not JSON, with the start of the line."""
    if not isinstance(error, json.JSONDecodeError):
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    line = error.doc.split("\n")[error.lineno - 1].strip()
    start = "".join(character if character.isprintable() else "�" for character in line[:60])
    return f"{error.msg.lower()} at column {error.colno}; the line begins `{start}{'…' if len(line) > 60 else ''}`"


def _twice(names: Iterator[str] | list[str]) -> list[str]:
    """Return the names that occur more than once."""
    found = sorted(names)
    return [name for name, group in itertools.groupby(found) if len(list(group)) > 1]


# ------------------------------------------------------------------------------------------------ tables


class TsvFile(FileReader):
    """A header line and tab-separated fields without quoting: a quote is a character. Blank lines are skipped."""

    header: ClassVar[tuple[str, ...]] = ()
    """Columns of a type without a header line."""

    @cached_property
    def columns(self) -> list[str]:
        if self.header:
            return list(self.header)
        number, record = next(self._lists(), (1, RowError("the file is empty, expected a header line")))
        try:
            columns = self._fields(record)
            if repeated := _twice(columns):
                raise RowError(f"the header has column names twice: {repeated}")
        except RowError as error:
            raise DataError(f"{self.name}:{number}: {error}") from None
        return columns

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        self.columns  # noqa: B018  # raises for an unusable header
        return itertools.islice(self._lists(), 0 if self.header else 1, None)

    def _parse(self, record: Any) -> dict[str, Any]:
        fields = self._fields(record)
        if len(fields) != len(self.columns):
            raise RowError(f"{len(fields)} fields, expected {len(self.columns)}: {', '.join(self.columns)}")
        return dict(zip(self.columns, fields, strict=True))

    def _lists(self) -> Iterator[tuple[int, list[str] | RowError]]:
        """Yield line numbers, and the fields of the line; the header is the first."""
        for number, line in self.lines():
            if line.strip("\r\n"):
                yield number, line.removesuffix("\n").removesuffix("\r").split(self.delimiter or "\t")

    def _fields(self, record: list[str] | RowError) -> list[str]:
        if isinstance(record, RowError):
            raise record
        self._refuse_bad_bytes("".join(record))
        return record


class CsvFile(TsvFile):
    """A header line and RFC 4180 quoting. A quoted field may span lines; the row has the number of its first line.

    The delimiter is a comma. Without a comma in the header it is the first of ; tab | that the header has.
    """

    def _lists(self) -> Iterator[tuple[int, list[str] | RowError]]:
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
                advice = 'write a quote inside a field twice ("")'
                if reader.line_num > first:
                    raise DataError(
                        f"{self.name}:{first}: a quoted field starts here and is not closed correctly on line "
                        f"{reader.line_num} ({error}); close the quote, and {advice}"
                    ) from None
                yield (
                    first,
                    RowError(
                        f"broken quoting with delimiter {self._separator!r}: {error}; {advice}, or set --delimiter"
                    ),
                )

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
        """Return whether the first line of a file has a score as its fifth tab-separated field."""
        fields = next((line for _, line in reader.lines()), "").split("\t")
        return len(fields) >= len(cls.header) and re.fullmatch(r"\d(\.\d+)?", fields[4].strip()) is not None

    def _fields(self, record: list[str] | RowError) -> list[str]:
        return super()._fields(record)[: len(self.header)]


class StsPartFile(TsvFile):
    """`STS.input.NAME.txt`: two sentences per line; `STS.gs.NAME.txt` beside it: their scores.
    Pairs without score are skipped."""

    header = ("sentence1", "sentence2", "score")

    @cached_property
    def beside(self) -> tuple[Path, ...]:  # type: ignore[override]
        return (self.path.with_name(self.path.name.replace("STS.input.", "STS.gs.", 1)),)

    def _lists(self) -> Iterator[tuple[int, list[str] | RowError]]:
        (gold,) = self.beside
        if not gold.is_file():
            raise DataError(f"{self.name}: no {gold.name} with its scores in the same folder")
        scores = TextFile(gold, encoding=self.encoding).lines()
        for (number, line), (_, score) in itertools.zip_longest(self.lines(), scores, fillvalue=(0, None)):
            if line is None or score is None:
                raise DataError(f"{self.name} and {gold.name} have different numbers of lines")
            if score.strip():
                yield number, [*line.rstrip("\r\n").split("\t")[:2], score.strip()]


# ------------------------------------------------------------------------------------------------ Parquet and datasets


class ParquetFile(FileReader):
    """A Parquet file; some rows are decoded at a time."""

    unit = "row"

    @cached_property
    def columns(self) -> list[str]:
        from pyarrow import parquet

        with self._as_data_error():
            columns = list(parquet.read_schema(self.name).names)
        if repeated := _twice(columns):
            raise DataError(f"{self.name}: the file has column names twice: {repeated}")
        return columns

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
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
        super().__init__(Path(name), name=name)
        import datasets

        try:
            self._dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
        except Exception as error:  # of many types: no network, no such dataset, configuration or split, broken files
            of = f" of configuration {configuration!r}" if configuration else ""
            raise DataError(
                f"{name}: `datasets` could not load split {split!r}{of}: {error}. Check path, split and name. {hint}"
            ) from error
        features = self._dataset.features.items()
        self.label_names = {name: list(each.names) for name, each in features if isinstance(each, datasets.ClassLabel)}
        self.columns = list(self._dataset.column_names)

    @property
    def identity(self) -> str:
        return str(self._dataset._fingerprint)

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self._dataset, 1))
