"""Examples of a data source, and a report of every row.

    open_rows ──► Row ──► columns ──► `Format.read` ──► examples (a list, or a `store`) + `DataReport`

Each row is used, dropped for a documented reason, or rejected; `rows_in = rows_used + dropped + rejected` is checked.
By default the first bad row is an error with its file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.config import DataSource
from angle_llm.data import store
from angle_llm.data.columns import listed, resolve_format
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Format, RowError, Values, nearest
from angle_llm.data.keys import sound
from angle_llm.data.order import random_order
from angle_llm.data.readers import BadRow, Row, RowSource, open_rows
from angle_llm.io import log

_COLUMNS_SHOWN = 12


@dataclass
class DataReport:
    """What was done with every row of a source: `rows_in = rows_used + sum(dropped) + len(rejected)`."""

    source: DataSource
    format: str
    columns: dict[str, str]
    """Field → the column it was read from."""
    unused_columns: list[str]
    rows_in: int = 0
    rows_used: int = 0
    """Rows of examples; two for each triple of `nli_triples`."""
    examples: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Documented reason → rows: "neutral", "no gold label", "filtered by where", "unpaired", "beyond limit"."""
    rejected: list[BadRow] = field(default_factory=list)

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count dropped rows."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def count(self, result: Example | Dropped | BadRow) -> None:
        """Count a row."""
        self.rows_in += 1
        if isinstance(result, Dropped):
            self.drop(result.reason)
        elif isinstance(result, BadRow):
            self.rejected.append(result)

    def use(self, examples: int) -> None:
        """Set the number of examples; raise `RuntimeError` if a row is not accounted for."""
        self.examples, self.rows_used = examples, examples * FORMATS[self.format].rows_per_example
        accounted = self.rows_used + sum(self.dropped.values()) + len(self.rejected)
        if self.rows_in != accounted:
            raise RuntimeError(
                f"a bug in angle_llm: {accounted} of {self.rows_in} rows accounted for. {self.summary()}"
            )

    def summary(self) -> str:
        """Return one line: `a.tsv: 90 examples from 90 of 98 rows as scored_pair (text1 = q1, text2, score);
        columns not used: id; dropped: …`."""
        columns = (name if name == used else f"{name} = {sound(used)}" for name, used in self.columns.items())
        detected = ", detected from the columns" if self.source.format == "auto" else ""
        parts = [
            f"{self.source.path}: {self.examples:,} examples from {self.rows_used:,} of {self.rows_in:,} rows as "
            f"{self.format}{detected} ({', '.join(columns)})"
        ]
        if self.unused_columns:
            more = len(self.unused_columns) - _COLUMNS_SHOWN
            shown = ", ".join(sound(name) or "''" for name in self.unused_columns[:_COLUMNS_SHOWN])
            parts.append(f"columns not used: {shown}{f' and {more:,} more' if more > 0 else ''}")
        if self.dropped:
            parts.append("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()))
        if self.rejected:
            first = self.rejected[0]
            parts.append(f"rejected: {len(self.rejected):,}, first in {first.unit} {first.line}: {first.reason}")
        return "; ".join(parts)


@dataclass(frozen=True)
class ExampleReader:
    """A source whose columns are resolved; its rows are read as often as needed."""

    source: DataSource
    rows: RowSource
    format: str
    """The format of the rows."""
    columns: dict[str, str]
    """Field → column."""

    def report(self) -> DataReport:
        """Return an empty report; read the columns."""
        used = {*self.columns.values(), *self.source.where}
        return DataReport(
            self.source, self.format, self.columns, [name for name in self.rows.columns if name not in used]
        )

    def outcomes(self) -> Iterator[tuple[Row | BadRow, Example | Dropped | BadRow]]:
        """Yield every row in file order and what it is read as, before rows are combined, shuffled and limited."""
        labels = self.rows.files[0].label_names.get(self.columns.get("label", ""), [])
        for row in self.rows:
            if isinstance(row, BadRow):
                yield row, row
                continue
            try:
                yield row, self._read(row.values, labels)
            except RowError as error:
                yield row, BadRow(row.file, row.line, self._with_column(str(error)), row.unit)

    def _with_column(self, reason: str) -> str:
        """Return a message that begins with a field, with the column of the file that contains it."""
        field = re.match(r"(\w+)(\[\w+\])?", reason)
        column = None if field is None else self.columns.get(field[1])
        if field is None or column is None or column == field[1]:
            return reason
        return f"{sound(column)} ({field[0]}){reason[field.end() :]}"

    def _read(self, row: Values, labels: list[str]) -> Example | Dropped:
        if not all(_equal(row.get(column), wanted) for column, wanted in self.source.where.items()):
            return Dropped("filtered by where")
        fields = {name: row[column] for name, column in self.columns.items() if column in row}
        if labels:
            fields["label"] = label_word(fields.get("label"), labels)
        return FORMATS[self.format].read(fields, self.source.score_range)

    def examples(self, report: DataReport) -> Iterator[Example]:
        """Yield the examples; all other rows are counted in the report.

        Raises:
            DataError: for the first bad row, unless bad rows are skipped.
        """
        format = FORMATS[self.format]
        if format.combine is None:
            yield from self._each(report)
            return
        rows = list(self._each(report))
        examples = format.combine(rows)
        report.drop("unpaired", len(rows) - len(examples) * format.rows_per_example)
        yield from examples

    def _each(self, report: DataReport) -> Iterator[Example]:
        for _, result in self.outcomes():
            report.count(result)
            if isinstance(result, BadRow) and self.source.on_bad_row == "raise":
                others = "skip bad rows: --data.on-bad-row skip"
                if self.source.FLAGS != DataSource.FLAGS:
                    others = "write a copy without bad rows: angle-llm data check FILE --fix FOLDER"
                raise DataError(f"{result.place}: {result.reason}. Fix the row, or {others}")
            if not isinstance(result, Dropped | BadRow):
                yield result


def open_examples(source: DataSource) -> ExampleReader:
    """Open a source and resolve its columns. Only a hub id that is not a local path uses the network.

    Raises:
        DataError: if the source cannot be opened, columns are missing or fit several formats, or settings do not fit.
    """
    rows = _open_rows(source)
    columns = rows.columns
    try:
        name, fields = resolve_format(source.format, source.columns, columns, source.FLAGS)
        _check_settings(source, FORMATS[name], fields, rows)
    except DataError as error:
        raise DataError(f"{rows.name}: {error}") from None
    return ExampleReader(source, rows, name, fields)


def _open_rows(source: DataSource) -> RowSource:
    names = ("delimiter", "encoding", "name", "split", "revision")
    return open_rows(source.path, tables=True, **{name: getattr(source, name) for name in names})


def _check_settings(source: DataSource, format: Format, columns: dict[str, str], rows: RowSource) -> None:
    low, high = source.score_range or (0.0, 1.0)
    if low == high or not math.isfinite(high - low):
        raise DataError(f"{source.FLAGS}score-range: expected two different numbers, such as 0 5, got {low:g} {high:g}")
    if source.score_range is not None and "score" not in format.fields:
        raise DataError(
            f"{source.FLAGS}score-range is set, but format {source.format} has no score. "
            "Omit the flag, or set another format"
        )
    labels = rows.files[0].label_names
    if columns.get("score") in labels and "score" not in source.columns:
        raise DataError(
            f"column {columns['score']!r} would be read as a score, but its numbers are the labels "
            f"{labels[columns['score']]}. Name a score, as in `{source.FLAGS}columns score COLUMN`, or set an NLI format"
        )
    for column in source.where:
        if column not in rows.columns:
            raise DataError(
                f"{source.FLAGS}where {column}: the file has no column {column!r}{nearest(column, rows.columns)}. "
                f"Columns: {listed(rows.columns)}"
            )


def _equal(cell: Any, wanted: str | bool | int | float) -> bool:
    """Return whether two values are equal, ignoring whether a number is written as text:
    TSV files and flags have "0", JSON has 0."""
    left, right = str(cell).lower(), str(wanted).lower()
    if {left, right} & {"true", "false"}:
        return left == right
    if isinstance(cell, str) == isinstance(wanted, str):
        return bool(cell == wanted)
    try:
        return float(cell) == float(wanted)
    except (TypeError, ValueError, OverflowError):
        return False


def label_word(value: Any, names: list[str]) -> Any:
    """Return the name of an integer label: datasets number their labels in an order of their own."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class LoadedData:
    """The examples of a source and the report of its rows."""

    examples: Sequence[Example]
    report: DataReport


def load_examples(source: DataSource, cache: Path | None = None) -> LoadedData:
    """Return all examples of a source, see `open_examples`.

    A bad row (no text, no number as a score, broken JSON, wrong number of fields, invalid bytes) raises `DataError`
    with file and line, or is skipped and listed in the report (`on_bad_row`); a larger share of bad rows than
    `max_bad_ratio` raises. Damage that hides an unknown number of rows (a truncated gzip, an unclosed quote over
    several lines) always raises, and so do missing columns, and a source without examples. The whole source is read and
    checked, also beyond `limit`.

    With a `cache` folder, examples of more than `store.MEMORY_LIMIT` bytes are written to disk, and the next call reads
    them from there.
    """
    folder = None if cache is None else cache / "examples" / _store_name(source)
    everything, report = _stored(source, folder) or _read(source, folder)
    if len(report.rejected) > source.max_bad_ratio * report.rows_in:  # wrong settings, or another file than intended
        first = "; ".join(f"{bad.place}: {bad.reason}" for bad in report.rejected[:3])
        raise DataError(
            f"{source.path}: {len(report.rejected):,} of {report.rows_in:,} rows are bad, more than max_bad_ratio "
            f"{source.max_bad_ratio} allows. The first: {first}. Fix the file or the settings it is read with, or raise "
            "max_bad_ratio"
        )
    examples = _selected(everything, source)
    report.drop("beyond limit", (len(everything) - len(examples)) * FORMATS[report.format].rows_per_example)
    report.use(len(examples))
    if not examples:
        raise DataError(f"this source has no usable example. {report.summary()}")
    return LoadedData(examples, report)


def _stored(source: DataSource, folder: Path | None) -> tuple[Sequence[Example], DataReport] | None:
    """Return the examples and the report of an earlier call."""
    found = None if folder is None else store.open_store(folder)
    if folder is None or found is None:
        return None
    try:
        rejected = [BadRow(*each) for each in found.account["rejected"]]
        return found, DataReport(source, **found.account | {"rejected": rejected})
    except (TypeError, LookupError) as error:
        store.remove_damaged(folder, error)
        return None


def _read(source: DataSource, folder: Path | None) -> tuple[Sequence[Example], DataReport]:
    """Return all examples of a source; in a store if they do not fit memory and there is a folder for it."""
    reader = open_examples(source)
    report = reader.report()
    examples = reader.examples(report)
    held: list[Example] = []
    size = 0
    for example in examples:
        held.append(example)
        size += store.bytes_of(example)
        if folder is not None and size > store.MEMORY_LIMIT:
            log(f"{source.path} is large: its examples are stored in {folder}")

            def account() -> dict[str, Any]:
                return {name: value for name, value in vars(report).items() if name != "source"}

            return store.write_store(folder, chain(held, examples), account), report
    return held, report


def _store_name(source: DataSource) -> str:
    """Return a folder name that differs for other files, changed files, and other settings of reading."""
    rows = _open_rows(source)
    settings = asdict(replace(source, limit=None, shuffle_seed=None, max_bad_ratio=0))
    content = json.dumps([2, [file.identity for file in rows.files], rows.stamps(), settings], sort_keys=True)
    name = re.sub(r"[^\w.-]", "-", source.path)[-40:]
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _selected(examples: Sequence[Example], source: DataSource) -> Sequence[Example]:
    """Return the examples shuffled and cut to the limit."""
    n = len(examples)
    if source.shuffle_seed is None and (source.limit is None or source.limit >= n):
        return examples
    order = np.arange(n) if source.shuffle_seed is None else random_order(n, source.shuffle_seed)
    order = order[: source.limit]
    return examples.select(order) if isinstance(examples, store.StoredExamples) else [examples[int(i)] for i in order]
