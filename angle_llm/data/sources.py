"""Data and evaluation sources: what the text of a user means, resolved once to a `Source` with rows.

All commands read data through `resolve_source`. The rows can be iterated repeatedly:

    for row in resolve_source("pairs.csv").rows():
        if isinstance(row, BadRow):               # a row that cannot be parsed
            print(row.place, row.reason)          # row.place is "pairs.csv:3"
        else:
            print(row.place, row.values["text1"])

| source | rows |
|---|---|
| .jsonl, .json | JSON objects: an object per line, or a list of objects |
| .csv, .tsv | a table with a header line; quoting in .csv only |
| .parquet, .arrow | the rows of the table |
| .txt, any other file, `-` | a text per line, column `text`; with `tables` a .txt file is a tab-separated table |
| STS.input.NAME.txt and sts-train.csv of SentEval | scored pairs; only with `tables` |
| starter:NAME | a bundled starter file |
| a folder | all data files, in order of path; with `datasets`, the files that this library assigns to the split |
| FOLDER@NAME | the file FOLDER/NAME.*; with `datasets`, also the split NAME of a dataset |
| a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, FOLDER@SPLIT | the rows of the split, or of all |
| ORG/NAME, ORG/NAME:CONFIGURATION, ORG/NAME@SPLIT | a dataset of the hub; only with `datasets` |
| a folder with `qrels`, FOLDER@SPLIT, FOLDER/qrels/SPLIT.tsv | judged queries of a BEIR folder; only with `tables` |
| a list of dictionaries | these rows |
| mteb:NAME | none: a task of MTEB, which the package mteb reads |

Text files may end in .gz. A relative path is looked up in the working directory, then in the folder that the environment
variable `ANGLE_LLM_DATA` names.

A BEIR folder contains `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`, each optionally with .gz; or, as NanoBEIR,
the files SPLIT-00000-of-00001.parquet in the folders `corpus`, `queries` and `qrels`. The text of a document is its
title and its text, joined by a space; both may be blank. A row is a query with its judged documents, in the columns of
Tevatron, so the row is read as a group. Documents with a score above 0 are positives, other documents negatives. Blank
documents are skipped, and so are queries without a positive.
"""

from __future__ import annotations

import atexit
import glob
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from angle_llm.data.file_types import (
    EXTENSIONS,
    FILE_TYPES,
    BadRow,
    CsvFile,
    DatasetReader,
    FileReader,
    JsonFile,
    Row,
    RowList,
    StsBenchmarkFile,
    StsPartFile,
    TextFile,
    TsvFile,
    is_data_name,
)
from angle_llm.data.formats import DataError, RowError
from angle_llm.io import sha256_of
from angle_llm.settings.parsing import similar_paths

__all__ = ["EXTENSIONS", "BadRow", "Row", "Source", "evaluation_source", "find_path", "is_data_name", "resolve_source"]

