"""What is mined: texts by number, positive pairs of them, candidates for negatives, and who is known to belong to whom.

Legend: T different texts, K near keys (texts that differ in case, spacing and punctuation share one), C candidates.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from angle_llm.data.formats import DataError, Example, PositivePair, ScoredPair, Triple
from angle_llm.data.keys import near
from angle_llm.vectors import Array


class Pair(NamedTuple):
    """A positive pair, and where it comes from."""

    example: int
    """Its number among the examples that were read, from 0."""
    anchor: int
    """Text number."""
    positive: int
    """Text number."""
    own_negatives: tuple[str, ...] = ()
    """The negatives its rows had already, each once."""


@dataclass(frozen=True)
class Material:
    """All that is mined from. Texts, those that need a vector, are numbered by first appearance; candidates ascend."""

    texts: list[str]
    pairs: list[Pair]
    repeated: int
    """Positive pairs that stood in an earlier row already."""
    judged: int
    """Scored pairs that are not positive."""
    candidates_C: Array
    """Text number of each."""
    key_T: Array
    """Near key of each text, as a number."""
    cluster_T: Array
    """Cluster of each text: near keys that positive pairs link, over any number of steps."""
    positives: dict[int, set[int]]
    """Near key → near keys it stands in a positive pair with."""
    known: dict[int, set[int]]
    """Near key → near keys it stands in another row with: own negatives of triples, scored pairs that are not positive."""

    def whose(self, text: int) -> str:
        """A text and where it stands, for messages."""
        shown = json.dumps(self.texts[text][:80])  # escapes show what cannot be seen
        for pair in self.pairs:
            if text in (pair.anchor, pair.positive):
                side = "anchor" if text == pair.anchor else "positive"
                return f"text {shown}, the {side} of example {pair.example} (from 0)"
        return f"text {shown} of --corpus"

    def digest(self) -> str:
        """SHA-256 of everything negatives follow from but vectors and settings."""
        content = [
            self.texts,
            self.pairs,
            self.candidates_C.tolist(),
            sorted((a, *sorted(b)) for a, b in self.known.items()),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def largest_cluster(self) -> int:
        """Its number of texts."""
        return int(np.bincount(self.cluster_T).max())


def gather(examples: Sequence[Example], corpus: Iterable[str] | None, positive_above: float) -> Material:
    """Numbers the texts of examples and corpus, and links them. Without a corpus the candidates are the positives.

    Of candidates that differ in case, spacing and punctuation alone the first is taken.

    Raises:
        DataError: if no example is a positive pair.
    """
    number_of: dict[str, int] = {}
    pairs: dict[tuple[int, int], Pair] = {}
    other: list[tuple[str, str]] = []
    own: defaultdict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    repeated = judged = 0
    for place, example in enumerate(examples):
        anchor, positive, negative = _read(example, positive_above)
        if negative is not None:
            other.append((anchor, negative))
        if positive is None:
            judged += 1
            continue
        first = number_of.setdefault(anchor, len(number_of))
        second = number_of.setdefault(positive, len(number_of))
        repeated += (first, second) in pairs
        pairs.setdefault((first, second), Pair(place, first, second))
        if negative is not None:
            own[first, second][negative] = None
    if not pairs:
        raise DataError(
            f"mining needs positive pairs, and none of the {len(examples)} examples is one. "
            + (
                f"No score is above --positive-above {positive_above}; lower it, or check --score-range."
                if judged
                else ""
            )
        )
    candidates = [pair.positive for pair in pairs.values()]
    if corpus is not None:
        candidates = [number_of.setdefault(text, len(number_of)) for text in corpus]

    texts = list(number_of)
    number_of_key: dict[str, int] = {}

    def key(text: str) -> int:
        return number_of_key.setdefault(near(text), len(number_of_key))

    key_T = np.array([key(text) for text in texts])
    links = [(int(key_T[pair.anchor]), int(key_T[pair.positive])) for pair in pairs.values()]
    _, firsts = np.unique(key_T[np.array(sorted(set(candidates)))], return_index=True)
    return Material(
        texts=texts,
        pairs=[pair._replace(own_negatives=tuple(own[ends])) for ends, pair in pairs.items()],
        repeated=repeated,
        judged=judged,
        candidates_C=np.array(sorted(set(candidates)))[np.sort(firsts)],
        key_T=key_T,
        cluster_T=_clusters(len(number_of_key), links)[key_T],
        positives=_neighbours(links),
        known=_neighbours((key(left), key(right)) for left, right in other),
    )


def _read(example: Example, positive_above: float) -> tuple[str, str | None, str | None]:
    """Anchor, its positive, and a text that is known to be none."""
    if isinstance(example, Triple):
        return example.anchor, example.positive, example.negative
    if isinstance(example, PositivePair):
        return example.left, example.right, None
    assert isinstance(example, ScoredPair)
    if example.score > positive_above:
        return example.left, example.right, None
    return example.left, None, example.right


def _clusters(keys: int, links: list[tuple[int, int]]) -> Array:
    """(K,) number of the cluster of each near key."""
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
