"""Detection of the format of a file, and of the column of each field, from the column names.

The column names of common datasets and libraries are recognized. Names from different rows of the table may be mixed,
such as `query` and `answer`. The detected format is the format whose required fields all have a column.

| columns | read as | used by |
|---|---|---|
| `anchor positive negative` | triple | sentence-transformers, AllNLI `triplet` |
| `query positive negative`, `query positive` | triple, positive pair | angle-emb since 0.6, formats B and C |
| `text positive negative`, `text positive` | triple, positive pair | angle-emb before 0.6, formats B and C |
| `sent0 sent1 hard_neg`, `sent0 sent1` | triple, positive pair | SimCSE's NLI file |
| `anchor positive`, `query answer`, `question answer` | positive pair | sentence-transformers (AllNLI `pair`, questions) |
| `query pos neg`, `query pos neg pos_scores neg_scores` | group | FlagEmbedding |
| `query positive_passages negative_passages` | group, title and text joined by a space | Tevatron, a BEIR folder |
| `anchor positive negative_1 negative_2` …, `anchor positive negative label` | group, the label a list | sentence-transformers |
| `query positives negatives`, `query positives negatives scores` | group | `angle-llm data mine`, `data score` |
| `text1 text2 label` | scored pair, **1 similar, 0 not** | angle-emb, format A |
| `sentence1 sentence2 score` | scored pair | sentence-transformers, STS-B, AllNLI `pair-score`, STS and SICK of MTEB |
| `sentence1 sentence2 label` | scored pair, **1 similar, 0 not** | MRPC, PAWS and STS-B of GLUE |
| `sentence1 sentence2 similarity_score` | scored pair | STS-B in several languages |
| `sentence_A sentence_B relatedness_score` | scored pair, 1 to 5 | SICK as released, and in SentEval |
| `#1 String`, `#2 String`, `Quality` | scored pair | MRPC as released, and in SentEval |
| `question1 question2 is_duplicate` (or `label`) | scored pair | QQP as released (GLUE) |
| `premise hypothesis label` | NLI, **0 entailment, 1 neutral, 2 contradiction** | AllNLI `pair-class`, SNLI and MNLI on the hub |
| `sentence1 sentence2 gold_label` | NLI | SNLI and MNLI as released |
| `text label`, `sentence label` | labelled text, no other column of texts | SetFit, SST-2 |

Every format also takes `instruction`, the instruction of the first text for a prompt with `{instruction}`, and
`document_instruction` for the second text; next to `pos`, `prompt` is an instruction too, as in FlagEmbedding.

A group has a query, a list of positives and a list of negatives; the list of negatives may be empty or missing. An item
of a list is a text, or an object with `text` and optionally `title`; a single text is read as a list with one item.
Teacher scores are a list of numbers on any scale, positives first, or a list for the positives and a list for the
negatives (`pos_scores`, `neg_scores`); null or a missing column means no scores. A null or empty `negative_2` means
fewer negatives. `anchor positive negative` alone is a triple.

`label` next to `premise` is an NLI class, and 0 is the most similar. `label` next to other texts is a score, and 1 is
the most similar. The NLI files of AnglE have 1 for entailment, 0 for contradiction and no neutral pairs; their columns
are `text1 text2 label`. `sentence1 sentence2 label` with the words of NLI (AllNLI as one table) is refused with advice:
set format to nli_pairs. The second judgement of SICK (`entailment`, `entailment_label`) is read only with a mapping:
`columns: {label: entailment}`. QNLI and RTE have 0 for entailment and 1 for no entailment, so they need
`score_range: [1, 0]`; QNLI also needs a mapping of its texts.

The downloads of SentEval are read unchanged: STS.input.NAME.txt with the scores of STS.gs.NAME.txt, sts-train.csv
(tabs, no header), SICK and MRPC (.txt with a header).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from angle_llm.data.formats import FORMATS, INSTRUCTIONS, NUMBERED_NEGATIVE, SINGLE_TEXTS, DataError
from angle_llm.data.keys import printable
from angle_llm.settings.parsing import unknown_name

_FIRST = ("text1", "sentence1", "sentence_A", "question1", "#1 String")
_SECOND = ("text2", "sentence2", "sentence_B", "question2", "#2 String")
_ANCHOR = ("anchor", "query", "question", "sent0", "text")
_POSITIVE = ("positive", "answer", "sent1")
_POSITIVES = ("positives", "pos", "positive_passages")
_NEGATIVES = ("negatives", "neg", "negative_passages")
_OF_LISTS = (*_POSITIVES, *_NEGATIVES)

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence"),
    "text1": (*_FIRST, *_ANCHOR),
    "text2": (*_SECOND, *_POSITIVE),
    "score": ("score", "label", "labels", "similarity_score", "relatedness_score", "is_duplicate", "Quality"),
    "anchor": _ANCHOR,
    "positive": _POSITIVE,
    "negative": ("negative", "hard_neg"),
    "premise": ("premise", *_FIRST),
    "hypothesis": ("hypothesis", *_SECOND),
    "label": ("label", "gold_label"),
    "query": _ANCHOR,
    "positives": (*_POSITIVES, *_POSITIVE),
    "negatives": (*_NEGATIVES, "negative", "hard_neg"),
    "scores": ("scores", "score", "label", "labels"),
    "positive_scores": ("positive_scores", "pos_scores"),
    "negative_scores": ("negative_scores", "neg_scores"),
    "instruction": ("instruction",),
    "document_instruction": ("document_instruction",),
}
"""Field of a data format → column names that are recognized as this field without a mapping.

