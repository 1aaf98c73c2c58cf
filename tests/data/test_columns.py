"""The names that data sets give their columns, and what they are taken to mean."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from angle_llm.data import DataError, DataSource, Example, PositivePair, ScoredPair, Triple, columns, load_examples
from angle_llm.data.columns import USUAL_NAMES, resolve_format

FORMAT_OF = {"triple": "triple", "positive pair": "positive_pair", "scored pair": "scored_pair", "NLI": "nli_pairs"}


def table() -> list[tuple[str, str]]:
    """(columns, format) of each row of the module's table, which lists several sets of columns with commas."""
    found = []
    for line in (columns.__doc__ or "").splitlines():
        if not line.startswith("| `"):
            continue
        _, names, meant, *_ = (cell.strip() for cell in line.split("|"))
        words = [word for word in re.split(r", ", meant) if word in FORMAT_OF]
        if names.startswith("`#1 String`"):
            found.append(("#1 String,#2 String,Quality", "scored_pair"))
            continue
        for place, group in enumerate(re.findall(r"`([^`]*)`", re.sub(r"\(.*\)", "", names))):
            found.append((",".join(group.split()), FORMAT_OF[words[min(place, len(words) - 1)]]))
    return found


def test_the_table_is_read_as_it_stands() -> None:
    assert len(table()) == 19
    assert ("sent0,sent1,hard_neg", "triple") in table()
    assert ("query,positive", "positive_pair") in table()
    assert ("premise,hypothesis,label", "nli_pairs") in table()


@pytest.mark.parametrize(("names", "format"), table())
def test_every_set_of_columns_in_the_table_is_read_as_the_table_says(names: str, format: str) -> None:
    found, fields = resolve_format("auto", {}, [*names.split(","), "id", "source"])

    assert found == format
    assert set(fields.values()) == set(names.split(","))


def test_a_second_judgement_beside_the_score_is_not_read_unless_it_is_named() -> None:
    sick = ["pair_id", "sentence1", "sentence2", "score", "entailment"]

    assert resolve_format("auto", {}, sick)[1] == {"text1": "sentence1", "text2": "sentence2", "score": "score"}
    assert resolve_format("auto", {"label": "entailment"}, sick) == (
        "nli_pairs",
        {"premise": "sentence1", "hypothesis": "sentence2", "label": "entailment"},
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "sentence1 sentence2 score label",
            r"'score' of format scored_pair: \['score', 'label'\]; choose one: columns: \{score",
        ),
        ("text1 sentence1 text2", r"'text1' of format positive_pair: \['text1', 'sentence1'\]; choose one"),
        ("query anchor positive negative", r"'anchor' of format triple: \['anchor', 'query'\]; choose one"),
        ("sentence1 sentence2 label gold_label", r"'label' of format nli_pairs: \['label', 'gold_label'\]; choose one"),
        ("text label", "fit no format. These are single texts, as of a classification task"),
        ("text coarse fine", "fit no format. These are single texts"),
        ("image captions", "These are several texts of one thing; write a row for each pair"),
        ("query pos neg", "These are lists of positives and negatives; write a row for each"),
        ("a b", "fit no format. Set `format`"),
    ],
)
def test_two_columns_for_one_field_and_no_pairs_are_errors_that_name_the_choice(names: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_format("auto", {}, names.split())


def load(path: Path, rows: list[dict[str, object]], **settings: object) -> list[Example]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_examples(DataSource(str(path), **settings)).examples  # type: ignore[arg-type]


def test_a_label_of_angle_emb_and_a_label_of_nli_mean_opposite_things(tmp_path: Path) -> None:
    angle = [{"text1": "a", "text2": "b", "label": 1}, {"text1": "a", "text2": "c", "label": "0"}]
    nli = [{"premise": "a", "hypothesis": "b", "label": 0}, {"premise": "a", "hypothesis": "c", "label": 2}]

    expected = [ScoredPair("a", "b", 1.0), ScoredPair("a", "c", 0.0)]
    assert load(tmp_path / "angle.jsonl", angle) == load(tmp_path / "nli.jsonl", nli) == expected


def test_snli_as_released_is_no_set_of_positive_pairs(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"gold_label": label, "sentence1": "a", "sentence2": label, "pairID": "1"}
        for label in ("entailment", "neutral", "contradiction", "-")
    ]

    assert load(tmp_path / "snli.jsonl", rows) == [
        ScoredPair("a", "entailment", 1.0),
        ScoredPair("a", "contradiction", 0.0),
    ]


@pytest.mark.parametrize("label", ["entailment", "NEUTRAL", 2, "2"])
def test_classes_of_nli_in_a_score_column_are_refused_with_the_format_to_name(tmp_path: Path, label: object) -> None:
    row = {"sentence1": "a", "sentence2": "b", "label": label}

    with pytest.raises(DataError, match=r"classes of NLI .* set format to nli_pairs"):
        load(tmp_path / "x.jsonl", [row])
    entailed = {"sentence1": "a", "sentence2": "b", "label": "entailment"}
    assert load(tmp_path / "y.jsonl", [row, entailed], format="nli_pairs")[-1] == ScoredPair("a", "b", 1.0)


def test_simcse_and_questions_are_read(tmp_path: Path) -> None:
    simcse: dict[str, object] = {"sent0": "a", "sent1": "p", "hard_neg": "n"}

    assert load(tmp_path / "a.jsonl", [simcse]) == [Triple("a", "p", "n")]
    assert load(tmp_path / "b.jsonl", [{"query": "q", "answer": "a"}]) == [PositivePair("q", "a")]
    assert load(tmp_path / "c.jsonl", [{"text": "a", "positive": "p", "negative": "n"}]) == [Triple("a", "p", "n")]


def test_no_field_has_a_name_twice() -> None:
    for names in USUAL_NAMES.values():
        assert len(names) == len(set(names))
