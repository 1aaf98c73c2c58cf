"""Queries with their positives, and candidates, for mining and scoring: text numbers, and which texts belong together.

Legend: T distinct texts, K near keys (equal for texts that differ in case, spacing and punctuation only), C candidates.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from angle_llm.data.formats import DataError, Example, ScoredPair, pairs_of
from angle_llm.data.keys import near

Array = np.ndarray[Any, np.dtype[Any]]


class Query(NamedTuple):
    """A query with all its positives and the negatives that its rows already have; texts are numbers."""

    text: int
    positives: tuple[int, ...]
    examples: tuple[int, ...]
    """Index of the first example with each positive."""
    negatives: tuple[int, ...] = ()


@dataclass(frozen=True)
class Material:
    """Texts, queries and candidates. Texts that need a vector are numbered by first appearance; candidates ascend."""

    texts: list[str]
    queries: list[Query]
    repeated: int
    """Positive pairs that an earlier row contains too."""
    scored_lower: int
    """Scored pairs that are not positive."""
    contradicted: int
    """Negatives that another row has as a positive of the same query; they are not negatives."""
    without_positive: int
    """Queries that have negatives only; they are not used."""
    candidates_C: Array
    """Text number of each."""
    key_T: Array
    """Near key of each text, as a number."""
    cluster_T: Array
    """Cluster of each text: near keys that positive pairs link, over any number of steps."""
    positives: dict[int, set[int]]
    """Near key → near keys it forms a positive pair with."""
    known: dict[int, set[int]]
    """Near key → near keys it is in another row with: own negatives of triples, scored pairs that are not positive."""

    def documents(self) -> list[int]:
        """Return the ascending numbers of all positives, negatives and candidates."""
        own = {text for query in self.queries for text in (*query.positives, *query.negatives)}
        return sorted(own.union(self.candidates_C.tolist()))

    def place(self, text: int) -> str:
        """Return a text and where it is from, for messages."""
        shown = json.dumps(self.texts[text][:80])  # escapes show invisible characters
        return f"text {shown}, {self._origin.get(text, 'a candidate')}"

    @cached_property
    def _origin(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for query in self.queries:
            found.setdefault(query.text, f"the query of example {query.examples[0]} (from 0)")
            for text, example in zip(query.positives, query.examples, strict=True):
                found.setdefault(text, f"a positive of example {example} (from 0)")
            for text in query.negatives:
                found.setdefault(text, f"a negative of the query of example {query.examples[0]} (from 0)")
        return found

    def digest(self) -> str:
        """Return the SHA-256 of all that the negatives depend on, except vectors and rules."""
        known = sorted((key, *sorted(others)) for key, others in self.known.items())
        content = [self.texts, self.queries, self.candidates_C.tolist(), known]
        own = {(self.key_T[query.text], self.key_T[text]) for query in self.queries for text in query.positives}
        links = {(key, other) for key, others in self.positives.items() for other in others}
        if beyond := links - own - {(other, key) for key, other in own}:  # of queries that were left out
            content.append(sorted(beyond))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind."""
        return {
            "queries": len(self.queries),
            "positives": sum(len(query.positives) for query in self.queries),
            "own_negatives": sum(len(query.negatives) for query in self.queries),
            "repeated": self.repeated,
            "scored_lower": self.scored_lower,
            "contradicted": self.contradicted,
            "without_positive": self.without_positive,
            "candidates": len(self.candidates_C),
            "texts": len(self.texts),
        }

    def summary(self) -> str:
        """Return the counts as a line to print."""
        found = self.counts()
        skipped = {
            "repeated pairs": self.repeated,
            "pairs scored lower": self.scored_lower,
            "negatives that are positives in another row": self.contradicted,
            "queries without a positive": self.without_positive,
        }
        named = ", ".join(f"{count:,} {name}" for name, count in skipped.items() if count)
        return (
            f"{found['queries']:,} queries with {found['positives']:,} positives and {found['own_negatives']:,} negatives"
            f"{f' (skipped: {named})' if named else ''}; {len(self.candidates_C):,} candidates, {len(self.texts):,} texts; at "
            f"most {np.bincount(self.cluster_T).max():,} texts are linked by positive pairs (a cluster)"
        )


def gather(
    examples: Sequence[Example], corpus: Iterable[str] | None, positive_above: float, *, lower: bool = False
) -> Material:
    """Number the texts of examples and corpus, and collect the positives and negatives of each query.

    Without a corpus the positives are the candidates. Of candidates with one near key the first is used. With `lower`,
    the texts of scored pairs that are not positive are negatives of their query.

    Raises:
        DataError: if no example is a positive pair.
    """
    positives: defaultdict[str, dict[str, int]] = defaultdict(dict)  # query → positive → example
    negatives: defaultdict[str, dict[str, None]] = defaultdict(dict)
    known: list[tuple[str, str]] = []
    repeated = scored_lower = 0
    for index, example in enumerate(examples):
        scored = isinstance(example, ScoredPair)
        for left, right, score in pairs_of(example):
            if score > positive_above if scored else score == 1.0:
                repeated += right in positives[left]
                positives[left].setdefault(right, index)
                continue
            known.append((left, right))
            scored_lower += scored
            if lower or not scored:
                negatives[left].setdefault(right)
    if not positives:
        hint = f" No score is above --positive-above {positive_above}; lower it, or check --score-range."
        raise DataError(
            f"expected positive pairs; none of the {len(examples)} examples is one.{hint if scored_lower else ''}"
        )
    number_of: dict[str, int] = {}

    def number(text: str) -> int:
        return number_of.setdefault(text, len(number_of))

    queries, contradicted = [], 0
    for text, own in positives.items():
        kept = [each for each in negatives[text] if each not in own]
        contradicted += len(negatives[text]) - len(kept)
        numbers = (number(text), tuple(map(number, own)), tuple(own.values()), tuple(map(number, kept)))
        queries.append(Query(*numbers))
    candidates = [positive for query in queries for positive in query.positives]
    if corpus is not None:
        candidates = [number(text) for text in corpus]
    candidates = sorted(set(candidates))

    texts = list(number_of)
    number_of_key: dict[str, int] = {}

    def key(text: str) -> int:
        return number_of_key.setdefault(near(text), len(number_of_key))

    key_T = np.array([key(text) for text in texts])
    links = [(int(key_T[query.text]), int(key_T[positive])) for query in queries for positive in query.positives]
    known_links = [(key(left), key(right)) for left, right in known]
    _, firsts = np.unique(key_T[candidates], return_index=True)
    return Material(
        texts=texts,
        queries=queries,
        repeated=repeated,
        scored_lower=scored_lower,
        contradicted=contradicted,
        without_positive=len(negatives.keys() - positives.keys()),
        candidates_C=np.array(candidates)[np.sort(firsts)],
        key_T=key_T,
        cluster_T=components(len(number_of_key), links)[key_T],
        positives=_neighbours(links),
        known=_neighbours(known_links),
    )


def components(size: int, links: Sequence[tuple[int, int]]) -> Array:
    """Return the number (N,) of the connected component of each of `size` nodes; `links` has at least one pair of them."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = np.array(links).T
    graph = coo_array((np.ones(len(links)), (left, right)), shape=(size, size))
    found: Array = connected_components(graph, directed=False)[1]
    return found


def _neighbours(links: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for left, right in links:
        found[left].add(right)
        found[right].add(left)
    return dict(found)
