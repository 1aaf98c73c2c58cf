"""Callbacks of a training run, and early stopping.

A callback is an object with methods that the trainer calls between optimizer steps. It reads numbers and the encoder,
and can stop the run:

    class StopWhenLossIsLow(Callback):
        def on_step(self, state: TrainingState) -> None:
            if state.numbers["loss"] < 0.1:
                state.stop("the loss is below 0.1")
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

DECIDES = "evaluation"
"""Key in metrics.jsonl of the metric that selects the best model."""


@dataclass
class TrainingState:
    """State of a training run, passed to callbacks."""

    folder: Path
    """Run directory."""
    steps: int
    """Number of optimizer steps of the whole run."""
    encoder: SentenceEncoder
    """The encoder that is trained. Do not change it. With ZeRO or FSDP, its weights may be on other processes: then use an
    evaluation function (`fine_tune(evaluation=…)`), which all processes call."""
    step: int = 0
    """Number of completed optimizer steps."""
    numbers: dict[str, Any] | None = None
    """Numbers of the last step or evaluation: the last line of metrics.jsonl. None before the first line."""
    stopped: str | None = None
    """Reason why a callback stopped the run; None if the run is not stopped."""

    def stop(self, reason: str) -> None:
        """Stop the run after the current step, or the next one if called at a checkpoint or before step 1.

        The run is evaluated and saved as at its last step.
        """
        self.stopped = reason

    def history(self) -> list[dict[str, Any]]:
        """Return the numbers of all steps and evaluations so far, in order, also those before the run was resumed."""
        return read_metrics(self.folder)


class Callback:
    """Base class of callbacks; its methods do nothing.

    Only the first process calls them. An exception ends the run without a checkpoint. A run is resumed with new callback
    objects, so state that must survive belongs into a function of `TrainingState.history`. A run cannot resume with
    callbacks of other classes, because it could end with another result.
    """

    def on_start(self, state: TrainingState) -> None:
        """Called before the first step, and before the first step of a resumed run."""

    def on_step(self, state: TrainingState) -> None:
        """Called after each optimizer step; `state.numbers` has its loss, learning rate, gradient norm and speed."""

    def on_evaluation(self, state: TrainingState) -> None:
        """Called after each evaluation; `state.numbers` has the metrics, as `evaluation/TASK/METRIC`."""

    def on_checkpoint(self, state: TrainingState) -> None:
        """Called after each checkpoint, which is `checkpoints/step-…` in `state.folder`."""

    def on_end(self, state: TrainingState) -> None:
        """Called after the last step, when the model is saved. Not called for a run that fails or is interrupted."""


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stops a run when its evaluations no longer improve; needs `evaluation={"tasks": …, "every_steps": 100}`.

    The run stops if the best value of the metric is `patience` evaluations old. A value improves if it is more than
    `min_delta` above the best value before. The saved model is the best model in any case.
    """

    patience: int
    """Number of evaluations without improvement."""
    metric: str | None = None
    """Name of the metric, TASK/METRIC, higher is better. None: the metric that selects the best model."""
    min_delta: float = 0.0
    """The metric must rise by more than this to count as improved."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience: expected 1 or more, got {self.patience!r}")

    def on_evaluation(self, state: TrainingState) -> None:
        key = DECIDES if self.metric is None else f"{DECIDES}/{self.metric}"
        of_step = {numbers["step"]: numbers for numbers in state.history() if DECIDES in numbers}  # one per step
        evaluations = list(of_step.values())
        if key not in evaluations[-1]:
            known = [name.removeprefix(f"{DECIDES}/") for name in evaluations[-1] if name.startswith(f"{DECIDES}/")]
            raise ValueError(f"early_stopping.metric: expected one of {', '.join(known)}; got {self.metric!r}")
        best = evaluations[0]
        for numbers in evaluations[1:]:
            if numbers[key] > best[key] + self.min_delta or (math.isnan(best[key]) and not math.isnan(numbers[key])):
                best = numbers
        age = len(evaluations) - 1 - evaluations.index(best)
        if age >= self.patience:
            name = self.metric or "evaluation"
            state.stop(f"{name} has not improved for {age} evaluations: best {best[key]:.2f} in step {best['step']}")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in a run directory, one dictionary per step and per evaluation."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise `TypeError` for an object that is not a `Callback`, or has a method `on_…` that is never called."""
    if isinstance(callbacks, Callback):
        raise TypeError(f"callbacks: expected a list, got {type(callbacks).__name__}; write callbacks=[…]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks: expected objects of classes derived from Callback, got {type(callback).__name__}"
            )
        called = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(callback):
            if name.startswith("on_") and name not in called:
                raise TypeError(
                    f"callbacks: {type(callback).__name__}.{name} is never called; expected one of {', '.join(called)}"
                )


def names_of(callbacks: Sequence[Callback]) -> str:
    """Return the classes of callbacks, with their plain fields if they are dataclasses; equal when a run resumes."""
    names = []
    for callback in callbacks:
        values: list[tuple[str, Any]] = []
        if is_dataclass(callback):
            values = [(item.name, getattr(callback, item.name)) for item in fields(callback)]
        plain = [f"{name}={value!r}" for name, value in values if value is None or isinstance(value, str | int | float)]
        names.append(f"{type(callback).__qualname__}({', '.join(plain)})")
    return ", ".join(names)
