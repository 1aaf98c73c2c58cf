"""The plots of the report, as figures of the document. Every number drawn stands in a table beside it or below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from xml.etree.ElementTree import Element

from angle_llm.report.document import Figure
from angle_llm.report.drawing import Axis, area, bar, canvas, dot, grid, line, text
from angle_llm.report.markup import el
from angle_llm.report.measured import Density, Lengths, Nested, Saturation, TextLengths
from angle_llm.report.numbers import OverSeeds, number

SERIES = 6
"""Colours of their own; the next series begin again."""


@dataclass(frozen=True)
class DotRow:
    """A line of a dot plot."""

    label: str
    figure: OverSeeds


def dots(title: str, rows: Sequence[DotRow]) -> Figure | None:
    """One line for each row: its seeds as dots, their mean as a bar, the interval as a line."""
    ends = [end for row in rows for end in row.figure.interval or () if end is not None]
    values = [value for row in rows for value in row.figure.values if value is not None]
    if not values:
        return None
    axis = Axis.around([*values, *ends])
    ticks = axis.ticks()
    parts, told = [], []
    for row in rows:
        value = row.figure.cell().text
        told.append(f"{row.label} {value}")
        rules = [line(axis.at(tick), 0, axis.at(tick), 22, "rule") for tick in ticks]
        drawing = el(
            "svg", rules, _dot_line(axis, row.figure, 11), class_="plot", width="100%", height=22, aria_hidden="true"
        )
        parts.append(el("div", el("p", row.label, " ", el("b", value)), drawing, class_="dots"))
    marks = grid(axis, ticks, 0, 4, lambda value: f"{value:g}".replace("-", "−"))
    parts.append(el("svg", marks, class_="plot", width="100%", height=24, aria_hidden="true"))
    alternative = f"{title}. {'; '.join(told)}."
    legend = [
        ("mark seed", "a seed, or an untrained backbone"),
        ("mark interval", "95 % interval over pairs, ends averaged over seeds"),
    ]
    if any(len(row.figure.values) > 1 for row in rows):
        legend.insert(1, ("mark mean", "mean of the seeds"))
    return Figure(
        title,
        "Spearman × 100; to the right is better.",
        alternative,
        (("", el("div", parts, role="img", aria_label=alternative)),),
        tuple(legend),
    )


def _dot_line(axis: Axis, figure: OverSeeds, y: float) -> list[Element]:
    parts = [line(axis.at(axis.low), y, axis.at(axis.high), y, "track")]
    if figure.interval is not None and None not in figure.interval:
        low, high = (axis.at(end) for end in figure.interval if end is not None)
        parts.append(line(low, y, high, y, "interval"))
    if figure.mean is not None and len(figure.values) > 1:
        parts.append(line(axis.at(figure.mean), y - 9, axis.at(figure.mean), y + 9, "mean"))
    parts += [dot(axis.at(value), y, 4.5, "seed", number(value)) for value in figure.values if value is not None]
    return parts


def density_figure(title: str, panels: Sequence[tuple[str, Density]]) -> Figure:
    """Ridges: for each bin of the gold score, how its pairs lie along the cosine; each ridge has area 1, so heights compare."""
    peak = max(max(_shares(row)) for _, density in panels for row in density.counts)
    low = min(_lowest(density) for _, density in panels)
    axis = Axis(low, 1.0, left=22)
    drawn = tuple((heading, _ridges(f"{title}, {heading}", density, axis, peak or 1.0)) for heading, density in panels)
    told = [
        f"{heading}: {', '.join(f'gold {gold} mean cosine {number(mean)} ({n} pairs)' for gold, n, mean in density_means(of))}"
        for heading, of in panels
    ]
    return Figure(
        title,
        "Each ridge is one range of the gold score (left, with its number of pairs; ranges without any are left out), its height "
        "the share of those pairs at a cosine; a good encoder moves the ridges apart, in order.",
        f"{title}. {'. '.join(told)}.",
        drawn,
    )


def density_means(density: Density) -> list[tuple[str, int, float]]:
    """For each gold bin that has pairs: its range, its pairs, and their mean cosine (each pair at the middle of its cosine bin).

    Binary labels lie in the first bin and the last.
    """
    middles = [(a + b) / 2 for a, b in zip(density.cosine_edges, density.cosine_edges[1:], strict=False)]
    found = []
    for index in _occupied(density):
        row, (a, b) = density.counts[index], density.gold_edges[index : index + 2]
        found.append((f"{a:g}–{b:g}", sum(row), sum(c * m for c, m in zip(row, middles, strict=True)) / sum(row)))
    return found


def _occupied(density: Density) -> list[int]:
    """The gold bins that have pairs."""
    return [index for index, row in enumerate(density.counts) if any(row)]


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


def _lowest(density: Density) -> float:
    """The lower edge of the first cosine bin that holds a pair, a little before it."""
    occupied = [index for index in range(len(density.cosine_edges) - 1) if any(row[index] for row in density.counts)]
    return max(-1.0, math.floor(10 * density.cosine_edges[min(occupied, default=0)]) / 10)


def _ridges(alternative: str, density: Density, axis: Axis, peak: float) -> Element:
    bins, step, height = _occupied(density), 40.0, 64.0
    bottom = height + step * (len(bins) - 1) + 8
    parts = grid(axis, axis.ticks(4), 8, bottom, lambda value: f"{value:g}".replace("-", "−"))
    means = density_means(density)
    for place, index in reversed(list(enumerate(bins))):  # the highest scores on top
        base = 8 + height + step * (len(bins) - 1 - place)
        shares, edges = _shares(density.counts[index]), density.cosine_edges
        outline = [(axis.at(max(axis.low, edges[0])), height)]
        for share, a, b in zip(shares, edges, edges[1:], strict=False):
            if b > axis.low:
                outline.append((axis.at((a + b) / 2), height - share / peak * height))
        outline.append((axis.at(edges[-1]), height))
        parts.append(area(outline, base - height, height, f"ridge g{min(index, 4) + 1}"))
        bin_, pairs, _ = means[place]
        parts += [text(0, base - 14, bin_, class_="name"), text(0, base, f"{pairs:,}", class_="tick")]
    parts.append(text(axis.at(1.0), bottom + 34, "cosine", anchor="end"))
    return canvas(bottom + 40, alternative, *parts)


def length_figure(lengths: Lengths) -> Figure:
    """Violins: how long the texts of each set are, on a logarithmic axis."""
    longest = max(of.quantiles.get("1.0", of.histogram.edges[-1]) for of in lengths.sets.values())
    axis = Axis(1, max(2.0, min(longest, max(of.histogram.edges[-1] for of in lengths.sets.values()))), scale=math.log)
    step, half, top = 92.0, 26.0, 6.0
    bottom = top + step * len(lengths.sets)
    ticks = [4.0**power for power in range(9) if 4.0**power <= axis.high]
    parts = grid(axis, ticks, top, bottom, lambda value: f"{value:,.0f}")
    told = []
    for index, (name, of) in enumerate(lengths.sets.items()):
        y = top + step * index
        median = of.quantiles.get("0.5")
        said = f"median {number(median, 0)}" if median is not None else ""
        told.append(f"{name}: {said}")
        parts += [text(0, y + 14, name, class_="name"), text(100, y + 14, said, anchor="end", class_="value")]
        parts.append(area(_violin(of, axis, half), y + 26, 2 * half, "ridge g3"))
        low, high = of.quantiles.get("0.05"), of.quantiles.get("0.95")
        if low is not None and high is not None:
            parts.append(line(axis.at(max(low, 1)), y + 26 + half, axis.at(max(high, 1)), y + 26 + half, "interval"))
        if median is not None:
            parts.append(dot(axis.at(max(median, 1)), y + 26 + half, 4.5, "seed", said))
    alternative = f"Text lengths in tokens. {'; '.join(told)}."
    return Figure(
        "Text lengths by set",
        "Tokens of each text, without the prompt, on a logarithmic axis; a violin is as high as texts of that length are many.",
        alternative,
        (("", canvas(bottom + 24, alternative, *parts)),),
        (("mark seed", "median"), ("mark interval", "the middle 90 % of the texts")),
    )


def _violin(of: TextLengths, axis: Axis, half: float) -> list[tuple[float, float]]:
    """Density per unit of the logarithm, mirrored, as high as the strip at its peak."""
    edges = of.histogram.edges
    bars: list[tuple[float, float]] = []
    for a, b, count in zip(edges, edges[1:], of.histogram.counts, strict=False):
        if b > 1 and (count or bars):
            low = max(a, 1)
            bars.append((math.sqrt(low * b), count / math.log(b / low)))
    while bars and not bars[-1][1]:
        bars.pop()
    peak = max((height for _, height in bars), default=0.0) or 1.0
    upper = [(axis.at(x), half - height / peak * half) for x, height in bars]
    return [*upper, *((x, 2 * half - y) for x, y in reversed(upper))]


def saturation_figure(title: str, of: Saturation) -> Figure:
    """A panel for each term: by zone of the cosine, the share of pairs behind, of the term's gradient before it."""
    highest = max(*of.pairs, *(share for shares in of.terms.values() for share in shares), 0.01)
    panels = []
    for index, (term, shares) in enumerate(of.terms.items()):
        said = f"{number(100 * of.saturated.get(term, 0.0), 1)} % of the gradient at |cosine| of 0.9 and more"
        panels.append((term, _zones(f"{title}, {term}: {said}", of, shares, highest, f"s{index % SERIES + 1}")))
    pairs = f"{number(100 * of.saturated.get('pairs', 0.0), 1)} % of the pairs lie at |cosine| of 0.9 and more"
    return Figure(
        title,
        "By zone of a pair's cosine: the share of pairs (outline) and of the term's gradient (filled). A term that saturates has "
        f"less gradient than pairs at the ends; {pairs}.",
        f"{title}. {pairs}.",
        tuple(panels),
        (("mark outline", "share of the pairs"), ("mark filled", "share of the term's gradient")),
    )


