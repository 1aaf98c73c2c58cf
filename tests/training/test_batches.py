"""Texts tokenised once, batches planned ahead."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tiny import tiny_encoder

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Triple
from angle_llm.training.batches import TEXTS_AT_ONCE, BatchPlanner, TokenStore, ahead
from angle_llm.training.memory import TokenBudget

TEXTS = ["A man eats.", "Someone eats.", "Nobody eats.", "Two dogs run.", "Hi"]


def test_stored_ids_are_the_tokenizers(tmp_path: Path) -> None:
    sentences = tiny_encoder("llama").sentences
    with TokenStore(TEXTS, sentences, tmp_path / "run") as tokens:
        assert tokens(TEXTS[::-1]) == sentences(TEXTS[::-1])
        assert tokens([]) == []
    assert list((tmp_path / "run").iterdir()) == []


def test_texts_are_tokenised_once_in_blocks(tmp_path: Path) -> None:
    asked: list[int] = []

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        asked.append(len(texts))
        return [[int(text)] for text in texts]

    texts = [str(number) for number in range(TEXTS_AT_ONCE + 3)]
    with TokenStore(texts, tokenize, tmp_path) as tokens:
        assert tokens(texts[::997]) == [[number] for number in range(0, TEXTS_AT_ONCE + 3, 997)]
    assert asked == [TEXTS_AT_ONCE, 3]


def test_a_text_that_cannot_be_read_shows_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text 1 is empty"):
        TokenStore(["Hi", " "], tiny_encoder("llama").sentences, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plans_are_those_of_the_batchs_texts(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    examples = [Triple(*TEXTS[:3]), Triple(*TEXTS[2:])]
    texts = TextBatch.from_examples(examples).texts
    with TokenStore(texts, encoder.sentences, tmp_path) as tokens:
        steps = list(
            BatchPlanner(encoder, tokens, examples, 1, TokenBudget(60, 0)).all(iter([(0, [[1], [0]]), (1, [[0, 1]])]))
        )
    assert [epoch for epoch, _ in steps] == [0, 1]
    assert [batch.texts for _, batches in steps for batch, _ in batches] == [TEXTS[2:], TEXTS[:3], texts]
    for _, batches in steps:
        for batch, plan in batches:
            expected = encoder.plan(batch.texts, 60)
            assert (plan.way, plan.row_of, plan.computed_tokens) == (
                expected.way,
                expected.row_of,
                expected.computed_tokens,
            )


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    second_made = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        second_made.set()
        yield 2

    items = ahead(numbers())
    assert next(items) == 1
    assert second_made.wait(timeout=10), "made without being asked for"
    assert list(items) == [2]


def test_an_error_in_the_worker_reaches_the_loop() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise ValueError("no second")

    items = ahead(numbers())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no second"):
        next(items)


def test_a_loop_that_stops_early_leaves_no_thread() -> None:
    items = ahead(iter(range(100)))
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
