"""The data formats: the fields of each format, and how a row of raw values is converted to an `Example`.

A row gives an example, is dropped for a documented reason (`Dropped`), or raises `RowError`. The module `columns` finds
the column of each field.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from typing_extensions import Self

from angle_llm.objective import POSITIVE_ABOVE as POSITIVE_ABOVE

INSTRUCTIONS = ("instruction", "document_instruction")
"""Fields of every format except `text` that may be missing in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructed:
    """The instructions of a training example for its prompts; None: the default instruction of the prompt."""

    instruction: str | None = None
    """Instruction for the first text of each pair (the query); for all texts if queries and documents have one prompt."""
    document_instruction: str | None = None
    """Instruction for the second text of each pair (the document)."""

    def __repr__(self) -> str:
        """Return the fields, without instructions that are None; digests of examples depend on it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        shown = (f"{name}={value!r}" for name, value in values.items() if name not in INSTRUCTIONS or value is not None)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def with_instructions(self, row: Values) -> Self:
        """Return the example with the instructions in the fields of its row; a missing or blank value is None."""
        instruction, document = (None if _is_blank(row.get(name)) else read_text(row, name) for name in INSTRUCTIONS)
        return replace(self, instruction=instruction, document_instruction=document)


@dataclass(frozen=True, slots=True, repr=False)
class ScoredPair(Instructed):
    """Two texts and their similarity, from 0 (unrelated) to 1 (same meaning)."""

    left: str
    right: str
    score: float


@dataclass(frozen=True, slots=True, repr=False)
class PositivePair(Instructed):
    """Two texts that belong together, such as a question and its answer."""

    left: str
    right: str


@dataclass(frozen=True, slots=True, repr=False)
class Triple(Instructed):
    """An anchor text, a positive that belongs to the anchor, and a hard negative."""

    anchor: str
    positive: str
    negative: str


@dataclass(frozen=True, slots=True, repr=False)
class Group(Instructed):
    """A query with one positive or more, and any number of hard negatives; no text is both positive and negative."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] | None = None
    """Teacher scores on any scale: first the scores of the positives, then of the negatives. None: no scores."""


@dataclass(frozen=True, slots=True, repr=False)
class LabelledText(Instructed):
    """A text and the name of its class; texts of a class belong together."""

    text: str
    label: str


Example = ScoredPair | PositivePair | Triple | Group | LabelledText
Values = Mapping[str, Any]
ScoreRange = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Result of reading a valid row that is not used for training, with the reason, such as a neutral label."""

    reason: str


def pairs_of(example: Example) -> list[tuple[str, str, float]]:
    """Return the scored pairs of a training example as (left text, right text, score).

    Positives have score 1, negatives score 0. The left text is the anchor or query. A labelled text is a pair of the text
    with itself.
    """
    if isinstance(example, ScoredPair):
        return [(example.left, example.right, example.score)]
    if isinstance(example, PositivePair):
        return [(example.left, example.right, 1.0)]
    if isinstance(example, Triple):
        return [(example.anchor, example.positive, 1.0), (example.anchor, example.negative, 0.0)]
    if isinstance(example, Group):
        scored = [(text, 1.0) for text in example.positives] + [(text, 0.0) for text in example.negatives]
        return [(example.query, text, score) for text, score in scored]
    if isinstance(example, LabelledText):
        return [(example.text, example.text, 1.0)]
    raise TypeError(f"expected a training example such as ScoredPair, got {type(example).__name__}: {example!r}")


def texts_of(example: Example) -> list[str]:
    """Return all texts of a training example in the order of its fields, including repeated texts."""
    if isinstance(example, LabelledText):
        return [example.text]
    pairs = pairs_of(example)
    return [pairs[0][0], *(right for _, right, _ in pairs)]


class DataError(ValueError):
    """Error for data that cannot be used; the message names what was expected, what was given, and what to do."""


class RowError(ValueError):
    """Error for a row that cannot be used; the message is the reason, and the caller adds file and line."""


# ------------------------------------------------------------------------------------------------ single values


_INVISIBLE = {"Cc", "Cf", "Co", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"}
"""Unicode categories that do not count as text: control, format, private-use, separator and mark characters.