Kind = Literal["file", "starter", "folder", "dataset", "beir", "mteb", "standard input", "rows"]
"""Kind of a source. `folder` has several files, `dataset` is loaded by the library `datasets`."""
DATA_VARIABLE = "ANGLE_LLM_DATA"
"""Environment variable with a folder in which relative paths of datasets are searched."""
STANDARD_INPUT = "-"
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?")
"""Pattern of a hub dataset id, ORG/NAME, optionally with a configuration, ORG/NAME:CONFIGURATION."""
STARTER = "starter:"
"""Prefix of a path that names a data file bundled with the package, as in `starter:graded_pairs.tsv`."""
MTEB = "mteb:"
"""Prefix of a task of MTEB, such as mteb:STSBenchmark."""
_STARTER_FOLDER = Path(__file__).parent / "starter"
QRELS = "qrels"
"""Name of the folder with the judgements of a BEIR folder."""
_ONLY_SHARD = "-00000-of-00001.parquet"
"""End of the name of a Parquet file in a dataset of the hub, if the split has a single file."""


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
        if self.kind == "mteb":
            raise DataError(f"{self.name}: a task of MTEB is only for --evaluation.tasks")
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

    def good_rows(self, columns: Iterable[str] = ()) -> Iterator[Row]:
        """Yield all rows of all files; stop with an error at the first bad row.

        Raises:
            DataError: for a bad row, with file and line, or for a file in which one of `columns` is missing.
        """
        names = list(columns)
        for file in self.files if names else ():
            if missing := [name for name in names if name not in file.columns]:
                raise DataError(
                    f"{file.name}: expected columns {', '.join(names)}; missing {', '.join(missing)}, found "
                    f"{', '.join(file.columns)}"
                )
        for row in self.rows():
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            yield row

    def stamps(self) -> list[tuple[int, int]]:
        """Return (size in bytes, modification time in ns) of every file, to detect quickly that a file was changed."""
        paths = [path for file in self.files for path in (file.path, *file.beside)]
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths if path.exists())]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return the name, size in bytes and SHA-256 of every file; .gz files are not decompressed."""
        return [
            {"name": Path(file.name).name, "size": file.path.stat().st_size, "sha256": sha256_of(file.path)}
            for file in self.files
        ]


def resolve_source(
    text: str | Path | Source | Sequence[Mapping[str, Any]],
    *,
    tables: bool = False,
    encoding: str = "utf-8",
    split: str = "train",
    datasets: bool = False,
    in_memory: bool = False,
) -> Source:
    """Return the source that a text of the user names. Rows are read when the source is iterated.

    The docstring of this module lists all kinds of sources.

    Args:
        text: Path of a file or folder, `-` (standard input), `starter:NAME` (a bundled file), FOLDER@NAME, a hub id,
            `mteb:NAME`, or rows in memory as a list of dictionaries. A `Source` is returned unchanged.
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
    if not isinstance(text, str | Path):
        return Source("rows", "rows", (RowList(text),))
    try:
        "".encode(encoding)
    except LookupError:
        raise DataError(
            f"encoding is {encoding!r}; expected a codec of Python, such as utf-8, cp1252 or utf-16"
        ) from None
    return replace(_Resolver(str(text), tables, encoding, split, datasets, in_memory).resolve(), text=str(text))


