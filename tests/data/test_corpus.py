"""The texts of a corpus: order, places, ids, blocks, and bad rows."""

import io
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from angle_llm.data.corpus import Corpus, CorpusText
from angle_llm.data.formats import DataError
from angle_llm.data.sources import BadRow

ROWS = [("a", 'She said "no", twice.'), ("b", "Zwei Hunde – 犬"), ("3", "line \u2028 separator")]


def lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def texts(corpus: Corpus) -> list[str]:
    return [row.text for row in corpus if isinstance(row, CorpusText)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_all_file_types_give_the_same_rows_in_order(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        table = {"id": [id for id, _ in ROWS], "other": [1.5] * 3, "text": [text for _, text in ROWS]}
        parquet.write_table(pyarrow.table(table), path)
    else:
        lines(path, [text if name == "a.txt" else json.dumps({"id": id, "text": text}) for id, text in ROWS])
    corpus = Corpus.open(path, id_column=None if name == "a.txt" else "id")
    rows = [(row.id, row.text) for row in corpus if isinstance(row, CorpusText)]
    assert rows == [(None if name == "a.txt" else id, text) for id, text in ROWS]
    survey = corpus.survey(skip_bad=False)
    assert (survey.rows, survey.files[0]["size"]) == (3, path.stat().st_size)
    assert corpus.texts({2, 0}) == {0: ROWS[0][1], 2: ROWS[2][1]}


def test_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b/x.txt", "a2.txt", "a1.txt", "_SUCCESS", ".hidden.txt", "notes.md", "config.json"):
        lines(tmp_path / "in" / name, [name])
    corpus = Corpus.open(tmp_path / "in")
    assert texts(corpus) == ["a1.txt", "a2.txt", "b/x.txt"]
    assert corpus.source.ignored == ("config.json", "notes.md")
    lines(tmp_path / "in" / "c.csv", ["id,body", "x,two"])
    assert texts(Corpus.open(tmp_path / "in", "body")) == ["a1.txt", "a2.txt", "b/x.txt", "two"]


def test_lines_of_text_end_with_any_line_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\x0bstill three\n last, not stripped ")
    assert texts(Corpus.open(tmp_path / "a.txt")) == ["one", "two", "three\x0bstill three", " last, not stripped "]


def test_the_column_is_not_that_of_a_first_row_that_lacks_the_usual_one(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ['{"title": "One"}', '{"title": "Two", "text": "long"}'])
    assert texts(Corpus.open(tmp_path / "a.jsonl")) == ["long"]


def test_a_table_without_the_column_is_refused_and_not_skipped(tmp_path: Path) -> None:
    lines(tmp_path / "in" / "a.jsonl", ['{"text": "one"}'])
    lines(tmp_path / "in" / "empty.jsonl", [])
    lines(tmp_path / "in" / "mixed.jsonl", ['{"id": 1}', '{"text": "two"}'])
    assert Corpus.open(tmp_path / "in").survey(skip_bad=True).rows == 3
    lines(tmp_path / "in" / "b.csv", ["id,body", "x,two"])
    with pytest.raises(DataError, match=r"b\.csv: no column 'text'; columns: id, body"):
        Corpus.open(tmp_path / "in")


def test_titles_that_are_not_read_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "corpus.jsonl", ['{"_id": "d1", "title": "One", "text": "long"}'])
    Corpus.open(tmp_path / "corpus.jsonl", "text")
    assert not capsys.readouterr().err
    Corpus.open(tmp_path / "corpus.jsonl")
    (warning,) = capsys.readouterr().err.splitlines()
    assert "corpus.jsonl: the column title is not read" in warning


@pytest.mark.parametrize(("name", "content"), [("a.csv", '"How, then?"\nx\n'), ("a.tsv", "How, then?\nx\n")])
def test_a_first_line_that_is_the_name_of_the_only_column_gets_a_warning(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert texts(Corpus.open(tmp_path / name)) == ["x"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"{name}: the first line, 'How, then?', is read as the name of its only column" in warning
    (tmp_path / name).write_text(f"sentence\n{content}")
    assert len(texts(Corpus.open(tmp_path / name))) == 2
    assert not capsys.readouterr().err


def test_standard_input_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("one\nzwei – 2\n".encode())))
    corpus = Corpus.open("-")
    assert corpus.survey(skip_bad=False).rows == 2
    assert texts(corpus) == texts(corpus) == ["one", "zwei – 2"]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.txt", b"x\n \t\n", 2),
        ("a.txt", b"x\ncaf\xe9\n", 2),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ""}\n', 3),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 2),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"\n', 2),
        ("a.csv", b"text,id\nx,1\ny\n", 3),
    ],
)
def test_bad_row_is_reported_with_file_and_line_or_counted(
    name: str, content: bytes, place: int, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    corpus = Corpus.open(tmp_path / name)
    (bad,) = [row for row in corpus if isinstance(row, BadRow)]
    assert (bad.file, bad.line) == (str(tmp_path / name), place)
    with pytest.raises(DataError, match=rf"{name}:{place}: .*--on-bad-row"):
        corpus.survey(skip_bad=False)
    assert corpus.survey(skip_bad=True).rows == len(list(corpus))


@pytest.mark.parametrize(("id_column", "reason"), [(None, "row 2: text"), ("id", "row 1: id")])
def test_bad_row_of_parquet_is_reported_with_its_number(id_column: str | None, reason: str, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["x", None], "id": [None, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet {reason}"):
        Corpus.open(tmp_path / "a.parquet", id_column=id_column).survey(skip_bad=False)


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("a.csv", "a,b\n1,2\n", {}, "--column"),
        ("a.jsonl", '{"text": "x"}\n', {"column": "txt"}, "a.jsonl: no column 'txt'; columns: text"),
        ("a.tsv", "text\tb\n1\t2\n", {"id_column": "id"}, "a.tsv:2: no column 'id'; columns: text, b"),
        ("a.txt", "x\n", {"id_column": "id"}, "a.txt:1: no column 'id'"),
        ("a.dat", "id\tbody\n1\tx\n", {"column": "body"}, r"a\.dat: expected a table, because --column body is set"),
        ("folder/a.md", "", {}, "folder"),
        ("a.txt", "", {}, r"a\.txt"),
        ("a.txt", "\n\n", {}, r"a\.txt"),
    ],
)
def test_unusable_source_or_column_is_refused(
    name: str, content: str, options: dict[str, str], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        Corpus.open(path.parent if "/" in name else path, **options).survey(skip_bad=True)


@pytest.mark.parametrize("rows", [11, 12, 13])
def test_blocks_of_all_ranks_have_every_row_once(rows: int, tmp_path: Path) -> None:
    corpus = Corpus.open(lines(tmp_path / "a.txt", [str(number) for number in range(rows)]))
    blocks = [block for rank in range(3) for block in corpus.blocks(4, lambda number, rank=rank: number % 3 == rank)]
    for block in blocks:
        assert block.first == 4 * block.number
        found = [row.text for row in block.rows if isinstance(row, CorpusText)]
        assert found == [str(row) for row in range(block.first, min(block.first + 4, rows))]
    assert sorted(block.number for block in blocks) == list(range(-(-rows // 4)))


def test_changed_file_is_detected(tmp_path: Path) -> None:
    corpus = Corpus.open(lines(tmp_path / "a.txt", ["one"]))
    survey = corpus.survey(skip_bad=False)
    lines(tmp_path / "a.txt", ["one", "one more"])
    with pytest.raises(DataError, match=r"a\.txt"):
        corpus.check_unchanged(survey)
