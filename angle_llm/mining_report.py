"""Report of mining: the outcome of every query and candidate, and quantiles of cosines and ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.hard_negatives import REASONS
from angle_llm.io import sha256_of

_QUANTILES = {0: "minimum", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 100: "maximum"}


def account(parts: Sequence[dict[str, Any]], out: Path, queries: int) -> dict[str, Any]:
    """Return the outcome of every query and every candidate, and quantiles of cosines and ranks.

    Raises:
        RuntimeError: if a query is unaccounted for, which is a bug.
    """
    counts: Counter[str] = Counter()
    refused = Counter(dict.fromkeys(REASONS, 0))
    for part in parts:
        counts.update(part["counts"])
        refused.update(part["refused"])
    if queries != (accounted := counts["full"] + counts["short"] + counts["without"]):
        raise RuntimeError(f"a bug in angle_llm: {accounted} of {queries} queries accounted for.")
    return {
        "queries": {
            "in": queries,
            "mined": counts["full"],
            "short": counts["short"],
            "without": counts["without"],
            "dropped": counts["dropped"],
        },
        "refused": dict(refused),
        **describe_groups(out),
    }


def describe_groups(out: Path) -> dict[str, Any]:
    """Return the counts of a file of groups, and quantiles of its cosines and ranks."""
    figures: dict[str, list[float]] = {
        "positive_cosine": [], "own_negative_cosine": [], "negative_cosine": [], "rank": [],
    }  # fmt: skip
    rows = 0
    with out.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            rows += 1
            count = len(row["positives"])
            ranks = row.get("ranks") or [None] * len(row["negatives"])
            figures["positive_cosine"] += row["scores"][:count]
            for cosine, rank in zip(row["scores"][count:], ranks, strict=True):
                figures["own_negative_cosine" if rank is None else "negative_cosine"].append(cosine)
            figures["rank"] += [rank for rank in ranks if rank is not None]
    quantiles = {
        name: dict(zip(map(str, _QUANTILES), np.percentile(values, list(_QUANTILES)).round(6).tolist(), strict=True))
        for name, values in figures.items()
        if values
    }
    return {
        "groups": {
            "rows": rows,
            "positives": len(figures["positive_cosine"]),
            "own_negatives": len(figures["own_negative_cosine"]),
            "mined_negatives": len(figures["negative_cosine"]),
            "sha256": sha256_of(out),
        },
        "quantiles": quantiles,
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the account as a table."""
    queries, groups, rules = report["queries"], report["groups"], report["identity"]["settings"]
    fewer = f" + {queries['short']:,} with fewer" if rules["negatives"] > 1 else ""
    kept = "kept" if rules["short"] == "keep" else "dropped"
    lines = [
        f"{queries['in']:,} queries = {queries['mined']:,} with {rules['negatives']} negative{'s' * (rules['negatives'] > 1)}"
        f"{fewer} + {queries['without']:,} without any ({kept}); {groups['rows']:,} groups",
        "",
        "candidates that were refused as negatives, by the first reason",
        *(f"  {reason:28}{count:12,}" for reason, count in report["refused"].items() if count),
    ]
    lines += format_quantiles(report["quantiles"])
    medians = [report["quantiles"].get(f"{name}_cosine", {}).get("50") for name in ("positive", "negative")]
    if None not in medians:
        lines += ["", f"median cosine with the query: positives {medians[0]:.3f}, mined negatives {medians[1]:.3f}"]
    return "\n".join(lines)


def format_quantiles(quantiles: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of a table of quantiles."""
    if not quantiles:
        return []
    lines = ["", f"  {'in the groups':20}" + "".join(name.rjust(9) for name in _QUANTILES.values())]
    for name, values in quantiles.items():
        digits = 0 if name == "rank" else 3
        lines.append(f"  {name:20}" + "".join(f"{value:9.{digits}f}" for value in values.values()))
    return lines
