"""Where rows come from, and an account of every one of them.

    file, folder or hub ──► rows (number, columns) ──► `formats` ──► examples + `DataReport`

Nothing is lost without a word: each row is used, dropped for a documented reason, or rejected, and
`rows_in = rows_used + dropped + rejected` is checked at the end of every load. The default is strict: the first bad row
is an error with its file and line.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from angle_llm.data.columns import resolve_format
from angle_llm.data.files import Table, open_table
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Row, RowError, nearest
from angle_llm.settings import DataSource

__all__ = ["DataReport", "DataSource", "LoadedData", "Rejected", "load_examples"]


_COLUMNS_SHOWN = 12


class Rejected(NamedTuple):
    """A bad row that was skipped: its file, its line (row number in Parquet, JSON arrays and datasets), and why."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class DataReport:
    """What became of every row of a source. `rows_in = rows_used + sum(dropped) + len(rejected)` always holds."""

    source: DataSource
    format: str
    """The format the rows were read as."""
    guessed: bool
    """Whether `format` was understood from the columns (`format="auto"`)."""
    columns: dict[str, str]
    """Field → the column it was read from."""
    unused_columns: list[str]
    """Columns that nobody read: no field's, and not asked for by `where`."""
    rows_in: int
    rows_used: int
    """Rows that made it into an example; two for each triple of `nli_triples`."""
    examples: int
    dropped: dict[str, int]
    """Documented reason → rows: "neutral", "no gold label", "filtered by where", "unpaired", "beyond limit"."""
    rejected: list[Rejected]

    def __post_init__(self) -> None:
        accounted = self.rows_used + sum(self.dropped.values()) + len(self.rejected)
        if self.rows_in != accounted:
            raise RuntimeError(
                f"a bug in angle_llm: {accounted} of {self.rows_in} rows accounted for. {self.summary()}"
            )

    def summary(self) -> str:
        """One line: `a.tsv: 90 examples from 90 of 98 rows as scored_pair (text1 = q1, text2, score); columns not used:
        id; dropped: …`."""
        columns = ", ".join(
            name if name == column else f"{name} = {_printable(column)}" for name, column in self.columns.items()
        )
        parts = [
            f"{self.source.path}: {self.examples:,} examples from {self.rows_used:,} of {self.rows_in:,} rows as "
            f"{self.format}{', guessed from the columns' if self.guessed else ''} ({columns})"
        ]
        if self.unused_columns:
            more = len(self.unused_columns) - _COLUMNS_SHOWN
            shown = ", ".join(map(_printable, self.unused_columns[:_COLUMNS_SHOWN]))
            parts.append(f"columns not used: {shown}{f' and {more:,} more' if more > 0 else ''}")
        if self.dropped:
            parts.append("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()))
        if self.rejected:
            parts.append(
                f"rejected: {len(self.rejected):,}, first at {self.rejected[0].line}: {self.rejected[0].reason}"
            )
        return "; ".join(parts)


def _printable(name: str) -> str:
    """A column's name as any terminal takes it: JSON may hold half a character."""
    return name.encode(errors="backslashreplace").decode() or "''"


@dataclass(frozen=True)
class LoadedData:
    """The examples of a source and the account of its rows."""

    examples: list[Example]
    report: DataReport


class Outcome(NamedTuple):
    """What one row came to."""

    number: int
    """Its line or row number, counted from 1."""
    row: Row | RowError
    """As it stands in the file, or why it cannot be read."""
    result: Example | Dropped | RowError


@dataclass(frozen=True)
class Reading:
    """A source that is opened and whose columns are understood; rows are read as they are asked for, once."""

    source: DataSource
    table: Table
    format: str
    """The format the rows are read as."""
    columns: dict[str, str]
    """Field → the column it is read from."""

    @property
    def unused_columns(self) -> list[str]:
        """Columns that nobody reads: no field's, and not asked for by `where`."""
        used = {*self.columns.values(), *self.source.where}
        return [name for name in self.table.columns if name not in used]

    def outcomes(self) -> Iterator[Outcome]:
        """Every row, in the file's order, bad ones too. What `limit`, shuffling and `gather` do comes after."""
        labels = self.table.label_names.get(self.columns["label"], []) if "label" in self.columns else []
        for number, row in self.table.rows:
            try:
                yield Outcome(number, row, self._read(row, labels))
            except RowError as error:
                yield Outcome(number, row, error)

    def _read(self, row: Row | RowError, labels: list[str]) -> Example | Dropped:
        if isinstance(row, RowError):
            raise row
        if not all(_equals(row.get(column), wanted) for column, wanted in self.source.where.items()):
            return Dropped("filtered by where")
        fields = {key: row[column] for key, column in self.columns.items() if column in row}
        if labels:
            fields["label"] = label_word(fields.get("label"), labels)
        return FORMATS[self.format].read(fields, self.source.score_range)


def open_source(source: DataSource) -> Reading:
    """Opens a source and understands its columns. Only a hub id that is no local path reaches the network.

    Raises `DataError` for what cannot be opened, columns that are missing or fit several formats, and settings that do
    not fit them.
    """
    table = open_table(source)
    try:
        name, columns = resolve_format(source.format, source.columns, table.columns)
        _check_settings(source, name, columns, table)
    except DataError as error:
        raise DataError(f"{table.name}: {error}") from None
    return Reading(source, table, name, columns)


def load_examples(source: DataSource) -> LoadedData:
    """Read a source whole, see `open_source`.

    A bad row (no text, no number where a score is needed, broken JSON, wrong number of fields, bytes that are not
    UTF-8) raises `DataError` with file and line, or is skipped and listed in the report if the source says so; more bad
    rows than its `max_bad_ratio` raise again. Damage that hides an unknown number of rows (a truncated gzip, an unclosed
    quote over several lines) raises in both cases, for it cannot be counted; so do missing columns, and a source of which
    no example is left. Blank lines are no rows. The whole source is read and checked, also what is beyond the limit.
    """
    reading = open_source(source)
    format = FORMATS[reading.format]
    read: list[Example] = []
    dropped: Counter[str] = Counter()
    rejected: list[Rejected] = []
    rows_in = 0
    for number, row, result in reading.outcomes():
        rows_in += 1
        if isinstance(result, RowError):
            if source.on_bad_row == "raise":
                raise _first_bad_row(reading, number, row, result)
            rejected.append(Rejected(reading.table.name, number, result.reason))
        elif isinstance(result, Dropped):
            dropped[result.reason] += 1
        else:
            read.append(result)
    _check_bad_ratio(reading, rows_in, rejected)

    examples = read if format.gather is None else list(format.gather(read))
    if unpaired := len(read) - len(examples) * format.rows_per_example:
        dropped["unpaired"] = unpaired
    if source.shuffle_seed is not None:
        # Sorted by random(), the one generator that gives the same numbers in every version of Python.
        generator = random.Random(source.shuffle_seed)
        keys = [generator.random() for _ in examples]
        examples = [examples[index] for index in sorted(range(len(examples)), key=keys.__getitem__)]
    if source.limit is not None and len(examples) > source.limit:
        dropped["beyond limit"] = (len(examples) - source.limit) * format.rows_per_example
        del examples[source.limit :]
    report = DataReport(
        source=source,
        format=reading.format,
        guessed=source.format == "auto",
        columns=reading.columns,
        unused_columns=reading.unused_columns,
        rows_in=rows_in,
        rows_used=len(examples) * format.rows_per_example,
        examples=len(examples),
        dropped=dict(dropped),
        rejected=rejected,
    )
    if not examples:
        raise DataError(f"no example is left of this source. {report.summary()}")
    return LoadedData(examples, report)


def _first_bad_row(reading: Reading, number: int, row: Row | RowError, error: RowError) -> DataError:
    used = ", ".join(f"{key} is column {column!r}" for key, column in reading.columns.items())
    where_from = "" if isinstance(row, RowError) else f"({used}.) "  # of no help with an unreadable row
    return DataError(
        f"{reading.table.place(number)}: {error.reason}. {where_from}"
        "Mend the row, or set on_bad_row to skip: bad rows are then left out and counted"
    )


def _check_bad_ratio(reading: Reading, rows_in: int, rejected: list[Rejected]) -> None:
    """Many bad rows are no accident of the file: it is read with the wrong settings, or is another file than meant."""
    allowed = reading.source.max_bad_ratio
    if len(rejected) > allowed * rows_in:
        first = "; ".join(f"{reading.table.place(bad.line)}: {bad.reason}" for bad in rejected[:3])
        raise DataError(
            f"{reading.table.name}: {len(rejected):,} of {rows_in:,} rows are bad, more than max_bad_ratio {allowed} allows. "
            f"The first: {first}. Mend the file or the settings it is read with, or raise max_bad_ratio"
        )


def _check_settings(source: DataSource, format: str, columns: dict[str, str], table: Table) -> None:
    if source.limit is not None and source.limit < 1:
        raise DataError(f"limit must be at least 1 example; came {source.limit}")
    if not 0 <= source.max_bad_ratio <= 1:
        raise DataError(f"max_bad_ratio is a share of the rows, 0 to 1; came {source.max_bad_ratio}")
    unlike, alike = source.score_range or (0.0, 1.0)
    if unlike == alike or not math.isfinite(alike - unlike):
        raise DataError(f"score_range needs two different numbers, as in [0, 5]; came [{unlike}, {alike}]")
    if columns.get("score") in table.label_names and "score" not in source.columns:
        raise DataError(
            f"column {columns['score']!r} would be read as a score, but it numbers the labels "
            f"{table.label_names[columns['score']]}; name a score with columns, or use one of the NLI formats"
        )
    if source.score_range is not None and "score" not in FORMATS[format].fields:
        raise DataError(f"score_range is set, but format {format} has no score; remove one of the two")
    for column in source.where:
        if column not in table.columns:
            raise DataError(
                f"`where` asks for the column {column!r}; columns: {table.columns}{nearest(column, table.columns)}"
            )


def _equals(cell: object, wanted: str | int | float) -> bool:
    """Equality that overlooks where a number was written: a TSV file and the command line hold "0", JSON holds 0."""
    if isinstance(cell, bool):
        return str(cell).lower() == str(wanted).lower()
    if isinstance(cell, str) == isinstance(wanted, str):
        return cell == wanted
    try:
        return float(cell) == float(wanted)  # type: ignore[arg-type]  # what is no number raises TypeError
    except (TypeError, ValueError, OverflowError):
        return False


def label_word(value: object, names: list[str]) -> object:
    """Datasets number labels in an order of their own; where they name them, the name is what counts."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
