"""Flags for reading the rows of data files, for all commands except training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from angle_llm.config import DataSource
from angle_llm.settings_io import settings_class


@settings_class
class _CommandSource(DataSource):
    """One dataset of a command other than training."""

    FLAGS: ClassVar[str] = "--"


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How the rows of data files are read."""

    format: str = "auto"
    """Meaning of a row: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples.
    auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this."""
    delimiter: str | None = None
    """Column separator of CSV and TSV files. None: tab for .tsv, detected for .csv."""
    encoding: str = "utf-8"
    """Character encoding of text files, such as utf-8 or cp1252."""
    score_range: tuple[float, float] | None = None
    """The score that means *unrelated* and the score that means *same meaning*, such as 0 5.
    None: 0 1; in data check, a scale that fits the file."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Pairs of COLUMN VALUE: only rows with these values are read."""

    def source_of(self, path: str, **more: Any) -> DataSource:
        """Return a file as a data source with these settings."""
        shared = {item.name: getattr(self, item.name) for item in fields(RowSettings)}
        return _CommandSource(path=path, **shared, **more)