Characters that are newer than the Unicode tables of Python have the category Cn and count as visible."""


def read_text(row: Values, field: str) -> str:
    """Return the text of a field of a row, unchanged.

    Raises:
        RowError: for a missing or empty value, a value that is not a text, a NUL character, a lone surrogate, or a text
            that has only characters of `_INVISIBLE` and U+FFFD (of a broken encoding), which many tokenizers drop.
    """
    text = _value(row, field)
    if text is None:
        raise RowError(f"{field} is null, expected a text")
    if not isinstance(text, str):
        raise RowError(f"{field} is {text!r:.40} ({type(text).__name__}), expected a text")
    if isinstance(text, ListCell):
        raise RowError(list_problem(field, text))
    if not text.strip():
        raise RowError(f"{field} is empty")
    if "\0" in text:
        raise RowError(f"{field} has a NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{field} has a lone surrogate (half a character) at position {error.start}") from None
    if all(character == "\ufffd" or unicodedata.category(character) in _INVISIBLE for character in text):
        raise RowError(f"{field} is {text!a:.40}: only invisible, combining or unknown characters")
    return text


_LIST = re.compile(
    r"""\[(?:[\s,]*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None|null))*\s*\]|\[\s*\{\s*["'].*\}\s*\]""", re.DOTALL
)
"""Pattern of a list of quoted texts or of objects that is written as text, by Python, JSON or numpy."""


def is_list_text(value: Any) -> bool:
    """Return whether a value is a text that is wholly a list, such as `['a', 'b']`; `[1]` and `["sic"] said` are not."""
    return isinstance(value, str) and value.lstrip()[:1] == "[" and _LIST.fullmatch(value.strip()) is not None


class ListCell(str):
    """A table cell that is wholly a list, such as `['a', 'b']`: not usable as a text."""


def list_problem(field: str, value: str) -> str:
    """Return the error message for a list that is written as text."""
    return (
        f"{field} is {str(value)!r:.40}, a list that is written as text; write it as a list, in JSON lines or Parquet"
    )


def read_score(row: Values, field: str, score_range: ScoreRange | None) -> float:
    """Return the similarity score in a field of a row, rescaled from `score_range` to [0, 1].

    `score_range` None means 0 to 1. Numbers and numeric strings are accepted.

    Raises:
        RowError: for a missing value, a boolean, NaN, infinity, or a number outside of the range.
    """
    value = _value(row, field)
    if isinstance(value, bool):
        raise RowError(f"{field} is {value}: a boolean is not a score; write 1 or 0")
    hint = ""
    if str(value).strip().lower() in (*_NLI_LABELS, "2", "2.0"):
        hint = ". If these are the classes of NLI (0 entailment, 1 neutral, 2 contradiction), their format is nli_pairs"
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"{field} is {value!r:.40} ({type(value).__name__}), expected a number{hint}") from None
    if not math.isfinite(score):
        raise RowError(f"{field} is {score}, expected a finite number")
    low, high = score_range or (0.0, 1.0)
    if not min(low, high) <= score <= max(low, high):
        scale = f"score_range [{low}, {high}]"
        if score_range is None:
            scale = f"[0, 1]; set --score-range (train: --data.score-range), such as 0 5{hint}"
        raise RowError(f"{field} is {score}, outside {scale}")
    return score if score_range is None else (score - low) / (high - low) + 0.0  # not -0


_NLI_LABELS = ("entailment", "neutral", "contradiction")
"""Names of the NLI classes 0, 1 and 2, in the usual order."""


def read_nli_label(row: Values, field: str) -> str:
    """Return the NLI class in a field of a row: entailment, neutral, contradiction, or "no gold label".

    The class names and the numbers 0, 1, 2 are accepted; - and -1 mean "no gold label". Other values raise `RowError`.
    """
    value = whole(_value(row, field))
    word = str(value).strip().lower() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if word in ("-", "-1"):  # SNLI as released, and on the hub
        return "no gold label"
    if word in ("0", "1", "2"):
        return _NLI_LABELS[int(word)]
    if word not in _NLI_LABELS:
        raise RowError(
            f"{field} is {value!r:.40}, expected entailment, neutral, contradiction, or 0, 1, 2 in this order"
        )
    return word


def _value(row: Values, field: str) -> Any:
    """Return the value of a field of a row. Raises `RowError` if the field is missing."""
    if field not in row:
        raise RowError(f"{field} is missing")
    return row[field]


def whole(value: Any) -> Any:
    """Convert a float without a fraction, such as 1.0 or the text "1.0", to an integer.

    pandas converts integers to such floats if a value is missing, and writes them to CSV files as texts.
    """
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}\.0", value.strip()):
        return int(float(value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_nan(value: Any) -> bool:
    """Return whether a value is NaN, which means a missing value, as in pandas."""
    return isinstance(value, float) and math.isnan(value)


def _is_blank(value: Any) -> bool:
    """Return whether a value is None or a text of only white space."""
    return value is None or (isinstance(value, str) and not value.strip())


# ------------------------------------------------------------------------------------------------ formats


def _scored_pair(row: Values, score_range: ScoreRange | None) -> ScoredPair:
    return ScoredPair(read_text(row, "text1"), read_text(row, "text2"), read_score(row, "score", score_range))


def _texts(example: Callable[..., Example], *names: str) -> Callable[[Values, ScoreRange | None], Example]:
    return lambda row, _: example(*(read_text(row, name) for name in names))


def _labelled_text(row: Values, _: ScoreRange | None) -> LabelledText | Dropped:
    """Convert a row to a text with the name of its class: a text, an integer or a boolean.

    A row with a blank label, or the integer -1 of a column with label names, has no gold label and is dropped.
    """
    label = whole(_value(row, "label"))
    if _is_blank(label):
        return Dropped("no gold label")
    if isinstance(label, ListCell):
        raise RowError(list_problem("label", label))
    if not isinstance(label, str | Integral):  # also the integers of numpy
        raise RowError(f"label is {label!r:.40} ({type(label).__name__}), expected a text, an integer or a boolean")
    return LabelledText(read_text(row, "text"), str(label).strip())


def _nli_pair(row: Values, _: ScoreRange | None) -> ScoredPair | Dropped:
    """Convert a row of NLI data to a scored pair with score 1 for entailment and 0 for contradiction.

    Neutral rows and rows without a gold label are dropped.
    """
    label = read_nli_label(row, "label")
    if label not in ("entailment", "contradiction"):
        return Dropped(label)
    return ScoredPair(read_text(row, "premise"), read_text(row, "hypothesis"), float(label == "entailment"))


SINGLE_TEXTS = "For single texts, use `angle-llm pretrain` with the format text; for texts with a class, labelled_text"
"""Advice for data without pairs, for messages."""


NUMBERED_NEGATIVE = re.compile(r"negative_\d+")
"""Pattern of field names of format `group` that contain a single negative: `negative_1`, `negative_2`, …"""


def _group(row: Values, _: ScoreRange | None) -> Group:
    """Convert a row to a `Group`: a query, its positives and its hard negatives, without repeated texts.

    Raises:
        RowError: if a text is both a positive and a negative, or has two different scores.
    """
    query = read_text(row, "query")
    _value(row, "positives")  # raises if the field is missing
    positives, negatives = _read_texts(row, "positives"), _read_texts(row, "negatives")
    for name in sorted(filter(NUMBERED_NEGATIVE.fullmatch, row), key=lambda name: int(name.rpartition("_")[2])):
        if not _is_blank(row[name]):  # blank: the row has fewer negatives than the table has columns
            negatives.append(read_text(row, name))
    if not positives:
        raise RowError("positives is empty, expected one text or more")
    scores = _read_scores(row, len(positives), len(negatives))
    if repeated := sorted(set(positives) & set(negatives)):
        raise RowError(f"the text {repeated[0]!r:.40} is a positive and a negative")
    score_of: dict[str, float | None] = {}
    listed_scores: Sequence[float | None] = scores or [None] * len(positives + negatives)
    for text, score in zip((*positives, *negatives), listed_scores, strict=True):
        if score_of.setdefault(text, score) != score:
            raise RowError(f"the text {text!r:.40} has the scores {score_of[text]} and {score}")
    distinct_scores = None if scores is None else tuple(score for score in score_of.values() if score is not None)
    return Group(query, tuple(dict.fromkeys(positives)), tuple(dict.fromkeys(negatives)), distinct_scores)


def _read_texts(row: Values, field: str) -> list[str]:
    """Return the texts in a field of a row; the value is a list, a single text, or null (no texts).

    A list item is a text, or an object with `text` and optionally `title`. Title and text are joined by a space, as in
    Tevatron and BEIR.
    """
    value = row.get(field)
    if value is None:
        return []
    if isinstance(value, str):
        if is_list_text(value):
            raise RowError(list_problem(field, value))
        return [read_text(row, field)]
    if not isinstance(value, list | tuple):
        raise RowError(f"{field} is {value!r:.40} ({type(value).__name__}), expected a list of texts")
    return [_read_passage(item, f"{field}[{index}]") for index, item in enumerate(value)]


def _read_passage(item: Any, name: str) -> str:
    """Return the text of a list item, which is a text, or an object with `text` and optionally `title`.

    Title and text are joined by a space. `name` is the name of the item in error messages.
    """
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
    """Return the teacher scores of a row, positives first; None if the row has no teacher scores.

    Args:
        positives: Number of positive texts in the row; the number of their scores must be equal.
        negatives: Number of negative texts in the row; the number of their scores must be equal.

    Raises:
        RowError: for a wrong number of scores, or a score that is not a finite number.
    """
    counts = {"scores": positives + negatives, "positive_scores": positives, "negative_scores": negatives}
    names = [name for name in counts if row.get(name) is not None]
    if not names:
        return None
    if sum(counts[name] for name in names) != positives + negatives:  # texts without a score, or with two
        raise RowError(f"expected scores, or positive_scores and negative_scores; got {' and '.join(names)}")
    scores: list[float] = []
    for name in names:
        values = row[name]
        if not isinstance(values, list | tuple) or len(values) != counts[name]:
            of_a_triple = positives == negatives == 1 and not isinstance(values, list | tuple)
            advice = "; to ignore the column, set --format triple (train: --data.format triple)" if of_a_triple else ""
            raise RowError(f"{name} is {values!r:.40}, expected a list of {counts[name]} numbers, one per text{advice}")
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, Real | Decimal) or not math.isfinite(value):
                raise RowError(f"{name}[{index}] is {value!r:.40}, expected a finite number")
        scores += map(float, values)
    return scores


def pair_by_premise(pairs: Iterable[Example]) -> list[Triple]:
    """Combine NLI pairs to triples: premise, k-th entailed hypothesis, k-th contradicted hypothesis of the premise.

    Hypotheses of a premise are counted in file order. A pair is used at most once; surplus pairs of a label are not
    used. Triples are in the order in which their premises, with their instructions, first occur.
    """
    labelled: dict[tuple[str, str | None, str | None], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for pair in pairs:
        assert isinstance(pair, ScoredPair)
        key = (pair.left, pair.instruction, pair.document_instruction)
        labelled[key][0 if pair.score == 1.0 else 1].append(pair.right)
    return [
        Triple(premise, entailed, contradicted, instruction=instruction, document_instruction=document_instruction)
        for (premise, instruction, document_instruction), (positives, negatives) in labelled.items()
        for entailed, contradicted in zip(positives, negatives, strict=False)
    ]


@dataclass(frozen=True)
class Format:
    """A data format: its fields, the function that converts a row, and an optional function that combines rows."""

    fields: tuple[str, ...]
    """Names of the fields that every row must have."""
    read: Callable[[Values, ScoreRange | None], Example | Dropped]
    """Function that converts a row (field → value) to an example or `Dropped`; raises `RowError` for a bad row.

    The second argument is the score range, or None for 0 to 1.
    """
    combine: Callable[[Sequence[Example]], Sequence[Example]] | None = None
    """Function that combines the results of all rows to examples of several rows; None: every row is an example."""
    rows_per_example: int = 1
    """Number of rows that form a training example."""
    optional: tuple[str, ...] = ()
    """Names of the fields that may be missing in a row."""


FORMATS: dict[str, Format] = {
    "scored_pair": Format(("text1", "text2", "score"), _scored_pair),
    "positive_pair": Format(("text1", "text2"), _texts(PositivePair, "text1", "text2")),
    "triple": Format(("anchor", "positive", "negative"), _texts(Triple, "anchor", "positive", "negative")),
    "group": Format(
        ("query", "positives"), _group, optional=("negatives", "scores", "positive_scores", "negative_scores")
    ),
    "nli_pairs": Format(("premise", "hypothesis", "label"), _nli_pair),
    "nli_triples": Format(("premise", "hypothesis", "label"), _nli_pair, pair_by_premise, rows_per_example=2),
    "labelled_text": Format(("text", "label"), _labelled_text),
    "text": Format(("text",), _texts(lambda text: PositivePair(text, text), "text")),
}