def evaluation_source(text: str | Path | Source) -> Source:
    """Return the source of an evaluation: scored pairs, questions and answers, a BEIR folder, or a task of MTEB.

    A file is read once. The split of a BEIR folder without @SPLIT is `test`. Raises the errors of `resolve_source`.
    """
    return resolve_source(text, tables=True, split="test", in_memory=True)


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
            stdin = TextFile(_standard_input(), name="standard input", encoding=self.encoding)
            return Source(stdin.name, "standard input", (stdin,))
        if self.text.startswith(STARTER):
            return self._file(_starter_file(self.text.removeprefix(STARTER)), "starter")
        if self.text.startswith(MTEB):
            return Source(self.text, "mteb")
        if not self.text:
            raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:NAME")

        # FOLDER@PART; a file or folder with @ in its name is a path.
        path = find_path(self.text)
        folder, at, part = self.text.rpartition("@")
        if at and folder and not path.exists() and not set(part) & set("/\\"):
            return self._part(folder, part)

        # A path, or the id of a hub dataset.
        if path.is_dir():
            return self._folder(path)
        if self.tables and path.is_file() and path.parent.name == QRELS:
            return self._judged(path.parent.parent, _split_of(path.name))
        if path.exists():
            return self._file(path)
        if hub_id := self._hub_id(self.text):
            return self._dataset(hub_id[1], self.split, hub_id[2])
        weight = " A weight is a plain number after a colon, such as :0.5." if ":" in self.text else ""
        hub = ", and not a hub id (org/name, or org/name:configuration)" if self.datasets else ""
        raise DataError(f"{self.text}: no such file or folder{hub}. {similar_paths(path)}{weight}")

    def _folder(self, folder: Path) -> Source:
        """Return the source for a folder without the name of a part."""
        if self.tables and is_judged(folder):
            return self._judged(folder, self.split)
        if saved := self._saved(folder, self.split if self.datasets else None):
            return saved
        return self._dataset(str(folder), self.split) if self.datasets else self._all_files(folder)

    def _part(self, name: str, part: str) -> Source:
        """Return the source NAME@PART: the file NAME/PART.* with a known extension, or split PART of dataset NAME."""
        folder = find_path(name)
        if not folder.is_dir():
            if hub_id := self._hub_id(name):
                return self._dataset(hub_id[1], part, hub_id[2])
            raise DataError(
                f"{self.text}: {name} is not a folder and not a hub id (org/name, or org/name:configuration). "
                f"{similar_paths(folder)}"
            )
        if self.tables and is_judged(folder):
            return self._judged(folder, part)
        if saved := self._saved(folder, part):
            return saved
        endings = {f"{part}{extension}".lower() for extension in EXTENSIONS}
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower() in endings]
        if len(files) > 1:
            raise DataError(f"{self.text} may be {' or '.join(path.name for path in files)}; name the file")
        if files:
            return self._file(files[0])
        names = sorted(entry.name for entry in folder.iterdir())
        of_split = any(entry.startswith((f"{part}-", f"{part}.")) for entry in names)
        if not self.datasets or (any(map(is_data_name, names)) and not of_split):
            raise DataError(f"{self.text}: no file {part}.* in {folder}; files there: {', '.join(names)}")
        return self._dataset(str(folder), part)

    def _hub_id(self, name: str) -> re.Match[str] | None:
        """Return the parts of the id of a hub dataset; None for other names, or if datasets are not loaded."""
        return _HUB_ID.fullmatch(name) if self.datasets and not is_data_name(name) else None

    def _file(self, path: Path, kind: Kind = "file") -> Source:
        """Return the source of a single file."""
        return Source(str(path), kind, (self._reader(path),), path)

    def _reader(self, path: Path) -> FileReader:
        """Return the reader for the type of a file: chosen by file name, for some types also by the first line."""
        packed = path.suffix.lower() == ".gz"
        extension = (path.with_suffix("") if packed else path).suffix.lower()
        if packed and f"{extension}.gz" not in EXTENSIONS and extension in FILE_TYPES:
            raise DataError(f"{path}: {extension} files are not read from .gz; unpack it")
        if self.tables and extension not in FILE_TYPES:
            raise DataError(f"{path}: unknown file name extension; known: {', '.join(FILE_TYPES)}, text files also .gz")
        content = path.read_bytes() if self.in_memory else None

        def made(file_type: type[FileReader]) -> FileReader:
            return file_type(path, encoding=self.encoding, content=content)

        reader = made(FILE_TYPES.get(extension, TextFile))
        if isinstance(reader, CsvFile) and StsBenchmarkFile.matches(reader):
            return made(StsBenchmarkFile)
        if not self.tables or not isinstance(reader, TextFile):
            return reader
        if path.name.startswith("STS.input."):
            return made(StsPartFile)
        if "\t" in next((line for _, line in reader.lines() if line.strip()), ""):
            return made(TsvFile)  # SICK, MRPC
        raise DataError(
            f"{path}: expected pairs: a table with a header line and tabs between columns, or STS.input.NAME.txt beside "
            "STS.gs.NAME.txt; the first line has no tab. A file of single texts can be embedded, but has no pairs to train on. "
            "For single texts, use `angle-llm pretrain` with the format text."
        )

    def _all_files(self, folder: Path) -> Source:
        """Return the source of all data files in a folder and its subfolders.

        .json files and names that start with . or _ are ignored.
        """
        paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(part.startswith((".", "_")) for part in path.parts)]
        readable = tuple(extension for extension in EXTENSIONS if extension.removesuffix(".gz") != ".json")
        files = [path for path in paths if path.name.lower().endswith(readable)]
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
        """
        if not Path(path).is_dir():
            hint = f"It is not a local path. {similar_paths(Path(path))}"
            return Source(path, "dataset", (DatasetReader(path, configuration, split, hint),))
        import datasets
        from datasets.data_files import DataFilesDict, get_data_patterns

        base = str(Path(path).resolve())
        hint = ""
        paths: list[str] = []
        with suppress(Exception):  # many types; `DatasetReader` reports the same error
            if glob.has_magic(base):  # `datasets` reads such a path as a pattern
                hint = "Rename the folder without any of *, ? and [, or name a file"
                paths = DataFilesDict.from_patterns(get_data_patterns(glob.escape(base)), glob.escape(base))[split]
            else:
                config = datasets.load_dataset_builder(base).config
                defaults = vars(type(config)())
                if all(value == defaults[name] for name, value in vars(config).items() if name not in _FILE_OPTIONS):
                    paths = config.data_files[split]
        readers = [self._reader(Path(file)) for file in dict.fromkeys(paths) if is_data_name(file)]
        json_files = [reader for reader in readers if isinstance(reader, JsonFile)]
        are_lists = all(next(reader.lines(), (0, ""))[1].lstrip()[:1] == "[" for reader in json_files)
        if paths and len(readers) == len(set(paths)) and are_lists:
            return Source(path, "folder", tuple(readers), Path(path))
        return Source(path, "dataset", (DatasetReader(path, None, split, hint),))

    def _saved(self, folder: Path, split: str | None) -> Source | None:
        """Return the source of a folder of `save_to_disk`: one split, or all if `split` is None; None for other folders."""
        if (folder / "dataset_dict.json").is_file():
            splits = {name: folder / name for name in _read_json(folder / "dataset_dict.json", "splits")}
        elif (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            splits = {_read_json(folder / "state.json", "_split") or "train": folder}
        else:
            return None
        if split is not None and split not in splits:
            raise DataError(
                f"{folder}: no split {split!r}; splits there: {', '.join(splits)}. Name one: {folder}@SPLIT"
            )
        parts = splits.values() if split is None else [splits[split]]
        names = [(part, file["filename"]) for part in parts for file in _read_json(part / "state.json", "_data_files")]
        return Source(str(folder), "folder", tuple(self._reader(part / name) for part, name in names), folder)


def find_path(path: str) -> Path:
    """Return the path of a file or folder; a relative path that does not exist is looked up in `ANGLE_LLM_DATA`."""
    here, data = Path(path).expanduser(), os.environ.get(DATA_VARIABLE)
    if data and not here.exists() and not here.is_absolute() and (Path(data).expanduser() / here).exists():
        return Path(data).expanduser() / here
    return here


def _starter_file(name: str) -> Path:
    """Return the path of a data file bundled with the package. Raises `DataError` for an unknown name."""
    known = sorted(path.name for path in _STARTER_FOLDER.iterdir() if path.suffix in (".gz", ".tsv"))
    if name not in known:
        raise DataError(f"{STARTER}{name}: no such starter file. Known: {', '.join(known)}")
    return _STARTER_FOLDER / name


def _standard_input() -> Path:
    """Copy standard input to a temporary file that can be read repeatedly, and return its path.

    On Linux the file has no name, so a killed process does not leave it on disk.
    """
    descriptors = Path("/proc/self/fd")
    unnamed = descriptors.is_dir()
    copy: IO[bytes] = tempfile.TemporaryFile() if unnamed else tempfile.NamedTemporaryFile()  # noqa: SIM115
    atexit.register(copy.close)
    shutil.copyfileobj(sys.stdin.buffer, copy)
    copy.flush()
    return descriptors / str(copy.fileno()) if unnamed else Path(copy.name)


def _read_json(path: Path, key: str) -> Any:
    """Return a value of a JSON file that `save_to_disk` wrote. Raises `DataError` for a missing or damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: expected a file of save_to_disk with {key!r}, got {error}; save the dataset again"
        ) from error


