"""A document as Markdown: tables that also read well in a terminal. A drawing is left to the page; its figures are in tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from angle_llm.evaluate.tables import markdown_table
from angle_llm.report.document import Block, Cell, Commands, Document, Figure, Folded, Notice, Paragraph, Table


def markdown(document: Document) -> str:
    """The whole file. The same document gives the same text."""
    parts = [f"# {document.title}", _prose(document.lead), "The same with plots: `docs/report.html`."]
    for section in document.sections:
        parts.append(f"## {safe(section.title)}")
        for block in section.blocks:
            parts += _block(block, "###")
    return "\n\n".join(parts) + "\n"


def safe(text: str) -> str:
    """Text that Markdown takes as it is: on one line, without markup of its own."""
    return (
        re.sub(r"([\\*<>\[\]`]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
    )


def _prose(text: str) -> str:
    """Like `safe`, but what is in backticks stays code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its pair
        return safe(text)
    return "".join(f"`{part}`" if index % 2 else _kept_ends(part) for index, part in enumerate(parts))


def _kept_ends(part: str) -> str:
    lead, tail = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
    return f"{' ' if lead else ''}{safe(part)}{' ' if tail and part.strip() else ''}"


def _block(block: Block, level: str) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield _prose(block.text)
    elif isinstance(block, Notice):
        yield f"> **{'Missing' if block.kind == 'missing' else 'Attention'}:** {_prose(block.text)}"
    elif isinstance(block, Commands):
        yield _prose(block.lead)
        yield "```bash\n" + "\n".join(" ".join(line.split()) for line in block.lines) + "\n```"
    elif isinstance(block, Table):
        yield from _table(block, level)
    elif isinstance(block, Folded):
        yield f"<details><summary>{safe(block.summary)}</summary>"
        for inner in block.blocks:
            yield from _block(inner, level)
        yield "</details>"
    elif isinstance(block, Figure):
        return


def _table(table: Table, level: str) -> Iterator[str]:
    yield f"{level} {safe(table.title)}"
    yield _prose(table.meaning)
    rows = []
    for group in table.groups:
        if group.heading:
            rows.append([f"**{safe(group.heading)}:**", *[""] * (len(table.columns) - 1)])
        rows += [[_cell(cell) for cell in row] for row in group.rows]
    yield markdown_table([safe(column) for column in table.columns], rows, table.words)
    if table.notes:
        yield "\n".join(f"- {_prose(note)}" for note in table.notes)


def _cell(cell: Cell) -> str:
    text = f"**{safe(cell.text)}**" if cell.bold else safe(cell.text)
    return f"{text} ({safe(cell.small)})" if cell.small else text
