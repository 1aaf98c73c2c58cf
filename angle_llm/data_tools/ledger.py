"""What is kept of a file while its rows pass by: no texts, but a key of each and where it stood.

A row takes about 60 bytes and a distinct text about 170, so a million triples of fresh texts take about 0.6 GB. (A JSONL
file or a Parquet file is besides held whole while it is read, a CSV or TSV file is not.)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from angle_llm.data.formats import Dropped, Example, PositivePair, RowError, ScoredPair, Triple
from angle_llm.data.keys import is_telling, key, near, pair_key, sound
from angle_llm.data.reading import Outcome, Reading
from angle_llm.data.sources import Rejected

NEUTRAL = 0.5
"""The score at which a neutral row, which is not used, is held against the others."""


@dataclass
class Ledger:
    """Counts and keys of the rows of one file."""

    rows_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)
    line: array[int] = field(default_factory=lambda: array("Q"))
    """Of each used row."""
    exact: array[int] = field(default_factory=lambda: array("Q"))
    """Of each used row: a key of its texts and label to the letter."""
    near: array[int] = field(default_factory=lambda: array("Q"))
    """Of each used row: the same without case, spacing and punctuation."""
    relation: array[int] = field(default_factory=lambda: array("Q"))
    """Key of each pair of texts, in any order; a triple has two. Neutral pairs are here too."""
    relation_line: array[int] = field(default_factory=lambda: array("Q"))
    relation_score: array[float] = field(default_factory=lambda: array("d"))
    relation_used: array[int] = field(default_factory=lambda: array("b"))
    """0 for neutral pairs."""
    to_itself: array[int] = field(default_factory=lambda: array("b"))
    """1 where the two texts of a relation are near duplicates of each other."""
    texts: set[int] = field(default_factory=set)
    """Exact keys of the texts."""
    sentences: set[int] = field(default_factory=set)
    """Near keys of the texts that are long enough to tell something."""

    @property
    def used(self) -> int:
        """Rows that make an example."""
        return len(self.line)


def keep(reading: Reading, ledger: Ledger) -> Iterator[str]:
    """Reads a source to its end into the ledger; gives each distinct text once, as it comes.

    Raises `DataError` for damage that hides an unknown number of rows.
    """
    for outcome in reading.outcomes():
        ledger.rows_in += 1
        result = outcome.result
        if isinstance(result, RowError):
            ledger.rejected.append(Rejected(reading.table.name, outcome.number, result.reason))
        elif isinstance(result, Dropped):
            ledger.dropped[result.reason] += 1
            if (pair := _neutral_pair(outcome, reading)) is not None:
                _keep_relations(ledger, outcome.number, [near(text) for text in pair], [(0, 1, NEUTRAL)], used=False)
        else:
            texts = texts_of(result)
            bare = [near(text) for text in texts]
            _keep_row(ledger, outcome.number, result, texts, bare)
            for text, bare_text in zip(texts, bare, strict=True):
                exact = key(text)
                if exact not in ledger.texts:
                    ledger.texts.add(exact)
                    if is_telling(bare_text):
                        ledger.sentences.add(key(bare_text))
                    yield text


def _keep_row(ledger: Ledger, line: int, example: Example, texts: list[str], bare: list[str]) -> None:
    in_order = list if isinstance(example, Triple) else sorted  # a pair says the same in both orders
    label = repr(example.score) if isinstance(example, ScoredPair) else ""
    ledger.line.append(line)
    ledger.exact.append(key(*in_order(texts), label))
    ledger.near.append(key(*in_order(bare), label))
    _keep_relations(ledger, line, bare, relations_of(example), used=True)


def _keep_relations(
    ledger: Ledger, line: int, bare: list[str], relations: list[tuple[int, int, float]], used: bool
) -> None:
    for left, right, score in relations:
        ledger.relation.append(pair_key(bare[left], bare[right]))
        ledger.relation_line.append(line)
        ledger.relation_score.append(score)
        ledger.relation_used.append(used)
        ledger.to_itself.append(bare[left] == bare[right])


def _neutral_pair(outcome: Outcome, reading: Reading) -> tuple[str, str] | None:
    """The texts of a neutral row: what it says of a pair may differ from what another row says."""
    row = outcome.row
    if not (isinstance(outcome.result, Dropped) and outcome.result.reason == "neutral" and isinstance(row, Mapping)):
        return None
    premise, hypothesis = (row.get(reading.columns[name]) for name in ("premise", "hypothesis"))
    if not (isinstance(premise, str) and isinstance(hypothesis, str)):
        return None
    return sound(premise), sound(hypothesis)


def texts_of(example: Example) -> list[str]:
    """The texts of an example, in the order of its fields."""
    if isinstance(example, Triple):
        return [example.anchor, example.positive, example.negative]
    return [example.left, example.right]


def relations_of(example: Example) -> list[tuple[int, int, float]]:
    """Which of an example's texts are pairs, and with which scores: what a batch would hold of it."""
    if isinstance(example, Triple):
        return [(0, 1, 1.0), (0, 2, 0.0)]
    return [(0, 1, 1.0 if isinstance(example, PositivePair) else example.score)]
