"""Reranking: ranks equal a plain sort of the first candidates, and the command shows the metrics before and after."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_samples import Words, opens, parsed, rows_of
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from json_lines import write_rows
from tiny_rerankers import save_tiny_reranker
from tiny_tokenizers import sentences

from angle_llm.evaluate import retrieval
from angle_llm.evaluate.bootstrap import mean_difference
from angle_llm.evaluate.retrieval import Reranking, query_metrics, read_tasks, rerank, retrieval_main
from angle_llm.evaluate.retrieval_tasks import RetrievalTask
from angle_llm.export.push import _read_scores
from angle_llm.model.reranker import Reranker
from angle_llm.settings.commands import RetrievalSettings
from angle_llm.settings.parsing import SettingsError


def order_by_sorting(query: np.ndarray, candidates: np.ndarray, answers: Sequence[int], own: int | None) -> list[int]:
    """All candidates by cosine, nearest first; among equals, answers come last, then the smaller index first."""
    norms = np.linalg.norm(candidates, axis=1) * np.linalg.norm(query)
    similar = np.divide(candidates @ query, norms, out=np.zeros(len(candidates)), where=norms > 0)
    others = [c for c in range(len(candidates)) if c != own]
    return sorted(others, key=lambda c: (-round(float(similar[c]), 7), c in answers, c))


@limits(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), few_scores=st.booleans(), top=st.integers(1, 50))
def test_ranks_equal_those_of_a_plain_sort(seed: int, few_scores: bool, top: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(6, 40))
    queries, candidates = rng.normal(size=(7, 3)), rng.normal(size=(count, 3))
    itself = tuple(int(rng.integers(count)) if rng.random() < 0.5 else None for _ in queries)
    relevant = tuple({int(c): 1.0 for c in rng.permutation(count)[:5] if c != own} for own in itself)
    score_of = rng.integers(0, 3, size=(7, count)).astype(float) if few_scores else rng.normal(size=(7, count))
    names = [tuple(map(str, range(size))) for size in (7, count)]
    task = RetrievalTask("t", *names, relevant, itself, "t", names[0])

    def scores(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        return np.array([score_of[int(query), int(candidate)] for query, candidate in pairs])

    due = []
    for number, (query, answers, own) in enumerate(zip(queries, relevant, itself, strict=True)):
        order = order_by_sorting(query, candidates, list(answers), own)
        first = sorted(order[:top], key=lambda c: (-score_of[number, c], c in answers, order.index(c)))
        due.append({c: place for place, c in enumerate([*first, *order[top:]], 1) if c in answers})
    with pytest.MonkeyPatch.context() as patched:  # the block sizes have no effect
        patched.setattr(retrieval, "_RERANKED_QUERIES", 2)
        patched.setattr(retrieval, "_SIMILARITIES", 5 * 256)  # 5 candidates at once
        after = rerank(Reranking(scores, top), task, queries, candidates)
    assert after == due
    assert [list(ranks) for ranks in after] == [sorted(ranks, key=ranks.__getitem__) for ranks in after]


@pytest.mark.needs("sentence_transformers")
def test_the_command_shows_what_a_reranker_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    texts = sentences()
    rows = [{"question": texts[2 * n], "answer": texts[2 * n + 1]} for n in range(30)]
    write_rows(tmp_path / "held_out.jsonl", rows)
    folder = save_tiny_reranker("bert", tmp_path / "RERANKER")
    opens(monkeypatch, lambda path, **options: Words())
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    angle-llm eval retrieval (.* --rerank .*)$", guide, re.MULTILINE)
    settings: Any = parsed(RetrievalSettings, *command.split(), "--top", 10, "--json", "out.json")
    [result] = retrieval_main(settings).tasks.values()
    # The same by the library: the first ten candidates of each query, ordered by `CrossEncoder`.
    [task] = read_tasks(settings)
    queries, candidates = Words().encode(task.queries), Words().encode(task.candidates)
    library = CrossEncoder(str(folder), activation_fn=torch.nn.Identity(), device="cpu")
    after = []
    for query, text, answers in zip(queries, task.queries, task.relevant, strict=True):
        order = order_by_sorting(query, candidates, list(answers), None)
        hits = library.rank(text, [task.candidates[c] for c in order[:10]])
        order[:10] = [order[hit["corpus_id"]] for hit in hits]
        after.append({c: place for place, c in enumerate(order, 1) if c in answers})
    stored = json.loads((tmp_path / "out.json").read_text())
    [differences] = [comparison["tasks"]["held_out"] for comparison in stored["comparisons"]]
    for name, values in query_metrics(after, task.relevant).items():
        due = mean_difference(result.metrics[name].values, 100 * np.array(values), stream="held_out")
        assert differences[name]["other"] == pytest.approx(due.other), name
        assert differences[name]["interval"] == pytest.approx(asdict(due.interval))
        assert differences[name]["value"] == result.metrics[name].value
    assert differences["nDCG@10"]["difference"] != 0
    assert differences["R@10"]["difference"] == 0  # the first ten in another order
    printed = capsys.readouterr().out
    row = rows_of(printed)["nDCG@10"]
    due = [differences["nDCG@10"][name] for name in ("value", "other", "difference")]
    assert [float(row[column]) for column in (0, 2, 3)] == pytest.approx(due, abs=0.005)
    speed = rows_of(printed)["texts per second"]
    assert speed[0]
    assert speed[2] != speed[0], "the encoder's speed is not the speed of the reranker"
    assert "Compared with DIR, first 10 ordered by RERANKER. A positive difference means that DIR is better" in printed
    # The reranker has the dtype of the command.
    opened: list[Reranker] = []
    monkeypatch.setattr(
        "angle_llm.model.reranker.Reranker",
        lambda *args, **options: opened.append(Reranker(*args, **options)) or opened[0],
    )
    retrieval_main(replace(settings, dtype="bfloat16", json=None))
    assert {weight.dtype for weight in opened[0].model.parameters()} == {torch.bfloat16}
    assert _read_scores(tmp_path / "out.json") == [("held_out", "nDCG@10", result.metrics["nDCG@10"].value)]


def test_top_belongs_to_rerank() -> None:
    with pytest.raises(SettingsError, match="--top belongs to --rerank"):
        RetrievalSettings(model="m", top=10)
    with pytest.raises(SettingsError, match="--rerank orders answers of queries"):
        RetrievalSettings(model="m", rerank="r", classes=("x.tsv",))
