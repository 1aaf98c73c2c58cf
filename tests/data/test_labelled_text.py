"""Texts with a class: which tables are read so, what a label may be, and the order of the examples."""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.data.batch import TextBatch
from angle_llm.data.columns import resolve_format
from angle_llm.data.examples import label_word, load_examples
from angle_llm.data.formats import DataError, LabelledText, PositivePair
from angle_llm.data.mixture import LoadedSet, Mixture, classes_of
from angle_llm.data.order import TEXTS_OF_A_CLASS, Draws
from angle_llm.data.sources import source_in_memory
from angle_llm.data.store import StoredExamples, write_store
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.train import DataSource
from angle_llm.tools.quality import check_files, write_fixed

NAMES = ["anger", "joy"]


def labels_of(rows: Any) -> list[str]:
    examples = load_examples(DataSource(), source=source_in_memory(rows, "data")).examples
    return [example.label for example in examples if isinstance(example, LabelledText)]


@pytest.mark.parametrize("columns", [["text", "label"], ["label", "sentence", "id"], ["text", "label", "label_text"]])
def test_a_text_with_a_label_is_detected(columns: list[str]) -> None:
    assert resolve_format("auto", {}, columns)[0] == "labelled_text"


@pytest.mark.parametrize(
    "columns",
    [["question", "sentence", "label"], ["query", "text", "label"], ["text", "label", "answer"]],
    ids=["QNLI", "judgements", "answers"],
)
def test_a_label_of_two_texts_is_not_read_as_a_class_of_one(columns: list[str]) -> None:
    """The second text would be ignored without a message."""
    try:
        name, _ = resolve_format("auto", {}, columns)
    except DataError:
        name = "refused"
    assert name != "labelled_text"
    named = {"text": next(column for column in columns if column in ("text", "sentence")), "label": "label"}
    assert resolve_format("auto", named, columns)[0] == "labelled_text"
    with pytest.raises(DataError, match="fit no format"):
        resolve_format("auto", {"label": "class"}, ["question", "sentence", "class"])


def test_labels_are_texts_integers_booleans_and_names(tmp_path: Path) -> None:
    assert labels_of([{"text": "a", "label": value} for value in ("x", " x ", 3, True)]) == ["x", "x", "3", "True"]
    assert labels_of([{"text": "a", "label": label} for label in np.arange(2)]) == ["0", "1"]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    table = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    assert labels_of(table) == ["joy", "anger"], "-1 is no class"
    table.to_parquet(tmp_path / "table.parquet")
    loaded = load_examples(DataSource(path=str(tmp_path / "table.parquet")))
    assert list(loaded.examples) == [LabelledText("a", "joy"), LabelledText("b", "anger")]
    assert loaded.report.dropped == {"no gold label": 1}


def test_integers_are_indices_also_if_the_names_are_numbers(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list("12345"))})
    table = datasets.Dataset.from_dict({"text": list("abcdef"), "label": [0, 1, 2, 3, 4, -1]}, features=features)
    assert labels_of(table) == list("12345")
    table.to_parquet(tmp_path / "stars.parquet")
    source = CommandSource(path=str(tmp_path / "stars.parquet"))
    (report,) = check_files([source], None, [])
    write_fixed([(source, report)], tmp_path, tmp_path)
    copied = load_examples(DataSource(path=str(tmp_path / "stars.jsonl")))
    assert [example.label for example in copied.examples if isinstance(example, LabelledText)] == list("12345")
    assert copied.report.dropped == {"no gold label": 1}
    assert label_word("3", list("12345")) == "3", "a text that is a name"
    assert label_word("0", list("12345")) == "0", "refused by the reader: an index would be equal to a name"
    assert label_word(5, list("12345")) == 5, "out of range"


