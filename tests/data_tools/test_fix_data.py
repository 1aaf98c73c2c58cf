"""`angle-llm data check --fix`: rows in = kept + quarantined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checking import OTHER, PAIR, checked, data, found, write
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.data import DataSource, ScoredPair, load_examples
from angle_llm.data_tools.command import data_main
from angle_llm.data_tools.fix import write_fixed


def test_fix_writes_what_is_sound_and_what_is_not_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nli = [{"premise": "a", "hypothesis": f"b {n}", "label": n % 3, "id": n} for n in range(6)]
    path = write(tmp_path / "nli.jsonl", *nli, nli[0], {**nli[2], "label": 0}, "{", {**nli[3], "hypothesis": "\ud800"})
    out = tmp_path / "out"

    assert data(path, "--model", "none", "--fix", str(out)) == 1

    kept = [json.loads(line) for line in (out / "nli.jsonl").read_text().splitlines()]
    gone = [json.loads(line) for line in (out / "nli.quarantine.jsonl").read_text().splitlines()]
    assert kept == [nli[0], nli[1], nli[3], nli[4], nli[5]]  # neutral rows stay
    assert [(row["line"], row["reason"].split(" ")[0]) for row in gone] == [
        (3, "contradiction"),
        (7, "duplicate"),
        (8, "contradiction"),
        (9, "not"),
        (10, "hypothesis"),
    ]
    assert gone[2]["row"] == {**nli[2], "label": 0}
    assert gone[3]["row"] is None
    assert "10 rows = 5 kept in" in capsys.readouterr().out
    assert data(str(out / "nli.jsonl"), "--model", "none") == 0


def test_fix_takes_contaminated_rows_out(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", PAIR)
    path = write(tmp_path / "x.jsonl", PAIR, OTHER)

    data(path, "--model", "none", "--against", test, "--fix", str(tmp_path / "out"))

    assert (tmp_path / "out" / "x.jsonl").read_text() == json.dumps(OTHER) + "\n"
    assert "its pair is in test.jsonl" in (tmp_path / "out" / "x.quarantine.jsonl").read_text()


def test_fix_leaves_a_folder_that_holds_something_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(ValueError, match="holds something"):
        data_main(["check", write(tmp_path / "x.jsonl", PAIR), "--fix", str(tmp_path / "out"), "--model", "none"])


texts = st.sampled_from(["a", "A.", "b", "c d", "", " ", "\0", "\ud800", "🙂", "🙁", "é"])
rows = st.one_of(
    st.fixed_dictionaries({"text1": texts, "text2": texts, "score": st.sampled_from([0, 1, 0.4, 5, None, True])}),
    st.sampled_from(["{", "[]", '{"text1": 1, "text1": 2}']),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(rows, max_size=12))
def test_every_row_is_kept_or_quarantined(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("fix")
    path = write(folder / "x.jsonl", PAIR, OTHER, *rows)

    checked_again = checked(path)
    (report,) = checked_again.reports
    (fixed,) = write_fixed(checked_again.to_fix, folder / "out")

    report.text().encode()
    assert report.rows_in == report.rows_used + sum(report.dropped.values()) + report.rejected == len(rows) + 2
    assert fixed.rows_in == fixed.kept + fixed.quarantined == report.rows_in
    assert len((folder / "out" / "x.jsonl").read_text().splitlines()) == fixed.kept
    assert len((folder / "out" / "x.quarantine.jsonl").read_text().splitlines()) == fixed.quarantined
    if fixed.kept:
        range_kept = report.score_range
        again = checked(str(folder / "out" / "x.jsonl"), score_range=range_kept).reports[0]
        assert not {"rejected", "duplicate", "near duplicate", "contradiction", "unlike itself"} & set(found(again))


def test_files_of_one_name_do_not_write_over_each_other(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(("a/x.jsonl", "b/x.jsonl", "c/x-2.jsonl", "d/x.quarantine.jsonl")):
        (tmp_path / name).parent.mkdir()
        row = {"text1": f"a man eats {number}", "text2": "b", "score": number / 4}
        paths.append(write(tmp_path / name, row))
    data(*paths, "--model", "none", "--fix", str(tmp_path / "out"))
    written = [path for path in (tmp_path / "out").glob("*.jsonl") if "reason" not in path.read_text("utf-8")]
    kept = [line for path in written for line in path.read_text("utf-8").splitlines()]
    assert sorted(json.loads(line)["text1"] for line in kept) == [f"a man eats {number}" for number in range(4)]


def test_numbered_labels_keep_their_meaning(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    text, label = Value("string"), ClassLabel(names=["contradiction", "entailment"])
    order = Features({"premise": text, "hypothesis": text, "label": label})
    rows = {"premise": ["a man eats", "a dog runs"], "hypothesis": ["he starves", "it moves"], "label": [0, 1]}
    (tmp_path / "nli").mkdir()
    Dataset.from_dict(rows, features=order).to_parquet(tmp_path / "nli" / "train.parquet")
    assert data(str(tmp_path / "nli"), "--model", "none", "--fix", str(tmp_path / "out")) == 0
    examples = load_examples(DataSource(path=str(tmp_path / "out" / "nli.jsonl"))).examples
    assert examples == [ScoredPair("a man eats", "he starves", 0.0), ScoredPair("a dog runs", "it moves", 1.0)]


def test_a_label_in_the_middle_contradicts_neither_end(tmp_path: Path) -> None:
    rows = [{"text1": "a man eats", "text2": "he has lunch", "score": score} for score in (1.0, 0.5, 0.2)]
    path = write(tmp_path / "x.jsonl", *rows)
    assert data(path, "--model", "none", "--fix", str(tmp_path / "out")) == 1
    (kept,) = (tmp_path / "out" / "x.jsonl").read_text("utf-8").splitlines()
    assert json.loads(kept)["score"] == 0.5
