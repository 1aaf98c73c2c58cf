"""Choose the hard negatives of each query among its nearest candidates. `mine` writes the result to a file.

    examples, corpus ──► MiningData ──► nearest candidates of each query ──► rules ──► groups (query, positives, negatives)

A group is a query with its positives and negatives.

Dimensions: T distinct texts, C candidates, W candidates of one query within the ranks, Q queries, R ranks, O pairs of a
query and its positive or its negative in the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from angle_llm.data.order import random_order
from angle_llm.data.positives import MiningData, Query
from angle_llm.io import log
from angle_llm.model.reranker import Reranker
from angle_llm.model.text_vectors import TextVectors, vectors_of
from angle_llm.model.vectors import Array
from angle_llm.prompts import split_instructions
from angle_llm.settings.commands import NegativeRules
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.search import CANDIDATES_AT_ONCE, cosines, grid_blocks, nearest, on_grid

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

SCORES_AT_ONCE = 10_000_000
"""Maximum number of values in an array of cosines or vectors. About six such arrays exist at the same time."""
QUERIES_AT_ONCE = 1024
"""Maximum number of queries whose negatives are mined at a time; after a kill, at most this many are mined again."""
_SEARCHED_AT_ONCE = 8192
"""Maximum number of queries for which the candidates are read once."""
_RERANKED_AT_ONCE = 64
"""Maximum number of queries that are mined at a time if a reranker scores pairs."""
_SEED = 42
"""Seed for the random choice of negatives."""
_DIGITS = 6
"""Decimal places of the cosines in the output."""
_FIRST_RANK = 10
"""Largest default of the first rank for negatives (rank 1: the candidate nearest to the query). Nearer candidates are
often unlabelled paraphrases."""
_POOL_PER_RANK = 1000
"""Number of candidates by which the pool must grow to raise the default first rank for negatives by 1."""
_WINDOW = 40
"""Default number of nearest-candidate ranks from which negatives are chosen, after the first rank."""


def ranks_of(rules: NegativeRules, count: int) -> tuple[int, int]:
    """Return the first and last rank of possible negatives among `count` candidates; rank 1 is the nearest."""
    if rules.ranks is not None:
        return rules.ranks[0], rules.ranks[1] or count
    first = min(_FIRST_RANK, 1 + count // _POOL_PER_RANK)
    return first, min(count, first + max(_WINDOW, _WINDOW // 10 * rules.negatives))


def check_candidates(rules: NegativeRules, count: int) -> None:
    """Log a warning if `--ranks` omits more than the nearest 1 % of `count` candidates.

    Raises:
        SettingsError: if the ranks or the number of negatives need more than `count` candidates.
    """
    first, last = ranks_of(rules, count)
    if (needed := max(last, first + rules.negatives - 1)) > count:
        named = f"--negatives {rules.negatives}" if rules.ranks is None else f"--ranks {first} {last}"
        raise SettingsError(
            f"{named} needs at least {needed:,} candidates, and there are {count:,}. Lower it, or give a larger --corpus."
        )
    if (first - 1) * 100 > count:
        low, high = ranks_of(replace(rules, ranks=None), count)
        log(
            f"warning: --ranks {first} {last} suits a larger pool: it omits the nearest {first - 1} of {count:,} candidates, "
            f"so the negatives are easy. Omit --ranks, or set --ranks {low} {high}"
        )


class PairScorer(NamedTuple):
    """Scores pairs of texts with an encoder or a reranker."""

    of: Callable[[Array, Array], Array]
    """Function of O queries and O documents, as indices into `MiningData.texts`, that returns the score of each pair, (O,)."""
    queries_at_once: int = QUERIES_AT_ONCE
    """Maximum number of queries scored at a time."""


def pair_scores(scorer: SentenceEncoder | Reranker, material: MiningData, folder: Path) -> PairScorer:
    """Return the scorer of a reranker, or the cosines of an encoder, whose vectors of all texts are stored in the folder."""
    if not isinstance(scorer, Reranker):
        return cosines_by(vectors_of(material, scorer, folder))

    def score_pairs(query_O: Array, text_O: Array) -> Array:
        queries = [material.texts[query] for query in query_O.tolist()]
        documents, _ = split_instructions(material.texts[text] for text in text_O.tolist())
        return scorer.scores(list(zip(queries, documents, strict=True)))

    return PairScorer(score_pairs, _RERANKED_AT_ONCE)


def cosines_by(vectors: TextVectors) -> PairScorer:
    """Return the cosines of stored vectors."""
    size = max(1, SCORES_AT_ONCE // vectors.vectors_KD.shape[1])

    def score_pairs(query_O: Array, text_O: Array) -> Array:
        blocks = [slice(first, first + size) for first in range(0, len(query_O), size)]
        grids = ((on_grid(vectors.queries(query_O[b])), on_grid(vectors.documents(text_O[b]))) for b in blocks)
        return np.concatenate([cosines(*grid) for grid in grids])

    return PairScorer(score_pairs)


# --- candidates -----------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Candidate negatives of a query, nearest first."""

    query: Query
    positive_cosine: float
    """Smallest cosine of the query with its positives."""
    text_W: Array
    """(W,) candidates, as indices into `MiningData.texts`."""
    cosine_W: Array
    """(W,) cosines of the candidates with the query."""


