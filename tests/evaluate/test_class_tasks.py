"""Texts with a class as an evaluation task: equal to plain loops, in training and in `eval retrieval --classes`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from angle_llm.data.formats import DataError
from angle_llm.data.sources import source_in_memory
from angle_llm.evaluate.held_out import held_out_evaluation
from angle_llm.evaluate.retrieval import evaluate_retrieval, retrieval_main
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_classes
from angle_llm.settings.commands import RetrievalSettings
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import EvaluationSettings

TEXTS = {f"text {number}": "abcc"[number % 4] for number in range(30)} | {"alone": "d"}
VECTORS = dict(zip(TEXTS, np.random.default_rng(3).normal(size=(31, 5)), strict=True))
VECTORS |= {f"new {number}": np.random.default_rng(number).normal(size=5) for number in range(9)}


def task(rows: dict[str, str] | list[Any], reference: str | None = None) -> RetrievalTask:
    listed = [{"text": text, "label": name} for text, name in rows.items()] if isinstance(rows, dict) else rows
    settings = CommandSource(path="test.jsonl")
    return read_classes(settings, source_in_memory(listed, "test"), reference and CommandSource(path=reference))


def scores(tested: RetrievalTask) -> dict[str, float]:
    result = evaluate_retrieval(lambda texts: np.stack([VECTORS[text] for text in texts]), [tested], resamples=50)
    metrics = result.tasks["test"].metrics
    assert all(
        metric.interval and metric.interval.low <= metric.value <= metric.interval.high for metric in metrics.values()
    )
    return {name: metric.value for name, metric in metrics.items()}


def plain(queries: dict[str, str], candidates: dict[str, str]) -> dict[str, float]:
    """Loops over queries, candidates and classes."""
    unit = {text: vector / np.linalg.norm(vector) for text, vector in VECTORS.items()}
    values: dict[str, list[float]] = {"accuracy": [], "5NN": [], "MAP": []}
    for query, correct in queries.items():
        others = {text: name for text, name in candidates.items() if text != query}
        means = {
            name: np.mean([unit[text] for text in others if others[text] == name], axis=0)
            for name in {*others.values()}
        }
        nearness = {name: mean @ unit[query] / np.linalg.norm(mean) for name, mean in means.items()}
        values["accuracy"].append(max(nearness, key=nearness.__getitem__) == correct)
        ranked = [others[text] for text in sorted(others, key=lambda text: -unit[text] @ unit[query])]
        votes = Counter(ranked[:5])  # of equal counts, `most_common` returns the first that was counted
        values["5NN"].append(votes.most_common(1)[0][0] == correct)
        found = [place for place, name in enumerate(ranked, 1) if name == correct]
        values["MAP"].append(np.mean([number / place for number, place in enumerate(found, 1)]) if found else 0)
    return {name: 100 * float(np.mean(numbers)) for name, numbers in values.items()}


def test_each_text_among_the_others_equals_plain_loops() -> None:
    several = {text: name for text, name in TEXTS.items() if name != "d"}
    found = scores(task(TEXTS))
    assert found == pytest.approx(plain(several, TEXTS), abs=1e-9)  # sums in another order
    assert 0 < found["accuracy"] < 100


def test_texts_among_those_of_a_reference_equal_plain_loops(tmp_path: Path) -> None:
    """Also a text that is in the reference, and a class that is not."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": name}) + "\n" for text, name in TEXTS.items()))
    queries = {f"new {number}": "abcz"[number % 4] for number in range(9)} | {"text 1": "b"}
    assert scores(task(queries, str(path))) == pytest.approx(plain(queries, TEXTS), abs=1e-9)


def test_repeated_texts_count_once_and_ties_are_wrong() -> None:
    rows = [{"text": text, "label": name} for text, name in TEXTS.items()]
    assert task(rows * 2) == task(rows)
    equal = evaluate_retrieval(lambda texts: np.ones((len(texts), 3)), [task(TEXTS)], resamples=0).tasks["test"]
    assert equal.metrics["accuracy"].value == 0.0


