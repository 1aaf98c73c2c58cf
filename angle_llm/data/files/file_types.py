"""Rows of a file: a reader class for each file type; `reader_of` chooses the class for a file.

To add a file type, write a subclass of `FileReader` and add it to `FILE_TYPES` at the end of this module; `EXTENSIONS`
has the types that are not read from .gz. `datasets` names the files of a split of a local folder (`data.sources`).

A row that cannot be parsed becomes a `BadRow` with file, line and reason. Damage that hides an unknown number of rows,
such as a truncated gzip file, raises `DataError`.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

from angle_llm.data.formats import SINGLE_TEXTS, DataError, ListCell, RowError, is_list_text, read_text
from angle_llm.settings.parsing import similar_paths, unknown_name

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
        return _names_beside(self)

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


def json_value(value: Any) -> Any:
    """Return a value of a row as a value of JSON, equal in all processes.

    Arrays become lists, and decimal numbers floats. Other objects become a dictionary, which no field accepts.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Decimal):
        return float(value)
    shown = sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
    return {type(value).__name__: re.sub(" at 0x[0-9A-Fa-f]+", "", str(shown))}  # without the address in memory


class RowsInMemory(FileReader):
    """Reader of the rows of a Python object: a list of dictionaries, or a `datasets.Dataset`.

    Args:
        rows: The rows, column → value; their number is the row number from 1.
        name: Name of the rows in messages.
    """

    unit = "row"

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, name: str = "rows") -> None:
        super().__init__(Path(f"memory:{name}"), name=name)
        features: Any = getattr(rows, "features", None)
        self.label_names = {} if features is None else _names_in(features.to_dict())
        self._rows = rows

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the rows and label names."""
        digest = sha256(json.dumps(self.label_names).encode())
        for row in self._rows:
            digest.update(json.dumps(row, default=json_value).encode())
        return digest.hexdigest()

    @cached_property
    def columns(self) -> list[str]:
        names = getattr(self._rows, "column_names", None)
        return list(names or dict.fromkeys(column for row in self._rows for column in row))

    def _records(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(map(dict, self._rows), 1))


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


# ------------------------------------------------------------------------------------------------ JSON


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


# ------------------------------------------------------------------------------------------------ tables


csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long texts
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_CELL = r'(?:"(?:[^"]|"")*"|[^"\t\n]*)'
_CSV_ROW = re.compile(rf"{_CELL}(?:\t{_CELL})*")
"""Pattern of a row with the quoting of CSV and tabs between cells."""


def _without_line_end(line: str) -> str:
    """Return a line without its line end: \\n, \\r\\n or \\r."""
    return line.removesuffix("\n").removesuffix("\r")


class TsvFile(FileReader):
    """Reader of tab-separated files with a header line; quotes are part of the text. Blank lines are skipped.

    Raises:
        DataError: for a file with the quoting of CSV: all cells with quotes are in quotes, and a cell has doubled quotes
            or a line end, or is in the header.
    """

    header: ClassVar[tuple[str, ...]] = ()
    """Column names, for a file type without a header line; empty: the first line of the file is the header."""
    has_quoting: ClassVar[bool] = False
    """Whether quotes around a cell are removed, as in CSV files."""

    @cached_property
    def columns(self) -> list[str]:
        if self.header:
            return list(self.header)
        number, cells = next(self._lists(), (1, []))
        try:
            columns = self._fields(cells)
        except RowError as error:
            raise DataError(f"{self.name}:{number}: {error}") from None
        if repeated := sorted({name for name in columns if name and columns.count(name) > 1}):
            raise DataError(
                f"{self.name}:{number}: expected a header line with different column names; more than once: "
                f"{', '.join(repeated)}. Rename or delete these columns"
            )
        if not columns:
            raise DataError(f"{self.name}:{number}: expected a header line, got none")
        return columns

    def _records(self) -> Iterator[tuple[int, Any]]:
        self.columns  # noqa: B018  # raises for an unusable header
        return itertools.islice(self._lists(), 0 if self.header else 1, None)

    def _parse(self, record: Any) -> dict[str, Any]:
        fields = self._fields(record)
        if len(fields) != len(self.columns):
            raise RowError(f"{len(fields)} fields, expected {len(self.columns)}: {', '.join(self.columns)}")
        if fields == self.columns and len(fields) > 1:
            raise RowError("the line repeats the header, as in joined files; remove the line")
        return {
            name: ListCell(cell) if is_list_text(cell) else cell
            for name, cell in zip(self.columns, fields, strict=True)
        }

    def _lists(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line number, cells) for every line, including the header."""
        for number, line in self.lines():
            if line.strip("\r\n"):
                yield number, _without_line_end(line).split("\t")

    def _fields(self, cells: list[str]) -> list[str]:
        """Return the cells of a line. Raises `RowError` for bytes that cannot be decoded."""
        self._refuse_bad_bytes("".join(cells))
        if not self.has_quoting and any('"' in cell for cell in cells) and self._csv_quoting_at:
            raise DataError(
                f"{self.name}:{self._csv_quoting_at}: the quotes of this file are the quoting of CSV, which is not read here; "
                "rename the file to .csv. If the quotes belong to the texts, convert the file to JSON lines"
            )
        return cells

    @cached_property
    def _csv_quoting_at(self) -> int:
        """Line of the first cell that shows the quoting of CSV; 0 if a cell has quotes that are not this quoting."""
        quoting_line = width = 0
        lines: list[str] = []  # of the current row: a cell in quotes may span lines

        def read() -> Iterator[str]:
            for _, line in self.lines():  # Python 3.10 reads no NUL
                lines.append(_without_line_end(line).replace("\r", " ").replace("\0", " ") + "\n")
                yield lines[-1]

        reader = csv.reader(read(), delimiter="\t")
        for cells in reader:
            first, row = reader.line_num - len(lines) + 1, "".join(lines).removesuffix("\n")
            width = width or len(cells)
            if not _CSV_ROW.fullmatch(row) or len(cells) not in (0, width):
                return 0  # the quotes belong to the texts
            quoted_header = first == 1 and '"' in row and not self.header
            doubled = any('""' in cell[1:-1] for cell in _QUOTED.findall(row))
            if quoted_header or doubled or len(lines) > 1:
                quoting_line = quoting_line or first
            lines.clear()
        return quoting_line


