"""Retrieval: ranks equal a plain sort, pessimistic ties, metrics, files, command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_samples import Words, hashed_words, parsed, recorded, write
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from angle_llm.evaluate import retrieval
from angle_llm.evaluate.retrieval import (
    RetrievalSettings,
    answer_ranks,
    evaluate_retrieval,
    query_metrics,
    retrieval_main,
    retrieval_report,
)
from angle_llm.evaluate.retrieval_tasks import groups_task, read_flickr30k, read_groups, read_judged


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
        patched.setattr(retrieval, "_QUERIES", 2)
        patched.setattr(retrieval, "_SIMILARITIES", 14)  # 7 candidates at once
        assert answer_ranks(queries, candidates, relevant, itself) == expected


def test_a_tie_ranks_the_wrong_candidate_first() -> None:
    same = np.ones((4, 2))
    assert answer_ranks(same[:1], same, [{0: 1.0, 2: 1.0}], [None]) == [{0: 3, 2: 4}]
    zero = np.zeros((4, 2))
    assert answer_ranks(zero[:1], zero, [{3: 1.0}], [0]) == [{3: 3}]  # a zero encoder has the worst ranks


def test_metrics_equal_values_by_hand() -> None:
    figures = query_metrics(
        [{7: 1, 8: 2}, {3: 2, 4: 5}, {5: 12}, {1: 2, 2: 1}],
        [{7: 1.0, 8: 1.0}, {3: 1.0, 4: 1.0}, {5: 1.0}, {1: 3.0, 2: 1.0}],
    )
    assert figures["strict"] == [1, 0, 0, 1]
    assert figures["in top 5"] == [1, 1, 0, 1]
    assert figures["R@1"] == [0.5, 0, 0, 0.5]
    assert figures["R@5"] == [1, 1, 0, 1]
    assert figures["R@100"] == [1, 1, 1, 1]
    assert figures["MRR"] == [1, 1 / 2, 1 / 12, 1]
    best_of_two = 1 + 1 / np.log2(3)
    second_and_fifth = 1 / np.log2(3) + 1 / np.log2(6)
    graded = (1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3))
    assert figures["nDCG@10"] == pytest.approx([1, second_and_fifth / best_of_two, 0, graded])


def test_strict_accuracy_needs_exactly_the_texts_of_the_group() -> None:
    """The second group's query finds one of its texts only after a text of the first."""
    calls: list[list[str]] = []
    groups = [["a b c", "a b", "a c"], ["x y", "x y z", "b d"]]
    task = evaluate_retrieval(recorded(hashed_words, calls), [groups_task(groups, "mine")]).tasks["mine"]
    assert [sorted(texts) for texts in calls] == [sorted(text for group in groups for text in group)]
    assert (task.queries, task.candidates, task.answers) == (2, 6, 4)
    strict, rank = task.figures["strict"], task.figures["MRR"]
    assert (strict.value, rank.value, task.ranks[0]) == (50, 100, (1, 2))
    assert 0 <= strict.interval.low <= 50 <= strict.interval.high <= 100


def test_the_query_is_skipped_but_its_copy_in_another_group_is_not() -> None:
    task = groups_task([["a b", "a b c"], ["a b", "d"]], "mine")
    assert evaluate_retrieval(hashed_words, [task]).tasks["mine"].ranks == ((2,), (3,))


def write_jsonl(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


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
        ({"other": ["a", "b"]}, r"g\.jsonl:1.*captions.*other.*--column"),
        ({"texts": "a b"}, r"g\.jsonl:1.*texts.*'a b'"),
        ({"texts": ["a", " "]}, r"g\.jsonl:1"),
        ({"texts": ["a"]}, r"g\.jsonl"),
    ],
)
def test_malformed_groups_are_refused(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_groups(write_jsonl(tmp_path / "g.jsonl", row))


def judged_folder(folder: Path, *judgements: str) -> Path:
    write_jsonl(folder / "corpus.jsonl", {"_id": "d1", "title": "T", "text": "a"}, {"_id": 2, "text": "b"})
    write_jsonl(folder / "queries.jsonl", {"_id": "q", "text": "T a"}, {"_id": "2", "text": "b"})
    write(folder / "qrels/test.tsv", "query-id\tcorpus-id\tscore\n" + "".join(f"{j}\n" for j in judgements))
    return folder


def test_the_beir_layout_is_read(tmp_path: Path) -> None:
    task = read_judged(judged_folder(tmp_path / "mini", "q\td1\t2", "q\t2\t0", "2\td1\t1"))
    assert (task.name, task.candidates, task.queries) == ("mini", ("T a", "b"), ("T a", "b"))
    assert task.relevant == ({0: 2.0}, {0: 1.0})
    assert task.itself == (None, 1)  # the candidate with the query's own id
    with pytest.raises(ValueError, match=r"test\.tsv:2.*d9"):
        read_judged(judged_folder(tmp_path / "bad", "q\td9\t1"))
    with pytest.raises(ValueError, match=r"test\.tsv"):
        read_judged(judged_folder(tmp_path / "none", "q\td1\t0"))
    with pytest.raises(ValueError, match=r"corpus\.jsonl"):
        read_judged(tmp_path)


def test_the_command_reads_every_file_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ({"texts": ["a b", "a c"]}, {"texts": ["x", "x y"]})
    files = [write_jsonl(tmp_path / f"{name}.jsonl", *rows) for name in ("flickr", "mine")]
    out = ["--json", tmp_path / "out.json"]
    settings: Any = parsed(RetrievalSettings, "--model", "some/model", "--groups", *files, *out)
    retrieval_main(settings, lambda path, /, **options: Words())
    printed = capsys.readouterr().out
    assert "| mine " in printed
    assert "12.9" not in printed
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["tasks"]["mine"]["ranks"] == [[1], [1]]
    assert content["encoder"]["max_length"] == 77
    with pytest.raises(ValueError, match="got none"):
        evaluate_retrieval(hashed_words, [])
    with pytest.raises(ValueError, match=r"--data-dir"):
        retrieval_main(RetrievalSettings(model="m"), lambda path, /, **options: Words())


def test_flickr30k_report_has_published_scores(data_dir: Path) -> None:
    task = read_flickr30k(data_dir)
    assert (len(task.queries), len(task.candidates)) == (1000, 5000)
    assert all(len(answers) == 4 for answers in task.relevant)
    report = retrieval_report(evaluate_retrieval(hashed_words, [task], resamples=10), "m")
    assert all(published in report for published in ("12.90", "10.40", "5.20"))
