"""Which candidates can be the hard negatives of positive pairs. `mine` embeds the texts and writes the triples.

    examples, corpus ──► Material ──► nearest candidates of each anchor ──► guards ──► rows (anchor, positive, negative)

Legend: T distinct texts, C candidates, W candidates in the window of ranks, A anchors, P pairs, R ranks.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from angle_llm.data.positives import Material, Pair
from angle_llm.io import sha256_of
from angle_llm.search import Search, cosines, on_grid
from angle_llm.settings_io import SettingsError
from angle_llm.vectors import Array

SCORES_AT_ONCE = 10_000_000
"""Size of the arrays of cosines, of which there are half a dozen: anchors are compared in groups that keep it."""
_DIGITS = 6
_QUANTILES = {0: "least", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 100: "most"}
_FIGURES = ("positive_cosine", "negative_cosine", "rank")


@dataclass(frozen=True, kw_only=True)
class NegativeRules:
    """Which candidates become negatives of a pair."""

    ranks: tuple[int, int | None] = (10, 50)
    """First and last rank that is used, 1 the candidate nearest to the anchor; the nearest are often unlabelled
    paraphrases. None as the last: all."""
    margin: float | None = None
    """A negative's cosine must be below its positive's by more than this. None: no bound."""
    relative_margin: float | None = 0.05
    """A negative's cosine must be below its positive's by more than this share of it: 0.05 is below 95 % of it, the
    best of the positive-aware rules in NV-Retriever (arXiv 2407.15831). None: no bound."""
    max_score: float | None = None
    """Largest cosine of a negative."""
    min_score: float | None = None
    """Smallest cosine of a negative."""
    same_cluster: Literal["refuse", "allow"] = "refuse"
    """Texts that positive pairs link, over any number of steps, are a cluster:
    whether a negative may be of the cluster of its anchor."""
    negatives: int = 1
    """Negatives per pair; each makes a triple."""
    sampling: Literal["top", "random"] = "top"
    """Of the candidates that are left: the nearest, or random ones."""
    seed: int = 42
    """Seed of --sampling random."""
    short: Literal["keep", "drop"] = "keep"
    """Pairs with fewer negatives than requested: keep those there are, or drop the pair."""
    block_pairs: int = 1024
    """Pairs mined at a time; at most this many are mined again after a kill."""
    block_candidates: int = 8192
    """Candidates in memory at a time."""

    def __post_init__(self) -> None:
        first, last = self.ranks
        if first < 1 or (last is not None and last < first):
            raise SettingsError(f"--ranks needs a first and a last rank, from 1, such as 10 50; got {first} {last}.")
        if last is not None and self.negatives > (ranks := last - first + 1):
            raise SettingsError(
                f"--negatives {self.negatives} is more than the {ranks} ranks of --ranks {first} {last}."
            )
        for name, least in (("negatives", 1), ("block_pairs", 1), ("block_candidates", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
        for name in ("margin", "relative_margin", "max_score", "min_score"):
            if not math.isfinite(bound := getattr(self, name) or 0):
                raise SettingsError(f"--{name.replace('_', '-')} must be finite, got {bound}.")

    def check_candidates(self, count: int) -> None:
        """Raise `SettingsError` if the ranks need more candidates than there are."""
        first, last = self.ranks
        if (needed := last or first + self.negatives - 1) > count:
            raise SettingsError(
                f"--ranks {first} {last} needs at least {needed:,} candidates, and there are {count:,}. Lower the ranks, or give "
                "a larger --corpus."
            )


# --- guards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Candidates for the negative of one pair, nearest first."""

    anchor: int
    positive: int
    positive_cosine: float
    text_W: Array
    """Text numbers."""
    cosine_W: Array
    """With the anchor."""
    rank_W: Array
    """Among all candidates, from 1."""

    def where(self, kept_W: Array) -> Window:
        """Return some of the candidates, by mask or position."""
        return replace(self, text_W=self.text_W[kept_W], cosine_W=self.cosine_W[kept_W], rank_W=self.rank_W[kept_W])


Judge = Callable[[int, Array], Array]
"""The cosines (W,) of a text with others, all by number, from the second encoder."""
Guard = Callable[[Window], Array]
"""The candidates (W,) that are refused, as a mask."""

REASONS = (
    "the anchor itself", "a positive of it", "known from another row", "of its cluster", "above --max-score",
    "below --min-score", "within --margin", "within --relative-margin", "the judge disagrees",
)  # fmt: skip
"""Why a candidate is refused, in the order of the guards; each is counted under its first reason."""


