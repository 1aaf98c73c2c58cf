"""Rows of any data source. The only reader of the package: train, embed, mine, check and evaluate use it.

    rows = open_rows("pairs.csv")                 a file, a folder, standard input ("-"), starter:NAME, a hub id
    for row in rows:                              again and again; a `Row`, or a `BadRow` where a row cannot be read
        if isinstance(row, BadRow): ...           row.file, row.line, row.reason
        else: ...                                 row.values["text1"], row.place -> "pairs.csv:3"

| source | rows |
|---|---|
| .jsonl, .json | objects, one per line, or one list of them |
| .csv, .tsv | a header line; quoting in .csv only |
| .parquet | rows |
| .txt, any other file, `-` | one text per line, column `text`; with `tables` a .txt file is a tab-separated table |
| SentEval's STS.input.NAME.txt, sts-train.csv | scored pairs; with `tables` |
| a folder | all its files, in order of path; with a `split`, a data set that `datasets` loads |
| FOLDER@NAME | the file FOLDER/NAME.*; with a `split`, also that split of a data set |
| ORG/NAME | a data set of the hub; only with a `split` |

All files but Parquet may end in .gz. Relative paths are looked up in the working directory, then in `ANGLE_LLM_DATA`.
"""

from __future__ import annotations

import atexit
import gzip
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from angle_llm.data.file_types import (
    FILE_TYPES,
    CsvFile,
    DatasetReader,
    FileReader,
    StsBenchmarkFile,
    StsPartFile,
    TextFile,
    TsvFile,
    Unit,
    place,
)
from angle_llm.data.formats import DataError, RowError, nearest
from angle_llm.io import sha256_of

DATA_VARIABLE = "ANGLE_LLM_DATA"
"""Environment variable with a folder of data sets."""

STANDARD_INPUT = "-"

EXTENSIONS = (*FILE_TYPES, *(f"{extension}.gz" for extension in FILE_TYPES if extension != ".parquet"))
"""Endings of the names of data files."""


class Row(NamedTuple):
    """A row that was read."""

    values: dict[str, Any]
    """Column → value."""
    file: str
    line: int
    """Number in the file, from 1: of the line, or for Parquet, .json and data sets of the row."""
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """Where the row is, for messages."""
        return place(self.file, self.line, self.unit)


class BadRow(NamedTuple):
    """A row that cannot be read or used, and why."""

    file: str
    line: int
    reason: str
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """Where the row is, for messages."""
        return place(self.file, self.line, self.unit)


class Block(NamedTuple):
    """Consecutive rows of a source."""

    number: int
    first: int
    """Index of the first row in the source, from 0."""
    rows: list[Row | BadRow]


class RowSource:
    """Rows of a source, read from its start as often as it is iterated."""

    def __init__(self, name: str, files: Sequence[FileReader], ignored: Sequence[str] = ()) -> None:
        self.name = name
        self.files = list(files)
        self.ignored = list(ignored)
        """Names of files in a folder that are of no known type."""

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns of all files; JSON files are read whole for it."""
        return list(dict.fromkeys(column for file in self.files for column in file.columns))

    @cached_property
    def label_names(self) -> Mapping[str, list[str]]:
        """Column → names of its integer labels; only of data sets."""
        return {column: names for file in self.files for column, names in file.label_names.items()}

    @property
    def unit(self) -> Unit:
        """What row numbers count."""
        return self.files[0].unit

    def __iter__(self) -> Iterator[Row | BadRow]:
        return self.rows()

    def rows(self, start: int = 0, columns: list[str] | None = None) -> Iterator[Row | BadRow]:
        """Rows from the index `start`. Of Parquet files only `columns` are read."""
        return (_parsed(*each) for each in islice(self._raw(columns), start, None))

    def good_rows(self, columns: Iterable[str] = ()) -> Iterator[Row]:
        """Rows of a source that must have no bad ones.

        Raises `DataError` for the first bad row, with file and line, and if one of `columns` is missing.
        """
        self.require(columns)
        for row in self:
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            yield row

    def require(self, columns: Iterable[str]) -> None:
        """Raises `DataError` if a file lacks one of these columns."""
        names = list(columns)
        for file in self.files if names else ():
            if missing := [name for name in names if name not in file.columns]:
                raise DataError(
                    f"{file.name}: expected columns {', '.join(names)}; missing {', '.join(missing)}, found "
                    f"{', '.join(file.columns)}"
                )

    def blocks(self, size: int, wanted: Callable[[int], bool], columns: list[str] | None = None) -> Iterator[Block]:
        """Blocks of `size` rows with a wanted number; the last block may be shorter. Rows of others are not parsed."""
        raw, number = self._raw(columns), 0
        while part := list(islice(raw, size)):
            if wanted(number):
                yield Block(number, number * size, [_parsed(*each) for each in part])
            number += 1

    def _raw(self, columns: list[str] | None = None) -> Iterator[tuple[FileReader, int, Any]]:
        return ((file, number, raw) for file in self.files for number, raw in file.raw(columns))

    def stamps(self) -> list[tuple[int, int]]:
        """Size in bytes and modification time in ns of each file that is read; cheap. (size, 0) for standard input."""
        stamps = []
        for file in self.files:
            paths = [file.path, *file.beside] if file.path is not None else []
            for status in (path.stat() for path in paths if path.exists()):
                stamps.append((status.st_size, status.st_mtime_ns))
            if not paths and not isinstance(file, DatasetReader):
                with file.open() as stream:
                    stamps.append((stream.seek(0, os.SEEK_END), 0))
        return stamps

    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size in bytes and SHA-256 of each file (packed, as on disk): equal for the same rows."""
        found: list[dict[str, Any]] = []
        for file in self.files:
            if isinstance(file, DatasetReader):
                found.append({"name": file.name, "fingerprint": file.fingerprint})
                continue
            with file.path.open("rb") if file.path is not None else file.open() as stream:
                digest = sha256_of(stream)
                found.append({"name": Path(file.name).name, "size": stream.tell(), "sha256": digest})
        return found


