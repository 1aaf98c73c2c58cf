"""Data sources: a path, hub id or name, such as FOLDER@NAME, is resolved once to a `Source` with rows.

All commands read data through `resolve_source`. The rows can be iterated repeatedly:

    for row in resolve_source("pairs.csv").rows():
        if isinstance(row, BadRow):               # a row that cannot be parsed
            print(row.place, row.reason)          # row.place is "pairs.csv:3"
        else:
            print(row.place, row.values["text1"])

| source | rows |
|---|---|
| .jsonl, .json | JSON objects: an object per line, or in .json also a list of objects |
| .csv, .tsv | a table with a header line; quoting in .csv only |
| .parquet, .arrow | the rows of the table |
| .txt, any other file, `-` | a text per line, column `text`; with `tables` a .txt file is a tab-separated table |
| STS.input.NAME.txt and sts-train.csv of SentEval | scored pairs; only with `tables` |
| starter:NAME | a bundled starter file |
| a folder | all data files, in order of path; with `datasets`, the files that this library assigns to the split |
| FOLDER@NAME | the file FOLDER/NAME.*; with `datasets`, also the split NAME of a dataset |
| a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, FOLDER@SPLIT | the rows of the split, or of all |
| ORG/NAME or FOLDER, :CONFIGURATION, @SPLIT | a dataset of the hub or of a folder; only with `datasets` |
| a folder with `qrels`, FOLDER@SPLIT, FOLDER/qrels/SPLIT.tsv | judged queries of a BEIR folder; only with `tables` |
| mteb:NAME | none: a task of MTEB, which the package mteb reads; only by `evaluation_source` |

`source_in_memory` reads the rows of Python objects. Text files may end in .gz. A relative path is looked up in the working
directory, then in the folder that the environment variable `ANGLE_LLM_DATA` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple

from angle_llm.data.files.beir import QRELS, JudgedQueries, is_judged, split_of
from angle_llm.data.files.file_types import BESIDE, EXTENSIONS, TextFile, is_data_name, reader_of
from angle_llm.data.files.in_memory import DatasetReader, RowsInMemory, json_value
from angle_llm.data.files.reader import BadRow, FileReader, Row
from angle_llm.data.formats import DataError, is_nan
from angle_llm.data.store import cache_folder
from angle_llm.io import sha256_of
from angle_llm.settings.parsing import similar_paths

__all__ = ["EXTENSIONS", "BadRow", "Row", "Source", "evaluation_source", "find_path", "is_data_name", "resolve_source"]

Kind = Literal["file", "starter", "folder", "dataset", "beir", "mteb", "standard input", "rows", "function"]
"""Kind of a source. `file` is one file or split, `folder` all files or splits of a folder, and `dataset` is loaded by the
library `datasets`. `function` has no rows."""
DATA_VARIABLE = "ANGLE_LLM_DATA"
"""Environment variable with a folder in which relative paths of datasets are searched."""
STANDARD_INPUT = "-"
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?::(?P<configuration>\w[\w.-]*))?")
"""Pattern of a hub dataset id, ORG/NAME, optionally with a configuration, ORG/NAME:CONFIGURATION."""
STARTER = "starter:"
"""Prefix of a path that names a data file bundled with the package, as in `starter:graded_pairs.tsv`."""
MTEB = "mteb:"
"""Prefix of a task of MTEB, such as mteb:STSBenchmark."""
MEMORY = "memory:"
"""Prefix of the name of rows that a Python program passed to `fine_tune`, such as memory:data-1f0b…."""
_STARTER_FOLDER = Path(__file__).parent / "starter"


@dataclass(frozen=True)
class Source:
    """The rows of a data or evaluation source; every iteration reads them from the start.

    A kind of source is a `FileReader`: it has a name, an identity for caches, columns and rows.
    """

    name: str
    """Name of the source in messages."""
    kind: Kind
    files: tuple[FileReader, ...] = ()
    """Readers of the files, in the order of the rows. Empty for a task of MTEB, which the package mteb reads."""
    path: Path | None = None
    """Path of the file or folder; None for standard input, hub datasets, rows in memory and tasks of MTEB."""
    ignored: tuple[str, ...] = ()
    """Names of files in a folder whose type is unknown."""
    text: str = ""
    """The source as the user wrote it."""

    @cached_property
    def columns(self) -> list[str]:
        """Column names of all files, without repeated names. Reads JSON files completely."""
        return list(dict.fromkeys(column for file in self.files for column in file.columns))

    @property
    def identity(self) -> list[Any]:
        """Identifiers, label names, sizes and modification times of the files, for caches."""
        return [[(file.identity, file.label_names) for file in self.files], self.stamps()]

    @property
    def folder(self) -> Path:
        """Absolute path of the folder that contains the file or BEIR folder; `starter` or `mteb` for these kinds."""
        return Path(self.kind) if self.path is None or self.kind == "starter" else self.path.resolve().parent

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield all rows of all files, including bad rows."""
        return (row for file in self.files for row in file.rows())

    def good_rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """Yield all rows of all files; stop with an error at the first bad row.

        Raises:
            DataError: for a bad row, with file and line, or for a file in which one of `columns` is missing.
        """
        return (row for file in self.files for row in file.good_rows(columns))

    def stamps(self) -> list[tuple[int, int]]:
        """Return (size in bytes, modification time in ns) of every file, to detect quickly that a file was changed."""
        paths = [path for file in self.files for path in (file.path, *file.beside)]
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths if path.exists())]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return the name, size in bytes and SHA-256 of every file; .gz files are not decompressed."""
        return [
            {"name": Path(file.name).name, "size": file.path.stat().st_size, "sha256": sha256_of(file.path)}
            if file.content is None
            else {"name": file.name, "size": len(file.content), "sha256": sha256(file.content).hexdigest()}
            for file in self.files
        ]


def resolve_source(
    text: str | Path | Source,
    *,
    tables: bool = False,
    encoding: str = "utf-8",
    split: str = "train",
    datasets: bool = False,
    in_memory: bool = False,
) -> Source:
    """Return the source for a path, hub id or name. Rows are read when the source is iterated.

    The docstring of this module lists all kinds of sources.

    Args:
        text: Path of a file or folder, `-` (standard input), `starter:NAME` (a bundled file), FOLDER@NAME, or a hub
            id. A `Source` is returned unchanged.
        tables: Whether rows must have several columns: .txt files are read as tables, unknown extensions are refused.
        encoding: Encoding of text files, as Python names it.
        split: Name of the split of a BEIR folder or dataset without @SPLIT.
        datasets: Whether a folder or hub id is read as a dataset, with the library `datasets`. False: a folder is all
            files in it, and a hub id is refused.
        in_memory: Whether the content of a file is read at once and kept, so that no later iteration opens the file.

    Raises:
        DataError: if the source does not exist, its type is unknown, or an option does not fit the type.
    """
    if isinstance(text, Source):
        return text
    resolver = _Resolver(str(text), tables, encoding, split, datasets, in_memory)
    return replace(resolver.resolve(), text=str(text))


def evaluation_source(text: str | Path | Source) -> Source:
    """Return the source of an evaluation: scored pairs, questions and answers, a BEIR folder, or a task of MTEB.

    A file is read once. The split of a BEIR folder without @SPLIT is `test`. Raises the errors of `resolve_source`, and
    `DataError` for another folder.
    """
    if isinstance(text, str) and text.startswith(MTEB):
        return Source(text, "mteb", text=text)
    source = resolve_source(text, tables=True, split="test", in_memory=True)
    if source.kind == "folder":
        raise DataError(
            f"{source.text}: expected a file or a BEIR folder (corpus.jsonl, queries.jsonl, qrels/). Name a file in the folder "
            "as FOLDER@NAME"
        )
    return source


_FILE_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter"}
"""Options of a dataset configuration that do not change how its files are read here; delimiters are detected."""


class _Resolver(NamedTuple):
    """The arguments of `resolve_source`; the method `resolve` chooses the reader classes of the source."""

    text: str
    tables: bool
    encoding: str
    split: str
    datasets: bool
    in_memory: bool

    def resolve(self) -> Source:
        """Return the source. Raises `DataError` as described at `resolve_source`."""
        # Sources that are not a path.
        if self.text == STANDARD_INPUT and not self.tables:
            content = sys.stdin.buffer.read()
            lines = TextFile(Path(self.text), name="standard input", encoding=self.encoding, content=content)
            return Source(lines.name, "standard input", (lines,))
        if self.text.startswith(STARTER):
            return self._file(_starter_file(self.text.removeprefix(STARTER)), "starter")
        if self.text.startswith(MTEB):
            raise DataError(f"{self.text}: a task of MTEB is only for --evaluation.tasks")
        if self.text.startswith(MEMORY):
            raise DataError(
                f"{self.text}: these rows were passed in Python; pass them again to fine_tune, or name a file"
            )
        if not self.text:
            raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:NAME")

        # FOLDER@PART; a file or folder with @ in its name is a path.
        name, _, part = self.text.rpartition("@")
        if find_path(self.text).exists() or not name or set(part) & set("/\\"):
            name, part = self.text, ""

        # A path, or the id of a hub dataset.
        path = find_path(name)
        if path.is_dir():
            return self._folder(path, part)
        if path.exists() and not part:
            if self.tables and path.parent.name == QRELS:  # FOLDER/qrels/SPLIT.tsv
                return self._judged(path.parent.parent, split_of(path.name))
            return self._file(path)
        folder, _, configuration = name.rpartition(":")
        if self.datasets and folder and find_path(folder).is_dir():
            return self._dataset(str(find_path(folder)), part or self.split, configuration)
        hub_id = _HUB_ID.fullmatch(name) if self.datasets and not is_data_name(name) else None
        if hub_id is not None:
            return self._dataset(hub_id["id"], part or self.split, hub_id["configuration"])
        hub = ", and not a hub id (org/name, or org/name:configuration)" if self.datasets else ""
        raise DataError(f"{self.text}: no such file or folder{hub}. {similar_paths(path)}")

    def _folder(self, folder: Path, part: str) -> Source:
        """Return the source of a folder: all files or the default split; if `part` is not empty, this file or split."""
        if self.tables and is_judged(folder):
            return self._judged(folder, part or self.split)
        if saved := self._saved(folder, part or (self.split if self.datasets else None)):
            return saved
        if part:
            endings = {f"{part}{extension}".lower() for extension in EXTENSIONS}
            files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower() in endings]
            if len(files) > 1:
                raise DataError(f"{self.text} may be {' or '.join(path.name for path in files)}; name the file")
            if files:
                return self._file(files[0])
            names = sorted(entry.name for entry in folder.iterdir())
            has_split = any(entry.startswith((f"{part}-", f"{part}.")) for entry in names)
            if not self.datasets or (any(map(is_data_name, names)) and not has_split):
                raise DataError(f"{self.text}: no file {part}.* in {folder}; files there: {', '.join(names)}")
        return self._dataset(str(folder), part or self.split) if self.datasets else self._all_files(folder)

    def _file(self, path: Path, kind: Kind = "file") -> Source:
        """Return the source of a single file."""
        return Source(str(path), kind, (self._reader(path),), path)

    def _reader(self, path: Path) -> FileReader:
        """Return the reader of a file."""
        content = path.read_bytes() if self.in_memory else None
        return reader_of(path, tables=self.tables, encoding=self.encoding, content=content)

    def _all_files(self, folder: Path) -> Source:
        """Return the source of all data files in a folder and its subfolders.

        .json files and names that start with . or _ are ignored.
        """
        paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(part.startswith((".", "_")) for part in path.parts)]
        readable = tuple(extension for extension in EXTENSIONS if extension.removesuffix(".gz") != ".json")
        files = [path for path in paths if path.name.lower().endswith(readable) and not path.name.endswith(BESIDE)]
        if not files:
            raise DataError(f"{folder}: no file in this folder ends in {', '.join(readable)}; name a file")
        ignored = tuple(str(path) for path in paths if path not in files)
        return Source(str(folder), "folder", tuple(self._reader(folder / path) for path in files), folder, ignored)

    def _judged(self, folder: Path, split: str) -> Source:
        """Return the source of a BEIR folder: the queries of a split with their judged documents."""
        return Source(self.text, "beir", (JudgedQueries(folder, split, encoding=self.encoding),), folder)

    def _dataset(self, path: str, split: str, configuration: str | None = None) -> Source:
        """Return the source of a split of a local folder or a hub id (`path`).

        The library `datasets` names the files of a local folder. They are read here, because it reads tab-separated
        files with quoting, and cells such as NA as empty; by `datasets` if the dataset card has options for reading.

        Raises:
            DataError: if the files have several types, of which `datasets` would read one.
        """
        if not Path(path).is_dir():
            return Source(path, "dataset", (DatasetReader(path, configuration, split),))
        if "[" in split:
            raise DataError(
                f"{path}@{split}: expected the name of a split of a local folder, got a slice. Limit the rows with --limit "
                "(train: --data.limit)"
            )
        import datasets
        from datasets.data_files import DataFilesDict, get_data_patterns
        from huggingface_hub import DatasetCard

        paths: list[str] = []
        unread: list[str] = []
        with suppress(Exception):  # many types; `DatasetReader` reports the same error
            base = str(Path(path).resolve())
            builder = datasets.load_dataset_builder(base, configuration)
            config = builder.config
            defaults = vars(type(config)())
            if all(value == defaults[name] for name, value in vars(config).items() if name not in _FILE_OPTIONS):
                paths = [file for file in dict.fromkeys(config.data_files[split]) if not file.endswith(BESIDE)]
                card = Path(base, "README.md")
                has_configurations = card.is_file() and DatasetCard.load(card).data.to_dict().get("configs")
                if configuration is None and not has_configurations:  # the card names no files
                    named = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base).get(split, ())
                    not_rows = (*BESIDE, ".json", ".json.gz", *((".txt", ".txt.gz") if self.tables else ()))
                    unread = [file for file in named if is_data_name(file) and file not in paths]
                    unread = [file for file in unread if not file.lower().endswith(not_rows)]
        if paths and unread:
            names = ", ".join(Path(file).name for file in (paths[0], unread[0]))
            raise DataError(
                f"{path}: expected files of one type, got {names}. Move the files of one type to another folder, or list all "
                "files: FOLDER/a.jsonl,FOLDER/b.csv"
            )
        readers = [self._reader(Path(file)) for file in paths if is_data_name(file)]
        if paths and len(readers) == len(paths):
            return Source(path, "folder", tuple(readers), Path(path))
        return Source(path, "dataset", (DatasetReader(path, configuration, split),))

    def _saved(self, folder: Path, split: str | None) -> Source | None:
        """Return the source of a folder of `save_to_disk`: one split, or all if `split` is None; None for other folders."""
        if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
            return None
        import datasets

        try:
            saved = datasets.load_from_disk(str(folder))
        except IndexError:  # a split has no files
            raise DataError(f"{folder}: a split has no rows; save the dataset without it") from None
        except Exception as error:  # many types
            raise DataError(f"{folder}: cannot be read as a dataset of save_to_disk, save it again: {error}") from error
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        if split not in (None, *splits):
            raise DataError(
                f"{folder}: no split {split!r}; splits there: {', '.join(splits)}. Name one: {folder}@SPLIT"
            )
        parts = [part for name, part in splits.items() if split in (None, name)]
        paths = [Path(file["filename"]) for part in parts for file in part.cache_files]
        kind: Kind = "file" if len(parts) == 1 else "folder"
        return Source(str(folder), kind, tuple(map(self._reader, paths)), folder)


def find_path(path: str) -> Path:
    """Return the path of a file or folder; a relative path that does not exist is looked up in `ANGLE_LLM_DATA`."""
    here = Path(path).expanduser()
    there = Path(os.environ.get(DATA_VARIABLE, "")).expanduser() / here
    return there if there.exists() and not here.exists() else here


def without_extension(path: str | Path) -> str:
    """Return the name of a file without its known extension: `faq.valid` for `data/faq.valid.jsonl.gz`."""
    name = Path(path).name
    known = [extension for extension in EXTENSIONS if name.lower().endswith(extension)]
    return name[: len(name) - max(map(len, known), default=0)]


def _starter_file(name: str) -> Path:
    """Return the path of a data file bundled with the package. Raises `DataError` for an unknown name."""
    known = sorted(path.name for path in _STARTER_FOLDER.iterdir() if path.suffix in (".gz", ".tsv"))
    if name not in known:
        raise DataError(f"{STARTER}{name}: no such starter file. Known: {', '.join(known)}")
    return _STARTER_FOLDER / name


# --- Python objects ---------------------------------------------------------------------------------------------------


def source_in_memory(data: Any, name: str) -> Source:
    """Return a data source with the rows of a Python object.

    The text of the source, `memory:NAME-DIGEST`, identifies the rows: equal rows have equal texts.

    Args:
        data: A list of dictionaries or of texts; a Series or an array of texts; a `Dataset`, `IterableDataset` or
            `DatasetDict` (split `train`) of the library `datasets`; a data frame or table that exports Arrow data (pandas,
            polars, pyarrow, duckdb); or a function that returns an iterator of dictionaries. The rows of an iterable dataset
            or a function are written to a temporary file, so they may be larger than memory.
        name: Name of the source in messages, such as `data`.

    Raises:
        DataError: for another type, or an object without rows.
    """
    reader = RowsInMemory(_rows(data, name), name=name)
    return Source(name, "rows", (reader,), text=f"{MEMORY}{name}-{reader.identity[:16]}")


def _rows(data: Any, name: str) -> Any:
    """Return the rows of an object as a list of dictionaries or a `Dataset`; raises as `source_in_memory`."""
    import datasets
    import pyarrow

    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        if "train" not in data:
            raise DataError(
                f"{name}: expected one split, got the splits {', '.join(data)}; pass one, such as data['…']"
            )
        data = data["train"]
    if isinstance(data, pyarrow.Array | pyarrow.ChunkedArray):
        data = data.to_pylist()
    elif isinstance(data, datasets.arrow_dataset.Column) or getattr(data, "ndim", 0) == 1 or hasattr(data, "to_frame"):
        data = list(data)  # a column, a Series (polars has no `ndim`) or an array of texts
    elif hasattr(data, "reset_index"):
        data = data.reset_index(drop=True)  # pandas exports an index as a column
    if hasattr(data, "__arrow_c_stream__") and not isinstance(data, datasets.Dataset):
        try:
            table = pyarrow.table(data)
            columns = [column for column in table.column_names if not column.startswith("__index_level_")]  # of pandas
            data = datasets.Dataset(table.select(columns))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            # A column of a data frame has values of several types, or of a type that is not stored.
            if hasattr(data, "to_dicts"):  # polars
                data = data.to_dicts()
            elif hasattr(data, "to_dict") and data.columns.is_unique:  # pandas
                data = data.astype(object).where(data.notna(), None).to_dict("records")
            else:
                raise DataError(f"{name}: {error}. Pass only the columns to train on") from error
    if isinstance(data, datasets.IterableDataset):
        rows: Any = _StoredRows(data.with_format(None), data.features, name)
    elif isinstance(data, datasets.Dataset):
        if data.format["type"] == "custom":
            raise DataError(
                f"{name}: the dataset has a transform, which is not applied; use map in place of set_transform"
            )
        rows = data.with_format(None)
    elif callable(data):
        rows = _StoredRows(data(), None, name)
    elif isinstance(data, list | tuple):
        rows = [_as_row(row, name, number) for number, row in enumerate(data, 1)]
    else:
        raise DataError(
            f"{name}: expected a path, a list of dictionaries, a Dataset, a data frame, or a function that returns an "
            f"iterator of dictionaries; got {type(data).__name__}"
        )
    if len(rows) == 0:
        raise DataError(f"{name}: there are no rows")
    return rows


class _StoredRows:
    """Rows that were iterated once, written to a temporary file as JSON lines; the file is removed with the object.

    A row is a dictionary, or a text, which gets the column `text`.
    """

    def __init__(self, rows: Iterable[Any], features: Any, name: str) -> None:
        self.features = features
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="rows-", dir=cache_folder())  # /tmp is in memory on some systems
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder) / "rows.jsonl"
        self._count = 0
        with self._path.open("w", encoding="utf-8") as file:
            for self._count, row in enumerate(rows, 1):
                file.write(json.dumps(_as_row(row, name, self._count), default=json_value) + "\n")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _as_row(row: Any, name: str, number: int) -> dict[str, Any]:
    """Return a row as a dictionary, with None for NaN and without types of numpy; a text becomes the column `text`.

    Raises:
        DataError: for a row of another type, or a column name that is no text or number.
    """
    if isinstance(row, str):
        return {"text": str(row)}
    if not isinstance(row, Mapping):
        raise DataError(f"{name} row {number}: expected a dictionary or a text, got {type(row).__name__}")
    if odd := [column for column in row if not isinstance(column, str | Integral)]:
        raise DataError(f"{name} row {number}: expected texts as column names, got {odd[0]!r}")
    values = {str(column): value.tolist() if hasattr(value, "tolist") else value for column, value in row.items()}
    return {column: None if is_nan(value) else value for column, value in values.items()}
