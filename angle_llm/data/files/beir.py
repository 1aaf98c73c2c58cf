"""Rows of a BEIR folder: queries with their judged documents.

A BEIR folder contains `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv` (MTEB: `qrels/SPLIT.jsonl`), each optionally
with .gz; or, as NanoBEIR, the files SPLIT-00000-of-00001.parquet in the folders `corpus`, `queries` and `qrels`. The id of
a document or query is in the column `_id`, else in `id`. The text of a document is its title and its text, joined by a
space; both may be blank. A row is a query with its judged documents, in the columns of
Tevatron, so the row is read as a group. Documents with a score above 0 are positives, other documents negatives. Blank
documents are skipped, and so are queries without a positive.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from angle_llm.data.files.file_types import reader_of
from angle_llm.data.files.reader import FileReader
from angle_llm.data.formats import DataError, RowError

QRELS = "qrels"
"""Name of the folder with the judgements of a BEIR folder."""
_ONLY_SHARD = "-00000-of-00001.parquet"
"""End of the name of a Parquet file in a dataset of the hub, if the split has a single file."""
_JUDGEMENTS = (".tsv", ".jsonl", _ONLY_SHARD)
"""Ends of the names of files with judgements, without .gz."""
_IDS = ("query-id", "corpus-id")


def is_judged(folder: Path) -> bool:
    """Return whether a folder is a BEIR folder: it contains a folder `qrels` with judgements."""
    return (folder / QRELS).is_dir()


def splits_of(folder: Path) -> list[str]:
    """Return the sorted names of the splits of a BEIR folder, from its files with judgements."""
    names = {path.name.removesuffix(".gz") for path in (folder / QRELS).iterdir()}
    return sorted({split_of(name) for name in names if name.endswith(_JUDGEMENTS)})


def split_of(name: str) -> str:
    """Return the split of a file with judgements: train for train.tsv.gz or train-00000-of-00001.parquet."""
    name = name.removesuffix(".gz")
    return name.removesuffix(next(filter(name.endswith, _JUDGEMENTS), ""))


def _part_of(folder: Path, part: Literal["corpus", "queries", "qrels"], split: str) -> Path:
    """Return the path of a part of a BEIR folder for a split: the first existing file of those that the module lists."""
    names = [f"{part}/{split}.tsv", f"{part}/{split}.jsonl"] if part == QRELS else [f"{part}.jsonl"]
    paths = [folder / f"{name}{packed}" for name in names for packed in ("", ".gz")]
    paths.append(folder / part / f"{split}{_ONLY_SHARD}")
    return next((path for path in paths if path.is_file()), paths[0])


class Judgement(NamedTuple):
    """Relevance of a document to a query: a row of the judgements of a BEIR folder."""

    line: int
    """Number of the line or row in the file, from 1."""
    document: str
    """Id of the document."""
    score: float
    """Relevance of the document to the query; a document with a relevance above 0 is a positive."""


def _read_judgements(path: Path, encoding: str) -> dict[str, list[Judgement]]:
    """Read the judgements of a BEIR folder, and return query id → judgements (document id and relevance).

    A Parquet file without the column `score` has relevance 1 in all rows. A repeated judgement counts once.

    Raises:
        DataError: for the first line that cannot be read, or has another score than an earlier line, with its number.
    """
    judgements: dict[str, dict[str, Judgement]] = {}  # query → document → judgement
    needed = _IDS if path.suffix == ".parquet" else (*_IDS, "score")
    for row in reader_of(path, encoding=encoding).good_rows(needed):
        if not row.values.keys() >= set(needed):  # an object of JSON lines
            raise DataError(f"{row.place}: expected {', '.join(needed)}, got {row.values!r:.80}")
        query, document = (str(row.values[name]) for name in _IDS)
        score = row.number("score") if "score" in row.values else 1.0
        first = judgements.setdefault(query, {}).setdefault(document, Judgement(row.line, document, score))
        if first.score != score:
            raise DataError(
                f"{row.place}: query {query} and document {document} have the score {score:g} here and {first.score:g} in "
                f"{row.unit} {first.line}. Remove one of them"
            )
    return {query: list(judgement_of.values()) for query, judgement_of in judgements.items()}


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
    seen: set[str] = set()
    text_of: dict[str, str] = {}
    for row in reader_of(path, encoding=encoding).good_rows():
        parts = [row.values.get(name) for name in ("title", "text")]
        key_column = "_id" if "_id" in row.values else "id"
        is_complete = {key_column, "text"} <= row.values.keys()
        if not is_complete or not all(isinstance(part, str | None) for part in parts):
            raise DataError(f"{row.place}: expected _id or id, text and optionally title, got {row.values!r:.80}")
        key = str(row.values[key_column])
        if key in seen:
            raise DataError(f"{row.place}: the id {key} occurs twice; remove one of the rows, or write another id")
        seen.add(key)
        if ids is None or key in ids:
            text_of[key] = " ".join(part for part in parts if part).strip()
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
            warn(f"{self.beside[0]} has {empty:,} judged documents without text, which are skipped")
        return documents, self.queries()

    def _records(self) -> Iterator[tuple[int, Any]]:
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
            warn(f"{path} has {empty:,} documents without text, which are skipped")


def warn(text: str) -> None:
    """Print a warning to stderr, because stdout may contain JSON."""
    print(f"warning: {text}", file=sys.stderr)