_DELIMITERS, _FIRST_LINES = ",;\t|", 20
"""Delimiters of CSV files, and number of lines from which the delimiter is detected."""


class CsvFile(TsvFile):
    """Reader of CSV files with a header line and RFC 4180 quoting.

    A quoted field may span several lines; the row has the number of its first line. The delimiter is the first of
    comma, semicolon, tab and | that gives the first rows equal numbers of cells, else the first in the header. If a space
    follows each delimiter of the header, spaces after delimiters belong to no cell.
    """

    has_quoting = True

    def _lists(self) -> Iterator[tuple[int, list[str]]]:
        lines = (line for _, line in self.lines())
        reader = csv.reader(lines, strict=True, delimiter=self._separator, skipinitialspace=self._has_spaces)
        first = 1
        try:
            for cells in reader:
                if cells:
                    yield first, cells
                first = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{self.name}:{first}: broken quoting up to line {reader.line_num}, with delimiter {self._separator!r}: "
                f'{error}; close the quote, write a quote inside a field twice (""), and quote fields with a line end'
            ) from None

    @cached_property
    def _separator(self) -> str:
        """Delimiter of the file."""
        lines = [line for _, line in itertools.islice(self.lines(), _FIRST_LINES)]
        for sign in _DELIMITERS:
            with suppress(csv.Error):
                rows = list(filter(None, csv.reader(lines, delimiter=sign)))
                counts = set(map(len, rows[:-1] if len(lines) == _FIRST_LINES else rows))  # the last row can be cut
                if len(counts) == 1 and counts != {1}:
                    return sign
        header = re.sub(r'"[^"]*"', "", next(filter(str.strip, lines), ""))
        return next((sign for sign in _DELIMITERS if sign in header), ",")

    @cached_property
    def _has_spaces(self) -> bool:
        """Whether a space follows each delimiter in the header."""
        header = next((line for _, line in self.lines() if line.strip()), "")
        with suppress(csv.Error):
            cells = next(csv.reader([header], delimiter=self._separator), [])[1:]
            return bool(cells) and all(cell.startswith(" ") for cell in cells)
        return False


_STS_BENCHMARK_ROW = re.compile(r"(?:[^\t]*\t){4}\s*\d(\.\d+)?\s*\t[^\t]*\t")
"""Pattern of the start of a row of STS benchmark files: the fifth of seven or more cells is a score."""


class StsBenchmarkFile(TsvFile):
    """Reader of STS benchmark files such as `sts-train.csv`: tab-separated, without a header line.

    Columns after the two sentences are not read.
    """

    header = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")

    def _fields(self, cells: list[str]) -> list[str]:
        return super()._fields(cells)[: len(self.header)]


class StsPartFile(TsvFile):
    """Reader of SemEval STS files `STS.input.NAME.txt` (two sentences per line) and `STS.gs.NAME.txt` (scores).

    Both files are in the same folder. Pairs without a score are skipped.
    """

    header = ("sentence1", "sentence2", "score")

    @cached_property
    def beside(self) -> tuple[Path, ...]:  # type: ignore[override]
        return (self.path.with_name(self.path.name.replace("STS.input.", "STS.gs.", 1)),)

    def _lists(self) -> Iterator[tuple[int, list[str]]]:
        (gold,) = self.beside
        if not gold.is_file():
            raise DataError(f"{self.name}: no {gold.name} with its scores in the same folder")
        scores = TextFile(gold, encoding=self.encoding).lines()
        for (number, line), (_, score) in itertools.zip_longest(self.lines(), scores, fillvalue=(0, None)):
            if line is None or score is None:
                raise DataError(f"{self.name} and {gold.name} have different numbers of lines")
            if score.strip():
                yield number, [*_without_line_end(line).split("\t")[:2], score.strip()]


