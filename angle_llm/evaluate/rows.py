"""Rows of an evaluation file, each with its place; the first bad one is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(place, row) of a JSONL, CSV, TSV (each also .gz) or Parquet file, read by `angle_llm.data`.

    Raises `FileNotFoundError`, or `ValueError` naming file and line for a row that cannot be read, and when one of
    `columns` is missing.
    """
    from angle_llm.data import DataError, DataSource, RowError
    from angle_llm.data.files import open_table

    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}. Needed: JSONL, CSV, TSV or Parquet with {', '.join(columns)}.")
    table = open_table(DataSource(path=str(path)))
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise ValueError(
            f"{path}: columns {', '.join(columns)} are needed; missing {', '.join(missing)}, found "
            f"{', '.join(table.columns)}."
        )
    for number, row in table.rows:
        place = table.place(number)
        if isinstance(row, RowError):
            raise DataError(f"{place}: {row}")
        yield place, row


def text_in(row: Mapping[str, object], column: str, place: str) -> str:
    """The text in a column, or `ValueError` with its place: an empty text has no vector."""
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: a text is needed in column {column}, found {text!r}.")
    return text