def _zones(alternative: str, of: Saturation, shares: Sequence[float], highest: float, series: str) -> Element:
    top, bottom, left, right = 10.0, 130.0, 12.0, 98.0
    width = (right - left) / len(of.pairs)
    ticks = [tick for tick in Axis(0, highest).ticks(3) if tick > 0]
    parts = []
    for tick in ticks:
        y = bottom - tick / highest * (bottom - top)
        parts += [line(left, y, right, y, "rule"), text(left - 1.5, y + 4, f"{100 * tick:g}%", anchor="end")]
    for index, (pairs, share) in enumerate(zip(of.pairs, shares, strict=True)):
        x, zone = left + width * index, f"{of.edges[index]:g} to {of.edges[index + 1]:g}"
        for value, inset, class_, what in (
            (pairs, 0.06, "outline", "pairs"),
            (share, 0.22, f"filled {series}", "gradient"),
        ):
            height = value / highest * (bottom - top)
            words = f"cosine {zone}: {number(100 * value, 1)} % of the {what}"
            parts.append(bar(x + inset * width, bottom - height, width * (1 - 2 * inset), height, class_, words))
    parts.append(line(left, bottom, right, bottom, "base"))
    for index, edge in enumerate(of.edges):
        parts.append(text(left + width * index, bottom + 16, _edge(edge), anchor="middle"))
    return canvas(bottom + 26, alternative, *parts)


