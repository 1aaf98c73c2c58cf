"""Positive pairs and candidates for mining: text numbers, and which texts are known to belong together.

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

from angle_llm.data.formats import DataError, Example, PositivePair, Triple, pairs_of
from angle_llm.data.keys import near

Array = np.ndarray[Any, np.dtype[Any]]


class Pair(NamedTuple):
    """A positive pair: the index of its example, the numbers of its texts, and the negatives its rows already have."""

    example: int
    anchor: int
    positive: int
    own_negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Material:
    """Texts, pairs and candidates. Texts that need a vector are numbered by first appearance; candidates ascend."""

    texts: list[str]
    pairs: list[Pair]
    repeated: int
    """Positive pairs that an earlier row contains too."""
    scored_lower: int
    """Scored pairs that are not positive."""
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

    def place(self, text: int) -> str:
        """Return a text and where it is from, for messages."""
        shown = json.dumps(self.texts[text][:80])  # escapes show invisible characters
        return f"text {shown}, {self._origin.get(text, 'of --corpus')}"

    @cached_property
    def _origin(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for pair in self.pairs:
            found.setdefault(pair.anchor, f"the anchor of example {pair.example} (from 0)")
            found.setdefault(pair.positive, f"the positive of example {pair.example} (from 0)")
        return found

    def digest(self) -> str:
        """Return the SHA-256 of all that the negatives depend on, except vectors and rules."""
        known = sorted((key, *sorted(others)) for key, others in self.known.items())
        content = [self.texts, self.pairs, self.candidates_C.tolist(), known]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind."""
        return {
            "pairs": len(self.pairs),
            "repeated": self.repeated,
            "scored_lower": self.scored_lower,
            "candidates": len(self.candidates_C),
            "texts": len(self.texts),
        }

    def summary(self) -> str:
        """Return the counts as a line to print."""
        return (
            f"{len(self.pairs):,} positive pairs (skipped {self.repeated:,} repeated and {self.scored_lower:,} scored lower), "
            f"{len(self.candidates_C):,} candidates, {len(self.texts):,} texts; the largest cluster has "
            f"{np.bincount(self.cluster_T).max():,}"
        )


def gather(examples: Sequence[Example], corpus: Iterable[str] | None, positive_above: float) -> Material:
    """Number the texts of examples and corpus, and link them. Without a corpus the positives are the candidates.

    Of candidates with one near key the first is used.

    Raises:
        DataError: if no example is a positive pair.
    """
    number_of: dict[str, int] = {}
    pairs: dict[tuple[int, int], Pair] = {}
    known: list[tuple[str, str]] = []
    own: defaultdict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    repeated = scored_lower = 0
    for index, example in enumerate(examples):
        (anchor, other, score), *negative = pairs_of(example)
        known += [(left, right) for left, right, _ in negative]
        if not isinstance(example, Triple | PositivePair) and score <= positive_above:
            known.append((anchor, other))
            scored_lower += 1
            continue
        ends = (number_of.setdefault(anchor, len(number_of)), number_of.setdefault(other, len(number_of)))
        repeated += ends in pairs
        pairs.setdefault(ends, Pair(index, *ends))
        own[ends] |= dict.fromkeys(right for _, right, _ in negative)
    if not pairs:
        hint = f" No score is above --positive-above {positive_above}; lower it, or check --score-range."
        raise DataError(
            f"mining needs positive pairs; none of the {len(examples)} examples is one.{hint if scored_lower else ''}"
        )
    candidates = [pair.positive for pair in pairs.values()]
    if corpus is not None:
        candidates = [number_of.setdefault(text, len(number_of)) for text in corpus]
    candidates = sorted(set(candidates))

    texts = list(number_of)
    number_of_key: dict[str, int] = {}

    def key(text: str) -> int:
        return number_of_key.setdefault(near(text), len(number_of_key))

    key_T = np.array([key(text) for text in texts])
    links = [(int(key_T[pair.anchor]), int(key_T[pair.positive])) for pair in pairs.values()]
    known_links = [(key(left), key(right)) for left, right in known]
    _, firsts = np.unique(key_T[candidates], return_index=True)
    return Material(
        texts=texts,
        pairs=[pair._replace(own_negatives=tuple(own[ends])) for ends, pair in pairs.items()],
        repeated=repeated,
        scored_lower=scored_lower,
        candidates_C=np.array(candidates)[np.sort(firsts)],
        key_T=key_T,
        cluster_T=_clusters(len(number_of_key), links)[key_T],
        positives=_neighbours(links),
        known=_neighbours(known_links),
    )


def _clusters(keys: int, links: list[tuple[int, int]]) -> Array:
    """Return the number (K,) of the cluster of each near key."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = np.array(links).T
    graph = coo_array((np.ones(len(links)), (left, right)), shape=(keys, keys))
    found: Array = connected_components(graph, directed=False)[1]
    return found


def _neighbours(links: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for left, right in links:
        found[left].add(right)
        found[right].add(left)
    return dict(found)