REASONS = (
    "the query itself", "a positive of the query", "known from another row", "of the query's cluster", "above --max-score",
    "within --margin", "within --relative-margin", "the judge disagrees",
)  # fmt: skip
"""Reasons to refuse a candidate negative, in the order of the checks. A candidate is counted under the first reason
that applies."""


def refused_candidates(
    material: MiningData, rules: NegativeRules, window: Window, judge: PairScorer | None = None
) -> dict[str, Array]:
    """Return reason → mask (W,) of the candidates that must not become negatives of the query, in the order of `REASONS`.

    Texts that differ only in case, spacing and punctuation count as equal. `judge` scores the candidates that no other
    reason refuses, and the positives, for the reason `the judge disagrees`.
    """
    # Texts that the data show to belong to the query.
    key_T, cluster_T = material.key_T, material.cluster_T
    key_W, query_key = key_T[window.text_W], int(key_T[window.query.text])
    refused = {
        "the query itself": key_W == query_key,
        "a positive of the query": np.isin(key_W, list(material.positives.get(query_key, ()))),
        "known from another row": np.isin(key_W, list(material.known.get(query_key, ()))),
        "of the query's cluster": cluster_T[window.text_W] == cluster_T[window.query.text],
    }
    # Limits of the cosine.
    if rules.max_score is not None:
        refused["above --max-score"] = window.cosine_W > rules.max_score
    if rules.margin is not None:
        refused["within --margin"] = window.cosine_W >= window.positive_cosine - rules.margin
    if rules.relative_margin is not None:
        margin = rules.relative_margin * abs(window.positive_cosine)
        refused["within --relative-margin"] = window.cosine_W >= window.positive_cosine - margin
    if judge is not None:
        remaining = np.flatnonzero(~np.logical_or.reduce(list(refused.values())))
        texts = np.append(window.text_W[remaining], window.query.positives)
        refused["the judge disagrees"] = np.zeros(len(key_W), dtype=bool)
        if len(remaining):
            scores = judge.of(np.full(len(texts), window.query.text), texts)
            lowest_positive = scores[len(remaining) :].min()
            refused["the judge disagrees"][remaining] = scores[: len(remaining)] >= lowest_positive - rules.judge_margin
    return refused


# --- selection --------------------------------------------------------------------------------------------------------


class MinedPart(NamedTuple):
    """Result of mining a block of queries."""

    rows: list[dict[str, Any]]
    """Groups (a query with its positives and negatives), as written to the output file."""
    counts: dict[str, int]
    """Number of queries with all requested negatives (`mined`), fewer (`short`) or none (`without`); and of refused
    candidates by reason."""


