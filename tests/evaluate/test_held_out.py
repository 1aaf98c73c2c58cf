"""Held-out tasks of a training run: kinds of tasks, the deciding metric, errors before the run."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from evaluate_samples import Words, hashed_words, write
from pyarrow import parquet

from angle_llm.data.formats import DataError, PositivePair, Triple
from angle_llm.evaluate.held_out import held_out_evaluation
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import read_beir
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import read_pairs
from angle_llm.settings.parsing import MissingLibraryError, SettingsError
from angle_llm.settings.train import DataSettings, EvaluationSettings, TrainSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: scored pairs, tickets, and a BEIR folder."""
    monkeypatch.chdir(tmp_path)
    write(Path("sts.tsv"), "sentence1\tsentence2\tscore\na b\ta c\t4\na\tb\t0\nx y\tx y\t5\n")
    write(Path("tickets.csv"), "Titel,Lösung\nred car,the car\nold dog,a dog\ncold fish,a dog\n")
    write(Path("more.txt"), "red\nred red\n")
    documents = [{"_id": f"d{n}", "title": "", "text": f"w{n} w{n + 1}"} for n in range(5)]
    queries = [{"_id": f"q{n}", "text": f"w{n}"} for n in range(5)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        write(Path(f"beir/{name}.jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
    write(Path("beir/qrels/valid.tsv"), "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(5)))
    return tmp_path


COLUMNS = {"text1": "Titel", "text2": "Lösung"}


def metrics(encoder: Any = None, **settings: Any) -> dict[str, float]:
    evaluation = held_out_evaluation(EvaluationSettings(**settings))
    assert evaluation is not None
    return evaluation(encoder or Words())


def test_the_digest_is_of_the_contents_of_all_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        tasks = ["beir@valid", "tickets.csv"]
        evaluation = held_out_evaluation(EvaluationSettings(tasks=tasks, columns=COLUMNS, corpus="more.txt"))
        assert evaluation is not None
        return evaluation.digest

    before = digest()
    (folder / "moved").mkdir()
    for name in ("beir", "tickets.csv", "more.txt"):
        (folder / name).rename(folder / "moved" / name)
    monkeypatch.chdir(folder / "moved")
    assert digest() == before
    for name in ("beir/corpus.jsonl", "beir/queries.jsonl", "beir/qrels/valid.tsv", "tickets.csv", "more.txt"):
        text = Path(name).read_text()
        Path(name).write_text(text.rstrip("\n"))
        assert digest() != before, name
        Path(name).write_text(text)


def geometry(path: str) -> dict[str, float]:
    """Alignment and uniformity by the formulas of Wang & Isola (arXiv 2005.10242), a pair at a time."""

    def unit(text: str) -> np.ndarray:
        row = hashed_words([text])[0].astype(np.float64)
        return row / np.linalg.norm(row)

    pairs = read_pairs(path).pairs
    scores = [pair.score for pair in pairs]
    least = min(scores) + 0.8 * (max(scores) - min(scores))
    near = [np.sum((unit(a) - unit(b)) ** 2) for a, b, score, *_ in pairs if score >= least]
    texts = sorted({pair.sentence1 for pair in pairs})
    spread = [np.exp(-2 * np.sum((unit(a) - unit(b)) ** 2)) for a in texts for b in texts if a < b]
    return {"alignment": float(np.mean(near)), "uniformity": float(np.log(np.mean(spread)))}


def test_all_figures_of_all_tasks_equal_those_of_the_commands(folder: Path) -> None:
    found = metrics(tasks=["beir@valid", "sts.tsv"])
    [sts] = evaluate(hashed_words, [read_pairs("sts.tsv")]).tasks.values()
    [beir] = evaluate_retrieval(hashed_words, [read_beir("beir@valid")], resamples=0).tasks.values()
    expected = {f"beir@valid/{name}": metric.value for name, metric in beir.metrics.items()}
    expected |= {"sts/spearman": sts.spearman, "sts/pearson": sts.pearson}
    expected |= {f"sts/{name}": pytest.approx(value, abs=1e-9) for name, value in geometry("sts.tsv").items()}
    assert found == expected
    assert list(found) == list(expected), "the main metric of the first task decides"
    assert beir.metrics["R@1"].interval is None
    assert held_out_evaluation(EvaluationSettings()) is None


def test_a_text_of_several_tasks_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encoder = Words()
    monkeypatch.setattr(encoder, "encode", lambda texts, **_: seen.extend(texts) or hashed_words(texts))
    write(Path("beir/qrels/test.tsv"), "query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    found = metrics(encoder, tasks=["beir@valid", "beir"])
    assert len(seen) == len(set(seen)) > 0
    assert {name: value for name, value in found.items() if "@valid/" in name} == metrics(tasks=["beir@valid"])


def test_questions_with_answers_and_scored_pairs_are_recognised_by_their_columns(folder: Path) -> None:
    found = metrics(tasks=["tickets.csv"], columns=COLUMNS)
    assert found["tickets/R@1"] == pytest.approx(200 / 3)
    assert found["tickets/R@10"] == 100
    with_more = metrics(tasks=["tickets.csv"], columns=COLUMNS, corpus="more.txt")
    assert with_more["tickets/R@1"] < found["tickets/R@1"]
    lines = Path("more.txt").read_text(encoding="utf-8").splitlines()
    write(Path("more.csv"), "id,answer\n" + "".join(f"{n},{line}\n" for n, line in enumerate(lines)))
    with pytest.raises(DataError, match=r"more\.csv.*column"):
        metrics(tasks=["tickets.csv"], columns=COLUMNS, corpus="more.csv")
    assert with_more.keys() == found.keys()
    write(Path("q.jsonl"), '{"question": "a b", "answer": "a"}\n')
    assert next(iter(metrics(tasks=["q.jsonl"]))) == "q/nDCG@10"
    both = metrics(tasks=["tickets.csv", "q.jsonl"], columns=COLUMNS)
    assert both == found | metrics(tasks=["q.jsonl"])
    with pytest.raises(SettingsError, match=r"evaluation\.columns text1 Title: .*'Title'.*'Titel'"):
        metrics(tasks=["tickets.csv", "q.jsonl"], columns={"text1": "Title", "text2": "Lösung"})
    write(Path("own.csv"), "frage,antwort\na,b\n")
    with pytest.raises(DataError, match=r"own\.csv: .*Add `--evaluation\.columns FIELD COLUMN"):
        metrics(tasks=["own.csv"])
    write(Path("beir/own/pairs.jsonl"), '{"question": "a b", "answer": "a"}\n')
    assert metrics(tasks=["beir/own/pairs.jsonl"])["pairs/R@1"] == 100
    assert metrics(tasks=["beir/own@pairs"]) == metrics(tasks=["beir/own/pairs.jsonl"])
    with pytest.raises(
        SettingsError, match=r"beir/own@pears: no file pears\.\* in beir/own; files there: pairs\.jsonl"
    ):
        metrics(tasks=["beir/own@pears"])
    write(
        Path("scored.jsonl"), '{"text1": "a b", "text2": "a", "score": 3}\n{"text1": "a", "text2": "b", "score": 1}\n'
    )
    assert metrics(tasks=["scored.jsonl"])["scored/spearman"] == pytest.approx(100)
    assert metrics(tasks=["scored.jsonl"], score_range=(3, 1))["scored/spearman"] == pytest.approx(-100)
    assert "scored/R@1" in metrics(tasks=["scored.jsonl"], format="positive_pair"), "the scores are not read"
    assert metrics(tasks=["scored.jsonl", "q.jsonl"], score_range=(3, 1))["scored/spearman"] == pytest.approx(-100)
    with pytest.raises(SettingsError, match=r"--evaluation\.score-range: expected a file of scored pairs"):
        metrics(tasks=["q.jsonl"], score_range=(1, 0))


def test_wrong_tasks_are_refused_before_a_run(folder: Path) -> None:
    for source, kind, message in (
        ("nothing.tsv", SettingsError, r"evaluation\.tasks.*nothing\.tsv"),
        ("beir", SettingsError, r"evaluation\.tasks: beir: no file qrels/test\.tsv; splits there: valid.*beir@valid"),
        ("tickets.csv", DataError, r"tickets\.csv.*Titel"),
    ):
        with pytest.raises(kind, match=message):
            metrics(tasks=[source])
    with pytest.raises(SettingsError, match=r"evaluation\.corpus.*questions and answers"):
        metrics(tasks=["sts.tsv", "beir@valid"], corpus="more.txt")
    write(Path("nli.jsonl"), '{"premise": "a", "hypothesis": "b", "label": 0}\n')
    with pytest.raises(SettingsError, match=r"nli\.jsonl has NLI rows"):
        metrics(tasks=["nli.jsonl"])
    with pytest.raises(SettingsError, match=r"unique names, got .*sts more than once"):
        metrics(tasks=["sts.tsv", "./sts.tsv"])
    with pytest.raises(SettingsError, match="expected a file in --evaluation"):
        metrics(tasks=["beir@valid"], columns=COLUMNS)
    with pytest.raises(SettingsError, match=r"TASK/METRIC with a task of sts, got stss/spearman"):
        held_out_evaluation(EvaluationSettings(tasks=["sts.tsv"], metric="stss/spearman"))
    with pytest.raises(SettingsError, match=r"sts/alignment: lower is better"):
        metrics(tasks=["sts.tsv"], metric="sts/alignment")
    if importlib.util.find_spec("mteb") is None:
        with pytest.raises(MissingLibraryError, match=r"mteb:NFCorpus.*angle_llm\[mteb\]"):
            metrics(tasks=["mteb:NFCorpus"])


@pytest.mark.parametrize("task", ["sts.tsv", "folder@sts", "tickets.csv", "qa.jsonl", "qa.jsonl.gz", "qa.parquet"])
def test_a_file_is_opened_once_in_a_run(folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its format and columns, its rows, all evaluations, and the search for its texts in the training data."""
    rows = [{"question": "what is it", "answer": "a"}, {"question": "a b", "answer": "a"}]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    write(Path("folder/sts.tsv"), Path("sts.tsv").read_text())
    write(Path("qa.jsonl"), content)
    Path("qa.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), "qa.parquet")
    opened: list[Path] = []
    plain_open = Path.open

    def counted_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.resolve())
        return plain_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", counted_open)
    path = Path(task.replace("@", "/")).resolve()
    path = path if path.suffix else path.with_suffix(".tsv")
    settings = EvaluationSettings(tasks=[task], columns=COLUMNS if task == "tickets.csv" else {})
    evaluation = held_out_evaluation(settings)
    assert evaluation is not None
    for _ in range(2):
        evaluation(Words())
    list(evaluation.overlap_with([PositivePair("a", "b")]))
    assert opened.count(path) == 1


def test_the_folder_tells_equal_names_apart(folder: Path) -> None:
    for name in ("stsb/test.tsv", "old/sick/test.tsv", "new/sick/test.tsv"):
        write(Path(name), Path("sts.tsv").read_text())
    names = list(metrics(tasks=["stsb/test.tsv", "old/sick/test.tsv", "sts.tsv"]))
    assert names[0] == "stsb/test/spearman"
    assert {name.rpartition("/")[0] for name in names} == {"stsb/test", "sick/test", "sts"}
    with pytest.raises(SettingsError, match="unique names, got sick/test more than once"):
        metrics(tasks=["old/sick/test.tsv", "new/sick/test.tsv"])
    write(Path("copy/qrels/valid.tsv"), Path("beir/qrels/valid.tsv").read_text())
    for name in ("corpus", "queries"):
        write(Path(f"copy/{name}.jsonl"), Path(f"beir/{name}.jsonl").read_text())
    Path("copy").rename("new/beir")
    found = metrics(tasks=["beir@valid", "new/beir/qrels/valid.tsv"])
    assert {name.rpartition("/")[0] for name in found} == {f"{folder.name}/beir@valid", "new/beir@valid"}


def test_texts_of_the_training_data_are_counted(folder: Path) -> None:
    """Pairs in any order, queries, and texts of four words or more; the corpus and judged documents are no leak."""
    write(Path("qa.jsonl"), "".join(f'{{"question": "what is it {n}", "answer": "n{n}"}}\n' for n in range(3)))
    tasks = ["sts.tsv", "qa.jsonl", "beir@valid"]
    evaluation = held_out_evaluation(EvaluationSettings(tasks=tasks, corpus="more.txt"))
    assert evaluation is not None
    free = [PositivePair("w9", "w0 w1"), PositivePair("a", "red red"), PositivePair("n1", "n2")]
    assert list(evaluation.overlap_with(free)) == []
    rows = [
        *free,
        PositivePair("A C!", "a b"),
        Triple("What is it 1?", "N1.", "x"),
        Triple("w3", "y", "What is it (2)"),
    ]
    sts, answers, beir = evaluation.overlap_with(rows)
    assert "evaluation.tasks sts.tsv: the training data contain 1 of its 3 pairs. " in sts
    assert "contain 1 of its 3 pairs, 1 of its 3 queries, 2 of its 3 texts of 4 words or more. " in answers
    assert "--against beir@valid" in beir
    assert "contain 1 of its 5 queries. " in beir


def test_of_very_many_examples_some_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("angle_llm.data.leakage._COMPARED", 2)
    evaluation = held_out_evaluation(EvaluationSettings(tasks=["sts.tsv"]))
    assert evaluation is not None
    rows = [PositivePair("q", "r"), PositivePair("a b", "a c"), PositivePair("a", "b"), PositivePair("x y", "x y")]
    (line,) = evaluation.overlap_with(rows)
    assert "1 of its 3 pairs" in line


@pytest.mark.parametrize(
    ("trained", "evaluation", "warned"),
    [
        ((1, 0), {}, True),
        ((0, 1), {}, False),
        (None, {}, False),
        ((1, 0), {"score_range": (1, 0)}, False),
        ((1, 0), {"tasks": ["beir@valid"]}, False),
    ],
)
def test_reversed_scores_of_the_training_data_only_are_warned_about(
    trained: Any, evaluation: dict[str, Any], warned: bool, folder: Path
) -> None:
    settings = TrainSettings(
        data=DataSettings(path="x.jsonl", score_range=trained),
        evaluation=EvaluationSettings(**{"tasks": ["sts.tsv"], **evaluation}),
    )
    held_out = held_out_evaluation(settings.evaluation)
    assert held_out is not None
    assert ["set --evaluation.score-range" in line for line in held_out.reversed_scores(settings)] == [True] * warned
