"""A document: sections of blocks, which `page` and `markdown` write. Texts are plain; `backticks` mark what is code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from xml.etree.ElementTree import Element


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, a second line in small print, and whether it is in bold."""

    text: str
    small: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Group:
    """Rows that belong together, under a heading of their own."""

    rows: tuple[tuple[Cell, ...], ...]
    heading: str = ""
    foreign: bool = False
    """Figures of others: told apart in every form of the document."""


@dataclass(frozen=True)
class Table:
    """A table: what its numbers mean stands in `meaning`. The first `words` columns are words, the others numbers."""

    title: str
    meaning: str
    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    words: int = 1

    def __post_init__(self) -> None:
        for group in self.groups:
            for row in group.rows:
                if len(row) != len(self.columns):
                    raise ValueError(
                        f"table {self.title!r} has {len(self.columns)} columns; a row has {len(row)} cells."
                    )


@dataclass(frozen=True)
class Figure:
    """A drawing, beside whose title stands what it shows; `alternative` says in words what one would see."""

    title: str
    meaning: str
    alternative: str
    panels: tuple[tuple[str, Element], ...]
    """Heading and drawing of each part."""
    legend: tuple[tuple[str, str], ...] = ()
    """CSS class of the mark, and its meaning."""


@dataclass(frozen=True)
class Paragraph:
    """Plain sentences."""

    text: str


@dataclass(frozen=True)
class Notice:
    """Sentences to be seen first: what is missing, or wrong."""

    text: str
    kind: Literal["missing", "problem"]


@dataclass(frozen=True)
class Commands:
    """What to type, and why."""

    lead: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Folded:
    """Blocks that are there for whoever looks for them."""

    summary: str
    blocks: tuple[Block, ...]


Block = Paragraph | Notice | Commands | Table | Figure | Folded


@dataclass(frozen=True)
class Section:
    """A part of the document with an address of its own."""

    address: str
    title: str
    blocks: tuple[Block, ...]
    short: str = ""
    """Its title in the table of contents; empty: the whole title."""


@dataclass(frozen=True)
class Document:
    """All of it."""

    title: str
    lead: str
    sections: tuple[Section, ...] = field(default=())
