"""Rows of a data source: a file, a folder, standard input, a bundled starter file or a hub dataset.

All commands read data through `open_rows`. The rows can be iterated repeatedly:

    for row in open_rows("pairs.csv"):
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
| a folder | all data files, in order of path; with a `split`, the files that the library `datasets` assigns to it |
| FOLDER@NAME | the file FOLDER/NAME.*; with a `split`, also the split NAME of a dataset |
| a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, FOLDER@SPLIT | the rows of the split, or of all |
| ORG/NAME, ORG/NAME:CONFIGURATION | a dataset of the hub; only with a `split` |
| a folder with `qrels`, or FOLDER@SPLIT | the judged queries of a BEIR folder; only with `tables` |

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
from collections.abc import Collection, Iterator
from contextlib import suppress
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
    RowSource,
    StsBenchmarkFile,
    StsPartFile,
    TextFile,
    TsvFile,
    is_data_name,
)
from angle_llm.data.formats import DataError, RowError
from angle_llm.settings.parsing import similar_paths

__all__ = [
    "EXTENSIONS",
    "STANDARD_INPUT",
    "BadRow",
    "Row",
    "RowSource",
    "find_path",
    "is_data_name",
    "open_rows",
]

DATA_VARIABLE = "ANGLE_LLM_DATA"
"""Environment variable with a folder in which relative paths of datasets are searched."""
STANDARD_INPUT = "-"
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?")
"""Pattern of a hub dataset id, ORG/NAME, optionally with a configuration, ORG/NAME:CONFIGURATION."""
STARTER = "starter:"
"""Prefix of a path that names a data file bundled with the package, as in `starter:graded_pairs.tsv`."""
_STARTER_FOLDER = Path(__file__).parent / "starter"
ONLY_SHARD = "-00000-of-00001.parquet"
"""End of the name of a Parquet file in a dataset of the hub, if the split has a single file."""


def open_rows(
    source: str | Path,
    *,
    tables: bool = False,
    encoding: str = "utf-8",
    split: str | None = None,
) -> RowSource:
    """Open a file, folder, standard input or hub dataset as rows. Rows are read when the result is iterated.

    The docstring of this module lists all source types.

    Args:
        source: Path of a file or folder, `-` (standard input), `starter:NAME` (a bundled file), FOLDER@NAME, or a hub
            id.
        tables: Whether rows must have several columns: .txt files are read as tables, unknown extensions are refused.
        encoding: Encoding of text files, as Python names it.
        split: Name of the split of a dataset without @SPLIT; None: datasets are not loaded, only files.

    Raises:
        DataError: if the source does not exist, its type is unknown, or an option does not fit the type.
    """
    try:
        "".encode(encoding)
    except LookupError:
        raise DataError(
            f"encoding is {encoding!r}; expected a codec of Python, such as utf-8, cp1252 or utf-16"
        ) from None
    return _Opener(str(source), tables, encoding, split).open()


_FILE_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter"}
"""Options of a dataset configuration that do not change how its files are read here; delimiters are detected."""


class _Opener(NamedTuple):
    """The arguments of `open_rows`; the method `open` chooses the reader classes of the data source."""

    source: str
    tables: bool
    encoding: str
    split: str | None

    def open(self) -> RowSource:
        """Return the rows of the data source. Raises `DataError` as described at `open_rows`."""
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
        if path.is_dir() and (saved := self._saved(path, self.split)):
            return saved
        if path.is_dir():
            return self._folder(path) if self.split is None else self._dataset(str(path), self.split)
        if path.exists():
            return self._file(path)
        if self.split is not None and (hub_id := _HUB_ID.fullmatch(self.source)) and not is_data_name(self.source):
            return self._dataset(hub_id[1], self.split, hub_id[2])
        weight = " A weight is a plain number after a colon, such as :0.5." if ":" in self.source else ""
        hub = ", and not a hub id (org/name, or org/name:configuration)" if self.split is not None else ""
        raise DataError(f"{self.source}: no such file or folder{hub}. {similar_paths(path)}{weight}")

    def _file(self, path: Path) -> RowSource:
        """Return the rows of a single file."""
        return RowSource(str(path), [self._reader(path)], path=path)

    def _reader(self, path: Path) -> FileReader:
        """Return the reader for the type of a file: chosen by file name, for some types also by the first line."""
        packed = path.suffix.lower() == ".gz"
        extension = (path.with_suffix("") if packed else path).suffix.lower()
        if packed and f"{extension}.gz" not in EXTENSIONS and extension in FILE_TYPES:
            raise DataError(f"{path}: {extension} files are not read from .gz; unpack it")
        if self.tables and extension not in FILE_TYPES:
            raise DataError(f"{path}: unknown file name extension; known: {', '.join(FILE_TYPES)}, text files also .gz")

        def made(file_type: type[FileReader]) -> FileReader:
            return file_type(path, encoding=self.encoding)

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

    def _folder(self, folder: Path) -> RowSource:
        """Return the rows of all data files in a folder and its subfolders.

        .json files and names that start with . or _ are ignored.
        """
        paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(part.startswith((".", "_")) for part in path.parts)]
        readable = tuple(extension for extension in EXTENSIONS if extension.removesuffix(".gz") != ".json")
        files = [path for path in paths if path.name.lower().endswith(readable)]
        if not files:
            raise DataError(f"{folder}: no file in this folder ends in {', '.join(readable)}; name a file")
        ignored = [str(path) for path in paths if path not in files]
        return RowSource(str(folder), [self._reader(folder / path) for path in files], ignored, folder)

    def _judged(self, folder: Path, split: str) -> RowSource:
        """Return the rows of a BEIR folder: the queries of a split with their judged documents."""
        reader = JudgedQueries(folder, split, encoding=self.encoding)
        return RowSource(self.source, [reader], path=folder)

    def _dataset(self, path: str, split: str, configuration: str | None = None) -> RowSource:
        """Return the rows of a split of a local folder or a hub id (`path`).

        The library `datasets` names the files of a local folder. They are read here, because it reads tab-separated
        files with quoting, and cells such as NA as empty; by `datasets` if the dataset card has options for reading.
        """
        if not Path(path).is_dir():
            hint = f"It is not a local path. {similar_paths(Path(path))}"
            return RowSource(path, [DatasetReader(path, configuration, split, hint)])
        import datasets
        from datasets.data_files import DataFilesDict, get_data_patterns

        base, hint, paths = str(Path(path).resolve()), "", list[str]()
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
        lists = [
            next(reader.lines(), (0, ""))[1].lstrip()[:1] == "[" for reader in readers if isinstance(reader, JsonFile)
        ]
        if paths and len(readers) == len(set(paths)) and all(lists):
            return RowSource(path, readers, path=Path(path))
        return RowSource(path, [DatasetReader(path, None, split, hint)])

    def _saved(self, folder: Path, split: str | None) -> RowSource | None:
        """Return the rows of a folder of `save_to_disk`: of one split, or of all if `split` is None; None for other folders."""
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
        return RowSource(str(folder), [self._reader(part / name) for part, name in names], path=folder)

    def _part(self, name: str, part: str) -> RowSource:
        """Return the rows of NAME@PART: the file NAME/PART.* with a known extension, or split PART of dataset NAME."""
        folder = find_path(name)
        if not folder.is_dir():
            if self.split is not None and (hub_id := _HUB_ID.fullmatch(name)) and not is_data_name(name):
                return self._dataset(hub_id[1], part, hub_id[2])
            raise DataError(
                f"{self.source}: {name} is not a folder and not a hub id (org/name, or org/name:configuration). "
                f"{similar_paths(folder)}"
            )
        if self.tables and is_judged(folder):
            return self._judged(folder, part)
        if saved := self._saved(folder, part):
            return saved
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


# ------------------------------------------------------------------------------------------------ BEIR folders


def is_judged(folder: Path) -> bool:
    """Return whether a folder is a BEIR folder: it contains a folder `qrels` with judgements."""
    return (folder / "qrels").is_dir()


def splits_of(folder: Path) -> list[str]:
    """Return the sorted names of the splits of a BEIR folder, from its files with judgements."""
    names = {path.name.removesuffix(".gz") for path in (folder / "qrels").iterdir()}
    return sorted(
        name.removesuffix(ending) for name in names for ending in (".tsv", ONLY_SHARD) if name.endswith(ending)
    )


def part_of(folder: Path, part: Literal["corpus", "queries", "qrels"], split: str) -> Path:
    """Return the path of a part of a BEIR folder for a split: the first existing file of those that the module lists."""
    plain = folder / (f"{part}/{split}.tsv" if part == "qrels" else f"{part}.jsonl")
    paths = (plain, plain.with_name(f"{plain.name}.gz"), folder / part / f"{split}{ONLY_SHARD}")
    return next((path for path in paths if path.is_file()), plain)


class Judgement(NamedTuple):
    """Relevance of a document to a query: a row of the judgements of a BEIR folder."""

    line: int
    """Number of the line or row in the file, from 1."""
    document: str
    """Id of the document."""
    score: float
    """Relevance of the document to the query; a document with a relevance above 0 is a positive."""


def _read_json(path: Path, key: str) -> Any:
    """Return a value of a JSON file that `save_to_disk` wrote. Raises `DataError` for a missing or damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: expected a file of save_to_disk with {key!r}, got {error}; save the dataset again"
        ) from error


