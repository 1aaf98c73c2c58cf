"""The examples of a data source, and a report of what was done with every row.

    resolve_source ──► Row ──► resolve_format ──► `Format.read` ──► examples (in memory or in a `store`) and a `DataReport`

Each row is used, dropped for a documented reason, or rejected as bad. The first bad row raises an error with its
file and line, except in `data check`. Otherwise `rows_in = rows_used + dropped` is checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.data import store
from angle_llm.data.columns import listed, resolve_format
from angle_llm.data.files.reader import FileReader
from angle_llm.data.formats import FORMATS, INSTRUCTIONS, DataError, Dropped, Example, RowError, Values, is_nan, whole
from angle_llm.data.keys import printable
from angle_llm.data.order import random_order
from angle_llm.data.sources import STANDARD_INPUT, BadRow, Row, Source, resolve_source
from angle_llm.io import log, remove_folder
from angle_llm.settings.parsing import flags_of, unknown_name
from angle_llm.settings.train import DataSource


@dataclass
class DataReport:
    """Counts of the used, dropped and rejected rows of a dataset, and which column was read as which format field."""

    source: DataSource
    format: str
    columns: dict[str, str]
    """Field of the format, such as `text1` → column of the dataset."""
    unused_columns: list[str]
    rows_in: int = 0
    """Number of rows in the dataset."""
    rows_used: int = 0
    """Number of rows that became examples; an example of format `nli_triples` needs two rows."""
    examples: int = 0
    """Number of training examples."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason → number of valid but unused rows.

    Reasons: "neutral", "no gold label", "filtered by where", "unpaired", "beyond limit".
    """
    rejected: list[BadRow] = field(default_factory=list)
    """Rows that cannot be read or converted to an example; `data check` counts them."""

    def drop(self, reason: str, rows: int = 1) -> None:
        """Add `rows` to the number of rows dropped for `reason`."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def count(self, result: Example | Dropped | BadRow) -> None:
        """Count one row by its result: an example, a dropped row, or a bad row.

        Rows with an example increase only `rows_in`; `use` sets their number.
        """
        self.rows_in += 1
        if isinstance(result, Dropped):
            self.drop(result.reason)
        elif isinstance(result, BadRow):
            self.rejected.append(result)

    def use(self, examples: int) -> None:
        """Set the number of examples, and check that used and dropped rows add up to all rows."""
        self.examples = examples
        self.rows_used = examples * FORMATS[self.format].rows_per_example
        assert self.rows_in == self.rows_used + sum(self.dropped.values()), self.summary()

    def summary(self) -> str:
        """Return the report as one line of text.

        Example:
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
            parts.append(f"columns not used: {listed(self.unused_columns)}")
        if self.dropped:
            parts.append("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()))
        return "; ".join(parts)


@dataclass(frozen=True)
class ExampleReader:
    """Reads the training examples of a dataset whose format and columns are known; can read the dataset repeatedly."""

    settings: DataSource
    source: Source
    format: str
    """Name of the data format, a key of `FORMATS`."""
    columns: dict[str, str]
    """Field of the format, such as `text1` → column of the dataset."""

    def named_values(self, row: Row) -> dict[str, Any]:
        """Return the values of a row with integer labels replaced by their names, for copies of the row.

        The column that this reader uses as a score is unchanged. In a copy without names of labels, -1 would be a class, so
        it becomes None (NLI formats skip -1).

        Raises:
            DataError: if a filter has the number of a label, which would select no row of the copy.
        """
        numbers = {self.columns.get("score"), self.columns.get("scores")}
        labels = {name: names for name, names in self._files[row.file].label_names.items() if name not in numbers}
        for filtered in self.settings.where.keys() & labels.keys():
            names, wanted = labels[filtered], str(self.settings.where[filtered])
            if wanted not in names or any(map(str.isdecimal, names)):  # names that are numbers are ambiguous
                flag = f"{self.settings.FLAGS}where {filtered} {wanted}"
                raise DataError(f"{flag}: a copy has names of labels; expected one of {', '.join(names)}")
        values = {name: label_word(value, labels.get(name, [])) for name, value in row.values.items()}
        column = self.columns.get("label")
        if self.format == "labelled_text" and column in labels and str(whole(values.get(column))).strip() == "-1":
            values[column] = None
        return values

    @cached_property
    def _files(self) -> dict[str, FileReader]:
        """Name of a file in messages → reader of the file."""
        return {file.name: file for file in self.source.files}

    def report(self) -> DataReport:
        """Return a new report with all counts 0. Reads the column names of all files."""
        used = {*self.columns.values(), *self.settings.where}
        unused = [name for name in self.source.columns if name not in used]
        return DataReport(self.settings, self.format, self.columns, unused)

    def outcomes(self) -> Iterator[tuple[Row | BadRow, Example | Dropped | BadRow]]:
        """Yield (row, result) for every row in file order; the result is an example, `Dropped`, or `BadRow`.

        Rows are not combined to triples, shuffled or limited.
        """
        for row in self.source.rows():
            if isinstance(row, BadRow):
                yield row, row
                continue
            try:
                yield row, self._read(row.values, self._files[row.file])
            except RowError as error:
                yield row, BadRow(row.file, row.line, self._with_column(str(error)), row.unit)

    def _with_column(self, reason: str) -> str:
        """Return an error message whose leading field name is replaced by `COLUMN (FIELD)`.

        A message is unchanged if field and column have the same name.
        """
        field = re.match(r"(\w+)(\[\w+\])?", reason)
        column = None if field is None else self.columns.get(field[1])
        if field is None or column is None or column == field[1]:
            return reason
        return f"{printable(column)} ({field[0]}){reason[field.end() :]}"

    def _read(self, row: Values, file: FileReader) -> Example | Dropped:
        """Convert a row (column → value) to an example, or return `Dropped` if a filter or the format drops the row.

        Raises `RowError` for a row that cannot be converted.
        """
        where = self.settings.where
        if not all(_matches(row.get(name), wanted, file.label_names.get(name, [])) for name, wanted in where.items()):
            return Dropped("filtered by where")
        read = {name: row[column] for name, column in self.columns.items() if column in row}
        fields = {name: None if is_nan(value) else value for name, value in read.items()}
        if labels := file.label_names.get(self.columns.get("label", "")):
            if str(whole(fields.get("label"))).strip() == "-1":  # a row without a label, in `datasets`
                return Dropped("no gold label")
            fields["label"] = label_word(fields.get("label"), labels)
            label, number = fields["label"], str(fields["label"]).strip()
            if type(label) in (int, float) or (number.isdecimal() and number not in labels):
                raise RowError(f"label is {number}, expected a number from 0 to {len(labels) - 1}: {', '.join(labels)}")
        result = FORMATS[self.format].read(fields, self.settings.score_range)
        if isinstance(result, Dropped) or not fields.keys() & set(INSTRUCTIONS):
            return result
        return result.with_instructions(fields)

    def examples(self, report: DataReport) -> Iterator[Example]:
        """Yield all examples in file order, and count every row in `report`.

        Formats whose examples need several rows, such as `nli_triples`, combine the rows first.

        Raises:
            DataError: for the first bad row.
        """
        format = FORMATS[self.format]
        parsed = (example for _, example in self.used_rows(report))
        if format.combine is None:
            yield from parsed
            return
        rows = list(parsed)
        examples = format.combine(rows)
        report.drop("unpaired", len(rows) - len(examples) * format.rows_per_example)
        yield from examples

    @property
    def _check_command(self) -> str:
        """The command that writes a copy of the dataset without bad rows, with the settings of this reader."""
        values = {name: getattr(self.settings, name) for name in ("format", "columns", "score_range", "where")}
        values["encoding"] = None if self.settings.encoding == DataSource().encoding else self.settings.encoding
        values["format"] = None if values["format"] == "auto" and self.format != "text" else self.format
        return shlex.join(["angle-llm", "data", "check", self.settings.path, *flags_of(values), "--fix", "FOLDER"])

    def used_rows(self, report: DataReport) -> Iterator[tuple[Row, Example]]:
        """Yield (row, example) for every usable row in file order, and count every row in `report`.

        Rows are not combined to triples, shuffled or limited.

        Raises:
            DataError: for the first bad row.
        """
        for row, result in self.outcomes():
            report.count(result)
            if isinstance(result, BadRow):
                advice = (
                    "" if self.source.kind == "rows" else f", or write a copy without bad rows: {self._check_command}"
                )
                raise DataError(f"{result.place}: {result.reason}. Fix the row{advice}")
            if isinstance(row, Row) and not isinstance(result, Dropped):
                yield row, result


def open_examples(settings: DataSource, source: Source | None = None) -> ExampleReader:
    """Open a dataset, and detect its format and the column of each format field. Only hub ids use the network.

    `source` has the rows; None: the source that `settings.path` names.

    Raises:
        DataError: if the dataset cannot be opened, if columns are missing or fit several formats, or if a setting does
            not fit the format.
    """
    source = source or training_source(settings)
    columns = source.columns
    try:
        name, fields = resolve_format(settings.format, settings.columns, columns, settings.FLAGS)
        _check_settings(settings, name, fields, source)
    except DataError as error:
        raise DataError(f"{source.name}: {error}") from None
    return ExampleReader(settings, source, name, fields)


def training_source(settings: DataSource) -> Source:
    """Return the source of a training dataset; in format `text`, a .txt file has one text per line, else it is a table."""
    tables = settings.format != "text" or settings.path == STANDARD_INPUT
    return resolve_source(settings.path, tables=tables, encoding=settings.encoding, datasets=True)


def _check_settings(settings: DataSource, format: str, columns: dict[str, str], source: Source) -> None:
    """Check that the score range, the score column and the row filter fit the format and the columns.

    `columns` is format field → column.

    Raises:
        DataError: for the first setting that does not fit.
    """
    low, high = settings.score_range or (0.0, 1.0)
    if low == high or not math.isfinite(high - low):
        raise DataError(
            f"{settings.FLAGS}score-range: expected two different numbers, such as 0 5, got {low:g} {high:g}"
        )
    if settings.score_range is not None and "score" not in FORMATS[format].fields:
        raise DataError(
            f"{settings.FLAGS}score-range is set, but format {format} has no score. "
            "Omit the flag, or set another format"
        )
    for name in {"score", "scores"} & columns.keys() - settings.columns.keys():  # not named by the user
        column = columns[name]
        labels = next(filter(None, (file.label_names.get(column) for file in source.files)), None)
        if labels or (column in ("label", "labels") and "label_text" in source.columns):
            # A command for scored pairs only has no flag for the format.
            advice = f"For NLI classes, set `{settings.FLAGS}format nli_pairs`. " if settings.format == "auto" else ""
            raise DataError(
                f"column {column!r} would be read as a score, but its numbers are the labels {labels or 'of label_text'}. "
                f"{advice}If it is a score and 1 means similar, set `{settings.FLAGS}columns {name} {column}`; for another "
                f"scale, also `{settings.FLAGS}score-range`, such as 1 0"
            )
    for column in settings.where:
        if column not in source.columns:
            raise DataError(f"{settings.FLAGS}where {column}: {unknown_name('column', column, source.columns)}")


def _matches(cell: Any, wanted: str | bool | int | float, names: list[str]) -> bool:
    """Return whether a table cell equals the value of a filter, both as label names unless names are numbers."""
    known = [] if any(map(str.isdecimal, names)) else names
    return _equal(label_word(cell, known), label_word(wanted, known))


def _equal(cell: Any, wanted: str | bool | int | float) -> bool:
    """Return whether the value of a table cell equals the value of a row filter.

    Text and typed values are compared too: "0" equals 0, and "true" equals True. 1.0 and "1.0" are compared as 1. TSV
    files and flags contain only texts; JSON files contain numbers and booleans.
    """
    cell, wanted = whole(cell), whole(wanted)
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
    """Return `names[value]` if `value` is an integer label, or its digits, in range, else `value`; of a list, each item.

    If names are numbers, such as 1 to 5, digits in a text are a name or an error. Datasets number their labels in different
    orders, so a label number has no meaning without its name.
    """
    if not names or value in names:
        return value
    if isinstance(value, list):
        return [label_word(item, names) for item in value]
    number = str(whole(value)).strip()
    is_index = type(value) in (int, float) or (isinstance(value, str) and not any(map(str.isdecimal, names)))
    is_index = is_index and number.isdecimal() and len(number) < 10
    return names[int(number)] if is_index and int(number) < len(names) else value


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class LoadedData:
    """The training examples of a dataset, and the report of used, dropped and bad rows."""

    examples: Sequence[Example]
    report: DataReport


def load_examples(settings: DataSource, cache: Path | None = None, source: Source | None = None) -> LoadedData:
    """Read all training examples of a dataset, then apply `settings.shuffle_seed` and `settings.limit`.

    `source` has the rows; None: the source that `settings.path` names.

    A bad row has no text, a score that is not a number, broken JSON, a wrong number of fields, or invalid bytes. The whole
    dataset is read and checked, also beyond `limit`.

    With a `cache` folder, examples that need more than `store.MEMORY_LIMIT` bytes are written to disk. The next call
    reads the examples from disk.

    Raises:
        DataError: for a bad row, with file and line; for damage that hides an unknown number of rows (a truncated gzip
            file, an unclosed quote over several lines); for missing columns; for a dataset without examples; and as in
            `open_examples`.
    """
    source = source or training_source(settings)
    folder = None if cache is None else cache / "examples" / _store_name(settings, source)
    everything, report = _stored(settings, folder) or _read(settings, source, folder)
    examples = _selected(everything, settings)
    report.drop("beyond limit", (len(everything) - len(examples)) * FORMATS[report.format].rows_per_example)
    report.use(len(examples))
    if not examples:
        raise DataError(f"this source has no usable example. {report.summary()}")
    return LoadedData(examples, report)


def _stored(settings: DataSource, folder: Path | None) -> tuple[Sequence[Example], DataReport] | None:
    """Return the examples and the report that an earlier `load_examples` stored in `folder`.

    Returns None if `folder` is None, missing or damaged; a damaged folder is removed.
    """
    if folder is None or not folder.exists():
        return None
    try:
        examples = store.StoredExamples(folder)
        return examples, DataReport(settings, **examples.account)
    except (OSError, ValueError, LookupError, TypeError) as error:  # pyarrow and json raise these
        log(f"warning: {folder} is damaged ({error!r}); it is written again")
        with suppress(FileNotFoundError):  # another process has removed it
            remove_folder(folder)
        return None


def _read(settings: DataSource, source: Source, folder: Path | None) -> tuple[Sequence[Example], DataReport]:
    """Read all training examples of a dataset in file order; return the examples and the report of all rows.

    If the examples exceed `store.MEMORY_LIMIT` bytes and `folder` is not None, they are written to `folder`.
    """
    reader = open_examples(settings, source)
    report = reader.report()
    examples = reader.examples(report)
    held: list[Example] = []
    size = 0
    for example in examples:
        held.append(example)
        size += store.bytes_of(example)
        if folder is not None and size > store.MEMORY_LIMIT:
            log(f"{settings.path} is large: its examples are stored in {folder}")

            def account() -> dict[str, Any]:
                return {name: value for name, value in vars(report).items() if name != "source"}

            return store.write_store(folder, chain(held, examples), account), report
    return held, report


def _store_name(settings: DataSource, source: Source) -> str:
    """Return the name of the cache folder for the examples of a dataset.

    The name contains a hash of file paths, sizes, modification times, and all settings except `limit` and
    `shuffle_seed`.
    """
    reading = asdict(replace(settings, limit=None, shuffle_seed=None))
    content = json.dumps([5, *source.identity, reading], sort_keys=True)
    name = re.sub(r"[^\w.-]", "-", settings.path)[-40:]
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _selected(examples: Sequence[Example], settings: DataSource) -> Sequence[Example]:
    """Return the examples shuffled by `settings.shuffle_seed` and cut to `settings.limit`; None disables either."""
    n = len(examples)
    if settings.shuffle_seed is None and (settings.limit is None or settings.limit >= n):
        return examples
    order = np.arange(n) if settings.shuffle_seed is None else random_order(n, settings.shuffle_seed)
    order = order[: settings.limit]
    return examples.select(order) if isinstance(examples, store.StoredExamples) else [examples[int(i)] for i in order]
