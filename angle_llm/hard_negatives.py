"""Which candidates can be the hard negatives of a query. `mine` writes the groups.

    examples, corpus ──► Material ──► nearest candidates of each query ──► guards ──► groups (query, positives, negatives)

Legend: T distinct texts, C candidates, W candidates in the window of ranks, Q queries, R ranks, O own texts of queries.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from angle_llm.data.positives import Material, Query
from angle_llm.search import Search, cosines, on_grid
from angle_llm.settings_io import Finite, NonNegative, Positive, SettingsError
from angle_llm.text_vectors import TextVectors
from angle_llm.vectors import Array

SCORES_AT_ONCE = 10_000_000
"""Size of the arrays of cosines, of which there are half a dozen: queries are compared in groups that keep it."""
_DIGITS = 6
_FIRST_RANK = 10
"""First default rank in a large pool; the nearest candidates are often unlabelled paraphrases."""
_POOL_PER_RANK = 1000
"""Candidates for each rank that the default omits."""
_WINDOW = 40


@dataclass(frozen=True, kw_only=True)
class NegativeRules:
    """Which candidates become negatives of a query."""

    ranks: tuple[int, int | None] | None = None
    """First and last rank that is used, 1 the candidate nearest to the query; the nearest are often unlabelled
    paraphrases. None as the last: to the end. Not set: by the number of candidates, from 1 41 to 10 50 for 9,000 or
    more."""
    margin: Finite | None = None
    """The cosine of a negative must be below the cosine of every positive by more than this. None: no bound."""
    relative_margin: Finite | None = 0.05
    """The cosine of a negative must be below the cosine of every positive by more than this share: with 0.05, below 95 % of
    it, the best of the positive-aware rules in NV-Retriever (arXiv 2407.15831). None: no bound."""
    max_score: Finite | None = None
    """Largest cosine of a negative."""
    min_score: Finite | None = None
    """Smallest cosine of a negative."""
    same_cluster: Literal["refuse", "allow"] = "refuse"
    """Whether a negative may be of the cluster of its query. A cluster is all texts that positive pairs link, over any number
    of pairs."""
    negatives: Positive = 1
    """Negatives to mine per query."""
    sampling: Literal["top", "random"] = "top"
    """Which of the candidates that pass all rules are used: the nearest, or random candidates."""
    seed: NonNegative = 42
    """Seed of --sampling random."""
    short: Literal["keep", "drop"] = "keep"
    """What to do with a query that gets fewer negatives than requested, or none: keep it, or drop it."""
    block_queries: Positive = 1024
    """Queries mined at a time; at most this many are mined again after a kill."""
    block_candidates: Positive = 8192
    """Candidates in memory at a time."""

    def __post_init__(self) -> None:
        if self.ranks is not None:
            first, last = self.ranks
            if first < 1 or (last is not None and last < first):
                raise SettingsError(
                    f"--ranks needs a first and a last rank, from 1, such as 10 50; got {first} {last}."
                )
            if last is not None and self.negatives > (ranks := last - first + 1):
                raise SettingsError(
                    f"--negatives {self.negatives} is more than the {ranks} ranks of --ranks {first} {last}."
                )

    def ranks_of(self, count: int) -> tuple[int, int]:
        """Return the first and the last rank for a number of candidates."""
        if self.ranks is not None:
            return self.ranks[0], self.ranks[1] or count
        first = min(_FIRST_RANK, 1 + count // _POOL_PER_RANK)
        return first, min(count, first + max(_WINDOW, _WINDOW // 10 * self.negatives))

    def check_candidates(self, count: int) -> str | None:
        """Return a warning if the ranks suit a larger number of candidates.

        Raises:
            SettingsError: if the ranks need more candidates than there are.
        """
        first, last = self.ranks_of(count)
        if (needed := max(last, first + self.negatives - 1)) > count:
            named = f"--negatives {self.negatives}" if self.ranks is None else f"--ranks {first} {last}"
            raise SettingsError(
                f"{named} needs at least {needed:,} candidates, and there are {count:,}. Lower it, or give a larger --corpus."
            )
        if (first - 1) * 100 <= count:
            return None
        low, high = replace(self, ranks=None).ranks_of(count)
        return (
            f"warning: --ranks {first} {last} suits a larger pool: it omits the nearest {first - 1} of {count:,} candidates, so "
            f"the negatives are easy. Omit --ranks, or set --ranks {low} {high}"
        )


# --- guards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Candidates for the negatives of one query, nearest first."""

    query: int
    positives: tuple[int, ...]
    positive_cosine: float
    """The least of its positives."""
    text_W: Array
    """Text numbers."""
    cosine_W: Array
    """With the query."""
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
    "the query itself", "a positive of the query", "known from another row", "of the query's cluster", "above --max-score",
    "below --min-score", "within --margin", "within --relative-margin", "the judge disagrees",
)  # fmt: skip
"""Why a candidate is refused, in the order of the guards; each is counted under its first reason."""


