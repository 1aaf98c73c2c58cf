"""From figures to the words of a cell, and figures over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from angle_llm.report.document import Cell
from angle_llm.report.measured import Span

NOT_MEASURED = "–"
UNDEFINED = "undefined"
PLAIN = Cell(NOT_MEASURED)
SEEDS_FOR_AN_INTERVAL = 3
"""Two seeds may happen to agree."""
SPREAD = "Large: the mean over seeds ± their standard deviation, or the figure of the one seed."


def number(value: float | None, decimals: int = 2) -> str:
    """Two decimals, a true minus sign; a figure that does not exist is `undefined`."""
    return UNDEFINED if value is None else f"{value:.{decimals}f}".replace("-", "−")


def signed(value: float | None) -> str:
    """The same with its sign."""
    return UNDEFINED if value is None else f"{value:+.2f}".replace("-", "−")


def span(ends: Span | None) -> str:
    """An interval, such as 78.10–79.90; empty where there is none."""
    if ends is None or ends[0] is None or ends[1] is None:
        return ""
    separator = " to " if min(ends[0], ends[1]) < 0 else "–"
    return f"{number(ends[0])}{separator}{number(ends[1])}"


def excludes_zero(ends: Span | None) -> bool:
    """Whether a difference with this interval is surely one."""
    return ends is not None and ends[0] is not None and ends[1] is not None and (ends[0] > 0 or ends[1] < 0)


@dataclass(frozen=True)
class OverSeeds:
    """One figure of a row: a value for each seed, and an interval that is theirs on average."""

    values: tuple[float | None, ...]
    interval: Span | None = None

    @property
    def mean(self) -> float | None:
        """None where a seed has no figure: a mean over the others would be another one."""
        known = [value for value in self.values if value is not None]
        return fmean(known) if known and len(known) == len(self.values) else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the sample of seeds; None for fewer than two."""
        known = [value for value in self.values if value is not None]
        return stdev(known) if self.mean is not None and len(known) > 1 else None

    def cell(self, *, bold: bool = False) -> Cell:
        """Mean ± deviation, below it the interval."""
        spread = "" if self.deviation is None else f" ± {number(self.deviation)}"
        return Cell(number(self.mean) + spread, span(self.interval) if self.mean is not None else "", bold)


def over_seeds(figures: Sequence[tuple[float | None, Span | None]]) -> OverSeeds | None:
    """From (value, interval) of each seed; None for no seed.

    The interval's ends are means over the seeds: how far a figure hangs on the choice of test pairs, around the mean.
    """
    if not figures:
        return None
    ends = [interval for _, interval in figures if interval is not None]
    low = [end[0] for end in ends if end[0] is not None]
    high = [end[1] for end in ends if end[1] is not None]
    whole = len(low) == len(high) == len(figures)
    return OverSeeds(tuple(value for value, _ in figures), (fmean(low), fmean(high)) if whole else None)
