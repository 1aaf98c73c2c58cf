"""Rows of text tables: tab-separated files, CSV files, and the files of STS sets."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from angle_llm.data.files.reader import FileReader
from angle_llm.data.formats import DataError, ListCell, RowError, is_list_text

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
            raise DataError(f"{self.name}:{number}: expected a header line, got an empty file")
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


STS_BENCHMARK_ROW = re.compile(r"(?:[^\t]*\t){4}\s*\d(\.\d+)?\s*\t[^\t]*\t")
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
        scores = FileReader(gold, encoding=self.encoding).lines()
        for (number, line), (_, score) in itertools.zip_longest(self.lines(), scores, fillvalue=(0, None)):
            if line is None or score is None:
                raise DataError(f"{self.name} and {gold.name} have different numbers of lines")
            if score.strip():
                yield number, [*_without_line_end(line).split("\t")[:2], score.strip()]
