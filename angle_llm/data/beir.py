"""Judged queries of a BEIR folder as rows: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`.

A row is a query with the documents that are judged for it, in the columns of Tevatron, so that it is read as a group:
those with a score above 0 are positives, the others negatives. A query without a positive is no row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.data.file_types import JsonLinesFile, TsvFile
from angle_llm.data.formats import DataError, RowError, read_passage
from angle_llm.data.rows import BadRow, FileReader, Row
from angle_llm.io import log

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
    return sorted(path.stem for path in (folder / "qrels").glob("*.tsv"))


class JudgedQueries(FileReader):
    """Rows `query_id`, `query`, `positive_passages`, `negative_passages`; numbered by the first line of their query.

    Raises:
        DataError: if the split does not exist.
    """

    columns = ["query_id", "query", "positive_passages", "negative_passages"]  # noqa: RUF012

    def __init__(self, folder: Path, split: str, *, encoding: str = "utf-8") -> None:
        super().__init__(folder / "qrels" / f"{split}.tsv", encoding=encoding)
        self.folder = folder
        if not self.path.is_file():
            found = splits_of(folder)
            advice = f"; splits there: {', '.join(found)}. Name one: {folder}@{found[0]}" if found else ""
            raise DataError(f"{folder}: no file qrels/{split}.tsv{advice}")
        self.beside = (_file_of(folder, "corpus"), _file_of(folder, "queries"))

    @cached_property
    def judgements(self) -> dict[str, list[Judgement]]:
        """Query id → its judgements.

        Raises:
            DataError: for a line that cannot be read, with its number.
        """
        found: dict[str, list[Judgement]] = {}
        file = TsvFile(self.path, name=self.name, encoding=self.encoding)
        if missing := [name for name in _COLUMNS if name not in file.columns]:
            raise DataError(f"{self.name}:1: expected columns {', '.join(_COLUMNS)}; missing {', '.join(missing)}")
        for row in file.rows():
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            query, document, score = (row.values[name] for name in _COLUMNS)
            try:
                found.setdefault(query, []).append(Judgement(row.line, document, float(score)))
            except ValueError:
                raise DataError(f"{row.place}: score is {score!r}, expected a number") from None
        return found

    def _by_id(self, path: Path, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the rows of a file with these ids."""
        if not path.is_file():
            raise DataError(f"{self.folder}: no file {path.name}; a BEIR folder has corpus.jsonl and queries.jsonl")
        found: dict[str, dict[str, Any]] = {}
        for row in JsonLinesFile(path, encoding=self.encoding).rows(["_id", "title", "text"]):
            if isinstance(row, BadRow):
                raise DataError(f"{row.place}: {row.reason}")
            if "_id" not in row.values:
                raise DataError(f"{row.place}: expected an _id; keys: {', '.join(row.values)}")
            key = str(row.values["_id"])
            if key in found:
                raise DataError(f"{row.place}: the id {key} occurs twice")
            if key in ids:
                found[key] = {"docid": key, "title": row.values.get("title"), "text": row.values.get("text")}
        return found

    @cached_property
    def _texts(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Judged documents and queries by id."""
        documents = {each.document for judged in self.judgements.values() for each in judged}
        return self._by_id(self.beside[0], documents), self._by_id(self.beside[1], self.judgements.keys())

    def _records(self, columns: list[str] | None) -> Iterator[tuple[int, Any]]:
        for query, judged in self.judgements.items():
            if any(each.score > 0 for each in judged):
                yield judged[0].line, (query, judged)

    def _parse(self, record: Any) -> dict[str, Any]:
        query, judged = record
        documents, queries = self._texts
        if query not in queries:
            raise RowError(f"no query {query} in {self.beside[1].name}")
        for each in judged:
            if each.document not in documents:
                raise RowError(f"line {each.line}: no document {each.document} in {self.beside[0].name}")
        return {
            "query_id": query,
            "query": queries[query]["text"],
            "positive_passages": [documents[each.document] for each in judged if each.score > 0],
            "negative_passages": [documents[each.document] for each in judged if each.score <= 0],
        }


def documents_of(folder: Path) -> Iterator[str]:
    """Yield the documents of a folder, title and text joined as in its rows; documents without text are skipped.

    Raises:
        DataError: for a row that cannot be read.
    """
    empty = 0
    path = _file_of(folder, "corpus")
    for row in JsonLinesFile(path).rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place}: {row.reason}")
        found = {name: row.values.get(name) for name in ("title", "text")}
        if not any(found.values()):
            empty += 1
            continue
        try:
            yield read_passage(found, "document")
        except RowError as error:
            raise DataError(f"{row.place}: {error}") from None
    if empty:
        log(f"warning: {path} has {empty:,} documents without text, which are skipped")


def _file_of(folder: Path, name: str) -> Path:
    paths = [folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"]
    return next((path for path in paths if path.is_file()), paths[0])


def judged_rows(folder: Path, split: str) -> Iterator[Row]:
    """Yield the rows of a split. Raises `DataError` for the first bad one."""
    for row in JudgedQueries(folder, split).rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place}: {row.reason}")
        yield row
