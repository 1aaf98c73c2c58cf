"""The plan of a run: which examples each optimizer step sees, and with which learning rate.

Steps count from 1, and no step is taken at rate 0 (the usual schedulers start there, which is one step in thirty of a
short run).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from angle_llm.data.batching import batch_indices
from angle_llm.settings import TrainSettings


class BatchPlan:
    """Iterates over optimizer steps: the epoch, and the batches of example indices whose gradients are averaged.

    A batch is a function of (seed, epoch, position) alone.
    """

    def __init__(self, examples: int, settings: TrainSettings) -> None:
        self._examples = examples
        self._settings = settings
        batches = math.ceil(examples / settings.batch_size)
        steps = math.ceil(batches / settings.accumulation) * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        self.warmup = settings.optimizer.warmup_steps(self.steps)

    def __iter__(self) -> Iterator[tuple[int, list[list[int]]]]:
        settings, done = self._settings, 0
        for epoch in range(settings.epochs):
            batches = batch_indices(self._examples, settings.batch_size, seed=settings.seed, epoch=epoch)
            for first in range(0, len(batches), settings.accumulation):
                if done == self.steps:
                    return
                yield epoch, batches[first : first + settings.accumulation]
                done += 1

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
