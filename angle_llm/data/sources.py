"""Where rows come from, and an account of every one of them.

    file, folder or hub ──► rows (number, columns) ──► `formats` ──► examples + `DataReport`

Nothing is lost without a word: each row is used, dropped for a documented reason, or rejected, and
`rows_in = rows_used + dropped + rejected` is checked at the end of every load. The default is strict: the first bad row
is an error with its file and line.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Row, RowError, nearest, resolve_format
from angle_llm.settings import DataSource

__all__ = ["DataReport", "DataSource", "LoadedData", "Rejected", "load_examples"]


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
        """One line: `a.tsv: 90 examples from 90 of 98 rows as scored_pair (text1 = q1, text2, score); dropped: …`."""
        columns = ", ".join(name if name == column else f"{name} = {column}" for name, column in self.columns.items())
        parts = [
            f"{self.source.path}: {self.examples:,} examples from {self.rows_used:,} of {self.rows_in:,} rows as "
            f"{self.format}{' (guessed)' if self.guessed else ''} ({columns})"
        ]
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


def load_examples(source: DataSource, *, on_bad_row: Literal["raise", "skip"] = "raise") -> LoadedData:
    """Read a source whole. Only a hub id that is no local path reaches the network; everything else is local.

    A bad row (no text, no number where a score is needed, broken JSON, wrong number of fields, bytes that are not
    UTF-8) raises `DataError` with file and line, or is skipped and listed in the report with `on_bad_row="skip"`.
    Damage that hides an unknown number of rows (a truncated gzip, an unclosed quote over several lines) raises in both
    cases, for it cannot be counted; so do missing columns, and a source of which no example is left. Blank lines are
    no rows. The whole source is read and checked, also what is beyond the limit.
    """
    if on_bad_row not in ("raise", "skip"):
        raise ValueError(f'on_bad_row must be "raise" or "skip"; came {on_bad_row!r}')
    table = _open(source)
    try:
        name, columns = resolve_format(source.format, source.columns, table.columns)
        _check_settings(source, name, table)
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
            if on_bad_row == "raise":
                used = ", ".join(f"{key} is column {column!r}" for key, column in columns.items())
                raise DataError(
                    f"{table.place(number)}: {error.reason}. ({used}.) "
                    'Mend the row, or skip and count bad rows with on_bad_row="skip"'
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
        rows_in=rows_in,
        rows_used=len(examples) * format.rows_per_example,
        examples=len(examples),
        dropped=dict(dropped),
        rejected=rejected,
    )
    if not examples:
        raise DataError(f"no example is left of this source. {report.summary()}")
    return LoadedData(examples, report)


def _check_settings(source: DataSource, format: str, table: _Table) -> None:
    if source.limit is not None and source.limit < 1:
        raise DataError(f"limit must be at least 1 example; came {source.limit}")
    low, high = source.score_range or (0.0, 1.0)
    if not (low < high and math.isfinite(high - low)):
        raise DataError(f"score_range must be [low, high] with low < high; came [{low}, {high}]")
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


# ------------------------------------------------------------------------------------------------ from path to rows


@dataclass(frozen=True)
class _Table:
    name: str
    columns: list[str]
    rows: Iterable[tuple[int, Row | RowError]]
    """(line or row number counted from 1, the row or what is wrong with it)."""
    unit: Literal["line", "row"] = "line"
    label_names: Mapping[str, list[str]] = field(default_factory=dict)

    def place(self, number: int) -> str:
        return f"{self.name}:{number}" if self.unit == "line" else f"{self.name} row {number}"


def _open(source: DataSource) -> _Table:
    if source.path.startswith("starter:"):
        from angle_llm.data.starter import starter_path

        try:
            path = starter_path(source.path.removeprefix("starter:"))
        except ValueError as error:
            raise DataError(f"{source.path}: {error}") from None
    else:
        if not source.path:
            raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:<file>")
        path = Path(source.path).expanduser()
    if path.is_dir():
        return _open_dataset(str(path), source)
    if not path.exists():
        if _looks_like_hub_id(source.path):
            return _open_dataset(source.path, source)
        raise DataError(f"{source.path}: no such file or folder, and not a hub id (org/name). {_neighbours(path)}")
    if source.name is not None or source.split != "train":
        raise DataError(f"{source.path}: `split` and `name` choose within a folder or hub dataset; this is one file")
    for extension, open_table in _OPENERS.items():
        if path.name.endswith(extension) or (path.name.endswith(extension + ".gz") and extension != ".parquet"):
            return open_table(path)
    raise DataError(f"{path}: the extension says the kind of file; known: {', '.join(_OPENERS)}, text ones also .gz")


def _looks_like_hub_id(path: str) -> bool:
    is_file_name = path.removesuffix(".gz").endswith(tuple(_OPENERS))
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not is_file_name


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either"
    names = sorted(entry.name for entry in path.parent.iterdir())
    return f"In the folder {path.parent} there are {len(names)} entries" + nearest(path.name, names)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end). Bytes that are not UTF-8 become lone surrogates: see `_refuse_bad_bytes`."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                bare = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                yield number, bare.decode(errors="surrogateescape")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}:{number + 1}: the gzip file is truncated or damaged here ({error}); fetch it again, or unpack "
            "what is left of it"
        ) from None


def _refuse_bad_bytes(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise RowError(f"byte 0x{byte:02x} is not UTF-8; convert the file, as in `iconv -f latin1 -t utf-8`") from None


def _open_jsonl(path: Path) -> _Table:
    def parse(text: str) -> Row | RowError:
        try:
            _refuse_bad_bytes(text)
            return _as_row(json.loads(text))
        except RowError as error:
            return error
        except (ValueError, RecursionError) as error:
            return RowError(f"not a JSON object: {error}")

    rows = [(number, parse(text)) for number, text in _lines(path) if text.strip()]
    return _Table(str(path), _columns_of(path, rows), rows)


def _open_json(path: Path) -> _Table:
    text = "".join(line for _, line in _lines(path))
    try:
        _refuse_bad_bytes(text)
        objects = json.loads(text)
    except (RowError, ValueError, RecursionError) as error:
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise DataError(f"{place}: not JSON: {error}. One object a line is a .jsonl file") from None
    if not isinstance(objects, list):
        raise DataError(f"{path}: needed a list of objects; came {type(objects).__name__}")
    rows = [(number, _as_row(item)) for number, item in enumerate(objects, 1)]
    return _Table(str(path), _columns_of(path, rows), rows, unit="row")


def _as_row(item: object) -> Row | RowError:
    return item if isinstance(item, dict) else RowError(f"a JSON object is needed; came {type(item).__name__}")


def _columns_of(path: Path, rows: list[tuple[int, Row | RowError]]) -> list[str]:
    """All keys of all rows: a key that the first rows lack still counts, and rows without it are then bad rows."""
    columns = list(dict.fromkeys(key for _, row in rows if not isinstance(row, RowError) for key in row))
    if not columns:
        first = next((f": {path}:{number}: {row}" for number, row in rows if isinstance(row, RowError)), "")
        raise DataError(f"{path}: holds no usable row{first}")
    return columns


def _open_tsv(path: Path) -> _Table:
    """A header line, no quoting: a tab always separates and a quote is a quote."""
    records = (
        (number, text.removesuffix("\n").removesuffix("\r").split("\t"))
        for number, text in _lines(path)
        if text.strip("\r\n")
    )
    return _with_header(path, records)


def _open_csv(path: Path) -> _Table:
    """A header line, RFC 4180 quoting; a quoted field may span lines, and the row has the number of its first."""

    def records() -> Iterator[tuple[int, list[str] | RowError]]:
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long texts
        reader = csv.reader((text for _, text in _lines(path)), strict=True)
        while True:
            first = reader.line_num + 1
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num > first:
                    raise DataError(
                        f"{path}:{first}: a quoted field opens here and goes wrong on line {reader.line_num} "
                        f'({error}); close the quote, and write quotes inside a field twice ("")'
                    ) from None
                yield first, RowError(f"broken quoting: {error}")
            else:
                if record:
                    yield first, record

    return _with_header(path, records())


def _with_header(path: Path, records: Iterator[tuple[int, list[str] | RowError]]) -> _Table:
    number, header = next(records, (1, RowError("the file is empty; a header line is needed")))

    def checked(record: list[str] | RowError) -> list[str]:
        if isinstance(record, RowError):
            raise record
        _refuse_bad_bytes("".join(record))
        return record

    try:
        columns = checked(header)
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise RowError(f"the header names columns twice: {repeated}")
    except RowError as error:
        raise DataError(f"{path}:{number}: {error}") from None

    def as_row(record: list[str] | RowError) -> Row | RowError:
        try:
            cells = checked(record)
        except RowError as error:
            return error
        if len(cells) != len(columns):
            return RowError(f"{len(cells)} fields, but the header has {len(columns)}")
        return dict(zip(columns, cells, strict=True))

    return _Table(str(path), columns, ((number, as_row(record)) for number, record in records))


def _open_parquet(path: Path) -> _Table:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        rows = list(enumerate(table.to_pylist(), 1))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    return _Table(str(path), table.column_names, rows, unit="row")


def _open_dataset(path: str, source: DataSource) -> _Table:
    """A local folder, or a hub id: the one way to the network."""
    import datasets

    try:
        dataset = datasets.load_dataset(path, source.name, split=source.split)
    except Exception as error:  # of many kinds: no network, no such dataset, configuration or split, broken files
        raise DataError(
            f"{path}: `datasets` could not load split {source.split!r}"
            f"{f' of configuration {source.name!r}' if source.name else ''}: {error}. Check path, split and name. "
            + ("" if Path(path).is_dir() else f"It is no local path. {_neighbours(Path(path))}")
        ) from error
    label_names = {
        name: list(kind.names) for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)
    }
    return _Table(path, list(dataset.column_names), enumerate(dataset, 1), unit="row", label_names=label_names)


_OPENERS: dict[str, Callable[[Path], _Table]] = {
    ".jsonl": _open_jsonl,
    ".json": _open_json,
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".parquet": _open_parquet,
}
"""Extension → opener; the text ones also with .gz behind it."""
