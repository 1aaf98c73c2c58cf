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
from dataclasses import dataclass
from typing import NamedTuple

from angle_llm.data.files import Table, open_table
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, RowError, nearest, resolve_format
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
        columns = ", ".join(name if name == column else f"{name} = {column}" for name, column in self.columns.items())
        parts = [
            f"{self.source.path}: {self.examples:,} examples from {self.rows_used:,} of {self.rows_in:,} rows as "
            f"{self.format}{', guessed from the columns' if self.guessed else ''} ({columns})"
        ]
        if self.unused_columns:
            more = len(self.unused_columns) - _COLUMNS_SHOWN
            shown = ", ".join(name or "''" for name in self.unused_columns[:_COLUMNS_SHOWN])
            parts.append(f"columns not used: {shown}{f' and {more:,} more' if more > 0 else ''}")
        if self.dropped:
            parts.append("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()))
        if self.rejected:
            parts.append(
                f"rejected: {len(self.rejected):,}, first at {self.rejected[0].line}: {self.rejected[0].reason}"
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class LoadedData:
    """The examples of a source and the account of its rows."""

    examples: list[Example]
    report: DataReport


def load_examples(source: DataSource) -> LoadedData:
    """Read a source whole. Only a hub id that is no local path reaches the network; everything else is local.

    A bad row (no text, no number where a score is needed, broken JSON, wrong number of fields, bytes that are not
    UTF-8) raises `DataError` with file and line, or is skipped and listed in the report if the source says so.
    Damage that hides an unknown number of rows (a truncated gzip, an unclosed quote over several lines) raises in both
    cases, for it cannot be counted; so do missing columns, and a source of which no example is left. Blank lines are
    no rows. The whole source is read and checked, also what is beyond the limit.
    """
    table = open_table(source)
    try:
        name, columns = resolve_format(source.format, source.columns, table.columns)
        _check_settings(source, name, columns, table)
    except DataError as error:
        raise DataError(f"{table.name}: {error}") from None
    format = FORMATS[name]
    labels = table.label_names.get(columns["label"], []) if "label" in columns else []

    read: list[Example] = []
    dropped: Counter[str] = Counter()
    rejected: list[Rejected] = []
    rows_in = 0
    for number, row in table.rows:
        rows_in += 1
        try:
            if isinstance(row, RowError):
                raise row
            if not all(_equals(row.get(column), wanted) for column, wanted in source.where.items()):
                dropped["filtered by where"] += 1
                continue
            fields = {key: row[column] for key, column in columns.items() if column in row}
            if labels:
                fields["label"] = _label_word(fields.get("label"), labels)
            outcome = format.read(fields, source.score_range)
        except RowError as error:
            if source.on_bad_row == "raise":
                used = ", ".join(f"{key} is column {column!r}" for key, column in columns.items())
                where_from = "" if isinstance(row, RowError) else f"({used}.) "  # of no help with an unreadable row
                raise DataError(
                    f"{table.place(number)}: {error.reason}. {where_from}"
                    "Mend the row, or set on_bad_row to skip: bad rows are then left out and counted"
                ) from None
            rejected.append(Rejected(table.name, number, error.reason))
            continue
        if isinstance(outcome, Dropped):
            dropped[outcome.reason] += 1
        else:
            read.append(outcome)

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
        format=name,
        guessed=source.format == "auto",
        columns=columns,
        unused_columns=[name for name in table.columns if name not in {*columns.values(), *source.where}],
        rows_in=rows_in,
        rows_used=len(examples) * format.rows_per_example,
        examples=len(examples),
        dropped=dict(dropped),
        rejected=rejected,
    )
    if not examples:
        raise DataError(f"no example is left of this source. {report.summary()}")
    return LoadedData(examples, report)


def _check_settings(source: DataSource, format: str, columns: dict[str, str], table: Table) -> None:
    if source.limit is not None and source.limit < 1:
        raise DataError(f"limit must be at least 1 example; came {source.limit}")
    low, high = source.score_range or (0.0, 1.0)
    if not (low < high and math.isfinite(high - low)):
        raise DataError(f"score_range must be [low, high] with low < high; came [{low}, {high}]")
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
    except (TypeError, ValueError):
        return False


def _label_word(value: object, names: list[str]) -> object:
    """Datasets number labels in an order of their own; where they name them, the name is what counts."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
