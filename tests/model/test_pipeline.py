"""The stages of encoding overlap: the same rows in the same order, bounded, and with the errors of each stage."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_encoder

from angle_llm.model import pipeline
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.pipeline import Rows, StageRates, TokenIds, encode_blocks

TEXTS = [f"Text {number} is about {number % 7} dogs and {number} cats." for number in range(24)]
BLOCKS = [TEXTS[first : first + 4] for first in range(0, len(TEXTS), 4)]


class Stages:
    """The stages with a fixed time per block, and an error in a block."""

    def __init__(self, seconds: tuple[float, ...] = (0, 0, 0), **errors: int) -> None:
        self.encoder: SentenceEncoder = tiny_encoder("llama")
        self.errors = errors
        self.events: list[tuple[str, int]] = []
        self.rows: dict[int, Rows] = {}
        self.on_block: Callable[[str, int], None] = lambda stage, number: None
        self._seconds = dict(zip(("tokenizer", "model", "writer"), seconds, strict=True))
        self.encoder.model.register_forward_pre_hook(lambda *_: self._work("model"))

    def _work(self, stage: str) -> None:
        number = sum(name == stage for name, _ in self.events)
        self.events.append((stage, number))
        time.sleep(self._seconds[stage])
        self.on_block(stage, number)
        if self.errors.get(stage) == number:
            raise ValueError(f"{stage} fails in block {number}")

    def _blocks(self) -> Iterator[tuple[int, TokenIds]]:
        for number, texts in enumerate(BLOCKS):
            self._work("tokenizer")
            yield number, self.encoder.tokenize(texts)

    def _finish(self, number: int, rows: Rows) -> None:
        self._work("writer")
        self.rows[number] = rows

    def run(self, **options: Any) -> StageRates:
        model, plan_ids = self.encoder.model, self.encoder.plan_ids
        return encode_blocks(model, plan_ids, self._blocks(), self._finish, progress=lambda _: None, **options)


def test_overlapping_stages_write_the_same_rows_in_order() -> None:
    together, one_by_one = Stages(), Stages()
    rates = together.run()
    one_by_one.run(overlap=False)
    assert list(together.rows) == list(one_by_one.rows) == list(range(len(BLOCKS)))
    for number, texts in enumerate(BLOCKS):
        np.testing.assert_array_equal(together.rows[number], one_by_one.rows[number])
        np.testing.assert_array_equal(together.rows[number], together.encoder.encode(texts))
    assert rates.texts == len(TEXTS)


def test_a_stage_works_while_the_next_stage_works_on_the_block_before() -> None:
    """Every stage waits in its first block until the stage before has started the second block."""
    second = {"tokenizer": threading.Event(), "model": threading.Event()}
    before = {"model": "tokenizer", "writer": "model"}
    stages = Stages()

    def wait(stage: str, number: int) -> None:
        if number == 1 and stage in second:
            second[stage].set()
        elif number == 0 and stage in before:
            assert second[before[stage]].wait(timeout=30), f"{stage} and {before[stage]} do not overlap"

    stages.on_block = wait
    stages.run()


@pytest.mark.parametrize("slowest", ["tokenizer", "model", "writer"])
def test_the_slowest_stage_is_named(slowest: str) -> None:
    rates = Stages(tuple(0.02 * (stage == slowest) for stage in ("tokenizer", "model", "writer"))).run()
    assert rates.seconds[slowest] >= 0.02 * len(BLOCKS)
    rates.seconds = {stage: 2.0 if stage == slowest else 0.5 for stage in rates.seconds}
    assert str(rates).startswith("texts/s: tokenizer ")
    assert f"{slowest} 12" in str(rates)
    assert str(rates).endswith(f"; the {slowest} limits the speed")


def test_at_most_one_block_waits_for_each_stage() -> None:
    for seconds in ((0.0, 0.02, 0.0), (0.0, 0.0, 0.02)):
        stages = Stages(seconds)
        stages.run()
        counts = dict.fromkeys(("tokenizer", "model", "writer"), 0)
        for stage, _ in stages.events:
            counts[stage] += 1
            assert counts["tokenizer"] <= counts["model"] + 2
            assert counts["model"] <= counts["writer"] + 3


def test_only_the_plans_of_three_blocks_are_in_memory() -> None:
    """A plan keeps the token ids of its block; those of a whole corpus would not fit."""
    stages = Stages((0, 0.02, 0))
    plan_ids, plans, alive = stages.encoder.plan_ids, list[weakref.ref[Plan]](), list[int]()

    def counted(ids: TokenIds, budget: int) -> Plan:
        alive.append(sum(plan() is not None for plan in plans))
        plan = plan_ids(ids, budget)
        plans.append(weakref.ref(plan))
        return plan

    stages.encoder.plan_ids = counted  # type: ignore[method-assign, assignment]
    stages.run()
    assert len(alive) == len(BLOCKS)
    assert max(alive) <= 3


@pytest.mark.parametrize(
    ("errors", "message", "finished"),
    [
        ({"tokenizer": 3}, "tokenizer fails in block 3", 3),
        ({"model": 3}, "model fails in block 3", 3),
        ({"writer": 3}, "writer fails in block 3", 3),
        ({"writer": 2, "tokenizer": 3, "model": 3}, "writer fails in block 2", 2),
        ({"tokenizer": 0}, "tokenizer fails in block 0", 0),
    ],
)
def test_the_error_of_the_first_failed_block_is_raised_and_blocks_before_are_written(
    errors: dict[str, int], message: str, finished: int
) -> None:
    stages = Stages((0, 0, 0.01), **errors)
    with pytest.raises(ValueError, match=message):
        stages.run()
    assert list(stages.rows) == list(range(finished))


@pytest.mark.parametrize("restores", [True, False])
def test_after_lack_of_memory_a_block_has_the_budget_before_or_the_first_one(
    restores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "release_cached_memory", lambda: None)
    stages, tokens = Stages(), []

    def check(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        tokens.append(inputs["ids_BT"].numel())
        if tokens[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")

    stages.encoder.model.register_forward_pre_hook(check, with_kwargs=True)
    stages.run(restores_budget=restores)
    failed = sum(count > 60 for count in tokens)  # a block has more, a text has fewer
    assert failed == (len(BLOCKS) if restores else 1)
    assert list(stages.rows) == list(range(len(BLOCKS)))
