from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.data import Example, PositivePair, ScoredPair, TextBatch, Triple, batch_indices

texts = st.sampled_from(["a", "b", "c", "d", "é", " a"])
examples = st.one_of(
    st.builds(ScoredPair, texts, texts, st.floats(0, 1, width=32)),
    st.builds(PositivePair, texts, texts),
    st.builds(Triple, texts, texts, texts),
)


def relations(example: Example) -> list[tuple[str, str, float]]:
    """The design's table of formats, written out a second time."""
    match example:
        case ScoredPair(left, right, score):
            return [(left, right, score)]
        case PositivePair(left, right):
            return [(left, right, 1.0)]
        case Triple(anchor, positive, negative):
            return [(anchor, positive, 1.0), (anchor, negative, 0.0)]


def test_all_formats_share_one_set_of_texts_in_order_of_appearance() -> None:
    batch = TextBatch.from_examples([Triple("a", "p", "n"), ScoredPair("p", "a", 0.25), PositivePair("x", "n")])

    assert batch.texts == ["a", "p", "n", "x"]
    assert len(batch) == 4
    assert batch.left.tolist() == [0, 0, 1, 3]
    assert batch.right.tolist() == [1, 2, 0, 2]
    assert batch.score.tolist() == [1.0, 0.0, 0.25, 1.0]
    assert (batch.left.dtype, batch.right.dtype, batch.score.dtype) == (torch.int64, torch.int64, torch.float32)


@given(st.lists(examples, max_size=12))
def test_a_batch_says_what_its_examples_say(some: list[Example]) -> None:
    batch = TextBatch.from_examples(some)

    rows = zip(batch.left.tolist(), batch.right.tolist(), batch.score.tolist(), strict=True)
    assert [(batch.texts[i], batch.texts[j], score) for i, j, score in rows] == [
        relation for example in some for relation in relations(example)
    ]
    assert len(set(batch.texts)) == len(batch.texts)


def test_a_text_may_be_paired_with_itself_and_a_pair_may_repeat() -> None:
    batch = TextBatch.from_examples([PositivePair("a", "a"), PositivePair("a", "a")])

    assert (batch.texts, batch.left.tolist(), batch.right.tolist()) == (["a"], [0, 0], [0, 0])


def test_an_empty_share_is_an_empty_batch() -> None:
    batch = TextBatch.from_examples([])

    assert len(batch) == 0
    assert batch.left.shape == batch.right.shape == batch.score.shape == (0,)


def test_what_is_no_example_is_refused() -> None:
    with pytest.raises(TypeError, match="needed ScoredPair, PositivePair or Triple; came dict"):
        TextBatch.from_examples([{"text1": "a"}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("texts", "left", "right", "score", "message"),
    [
        (["a", "a"], [0], [1], [1.0], "must be unique"),
        (["a", "b"], [0], [2], [1.0], "right points outside the 2 texts"),
        (["a", "b"], [-1], [1], [1.0], "left points outside the 2 texts"),
        (["a", "b"], [0], [1], [1], "score must be torch.float32"),
        (["a", "b"], [0], [1, 0], [1.0], r"right must be torch.int64 of shape \(P,\) with P = 1"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    texts: list[str], left: list[int], right: list[int], score: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TextBatch(texts, torch.tensor(left), torch.tensor(right), torch.tensor(score))


@given(st.integers(0, 200), st.integers(1, 70), st.integers(0, 2**70), st.integers(0, 5))
def test_an_epoch_visits_every_index_once(n: int, batch_size: int, seed: int, epoch: int) -> None:
    batches = batch_indices(n, batch_size, seed=seed, epoch=epoch)

    assert Counter(index for batch in batches for index in batch) == Counter(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(batches)
    assert batches == batch_indices(n, batch_size, seed=seed, epoch=epoch)


def test_the_order_is_the_one_written_down() -> None:
    """Resuming on another machine or Python version depends on it."""
    assert batch_indices(8, 3, seed=42, epoch=1) == [[2, 6, 4], [0, 1, 7], [5, 3]]


def test_the_order_depends_on_seed_and_epoch_not_on_batch_size_or_global_state() -> None:
    def order(batch_size: int, seed: int, epoch: int) -> list[int]:
        return [i for batch in batch_indices(50, batch_size, seed=seed, epoch=epoch) for i in batch]

    assert order(7, 1, 2) == order(50, 1, 2)
    assert len({tuple(order(7, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    torch.manual_seed(0)
    assert order(7, 1, 2) == order(7, 1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": -1, "batch_size": 1, "seed": 0, "epoch": 0},
        {"n": 1, "batch_size": 0, "seed": 0, "epoch": 0},
        {"n": 1, "batch_size": 1, "seed": -1, "epoch": 0},
        {"n": 1, "batch_size": 1, "seed": 0, "epoch": -1},
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="batch_indices needs"):
        batch_indices(**arguments)
