"""A source that is opened and understood: its rows as examples, one after the other, bad ones told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from angle_llm.config import DataSource
from angle_llm.data.columns import resolve_format
from angle_llm.data.files import open_table
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Row, RowError, nearest
from angle_llm.data.table import Table


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


def _check_settings(source: DataSource, format: str, columns: dict[str, str], table: Table) -> None:
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