def make_guards(material: Material, rules: NegativeRules, judge: Judge | None = None) -> dict[str, Guard]:
    """Return the guards of the settings by reason, in the order of `REASONS`. Texts are compared by near key."""
    key_T, cluster_T = material.key_T, material.cluster_T

    def is_among(neighbours: dict[int, set[int]], window: Window) -> Array:
        return np.isin(key_T[window.text_W], list(neighbours.get(int(key_T[window.anchor]), ())))

    def is_doubted(window: Window) -> Array:
        assert judge is not None
        cosine_W1 = judge(window.anchor, np.append(window.text_W, window.positive))
        found: Array = cosine_W1[:-1] >= cosine_W1[-1]
        return found

    def is_near_positive(window: Window, margin: float) -> Array:
        return window.cosine_W >= window.positive_cosine - margin

    highest, lowest, margin, share = rules.max_score, rules.min_score, rules.margin, rules.relative_margin
    guards: list[tuple[object, Guard]] = [
        (True, lambda window: key_T[window.text_W] == key_T[window.anchor]),
        (True, lambda window: is_among(material.positives, window)),
        (True, lambda window: is_among(material.known, window)),
        (rules.same_cluster == "refuse" or None, lambda window: cluster_T[window.text_W] == cluster_T[window.anchor]),
        (highest, lambda window: window.cosine_W > highest),
        (lowest, lambda window: window.cosine_W < lowest),
        (margin, lambda window: is_near_positive(window, margin or 0)),
        (share, lambda window: is_near_positive(window, (share or 0) * abs(window.positive_cosine))),
        (judge, is_doubted),
    ]
    return {reason: guard for reason, (setting, guard) in zip(REASONS, guards, strict=True) if setting is not None}


# --- selection --------------------------------------------------------------------------------------------------------


class MinedPart(NamedTuple):
    """Triples and counts of some pairs, as plain JSON values."""

    rows: list[dict[str, Any]]
    """Triples, as they are written."""
    counts: dict[str, int]
    """Pairs: full, short and without negatives; dropped of the short ones."""
    refused: dict[str, int]
    """Candidates by reason."""