def _parsed(file: FileReader, number: int, raw: Any) -> Row | BadRow:
    try:
        return Row(file.parse(raw), file.name, number, file.unit)
    except RowError as error:
        return BadRow(file.name, number, error.reason, file.unit)


# ------------------------------------------------------------------------------------------------ where rows are


def open_rows(
    source: str | Path,
    *,
    tables: bool = False,
    delimiter: str | None = None,
    encoding: str = "utf-8",
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> RowSource:
    """Opens a source, see the table above; rows are read when they are iterated.

    Args:
        source: Path of a file or folder, `-`, `starter:NAME`, FOLDER@NAME, or a hub id.
        tables: Whether rows must have columns: .txt files are tables, and other unknown extensions are refused.
        delimiter: Between the fields of CSV and TSV files; None: tabs in .tsv, and detected in .csv.
        encoding: Of text files, as Python names it.
        name: Configuration of a data set.
        split: Split of a data set; None: only files are read.
        revision: Commit, tag or branch of a hub data set.

    Raises:
        DataError: If there is no such source, its type is unknown, or options do not fit it.
    """
    opener = _Opener(str(source), tables, _checked_delimiter(delimiter), encoding, name, split, revision)
    try:
        "".encode(encoding)
    except LookupError:
        raise DataError(
            f"encoding is {encoding!r}; expected the name of a Python codec, such as utf-8, cp1252 or utf-16"
        ) from None
    return opener.open()


def _checked_delimiter(delimiter: str | None) -> str | None:
    delimiter = "\t" if delimiter in ("\\t", "tab") else delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise DataError(f"delimiter is {delimiter!r}; expected one character, such as ; or \\t for a tab")
    return delimiter


class _Opener(NamedTuple):
    """Arguments of `open_rows`."""

    source: str
    tables: bool
    delimiter: str | None
    encoding: str
    name: str | None
    split: str | None
    revision: str | None

    def open(self) -> RowSource:
        if self.source == STANDARD_INPUT and not self.tables:
            stdin = TextFile("standard input", _standard_input(), encoding=self.encoding)
            return RowSource("standard input", [stdin])
        if self.source.startswith("starter:"):
            return self._file(_starter_path(self.source))
        if not self.source:
            raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:NAME")
        path = find_path(self.source)
        folder, at, part = self.source.rpartition("@")
        if at and folder and not path.exists() and not set(part) & set("/\\"):
            return self._part(folder, part)
        if path.is_dir():
            return self._folder(path) if self.split is None else self._dataset(str(path), self.split)
        if path.exists():
            return self._file(path)
        if self.split is not None and is_hub_id(self.source):
            return self._dataset(self.source, self.split)
        weight = " A weight is a plain number after a colon, such as :0.5." if ":" in self.source else ""
        hub = ", and not a hub id (org/name)" if self.split is not None else ""
        raise DataError(f"{self.source}: no such file or folder{hub}. {beside(path)}{weight}")

    def _file(self, path: Path) -> RowSource:
        if self.name is not None or self.split not in (None, "train") or self.revision is not None:
            raise DataError(
                f"{self.source}: `split`, `name` and `revision` select within a folder or a hub data set; this is one file"
            )
        reader = self._reader(path)
        if self.delimiter is not None and not isinstance(reader, TsvFile):
            raise DataError(f"{self.source}: delimiter is set, but this is not a CSV or TSV file; unset it")
        return RowSource(str(path), [reader])

    def _reader(self, path: Path) -> FileReader:
        packed = path.suffix == ".gz"
        extension = (path.with_suffix("") if packed else path).suffix
        options: dict[str, Any] = {"delimiter": self.delimiter, "encoding": self.encoding}
        if extension == ".parquet" and packed:
            raise DataError(f"{path}: Parquet files are not read from .gz; unpack it")
        if self.tables and extension not in FILE_TYPES:
            raise DataError(f"{path}: unknown file name extension; known: {', '.join(FILE_TYPES)}, text files also .gz")
        file_type = FILE_TYPES.get(extension, TextFile)

        def open() -> BinaryIO:
            return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]

        reader = file_type(str(path), open, **options)
        if self.tables and file_type is TextFile:
            reader = self._txt_table(reader, path, options)
        elif file_type is CsvFile and self.delimiter is None and StsBenchmarkFile.matches(reader):
            reader = StsBenchmarkFile(str(path), open, **options)
        reader.path = path
        return reader

    def _txt_table(self, reader: FileReader, path: Path, options: dict[str, Any]) -> FileReader:
        """A TSV file under another name, such as those of SICK and MRPC, or a part of an STS task."""
        if path.name.startswith("STS.input."):
            reader = StsPartFile(str(path), reader.open, **options)
            reader.beside = (path.with_name(path.name.replace("STS.input.", "STS.gs.", 1)),)
            return reader
        if (self.delimiter or "\t") in next((line for _, line in reader.lines() if line.strip()), ""):
            return TsvFile(str(path), reader.open, **options)
        raise DataError(
            f"{path}: a .txt file is read as a table with tabs and a header line, or as STS.input.NAME.txt with STS.gs.NAME.txt "
            "in the same folder; its first line has no tab. Single texts are no pairs; give a table another extension"
        )

    def _folder(self, folder: Path) -> RowSource:
        """All data files in a folder and its subfolders, hidden ones and those of other programs (`_SUCCESS`) left out."""
        paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(part.startswith((".", "_")) for part in path.parts)]
        readable = tuple(extension for extension in EXTENSIONS if extension.removesuffix(".gz") != ".json")
        files = [path for path in paths if path.name.endswith(readable)]
        if not files:
            raise DataError(f"{folder}: no file in this folder ends in {', '.join(readable)}; name a file")
        return RowSource(
            str(folder), [self._reader(folder / path) for path in files], [str(p) for p in paths if p not in files]
        )

    def _dataset(self, path: str, split: str) -> RowSource:
        hint = "" if Path(path).is_dir() else f"It is no local path. {beside(Path(path))}"
        return RowSource(path, [DatasetReader(path, self.name, split, self.revision, hint)])

    def _part(self, name: str, part: str) -> RowSource:
        """FOLDER@NAME: the file FOLDER/NAME with a known extension, or a split of a data set."""
        if self.split not in (None, "train"):
            raise DataError(f"{self.source} names the split {part}, and `split` is {self.split}; unset one of them")
        folder = find_path(name)
        if not folder.is_dir():
            if self.split is not None and is_hub_id(name):
                return self._dataset(name, part)
            raise DataError(f"{self.source}: {name} is not a folder and not a hub id (org/name). {beside(folder)}")
        found = [folder / f"{part}{extension}" for extension in EXTENSIONS if (folder / f"{part}{extension}").is_file()]
        if len(found) > 1:
            raise DataError(f"{self.source} may be {' or '.join(path.name for path in found)}; name the file")
        if found:
            return self._file(found[0])
        names = sorted(entry.name for entry in folder.iterdir())
        of_split = any(entry.startswith((f"{part}-", f"{part}.")) for entry in names)
        if self.split is None or (any(entry.endswith(EXTENSIONS) for entry in names) and not of_split):
            raise DataError(f"{self.source}: no file {part}.* in {folder}; files there: {', '.join(names)}")
        return self._dataset(str(folder), part)


