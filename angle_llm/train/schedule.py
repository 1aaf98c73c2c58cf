"""Schedule of a run: the example indices, learning rate, evaluation and checkpoint of every optimizer step.

Steps are numbered from 1. No step has learning rate 0. Common schedulers start at 0, which would waste a thirtieth of a
run of 30 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from angle_llm.data.order import Draws
from angle_llm.settings.train import TrainSettings


class StepSchedule:
    """The optimizer steps of a run: their batches of example indices, learning rates, evaluations and checkpoints.

    A batch depends only on the seed, the epoch and the position of the batch in the epoch.
    """

    def __init__(self, draws: Draws, settings: TrainSettings) -> None:
        self._draws = draws
        self._settings = settings
        self._steps_per_epoch = math.ceil(draws.batches(settings.batch_size) / settings.accumulation)
        steps = self._steps_per_epoch * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        self.warmup = settings.optimizer.warmup_steps(self.steps)

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect."""
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
        """Yield the epoch and the batches of every step after the first `done` steps.

        A batch is a list of example indices; a step has up to `accumulation` batches, whose gradients are averaged.
        """
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
        """Return the learning rate of a step, counted from 1."""
        return self._settings.optimizer.learning_rate * rate_share(step, self.warmup, self.steps)

    def evaluates_at(self, step: int) -> bool:
        """Return whether the encoder is evaluated after a step; step 0 means before the first step."""
        every = self._settings.evaluation.every_steps
        return step in (0, self.steps) or (every > 0 and step % every == 0)

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is written after a step; always after the last step, for a rerun of the run."""
        every = self._settings.checkpoint.every_steps
        return every > 0 and (step == self.steps or step % every == 0)


def rate_share(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1, as a fraction of the peak learning rate.

    It rises during `warmup` steps, then falls linearly to the last of `steps`.
    """
    if step <= warmup:
        return step / warmup
    return (steps - step + 1) / (steps - warmup + 1)