def _edge(value: float) -> str:
    return f"{value:g}".replace("0.", ".").replace("-", "−")


def nested_figure(title: str, of: Nested) -> Figure | None:
    """A line for each number of layers, over the number of first dimensions kept."""
    known = [value for row in of.spearman for value in row if value is not None]
    if not known:
        return None
    top, bottom = 12.0, 250.0
    vertical = Axis.around(known)
    across = Axis(math.log2(of.dimensions[0]), math.log2(max(of.dimensions[-1], of.dimensions[0] + 1)), left=9)

    def y(value: float) -> float:
        return bottom - (value - vertical.low) / (vertical.high - vertical.low) * (bottom - top)

    parts: list[Element] = []
    for tick in vertical.ticks(5):
        parts += [line(9, y(tick), 100, y(tick), "rule"), text(7.5, y(tick) + 4, f"{tick:g}", anchor="end")]
    for dimension in of.dimensions:
        x = across.at(math.log2(dimension))
        parts.append(text(x, bottom + 16, str(dimension), anchor="end" if x > 96 else "middle"))
    for index, row in enumerate(of.spearman):
        series = f"s{index % SERIES + 1}"
        points = [(across.at(math.log2(d)), v) for d, v in zip(of.dimensions, row, strict=True) if v is not None]
        for (x1, v1), (x2, v2) in pairwise(points):
            parts.append(line(x1, y(v1), x2, y(v2), f"curve {series}"))
        parts += [dot(x, y(v), 4, f"point {series}", f"{of.layers[index]} layers: {number(v)}") for x, v in points]
    parts.append(text(98.5, bottom + 34, "first dimensions kept", anchor="end"))
    means = [fmean([v for v in row if v is not None]) for row in of.spearman if any(v is not None for v in row)]
    alternative = f"{title}. Mean over dimensions by layers: {', '.join(map(number, means))}."
    return Figure(
        title,
        "Spearman × 100 of the first dimensions of the embedding, after the first layers of the backbone; higher is better.",
        alternative,
        (("", canvas(bottom + 40, alternative, *parts)),),
        tuple((f"mark point s{i % SERIES + 1}", f"{layers} layers") for i, layers in enumerate(of.layers)),
    )
