"""Texts tokenised once, batches planned ahead."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiny import tiny_encoder

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.data.store import write_store
from angle_llm.losses import AngleObjective
from angle_llm.train.batches import (
    TEXTS_AT_ONCE,
    BatchPlanner,
    Tokenize,
    Tokens,
    TokenStore,
    Wordings,
    ahead,
    tokens_of,
)
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget

TEXTS = ["A man eats.", "Someone eats.", "Nobody eats.", "Two dogs run.", "Hi"]


def batch_of(texts: Sequence[str], prompts: Sequence[int] = ()) -> TextBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return TextBatch(list(texts), none, none, torch.zeros(0), list(prompts))


def test_stored_ids_are_the_tokenizers(tmp_path: Path) -> None:
    sentences = tiny_encoder("llama").tokenize
    with TokenStore(alone(sentences), batch_of(TEXTS), tmp_path / "run") as tokens:
        assert tokens(TEXTS[::-1], [0] * 5) == sentences(TEXTS[::-1])
        assert tokens([], []) == []
    assert list((tmp_path / "run").iterdir()) == []


def alone(tokenize: Tokenize) -> Wordings:
    """One prompt, that of a run."""
    wordings = Wordings(tiny_encoder("llama"), Mixture.of([Triple(*TEXTS[:3])]))
    wordings.tokenizers = [tokenize]
    return wordings


@pytest.mark.parametrize("stored", [True, False])
def test_each_text_is_worded_with_its_own_prompt(stored: bool, tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    plain = encoder.with_prompt("plain").tokenize
    batch = batch_of(["Hi", "Ho", "Hi"], [1, 0, 0])
    both = Wordings(encoder, Mixture([LoadedSet("a", [Triple(*TEXTS[:3])], prompt="plain")]))
    with TokenStore(both, batch, tmp_path) if stored else Tokens(both, batch) as tokens:
        expected = [*plain(["Hi"]), *encoder.tokenize(["Ho", "Hi"])]
        assert tokens(batch.texts, batch.prompts) == expected
        assert expected[0] != expected[2]
        if not stored:
            assert tokens.digest() == Tokens(both, batch).digest()
            assert tokens.digest() != Tokens(both, batch_of(["Hi", "Ho", "Hi"], [0, 1, 1])).digest()


def test_a_set_that_names_the_runs_own_prompt_is_worded_as_the_run() -> None:
    """Else a text of two sets would be two rows, and each the other's negative."""
    pair = [Triple(*TEXTS[:3])]
    encoder = tiny_encoder("llama")
    data = Mixture(
        [LoadedSet("a", pair), LoadedSet("b", pair, prompt=encoder.prompt.name), LoadedSet("c", pair, prompt="plain")]
    )
    wordings = Wordings(encoder, data)
    assert wordings.of_set == [0, 0, 1]
    assert wordings.batch(data, [0, 1]).texts == TEXTS[:3]
    assert wordings.batch(data, [0, 2]).texts == TEXTS[:3] * 2


def test_texts_of_a_set_on_disk_are_tokenised_batch_by_batch(tmp_path: Path) -> None:
    kept = write_store(tmp_path / "store", [Triple(*TEXTS[:3])], dict)
    encoder = tiny_encoder("llama")
    for examples, kind in ((kept, Tokens), (list(kept), TokenStore)):
        data = Mixture.of(examples)
        with tokens_of(Wordings(encoder, data), data, tmp_path, Processes.alone()) as tokens:
            assert type(tokens) is kind
            assert tokens(TEXTS[:3], [0, 0, 0]) == encoder.tokenize(TEXTS[:3])


def test_texts_are_tokenised_once_in_blocks(tmp_path: Path) -> None:
    asked: list[int] = []

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        asked.append(len(texts))
        return [[int(text)] for text in texts]

    texts = [str(number) for number in range(TEXTS_AT_ONCE + 3)]
    with TokenStore(alone(tokenize), batch_of(texts), tmp_path) as tokens:
        assert tokens(texts[::997], [0] * len(texts[::997])) == [
            [number] for number in range(0, TEXTS_AT_ONCE + 3, 997)
        ]
    assert asked == [TEXTS_AT_ONCE, 3]


def test_a_text_that_cannot_be_read_shows_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text 1 is empty"):
        TokenStore(alone(tiny_encoder("llama").tokenize), batch_of(["Hi", " "]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plans_are_those_of_the_batchs_texts(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    examples = [Triple(*TEXTS[:3]), Triple(*TEXTS[2:])]
    data, objective = Mixture.of(examples), AngleObjective()
    texts = TextBatch.from_examples(examples).texts
    wordings = Wordings(encoder, data)
    with TokenStore(wordings, TextBatch.from_examples(examples), tmp_path) as tokens:
        planner = BatchPlanner(encoder, tokens, wordings, data, [objective], 1, TokenBudget(60, 0))
        steps = list(planner.all(iter([(0, [[1], [0]]), (1, [[0, 1]])])))
    assert [epoch for epoch, _ in steps] == [0, 1]
    assert [planned.batch.texts for _, batches in steps for planned in batches] == [TEXTS[2:], TEXTS[:3], texts]
    for _, batches in steps:
        for batch, plan, asked, sets in batches:
            assert asked is objective
            assert sets == {}
            expected = encoder.plan(batch.texts, 60)
            assert (plan.layout, plan.row_of, plan.computed_tokens) == (
                expected.layout,
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
