"""Flags for reading the rows of data files, for all commands except training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from angle_llm.settings.parsing import settings_class
from angle_llm.settings.train import DataSource


@settings_class
class CommandSource(DataSource):
    """A dataset that a command other than training reads, and how its rows are read."""

    FLAGS: ClassVar[str] = "--"

    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Flags that set how the rows of data files are read."""

    format: str = "auto"
    """Format of the rows: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples, labelled_text.
    auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this."""
    score_range: tuple[float, float] | None = None
    """The score that means *unrelated* and the score that means *same meaning*, such as 0 5.
    None: 0 1."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Pairs of COLUMN VALUE. Only rows with these values are read."""
    encoding: str = "utf-8"
    """Character encoding of text files, such as utf-8 or cp1252. Output files are UTF-8."""

    def source_of(self, path: str, **more: Any) -> CommandSource:
        """Return the settings of a dataset: the path of a file, these settings, and further fields in `more`."""
        shared = {item.name: getattr(self, item.name) for item in fields(RowSettings)}
        return CommandSource(path=path, **shared, **more)