def make_guards(material: Material, rules: NegativeRules, judge: Judge | None = None) -> dict[str, Guard]:
    """Return the guards of the settings by reason, in the order of `REASONS`. Texts are compared by near key."""
    key_T, cluster_T = material.key_T, material.cluster_T

    def is_among(neighbours: dict[int, set[int]], window: Window) -> Array:
        return np.isin(key_T[window.text_W], list(neighbours.get(int(key_T[window.query]), ())))

    def is_doubted(window: Window) -> Array:
        assert judge is not None
        count = len(window.text_W)
        cosines_of_all = judge(window.query, np.append(window.text_W, window.positives))
        found: Array = cosines_of_all[:count] >= cosines_of_all[count:].min()
        return found

    def is_near_positive(window: Window, margin: float) -> Array:
        return window.cosine_W >= window.positive_cosine - margin

    highest, lowest, margin, share = rules.max_score, rules.min_score, rules.margin, rules.relative_margin
    guards: list[tuple[object, Guard]] = [
        (True, lambda window: key_T[window.text_W] == key_T[window.query]),
        (True, lambda window: is_among(material.positives, window)),
        (True, lambda window: is_among(material.known, window)),
        (rules.same_cluster == "refuse" or None, lambda window: cluster_T[window.text_W] == cluster_T[window.query]),
        (highest, lambda window: window.cosine_W > highest),
        (lowest, lambda window: window.cosine_W < lowest),
        (margin, lambda window: is_near_positive(window, margin or 0)),
        (share, lambda window: is_near_positive(window, (share or 0) * abs(window.positive_cosine))),
        (judge, is_doubted),
    ]
    return {reason: guard for reason, (setting, guard) in zip(REASONS, guards, strict=True) if setting is not None}


# --- selection --------------------------------------------------------------------------------------------------------


class MinedPart(NamedTuple):
    """Groups and counts of some queries, as plain JSON values."""

    rows: list[dict[str, Any]]
    """Groups, as they are written."""
    counts: dict[str, int]
    """Queries: full, short and without mined negatives; dropped of the last two."""
    refused: dict[str, int]
    """Candidates by reason."""