def test_a_row_without_a_label_is_counted_and_a_number_is_refused() -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": None}, {"text": "c", "label": " "}]
    loaded = load_examples(DataSource(), source=source_in_memory(rows, "data"))
    assert (list(loaded.examples), loaded.report.dropped) == ([LabelledText("a", "x")], {"no gold label": 2})
    with pytest.raises(
        DataError, match=r"data row 2: label is 0.5 \(float\), expected a text, an integer or a boolean"
    ):
        labels_of([{"text": "a", "label": 1}, {"text": "b", "label": 0.5}])


def test_one_long_label_does_not_make_all_labels_long() -> None:
    texts = [LabelledText("a", str(number % 3)) for number in range(1000)] + [LabelledText("b", "x" * 10_000)]
    tracemalloc.start()
    numbers = classes_of(texts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers is not None
    assert numbers.tolist() == [*(number % 3 for number in range(1000)), 3]
    assert peak < 1e6


def test_stored_texts_keep_their_labels(tmp_path: Path) -> None:
    texts = [LabelledText("a", "x"), LabelledText("b", "y")]
    write_store(tmp_path / "store", texts, dict)
    assert list(StoredExamples(tmp_path / "store")) == texts


def test_a_batch_has_each_text_once_and_its_class_in_each_pair() -> None:
    texts = [LabelledText("a", "x"), PositivePair("a", "b"), LabelledText("c", "y"), LabelledText("a", "x")]
    batch = TextBatch.from_examples(texts, prompts=[(0, 1)] * 4)
    assert list(zip(batch.texts, batch.prompts, strict=True)) == [("a", 0), ("b", 1), ("c", 0)], "classes as queries"
    assert batch.label.tolist() == [0, -1, 1, 0]
    assert batch.left.tolist() == [0, 0, 2, 0]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 3), st.floats(0.3, 2.5))
def test_every_text_is_drawn_as_often_as_without_classes(
    classes: list[int], batch_size: int, epoch: int, weight: float
) -> None:
    """So no class is lost, and a resumed epoch has the same batches."""
    draws = Draws.of([len(classes)], [weight], by_set=False, classes=[np.array(classes)])
    batches = list(draws.epoch(epoch, batch_size, seed=7))
    random = Draws.of([len(classes)], [weight], by_set=False).epoch(epoch, batch_size, seed=7)
    assert Counter(index for batch in batches for index in batch) == Counter(
        index for batch in random for index in batch
    )
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert list(draws.epoch(epoch, batch_size, seed=7, first=1)) == batches[1:]


def test_batches_have_several_texts_of_a_class() -> None:
    """Of a hundred classes, 4 texts of each: a random batch of 32 has 2.5 texts with a positive."""
    classes = np.repeat(np.arange(100), TEXTS_OF_A_CLASS)
    draws = Draws.of([400], [1], by_set=False, classes=[classes])
    firsts = set()
    for epoch in range(3):
        batches = list(draws.epoch(epoch, 32, seed=1))
        assert all(set(Counter(classes[batch].tolist()).values()) == {4} for batch in batches)
        firsts.add(tuple(batches[0]))
    assert len(firsts) == 3, "another order in each epoch"
    for batch in draws.epoch(0, 2, seed=1):
        assert len(batch) == 2, "a batch of two is not two texts of a class"
    assert any(len(set(classes[batch].tolist())) == 2 for batch in draws.epoch(0, 2, seed=1))


def test_a_mixture_groups_labelled_texts_only() -> None:
    texts = [LabelledText(f"{number}", "xy"[number % 2]) for number in range(8)]
    pairs = [PositivePair(f"{number}", "b") for number in range(8)]
    mixture = Mixture([LoadedSet("classes", texts), LoadedSet("pairs", pairs)])
    numbers, none = mixture.draws.classes
    assert none is None
    assert numbers is not None
    assert numbers.tolist() == [0, 1] * 4
    order = [index for batch in mixture.draws.epoch(0, 16, seed=3) for index in batch]
    assert sorted(order) == list(range(16))
    assert [index % 2 for index in order if index < 8] in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert mixture.digest != Mixture([LoadedSet("classes", texts[::-1]), LoadedSet("pairs", pairs)]).digest