The format `group` also has the fields `negative_1`, `negative_2` and so on, with a single negative per field."""

_OTHER_TEXTS = {*_FIRST, *_SECOND, *_ANCHOR, *_POSITIVE, *_OF_LISTS, "premise", "hypothesis", "negative"} - {"text"}
"""Columns with texts beside which a column `text` is not detected as a labelled text."""
_EXAMPLE = {"text1": "question", "text2": "answer"}
"""Example of a mapping for error messages."""


def resolve_format(
    format: str, mapping: Mapping[str, str], columns: Sequence[str], flags: str = "--data."
) -> tuple[str, dict[str, str]]:
    """Find the data format of a file and the column of each format field; return the format name, and field → column.

    With `format="auto"`, the format is detected: all its required fields must have a column. If several formats fit,
    the format that reads more columns is chosen (scored_pair before positive_pair). scored_pair is chosen before
    nli_pairs if both read the same columns. `nli_triples` and `text` are never detected.

    Args:
        format: Name of a format, or "auto".
        mapping: Field → column, as set by the user; may be empty or incomplete.
        columns: Column names of the file.
        flags: Prefix of the flag names in error messages.

    Raises:
        DataError: for an unknown format or field, a missing column, or if several columns or formats fit.
    """
    # The name of the format.
    if format not in ("auto", *FORMATS):
        raise DataError(unknown_name("format", format, ["auto", *FORMATS]))
    # Fields and columns that the user named.
    for field, column in mapping.items():
        if field not in USUAL_NAMES and not NUMBERED_NEGATIVE.fullmatch(field):
            expected = f"Expected pairs of FIELD COLUMN, such as {_as_set(flags, _EXAMPLE)}"
            raise DataError(f"{flags}columns: {unknown_name('field', field, USUAL_NAMES)} {expected}")
        if column not in columns:
            raise DataError(f"{flags}columns {field} {column}: {unknown_name('column', column, columns)}")
    # The format, and its fields.
    name = _guess_format(mapping, columns, flags) if format == "auto" else format
    required = FORMATS[name].fields
    fields = fields_of(name, mapping, columns)
    if unknown := [field for field in mapping if field not in fields]:
        raise DataError(f"{flags}columns: format {name} has no field {listed(unknown)}. Its fields: {listed(fields)}")
    # The column of each field.
    column_of = {}
    for field in fields:
        possible = _candidates(field, mapping, columns)
        if field in INSTRUCTIONS and field not in mapping:
            if field == "instruction" and name == "group" and {"pos", "prompt"} <= set(columns):  # FlagEmbedding
                possible.append("prompt")
            # A column that the user named for another field is not an instruction.
            possible = [column for column in possible if column not in mapping.values()]
        if not possible and field not in required:
            continue
        if len(possible) > 1:
            raise DataError(
                f"several columns can be the field {field!r} of format {name}: {listed(possible)}. Choose a column, as in "
                f"{_as_set(flags, {field: possible[0]})}"
            )
        if not possible:
            raise DataError(
                f"format {name} needs a column for the field {field!r} (recognised: {', '.join(USUAL_NAMES[field])}); columns: "
                f"{listed(columns)}. Add {_as_set(flags, {field: 'COLUMN'})}"
            )
        column_of[field] = possible[0]
    return name, column_of


def listed(columns: Sequence[str]) -> str:
    """Return column names separated by commas, for messages; an empty name is shown as ''."""
    return ", ".join(printable(name) or "''" for name in columns)


def _as_set(flags: str, mapping: dict[str, str]) -> str:
    """Return how a mapping is set, by a flag and in Python, for messages."""
    return f"`{flags}columns {' '.join(chain(*mapping.items()))}` (in Python: columns={mapping})"


def fields_of(name: str, mapping: Mapping[str, str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the required and optional fields of the format `name`.

    For the format `group`, this includes the fields `negative_1`, `negative_2`, … in `mapping` (field → column) and
    `columns`.
    """
    format = FORMATS[name]
    numbered = dict.fromkeys(filter(NUMBERED_NEGATIVE.fullmatch, (*mapping, *columns))) if name == "group" else ()
    return (*format.fields, *format.optional, *numbered, *(INSTRUCTIONS if name != "text" else ()))


