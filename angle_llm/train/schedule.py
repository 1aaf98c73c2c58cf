"""Optimizer steps of a run: the examples of each step and its learning rate.

Steps are numbered from 1, and no step has learning rate 0 (common schedulers start at 0, one step in thirty of a short
run).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from angle_llm.config import TrainSettings
from angle_llm.data.order import Draws


class StepSchedule:
    """The optimizer steps of a run: epoch, and the batches of example indices whose gradients are averaged.

    A batch depends on (seed, epoch, position) only.
    """

    def __init__(self, draws: Draws, settings: TrainSettings) -> None:
        self._draws = draws
        self._settings = settings
        self._steps_per_epoch = math.ceil(draws.batches(settings.batch_size) / settings.accumulation)
        steps = self._steps_per_epoch * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        self.warmup = settings.optimizer.warmup_steps(self.steps)

    def warnings(self) -> list[str]:
        """Return the settings that have no effect, as messages."""
        settings, found = self._settings, []
        if settings.max_steps is not None and settings.max_steps > self.steps:
            found.append(
                f"--max-steps is {settings.max_steps}, but the run ends after {self.steps} (epochs: {settings.epochs}, steps in "
                f"an epoch: {self._steps_per_epoch}). For more steps, raise --epochs."
            )
        if self.warmup >= self.steps:
            found.append(f"the warm-up takes {self.warmup} of {self.steps} steps: the learning rate never falls")
        return found

    def after(self, done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the steps after the first `done`, without computing those again."""
        settings = self._settings
        epoch, skipped = divmod(done, self._steps_per_epoch)
        first = skipped * settings.accumulation
        while done < self.steps:
            batches = self._draws.epoch(epoch, settings.batch_size, seed=settings.seed, first=first)
            while done < self.steps and (together := list(islice(batches, settings.accumulation))):
                yield epoch, together
                done += 1
            epoch, first = epoch + 1, 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step`."""
        decay = SCHEDULES[self._settings.optimizer.schedule]
        return self._settings.optimizer.learning_rate * rate_share(decay, step, self.warmup, self.steps)

    def evaluates_at(self, step: int) -> bool:
        """Return whether the encoder is evaluated after this step; step 0 is before the first."""
        every = self._settings.evaluation.every_steps
        return step in (0, self.steps) or (every > 0 and step % every == 0)

    def saves_at(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether a checkpoint is written after this step; also after the last one, for a rerun."""
        every = self._settings.checkpoint.every_steps
        return every > 0 and (is_last or step == self.steps or step % every == 0)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "constant": lambda left: 1.0,
}
"""Map the remaining share of the decay (1 after warm-up, 0 at the end) to the share of the peak learning rate."""


def rate_share(decay: Callable[[float], float], step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak learning rate in step `step` of `steps` (from 1)."""
    if step <= warmup:
        return step / warmup
    return decay((steps - step + 1) / (steps - warmup + 1))
