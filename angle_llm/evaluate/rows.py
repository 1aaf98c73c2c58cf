"""Rows of an evaluation file, each with its place; the first bad one is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Place and values of each row of a JSONL, CSV, TSV (each also .gz) or Parquet file.

    Raises `FileNotFoundError`, or `DataError` with file and line for a row that cannot be read or a missing column.
    """
    from angle_llm.data.readers import open_rows

    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}. Needed: JSONL, CSV, TSV or Parquet with {', '.join(columns)}.")
    for row in open_rows(path, tables=True).good_rows(columns):
        yield row.place, row.values


def text_in(row: Mapping[str, object], column: str, place: str) -> str:
    """The text in a column, or `ValueError` with its place: an empty text has no vector."""
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: a text is needed in column {column}, found {text!r}.")
    return text