_IDS = ("query-id", "corpus-id")


def read_judgements(path: Path, *, encoding: str = "utf-8") -> dict[str, list[Judgement]]:
    """Read the judgements of a BEIR folder, and return query id → judgements (document id and relevance).

    A Parquet file without the column `score` has relevance 1 in all rows. A repeated judgement counts once.

    Raises:
        DataError: for the first line that cannot be read, or has another score than an earlier line, with its number.
    """
    found: dict[str, list[Judgement]] = {}
    judgement_of: dict[tuple[str, str], Judgement] = {}
    needed = _IDS if path.suffix == ".parquet" else (*_IDS, "score")
    for row in open_rows(path, encoding=encoding).good_rows(needed):
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
            found.setdefault(query, []).append(first)
    return found


def read_texts(path: Path, ids: Collection[str] | None = None, *, encoding: str = "utf-8") -> dict[str, str]:
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
    every: set[str] = set()
    found: dict[str, str] = {}
    for row in open_rows(path, encoding=encoding).good_rows():
        if missing := [name for name in ("_id", "text") if name not in row.values]:
            raise DataError(f"{row.place}: expected {' and '.join(missing)}; keys: {', '.join(row.values)}")
        key = str(row.values["_id"])
        if key in every:
            raise DataError(f"{row.place}: the id {key} occurs twice; remove one of the rows, or write another id")
        every.add(key)
        parts = {name: row.values.get(name) for name in ("title", "text")}
        if wrong := [name for name, part in parts.items() if not isinstance(part, str | None)]:
            raise DataError(f"{row.place}: {wrong[0]} is {parts[wrong[0]]!r:.60}, expected a text")
        if ids is None or key in ids:
            found[key] = " ".join(part for part in parts.values() if part).strip()
    return found


