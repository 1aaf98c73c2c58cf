"""Types of data files: readers of text and JSON files, and `reader_of`, which chooses the reader class for a file.

To add a file type, write a subclass of `FileReader` and add it to `FILE_TYPES`; `EXTENSIONS` has the types that are not
read from .gz. `datasets` names the files of a split of a local folder (`data.sources`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from angle_llm.data.files.arrow import ArrowFile, ParquetFile
from angle_llm.data.files.reader import FileReader, Row
from angle_llm.data.files.tables import STS_BENCHMARK_ROW, CsvFile, StsBenchmarkFile, StsPartFile, TsvFile
from angle_llm.data.formats import SINGLE_TEXTS, DataError, RowError


class TextFile(FileReader):
    """Reader of text files: a row is a line, in the column `text`. An empty line is a row too.

    Lines end with \\n, \\r\\n or \\r.
    """

    columns = ["text"]  # noqa: RUF012

    def _records(self) -> Iterator[tuple[int, Any]]:
        return self.lines(any_line_end=True)

    def _parse(self, record: Any) -> dict[str, Any]:
        self._refuse_bad_bytes(record)
        return {"text": record.removesuffix("\n")}


class JsonLinesFile(FileReader):
    """Reader of JSON lines files: a row is an object on a line. Blank lines are skipped."""

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns of the file. Reads the whole file, because later rows can have more keys."""
        names: dict[str, None] = {}
        first_bad = ""
        for row in self.rows():
            if isinstance(row, Row):
                names |= dict.fromkeys(row.values)
            else:
                first_bad = first_bad or f": {row.place}: {row.reason}"
        if not names:
            raise DataError(f"{self.name}: no usable row{first_bad}")
        return list(names)

    def _records(self) -> Iterator[tuple[int, Any]]:
        return ((number, line) for number, line in self.lines() if line.strip())

    def _parse(self, record: Any) -> dict[str, Any]:
        self._refuse_bad_bytes(record)
        try:
            value = json.loads(record)
        except json.JSONDecodeError as error:
            raise RowError(f"not a JSON object: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
            raise RowError(f"a JSON object that cannot be read: {error}") from None
        return _checked(value)


class JsonFile(JsonLinesFile):
    """Reader of JSON files with a list of objects, which are the rows; the whole list is in memory."""

    unit = "row"

    def _records(self) -> Iterator[tuple[int, Any]]:
        text = "".join(line for _, line in self.lines(any_line_end=True))
        try:
            self._refuse_bad_bytes(text)
            return iter(enumerate(json.loads(text), 1))
        except RowError as error:
            raise DataError(f"{self.name}: {error}") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{self.name}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.name}: JSON that cannot be read: {error}") from None

    def _parse(self, record: Any) -> dict[str, Any]:
        return _checked(record)


def _checked(value: Any) -> dict[str, Any]:
    """Return a parsed JSON value if it is an object, else raise `RowError`."""
    if not isinstance(value, dict):
        raise RowError(f"expected an object, got {type(value).__name__}")
    return value


FILE_TYPES: dict[str, type[FileReader]] = {
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".json": JsonFile,
    ".csv": CsvFile,
    ".tsv": TsvFile,
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
    ".txt": TextFile,
}
"""File name extension of a data file → reader class."""

EXTENSIONS = (*FILE_TYPES, *(f"{name}.gz" for name in FILE_TYPES if name not in (".parquet", ".arrow")))
"""File name extensions of data files, with and without .gz."""


def reader_of(path: Path, *, tables: bool = False, encoding: str = "utf-8", content: bytes | None = None) -> FileReader:
    """Return the reader for the type of a file: chosen by file name, for some types also by the first line.

    `tables` is whether rows must have several columns. `FileReader` describes all further arguments.

    Raises:
        DataError: for a file type that cannot be read.
    """
    is_gzip = path.suffix.lower() == ".gz"
    extension = (path.with_suffix("") if is_gzip else path).suffix.lower()
    if is_gzip and f"{extension}.gz" not in EXTENSIONS and extension in FILE_TYPES:
        raise DataError(f"{path}: {extension} files are not read from .gz; unpack it")
    if tables and extension not in FILE_TYPES:
        raise DataError(f"{path}: unknown file name extension; known: {', '.join(FILE_TYPES)}, text files also .gz")
    file_type = FILE_TYPES.get(extension, TextFile)
    if file_type in (CsvFile, JsonFile) or (file_type is TextFile and tables):
        lines = TextFile(path, encoding=encoding, content=content).lines()
        first_line = next((line for _, line in lines if line.strip()), "")
        if file_type is CsvFile:
            file_type = StsBenchmarkFile if STS_BENCHMARK_ROW.match(first_line) else CsvFile
        elif file_type is JsonFile and first_line.strip() == "{":
            raise DataError(
                f"{path}: expected a list of objects, or an object on each line; got an object of several lines"
            )
        elif file_type is JsonFile:
            file_type = JsonFile if first_line.lstrip().startswith("[") else JsonLinesFile
        elif path.name.startswith("STS.input."):
            file_type = StsPartFile
        elif "\t" in first_line:
            file_type = TsvFile  # SICK, MRPC
        else:
            raise DataError(
                f"{path}: expected pairs: a table with a header line and tabs between columns, or STS.input.NAME.txt beside "
                f"STS.gs.NAME.txt; the first line has no tab. {SINGLE_TEXTS}."
            )
    return file_type(path, encoding=encoding, content=content)


BESIDE = (".quarantine.jsonl", ".dropped.jsonl", ".journal.jsonl", ".passages.jsonl", ".skipped.jsonl", ".report.json")
"""Ends of names of files that commands write beside their output. A folder is read without them."""


def is_data_name(name: str) -> bool:
    """Return whether a file name has the extension of a data file, in upper or lower case."""
    return name.lower().endswith(EXTENSIONS)
