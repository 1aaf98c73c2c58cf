"""The texts of a corpus, row by row: a text column of a data source, and optionally an id column.

A row has an index in the corpus: it counts the rows of all files from 0, bad rows included. So the index of a row does
not depend on which rows are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.data.files.beir import documents_of, is_judged, warn
from angle_llm.data.files.file_types import TextFile
from angle_llm.data.files.tables import TsvFile
from angle_llm.data.formats import DataError, RowError, read_text
from angle_llm.data.sources import BadRow, Row, Source, find_path, resolve_source

SKIP = "skip bad rows with --on-bad-row skip"
"""Advice for a bad row, in commands with this flag."""
_USUAL_COLUMNS = ("text", "sentence")


class CorpusText(NamedTuple):
    """A text of a corpus (a collection of texts to embed), with its id and its location in a file."""

    text: str
    id: str | None
    """Id of the text, from the id column; None if the corpus has no id column."""
    place: str
    """File and line of the text, for messages, such as `corpus.tsv:3`."""


class TextBlock(NamedTuple):
    """A block of consecutive rows of a corpus (a collection of texts to embed)."""

    number: int
    """Number of the block, from 0."""
    first: int
    """Index in the corpus of the first row of the block."""
    rows: list[CorpusText | BadRow]


@dataclass(frozen=True)
class Survey:
    """Row counts of a corpus (a collection of texts to embed), and sizes and hashes of its files."""

    rows: int
    """Number of rows of the corpus, including bad rows (without a usable text)."""
    files: list[dict[str, Any]]
    """Name, size and SHA-256 of every file (`Source.fingerprint`); equal values mean equal rows."""
    stamps: list[tuple[int, int]]
    """Size and modification time of every file (`Source.stamps`), to detect quickly that a file was changed."""


@dataclass(frozen=True)
class Corpus:
    """The texts in one column of a file, folder or standard input; every iteration reads the rows from the start."""

    source: Source
    column: str
    """Name of the column with the texts. A .txt file in a folder with tables always has the column `text`."""
    id_column: str | None = None
    """Name of the column with the ids of the texts; None: texts have no ids."""

    @classmethod
    def open(cls, source: str | Path, column: str | None = None, id_column: str | None = None) -> Corpus:
        """Open a file, a folder or standard input (`-`) as a corpus (a collection of texts to embed).

        Args:
            source: Any source of `resolve_source`.
            column: Name of the column with the texts. None: `text`, `sentence`, or the only column.
            id_column: Name of the column with the ids; None: texts have no ids.

        Raises:
            DataError: if the source does not exist, if a table has no column `column`, if the source has text files only
                and `column` is not `text`, or if `column` is None and several columns are possible.
        """
        rows = resolve_source(source)
        tables = [file for file in rows.files if not isinstance(file, TextFile)]
        if column not in (None, "text") and not tables:
            raise DataError(
                f"{rows.name}: expected a table, because --column {column} is set; got text, where each line is a text. Omit "
                "--column, or name a table (.csv, .tsv, .jsonl, .parquet)"
            )
        if column is None and tables:
            names = tables[0].columns
            usual = [name for name in _USUAL_COLUMNS if name in names]
            if not usual and len(names) != 1:
                raise DataError(
                    f"{tables[0].name} has the columns {', '.join(names)}. Name the column of the texts (--column), or "
                    "rename it to text."
                )
            column = (usual or names)[0]
            if not usual and isinstance(tables[0], TsvFile):
                warn(
                    f"{tables[0].name}: the first line, {column!r:.60}, is read as the name of its only column. If it is a text, "
                    "add a header line `text` before it; if it is the name, set --column"
                )
            if column == "text" and "title" in names:
                warn(
                    f"{tables[0].name}: the column title is not read. An encoder that was trained on titles and texts needs a "
                    "column with both, joined by a space"
                )
        for file in tables:
            # `columns` of a JSON file reads the whole file, so the first row is checked first.
            first = next((row for row in file.rows() if isinstance(row, Row)), None)
            if first is not None and column not in first.values and column not in file.columns:
                raise DataError(f"{file.name}: no column {column!r}; columns: {', '.join(file.columns)}")
        return cls(rows, column or _USUAL_COLUMNS[0], id_column)

    def __iter__(self) -> Iterator[CorpusText | BadRow]:
        for file in self.source.files:
            column = "text" if isinstance(file, TextFile) else self.column
            for row in file.rows():
                yield row if isinstance(row, BadRow) else self._text(row, column)

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[TextBlock]:
        """Divide the rows into blocks of `size` rows; yield the blocks whose number (from 0) `wanted` accepts.

        The last block may be shorter.
        """
        rows = iter(self)
        for number in count():
            if not (block := list(islice(rows, size))):
                return
            if wanted(number):
                yield TextBlock(number, number * size, block)

    def texts(self, indices: set[int]) -> dict[int, str]:
        """Return row index → text for the given row indices. The result omits bad rows (without a usable text)."""
        rows = enumerate(islice(self, max(indices, default=-1) + 1))
        return {index: row.text for index, row in rows if index in indices and isinstance(row, CorpusText)}

    def survey(self, *, skip_bad: bool) -> Survey:
        """Read and check every row once; return the numbers of rows and bad rows, and the state of the files.

        A bad row has no usable text.

        Raises:
            DataError: for the first bad row, with its file and line, unless `skip_bad`; if the corpus has no text; if a
                file changes during the call.
        """
        stamps = self.source.stamps()
        rows = bad = 0
        first_bad = ""
        for row in self:
            rows += 1
            if isinstance(row, BadRow):
                if not skip_bad:
                    raise bad_row(row.place, row.reason, SKIP)
                bad += 1
                first_bad = first_bad or f": {row.place}: {row.reason}"
        if rows == bad:
            raise DataError(f"{self.source.name} has no text{first_bad}")
        survey = Survey(rows, self.source.fingerprint(), stamps)
        self.check_unchanged(survey)
        return survey

    def check_unchanged(self, survey: Survey) -> None:
        """Raise `DataError` if the size or modification time of a file has changed since `survey` was made."""
        if self.source.stamps() != survey.stamps:
            raise DataError(f"{self.source.name} was changed while it was read. Start again when it is complete")

    def _text(self, row: Row, column: str) -> CorpusText | BadRow:
        """Return the text and the id of a row, or `BadRow` if the row has no usable text or id."""
        try:
            for name in (column, self.id_column):
                if name not in (None, *row.values):
                    raise RowError(f"no column {name!r}; columns: {', '.join(row.values)}")
            text = read_text(row.values, column)
            if self.id_column is None:
                return CorpusText(text, None, row.place)
            identifier = row.values[self.id_column]
            if isinstance(identifier, bool) or not isinstance(identifier, str | int):
                raise RowError(f"{self.id_column} is {identifier!r:.60}; expected a text or an integer as id")
            return CorpusText(text, read_text({self.id_column: str(identifier)}, self.id_column), row.place)
        except RowError as error:
            return BadRow(row.file, row.line, str(error), row.unit)


def corpus_texts(path: str | Path, column: str | None = None) -> Iterator[str]:
    """Yield the texts in one column of a file or folder, or the documents of a BEIR folder.

    `column` None: `text`, `sentence`, or the only column. For a BEIR folder and `column` None, a text is the title and
    the text of a document, joined by a space.

    Raises:
        DataError: for a file that cannot be read, or a row without a text.
    """
    path = find_path(str(path))
    folder = path if path.is_dir() else path.parent
    if column is None and is_judged(folder) and (path == folder or path.name.startswith("corpus.jsonl")):
        yield from documents_of(folder)
        return
    for row in Corpus.open(path, column):
        if isinstance(row, BadRow):
            raise bad_row(row.place, row.reason)
        yield row.text


def bad_row(place: str, reason: str, advice: str = "remove it") -> DataError:
    """Return a `DataError` for a corpus row without a usable text; `place` is the file and line of the row."""
    return DataError(f"{place}: {reason}. Fix the row, or {advice}")