def find_path(path: str) -> Path:
    """The path; a relative one that does not exist is looked up in the folder that `ANGLE_LLM_DATA` names."""
    here, data = Path(path).expanduser(), os.environ.get(DATA_VARIABLE)
    if data and not here.exists() and not here.is_absolute() and (Path(data).expanduser() / here).exists():
        return Path(data).expanduser() / here
    return here


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist is the id of a hub data set: ORG/NAME without the extension of a data file."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not path.endswith(EXTENSIONS)


def beside(path: Path) -> str:
    """What the folder of a missing path contains, for messages."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either"
    names = sorted(entry.name for entry in path.parent.iterdir())
    return f"The folder {path.parent} has {len(names)} entries" + nearest(path.name, names)


def _starter_path(source: str) -> Path:
    from angle_llm.data.starter import starter_path

    try:
        return starter_path(source.removeprefix("starter:"))
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None


def _standard_input() -> Callable[[], BinaryIO]:
    """Standard input, copied to an unnamed temporary file, so that it can be read again."""
    kept = tempfile.TemporaryFile()  # noqa: SIM115
    atexit.register(kept.close)
    shutil.copyfileobj(sys.stdin.buffer, kept)
    kept.flush()

    def again() -> BinaryIO:
        stream = os.fdopen(os.dup(kept.fileno()), "rb")
        stream.seek(0)
        return stream

    return again
