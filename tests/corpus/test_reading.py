"""Rows of files of every kind: their order, their places, and what is wrong with bad ones."""

import gzip
import io
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from corpora import TEXTS, write_lines
from pyarrow import parquet

from angle_llm.config import SettingsError
from angle_llm.corpus.reading import Corpus
from angle_llm.data import DataError

ROWS = [("a", 'She said "no", twice.'), ("b", "Zwei Hunde – 犬"), ("3", "line \u2028 separator")]


def write(path: Path) -> Path:
    """`ROWS` in the kind of file that the name says."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        table = {"id": [row[0] for row in ROWS], "other": [1.5] * 3, "text": [row[1] for row in ROWS]}
        parquet.write_table(pyarrow.table(table), path)
        return path
    quoted = [(name, text.replace('"', '""')) for name, text in ROWS]
    content = {
        "txt": "".join(f"{text}\n" for _, text in ROWS),
        "jsonl": "\n".join(json.dumps({"id": name, "other": None, "text": text}) + "\n" for name, text in ROWS),
        "csv": "id,text\n" + "".join(f'{name},"{text}"\n' for name, text in quoted),
        "tsv": "id\ttext\n" + "".join(f"{name}\t{text}\n" for name, text in ROWS),
    }[kind].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts(corpus: Corpus) -> list[str]:
    return [corpus.read(file, raw).text for file, _, raw in corpus.raw_rows()]


@pytest.mark.parametrize(
    "name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "a.parquet"]
)
def test_every_kind_of_file_gives_its_rows_in_order(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    with_ids = ".txt" not in name
    corpus = Corpus.open(path, id_column="id" if with_ids else None)
    rows = [corpus.read(file, raw) for file, _, raw in corpus.raw_rows()]
    assert [row.text for row in rows] == [text for _, text in ROWS]
    assert [row.id for row in rows] == ([name for name, _ in ROWS] if with_ids else [None] * 3)
    survey = corpus.survey(skip_bad=False)
    assert (survey.rows, survey.bad) == (3, 0)
    assert survey.files[0]["size"] == path.stat().st_size
    assert corpus.texts({2, 0}) == {0: ROWS[0][1], 2: ROWS[2][1]}


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    write_lines(tmp_path / "in" / "b" / "x.txt", ["third"])
    write_lines(tmp_path / "in" / "a2.txt", ["second"])
    write_lines(tmp_path / "in" / "a1.txt", ["first"])
    for name in ("_SUCCESS", ".hidden.txt", "notes.md"):
        write_lines(tmp_path / "in" / name, ["not this"])
    corpus = Corpus.open(tmp_path / "in")
    assert texts(corpus) == ["first", "second", "third"]
    assert corpus.ignored == ["notes.md"]


def test_lines_of_text_end_as_they_do_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\x0bstill three\n last, not stripped ")
    assert texts(Corpus.open(tmp_path / "a.txt")) == ["one", "two", "three\x0bstill three", " last, not stripped "]


def test_standard_input_is_read_as_often_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("one\nzwei – 2\n".encode())))
    corpus = Corpus.open(Path("-"))
    assert corpus.survey(skip_bad=False).rows == 2
    assert texts(corpus) == texts(corpus) == ["one", "zwei – 2"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"x\n\ny\n", r"a\.txt:2: the text is empty"),
        ("a.txt", b"x\n \t\n", r"a\.txt:2: the text is empty"),
        ("a.txt", b"x\ncaf\xe9\n", r"a\.txt:2: byte 0xe9 is not UTF-8. Convert it"),
        ("a.txt", b"x\na\0b\n", r"a\.txt:2: the text holds a NUL"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ""}\n', r"a\.jsonl:3: text is empty"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a\.jsonl:2: text is 3"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', r"a\.jsonl:2: text is missing"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"\n', r"a\.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud800"}\n', r"a\.jsonl:2: text holds a lone surrogate"),
        ("a.csv", b"text,id\nx,1\ny\n", r"a\.csv:3: 1 fields, but the header has 2"),
        ("a.tsv", b"text\tid\nx\t1\ncaf\xe9\t2\n", r"a\.tsv:3: byte 0xe9 is not UTF-8"),
    ],
)
def test_a_bad_row_is_told_with_its_place_or_counted(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    corpus = Corpus.open(tmp_path / name)
    with pytest.raises(DataError, match=told + ".*--on-bad-row skip"):
        corpus.survey(skip_bad=False)
    assert corpus.survey(skip_bad=True).bad == 1


def test_a_bad_row_of_parquet_is_told_with_its_number(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["x", None], "id": [None, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet row 2: text is null"):
        Corpus.open(tmp_path / "a.parquet").survey(skip_bad=False)
    with pytest.raises(DataError, match=r"a\.parquet row 1: id is None; an id is a text or a whole number"):
        Corpus.open(tmp_path / "a.parquet", id_column="id").survey(skip_bad=False)


def test_a_gzip_file_that_was_cut_is_told(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"{n}\n" for n in range(9999)).encode())
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.txt\.gz:\d+: the gzip file is truncated"):
        Corpus.open(tmp_path / "a.txt.gz").survey(skip_bad=True)


@pytest.mark.parametrize(
    ("name", "content", "options", "told"),
    [
        ("a.csv", "a,b\n1,2\n", {}, "columns a, b. Say which"),
        ("a.csv", "text,b\n1,2\n", {"column": "txt"}, "no column 'txt'; nearest: 'text'"),
        ("a.tsv", "text\tb\n1\t2\n", {"id_column": "id"}, "--id-column: .* has no column 'id'"),
        ("a.txt", "x\n", {"column": "text"}, "is text, one a line. Leave them out"),
        ("a.json", "[]", {}, "can only be read whole. Write one object a line"),
        ("a.parquet.gz", "", {}, "Unpack it"),
    ],
)
def test_a_mistake_in_choosing_is_told(
    name: str, content: str, options: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=told):
        Corpus.open(tmp_path / name, **options)


def test_a_corpus_without_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="is empty: there is no text"):
        Corpus.open(tmp_path / "a.txt").survey(skip_bad=True)
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(DataError, match=r"all rows of .* are bad"):
        Corpus.open(tmp_path / "a.txt").survey(skip_bad=True)


@pytest.mark.parametrize("rows", [11, 12, 13])
def test_blocks_are_dealt_without_gap_or_overlap(rows: int, tmp_path: Path) -> None:
    corpus = Corpus.open(write_lines(tmp_path / "a.txt", [str(number) for number in range(rows)]))
    dealt = [
        (block.number, block.first, [raw for _, _, raw in block.rows])
        for rank in range(3)
        for block in corpus.blocks(4, lambda number, rank=rank: number % 3 == rank)
    ]
    for number, first, raw in dealt:
        assert first == 4 * number
        assert raw == [str(row) for row in range(first, min(first + 4, rows))]
    assert sorted(number for number, _, _ in dealt) == list(range(-(-rows // 4)))


def test_a_file_that_is_written_to_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt")
    corpus = Corpus.open(path)
    survey = corpus.survey(skip_bad=False)
    write_lines(path, [*TEXTS, "one more"])
    with pytest.raises(DataError, match="was written to while it was read"):
        corpus.check_unchanged(survey)


def test_a_row_group_of_parquet_is_not_read_whole(tmp_path: Path) -> None:
    long = [f"{number} " + "long text " * 100 for number in range(40_000)]
    parquet.write_table(pyarrow.table({"text": long}), tmp_path / "a.parquet", use_dictionary=False, compression="none")
    whole = (tmp_path / "a.parquet").stat().st_size
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    corpus = Corpus.open(tmp_path / "a.parquet")
    del long
    before, most, rows = pyarrow.total_allocated_bytes(), 0, 0
    for _ in corpus.raw_rows():
        rows += 1
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert rows == 40_000
    assert most < whole / 4
