"""Columns and values of a row, and the example they become."""

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.data import columns
from angle_llm.data.columns import resolve_format
from angle_llm.data.formats import (
    FORMATS,
    DataError,
    Dropped,
    Example,
    Group,
    LabelledText,
    PositivePair,
    RowError,
    ScoredPair,
    Triple,
    pair_by_premise,
)

NLI = {"premise": "p", "hypothesis": "h"}
PAIR = {"text1": "a", "text2": "b"}
UNCHANGED = ["  padded  ", "tab\there", "a\nb", "\u2028x", "🙂", "e\u0301", "\ufeffx", '"quoted"']


@pytest.mark.parametrize(
    ("format", "row", "example"),
    [
        ("scored_pair", {**PAIR, "score": 0.5}, ScoredPair("a", "b", 0.5)),
        ("scored_pair", {**PAIR, "score": "1"}, ScoredPair("a", "b", 1.0)),
        ("positive_pair", PAIR, PositivePair("a", "b")),
        *(("positive_pair", {**PAIR, "text1": text}, PositivePair(text, "b")) for text in UNCHANGED),
        ("triple", {"anchor": "a", "positive": "p", "negative": "n"}, Triple("a", "p", "n")),
        ("nli_pairs", {**NLI, "label": "entailment"}, ScoredPair("p", "h", 1.0)),
        ("nli_pairs", {**NLI, "label": "Contradiction"}, ScoredPair("p", "h", 0.0)),
        ("nli_pairs", {**NLI, "label": 0}, ScoredPair("p", "h", 1.0)),
        ("nli_pairs", {**NLI, "label": 1}, Dropped("neutral")),
        ("nli_pairs", {**NLI, "label": 2.0}, ScoredPair("p", "h", 0.0)),
        ("nli_pairs", {**NLI, "label": "2.0"}, ScoredPair("p", "h", 0.0)),
        *(("labelled_text", {"text": "a", "label": label}, LabelledText("a", "2")) for label in (2.0, "2.0 ")),
        ("labelled_text", {"text": "a", "label": "v2.0"}, LabelledText("a", "v2.0")),
        ("nli_pairs", {**NLI, "label": -1}, Dropped("no gold label")),
        ("nli_pairs", {**NLI, "label": "-"}, Dropped("no gold label")),
    ],
)
def test_row_becomes_its_example(format: str, row: dict[str, object], example: Example) -> None:
    assert FORMATS[format].read(row, None) == example


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *(
            ("text1", value, reason)
            for value, reason in [
                (" \t\n", "empty"),
                (None, "null"),
                (3, "int"),
                ("a\0b", "NUL"),
                ("ab\ud800", "surrogate"),
            ]
        ),
        *(("score", value, "") for value in (True, math.nan, "inf", "high", "", None, 10**400)),
        ("score", 4.0, "--score-range"),
        ("score", "entailment", "nli_pairs"),
        ("score", 2, "nli_pairs"),
        *(("label", label, "") for label in (3, "entails", None, True, 1.5, "", [0])),
    ],
)
def test_unusable_value_is_refused_with_its_field(field: str, value: object, reason: str) -> None:
    row = {**PAIR, **NLI, "score": 1, "label": 0, field: value}
    with pytest.raises(RowError, match=f"^{field} .*{reason}"):
        FORMATS["nli_pairs" if field == "label" else "scored_pair"].read(row, None)


def test_missing_field_is_named() -> None:
    row = {**PAIR, "score": 1, "anchor": "a", "positive": "p", "negative": "n", **NLI, "label": 0}
    row |= {"query": "q", "positives": ["p"]}
    for format in FORMATS.values():
        for field in format.fields:
            with pytest.raises(RowError, match=f"^{field} is missing$"):
                format.read({name: value for name, value in row.items() if name != field}, None)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1), st.booleans())
def test_rescaled_score_is_in_the_unit_interval(low: float, width: float, share: float, reversed_: bool) -> None:
    ends = (low, low + width)
    value = min(max(low + share * width, low), low + width)
    if low < low + width:
        pair = FORMATS["scored_pair"].read({**PAIR, "score": value}, ends[::-1] if reversed_ else ends)
        assert isinstance(pair, ScoredPair)
        assert 0.0 <= pair.score <= 1.0


def test_scores_are_rescaled_from_their_range() -> None:
    read = FORMATS["scored_pair"].read
    scores = [read({**PAIR, "score": score}, (1, 5)) for score in (1, "2", 3.0, 5)]
    assert scores == [ScoredPair("a", "b", score) for score in (0.0, 0.25, 0.5, 1.0)]
    assert read({**PAIR, "score": 0}, (1, 0)) == ScoredPair("a", "b", 1.0)
    with pytest.raises(RowError, match="score"):
        read({**PAIR, "score": 0}, (1, 5))


def test_nli_rows_are_paired_within_their_premise_in_file_order() -> None:
    labelled = ["x e1 1", "y c9 0", "x c1 0", "x e2 1", "x e3 1", "y e9 1", "x c2 0"]
    pairs = [ScoredPair(left, right, float(score)) for left, right, score in map(str.split, labelled)]
    assert pair_by_premise(pairs) == [Triple("x", "e1", "c1"), Triple("x", "e2", "c2"), Triple("y", "e9", "c9")]


