"""`angle-llm data split`: parts that share no text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_lines import read_rows, write_rows

from angle_llm import cli
from angle_llm.data import DataError
from angle_llm.data.keys import normalized
from angle_llm.settings.commands import SplitSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.split import split_rows

ROWS = [{"id": n, "question": f"Where is file {n}?", "answer": f"In folder {n % 60}."} for n in range(80)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_rows(path, rows))


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: read_rows(path) for path in folder.iterdir()}


def split(path: str, out: Path, *more: str) -> dict[str, list[dict[str, Any]]]:
    cli.run(["data", "split", path, "--columns", "text1", "question", "text2", "answer", "--out", str(out), *more])
    return read(out)


def test_the_parts_have_all_rows_and_share_no_text(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": 80, "question": "where is FILE 79", "answer": "Ask."}]  # linked with answer 19
    found = split(write(tmp_path / "t.jsonl", rows), tmp_path / "out")
    corpus = [row["text"] for row in found.pop("corpus")]
    assert corpus == list(dict.fromkeys(row["answer"] for row in rows))
    assert {name: len(part) for name, part in found.items()} == {"train": 57, "valid": 12, "held_out": 12}
    assert sorted((row for part in found.values() for row in part), key=lambda row: row["id"]) == rows
    for column in ("question", "answer"):
        texts = [text for part in found.values() for text in {normalized(row[column]) for row in part}]
        assert len(texts) == len(set(texts))
    assert all(part == sorted(part, key=lambda row: row["id"]) for part in found.values())
    assert split(str(tmp_path / "t.jsonl"), tmp_path / "again") == {**found, "corpus": [{"text": t} for t in corpus]}


def test_rows_that_where_drops_are_in_no_part(tmp_path: Path) -> None:
    rows = [row | {"set": "old" if row["id"] % 2 else "new"} for row in ROWS]
    found = split(write(tmp_path / "t.jsonl", rows), tmp_path / "out", "--where", "set", "new")
    assert {row["text"] for row in found.pop("corpus")} == {row["answer"] for row in rows[::2]}
    assert sorted(row["id"] for part in found.values() for row in part) == list(range(0, 80, 2))
    with pytest.raises(DataError, match=r"no usable row.*80 filtered by where"):
        split(str(tmp_path / "t.jsonl"), tmp_path / "none", "--where", "set", "other")


def test_other_parts_and_formats(tmp_path: Path) -> None:
    """Rows without use, such as neutral ones, are in no part; all texts of a row count."""
    nli = [{"premise": f"p {n}", "hypothesis": f"h {n} {m}", "label": m} for n in range(10) for m in range(3)]
    cli.run(
        ["data", "split", write(tmp_path / "nli.jsonl", nli), "--out", str(tmp_path / "out"), "--parts", "test", "0.3"]
    )
    found = read(tmp_path / "out")
    assert {name: len(part) for name, part in found.items()} == {"train": 14, "test": 6, "corpus": 20}
    assert not {row["premise"] for row in found["train"]} & {row["premise"] for row in found["test"]}
    groups = [{"query": f"q {n}", "positives": [f"a {n}"], "negatives": ["b"]} for n in range(10)]
    with pytest.raises(DataError, match="valid, held_out"):
        cli.run(["data", "split", write(tmp_path / "g.jsonl", groups), "--out", str(tmp_path / "groups")])
    assert not (tmp_path / "groups").exists()


@pytest.mark.parametrize("parts", [{"Train": 0.1}, {"valid": 0.1, "Valid": 0.1}])
def test_names_that_are_one_file_on_macos_are_refused(parts: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--parts: expected"):
        SplitSettings(file="x.jsonl", out=tmp_path / "out", parts=parts)


def test_wrong_settings_and_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", ROWS)
    for parts in ({"train": 0.2}, {"../a": 0.2}, {"a": 0}, {"a": 0.5, "b": 0.5}):
        with pytest.raises(SettingsError, match="--parts"):
            SplitSettings(path, tmp_path / "out", parts)
    with pytest.raises(SettingsError, match="--out"):
        SplitSettings(path, tmp_path)
    bad = write(tmp_path / "bad.jsonl", [*ROWS, {"id": 1, "question": "x", "answer": ""}])
    (tmp_path / "other.csv").write_text("frage,antwort\na,b\n")
    with pytest.raises(DataError, match="--columns"):
        cli.run(["data", "split", str(tmp_path / "other.csv"), "--out", str(tmp_path / "new")])
    with pytest.raises(DataError, match=r"bad\.jsonl:81: answer"):
        split(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


texts = st.lists(st.sampled_from(["a", "A.", "b", "c", "d e", "D, E", "f", "g", "h", "i"]), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(texts, max_size=12), counts=st.lists(st.integers(0, 6), max_size=3))
def test_each_row_is_in_one_part_and_linked_rows_are_together(rows: list[list[str]], counts: list[int]) -> None:
    parts = split_rows(rows, counts)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(len(part) <= count for part, count in zip(parts, counts, strict=False))
    assert len(parts) == len(counts) + 1
    seen = [{normalized(text) for row in part for text in rows[row]} for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_a_part_with_many_rows_of_one_answer_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[f"question {number}", "As usual." if number < 120 else f"answer {number}"] for number in range(500)]
    split_rows(rows, [500])
    shown = capsys.readouterr().out
    assert "120 of at most 500 rows of a part are linked by equal texts, such as 'As usual.'" in shown
    split_rows(rows, [700])
    assert "warning" not in capsys.readouterr().out, "a sixth of the part"
