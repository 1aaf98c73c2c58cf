"""What a row of a data file means.

A row arrives as a dictionary from *our field names* to raw values. A format is one small reader that turns it into an
`Example`, into `Dropped` (left out for a documented reason: a neutral label), or raises `RowError` (the row is bad).
Which column of a file holds which field is found out in `columns`.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two texts and how similar they are: 1 the same meaning, 0 another."""

    left: str
    right: str
    score: float


@dataclass(frozen=True, slots=True)
class PositivePair:
    """Two texts that belong together; the other texts of a batch serve as negatives."""

    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Triple:
    """A text, one that belongs to it, and one that looks alike but does not."""

    anchor: str
    positive: str
    negative: str


Example = ScoredPair | PositivePair | Triple
Row = Mapping[str, object]
ScoreRange = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sound row that is left out for a documented reason, counted under `reason`."""

    reason: str


class DataError(ValueError):
    """The data cannot be used as asked; the message says what was needed, what came, and what to do."""


class RowError(ValueError):
    """One row cannot be used; `reason` says why. The loader adds file and line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; nearest: 'score'"` for the known names most like `name`, or the empty string."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; nearest: {', '.join(map(repr, found))}" if found else ""


# ------------------------------------------------------------------------------------------------ single values


def _value(row: Row, field: str) -> object:
    if field not in row:
        raise RowError(f"{field} is missing")
    return row[field]


def read_text(row: Row, field: str) -> str:
    """The text of a field, unaltered. Refused: no string, nothing but white space, NUL, a lone surrogate."""
    text = _value(row, field)
    if text is None:
        raise RowError(f"{field} is null; a text is needed")
    if not isinstance(text, str):
        raise RowError(f"{field} is {_show(text)} ({type(text).__name__}); a text is needed")
    if not text.strip():
        raise RowError(f"{field} is empty")
    if "\0" in text:
        raise RowError(f"{field} holds a NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{field} holds a lone surrogate (half a character) at position {error.start}") from None
    return text


def read_score(row: Row, field: str, score_range: ScoreRange | None) -> float:
    """The score of a field as a number in [0, 1], rescaled from `score_range` when one is given.

    Accepts numbers and numeric strings. Refused: booleans, NaN and infinities, values outside the range.
    """
    value = _value(row, field)
    if isinstance(value, bool):
        raise RowError(f"{field} is {value}: a boolean is not a score; write 1 or 0")
    if not isinstance(value, int | float | str):
        raise RowError(f"{field} is {_show(value)} ({type(value).__name__}); a number is needed")
    try:
        score = float(value)
    except (ValueError, OverflowError):
        raise RowError(f"{field} is {_show(value)}; a number is needed{_nli_hint(value)}") from None
    if not math.isfinite(score):
        raise RowError(f"{field} is {score}; a finite number is needed")
    if score_range is None:
        if not 0.0 <= score <= 1.0:
            raise RowError(
                f"{field} is {score}, outside [0, 1]; set score_range to the scale of the file, as in [0, 5]"
                f"{_nli_hint(value)}"
            )
        return score
    unlike, alike = score_range
    if not min(score_range) <= score <= max(score_range):
        raise RowError(f"{field} is {score}, outside score_range [{unlike}, {alike}]")
    return (score - unlike) / (alike - unlike)


_NLI_LABELS = ("entailment", "neutral", "contradiction")  # the usual order: 0, 1, 2
_NO_GOLD_LABEL = ("-1", "-")  # how SNLI marks a pair on which its annotators did not agree


def read_nli_label(row: Row, field: str) -> str:
    """The label of a field as one of the three words, or "no gold label". Accepts the words and 0, 1, 2."""
    value = _value(row, field)
    word = str(value).strip().lower() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if word in _NO_GOLD_LABEL:
        return "no gold label"
    if word in ("0", "1", "2"):
        return _NLI_LABELS[int(word)]
    if word not in _NLI_LABELS:
        raise RowError(
            f"{field} is {_show(value)}; needed entailment, neutral, contradiction, or 0, 1, 2 in this order"
        )
    return word


def _nli_hint(value: object) -> str:
    """What a score column may be that holds a word of NLI, or its third class."""
    if str(value).strip().lower() in (*_NLI_LABELS, "2", "2.0"):
        return ". If these are the classes of NLI (0 entailment, 1 neutral, 2 contradiction), set format to nli_pairs"
    return ""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ------------------------------------------------------------------------------------------------ formats


class Reader(Protocol):
    """Turns one row, keyed by field names, into an example; raises `RowError`."""

    def __call__(self, row: Row, score_range: ScoreRange | None = None, /) -> Example | Dropped: ...


def read_scored_pair(row: Row, score_range: ScoreRange | None = None) -> ScoredPair:
    return ScoredPair(read_text(row, "text1"), read_text(row, "text2"), read_score(row, "score", score_range))


def read_positive_pair(row: Row, score_range: ScoreRange | None = None) -> PositivePair:
    return PositivePair(read_text(row, "text1"), read_text(row, "text2"))


def read_triple(row: Row, score_range: ScoreRange | None = None) -> Triple:
    return Triple(read_text(row, "anchor"), read_text(row, "positive"), read_text(row, "negative"))


def read_nli_pair(row: Row, score_range: ScoreRange | None = None) -> ScoredPair | Dropped:
    """Entailment is score 1, contradiction 0; neutral rows and rows without gold label are dropped."""
    label = read_nli_label(row, "label")
    if label not in ("entailment", "contradiction"):
        return Dropped(label)
    return ScoredPair(read_text(row, "premise"), read_text(row, "hypothesis"), float(label == "entailment"))


def pair_by_premise(pairs: Iterable[Example]) -> list[Triple]:
    """Join, for each premise, its k-th entailed with its k-th contradicted hypothesis (in file order).

    Each row is used once at most; what one of the two sides has more of stays unpaired. Triples come in the order in
    which their premises first appear.
    """
    sides: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for pair in pairs:
        assert isinstance(pair, ScoredPair)
        sides[pair.left][0 if pair.score == 1.0 else 1].append(pair.right)
    return [
        Triple(premise, entailed, contradicted)
        for premise, (positives, negatives) in sides.items()
        for entailed, contradicted in zip(positives, negatives, strict=False)
    ]


@dataclass(frozen=True)
class Format:
    """One meaning of a row: the fields it needs, its reader, and what is done when all rows are read."""

    fields: tuple[str, ...]
    read: Reader
    gather: Callable[[Sequence[Example]], Sequence[Example]] | None = None
    """Makes the examples out of what `read` gave, when an example needs more than one row."""
    rows_per_example: int = 1


FORMATS: dict[str, Format] = {
    "scored_pair": Format(("text1", "text2", "score"), read_scored_pair),
    "positive_pair": Format(("text1", "text2"), read_positive_pair),
    "triple": Format(("anchor", "positive", "negative"), read_triple),
    "nli_pairs": Format(("premise", "hypothesis", "label"), read_nli_pair),
    "nli_triples": Format(("premise", "hypothesis", "label"), read_nli_pair, pair_by_premise, rows_per_example=2),
}
