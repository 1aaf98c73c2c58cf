"""Raw rows with their places: JSONL, JSON, CSV, TSV, Parquet, SentEval's tables, `datasets` folders and hub ids.

What cannot be a row (broken JSON, bytes that are not UTF-8, too many fields) comes as a `RowError` in the row's place;
damage that hides an unknown number of rows raises `DataError`.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from angle_llm.config import DataSource
from angle_llm.data.formats import DataError, Row, RowError
from angle_llm.data.json_errors import what_is_wrong
from angle_llm.data.places import kind_of, locate, neighbours
from angle_llm.data.senteval_files import beside, is_sts_benchmark, open_sts_benchmark, open_sts_part
from angle_llm.data.table import Again, Table, lines, refuse_bad_bytes

Value = TypeVar("Value")

_ROWS_AT_ONCE = 4096
"""Rows of a Parquet file that are in memory together."""


def open_table(source: DataSource) -> Table:
    """The rows of a file by its extension, of a starter file, a folder, or a hub data set; read as they are asked for."""
    place = locate(source)
    if isinstance(place, DataSource):
        return _open_dataset(place)
    return _OPENERS[kind_of(place)](place)


def _open_jsonl(path: Path) -> Table:
    def parse(text: str) -> Row | RowError:
        try:
            refuse_bad_bytes(text)
            return _as_row(json.loads(text.rstrip(" \t\r\n"), object_pairs_hook=_object))
        except RowError as error:
            return error
        except (ValueError, RecursionError) as error:
            hint = "; a list of objects is a .json file" if text.lstrip().startswith("[") else ""
            return RowError(f"not a JSON object: {what_is_wrong(error, 'each line holds one object')}{hint}")

    def rows() -> Iterator[tuple[int, Row | RowError]]:
        return ((number, parse(text)) for number, text in lines(path) if text.strip())

    return Table(str(path), _columns_of(path, rows()), Again(rows))


def _open_json(path: Path) -> Table:
    text = "".join(line for _, line in lines(path))
    try:
        refuse_bad_bytes(text)
        objects = json.loads(text, object_pairs_hook=_object)
    except (RowError, ValueError, RecursionError) as error:
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        reason = (
            str(error) if isinstance(error, RowError) else what_is_wrong(error, "the file holds one list of objects")
        )
        raise DataError(f"{place}: not JSON: {reason}. Mend it; one object a line is a .jsonl file") from None
    if not isinstance(objects, list):
        raise DataError(f"{path}: needed a list of objects; came {type(objects).__name__}")
    rows = [(number, _as_row(item)) for number, item in enumerate(objects, 1)]
    return Table(str(path), _columns_of(path, rows), rows, unit="row")


def _object(pairs: list[tuple[str, object]]) -> Row | RowError:
    """The json module would keep the last of two values of one key, and say nothing."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return RowError(f"the object has keys twice: {sorted({key for key in keys if keys.count(key) > 1})}")


def _as_row(item: object) -> Row | RowError:
    return (
        item if isinstance(item, dict | RowError) else RowError(f"a JSON object is needed; came {type(item).__name__}")
    )


def _columns_of(path: Path, rows: Iterable[tuple[int, Row | RowError]]) -> list[str]:
    """All keys of all rows: a key that the first rows lack still counts, and rows without it are then bad rows."""
    columns: dict[str, None] = {}
    first = ""
    for number, row in rows:
        if not isinstance(row, RowError):
            columns.update(dict.fromkeys(row))
        elif not first:
            first = f": {path}:{number}: {row}"
    if not columns:
        raise DataError(f"{path}: holds no usable row{first}")
    return list(columns)


def _open_tsv(path: Path) -> Table:
    """A header line, no quoting: a tab always separates and a quote is a quote."""
    records = (
        (number, text.removesuffix("\n").removesuffix("\r").split("\t"))
        for number, text in lines(path)
        if text.strip("\r\n")
    )
    return _with_header(path, records)


def _open_txt(path: Path) -> Table:
    """A TSV file under another name, as SICK and MRPC come, or a part of an STS task with its scores in a file beside it."""
    if path.name.startswith("STS.input."):
        return open_sts_part(path, *beside(path))
    first = next((text for _, text in lines(path) if text.strip()), "")
    if "\t" in first:
        return _open_tsv(path)
    raise DataError(
        f"{path}: a .txt file is read if it is a table with tabs and a header line, or STS.input.NAME.txt with STS.gs.NAME.txt "
        "beside it; this one has no tab in its first line. Single texts are no pairs; give a table another extension"
    )


def _open_csv(path: Path) -> Table:
    """A header line, RFC 4180 quoting; a quoted field may span lines, and the row has the number of its first."""
    if is_sts_benchmark(path):
        return open_sts_benchmark(path)

    def records() -> Iterator[tuple[int, list[str] | RowError]]:
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long texts
        reader = csv.reader((text for _, text in lines(path)), strict=True)
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


def _with_header(path: Path, records: Iterator[tuple[int, list[str] | RowError]]) -> Table:
    number, header = next(records, (1, RowError("the file is empty; a header line is needed")))

    def checked(record: list[str] | RowError) -> list[str]:
        if isinstance(record, RowError):
            raise record
        refuse_bad_bytes("".join(record))
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

    return Table(str(path), columns, ((number, as_row(record)) for number, record in records))


def _open_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    def checked(read: Callable[[], Value]) -> Value:
        try:
            return read()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    file = checked(lambda: parquet.ParquetFile(path))
    columns = list(file.schema_arrow.names)
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        raise DataError(f"{path}: the file names columns twice: {repeated}")

    def rows() -> Iterator[tuple[int, Row | RowError]]:
        numbers = itertools.count(1)
        batches = file.iter_batches(_ROWS_AT_ONCE)
        while (batch := checked(lambda: next(batches, None))) is not None:
            for row in checked(batch.to_pylist):
                yield next(numbers), row

    return Table(str(path), columns, Again(rows), unit="row")


def _open_dataset(source: DataSource) -> Table:
    """A local folder, or a hub id: the one way to the network."""
    import datasets

    path = source.path
    try:
        dataset = datasets.load_dataset(path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # of many kinds: no network, no such dataset, configuration or split, broken files
        raise DataError(
            f"{path}: `datasets` could not load split {source.split!r}"
            f"{f' of configuration {source.name!r}' if source.name else ''}: {error}. Check path, split and name. "
            + ("" if Path(path).is_dir() else f"It is no local path. {neighbours(Path(path))}")
        ) from error
    label_names = {
        name: list(kind.names) for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)
    }
    return Table(
        path,
        list(dataset.column_names),
        enumerate(dataset, 1),
        unit="row",
        label_names=label_names,
        identity=dataset._fingerprint,
    )


_OPENERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _open_jsonl,
    ".json": _open_json,
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".parquet": _open_parquet,
    ".txt": _open_txt,
}
"""Kind of file, as `places.KINDS` names it → opener."""
