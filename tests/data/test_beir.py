"""Judged queries of a BEIR folder, read as groups."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from angle_llm.config import DataSource
from angle_llm.data import DataError, Group
from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.readers import open_rows

CORPUS = [
    {"_id": "d1", "title": "Title", "text": "one"},
    {"_id": "d2", "title": "", "text": "two"},
    {"_id": "d3", "text": "three"},
    {"_id": "d4", "title": "four", "text": ""},
]
QUERIES = [{"_id": "q1", "text": "first?"}, {"_id": "q2", "text": "second?"}, {"_id": "q3", "text": "third?"}]
JUDGED = ["q2\td3\t2", "q1\td1\t1", "q2\td1\t0", "q1\td4\t1", "q3\td2\t0"]


def write_folder(
    folder: Path, judged: list[str] = JUDGED, corpus: list[dict[str, str]] = CORPUS, split: str = "train"
) -> Path:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("queries", QUERIES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


def test_judged_documents_are_positives_and_negatives(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "beir")
    due = [Group("second?", ("three",), ("Title one",)), Group("first?", ("Title one", "four"))]
    loaded = load_examples(DataSource(path=str(folder)))
    assert loaded.examples == due, "in the order of the judgements; a query without a positive is skipped"
    assert loaded.report.format == "group"
    assert load_examples(DataSource(path=f"{folder}@train")).examples == due
    write_folder(folder, ["q3\td2\t1"], split="dev.small")
    assert load_examples(DataSource(path=f"{folder}@dev.small")).examples == [Group("third?", ("two",))]
    packed = folder / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "corpus.jsonl").read_bytes()))
    (folder / "corpus.jsonl").unlink()
    assert load_examples(DataSource(path=str(folder))).examples == due
    assert [file.name.rpartition("/")[2] for file in open_rows(folder / "qrels").files] == [
        "dev.small.tsv",
        "train.tsv",
    ]


@pytest.mark.parametrize(
    ("judged", "corpus", "reason"),
    [
        (["q1\td1\t1", "q9\td1\t1"], CORPUS, r"train\.tsv:3: no query q9 in queries\.jsonl"),
        (["q1\td1\t1", "q1\td9\t0"], CORPUS, r"train\.tsv:2: line 3: no document d9 in corpus\.jsonl"),
        (["q1\td1\thigh"], CORPUS, r"train\.tsv:2: score is 'high', expected a number"),
        (["q1\td1"], CORPUS, r"train\.tsv:2: 2 fields, expected 3"),
        (["q1\td1\t1"], [*CORPUS, CORPUS[0]], r"corpus\.jsonl:5: the id d1 occurs twice"),
        (["q1\td1\t1"], [{"text": "x"}], r"corpus\.jsonl:1: expected _id; keys: text"),
        (["q1\td1\t1"], [{"_id": "d1", "text": ["x"]}], r"corpus\.jsonl:1: text is \['x'\], expected a text"),
        (["q1\td1\tnan"], CORPUS, r"train\.tsv:2: score is 'nan', expected a number"),
        (["q1\td1\t1", "q1\td2\t0"], [*CORPUS[:1], {"_id": "d2", "text": "Title one"}], "a positive and a negative"),
    ],
)
def test_bad_judgements_and_texts_are_refused_with_their_line(
    tmp_path: Path, judged: list[str], corpus: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        load_examples(DataSource(path=str(write_folder(tmp_path, judged, corpus))))


def test_blank_documents_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blank = [{"_id": "e1", "title": "", "text": ""}, {"_id": "e2", "title": " ", "text": "  "}]
    corpus = [*CORPUS, *blank, {"_id": "d5", "title": "  ", "text": "five"}]
    judged = ["q1\te1\t1", "q1\td5\t1", "q1\te2\t0", "q2\te2\t1", "q3\td2\t1"]
    loaded = load_examples(DataSource(path=str(write_folder(tmp_path, judged, corpus))))
    assert loaded.examples == [Group("first?", ("five",)), Group("third?", ("two",))]
    assert "warning" in (found := capsys.readouterr().err), found
    assert "2 judged documents without text" in found


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "beir", split="test")
    with pytest.raises(DataError, match=r"no file qrels/train\.tsv; splits there: test\. Name one: .*beir@test"):
        open_examples(DataSource(path=str(folder)))
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"no file corpus\.jsonl"):
        load_examples(DataSource(path=f"{folder}@test"))
    (folder / "qrels" / "test.tsv").write_text("query\tdocument\n")
    with pytest.raises(DataError, match=r"test\.tsv: expected columns query-id, corpus-id, score; missing query-id"):
        load_examples(DataSource(path=f"{folder}@test"))


def test_cranfield_is_read_as_groups(data_dir: Path) -> None:
    loaded = load_examples(DataSource(path=f"{data_dir}/retrieval/cranfield@test"))
    assert (len(loaded.examples), loaded.report.rows_in) == (225, 225), "document 995 has no text and is skipped"
    assert sum(len(one.positives) for one in loaded.examples if isinstance(one, Group)) > 1_500