# ------------------------------------------------------------------------------------------------ BEIR folders


def is_judged(folder: Path) -> bool:
    """Return whether a folder is a BEIR folder: it contains a folder `qrels` with judgements."""
    return (folder / QRELS).is_dir()


def splits_of(folder: Path) -> list[str]:
    """Return the sorted names of the splits of a BEIR folder, from its files with judgements."""
    names = {path.name.removesuffix(".gz") for path in (folder / QRELS).iterdir()}
    return sorted({_split_of(name) for name in names if name.endswith((".tsv", _ONLY_SHARD))})


def _split_of(name: str) -> str:
    """Return the split of a file with judgements: train for train.tsv.gz or train-00000-of-00001.parquet."""
    return name.removesuffix(".gz").removesuffix(".tsv").removesuffix(_ONLY_SHARD)


def _part_of(folder: Path, part: Literal["corpus", "queries", "qrels"], split: str) -> Path:
    """Return the path of a part of a BEIR folder for a split: the first existing file of those that the module lists."""
    plain = folder / (f"{part}/{split}.tsv" if part == QRELS else f"{part}.jsonl")
    paths = (plain, plain.with_name(f"{plain.name}.gz"), folder / part / f"{split}{_ONLY_SHARD}")
    return next((path for path in paths if path.is_file()), plain)