QUERY = {"query": "q", "positives": ["p"]}


@pytest.mark.parametrize(
    ("row", "group"),
    [
        (QUERY, Group("q", ("p",))),
        ({**QUERY, "negatives": None, "scores": None}, Group("q", ("p",))),
        ({**QUERY, "positives": "p", "negatives": ["n", "m"]}, Group("q", ("p",), ("n", "m"))),
        ({**QUERY, "positives": ("p", "r"), "negatives": [], "scores": [1, -0.5]}, Group("q", ("p", "r"), (), (1.0, -0.5))),
        (
            {**QUERY, "negatives": ["n", "m"], "positive_scores": [9], "negative_scores": [1, 2]},
            Group("q", ("p",), ("n", "m"), (9.0, 1.0, 2.0)),
        ),
        ({**QUERY, "positive_scores": [9]}, Group("q", ("p",), (), (9.0,))),
        (
            {**QUERY, "negative_10": "c", "negative_9": "b", "negative_2": None, "negative_1": "a"},
            Group("q", ("p",), ("a", "b", "c")),
        ),
        (
            {**QUERY, "positives": [{"docid": "1", "title": "T", "text": "x"}, {"title": "", "text": "y"}, {"text": "z"}]},
            Group("q", ("T x", "y", "z")),
        ),
        ({**QUERY, "positives": [{"title": " ", "text": "x"}]}, Group("q", ("x",))),
        ({**QUERY, "negative_1": "a", "negative_2": " "}, Group("q", ("p",), ("a",))),
        ({**QUERY, "positives": ["p", "p"], "negatives": ["n", "n"]}, Group("q", ("p",), ("n",))),
        (
            {**QUERY, "positives": ["p", "p"], "negatives": ["n", "n"], "scores": [3, 3, 1, 1]},
            Group("q", ("p",), ("n",), (3.0, 1.0)),
        ),
    ],
)  # fmt: skip
def test_row_becomes_its_group(row: dict[str, object], group: Group) -> None:
    assert FORMATS["group"].read(row, None) == group


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"query": ""}, "query"),
        *(({"positives": value}, "positives") for value in ([], None, 3, {"text": "p"}, '["p", "r"]')),
        ({"positives": ["p", " "]}, r"positives\[1\]"),
        ({"negatives": ["n", None]}, r"negatives\[1\]"),
        *(({"negatives": [value]}, r"negatives\[0\]") for value in (["n"], {"title": "T"}, {"text": ""}, {"text": 3})),
        ({"negatives": ["n", "p"]}, "the text 'p'"),
        *(({"scores": value}, "scores .*, one per text$") for value in ([1], [])),
        *(({"scores": value}, "scores .* set --format triple") for value in (0.5, "1")),
        ({"scores": [1, math.nan]}, r"scores\[1\]"),
        *(({"scores": [value, 0]}, r"scores\[0\]") for value in (True, "1")),
        ({"negatives": ["n", "n"], "scores": [1, 2, 3]}, "the text 'n'"),
        ({"positive_scores": [1]}, "negative_scores"),
        ({"negative_scores": [1]}, "positive_scores"),
        ({"positive_scores": [1, 2], "negative_scores": [1]}, "positive_scores"),
        ({"scores": [1, 2], "positive_scores": [1]}, "positive_scores"),
    ],
)
def test_unusable_group_is_refused_with_its_field(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(RowError, match=f"^{reason}|^expected .*{reason}"):
        FORMATS["group"].read({**QUERY, "negatives": ["n"], **changed}, None)


WORDS = st.text("abc é", min_size=1, max_size=4).filter(str.strip)
NUMBERS = st.floats(-1e6, 1e6)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups as they are after reading: no text twice among positives and negatives."""
    texts = draw(st.lists(WORDS, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(1, len(texts)))
    scores = draw(st.none() | st.tuples(*[NUMBERS] * len(texts)))
    return Group(draw(WORDS), tuple(texts[:cut]), tuple(texts[cut:]), scores)


def as_flag_embedding(group: Group) -> dict[str, object]:
    row: dict[str, object] = {"query": group.query, "pos": [*group.positives], "neg": [*group.negatives]}
    if group.scores is not None:
        cut = len(group.positives)
        row |= {"pos_scores": [*group.scores[:cut]], "neg_scores": [*group.scores[cut:]]}
    return row


def as_tevatron(group: Group) -> dict[str, object]:
    def passages(texts: tuple[str, ...]) -> list[dict[str, str]]:
        return [{"docid": f"{place}", "title": "", "text": text} for place, text in enumerate(texts)]

    positives, negatives = passages(group.positives), passages(group.negatives)
    row = {"query_id": "1", "query": group.query, "positive_passages": positives, "negative_passages": negatives}
    return row | ({} if group.scores is None else {"scores": [*group.scores]})


def as_numbered(group: Group) -> dict[str, object]:
    first, *others = group.positives
    row: dict[str, object] = {"anchor": group.query, "positive": [first, *others] if others else first}
    row |= {f"negative_{place}": text for place, text in enumerate(group.negatives, 1)}
    return row | ({} if group.scores is None else {"label": [*group.scores]})


def as_ours(group: Group) -> dict[str, object]:
    row: dict[str, object] = {"query": group.query, "positives": group.positives, "negatives": group.negatives}
    return row | {"scores": group.scores}


@pytest.mark.parametrize("write", [as_flag_embedding, as_tevatron, as_numbered, as_ours])
@given(group=groups())
def test_groups_of_every_library_are_read_unchanged(write: Callable[[Group], dict[str, object]], group: Group) -> None:
    row = write(group)
    name, fields = resolve_format("group" if "anchor" in row else "auto", {}, list(row))
    assert name == "group"
    assert FORMATS[name].read({field: row[column] for field, column in fields.items()}, None) == group


FORMAT_OF = {"triple": "triple", "positive pair": "positive_pair", "scored pair": "scored_pair", "NLI": "nli_pairs"}
FORMAT_OF |= {"group": "group", "labelled text": "labelled_text"}


def documented() -> list[tuple[str, str]]:
    """Columns and format of each row of the table in the module; a row may list several sets of columns."""
    found = []
    for line in (columns.__doc__ or "").splitlines():
        if line.startswith("| `"):
            _, names, meaning, *_ = (cell.strip() for cell in line.split("|"))
            formats = [FORMAT_OF[word] for word in meaning.split(", ") if word in FORMAT_OF]
            groups = re.findall(r"`([^`]*)`", re.sub(r"\(.*\)", "", names))
            groups = [group.replace(" ", ",") for group in groups] if "#1" not in names else [",".join(groups)]
            found += [(group, formats[min(place, len(formats) - 1)]) for place, group in enumerate(groups)]
    return found


@pytest.mark.parametrize(("names", "format"), documented())
def test_documented_columns_are_recognised(names: str, format: str) -> None:
    assert len(documented()) == 28
    found, fields = resolve_format("auto", {}, [*names.split(","), "id", "source"])
    assert found == format
    assert set(fields.values()) == set(names.split(","))


def test_mapping_overrides_and_completes_the_recognised_names() -> None:
    names = ["q1", "sentence2", "sentence1", "gold"]
    fields = {"text1": "q1", "text2": "sentence2", "score": "gold"}
    assert resolve_format("auto", {"text1": "q1", "score": "gold"}, names) == ("scored_pair", fields)
    assert resolve_format("auto", {"text1": "q1"}, names)[0] == "positive_pair"
    # One column for both fields: unsupervised training pairs a text with itself.
    assert resolve_format("positive_pair", {"text1": "q1", "text2": "q1"}, names)[1] == {"text1": "q1", "text2": "q1"}


def test_fields_of_a_group_can_be_mapped() -> None:
    names = ["q", "good", "bad1", "bad2", "positive"]
    mapping = {"query": "q", "positives": "good", "negative_1": "bad1", "negative_2": "bad2"}
    assert resolve_format("auto", mapping, names) == ("group", mapping)
    triple = {"query": "anchor", "positives": "positive", "negatives": "negative", "scores": "label"}
    assert resolve_format("group", {}, ["anchor", "positive", "negative", "label"]) == ("group", triple)


def test_second_judgement_beside_the_score_is_read_only_if_it_is_mapped() -> None:
    sick = ["pair_id", "sentence1", "sentence2", "score", "entailment"]
    assert resolve_format("auto", {}, sick)[1] == {"text1": "sentence1", "text2": "sentence2", "score": "score"}
    nli = {"premise": "sentence1", "hypothesis": "sentence2", "label": "entailment"}
    assert resolve_format("auto", {"label": "entailment"}, sick) == ("nli_pairs", nli)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("sentence1 sentence2 score label", "--data.columns score score"),
        ("query anchor positive negative", "anchor, query"),
        ("text1 text2 score anchor positive negative", "scored_pair.*triple"),
        ("text category", "text, category.*labelled_text: text, label"),
        ("image captions", "image, captions"),
        ("query answer pos neg", "positive_pair, group"),
    ],
)
def test_ambiguous_or_unknown_columns_are_refused_with_the_choice(names: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        resolve_format("auto", {}, names.split())


@pytest.mark.parametrize(
    ("format", "mapping", "names", "reason"),
    [
        ("auto", {"text": "a"}, "a", "labelled_text: text, label"),
        ("auto", {"question": "text1"}, "question answer", "'question'"),
        ("auto", {}, "frage antwort", "--data.columns"),
        ("auto", {"text1": "sentnce1"}, "sentence1", "'sentnce1'.*'sentence1'"),
        ("scored_pair", {}, "text1 text2 scores", "'score' .*scores"),
        ("triple", {"score": "x"}, "x", "score.*anchor, positive, negative"),
        ("triplet", {}, "text1 text2", "triple"),
    ],
)
def test_unusable_mapping_is_refused(format: str, mapping: dict[str, str], names: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        resolve_format(format, mapping, names.split())
