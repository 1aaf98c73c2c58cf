"""Raw rows with their places: JSONL, JSON, CSV, TSV, Parquet, `datasets` folders and hub ids.

What cannot be a row (broken JSON, bytes that are not UTF-8, too many fields) comes as a `RowError` in the row's place;
damage that hides an unknown number of rows raises `DataError`.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from angle_llm.data.formats import DataError, Row, RowError, nearest
from angle_llm.data.json_errors import what_is_wrong
from angle_llm.settings import DataSource


@dataclass(frozen=True)
class Table:
    """Columns and rows of a source."""

    name: str
    columns: list[str]
    rows: Iterable[tuple[int, Row | RowError]]
    """(line or row number counted from 1, the row or what is wrong with it)."""
    unit: Literal["line", "row"] = "line"
    label_names: Mapping[str, list[str]] = field(default_factory=dict)

    def place(self, number: int) -> str:
        return f"{self.name}:{number}" if self.unit == "line" else f"{self.name} row {number}"


def open_table(source: DataSource) -> Table:
    """The rows of a file by its extension, of a starter file, a folder, or a hub data set."""
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
    if source.name is not None or source.split != "train" or source.revision is not None:
        raise DataError(
            f"{source.path}: `split`, `name` and `revision` choose within a folder or hub dataset; this is one file"
        )
    for extension, opener in _OPENERS.items():
        if path.name.endswith(extension) or (path.name.endswith(extension + ".gz") and extension != ".parquet"):
            return opener(path)
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
                if number == 1:
                    _refuse_wide_characters(path, line)
                bare = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                yield number, bare.decode(errors="surrogateescape")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}:{number + 1}: the gzip file is truncated or damaged here ({error}); fetch it again, or unpack "
            "what is left of it"
        ) from None


def _refuse_wide_characters(path: Path, line: bytes) -> None:
    """UTF-16 and UTF-32: cut at line ends they make no row, and no row of them would say why."""
    beginning = line[:64]
    wide = beginning.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    if wide or beginning.count(0) * 3 > len(beginning) > 1:  # without a mark: of English, every second byte is 0
        raise DataError(
            f"{path}:1: the file is written in UTF-16 or UTF-32, not in UTF-8 (it begins with {line[:4].hex(' ')}); convert "
            "it, as in `iconv -f utf-16 -t utf-8`"
        )


def _refuse_bad_bytes(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise RowError(f"byte 0x{byte:02x} is not UTF-8; convert the file, as in `iconv -f latin1 -t utf-8`") from None


def _open_jsonl(path: Path) -> Table:
    def parse(text: str) -> Row | RowError:
        try:
            _refuse_bad_bytes(text)
            return _as_row(json.loads(text.rstrip(" \t\r\n"), object_pairs_hook=_object))
        except RowError as error:
            return error
        except (ValueError, RecursionError) as error:
            hint = "; a list of objects is a .json file" if text.lstrip().startswith("[") else ""
            return RowError(f"not a JSON object: {what_is_wrong(error, 'each line holds one object')}{hint}")

    rows = [(number, parse(text)) for number, text in _lines(path) if text.strip()]
    return Table(str(path), _columns_of(path, rows), rows)


def _open_json(path: Path) -> Table:
    text = "".join(line for _, line in _lines(path))
    try:
        _refuse_bad_bytes(text)
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


def _columns_of(path: Path, rows: list[tuple[int, Row | RowError]]) -> list[str]:
    """All keys of all rows: a key that the first rows lack still counts, and rows without it are then bad rows."""
    columns = list(dict.fromkeys(key for _, row in rows if not isinstance(row, RowError) for key in row))
    if not columns:
        first = next((f": {path}:{number}: {row}" for number, row in rows if isinstance(row, RowError)), "")
        raise DataError(f"{path}: holds no usable row{first}")
    return columns


def _open_tsv(path: Path) -> Table:
    """A header line, no quoting: a tab always separates and a quote is a quote."""
    records = (
        (number, text.removesuffix("\n").removesuffix("\r").split("\t"))
        for number, text in _lines(path)
        if text.strip("\r\n")
    )
    return _with_header(path, records)


def _open_csv(path: Path) -> Table:
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


def _with_header(path: Path, records: Iterator[tuple[int, list[str] | RowError]]) -> Table:
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

    return Table(str(path), columns, ((number, as_row(record)) for number, record in records))


def _open_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        rows = list(enumerate(table.to_pylist(), 1))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    if repeated := sorted({name for name in table.column_names if table.column_names.count(name) > 1}):
        raise DataError(f"{path}: the file names columns twice: {repeated}")
    return Table(str(path), table.column_names, rows, unit="row")


def _open_dataset(path: str, source: DataSource) -> Table:
    """A local folder, or a hub id: the one way to the network."""
    import datasets

    try:
        dataset = datasets.load_dataset(path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # of many kinds: no network, no such dataset, configuration or split, broken files
        raise DataError(
            f"{path}: `datasets` could not load split {source.split!r}"
            f"{f' of configuration {source.name!r}' if source.name else ''}: {error}. Check path, split and name. "
            + ("" if Path(path).is_dir() else f"It is no local path. {_neighbours(Path(path))}")
        ) from error
    label_names = {
        name: list(kind.names) for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)
    }
    return Table(path, list(dataset.column_names), enumerate(dataset, 1), unit="row", label_names=label_names)


_OPENERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _open_jsonl,
    ".json": _open_json,
    ".csv": _open_csv,
    ".tsv": _open_tsv,
    ".parquet": _open_parquet,
}
"""Extension → opener; the text ones also with .gz behind it."""

EXTENSIONS = (*_OPENERS, *(f"{extension}.gz" for extension in _OPENERS if extension != ".parquet"))
"""How the names of files end that can be read."""
