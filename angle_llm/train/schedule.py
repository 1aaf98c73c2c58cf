"""The plan of a run: which examples each optimizer step sees, and with which learning rate.

Steps count from 1, and no step is taken at rate 0 (the usual schedulers start there, which is one step in thirty of a
short run).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from angle_llm.config import TrainSettings
from angle_llm.data.order import Draws


class BatchPlan:
    """The optimizer steps of a run: the epoch of each, and the batches of example indices whose gradients are averaged.

    A batch is a function of (seed, epoch, position) alone.
    """

    def __init__(self, draws: Draws, settings: TrainSettings) -> None:
        self._draws = draws
        self._settings = settings
        self._steps_of_epoch = math.ceil(draws.batches(settings.batch_size) / settings.accumulation)
        steps = self._steps_of_epoch * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        self.warmup = settings.optimizer.warmup_steps(self.steps)

    def remarks(self) -> list[str]:
        """What of the settings will not come to pass, in words."""
        settings, told = self._settings, []
        if settings.max_steps is not None and settings.max_steps > self.steps:
            told.append(
                f"max_steps is {settings.max_steps}, but the data last for {self.steps} steps ({settings.epochs} "
                f"epoch(s) of {self._steps_of_epoch}): the run ends there. For more, raise epochs."
            )
        if self.warmup >= self.steps:
            told.append(f"warm-up takes {self.warmup} steps and the run only {self.steps}: the rate never falls")
        return told

    def after(self, done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """The steps that are left once so many are done; nothing of those is computed again."""
        settings = self._settings
        epoch, skipped = divmod(done, self._steps_of_epoch)
        first = skipped * settings.accumulation
        while done < self.steps:
            batches = self._draws.epoch(epoch, settings.batch_size, seed=settings.seed, first=first)
            while done < self.steps and (together := list(islice(batches, settings.accumulation))):
                yield epoch, together
                done += 1
            epoch, first = epoch + 1, 0

    def learning_rate(self, step: int) -> float:
        """That step `step` is taken with."""
        shape = SCHEDULES[self._settings.optimizer.schedule]
        return self._settings.optimizer.learning_rate * rate_share(shape, step, self.warmup, self.steps)

    def evaluates_at(self, step: int) -> bool:
        """Whether the encoder is measured after this step; 0 is before the first."""
        every = self._settings.evaluation.every_steps
        return step in (0, self.steps) or (every > 0 and step % every == 0)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written after this step; one at the end spares a run that is asked again its work."""
        every = self._settings.checkpoint.every_steps
        return every > 0 and (step == self.steps or step % every == 0)


def linear(left: float) -> float:
    """Falls in a straight line."""
    return left


def cosine(left: float) -> float:
    """Falls along half a cosine."""
    return (1 - math.cos(math.pi * left)) / 2


def constant(left: float) -> float:
    """Stays."""
    return 1.0


SCHEDULES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "constant": constant}
"""From the share of the decay that is left (1 after warm-up, towards 0 at the end) to the share of the peak rate."""


def rate_share(shape: Callable[[float], float], step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate that step `step` of `steps` (from 1) is taken with."""
    if step <= warmup:
        return step / warmup
    return shape((steps - step + 1) / (steps - warmup + 1))