class Judgement(NamedTuple):
    """Relevance of a document to a query: a row of the judgements of a BEIR folder."""

    line: int
    """Number of the line or row in the file, from 1."""
    document: str
    """Id of the document."""
    score: float
    """Relevance of the document to the query; a document with a relevance above 0 is a positive."""


_IDS = ("query-id", "corpus-id")


def _read_judgements(path: Path, encoding: str) -> dict[str, list[Judgement]]:
    """Read the judgements of a BEIR folder, and return query id → judgements (document id and relevance).

    A Parquet file without the column `score` has relevance 1 in all rows. A repeated judgement counts once.

    Raises:
        DataError: for the first line that cannot be read, or has another score than an earlier line, with its number.
    """
    judgements: dict[str, list[Judgement]] = {}
    judgement_of: dict[tuple[str, str], Judgement] = {}
    needed = _IDS if path.suffix == ".parquet" else (*_IDS, "score")
    for row in resolve_source(path, encoding=encoding).good_rows(needed):
        query, document = (str(row.values[name]) for name in _IDS)
        value = row.values.get("score", 1)
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise DataError(f"{row.place}: score is {value!r}, expected a number")
        first = judgement_of.setdefault((query, document), Judgement(row.line, document, score))
        if first.score != score:
            raise DataError(
                f"{row.place}: query {query} and document {document} have the score {score:g} here and {first.score:g} in "
                f"{row.unit} {first.line}. Remove one of them"
            )
        if first.line == row.line:
            judgements.setdefault(query, []).append(first)
    return judgements


def _read_texts(path: Path, ids: Collection[str] | None = None, *, encoding: str = "utf-8") -> dict[str, str]:
    """Read the documents or the queries of a BEIR folder, and return id → text.

    A text is the title and the text of a row, joined by a space; the result may be empty. `ids` limits the result to
    these ids; None: all ids.

    Raises:
        DataError: if the file does not exist, a row cannot be read, or an id occurs twice.
    """
    if not path.is_file():
        raise DataError(
            f"{path.parent}: no file {path.name}; a BEIR folder has corpus.jsonl and queries.jsonl, or a Parquet file "
            "for each split in corpus/ and queries/"
        )
    known: set[str] = set()
    text_of: dict[str, str] = {}
    for row in resolve_source(path, encoding=encoding).good_rows():
        if missing := [name for name in ("_id", "text") if name not in row.values]:
            raise DataError(f"{row.place}: expected {' and '.join(missing)}; keys: {', '.join(row.values)}")
        key = str(row.values["_id"])
        if key in known:
            raise DataError(f"{row.place}: the id {key} occurs twice; remove one of the rows, or write another id")
        known.add(key)
        parts = {name: row.values.get(name) for name in ("title", "text")}
        if wrong := [name for name, part in parts.items() if not isinstance(part, str | None)]:
            raise DataError(f"{row.place}: {wrong[0]} is {parts[wrong[0]]!r:.60}, expected a text")
        if ids is None or key in ids:
            text_of[key] = " ".join(part for part in parts.values() if part).strip()
    return text_of


