"""The learning rate and the events of each step; batches after a resume."""

from typing import Any

import pytest

from angle_llm.data.order import Draws
from angle_llm.settings.train import CheckpointSettings, EvaluationSettings, OptimizerSettings, TrainSettings
from angle_llm.train.batches import StepSchedule, rate_share


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 10), (1, 1), (3, 10), (10, 10), (100, 10)])
def test_every_step_has_a_rate_above_0_and_none_exceeds_the_peak(warmup: int, steps: int) -> None:
    shares = [rate_share(step, warmup, steps) for step in range(1, steps + 1)]
    assert all(0 < share <= 1 for share in shares)
    rising, falling = shares[:warmup], shares[max(warmup - 1, 0) :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if warmup <= steps:
        assert max(shares) == (1 if warmup else pytest.approx(steps / (steps + 1)))


def test_steps_with_evaluations_and_checkpoints() -> None:
    settings = TrainSettings(
        evaluation=EvaluationSettings(["pairs.tsv"], every_steps=4),
        checkpoint=CheckpointSettings(every_steps=3),
        optimizer=OptimizerSettings(learning_rate=0.5, warmup=2),
        batch_size=1,
    )
    plan = StepSchedule(Draws((10,), (10,)), settings)
    assert [step for step in range(11) if plan.evaluates_at(step)] == [0, 4, 8, 10]
    assert [step for step in range(1, 11) if plan.saves_at(step)] == [3, 6, 9, 10]
    assert [plan.learning_rate(step) for step in (1, 2, 10)] == pytest.approx([0.25, 0.5, 0.5 / 9])
    plan = StepSchedule(Draws((10,), (10,)), TrainSettings(batch_size=1))
    assert [step for step in range(11) if plan.evaluates_at(step)] == [0, 10]
    assert not any(plan.saves_at(step) for step in range(1, 11)), "on signals only"


def test_settings_without_effect_give_warnings() -> None:
    def warnings(**changed: Any) -> list[str]:
        optimizer = OptimizerSettings(warmup=changed.pop("warmup", 0), schedule=changed.pop("schedule", "linear"))
        settings = TrainSettings(batch_size=3, epochs=2, optimizer=optimizer, **changed)
        return StepSchedule(Draws((10,), (10,)), settings).warnings()

    assert warnings() == warnings(max_steps=8) == warnings(max_steps=3) == []
    (message,) = warnings(max_steps=9)
    assert "--max-steps" in message
    (message,) = warnings(warmup=8)
    assert "warm-up" in message
    assert warnings(warmup=8, schedule="constant") == []


@pytest.mark.parametrize("done", range(12))
@pytest.mark.parametrize("by_set", [True, False])
def test_a_resumed_run_gets_the_batches_that_were_left(done: int, by_set: bool) -> None:
    draws = Draws((10, 7), (10, 14), by_set=by_set)
    plan = StepSchedule(draws, TrainSettings(batch_size=3, accumulation=3, epochs=4, max_steps=11))
    whole = list(plan.after(0))
    assert len(whole) == plan.steps == 11
    assert [epoch for epoch, _ in whole] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 2
    assert list(plan.after(done)) == whole[done:]
