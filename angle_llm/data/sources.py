"""Where rows come from, and an account of every one of them.

    file, folder or hub ──► rows (number, columns) ──► `formats` ──► examples (a list, or a `store`) + `DataReport`

Nothing is lost without a word: each row is used, dropped for a documented reason, or rejected, and
`rows_in = rows_used + dropped + rejected` is checked at the end of every load. The default is strict: the first bad row
is an error with its file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from angle_llm.config import DataSource
from angle_llm.data import store
from angle_llm.data.files import open_table
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Row, RowError
from angle_llm.data.order import random_order
from angle_llm.data.places import locate
from angle_llm.data.reading import Reading, open_source
from angle_llm.data.senteval_files import beside
from angle_llm.data.store import ExampleStore, Selected, StoreWriter, bytes_of, open_store, remove_store
from angle_llm.io import log

__all__ = ["DataReport", "DataSource", "LoadedData", "Rejected", "load_examples"]


_COLUMNS_SHOWN = 12
_READER = 1
"""Counts up when the same file would be read as other examples than before, so that old stores are not used."""


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

    examples: Sequence[Example]
    report: DataReport


@dataclass(frozen=True)
class Account:
    """What became of every row, before examples are chosen from those there are."""

    rows_in: int
    dropped: dict[str, int]
    rejected: list[Rejected]
    format: str
    columns: dict[str, str]
    unused_columns: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Account:
        """What `to_dict` gave."""
        return cls(**values | {"rejected": [Rejected(*each) for each in values["rejected"]]})


def load_examples(source: DataSource, cache: Path | None = None) -> LoadedData:
    """Read a source whole, see `open_source`.

    A bad row (no text, no number where a score is needed, broken JSON, wrong number of fields, bytes that are not
    UTF-8) raises `DataError` with file and line, or is skipped and listed in the report if the source says so; more bad
    rows than its `max_bad_ratio` raise again. Damage that hides an unknown number of rows (a truncated gzip, an unclosed
    quote over several lines) raises in both cases, for it cannot be counted; so do missing columns, and a source of which
    no example is left. Blank lines are no rows. The whole source is read and checked, also what is beyond the limit.

    With a `cache` folder, examples of more than `store.MEMORY_LIMIT` bytes go to disk while they are read, and the next
    call finds them there.
    """
    place = None if cache is None else cache / "examples" / _key(source)
    _check_choice(source)
    everything, account = _kept(place) or _read(source, place)
    _check_bad_ratio(source, account)
    examples = _selected(everything, source)
    dropped = dict(account.dropped)
    per_example = FORMATS[account.format].rows_per_example
    if beyond := len(everything) - len(examples):
        dropped["beyond limit"] = beyond * per_example
    report = DataReport(
        source=source,
        format=account.format,
        guessed=source.format == "auto",
        columns=account.columns,
        unused_columns=account.unused_columns,
        rows_in=account.rows_in,
        rows_used=len(examples) * per_example,
        examples=len(examples),
        dropped=dropped,
        rejected=account.rejected,
    )
    if not examples:
        raise DataError(f"no example is left of this source. {report.summary()}")
    return LoadedData(examples, report)


def _kept(place: Path | None) -> tuple[Sequence[Example], Account] | None:
    """What is found at a place."""
    found = None if place is None else open_store(place)
    if found is None:
        return None
    try:
        return found, Account.from_dict(found.account)
    except (TypeError, LookupError) as error:
        remove_store(found.folder, str(error))
        return None


def _key(source: DataSource) -> str:
    """Tells sources apart that hold other examples: other files, files that have changed, files read otherwise."""
    place = locate(source)
    if isinstance(place, Path):
        files = [place, *beside(place)]
        states = [file.stat() for file in files if file.exists()]
        identity = f"{place.resolve()} {[(state.st_size, state.st_mtime_ns) for state in states]}"
    else:
        identity = open_table(source).identity or ""
    how = asdict(replace(source, limit=None, shuffle_seed=None, max_bad_ratio=0))
    digest = hashlib.sha256(json.dumps([_READER, identity, how], sort_keys=True, default=str).encode()).hexdigest()
    name = re.sub(r"[^\w.-]", "-", source.path)[-40:]
    return f"{name}-{digest[:16]}"


def _read(source: DataSource, place: Path | None) -> tuple[Sequence[Example], Account]:
    """All examples of a source; in a store at `place`, if there is one and they are many."""
    reading = open_source(source)
    format = FORMATS[reading.format]
    read: list[Example] = []
    dropped: Counter[str] = Counter()
    rejected: list[Rejected] = []
    rows_in = held = 0
    with ExitStack() as stack:
        writer: StoreWriter | None = None
        for number, row, result in reading.outcomes():
            rows_in += 1
            if isinstance(result, RowError):
                if source.on_bad_row == "raise":
                    raise _first_bad_row(reading, number, row, result)
                rejected.append(Rejected(reading.table.name, number, result.reason))
            elif isinstance(result, Dropped):
                dropped[result.reason] += 1
            elif writer is not None:
                writer.add(result)
            else:
                read.append(result)
                held += bytes_of(result)
                if place is not None and held > store.MEMORY_LIMIT and format.gather is None:
                    log(f"{source.path} is large: its examples are put into {place}")
                    writer = _spilled(stack.enter_context(StoreWriter(place)), read)
        if format.gather is not None:  # which looks at all of them
            examples = list(format.gather(read))
            if unpaired := len(read) - len(examples) * format.rows_per_example:
                dropped["unpaired"] = unpaired
            read = examples
            if place is not None and held > store.MEMORY_LIMIT:
                writer = _spilled(stack.enter_context(StoreWriter(place)), read)
        account = Account(rows_in, dict(dropped), rejected, reading.format, reading.columns, reading.unused_columns)
        return read if writer is None else writer.finish(account.to_dict()), account


def _spilled(writer: StoreWriter, examples: list[Example]) -> StoreWriter:
    for example in examples:
        writer.add(example)
    examples.clear()
    return writer


def _selected(examples: Sequence[Example], source: DataSource) -> Sequence[Example]:
    """Shuffled and cut to the limit."""
    if source.shuffle_seed is None and (source.limit is None or source.limit >= len(examples)):
        return examples
    n = len(examples)
    order = np.arange(n) if source.shuffle_seed is None else random_order(n, source.shuffle_seed)
    order = order[: source.limit]
    return Selected(examples, order) if isinstance(examples, ExampleStore) else [examples[index] for index in order]


def _check_choice(source: DataSource) -> None:
    if source.limit is not None and source.limit < 1:
        raise DataError(f"limit must be at least 1 example; came {source.limit}")
    if not 0 <= source.max_bad_ratio <= 1:
        raise DataError(f"max_bad_ratio is a share of the rows, 0 to 1; came {source.max_bad_ratio}")


def _first_bad_row(reading: Reading, number: int, row: Row | RowError, error: RowError) -> DataError:
    used = ", ".join(f"{key} is column {column!r}" for key, column in reading.columns.items())
    where_from = "" if isinstance(row, RowError) else f"({used}.) "  # of no help with an unreadable row
    return DataError(
        f"{reading.table.place(number)}: {error.reason}. {where_from}"
        "Mend the row, or set on_bad_row to skip: bad rows are then left out and counted"
    )


def _check_bad_ratio(source: DataSource, account: Account) -> None:
    """Many bad rows are no accident of the file: it is read with the wrong settings, or is another file than meant."""
    rejected, allowed = account.rejected, source.max_bad_ratio
    if len(rejected) > allowed * account.rows_in:
        first = "; ".join(f"{bad.file}:{bad.line}: {bad.reason}" for bad in rejected[:3])
        raise DataError(
            f"{source.path}: {len(rejected):,} of {account.rows_in:,} rows are bad, more than max_bad_ratio {allowed} allows. "
            f"The first: {first}. Mend the file or the settings it is read with, or raise max_bad_ratio"
        )