# ------------------------------------------------------------------------------------------------ Parquet and datasets


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
        names = _names_in(described.get("info", {}).get("features") or {})
        return names | _names_beside(self, names)

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


class DatasetReader(RowsInMemory):
    """Reader of a dataset split that the library `datasets` loads from a local folder or from the Hugging Face hub.

    Args:
        name: Path of the local folder, or hub id.
        configuration: Name of the dataset configuration; None: the default configuration.
        split: Name of the split.

    Raises:
        DataError: if the split cannot be loaded, or the disk has too little space for the dataset.
    """

    def __init__(self, name: str, configuration: str | None, split: str) -> None:
        import datasets

        try:
            builder = datasets.load_dataset_builder(name, configuration)
            known = [str(part) for part in builder.info.splits or builder.config.data_files or ()]
            if known and re.fullmatch(r"\w+", split) and split not in (*known, "all"):
                raise DataError(f"{name}: {unknown_name('split', split, known)}")
            _check_space(name, builder)
            builder.download_and_prepare()
            dataset = builder.as_dataset(split)
        except DataError:
            raise
        except Exception as error:  # many types: no network, unknown dataset, configuration or split, broken files
            of_configuration = f" of configuration {configuration!r}" if configuration else ""
            hint = "" if Path(name).exists() else f" It is not a local path. {similar_paths(Path(name))}"
            problem = f"`datasets` could not load split {split!r}{of_configuration}: {error}"
            raise DataError(f"{name}: {problem}. Check split and names.{hint}") from error
        super().__init__(dataset, name=name)
        self.identity = str(dataset._fingerprint)


def _check_space(name: str, builder: Any) -> None:
    """Raise `DataError` if a dataset, which `datasets` downloads and copies to a table, is larger than the free disk space.

    Without sizes in the dataset card, the table is assumed to be as large as the files. Files in the cache of the hub, such
    as those of an interrupted download, need no more space.
    """
    from datasets.utils.file_utils import xgetsize
    from huggingface_hub import try_to_load_from_cache

    table = Path(builder.cache_dir)
    if table.exists():  # from an earlier run
        return
    urls = [url for urls_of_split in (builder.config.data_files or {}).values() for url in urls_of_split]
    download_size = builder.info.download_size or sum(map(xgetsize, urls))
    cached_size = 0
    for url in urls:
        if match := re.fullmatch("hf://datasets/([^@]+)@([^/]+)/(.+)", url):
            cached = try_to_load_from_cache(match[1], match[3], revision=match[2], repo_type="dataset")
            cached_size += Path(cached).stat().st_size if isinstance(cached, str) else 0
    missing = max(download_size - cached_size, 0) if any("://" in url for url in urls) else 0
    needed = missing + (builder.info.dataset_size or download_size)
    folder = next(parent for parent in table.parents if parent.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{name}: expected {needed / 1e9:,.2f} GB of free space for its files and their table in {folder}, got "
            f"{free / 1e9:,.2f} GB. Set HF_HOME to a folder on a larger disk, or stream a part (docs/data.md, Large datasets)"
        )


def _names_in(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return column → label names for the columns of labels, or of lists of labels; `features` is `Features.to_dict()`."""
    names: dict[str, list[str]] = {}
    for column, feature in features.items():
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        if feature.get("_type") == "ClassLabel" and feature.get("names"):
            names[column] = list(feature["names"])
    return names


def _names_beside(file: FileReader, known: Collection[str] = ()) -> dict[str, list[str]]:
    """Return column → label names from the dataset card in the folder of a data file, or in the folder above.

    Columns in `known` are omitted. If the folder of the data file has the name of a configuration, only this one is read.

    Raises:
        DataError: if the card cannot be read, or a column has different label names in two configurations.
    """
    names: dict[str, list[str]] = {}
    for folder in file.path.absolute().parents[:2]:
        cards = [card for card in (folder / "README.md", folder / "dataset_infos.json") if card.is_file()]
        if any(re.search(r'\bclass_label:|"ClassLabel"', card.read_text("utf-8", "replace")) for card in cards):
            from datasets.info import DatasetInfosDict

            try:
                infos = DatasetInfosDict.from_directory(str(folder))
            except Exception as error:  # many types: YAML, JSON, unknown features
                raise DataError(f"{cards[0]}: label names cannot be read; correct the file: {error}") from error
            name = file.path.parent.name
            configurations = [infos[name]] if name in infos else infos.values()
            features = [info.features.to_dict() for info in configurations if info.features]
            columns = itertools.chain.from_iterable(_names_in(feature).items() for feature in features)
            for column, labels in columns:
                wanted = column in file.columns and column not in known
                if wanted and names.setdefault(column, labels) != labels:
                    differing = f"two orders of the labels of column {column!r}: {names[column]} and {labels}"
                    raise DataError(f"{cards[0]} has {differing}. Replace the numbers in {file.path.name} by names")
    return names


# ------------------------------------------------------------------------------------------------ names

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
            file_type = StsBenchmarkFile if _STS_BENCHMARK_ROW.match(first_line) else CsvFile
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