class JudgedQueries(FileReader):
    """Reader of a BEIR folder: a row per query of a split, with its judged documents, in the columns of Tevatron.

    The number of a row is the first line of the query in the judgements. Documents with a relevance above 0 are
    positives, other documents negatives. Queries without a positive are skipped. An evaluation reads `judgements`,
    `documents` and `queries` instead of rows.

    Raises:
        DataError: if the split does not exist.
    """

    columns = ["query_id", "query", "positive_passages", "negative_passages"]  # noqa: RUF012

    def __init__(self, folder: Path, split: str, *, encoding: str = "utf-8") -> None:
        super().__init__(_part_of(folder, "qrels", split), encoding=encoding)
        if not self.path.is_file():
            splits = splits_of(folder)
            advice = f"; splits there: {', '.join(splits)}. Name one: {folder}@{splits[0]}" if splits else ""
            raise DataError(f"{folder}: no file qrels/{split}.tsv{advice}")
        self.split = split
        self.beside = (_part_of(folder, "corpus", split), _part_of(folder, "queries", split))

    @cached_property
    def judgements(self) -> dict[str, list[Judgement]]:
        """Query id → judgements (document id and relevance) of the split."""
        return _read_judgements(self.path, self.encoding)

    def documents(self, ids: Collection[str] | None = None) -> dict[str, str]:
        """Read the documents, and return id → text, which may be empty. `ids` limits the result; None: all documents."""
        return _read_texts(self.beside[0], ids, encoding=self.encoding)

    def queries(self) -> dict[str, str]:
        """Read the judged queries, and return id → text, which may be empty."""
        return _read_texts(self.beside[1], self.judgements.keys(), encoding=self.encoding)

    @cached_property
    def _texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Two mappings: document id → text of all judged documents, and query id → text of all judged queries."""
        documents = self.documents({entry.document for entries in self.judgements.values() for entry in entries})
        if empty := sum(not text for text in documents.values()):
            _warn(f"{self.beside[0]} has {empty:,} judged documents without text, which are skipped")
        return documents, self.queries()

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        for query, judgements in self.judgements.items():
            if any(entry.score > 0 and self._texts[0].get(entry.document) != "" for entry in judgements):
                yield judgements[0].line, (query, judgements)

    def _parse(self, record: Any) -> dict[str, Any]:
        query, judgements = record
        documents, queries = self._texts
        if query not in queries:
            raise RowError(f"no query {query} in {self.beside[1]}")
        positives: list[dict[str, str]] = []
        negatives: list[dict[str, str]] = []
        for entry in judgements:
            if entry.document not in documents:
                raise RowError(f"line {entry.line}: no document {entry.document} in {self.beside[0]}")
            if text := documents[entry.document]:
                passages = positives if entry.score > 0 else negatives
                passages.append({"docid": entry.document, "text": text})
        return dict(zip(self.columns, (query, queries[query], positives, negatives), strict=True))


def documents_of(folder: Path) -> Iterator[str]:
    """Yield the texts of all documents of a BEIR folder; documents without text are skipped with a warning.

    Raises:
        DataError: for a row that cannot be read.
    """
    for path in dict.fromkeys(_part_of(folder, "corpus", split) for split in splits_of(folder) or ("",)):
        texts = _read_texts(path).values()
        yield from filter(None, texts)
        if empty := sum(not text for text in texts):
            _warn(f"{path} has {empty:,} documents without text, which are skipped")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # stdout may contain JSON
