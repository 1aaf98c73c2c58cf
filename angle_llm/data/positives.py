"""Data for mining and scoring: queries with their positives, candidates, and which texts belong together.

Texts are numbered. A near key is a number that is equal for texts that differ only in case, spacing and punctuation.

Shapes: T distinct texts, C candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from angle_llm.data.formats import DataError, Example, LabelledText, ScoredPair, pairs_of
from angle_llm.data.keys import normalized
from angle_llm.io import sha256_of_json
from angle_llm.prompts import InstructedText, instructed, split_instructions

Array = np.ndarray[Any, np.dtype[Any]]


class Query(NamedTuple):
    """A query with all its positives and negatives in the data, as indices into the list of texts."""

    text: int
    """Index of the query in the list of texts."""
    positives: tuple[int, ...]
    """Indices of all positives of the query in the list of texts."""
    examples: tuple[int, ...]
    """For each positive, the index of the first training example that contains the query with this positive."""
    negatives: tuple[int, ...] = ()
    """Indices, in the list of texts, of the negatives that the data already contains for the query."""


@dataclass(frozen=True)
class MiningData:
    """Data for mining hard negatives: queries with positives and negatives, and candidate texts.

    Texts are referred to by index in `texts`. Near keys are numbers that are equal for texts that differ only in case,
    spacing and punctuation.
    """

    texts: list[InstructedText]
    """All texts that must be embedded; queries with their instructions."""
    queries: list[Query]
    skipped: dict[str, int]
    """Numbers of skipped pairs and queries.

    repeated: positive pairs that repeat an earlier positive pair. scored_lower: scored pairs with a score too low for a
    positive pair. contradicted: unused negatives, because another row has the same text as a positive of the same query.
    without_positive: unused queries, which have only negatives.
    """
    candidates_C: Array
    """(C,) ascending indices, in `texts`, of the candidates for hard negatives."""
    key_T: Array
    """(T,) near key of each text: an equal number for texts that differ only in case, spacing and punctuation."""
    cluster_T: Array
    """(T,) cluster number of each text. Texts are in the same cluster if a chain of positive pairs links them."""
    positives: dict[int, set[int]]
    """Near key of a text → near keys of its partners in positive pairs."""
    known: dict[int, set[int]]
    """Near key of a text → near keys of its partners in negative pairs and in scored pairs with a low score."""

    def documents(self) -> list[int]:
        """Return the ascending indices, in `texts`, of all positives, negatives and candidates."""
        of_queries = {text for query in self.queries for text in (*query.positives, *query.negatives)}
        return sorted(of_queries.union(self.candidates_C.tolist()))

    def digest(self) -> str:
        """Return the SHA-256 of all texts, queries and pairs that affect which negatives are mined."""
        known = sorted((key, *sorted(others)) for key, others in self.known.items())
        content = [self.texts, self.queries, self.candidates_C.tolist(), known]
        used = {(self.key_T[query.text], self.key_T[text]) for query in self.queries for text in query.positives}
        links = {(key, positive) for key, others in self.positives.items() for positive in others}
        unused = links - used - {(positive, key) for key, positive in used}
        if unused:  # positive pairs of queries that were removed
            content.append(sorted(unused))
        return sha256_of_json(content)

    def counts(self) -> dict[str, int]:
        """Return the numbers of queries, positives, negatives, candidates, texts, and skipped pairs, for reports."""
        return {
            "queries": len(self.queries),
            "positives": sum(len(query.positives) for query in self.queries),
            "own_negatives": sum(len(query.negatives) for query in self.queries),
            **self.skipped,
            "candidates": len(self.candidates_C),
            "texts": len(self.texts),
        }

    def summary(self) -> str:
        """Return the numbers of queries, texts and skipped pairs, and the size of the largest cluster, as one line."""
        counts = ", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in self.counts().items() if count)
        largest = np.bincount(self.cluster_T).max()
        return f"{counts}; the largest cluster (texts linked by positive pairs) has {largest:,} texts"


def collect_pairs(
    examples: Sequence[Example], corpus: Iterable[str] | None, positive_above: float, *, lower: bool = False
) -> MiningData:
    """Collect the positives and negatives of each query from training examples, and the candidates from a corpus.

    Args:
        examples: Training examples of any format.
        corpus: Texts of the candidates for hard negatives; None: the positives are the candidates. Of candidates that
            differ only in case, spacing and punctuation, only the first is used.
        positive_above: A scored pair is positive if its score is above this.
        lower: Whether the second text of a scored pair that is not positive is a negative of the first text.

    Raises:
        DataError: if no example contains a positive pair.
    """
    # Texts of positive and known pairs, by query.
    positives: defaultdict[InstructedText, dict[str, int]] = defaultdict(dict)  # query → positive → example
    negatives: defaultdict[InstructedText, dict[str, None]] = defaultdict(dict)
    known_pairs: list[tuple[InstructedText, str]] = []
    skipped = dict.fromkeys(("repeated", "scored_lower", "contradicted", "without_positive"), 0)
    for index, example in enumerate(examples):
        if isinstance(example, LabelledText):
            raise DataError("expected pairs of two texts, got texts with a class (format labelled_text)")
        is_scored = isinstance(example, ScoredPair)
        for query, right, score in pairs_of(example):
            left = instructed(query, example.instruction)
            is_positive = score > positive_above if is_scored else score == 1.0
            if is_positive:
                skipped["repeated"] += right in positives[left]
                positives[left].setdefault(right, index)
                continue
            known_pairs.append((left, right))
            skipped["scored_lower"] += is_scored
            if lower or not is_scored:
                negatives[left].setdefault(right)
    if not positives:
        hint = f" No score is above --positive-above {positive_above}; lower it, or check --score-range."
        raise DataError(
            f"expected positive pairs; the {len(examples)} examples contain none.{hint if skipped['scored_lower'] else ''}"
        )
    # Numbers of texts, in order of their first occurrence.
    number_of: dict[InstructedText, int] = {}

    def number(text: InstructedText) -> int:
        return number_of.setdefault(text, len(number_of))

    # Queries, without negatives that are positives in another row.
    queries = []
    for text, example_of in positives.items():
        kept = [negative for negative in negatives[text] if negative not in example_of]
        skipped["contradicted"] += len(negatives[text]) - len(kept)
        query_number = number(text)
        positive_numbers = tuple(map(number, example_of))
        queries.append(Query(query_number, positive_numbers, tuple(example_of.values()), tuple(map(number, kept))))
    skipped["without_positive"] = len(negatives.keys() - positives.keys())
    # Candidates.
    candidates = [positive for query in queries for positive in query.positives]
    if corpus is not None:
        candidates = [number(text) for text in corpus]
    candidates = sorted(set(candidates))

    # Numbers of normalized texts, and the positive pairs of these numbers.
    texts = list(number_of)
    number_of_key: dict[str, int] = {}

    def key(text: InstructedText) -> int:
        return number_of_key.setdefault(normalized(split_instructions([text])[0][0]), len(number_of_key))

    key_T = np.array([key(text) for text in texts])
    links = [(int(key_T[query.text]), int(key_T[positive])) for query in queries for positive in query.positives]
    known_links = [(key(left), key(right)) for left, right in known_pairs]
    _, firsts = np.unique(key_T[candidates], return_index=True)
    return MiningData(
        texts=texts,
        queries=queries,
        skipped=skipped,
        candidates_C=np.array(candidates)[np.sort(firsts)],
        key_T=key_T,
        cluster_T=components(len(number_of_key), links)[key_T],
        positives=_linked(links),
        known=_linked(known_links),
    )


def components(size: int, links: Sequence[tuple[int, int]]) -> Array:
    """Return the component number of each node of an undirected graph, shape (size,).

    Nodes in the same connected component get equal numbers. `links` are the edges, at least one, as pairs of nodes from
    0 to size - 1.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = np.array(links).T
    graph = coo_array((np.ones(len(links)), (left, right)), shape=(size, size))
    component_N: Array = connected_components(graph, directed=False)[1]
    return component_N


def _linked(links: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """Return node → adjacent nodes of an undirected graph; `links` are the edges."""
    adjacent: defaultdict[int, set[int]] = defaultdict(set)
    for left, right in links:
        adjacent[left].add(right)
        adjacent[right].add(left)
    return dict(adjacent)