def test_a_class_without_another_text_is_never_the_nearest(tmp_path: Path) -> None:
    """The other class is as far as possible, with cosine -1."""
    rows = {"alone": "x", "left": "a", "left again": "a"}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": name}) + "\n" for text, name in rows.items()))
    vectors = {"alone": [1.0, 0.0], "left": [-1.0, 0.0], "left again": [-2.0, 0.0]}
    tested = task({"alone": "x"}, str(path))
    result = evaluate_retrieval(lambda texts: np.array([vectors[text] for text in texts]), [tested], resamples=0)
    assert result.tasks["test"].metrics["accuracy"].value == 0.0


def test_texts_are_encoded_with_their_instructions() -> None:
    """Equal texts with two instructions are two texts."""
    rows = [
        {"text": f"text {number % 5}", "label": "ab"[number % 2], "instruction": "xy"[number // 5]}
        for number in range(10)
    ]
    seen: list[tuple[str, str]] = []

    def encode(texts: list[str], instruction: list[str]) -> Any:
        seen.extend(zip(texts, instruction, strict=True))
        return np.stack([VECTORS[text] for text in texts])

    evaluate_retrieval(encode, [task(rows)], resamples=0)
    assert seen == [(row["text"], row["instruction"]) for row in rows]


def test_classes_that_the_reference_does_not_have_are_refused(tmp_path: Path) -> None:
    """As of labels that are numbers in one file and names in the other; all scores would be 0."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": len(text)}) + "\n" for text in TEXTS))
    with pytest.raises(
        DataError, match=r"expected classes of the reference, such as \['5', '6', '7'\]; got \['a', 'b'"
    ):
        task(TEXTS, str(path))


def test_unusable_files_are_refused() -> None:
    with pytest.raises(DataError, match="'x' has the classes a and b"):
        task([{"text": "x", "label": "a"}, {"text": "x ", "label": "b"}])
    for rows in ({"x": "a", "y": "a"}, {"x": "a", "y": "b"}):
        with pytest.raises(DataError, match="expected two classes or more, and a class with two texts"):
            task(rows)
    with pytest.raises(SettingsError, match="--reference belongs to --classes"):
        RetrievalSettings(model="m", pairs=("a.jsonl",), reference="b.jsonl")
    with pytest.raises(SettingsError, match="--format belongs to --pairs or --classes"):
        RetrievalSettings(model="m", format="group")
    with pytest.raises(SettingsError, match="--format group belongs to --pairs; files of --classes"):
        RetrievalSettings(model="m", format="group", classes=("a.jsonl",))


def test_a_labelled_file_is_a_held_out_task(tiny_model: Path, tmp_path: Path) -> None:
    from angle_llm.data.formats import LabelledText
    from angle_llm.model.encoder import SentenceEncoder

    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": name}) + "\n" for text, name in TEXTS.items()))
    evaluation = held_out_evaluation(EvaluationSettings(tasks=[str(path)]))
    assert evaluation is not None
    encoder = SentenceEncoder.from_pretrained(tiny_model)
    metrics = evaluation(encoder)
    assert list(metrics) == ["dev/accuracy", "dev/5NN", "dev/MAP"]
    assert len(evaluation.items["dev"]) == 30
    assert "no clear difference" in (evaluation.verdict(evaluation.items, evaluation.items) or "")
    (warning,) = evaluation.overlap_with([LabelledText("TEXT 1", "a"), LabelledText("other", "b")])
    assert "1 of its 30 queries" in warning
    report = tmp_path / "report.json"
    results = retrieval_main(RetrievalSettings(model=str(tiny_model), classes=(str(path),), json=report))
    assert results.tasks["dev"].metrics["accuracy"].value == metrics["dev/accuracy"]
    compared = retrieval_main(RetrievalSettings(model=str(tiny_model), classes=(str(path),), against=(str(report),)))
    assert compared.tasks.keys() == {"dev"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_tiny_base

    return save_tiny_base("llama", tmp_path_factory.mktemp("model"))