@dataclass(frozen=True)
class Miner:
    """Finds the negatives of queries; those of a query do not depend on other queries."""

    material: Material
    rules: NegativeRules
    vectors: TextVectors
    search: Search
    """Among `material.candidates_C`."""
    judge_vectors: TextVectors | None = None

    @property
    def parts(self) -> int:
        """Number of parts of `block_queries` queries."""
        return -(-len(self.material.queries) // self.rules.block_queries)

    def part(self, number: int) -> MinedPart:
        """Mine the queries of a part."""
        rules, size = self.rules, self.rules.block_queries
        queries = self.material.queries[number * size : (number + 1) * size]
        guards = make_guards(self.material, rules, None if self.judge_vectors is None else self._judge)
        part = MinedPart([], {"full": 0, "short": 0, "without": 0, "dropped": 0}, dict.fromkeys(REASONS, 0))
        for query, window, own_cosines in self._windows(queries):
            for reason, guard in guards.items():
                refused_W = guard(window)
                part.refused[reason] += int(refused_W.sum())
                window = window.where(~refused_W)
            taken = window.where(_sampled(len(window.text_W), rules, query.examples[0]))
            found = len(taken.text_W)
            outcome = "full" if found == rules.negatives else "short" if found else "without"
            part.counts[outcome] += 1
            if outcome != "full" and rules.short == "drop":
                part.counts["dropped"] += 1
            else:
                part.rows.append(group_row(self.material, query, own_cosines, taken))
        return part

    def _windows(self, queries: Sequence[Query]) -> Iterator[tuple[Query, Window, list[float]]]:
        """Yield each query with its candidates and the cosines of its own positives and negatives."""
        candidates_C = self.material.candidates_C
        first, last = self.rules.ranks_of(len(candidates_C))
        ranks = np.arange(first, last + 1)
        size = max(1, SCORES_AT_ONCE // (last + min(len(candidates_C), self.rules.block_candidates)))
        for start in range(0, len(queries), size):
            some = queries[start : start + size]
            position_QR, cosine_QR = self.search(on_grid(self.vectors.queries([query.text for query in some])), last)
            for row, (query, own) in enumerate(zip(some, own_cosines(some, self.vectors), strict=True)):
                text_W, cosine_W = candidates_C[position_QR[row, first - 1 :]], cosine_QR[row, first - 1 :]
                least = min(own[: len(query.positives)])
                yield query, Window(query.text, query.positives, least, text_W, cosine_W, ranks), own

    def _judge(self, query: int, text_W: Array) -> Array:
        assert self.judge_vectors is not None
        return cosines(on_grid(self.judge_vectors.queries([query])), on_grid(self.judge_vectors.documents(text_W)))


def own_cosines(queries: Sequence[Query], vectors: TextVectors) -> list[list[float]]:
    """Return for each query the cosines of its positives, then of its own negatives."""
    numbers = [(query.text, text) for query in queries for text in (*query.positives, *query.negatives)]
    query_O, text_O = np.array(numbers).T
    found = iter(cosines(on_grid(vectors.queries(query_O)), on_grid(vectors.documents(text_O))).tolist())
    return [list(islice(found, len(query.positives) + len(query.negatives))) for query in queries]


def group_row(
    material: Material, query: Query, own_cosines: Sequence[float], mined: Window | None = None
) -> dict[str, Any]:
    """Return a query as a row of format group: its own negatives, then mined ones, and cosines as scores."""
    row: dict[str, Any] = {
        "query": material.texts[query.text],
        "positives": [material.texts[text] for text in query.positives],
        "negatives": [material.texts[text] for text in query.negatives],
        "scores": [round(cosine, _DIGITS) for cosine in own_cosines],
        "examples": list(query.examples),
    }
    if mined is not None:
        row["ranks"] = [*[None] * len(query.negatives), *mined.rank_W.tolist()]
        row["negatives"] += [material.texts[text] for text in mined.text_W.tolist()]
        row["scores"] += [round(cosine, _DIGITS) for cosine in mined.cosine_W.tolist()]
    return row


def group_lines(groups: Iterable[dict[str, Any]], split_positives: bool) -> Iterator[bytes]:
    """Yield the lines of a file of groups: one for each group, or one for each of its positives."""
    for group in groups:
        for row in _split(group) if split_positives else [group]:
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _split(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count, scores = len(group["positives"]), group["scores"]
    for text, example, score in zip(group["positives"], group["examples"], scores[:count], strict=True):
        yield group | {"positives": [text], "examples": [example], "scores": [score, *scores[count:]]}


def _sampled(count: int, rules: NegativeRules, example: int) -> Array:
    """Return the positions of the negatives among `count` candidates: the first, or random ones in order.

    Sorted by random(), the one generator that gives the same numbers in every version of Python.
    """
    if rules.sampling == "top":
        return np.arange(min(rules.negatives, count))
    generator = random.Random(rules.seed * 2**64 + example)
    keys = [generator.random() for _ in range(count)]
    return np.array(sorted(sorted(range(count), key=keys.__getitem__)[: rules.negatives]), dtype=np.int64)