class JudgedQueries(FileReader):
    """Reader of a BEIR folder: a row per query of a split, with its judged documents, in the columns of Tevatron.

    The number of a row is the first line of the query in the judgements. Documents with a relevance above 0 are
    positives, other documents negatives. Queries without a positive are skipped.

    Raises:
        DataError: if the split does not exist.
    """

    columns = ["query_id", "query", "positive_passages", "negative_passages"]  # noqa: RUF012

    def __init__(self, folder: Path, split: str, *, encoding: str = "utf-8") -> None:
        super().__init__(part_of(folder, "qrels", split), encoding=encoding)
        if not self.path.is_file():
            found = splits_of(folder)
            advice = f"; splits there: {', '.join(found)}. Name one: {folder}@{found[0]}" if found else ""
            raise DataError(f"{folder}: no file qrels/{split}.tsv{advice}")
        self.beside = (part_of(folder, "corpus", split), part_of(folder, "queries", split))

    @cached_property
    def _judgements(self) -> dict[str, list[Judgement]]:
        """Query id → judgements (document id and relevance) of the split."""
        return read_judgements(self.path, encoding=self.encoding)

    @cached_property
    def _texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Two mappings: document id → text of all judged documents, and query id → text of all judged queries."""
        corpus, asked = self.beside
        judged = {each.document for judgements in self._judgements.values() for each in judgements}
        documents = read_texts(corpus, judged, encoding=self.encoding)
        if empty := sum(not text for text in documents.values()):
            _warn(f"{corpus} has {empty:,} judged documents without text, which are skipped")
        return documents, read_texts(asked, self._judgements.keys(), encoding=self.encoding)

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        for query, judged in self._judgements.items():
            if any(each.score > 0 and self._texts[0].get(each.document) != "" for each in judged):
                yield judged[0].line, (query, judged)

    def _parse(self, record: Any) -> dict[str, Any]:
        query, judged = record
        documents, queries = self._texts
        if query not in queries:
            raise RowError(f"no query {query} in {self.beside[1]}")
        lists: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
        for each in judged:
            if each.document not in documents:
                raise RowError(f"line {each.line}: no document {each.document} in {self.beside[0]}")
            if text := documents[each.document]:
                lists[each.score <= 0].append({"docid": each.document, "text": text})
        return dict(zip(self.columns, (query, queries[query], *lists), strict=True))


def documents_of(folder: Path) -> Iterator[str]:
    """Yield the texts of all documents of a BEIR folder; documents without text are skipped with a warning.

    Raises:
        DataError: for a row that cannot be read.
    """
    for path in dict.fromkeys(part_of(folder, "corpus", split) for split in splits_of(folder) or ("",)):
        texts = read_texts(path).values()
        yield from filter(None, texts)
        if empty := sum(not text for text in texts):
            _warn(f"{path} has {empty:,} documents without text, which are skipped")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # stdout may contain JSON