@dataclass(frozen=True)
class Miner:
    """Finds the negatives of pairs; those of a pair do not depend on other pairs."""

    material: Material
    rules: NegativeRules
    vectors: Array
    """(T, D), in memory or mapped from disk."""
    search: Search
    """Among `material.candidates_C`."""
    judge_vectors: Array | None = None

    @property
    def parts(self) -> int:
        """Number of parts of `block_pairs` pairs."""
        return -(-len(self.material.pairs) // self.rules.block_pairs)

    def part(self, number: int) -> MinedPart:
        """Mine the pairs of a part."""
        rules, size = self.rules, self.rules.block_pairs
        pairs = self.material.pairs[number * size : (number + 1) * size]
        guards = make_guards(self.material, rules, None if self.judge_vectors is None else self._judge)
        part = MinedPart([], {"full": 0, "short": 0, "without": 0, "dropped": 0}, dict.fromkeys(REASONS, 0))
        for pair, window in self._windows(pairs):
            for reason, guard in guards.items():
                refused_W = guard(window)
                part.refused[reason] += int(refused_W.sum())
                window = window.where(~refused_W)
            taken = window.where(_sampled(len(window.text_W), rules, pair.example))
            found = len(taken.text_W)
            outcome = "full" if found == rules.negatives else "short" if found else "without"
            part.counts[outcome] += 1
            if outcome == "short" and rules.short == "drop":
                part.counts["dropped"] += 1
            else:
                part.rows.extend(self._rows(pair, taken))
        return part

    def _windows(self, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Window]]:
        candidates_C = self.material.candidates_C
        first, last = self.rules.ranks[0], self.rules.ranks[1] or len(candidates_C)
        size = max(1, SCORES_AT_ONCE // (last + min(len(candidates_C), self.rules.block_candidates)))
        for start in range(0, len(pairs), size):
            some = pairs[start : start + size]
            anchors, row_P = np.unique([pair.anchor for pair in some], return_inverse=True)
            anchor_AD = on_grid(self.vectors[anchors])
            position_AR, cosine_AR = self.search(anchor_AD, last)
            positive_PD = on_grid(self.vectors[[pair.positive for pair in some]])
            positive_cosine_P = cosines(anchor_AD[row_P], positive_PD).tolist()
            for pair, row, positive_cosine in zip(some, row_P, positive_cosine_P, strict=True):
                text_W, cosine_W = candidates_C[position_AR[row, first - 1 :]], cosine_AR[row, first - 1 :]
                ranks = np.arange(first, last + 1)
                yield pair, Window(pair.anchor, pair.positive, positive_cosine, text_W, cosine_W, ranks)

    def _rows(self, pair: Pair, taken: Window) -> Iterator[dict[str, Any]]:
        texts = self.material.texts
        own: dict[str, Any] = {}
        if pair.own_negatives:
            own["own_negative"], *others = pair.own_negatives  # one text: training can read the column
            own |= {"other_own_negatives": others} if others else {}
        for text, cosine, rank in zip(taken.text_W, taken.cosine_W, taken.rank_W, strict=True):
            yield {
                "anchor": texts[pair.anchor],
                "positive": texts[pair.positive],
                "negative": texts[int(text)],
                **own,
                "rank": int(rank),
                "positive_cosine": round(taken.positive_cosine, _DIGITS),
                "negative_cosine": round(float(cosine), _DIGITS),
                "example": pair.example,
                "negative_text": int(text),
            }

    def _judge(self, anchor: int, text_W: Array) -> Array:
        assert self.judge_vectors is not None
        return cosines(on_grid(self.judge_vectors[[anchor]]), on_grid(self.judge_vectors[text_W]))


def _sampled(count: int, rules: NegativeRules, example: int) -> Array:
    """Return the positions of the negatives among `count` candidates: the first, or random ones in order.

    Sorted by random(), the one generator that gives the same numbers in every version of Python.
    """
    if rules.sampling == "top":
        return np.arange(min(rules.negatives, count))
    generator = random.Random(rules.seed * 2**64 + example)
    keys = [generator.random() for _ in range(count)]
    return np.array(sorted(sorted(range(count), key=keys.__getitem__)[: rules.negatives]), dtype=np.int64)


# --- account ----------------------------------------------------------------------------------------------------------


def account(parts: Sequence[dict[str, Any]], out: Path, pairs: int) -> dict[str, Any]:
    """Return the outcome of every pair and every candidate, and quantiles of cosines and ranks.

    Raises:
        RuntimeError: if a pair is unaccounted for, which is a bug.
    """
    counts: Counter[str] = Counter()
    refused = Counter(dict.fromkeys(REASONS, 0))
    for part in parts:
        counts.update(part["counts"])
        refused.update(part["refused"])
    if pairs != (accounted := counts["full"] + counts["short"] + counts["without"]):
        raise RuntimeError(f"a bug in angle_llm: {accounted} of {pairs} pairs accounted for.")
    with out.open(encoding="utf-8") as lines:
        figures = np.array([[row[name] for name in _FIGURES] for row in map(json.loads, lines)])
    quantiles = {}
    if len(figures):
        found = np.percentile(figures, list(_QUANTILES), axis=0).round(6).T.tolist()
        quantiles = {
            name: dict(zip(map(str, _QUANTILES), one, strict=True)) for name, one in zip(_FIGURES, found, strict=True)
        }
    return {
        "pairs": {
            "in": pairs,
            "mined": counts["full"],
            "short": counts["short"],
            "short_dropped": counts["dropped"],
            "without": counts["without"],
        },
        "refused": dict(refused),
        "triples": {"rows": len(figures), "sha256": sha256_of(out)},
        "quantiles": quantiles,
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the account as a table."""
    pairs, rules = report["pairs"], report["identity"]["settings"]
    kept = "kept" if rules["short"] == "keep" else "dropped"
    fewer = f" + {pairs['short']:,} with fewer ({kept})" if rules["negatives"] > 1 else ""
    lines = [
        f"{pairs['in']:,} pairs = {pairs['mined']:,} with {rules['negatives']} negative{'s' * (rules['negatives'] > 1)}"
        f"{fewer} + {pairs['without']:,} without; {report['triples']['rows']:,} triples",
        "",
        "candidates refused, by the first reason",
        *(f"  {reason:28}{count:12,}" for reason, count in report["refused"].items() if count),
    ]
    if report["quantiles"]:
        lines += ["", f"  {'of the triples':18}" + "".join(name.rjust(9) for name in _QUANTILES.values())]
    for name, values in report["quantiles"].items():
        digits = 0 if name == "rank" else 3
        lines.append(f"  {name:18}" + "".join(f"{value:9.{digits}f}" for value in values.values()))
    return "\n".join(lines)
