"""The examples of a data source, and a report of what was done with every row.

    open_rows ──► Row ──► resolve_format ──► `Format.read` ──► examples (in memory or in a `store`) and a `DataReport`

Each row is used, dropped for a documented reason, or rejected as bad. `rows_in = rows_used + dropped + rejected` is
checked. The first bad row raises an error with its file and line, except in `data check`.
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

from angle_llm.data import store
from angle_llm.data.columns import listed, resolve_format
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Format, RowError, Values, nearest
from angle_llm.data.keys import printable
from angle_llm.data.order import random_order
from angle_llm.data.readers import BadRow, Row, RowSource, open_rows
from angle_llm.io import log
from angle_llm.settings.train import DataSource

_COLUMNS_SHOWN = 12
"""Maximum number of unused columns in a summary."""


@dataclass
class DataReport:
    """Counts of the used, dropped and rejected rows of a source, and how its columns were read."""

    source: DataSource
    format: str
    columns: dict[str, str]
    """Field → column."""
    unused_columns: list[str]
    rows_in: int = 0
    """Number of rows of the source."""
    rows_used: int = 0
    """Number of rows in examples; two for each triple of `nli_triples`."""
    examples: int = 0
    """Number of examples."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason → number of rows: "neutral", "no gold label", "filtered by where", "unpaired", "beyond limit"."""
    rejected: list[BadRow] = field(default_factory=list)
    """Bad rows that were skipped."""

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count a number of rows as dropped for a reason."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def count(self, result: Example | Dropped | BadRow) -> None:
        """Count a row as an example, as dropped, or as bad, depending on its result."""
        self.rows_in += 1
        if isinstance(result, Dropped):
            self.drop(result.reason)
        elif isinstance(result, BadRow):
            self.rejected.append(result)

    def use(self, examples: int) -> None:
        """Set the number of examples, and check that every row is used, dropped or rejected.

        Raises:
            RuntimeError: if the numbers of rows do not add up.
        """
        self.examples, self.rows_used = examples, examples * FORMATS[self.format].rows_per_example
        accounted = self.rows_used + sum(self.dropped.values()) + len(self.rejected)
        if self.rows_in != accounted:
            raise RuntimeError(
                f"a bug in angle_llm: only {accounted} of {self.rows_in} rows are used, dropped or rejected. {self.summary()}"
            )

    def summary(self) -> str:
        """Return the report as a line to print, such as
        `a.tsv: 90 of 98 rows used as scored_pair (text1 = q1, text2, score); columns not used: id; dropped: 8 neutral`.
        """
        columns = (name if name == used else f"{name} = {printable(used)}" for name, used in self.columns.items())
        detected = ", detected from the columns" if self.source.format == "auto" else ""
        parts = [
            f"{self.source.path}: {self.rows_used:,} of {self.rows_in:,} rows used as {self.format}{detected} "
            f"({', '.join(columns)})"
        ]
        if self.examples != self.rows_used:
            parts.append(f"examples: {self.examples:,}")
        if self.unused_columns:
            more = len(self.unused_columns) - _COLUMNS_SHOWN
            shown = ", ".join(printable(name) or "''" for name in self.unused_columns[:_COLUMNS_SHOWN])
            parts.append(f"columns not used: {shown}{f' and {more:,} more' if more > 0 else ''}")
        if self.dropped:
            parts.append("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()))
        if self.rejected:
            first = self.rejected[0]
            parts.append(f"rejected: {len(self.rejected):,}, first in {first.unit} {first.line}: {first.reason}")
        return "; ".join(parts)


@dataclass(frozen=True)
class ExampleReader:
    """Reads the examples of a source whose format and columns are known, as often as needed."""

    source: DataSource
    rows: RowSource
    format: str
    """Name of the format, a key of `FORMATS`."""
    columns: dict[str, str]
    """Field → column."""

    def report(self) -> DataReport:
        """Return a report without counts. Reads the columns of all files."""
        used = {*self.columns.values(), *self.source.where}
        return DataReport(
            self.source, self.format, self.columns, [name for name in self.rows.columns if name not in used]
        )

    def outcomes(self) -> Iterator[tuple[Row | BadRow, Example | Dropped | BadRow]]:
        """Yield every row in file order with its result: an example, `Dropped`, or a `BadRow` with the reason.

        Rows are not combined to triples, shuffled or limited.
        """
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
        """Replace the field name at the start of a message by the column name, with the field in parentheses."""
        field = re.match(r"(\w+)(\[\w+\])?", reason)
        column = None if field is None else self.columns.get(field[1])
        if field is None or column is None or column == field[1]:
            return reason
        return f"{printable(column)} ({field[0]}){reason[field.end() :]}"

    def _read(self, row: Values, labels: list[str]) -> Example | Dropped:
        """Convert a row, a dictionary of column values, to an example; `Dropped` if a rule of the format drops the row.

        `labels` are the names of NLI classes by number. Raises `RowError` for a bad row.
        """
        if not all(_equal(row.get(column), wanted) for column, wanted in self.source.where.items()):
            return Dropped("filtered by where")
        fields = {name: row[column] for name, column in self.columns.items() if column in row}
        if labels:
            fields["label"] = label_word(fields.get("label"), labels)
        return FORMATS[self.format].read(fields, self.source.score_range)

    def examples(self, report: DataReport) -> Iterator[Example]:
        """Yield the examples of the source, combined if the format needs several rows; count every row in the report.

        Raises:
            DataError: for the first bad row, unless the source skips bad rows.
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
        """Yield the example of every usable row, before rows are combined, and count every row in the report."""
        for _, result in self.outcomes():
            report.count(result)
            if isinstance(result, BadRow) and not self.source.skips_bad_rows:
                raise DataError(
                    f"{result.place}: {result.reason}. Fix the row, or write a copy without bad rows: angle-llm data check "
                    "FILE --fix FOLDER"
                )
            if not isinstance(result, Dropped | BadRow):
                yield result


def open_examples(source: DataSource) -> ExampleReader:
    """Open a source, and find its format and columns. The network is used only for hub ids.

    Raises:
        DataError: if the source cannot be opened, if columns are missing or fit several formats, or if a setting does
            not fit the format.
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
    """Open the rows of a source with its settings; see `open_rows`."""
    return open_rows(source.path, tables=True, encoding=source.encoding, split="train")


def _check_settings(source: DataSource, format: Format, columns: dict[str, str], rows: RowSource) -> None:
    """Raise `DataError` for a score range, a score column or a filter that does not fit the format and the columns."""
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
    """Return whether a cell has the value of a filter; the text "0" equals the number 0, and "true" equals true.

    TSV files and flags contain texts, JSON files contain numbers.
    """
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
    """Return the name of an integer label of a dataset; another value is returned unchanged.

    Every dataset numbers its labels in a different order, so the number alone has no meaning.
    """
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class LoadedData:
    """The examples of a source, and the report of its rows."""

    examples: Sequence[Example]
    report: DataReport


def load_examples(source: DataSource, cache: Path | None = None) -> LoadedData:
    """Read all examples of a source, then shuffle and limit them as the settings of the source require.

    A bad row has no text, a score that is not a number, broken JSON, a wrong number of fields, or invalid bytes. It raises
    `DataError` with file and line, or is listed in the report (`skips_bad_rows`). The whole source is read and checked,
    also beyond `limit`.

    With a `cache` folder, examples that need more than `store.MEMORY_LIMIT` bytes are written to disk. The next call
    reads the examples from there.

    Raises:
        DataError: for a bad row, with file and line, unless bad rows are skipped; for damage that hides an unknown number
            of rows (a truncated gzip file, an unclosed quote over several lines); for missing columns; for a source
            without examples; and as in `open_examples`.
    """
    folder = None if cache is None else cache / "examples" / _store_name(source)
    everything, report = _stored(source, folder) or _read(source, folder)
    examples = _selected(everything, source)
    report.drop("beyond limit", (len(everything) - len(examples)) * FORMATS[report.format].rows_per_example)
    report.use(len(examples))
    if not examples:
        raise DataError(f"this source has no usable example. {report.summary()}")
    return LoadedData(examples, report)


def _stored(source: DataSource, folder: Path | None) -> tuple[Sequence[Example], DataReport] | None:
    """Return the examples and the report that an earlier call stored in a folder; None if there are none."""
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
    """Read all examples of a source, and the report; large examples are written to `folder` if it is not None."""
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
    """Return a folder name with a hash of the files, their sizes and times, and the settings that affect reading."""
    rows = _open_rows(source)
    settings = asdict(replace(source, limit=None, shuffle_seed=None))
    content = json.dumps([2, [file.identity for file in rows.files], rows.stamps(), settings], sort_keys=True)
    name = re.sub(r"[^\w.-]", "-", source.path)[-40:]
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _selected(examples: Sequence[Example], source: DataSource) -> Sequence[Example]:
    """Shuffle the examples by `shuffle_seed` of the source, and cut them to its `limit`."""
    n = len(examples)
    if source.shuffle_seed is None and (source.limit is None or source.limit >= n):
        return examples
    order = np.arange(n) if source.shuffle_seed is None else random_order(n, source.shuffle_seed)
    order = order[: source.limit]
    return examples.select(order) if isinstance(examples, store.StoredExamples) else [examples[int(i)] for i in order]
