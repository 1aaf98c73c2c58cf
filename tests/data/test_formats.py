from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.data.columns import resolve_format
from angle_llm.data.formats import (
    FORMATS,
    DataError,
    Dropped,
    Example,
    PositivePair,
    RowError,
    ScoredPair,
    Triple,
    pair_by_premise,
)

NLI = {"premise": "p", "hypothesis": "h"}


@pytest.mark.parametrize(
    ("format", "row", "example"),
    [
        ("scored_pair", {"text1": "a", "text2": "b", "score": 0.5}, ScoredPair("a", "b", 0.5)),
        ("scored_pair", {"text1": "a", "text2": "b", "score": "1"}, ScoredPair("a", "b", 1.0)),
        ("positive_pair", {"text1": "a", "text2": "b"}, PositivePair("a", "b")),
        ("triple", {"anchor": "a", "positive": "p", "negative": "n"}, Triple("a", "p", "n")),
        ("nli_pairs", {**NLI, "label": "entailment"}, ScoredPair("p", "h", 1.0)),
        ("nli_pairs", {**NLI, "label": "Contradiction"}, ScoredPair("p", "h", 0.0)),
        ("nli_pairs", {**NLI, "label": 0}, ScoredPair("p", "h", 1.0)),
        ("nli_pairs", {**NLI, "label": "2"}, ScoredPair("p", "h", 0.0)),
        ("nli_pairs", {**NLI, "label": 1}, Dropped("neutral")),
        ("nli_pairs", {**NLI, "label": "neutral"}, Dropped("neutral")),
        ("nli_pairs", {**NLI, "label": -1}, Dropped("no gold label")),
        ("nli_pairs", {**NLI, "label": "-"}, Dropped("no gold label")),
    ],
)
def test_a_row_becomes_its_example(format: str, row: dict[str, object], example: Example) -> None:
    assert FORMATS[format].read(row) == example


