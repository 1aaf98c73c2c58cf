"""What is told at the end: how many pairs got what, whom the guards refused, and how the cosines lie."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from angle_llm.mining.guards import GUARDS
from angle_llm.mining.selection import Part

_QUANTILES = (0, 5, 25, 50, 75, 95, 100)
_FIGURES = ("positive_cosine", "negative_cosine", "rank")


class Account:
    """Counts parts as they pass."""

    def __init__(self, pairs: int, negatives: int) -> None:
        self.pairs = pairs
        self.negatives = negatives
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.figures: dict[str, list[float]] = {name: [] for name in _FIGURES}
        self._digest = hashlib.sha256()

    def lines(self, parts: Iterable[Part]) -> Iterator[bytes]:
        """The lines of the file, counted."""
        for part in parts:
            self.counts.update(part["counts"])
            self.refused.update(part["refused"])
            for row in part["rows"]:
                for name, values in self.figures.items():
                    values.append(row[name])
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                self._digest.update(line)
                yield line

    def report(self) -> dict[str, Any]:
        """All of it, as plain JSON values.

        Raises:
            RuntimeError: if a pair is unaccounted for, which is a bug.
        """
        counts = self.counts
        if self.pairs != (accounted := counts["full"] + counts["short"] + counts["without"]):
            raise RuntimeError(f"a bug in angle_llm: {accounted} of {self.pairs} pairs accounted for.")
        return {
            "pairs": {
                "in": self.pairs,
                "mined": counts["full"],
                "short": counts["short"],
                "short_left_out": counts["left out"],
                "without": counts["without"],
            },
            "refused": {reason: self.refused[reason] for reason in GUARDS},
            "triples": {"rows": len(self.figures["rank"]), "sha256": self._digest.hexdigest()},
            "quantiles": {
                name: dict(zip(map(str, _QUANTILES), np.percentile(values, _QUANTILES).round(6).tolist(), strict=True))
                for name, values in self.figures.items()
                if values
            },
        }


def shown(report: dict[str, Any]) -> str:
    """The report as a table."""
    pairs, triples, job = report["pairs"], report["triples"], report["job"]
    negatives, short = job["settings"]["negatives"], job["settings"]["short"]
    fewer = f" + {pairs['short']:,} with fewer ({'kept' if short == 'keep' else 'left out'})" if negatives > 1 else ""
    lines = [
        f"{pairs['in']:,} pairs = {pairs['mined']:,} with {negatives} negative{'s' * (negatives > 1)}{fewer} + "
        f"{pairs['without']:,} without; {triples['rows']:,} triples",
        "",
        "candidates refused, by the first reason",
        *(f"  {reason:28}{count:12,}" for reason, count in report["refused"].items() if count),
    ]
    if report["quantiles"]:
        columns = "".join(
            {"0": "least", "50": "median", "100": "most"}.get(name, f"{name} %").rjust(9) for name in _names()
        )
        lines += ["", f"  {'of the triples':18}{columns}"]
        for name, values in report["quantiles"].items():
            digits = 0 if name == "rank" else 3
            lines.append(f"  {name:18}" + "".join(f"{value:9.{digits}f}" for value in values.values()))
    return "\n".join(lines)


def _names() -> list[str]:
    return [str(quantile) for quantile in _QUANTILES]
