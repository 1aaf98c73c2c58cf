"""What plots are drawn with: a canvas as wide as its place, and axes.

Across, everything is a share of the width; down, pixels. So a drawing fits a telephone and a wide screen with letters of one
size, and needs no script. Colours are classes, which the page gives their light and dark values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from angle_llm.report.markup import Child, el, short

INSET = 1.5
"""Free on both sides of an axis, in % of the width, so that nothing at its ends is cut off."""


@dataclass(frozen=True)
class Axis:
    """Values across the width."""

    low: float
    high: float
    scale: Callable[[float], float] = float
    left: float = INSET
    """Where it starts, in % of the width."""

    def at(self, value: float) -> float:
        """Where a value lies, in % of the width; values beyond the ends lie at them."""
        low, high = self.scale(self.low), self.scale(self.high)
        share = (self.scale(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.left + share * (100 - INSET - self.left)

    def ticks(self, count: int = 5) -> list[float]:
        """About so many round values between its ends (of a linear axis)."""
        raw = (self.high - self.low) / max(count, 1)
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(index * step, 10) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    @classmethod
    def around(cls, values: Sequence[float], left: float = INSET) -> Axis:
        """A linear axis with some air around the values."""
        low, high = min(values), max(values)
        air = 0.06 * (high - low) or max(abs(high), 1.0) * 0.02
        return cls(low - air, high + air, left=left)


def canvas(height: float, alternative: str, *children: Child) -> Element:
    """A drawing as wide as its place and so many pixels high; readers of the screen hear `alternative`."""
    return el(
        "svg",
        el("title", alternative),
        *children,
        class_="plot",
        role="img",
        width="100%",
        height=height,
        aria_label=alternative,
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str = "tick") -> Element:
    """Words at x % and y pixels."""
    return el("text", words, x=f"{short(float(x))}%", y=float(y), text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """A line; x in %, y in pixels."""
    ends = {"x1": f"{short(float(x1))}%", "y1": float(y1), "x2": f"{short(float(x2))}%", "y2": float(y2)}
    return el("line", class_=class_, **ends)


def dot(x: float, y: float, radius: float, class_: str, words: str | None = None) -> Element:
    """A dot; `words` are told when the pointer rests on it."""
    title = el("title", words) if words else None
    return el("circle", title, cx=f"{short(float(x))}%", cy=float(y), r=float(radius), class_=class_)


def bar(x: float, y: float, width: float, height: float, class_: str, words: str | None = None) -> Element:
    """A rectangle; x and width in %."""
    title = el("title", words) if words else None
    place = {"x": f"{short(float(x))}%", "width": f"{short(float(width))}%", "y": float(y), "height": float(height)}
    return el("rect", title, class_=class_, **place)


def area(points: Sequence[tuple[float, float]], top: float, height: float, class_: str) -> Element:
    """A closed shape: points with x in % of the width and y in pixels below `top`, in a strip of this height."""
    path = "M" + "L".join(f"{short(float(x))} {short(float(y))}" for x, y in points) + "Z"
    shape = el("path", d=path, class_=class_, vector_effect="non-scaling-stroke")
    strip = {"viewBox": f"0 0 100 {short(float(height))}", "preserveAspectRatio": "none", "x": "0", "width": "100%"}
    return el("svg", shape, y=float(top), height=float(height), overflow="visible", aria_hidden="true", **strip)


def grid(axis: Axis, ticks: Sequence[float], top: float, bottom: float, words: Callable[[float], str]) -> list[Element]:
    """Lines down at the ticks, with their values below."""
    marks: list[Element] = []
    for value in ticks:
        x = axis.at(value)
        anchor = "start" if x < 4 else "end" if x > 96 else "middle"
        marks += [line(x, top, x, bottom, "rule"), text(x, bottom + 16, words(value), anchor=anchor)]
    return marks