@pytest.mark.parametrize("text", ["  padded  ", "tab\there", "a\nb", "\u2028", "🙂", "e\u0301", "\ufeffx", '"quoted"'])
def test_text_is_not_altered(text: str) -> None:
    if text.strip():
        assert FORMATS["positive_pair"].read({"text1": text, "text2": "b"}) == PositivePair(text, "b")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "text1 is empty"),
        (" \t\n", "text1 is empty"),
        (None, "text1 is null"),
        (3, r"text1 is 3 \(int\); a text is needed"),
        (["a"], r"text1 is \['a'\] \(list\); a text is needed"),
        ("a\0b", "text1 holds a NUL character at position 1"),
        ("ab\ud800", "text1 holds a lone surrogate .* at position 2"),
    ],
)
def test_what_is_no_text_is_refused(text: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        FORMATS["positive_pair"].read({"text1": text, "text2": "b"})


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (True, "score is True: a boolean is not a score"),
        (math.nan, "score is nan; a finite number"),
        ("inf", "score is inf; a finite number"),
        ("high", "score is 'high'; a number is needed"),
        ("", "score is ''; a number is needed"),
        (None, r"score is None \(NoneType\); a number is needed"),
        (10**400, "a number is needed"),
        (4.0, r"score is 4.0, outside \[0, 1\]; set score_range"),
        (-0.1, r"score is -0.1, outside \[0, 1\]; set score_range"),
    ],
)
def test_what_is_no_score_is_refused(score: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        FORMATS["scored_pair"].read({"text1": "a", "text2": "b", "score": score})


def test_scores_are_rescaled_and_held_to_their_range() -> None:
    def read(score: object) -> float:
        pair = FORMATS["scored_pair"].read({"text1": "a", "text2": "b", "score": score}, (1.0, 5.0))
        assert isinstance(pair, ScoredPair)
        return pair.score

    assert [read(1), read("2"), read(3.0), read(5)] == [0.0, 0.25, 0.5, 1.0]
    with pytest.raises(RowError, match=r"score is 0.0, outside score_range \[1.0, 5.0\]"):
        read(0)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_rescaled_score_never_leaves_the_unit_interval(low: float, width: float, share: float) -> None:
    high = low + width
    value = min(max(low + share * width, low), high)
    if low < high:
        pair = FORMATS["scored_pair"].read({"text1": "a", "text2": "b", "score": value}, (low, high))
        assert isinstance(pair, ScoredPair)
        assert 0.0 <= pair.score <= 1.0


@pytest.mark.parametrize("label", [3, "entails", None, True, 1.0, ""])
def test_what_is_no_nli_label_is_refused(label: object) -> None:
    with pytest.raises(RowError, match=r"label is .*; needed entailment, neutral, contradiction, or 0, 1, 2"):
        FORMATS["nli_pairs"].read({**NLI, "label": label})


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_field_is_named(format: str) -> None:
    full = {"text1": "a", "text2": "b", "score": 1, "anchor": "a", "positive": "p", "negative": "n", **NLI, "label": 0}
    for field in FORMATS[format].fields:
        with pytest.raises(RowError, match=f"^{field} is missing$"):
            FORMATS[format].read({key: value for key, value in full.items() if key != field})


def test_nli_rows_pair_within_their_premise_in_file_order() -> None:
    rows = [
        ("x", "e1", 1),
        ("y", "c9", 0),
        ("x", "c1", 0),
        ("x", "e2", 1),
        ("x", "e3", 1),
        ("y", "e9", 1),
        ("x", "c2", 0),
    ]

    triples = pair_by_premise([ScoredPair(premise, hypothesis, float(score)) for premise, hypothesis, score in rows])

    assert triples == [Triple("x", "e1", "c1"), Triple("x", "e2", "c2"), Triple("y", "e9", "c9")]


@pytest.mark.parametrize(
    ("columns", "format", "read_from"),
    [
        (
            "anchor positive negative source",
            "triple",
            {"anchor": "anchor", "positive": "positive", "negative": "negative"},
        ),
        ("sent0 sent1 hard_neg", "triple", {"anchor": "sent0", "positive": "sent1", "negative": "hard_neg"}),
        ("query positive negative", "triple", {"anchor": "query", "positive": "positive", "negative": "negative"}),
        (
            "premise hypothesis label split",
            "nli_pairs",
            {"premise": "premise", "hypothesis": "hypothesis", "label": "label"},
        ),
        ("id sentence1 sentence2 score", "scored_pair", {"text1": "sentence1", "text2": "sentence2", "score": "score"}),
        ("text1 text2 label", "scored_pair", {"text1": "text1", "text2": "text2", "score": "label"}),
        ("anchor positive", "positive_pair", {"text1": "anchor", "text2": "positive"}),
        ("sentence1 sentence2", "positive_pair", {"text1": "sentence1", "text2": "sentence2"}),
    ],
)
def test_auto_understands_the_usual_names(columns: str, format: str, read_from: dict[str, str]) -> None:
    assert resolve_format("auto", {}, columns.split()) == (format, read_from)


def test_one_mapping_overrides_and_completes_the_usual_names() -> None:
    columns = ["q1", "sentence2", "sentence1", "gold"]

    assert resolve_format("auto", {"text1": "q1", "score": "gold"}, columns) == (
        "scored_pair",
        {"text1": "q1", "text2": "sentence2", "score": "gold"},
    )
    assert resolve_format("auto", {"text1": "q1"}, columns)[0] == "positive_pair"
    # The same column twice is allowed: unsupervised training pairs a text with itself.
    assert resolve_format("positive_pair", {"text1": "q1", "text2": "q1"}, columns)[1] == {"text1": "q1", "text2": "q1"}


@pytest.mark.parametrize(
    ("format", "mapping", "columns", "message"),
    [
        ("scored", {}, ["a"], r"unknown format 'scored'. Did you mean 'scored_pair'\? Known: auto, "),
        (
            "auto",
            {"text": "a"},
            ["a"],
            r"maps our field names to the file's column names. unknown field 'text'. Did you mean 'text",
        ),
        (
            "auto",
            {"text1": "sentnce1"},
            ["sentence1"],
            r"'sentnce1', which is not there; columns: \['sentence1'\]; nearest",
        ),
        (
            "scored_pair",
            {},
            ["text1", "text2", "scores"],
            r"needs a column for the field 'score' \(recognised: score, label, .*\); "
            r"columns: \['text1', 'text2', 'scores'\]; nearest: 'scores'. Map it: columns: \{score: <its column>\}",
        ),
        (
            "triple",
            {"score": "x"},
            ["x"],
            "`columns` maps score, but format triple has the fields anchor, positive, negative",
        ),
        ("auto", {}, ["image", "captions"], r"\['image', 'captions'\] fit no format"),
        ("auto", {}, ["text1", "text2", "score", "anchor", "positive", "negative"], "fit more than one format"),
        (
            "auto",
            {},
            ["sentence1", "sentence2", "score", "label"],
            r"several columns could be the field 'score' of format scored_pair: \['score', 'label'\]; choose one: "
            r"columns: \{score: score\}",
        ),
    ],
)
def test_what_cannot_be_understood_is_explained(
    format: str, mapping: dict[str, str], columns: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        resolve_format(format, mapping, columns)