def _candidates(field: str, mapping: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    """Return the columns that can be read as a format field.

    This is the mapped column if `mapping` (field → column) has the field, else all columns with a usual name of the
    field.
    """
    if field in mapping:
        return [mapping[field]]
    usual = [name for name in USUAL_NAMES.get(field, (field,)) if name in columns]
    return [name for name in usual if name in _OF_LISTS] or usual


def _names_a_group(mapping: Mapping[str, str], used: set[str]) -> bool:
    """Return whether a field in `mapping` or a column in `used` exists only in the format `group`.

    `mapping` is field → column. The columns `anchor positive negative` alone are the format `triple`.
    """
    mapped = {"positives", "negatives", "scores", "positive_scores", "negative_scores"} & set(mapping)
    return bool(mapped or used & {*_OF_LISTS} or any(map(NUMBERED_NEGATIVE.fullmatch, (*mapping, *used))))


def _guess_format(mapping: Mapping[str, str], columns: Sequence[str], flags: str) -> str:
    """Return the name of the data format that fits the columns; `mapping` is field → column, as set by the user.

    Raises:
        DataError: if no format or several formats fit.
    """
    # Formats whose required fields have columns, unless another format uses these columns and more.
    fits: dict[str, set[str]] = {}
    for name, format in FORMATS.items():
        if name == "text":
            continue
        fields = fields_of(name, mapping, columns)
        choices = {field: _candidates(field, mapping, columns) for field in fields}
        if format.combine is None and all(choices[field] for field in format.fields) and set(mapping) <= set(fields):
            used = set(chain.from_iterable(choices.values()))
            if name == "labelled_text" and "text" not in mapping and _OTHER_TEXTS.intersection(columns):
                continue  # such as QNLI: a class of two texts, not of one
            # Without lists, numbered negatives or scores, `anchor positive negative` is a triple.
            if name != "group" or (choices["negatives"] and choices["scores"]) or _names_a_group(mapping, used):
                fits[name] = used
    best = [name for name, used in fits.items() if not any(used < superset for superset in fits.values())]
    if set(best) == {"scored_pair", "nli_pairs"} and fits["scored_pair"] == fits["nli_pairs"]:
        return "scored_pair"  # a label next to texts that are not named premise and hypothesis is a score
    if len(best) == 1:
        return best[0]
    # No format fits, or several: explain the choice.
    needed = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in FORMATS.items() if name != "text")
    if best:
        raise DataError(
            f"the columns {listed(columns)} fit several formats: {listed(best)}. Choose a format, or name columns, as in "
            f"{_as_set(flags, _EXAMPLE)}. The fields: {needed}"
        )
    advice = f"Add `{flags}columns FIELD COLUMN …`, such as {_as_set(flags, _EXAMPLE)}. {SINGLE_TEXTS}"
    raise DataError(f"the columns {listed(columns)} fit no format. {advice}. The formats and their fields: {needed}")
