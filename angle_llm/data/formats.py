"""Meaning of a row: field names and raw values give an `Example`, or `Dropped`, or raise `RowError`.

`columns` finds the column of a file that holds each field.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
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


@dataclass(frozen=True, slots=True)
class Group:
    """A query with its positives, at least one, and its hard negatives; a negative is not one of the positives."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] | None = None
    """Scores by a teacher, on any scale: of the positives, then of the negatives."""


Example = ScoredPair | PositivePair | Triple | Group
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
    if isinstance(example, Group):
        scored = [(text, 1.0) for text in example.positives] + [(text, 0.0) for text in example.negatives]
        return [(example.query, text, score) for text, score in scored]
    raise TypeError(f"expected ScoredPair, PositivePair, Triple or Group, got {type(example).__name__}: {example!r}")


def texts_of(example: Example) -> list[str]:
    """Return the texts of an example, repeats included, in the order of its fields."""
    (left, right, _), *others = pairs_of(example)
    return [left, right, *(text for _, text, _ in others)]


class DataError(ValueError):
    """Data that cannot be used; the message names what was expected, what was found, and what to do."""


class RowError(ValueError):
    """A row that cannot be used, and why; the reader adds file and line."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; nearest: 'score'"` for the known names most similar to `name`, or the empty string."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; nearest: {', '.join(map(repr, found))}" if found else ""


# ------------------------------------------------------------------------------------------------ single values


_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"}
"""Unicode categories. A character that Python does not know yet is Cn."""


def read_text(row: Values, field: str) -> str:
    """Return the text of a field, unchanged; refuse other types, NUL characters, lone surrogates, and a text of spaces,
    control and format characters and combining marks only, which many tokenizers drop."""
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
    if all(unicodedata.category(character) in _INVISIBLE for character in text):  # reads the first one, as a rule
        raise RowError(f"{field} is {text!a:.40}: only invisible or combining characters")
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
        scale = (
            f"score_range [{low}, {high}]"
            if score_range
            else "[0, 1]; set --score-range (train: --data.score-range), such as 0 5"
        )
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


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


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


NUMBERED_NEGATIVE = re.compile(r"negative_\d+")
"""Fields of a group that hold one negative each."""


def _group(row: Values, _: ScoreRange | None) -> Group:
    """Return a group. Repeated texts of a list count once."""
    query = read_text(row, "query")
    _value(row, "positives")  # an error if it is missing
    positives, negatives = _read_texts(row, "positives"), _read_texts(row, "negatives")
    for name in sorted(filter(NUMBERED_NEGATIVE.fullmatch, row), key=lambda name: int(name.rpartition("_")[2])):
        if not _is_blank(row[name]):  # a row of a table with fewer negatives
            negatives.append(read_text(row, name))
    if not positives:
        raise RowError("positives is empty, expected one text or more")
    scores = _read_scores(row, len(positives), len(negatives))
    if both := sorted(set(positives) & set(negatives)):
        raise RowError(f"the text {_short(both[0])} is a positive and a negative")
    score_of: dict[str, float | None] = {}
    each: Sequence[float | None] = scores or [None] * len(positives + negatives)
    for text, score in zip((*positives, *negatives), each, strict=True):
        if score_of.setdefault(text, score) != score:
            raise RowError(f"the text {_short(text)} has the scores {score_of[text]} and {score}")
    kept = None if scores is None else tuple(score for score in score_of.values() if score is not None)
    return Group(query, tuple(dict.fromkeys(positives)), tuple(dict.fromkeys(negatives)), kept)


def _read_texts(row: Values, field: str) -> list[str]:
    """Return the texts of a list, of text or of objects with `text` and perhaps `title`, or of one text; none for null.

    Title and text are joined by a space, as in Tevatron and BEIR.
    """
    value = row.get(field)
    if value is None:
        return []
    if isinstance(value, str):
        if re.match(r"\s*\[\s*[\"'\]]", value) and value.rstrip().endswith("]"):
            raise RowError(f"{field} is a list that is written as text; write lists as JSON lines or Parquet")
        return [read_text(row, field)]
    if not isinstance(value, list | tuple):
        raise RowError(f"{field} is {_short(value)} ({type(value).__name__}), expected a list of texts")
    return [_read_passage(item, f"{field}[{place}]") for place, item in enumerate(value)]


def _read_passage(item: Any, name: str) -> str:
    """Return a text, or the text of an object with `text` and perhaps `title`; errors name it."""
    if not isinstance(item, Mapping):
        return read_text({name: item}, name)
    name += f" (docid {item['docid']})" if "docid" in item else ""
    if "text" not in item:
        raise RowError(f"{name} has no `text`; keys: {', '.join(map(str, item))}")
    parts = {part: item[part] for part in ("title", "text") if not _is_blank(item.get(part))}
    read = [read_text({f"{name}.{part}": value}, f"{name}.{part}") for part, value in parts.items()]
    if not read:
        raise RowError(f"{name}.text is empty")
    return " ".join(read)


def _read_scores(row: Values, positives: int, negatives: int) -> list[float] | None:
    """Return the scores of all texts; None: the row has none."""
    parts = {
        name: (row[name], count)
        for name, count in (
            ("scores", positives + negatives), ("positive_scores", positives), ("negative_scores", negatives),
        )
        if row.get(name) is not None
    }  # fmt: skip
    if not parts:
        return None
    if "scores" in parts and len(parts) > 1:
        raise RowError("expected scores, or positive_scores and negative_scores; got both")
    if sum(count for _, count in parts.values()) != positives + negatives:
        raise RowError("expected positive_scores and negative_scores, got one of them")
    scores: list[float] = []
    for name, (values, count) in parts.items():
        if not isinstance(values, list | tuple):
            hint = "; format triple does not read it" if isinstance(values, int | float) else ""
            raise RowError(
                f"{name} is {_short(values)} ({type(values).__name__}), expected a list of {count} numbers, one per text{hint}"
            )
        if len(values) != count:
            counted = f" ({positives} positives and {negatives} negatives)" if name == "scores" else ""
            raise RowError(f"{name} has {len(values)} numbers, expected {count}{counted}")
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise RowError(f"{name}[{place}] is {_short(value)}, expected a finite number")
        scores += map(float, values)
    return scores


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
    optional: tuple[str, ...] = ()
    """Fields that rows may lack."""


FORMATS: dict[str, Format] = {
    "scored_pair": Format(("text1", "text2", "score"), _scored_pair),
    "positive_pair": Format(("text1", "text2"), _positive_pair),
    "triple": Format(("anchor", "positive", "negative"), _triple),
    "group": Format(
        ("query", "positives"), _group, optional=("negatives", "scores", "positive_scores", "negative_scores")
    ),
    "nli_pairs": Format(("premise", "hypothesis", "label"), _nli_pair),
    "nli_triples": Format(("premise", "hypothesis", "label"), _nli_pair, pair_by_premise, rows_per_example=2),
}
