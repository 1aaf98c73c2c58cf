"""Rows of any data source. The only reader of the package: train, embed, mine, check and evaluate use it.

    rows = open_rows("pairs.csv")                 a file, a folder, standard input ("-"), starter:NAME, a hub id
    for row in rows:                              repeatable; a `Row`, or a `BadRow` where a row cannot be read
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
| a folder with `qrels`, FOLDER@NAME | judged queries of BEIR, of the split (`beir`); with `tables` |

All files but Parquet may end in .gz. Relative paths are looked up in the working directory, then in `ANGLE_LLM_DATA`.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from difflib import get_close_matches
from pathlib import Path
from typing import IO, NamedTuple

from angle_llm.data.beir import JudgedQueries, is_judged
from angle_llm.data.file_types import (
    CsvFile,
    DatasetReader,
    JsonFile,
    JsonLinesFile,
    ParquetFile,
    StsBenchmarkFile,
    StsPartFile,
    TextFile,
    TsvFile,
)
from angle_llm.data.formats import DataError
from angle_llm.data.rows import BadRow, FileReader, Row, RowSource

__all__ = [
    "EXTENSIONS",
    "FILE_TYPES",
    "STANDARD_INPUT",
    "BadRow",
    "Row",
    "RowSource",
    "find_path",
    "is_data_name",
    "open_rows",
]

DATA_VARIABLE = "ANGLE_LLM_DATA"
"""Environment variable with a folder of datasets."""
STANDARD_INPUT = "-"
STARTER = "starter:"
_STARTER_FOLDER = Path(__file__).parent / "starter"

FILE_TYPES: dict[str, type[FileReader]] = {
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".json": JsonFile,
    ".csv": CsvFile,
    ".tsv": TsvFile,
    ".parquet": ParquetFile,
    ".txt": TextFile,
}
"""File name extension → reader."""

EXTENSIONS = (*FILE_TYPES, *(f"{extension}.gz" for extension in FILE_TYPES if extension != ".parquet"))
"""Endings of the names of data files."""


def is_data_name(name: str) -> bool:
    """Return whether a name ends like that of a data file, in upper or lower case."""
    return name.lower().endswith(EXTENSIONS)


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
    """Open a source (see the table above); rows are read when they are iterated.

    Args:
        source: Path of a file or folder, `-`, `starter:NAME`, FOLDER@NAME, or a hub id.
        tables: Whether rows must have columns: .txt files are tables, and other unknown extensions are refused.
        delimiter: Between the fields of CSV and TSV files; None: tabs in .tsv, and detected in .csv.
        encoding: Of text files, as Python names it.
        name: Configuration of a dataset.
        split: Split of a dataset; None: only files are read.
        revision: Commit, tag or branch of a hub dataset.

    Raises:
        DataError: if there is no such source, its type is unknown, or options do not fit it.
    """
    delimiter = "\t" if delimiter in ("\\t", "tab") else delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise DataError(f"--delimiter: expected one character, such as ; or \\t for a tab, got {delimiter!r}")
    try:
        "".encode(encoding)
    except LookupError:
        raise DataError(
            f"encoding is {encoding!r}; expected a codec of Python, such as utf-8, cp1252 or utf-16"
        ) from None
    return _Opener(str(source), tables, delimiter, encoding, name, split, revision).open()


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
        path = find_path(self.source)
        folder, at, part = self.source.rpartition("@")
        if self.source == STANDARD_INPUT and not self.tables:
            stdin = TextFile(_standard_input(), name="standard input", encoding=self.encoding)
            return RowSource(stdin.name, [stdin])
        if self.source.startswith(STARTER):
            return self._file(_starter_file(self.source.removeprefix(STARTER)))
        if not self.source:
            raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:NAME")
        if at and folder and not path.exists() and not set(part) & set("/\\"):
            return self._part(folder, part)
        if path.is_dir() and self.tables and is_judged(path):
            return self._judged(path, self.split or "train")
        if path.is_dir():
            return self._folder(path) if self.split is None else self._dataset(str(path), self.split)
        if path.exists():
            return self._file(path)
        if self.split is not None and _is_hub_id(self.source):
            return self._dataset(self.source, self.split)
        weight = " A weight is a plain number after a colon, such as :0.5." if ":" in self.source else ""
        hub = ", and not a hub id (org/name)" if self.split is not None else ""
        raise DataError(f"{self.source}: no such file or folder{hub}. {_beside(path)}{weight}")

    def _file(self, path: Path) -> RowSource:
        if self.name is not None or self.split not in (None, "train") or self.revision is not None:
            raise DataError(f"{self.source} is one file; `split`, `name` and `revision` are for datasets; unset them")
        reader = self._reader(path)
        if self.delimiter is not None and not isinstance(reader, TsvFile):
            raise DataError(f"{self.source}: delimiter is set, but this is not a CSV or TSV file; unset it")
        return RowSource(str(path), [reader], path=path)

    def _reader(self, path: Path) -> FileReader:
        packed = path.suffix.lower() == ".gz"
        extension = (path.with_suffix("") if packed else path).suffix.lower()
        if extension == ".parquet" and packed:
            raise DataError(f"{path}: Parquet files are not read from .gz; unpack it")
        if self.tables and extension not in FILE_TYPES:
            raise DataError(f"{path}: unknown file name extension; known: {', '.join(FILE_TYPES)}, text files also .gz")

        def made(file_type: type[FileReader]) -> FileReader:
            return file_type(path, delimiter=self.delimiter, encoding=self.encoding)

        reader = made(FILE_TYPES.get(extension, TextFile))
        if isinstance(reader, CsvFile) and self.delimiter is None and StsBenchmarkFile.matches(reader):
            return made(StsBenchmarkFile)
        if not self.tables or not isinstance(reader, TextFile):
            return reader
        if path.name.startswith("STS.input."):
            return made(StsPartFile)
        if (self.delimiter or "\t") in next((line for _, line in reader.lines() if line.strip()), ""):
            return made(TsvFile)  # SICK, MRPC
        raise DataError(
            f"{path}: expected pairs: a table with a header line and tabs between columns, or STS.input.NAME.txt beside "
            "STS.gs.NAME.txt; the first line has no tab. A file of single texts can be embedded, but has no pairs to train on"
        )

    def _folder(self, folder: Path) -> RowSource:
        """Return the data files in a folder and its subfolders, except .json files and names that start with . or _."""
        paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(part.startswith((".", "_")) for part in path.parts)]
        readable = tuple(extension for extension in EXTENSIONS if extension.removesuffix(".gz") != ".json")
        files = [path for path in paths if path.name.lower().endswith(readable)]
        if not files:
            raise DataError(f"{folder}: no file in this folder ends in {', '.join(readable)}; name a file")
        ignored = [str(path) for path in paths if path not in files]
        return RowSource(str(folder), [self._reader(folder / path) for path in files], ignored, folder)

    def _judged(self, folder: Path, split: str) -> RowSource:
        reader = JudgedQueries(folder, split, encoding=self.encoding)
        return RowSource(self.source, [reader], path=folder)

    def _dataset(self, path: str, split: str) -> RowSource:
        hint = "" if Path(path).is_dir() else f"It is not a local path. {_beside(Path(path))}"
        return RowSource(path, [DatasetReader(path, self.name, split, self.revision, hint)])

    def _part(self, name: str, part: str) -> RowSource:
        """Return the source of FOLDER@NAME: the file FOLDER/NAME with a known extension, or a split of a dataset."""
        if self.split not in (None, "train"):
            raise DataError(f"{self.source} names the split {part}, and `split` is {self.split}; unset one of them")
        folder = find_path(name)
        if not folder.is_dir():
            if self.split is not None and _is_hub_id(name):
                return self._dataset(name, part)
            raise DataError(f"{self.source}: {name} is not a folder and not a hub id (org/name). {_beside(folder)}")
        if self.tables and is_judged(folder):
            return self._judged(folder, part)
        endings = {f"{part}{extension}".lower() for extension in EXTENSIONS}
        found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower() in endings]
        if len(found) > 1:
            raise DataError(f"{self.source} may be {' or '.join(path.name for path in found)}; name the file")
        if found:
            return self._file(found[0])
        names = sorted(entry.name for entry in folder.iterdir())
        of_split = any(entry.startswith((f"{part}-", f"{part}.")) for entry in names)
        if self.split is None or (any(map(is_data_name, names)) and not of_split):
            raise DataError(f"{self.source}: no file {part}.* in {folder}; files there: {', '.join(names)}")
        return self._dataset(str(folder), part)


def find_path(path: str) -> Path:
    """Return the path; a relative one that does not exist is looked up in the folder that `ANGLE_LLM_DATA` names."""
    here, data = Path(path).expanduser(), os.environ.get(DATA_VARIABLE)
    if data and not here.exists() and not here.is_absolute() and (Path(data).expanduser() / here).exists():
        return Path(data).expanduser() / here
    return here


def _is_hub_id(path: str) -> bool:
    """Return whether a path that does not exist is the id of a hub dataset:
    ORG/NAME without the extension of a data file."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not is_data_name(path)


def _beside(path: Path) -> str:
    """Return similar names in the folder of a missing path, for messages."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either"
    similar = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), n=3)
    if not similar:
        return f"The folder {path.parent} has no similar name"
    return f"Did you mean {' or '.join(str(path.parent / name) for name in similar)}?"


def _starter_file(name: str) -> Path:
    known = sorted(path.name for path in _STARTER_FOLDER.iterdir() if path.suffix in (".gz", ".tsv"))
    if name not in known:
        raise DataError(f"{STARTER}{name}: no such starter file. Known: {', '.join(known)}")
    return _STARTER_FOLDER / name


def _standard_input() -> Path:
    """Return a temporary file with a copy of standard input, which can be read again.

    On Linux the file has no name, so that a killed process does not leave it on disk.
    """
    descriptors = Path("/proc/self/fd")
    unnamed = descriptors.is_dir()
    copy: IO[bytes] = tempfile.TemporaryFile() if unnamed else tempfile.NamedTemporaryFile()  # noqa: SIM115
    atexit.register(copy.close)
    shutil.copyfileobj(sys.stdin.buffer, copy)
    copy.flush()
    return descriptors / str(copy.fileno()) if unnamed else Path(copy.name)
