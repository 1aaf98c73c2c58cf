"""Meaning of a row: field names and raw values give an `Example`, or `Dropped`, or raise `RowError`.

`columns` finds the column of a file that holds each field.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two texts and their similarity: 1 the same meaning, 0 unrelated."""

    left: str
    right: str
    score: float


@dataclass(frozen=True, slots=True)
class PositivePair:
    """Two texts that belong together; the other texts of a batch are the negatives."""

    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Triple:
    """A text, a text that belongs to it, and a hard negative."""

    anchor: str
    positive: str
    negative: str


Example = ScoredPair | PositivePair | Triple
Values = Mapping[str, Any]
ScoreRange = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A valid row that is not used for a documented reason, such as a neutral label; counted by `reason`."""

    reason: str


def pairs_of(example: Example) -> list[tuple[str, str, float]]:
    """Return the scored pairs of an example: left text, right text, score."""
    if isinstance(example, ScoredPair):
        return [(example.left, example.right, example.score)]
    if isinstance(example, PositivePair):
        return [(example.left, example.right, 1.0)]
    if isinstance(example, Triple):
        return [(example.anchor, example.positive, 1.0), (example.anchor, example.negative, 0.0)]
    raise TypeError(f"expected ScoredPair, PositivePair or Triple, got {type(example).__name__}: {example!r}")


class DataError(ValueError):
    """Data that cannot be used; the message names what was expected, what was found, and what to do."""


class RowError(ValueError):
    """A row that cannot be used, and why; the reader adds file and line."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; nearest: 'score'"` for the known names most similar to `name`, or the empty string."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; nearest: {', '.join(map(repr, found))}" if found else ""


# ------------------------------------------------------------------------------------------------ single values


def read_text(row: Values, field: str) -> str:
    """Return the text of a field, unchanged; refuse other types, blank text, NUL characters and lone surrogates."""
    text = _value(row, field)
    if text is None:
        raise RowError(f"{field} is null, expected a text")
    if not isinstance(text, str):
        raise RowError(f"{field} is {_short(text)} ({type(text).__name__}), expected a text")
    if not text.strip():
        raise RowError(f"{field} is empty")
    if "\0" in text:
        raise RowError(f"{field} has a NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{field} has a lone surrogate (half a character) at position {error.start}") from None
    return text


def read_score(row: Values, field: str, score_range: ScoreRange | None) -> float:
    """Return the score of a field as a number in [0, 1], rescaled from `score_range`.

    Accepts numbers and numeric strings. Refused: booleans, NaN, infinity, values outside the range.
    """
    value = _value(row, field)
    if isinstance(value, bool):
        raise RowError(f"{field} is {value}: a boolean is not a score; write 1 or 0")
    hint = ""
    if str(value).strip().lower() in (*_NLI_LABELS, "2", "2.0"):
        hint = ". If these are the classes of NLI (0 entailment, 1 neutral, 2 contradiction), set format to nli_pairs"
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"{field} is {_short(value)} ({type(value).__name__}), expected a number{hint}") from None
    if not math.isfinite(score):
        raise RowError(f"{field} is {score}, expected a finite number")
    low, high = score_range or (0.0, 1.0)
    if not min(low, high) <= score <= max(low, high):
        scale = f"score_range [{low}, {high}]" if score_range else "[0, 1]; set score_range, such as [0, 5]"
        raise RowError(f"{field} is {score}, outside {scale}{'' if score_range else hint}")
    return score if score_range is None else (score - low) / (high - low)


_NLI_LABELS = ("entailment", "neutral", "contradiction")  # in the usual order: 0, 1, 2


def read_nli_label(row: Values, field: str) -> str:
    """Return one of entailment, neutral, contradiction, or "no gold label". Accepts the words and 0, 1, 2."""
    value = _value(row, field)
    word = str(value).strip().lower() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if word in ("-", "-1"):  # SNLI as released, and on the hub
        return "no gold label"
    if word in ("0", "1", "2"):
        return _NLI_LABELS[int(word)]
    if word not in _NLI_LABELS:
        raise RowError(
            f"{field} is {_short(value)}, expected entailment, neutral, contradiction, or 0, 1, 2 in this order"
        )
    return word


def _value(row: Values, field: str) -> Any:
    if field not in row:
        raise RowError(f"{field} is missing")
    return row[field]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ------------------------------------------------------------------------------------------------ formats


def _scored_pair(row: Values, score_range: ScoreRange | None) -> ScoredPair:
    return ScoredPair(read_text(row, "text1"), read_text(row, "text2"), read_score(row, "score", score_range))


def _positive_pair(row: Values, _: ScoreRange | None) -> PositivePair:
    return PositivePair(read_text(row, "text1"), read_text(row, "text2"))


def _triple(row: Values, _: ScoreRange | None) -> Triple:
    return Triple(read_text(row, "anchor"), read_text(row, "positive"), read_text(row, "negative"))


def _nli_pair(row: Values, _: ScoreRange | None) -> ScoredPair | Dropped:
    """Return a scored pair: entailment is score 1, contradiction 0;
    neutral rows and rows without gold label are dropped."""
    label = read_nli_label(row, "label")
    if label not in ("entailment", "contradiction"):
        return Dropped(label)
    return ScoredPair(read_text(row, "premise"), read_text(row, "hypothesis"), float(label == "entailment"))


def pair_by_premise(pairs: Iterable[Example]) -> list[Triple]:
    """Return triples: for each premise its k-th entailed and its k-th contradicted hypothesis, in file order.

    A row is used at most once; surplus rows of either label stay unpaired. Triples are in the order in which their
    premises first occur.
    """
    labelled: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for pair in pairs:
        assert isinstance(pair, ScoredPair)
        labelled[pair.left][0 if pair.score == 1.0 else 1].append(pair.right)
    return [
        Triple(premise, entailed, contradicted)
        for premise, (positives, negatives) in labelled.items()
        for entailed, contradicted in zip(positives, negatives, strict=False)
    ]


@dataclass(frozen=True)
class Format:
    """A meaning of rows: its fields, the function that reads a row, and one that combines rows."""

    fields: tuple[str, ...]
    read: Callable[[Values, ScoreRange | None], Example | Dropped]
    """Makes an example of a row; raises `RowError`."""
    combine: Callable[[Sequence[Example]], Sequence[Example]] | None = None
    """Makes the examples of the results of `read`, for examples of several rows."""
    rows_per_example: int = 1


FORMATS: dict[str, Format] = {
    "scored_pair": Format(("text1", "text2", "score"), _scored_pair),
    "positive_pair": Format(("text1", "text2"), _positive_pair),
    "triple": Format(("anchor", "positive", "negative"), _triple),
    "nli_pairs": Format(("premise", "hypothesis", "label"), _nli_pair),
    "nli_triples": Format(("premise", "hypothesis", "label"), _nli_pair, pair_by_premise, rows_per_example=2),
}
