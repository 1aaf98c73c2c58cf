"""Elements of HTML and SVG, escaped by the standard library."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str | Iterable["Child"] | None


def el(tag: str, *children: Child, **attributes: object) -> Element:
    """An element. `class_` is the attribute class, `stroke_width` is stroke-width; an attribute None is left out."""
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), value if isinstance(value, str) else short(value))
    _add(element, children)
    return element


def short(value: object) -> str:
    """A number in few characters: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def html(element: Element) -> str:
    """The element as HTML, SVG in it included. The same element gives the same text."""
    return ElementTree.tostring(element, encoding="unicode", method="html")


def _add(element: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            element.append(child)
        elif isinstance(child, str):
            _add_text(element, child)
        else:
            _add(element, child)


def _add_text(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
