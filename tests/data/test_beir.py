"""Judged queries of a BEIR folder, read as groups."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from json_lines import write_rows

from angle_llm.data import DataError, Group
from angle_llm.data.corpus import corpus_texts
from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.sources import resolve_source
from angle_llm.evaluate.retrieval_tasks import read_beir
from angle_llm.settings.train import DataSource

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
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


def test_judged_documents_are_positives_and_negatives(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "beir")
    due = [Group("second?", ("three",), ("Title one",)), Group("first?", ("Title one", "four"))]
    loaded = load_examples(DataSource(path=str(folder)))
    assert loaded.examples == due, "in the order of the judgements; a query without a positive is skipped"
    assert loaded.report.format == "group"
    write_folder(folder, [*JUDGED, "q2\td3\t2.0"])
    assert load_examples(DataSource(path=str(folder))).examples == due, "a repeated judgement counts once"
    assert load_examples(DataSource(path=f"{folder}@train")).examples == due
    write_folder(folder, ["q3\td2\t1"], split="dev.small")
    assert load_examples(DataSource(path=f"{folder}@dev.small")).examples == [Group("third?", ("two",))]
    packed = folder / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "corpus.jsonl").read_bytes()))
    (folder / "corpus.jsonl").unlink()
    assert load_examples(DataSource(path=str(folder))).examples == due
    assert [file.name.rpartition("/")[2] for file in resolve_source(folder / "qrels").files] == [
        "dev.small.tsv",
        "train.tsv",
    ]


def test_parquet_files_as_in_nanobeir_are_read(tmp_path: Path) -> None:
    """A corpus for each split, and judgements without a column of scores."""
    datasets = pytest.importorskip("datasets")
    for split, last in (("NanoA", "four"), ("NanoB", "other")):
        corpus = [*CORPUS[:3], {"_id": "d4", "text": last}]
        judged = [dict(zip(("query-id", "corpus-id"), line.split("\t")[:2], strict=True)) for line in JUDGED[:2]]
        for part, rows in (("corpus", corpus), ("queries", QUERIES), ("qrels", judged)):
            table = datasets.Dataset.from_list([{"title": "", **row} if part == "corpus" else row for row in rows])
            (tmp_path / part).mkdir(exist_ok=True)
            table.to_parquet(tmp_path / part / f"{split}-00000-of-00001.parquet")
    due = [Group("second?", ("three",)), Group("first?", ("Title one",))]
    assert load_examples(DataSource(path=f"{tmp_path}@NanoB")).examples == due
    task = read_beir(f"{tmp_path}@NanoB")
    assert read_beir(tmp_path / "qrels/NanoB-00000-of-00001.parquet") == task
    assert (task.queries, task.candidates) == (("second?", "first?"), ("Title one", "two", "three", "other"))
    assert task.relevant == ({2: 1.0}, {0: 1.0})
    assert [*corpus_texts(tmp_path)].count("two") == 2
    with pytest.raises(DataError, match="splits there: NanoA, NanoB"):
        read_beir(tmp_path)


def test_judgements_in_json_lines_and_ids_in_the_column_id_as_in_mteb_are_read(tmp_path: Path) -> None:
    due = read_beir(f"{write_folder(tmp_path / 'beir')}@train")
    folder = tmp_path / "mteb" / "beir"
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", CORPUS), ("queries", QUERIES)):
        write_rows(
            folder / f"{name}.jsonl", [{("id" if key == "_id" else key): row[key] for key in row} for row in rows]
        )
    rows = [dict(zip(("query-id", "corpus-id", "score"), line.split("\t"), strict=True)) for line in JUDGED]
    write_rows(folder / "qrels/train.jsonl", [{**row, "score": int(row["score"])} for row in rows])
    for source in (f"{folder}@train", folder / "qrels/train.jsonl"):
        assert replace(read_beir(source), source="") == replace(due, source="")
    assert [example.query for example in load_examples(DataSource(path=str(folder))).examples] == ["second?", "first?"]
    with pytest.raises(DataError, match="splits there: train"):
        read_beir(folder)
    write_rows(folder / "qrels/train.jsonl", [rows[0], {"query-id": "q1", "score": 1}])
    with pytest.raises(DataError, match=r"train\.jsonl:2: expected query-id, corpus-id, score"):
        read_beir(f"{folder}@train")


@pytest.mark.parametrize(
    ("judged", "corpus", "reason"),
    [
        (["q1\td1\t1", "q9\td1\t1"], CORPUS, r"train\.tsv:3: .*q9"),
        (["q1\td1\t1", "q1\td9\t0"], CORPUS, r"train\.tsv:2: line 3: .*d9"),
        (["q1\td1\thigh"], CORPUS, r"train\.tsv:2: score"),
        (["q1\td1"], CORPUS, r"train\.tsv:2"),
        (
            ["q1\td1\t1", "q2\td1\t0", "q1\td1\t0"],
            CORPUS,
            r"train\.tsv:4: query q1 and document d1 .* 0 here and 1 in line 2",
        ),
        (["q1\td1\t1"], [*CORPUS, CORPUS[0]], r"corpus\.jsonl:5: .*d1"),
        (["q1\td1\t1"], [{"text": "x"}], r"corpus\.jsonl:1: .*_id"),
        (["q1\td1\t1"], [{"_id": "d1", "text": ["x"]}], r"corpus\.jsonl:1: .*text"),
        (["q1\td1\tnan"], CORPUS, r"train\.tsv:2: score"),
        (["q1\td1\t1", "q1\td2\t0"], [*CORPUS[:1], {"_id": "d2", "text": "Title one"}], "Title one"),
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
    assert "2 judged documents" in capsys.readouterr().err


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "beir", split="test")
    with pytest.raises(DataError, match=r"qrels/train\.tsv.*beir@test"):
        open_examples(DataSource(path=str(folder)))
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl"):
        load_examples(DataSource(path=f"{folder}@test"))
    (folder / "qrels" / "test.tsv").write_text("query\tdocument\n")
    with pytest.raises(DataError, match=r"test\.tsv.*query-id"):
        load_examples(DataSource(path=f"{folder}@test"))
    write_folder(folder, split="test")
    write_rows(folder / "queries.jsonl", [*QUERIES, QUERIES[0]])
    for read in (lambda: load_examples(DataSource(path=f"{folder}@test")), lambda: read_beir(folder)):
        with pytest.raises(DataError, match=r"queries\.jsonl:4: the id q1 occurs twice; remove one"):
            read()
