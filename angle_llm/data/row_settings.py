"""Flags for reading the rows of data files, for all commands except training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from angle_llm.config import DataSource


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How the rows of data files are read."""

    format: str = "auto"
    """Meaning of a row: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples.
    auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Map of our field names to the column names of the file, where they differ and are not recognised."""
    delimiter: str | None = None
    """Column separator of CSV and TSV files. None: tab for .tsv, detected for .csv."""
    encoding: str = "utf-8"
    """Character encoding of text files, such as utf-8 or cp1252."""
    score_range: tuple[float, float] | None = None
    """Scores of two unrelated texts and of two texts with the same meaning.
    None: 0 and 1; in data check: a fitting scale."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Keep only rows whose columns equal these values."""

    def source_of(self, path: str, **more: Any) -> DataSource:
        """Return a file as a data source with these settings."""
        shared = {item.name: getattr(self, item.name) for item in fields(RowSettings)}
        return DataSource(path=path, **shared, **more)