@dataclass(frozen=True)
class Miner:
    """Mines hard negatives for queries, in blocks. The negatives of a query do not depend on other queries."""

    material: MiningData
    rules: NegativeRules
    vectors: TextVectors
    judge: PairScorer | None = None
    """Scores by the second encoder or reranker (`--judge`). None: no judge."""
    _nearest_of_group: dict[int, tuple[Array, Array]] = field(default_factory=dict, repr=False, compare=False)
    """Number of a group of blocks → the nearest candidates of its queries; only the last group."""

    @property
    def queries_at_once(self) -> int:
        """Number of queries per block."""
        count = len(self.material.candidates_C)
        cosines_of_query = ranks_of(self.rules, count)[1] + min(count, CANDIDATES_AT_ONCE)
        at_once = QUERIES_AT_ONCE if self.judge is None else self.judge.queries_at_once
        return max(1, min(at_once, SCORES_AT_ONCE // cosines_of_query))

    def _nearest(self, number: int) -> tuple[Array, Array]:
        """Return positions and cosines (Q, R) of the nearest candidates for block `number` of the queries.

        The candidates are read once for several blocks, whose results are kept.
        """
        candidates_C, size = self.material.candidates_C, self.queries_at_once
        _, last = ranks_of(self.rules, len(candidates_C))
        together = max(1, min(_SEARCHED_AT_ONCE, SCORES_AT_ONCE // last) // size)
        group, block = divmod(number, together)
        if group not in self._nearest_of_group:
            self._nearest_of_group.clear()
            queries = self.material.queries[group * together * size : (group + 1) * together * size]
            blocks = grid_blocks(self.vectors.vectors_KD, self.vectors.document_row_T[candidates_C])
            queries_QD = on_grid(self.vectors.queries([query.text for query in queries]))
            self._nearest_of_group[group] = nearest(queries_QD, blocks, last)
        position_QR, cosine_QR = self._nearest_of_group[group]
        return position_QR[block * size : (block + 1) * size], cosine_QR[block * size : (block + 1) * size]

    def part(self, number: int) -> MinedPart:
        """Mine hard negatives for block `number` of the queries, and return groups and counts."""
        rules, material = self.rules, self.material
        queries = material.queries[number * self.queries_at_once : (number + 1) * self.queries_at_once]
        # The nearest candidates.
        candidates_C = material.candidates_C
        first, _ = ranks_of(rules, len(candidates_C))
        position_QR, cosine_QR = self._nearest(number)
        # Negatives among them that are not refused.
        mined = MinedPart([], dict.fromkeys(("mined", "short", "without", *REASONS), 0))
        cosines_QO = input_scores(queries, cosines_by(self.vectors))
        for row, (query, cosines_O) in enumerate(zip(queries, cosines_QO, strict=True)):
            smallest = min(cosines_O[: len(query.positives)])
            window = Window(query, smallest, candidates_C[position_QR[row, first - 1 :]], cosine_QR[row, first - 1 :])
            left_W = np.ones(len(window.text_W), dtype=bool)
            for reason, refused_W in refused_candidates(material, rules, window, self.judge).items():
                mined.counts[reason] += int((left_W & refused_W).sum())
                left_W &= ~refused_W
            left = np.flatnonzero(left_W)
            chosen = left[_sampled(len(left), rules, query.examples[0])]
            outcome = "short" if len(chosen) else "without"
            if len(chosen) == rules.negatives:
                outcome = "mined"
            mined.counts[outcome] += 1
            if outcome == "mined" or rules.short == "keep":
                group = group_row(material, query, cosines_O)
                group["ranks"] = [*[None] * len(query.negatives), *(first + chosen).tolist()]  # None: of the input
                group["negatives"] += [material.texts[text] for text in window.text_W[chosen].tolist()]
                group["scores"] += [round(cosine, _DIGITS) for cosine in window.cosine_W[chosen].tolist()]
                mined.rows.append(group)
        return mined


def input_scores(queries: Sequence[Query], scorer: PairScorer) -> list[list[float]]:
    """Return the scores of each query with its positives, followed by the scores with its negatives in the input."""
    numbers = [(query.text, text) for query in queries for text in (*query.positives, *query.negatives)]
    values = iter(scorer.of(*np.array(numbers).T).tolist())
    return [list(islice(values, len(query.positives) + len(query.negatives))) for query in queries]


def group_row(material: MiningData, query: Query, scores: Sequence[float]) -> dict[str, Any]:
    """Return the output row (format group) of a query, with its positives and negatives of the input, and their scores."""
    (text,), (instruction,) = split_instructions([material.texts[query.text]])
    return {
        "query": text,
        **({} if instruction is None else {"instruction": instruction}),
        "positives": [material.texts[text] for text in query.positives],
        "negatives": [material.texts[text] for text in query.negatives],
        "scores": [round(score, _DIGITS) for score in scores],
        "examples": list(query.examples),
    }


def split_positives(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a copy of a group (query, positives, negatives) for each positive, with this positive and all negatives."""
    count = len(group["positives"])
    scores = group["scores"]
    for text, example, score in zip(group["positives"], group["examples"], scores[:count], strict=True):
        yield group | {"positives": [text], "examples": [example], "scores": [score, *scores[count:]]}


def _sampled(count: int, rules: NegativeRules, example: int) -> Array:
    """Return the indices of the negatives among `count` candidates: the first ones, or random ones in ascending order.

    `example`, the index of an example, makes the random choice differ between queries.
    """
    if rules.sampling == "top":
        return np.arange(min(rules.negatives, count))
    return np.sort(random_order(count, _SEED * 2**64 + example)[: rules.negatives])
