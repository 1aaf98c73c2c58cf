"""BEIR folders: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`, each perhaps with .gz; and their judged queries as
rows.

The text of a document is its title and its text, joined by a space. Both may be blank.

A row is a query with the documents that are judged for it, in the columns of Tevatron, so that it is read as a group:
those with a score above 0 are positives, the others negatives. Blank documents are skipped. A query without a positive
is no row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.data.file_types import JsonLinesFile, TsvFile
from angle_llm.data.formats import DataError, RowError
from angle_llm.data.rows import FileReader, RowSource

_COLUMNS = ("query-id", "corpus-id", "score")


class Judgement(NamedTuple):
    """A line of `qrels/SPLIT.tsv`."""

    line: int
    document: str
    score: float


def is_judged(folder: Path) -> bool:
    """Return whether a folder has judgements."""
    return (folder / "qrels").is_dir()


def splits_of(folder: Path) -> list[str]:
    """Return the names of the judged splits of a folder."""
    names = {path.name.removesuffix(".gz") for path in (folder / "qrels").glob("*.tsv*")}
    return sorted(name.removesuffix(".tsv") for name in names if name.endswith(".tsv"))


def part_of(folder: Path, name: str) -> Path:
    """Return a file of a folder, such as `corpus.jsonl` or `qrels/test.tsv`, or the same with .gz if only that exists."""
    plain, packed = folder / name, folder / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def read_judgements(path: Path, *, encoding: str = "utf-8") -> dict[str, list[Judgement]]:
    """Return query id → its judgements.

    Raises:
        DataError: for a line that cannot be read, with its number.
    """
    found: dict[str, list[Judgement]] = {}
    for row in RowSource(str(path), [TsvFile(path, encoding=encoding)]).good_rows(_COLUMNS):
        query, document, value = (row.values[name] for name in _COLUMNS)
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise DataError(f"{row.place}: score is {value!r}, expected a number")
        found.setdefault(query, []).append(Judgement(row.line, document, score))
    return found


def read_texts(path: Path, ids: Collection[str] | None = None, *, encoding: str = "utf-8") -> dict[str, str]:
    """Return id → text of `corpus.jsonl` or `queries.jsonl`, of some ids or of all; a text may be empty.

    Raises:
        DataError: if the file does not exist; for a row that cannot be read, and an id that occurs twice.
    """
    if not path.is_file():
        raise DataError(f"{path.parent}: no file {path.name}; a BEIR folder has corpus.jsonl and queries.jsonl")
    every: set[str] = set()
    found: dict[str, str] = {}
    for row in RowSource(str(path), [JsonLinesFile(path, encoding=encoding)]).good_rows():
        if missing := [name for name in ("_id", "text") if name not in row.values]:
            raise DataError(f"{row.place}: expected {' and '.join(missing)}; keys: {', '.join(row.values)}")
        key = str(row.values["_id"])
        if key in every:
            raise DataError(f"{row.place}: the id {key} occurs twice")
        every.add(key)
        parts = {name: row.values.get(name) for name in ("title", "text")}
        if wrong := [name for name, part in parts.items() if not isinstance(part, str | None)]:
            raise DataError(f"{row.place}: {wrong[0]} is {parts[wrong[0]]!r:.60}, expected a text")
        if ids is None or key in ids:
            found[key] = " ".join(part for part in parts.values() if part).strip()
    return found


class JudgedQueries(FileReader):
    """Rows `query_id`, `query`, `positive_passages`, `negative_passages`; numbered by the first line of their query.

    Raises:
        DataError: if the split does not exist.
    """

    columns = ["query_id", "query", "positive_passages", "negative_passages"]  # noqa: RUF012

    def __init__(self, folder: Path, split: str, *, encoding: str = "utf-8") -> None:
        super().__init__(part_of(folder, f"qrels/{split}.tsv"), encoding=encoding)
        if not self.path.is_file():
            found = splits_of(folder)
            advice = f"; splits there: {', '.join(found)}. Name one: {folder}@{found[0]}" if found else ""
            raise DataError(f"{folder}: no file qrels/{split}.tsv{advice}")
        self.beside = (part_of(folder, "corpus.jsonl"), part_of(folder, "queries.jsonl"))

    @cached_property
    def _judgements(self) -> dict[str, list[Judgement]]:
        return read_judgements(self.path, encoding=self.encoding)

    @cached_property
    def _texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Judged documents and queries by id."""
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
            raise RowError(f"no query {query} in {self.beside[1].name}")
        lists: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
        for each in judged:
            if each.document not in documents:
                raise RowError(f"line {each.line}: no document {each.document} in {self.beside[0].name}")
            if text := documents[each.document]:
                lists[each.score <= 0].append({"docid": each.document, "text": text})
        return dict(zip(self.columns, (query, queries[query], *lists), strict=True))


def documents_of(folder: Path) -> Iterator[str]:
    """Yield the documents of a folder; those without text are skipped.

    Raises:
        DataError: for a row that cannot be read.
    """
    path = part_of(folder, "corpus.jsonl")
    texts = read_texts(path).values()
    yield from filter(None, texts)
    if empty := sum(not text for text in texts):
        _warn(f"{path} has {empty:,} documents without text, which are skipped")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # stdout may be JSON
