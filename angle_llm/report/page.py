"""A document as one HTML page: no script, nothing fetched, every text escaped by the standard library."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from xml.etree.ElementTree import Element

from angle_llm.report.document import (
    Block,
    Cell,
    Commands,
    Document,
    Figure,
    Folded,
    Group,
    Notice,
    Paragraph,
    Section,
    Table,
)
from angle_llm.report.markup import Child, el, html

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Even if something slipped in, a browser would fetch nothing and run nothing."""


SHORT = 12
"""Words of so few characters stay on one line."""


def page(document: Document) -> str:
    """The whole page. The same document gives the same text."""
    numbers = count(1)
    style = files("angle_llm.report").joinpath("style.css").read_text(encoding="utf-8")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("title", document.title),
        el("style", style),
    )
    contents = [
        el("li", el("a", section.short or section.title, href=f"#{section.address}")) for section in document.sections
    ]
    body = el(
        "body",
        el("a", "Skip to the figures", href="#main", class_="skip"),
        el("header", el("h1", document.title), el("p", _prose(document.lead), class_="lead")),
        el("nav", el("h2", "Contents", id="contents"), el("ol", contents), aria_labelledby="contents"),
        el("main", (_section(section, numbers) for section in document.sections), id="main"),
        el(
            "footer",
            el("p", _prose("Made by `make report` from `docs/results`. The same figures as text: `docs/RESULTS.md`.")),
        ),
    )
    return f"<!doctype html>\n{html(el('html', head, body, lang='en'))}\n"


def _section(section: Section, numbers: Iterator[int]) -> Element:
    heading = f"{section.address}-title"
    inner = (_block(block, numbers) for block in section.blocks)
    return el("section", el("h2", section.title, id=heading), inner, id=section.address, aria_labelledby=heading)


def _block(block: Block, numbers: Iterator[int]) -> Element:
    if isinstance(block, Paragraph):
        return el("p", _prose(block.text))
    if isinstance(block, Notice):
        word = "Missing" if block.kind == "missing" else "Attention"
        return el("p", el("strong", f"{word}: "), _prose(block.text), class_=f"notice {block.kind}", role="note")
    if isinstance(block, Commands):
        lines = "\n".join(" ".join(line.split()) for line in block.lines)
        code = el("pre", el("code", lines), tabindex="0", role="region", aria_label="commands")
        return el("div", el("p", _prose(block.lead)), code, class_="commands")
    if isinstance(block, Folded):
        return el("details", el("summary", block.summary), (_block(inner, numbers) for inner in block.blocks))
    if isinstance(block, Table):
        return _table(block, f"table-{next(numbers)}")
    return _figure(block)


def _table(table: Table, name: str) -> Element:
    columns = [
        el("th", _breakable(column) or "\u00a0", scope="col", class_=None if index < table.words else "number")
        for index, column in enumerate(table.columns)
    ]
    caption = el("figcaption", el("strong", table.title, id=name), " ", el("span", _prose(table.meaning)))
    whole = el(
        "table", el("thead", el("tr", columns)), (_group(group, table) for group in table.groups), aria_labelledby=name
    )
    notes = el("ul", (el("li", _prose(note)) for note in table.notes), class_="notes") if table.notes else None
    scrolling = el("div", whole, class_="scroll", role="region", tabindex="0", aria_labelledby=name)
    return el("figure", caption, scrolling, notes, class_="table")


def _group(group: Group, table: Table) -> Element:
    heading = None
    if group.heading:
        words = el("span", group.heading, class_="stay")
        heading = el("tr", el("th", words, scope="rowgroup", colspan=len(table.columns)), class_="heading")
    rows = (el("tr", (_cell(cell, index, table) for index, cell in enumerate(row))) for row in group.rows)
    return el("tbody", heading, rows, class_="foreign" if group.foreign else None)


def _cell(cell: Cell, index: int, table: Table) -> Element:
    words: list[Child] = [el("strong", cell.text) if cell.bold else cell.text]
    words += [el("small", cell.small)] if cell.small else []
    if index == 0:
        return el("th", words, scope="row")
    return el("td", words, class_="number" if index >= table.words else "short" if len(cell.text) <= SHORT else None)


def _figure(figure: Figure) -> Element:
    caption = el("figcaption", el("strong", figure.title), " ", el("span", figure.meaning))
    marks = [el("li", el("i", class_=class_, aria_hidden="true"), words) for class_, words in figure.legend]
    legend = el("ul", marks, class_="legend") if marks else None
    panels = [
        el("div", el("p", heading, class_="panel") if heading else None, drawing) for heading, drawing in figure.panels
    ]
    many = len(panels) > 1
    return el("figure", caption, legend, el("div", panels, class_="panels" if many else None), class_="drawing")


def _breakable(words: str) -> list[Child]:
    """The name of a setting may go on in the next line after each of its full stops."""
    first, *rest = words.split(".")
    return [first, *((".", el("wbr"), part) for part in rest)] if words else []


def _prose(text: str) -> list[Child]:
    """Text in which what is in backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its pair
        return [text]
    return [el("code", part) if index % 2 else part for index, part in enumerate(parts)]
