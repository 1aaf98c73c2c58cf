"""When each step of a transformers `Trainer` ended, and its loss."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Times from the end of one optimizer step to the end of the next: reading rows, tokenising and padding included."""

    def __init__(self, trainer: Any) -> None:
        self.losses: list[float] = []
        self._ticks: list[float] = []
        step = trainer.training_step

        def recorded(*arguments: Any, **named: Any) -> Any:
            loss = step(*arguments, **named)
            self.losses.append(float(loss))
            return loss

        trainer.training_step = recorded
        trainer.add_callback(self)

    @property
    def step_seconds(self) -> list[float]:
        return [after - before for before, after in zip(self._ticks, self._ticks[1:], strict=False)]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ticks.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ticks.append(time.perf_counter())
