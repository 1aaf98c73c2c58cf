"""The rows of a corpus, one after another: text, JSONL, CSV, TSV and Parquet files, a folder of them, standard input.

Nothing is held but the row at hand (of Parquet, a batch of rows), so a corpus may be of any size. Rows are numbered from 0
through all files in their order, bad ones too: the number of a row says where it came from whatever is left out.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from angle_llm.config import SettingsError
from angle_llm.data import DataError, DataSource
from angle_llm.data.files import open_table
from angle_llm.data.formats import RowError, nearest, read_text

STANDARD_INPUT = "-"
TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
"""Endings of files with columns; all but Parquet also with .gz behind them. Any other file is text, one a line."""
_IN_FOLDERS = (".txt", *TABLES)
_USUAL_COLUMNS = ("text", "sentence")
_NEEDED = "--input needs a UTF-8 text file with one text a line, a .jsonl, .csv, .tsv or .parquet file, a folder of such, or -"
_PARQUET_ROWS = 1024

Raw = Any
"""A row before it is looked at: a line, or the values of its columns, or the `RowError` that came in its place."""


@dataclass(frozen=True)
class File:
    """One file of a corpus."""

    name: str
    """As messages name it."""
    kind: str
    """Its ending without .gz, if it is one of `TABLES`; else the empty string."""
    open: Callable[[], BinaryIO]
    """Its bytes, from the start, unpacked if they are packed."""
    open_stored: Callable[[], BinaryIO]
    """Its bytes as they lie on disk."""
    path: Path | None
    """None for standard input."""

    @classmethod
    def at(cls, path: Path) -> File:
        packed = path.suffix == ".gz"
        kind = path.with_suffix("").suffix if packed else path.suffix
        return cls(
            name=str(path),
            kind=kind if kind in TABLES else "",
            open=(lambda: gzip.open(path)) if packed else (lambda: path.open("rb")),  # type: ignore[arg-type,return-value]
            open_stored=lambda: path.open("rb"),
            path=path,
        )

    def place(self, number: int) -> str:
        """Where a row is, for messages: line or row number from 1."""
        return f"{self.name} row {number}" if self.kind == ".parquet" else f"{self.name}:{number}"

    def raw_rows(self, columns: list[str] | None) -> Iterator[tuple[int, Raw]]:
        """(line or row number from 1, the row), cheaply: what is wrong with a row shows in `Corpus.read`. Of Parquet,
        only the named columns are read.

        Raises:
            DataError: where damage hides an unknown number of rows.
        """
        if self.kind == ".parquet":
            yield from self._parquet_rows(columns)
        elif self.kind in (".csv", ".tsv"):
            yield from open_table(DataSource(path=self.name)).rows
        else:
            # Bytes that are not UTF-8 become lone surrogates: see `_refuse_bad_bytes`. Of JSON, as in `data.files`, only
            # \n ends a line; of text, \r does too.
            ends = "\n" if self.kind else None
            number = 0
            try:
                with io.TextIOWrapper(self.open(), "utf-8-sig", "surrogateescape", ends) as lines:
                    for number, line in enumerate(lines, 1):
                        if not self.kind or line.strip():
                            yield number, line.removesuffix("\n")
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{self.name}:{number + 1}: the gzip file is truncated or damaged here ({error}); fetch it again, or "
                    "unpack what is left of it"
                ) from None

    def _parquet_rows(self, columns: list[str] | None) -> Iterator[tuple[int, Raw]]:
        import pyarrow
        from pyarrow import parquet

        number = 0
        try:
            # A column is read page by page: without these two, a row group at a time, which may be the whole file.
            with parquet.ParquetFile(self.name, pre_buffer=False, buffer_size=1 << 20) as file:
                for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.name}: cannot be read as Parquet after row {number}: {error}") from error

    def columns(self) -> list[str]:
        """Names of the columns; of JSONL, the keys of its first object."""
        if self.kind == ".parquet":
            import pyarrow
            from pyarrow import parquet

            try:
                return list(parquet.read_schema(self.name).names)
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(f"{self.name}: cannot be read as Parquet: {error}") from error
        if self.kind != ".jsonl":
            return list(open_table(DataSource(path=self.name)).columns)
        for _, line in self.raw_rows(None):
            try:
                return list(_json_row(line))
            except RowError:
                continue
        raise DataError(f"{self.name}: holds no JSON object. Write one object a line")


@dataclass(frozen=True)
class Row:
    """A row that can be embedded."""

    text: str
    id: str | None
    """What the id column says, None without one."""


@dataclass(frozen=True)
class Block:
    """Rows that follow one another in the corpus."""

    number: int
    first: int
    """Number of its first row."""
    rows: list[tuple[File, int, Raw]]


@dataclass(frozen=True)
class Survey:
    """A first pass over a corpus."""

    rows: int
    """All of them, bad ones too."""
    bad: int
    files: list[dict[str, Any]]
    """Name, size in bytes and SHA-256 of each file: the same of two corpora means the same rows."""
    stamps: list[tuple[int, int]]
    """Size and time of change of each, to notice cheaply that one was written to since."""


@dataclass(frozen=True)
class Corpus:
    """Files, and which of their columns count."""

    files: list[File]
    column: str | None
    """The column with the text; None if there are no tables."""
    id_column: str | None
    ignored: list[str]
    """Names of files in the folder that are none of the kinds that are read."""

    @classmethod
    def open(cls, input: Path, column: str | None = None, id_column: str | None = None) -> Corpus:
        """Finds the files and the columns.

        Raises:
            SettingsError: if there is no such file, none in the folder, or no such column.
        """
        files, ignored = _files(input)
        tables = [file for file in files if file.kind]
        flat = [file.name for file in files if not file.kind]
        if flat and (id_column is not None or (column is not None and not tables)):
            raise SettingsError(
                f"--column and --id-column choose within tables ({', '.join(TABLES)}), and {flat[0]} is text, one a line. "
                "Leave them out."
            )
        if not tables:
            return cls(files, None, None, ignored)
        for table in tables:
            found = table.columns()
            column = column or _usual_column(table.name, found)
            for option, name in (("--column", column), ("--id-column", id_column)):
                if name is not None and name not in found and table.kind != ".jsonl":
                    raise SettingsError(
                        f"{option}: {table.name} has no column {name!r}{nearest(name, found)}. It has: {', '.join(found)}."
                    )
        return cls(files, column, id_column, ignored)

    def raw_rows(self) -> Iterator[tuple[File, int, Raw]]:
        """Every row with its file and its number there."""
        columns = [name for name in dict.fromkeys([self.column, self.id_column]) if name is not None]
        for file in self.files:
            for number, raw in file.raw_rows(columns):
                yield file, number, raw

    def read(self, file: File, raw: Raw) -> Row:
        """The text and the id of a row.

        Raises:
            RowError: if it has none, or what cannot be read.
        """
        if isinstance(raw, str):
            _refuse_bad_bytes(raw)
            raw = _json_row(raw) if file.kind else {"the text": raw}
        if isinstance(raw, RowError):
            raise raw
        text = read_text(raw, self.column if file.kind and self.column is not None else "the text")
        if self.id_column is None:
            return Row(text, None)
        found = raw.get(self.id_column)
        if isinstance(found, bool) or not isinstance(found, str | int):
            raise RowError(f"{self.id_column} is {found!r:.60}; an id is a text or a whole number")
        return Row(text, read_text({self.id_column: str(found)}, self.id_column))

    def survey(self, *, skip_bad: bool) -> Survey:
        """Looks at every row before the hours of work begin.

        Raises:
            DataError: for the first bad row, with its file and line, unless such rows are skipped; if there are no rows.
        """
        rows = bad = 0
        stamps = self.stamps()
        for file, number, raw in self.raw_rows():
            rows += 1
            try:
                self.read(file, raw)
            except RowError as error:
                if not skip_bad:
                    raise bad_row(file.place(number), error) from None
                bad += 1
        if rows == bad:
            names = ", ".join(file.name for file in self.files[:3])
            raise DataError(
                f"{names} is empty: there is no text to embed" if not rows else f"all rows of {names} are bad"
            )
        described = []
        for file, (size, _) in zip(self.files, stamps, strict=True):
            with file.open_stored() as stream:
                digest = sha256_of(stream)
            described.append({"name": Path(file.name).name, "size": size, "sha256": digest})
        survey = Survey(rows, bad, described, stamps)
        self.check_unchanged(survey)
        return survey

    def stamps(self) -> list[tuple[int, int]]:
        """Size in bytes and time of change in nanoseconds of every file; 0 for what cannot change."""
        found = []
        for file in self.files:
            if file.path is None:
                with file.open() as stream:
                    found.append((stream.seek(0, os.SEEK_END), 0))
            else:
                status = file.path.stat()
                found.append((status.st_size, status.st_mtime_ns))
        return found

    def check_unchanged(self, survey: Survey) -> None:
        """Raises:
        DataError: if a file was written to since it was surveyed.
        """
        for file, then, now in zip(self.files, survey.stamps, self.stamps(), strict=True):
            if then != now:
                raise DataError(f"{file.name} was written to while it was read. Start again when it is complete")

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[Block]:
        """The wanted ones of blocks of `size` rows each, the last one shorter; the others are passed over."""
        rows, number = self.raw_rows(), 0
        while True:
            part = islice(rows, size)
            taken = list(part) if wanted(number) else []
            passed = len(taken) or sum(1 for _ in part)
            if taken:
                yield Block(number, number * size, taken)
            if passed < size:
                return
            number += 1

    def texts(self, numbers: set[int]) -> dict[int, str]:
        """The texts of some rows, by row number."""
        found: dict[int, str] = {}
        if numbers:
            for number, (file, _, raw) in enumerate(islice(self.raw_rows(), max(numbers) + 1)):
                if number in numbers:
                    found[number] = self.read(file, raw).text
        return found


def bad_row(place: str, reason: Exception | str) -> DataError:
    """The error for a row that cannot be embedded."""
    return DataError(f"{place}: {reason}. Or leave such rows out: --on-bad-row skip")


def sha256_of(stream: BinaryIO) -> str:
    """SHA-256 of what is left of a stream."""
    digest = hashlib.sha256()
    while part := stream.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def _files(input: Path) -> tuple[list[File], list[str]]:
    """The files of an input, and the names of those in a folder that are not read."""
    if str(input) == STANDARD_INPUT:
        return [_standard_input()], []
    input = input.expanduser()
    if input.is_dir():
        paths = sorted(path for path in input.rglob("*") if path.is_file() and _is_visible(path.relative_to(input)))
        wanted = [path for path in paths if path.name.removesuffix(".gz").endswith(_IN_FOLDERS)]
        if not wanted:
            raise SettingsError(
                f"{_NEEDED}; {input} is a folder without a file that ends in {', '.join(_IN_FOLDERS)}. Name a file in it."
            )
        ignored = [str(path.relative_to(input)) for path in paths if path not in set(wanted)]
    else:
        wanted, ignored = [input], []
    for path in wanted:
        try:
            path.open("rb").close()
        except FileNotFoundError:
            raise SettingsError(f"{_NEEDED}; there is no file {path}. Check the path.") from None
        except OSError as error:
            raise SettingsError(f"{_NEEDED}; {path} cannot be read: {error.strerror}.") from None
        if path.name.endswith((".json", ".json.gz", ".parquet.gz")):
            instead = "a .parquet file packed in .gz" if ".parquet" in path.name else "a .json file"
            raise SettingsError(
                f"{_NEEDED}; {path} is {instead}, which can only be read whole. "
                + ("Unpack it." if ".parquet" in path.name else "Write one object a line, into a .jsonl file.")
            )
    return [File.at(path) for path in wanted], ignored


def _is_visible(path: Path) -> bool:
    """Not what programs put beside data for themselves, such as `_SUCCESS` or `.part-0.crc`."""
    return not any(part.startswith((".", "_")) for part in path.parts)


def _standard_input() -> File:
    """Copied to a file without a name first, for it is read twice; the file is gone when the process is."""
    kept = tempfile.TemporaryFile()  # noqa: SIM115
    atexit.register(kept.close)
    shutil.copyfileobj(sys.stdin.buffer, kept)
    kept.flush()

    def again() -> BinaryIO:
        stream = os.fdopen(os.dup(kept.fileno()), "rb")
        stream.seek(0)
        return stream

    return File("standard input", "", again, again, None)


def _usual_column(name: str, columns: list[str]) -> str:
    usual = [column for column in _USUAL_COLUMNS if column in columns]
    if not usual and len(columns) != 1:
        raise SettingsError(f"{name} has columns {', '.join(columns)}. Say which one holds the text, with --column.")
    return (usual or columns)[0]


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"a JSON object is needed; came {type(row).__name__}")
    return row


def _refuse_bad_bytes(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise RowError(f"byte 0x{byte:02x} is not UTF-8. Convert it, as in `iconv -f latin1 -t utf-8`") from None
