"""What a run leaves on disk while it goes: metrics line by line, and the best encoder so far."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.training.step import StepResult

Evaluate = Callable[[SentenceEncoder], float]
"""From an encoder to one number, the larger the better."""


class Metrics:
    """metrics.jsonl, one object a line, and the same numbers for TensorBoard."""

    def __init__(self, path: Path, accelerator: Any) -> None:
        self._path = path
        self._accelerator = accelerator
        self._file: IO[str] | None = None

    def __enter__(self) -> Metrics:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def log(self, values: dict[str, float], notes: dict[str, str] | None = None) -> None:
        """Writes one line; `step` places it on TensorBoard's axis, which takes numbers only."""
        assert self._file is not None
        self._file.write(json.dumps({**values, **(notes or {})}) + "\n")
        self._file.flush()
        self._accelerator.log({key: value for key, value in values.items() if key != "step"}, step=values["step"])

    def log_step(
        self,
        step: int,
        epoch: int,
        results: Sequence[StepResult],
        *,
        rate: float,
        norm: float,
        counts: dict[str, float],
    ) -> None:
        """One optimizer step: means over its batches of loss and parts, what was computed, and why that way."""
        self.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": mean_loss(results),
                **{
                    f"loss/{name}": sum(result.parts[name] for result in results) / len(results)
                    for name in results[0].parts
                },
                "learning_rate": rate,
                "gradient_norm": norm,
                **counts,
            },
            notes={"way": results[0].way, "reason": results[0].reason},
        )


def mean_loss(results: Sequence[StepResult]) -> float:
    """The loss of an optimizer step: the mean over its batches."""
    return sum(result.loss for result in results) / len(results)


class BestKeeper:
    """Measures the encoder now and then and keeps the best one in `folder`; without a measure, the last one."""

    def __init__(self, encoder: SentenceEncoder, evaluate: Evaluate | None, folder: Path) -> None:
        self._encoder = encoder
        self._evaluate = evaluate
        self.folder = folder
        self.start: float | None = None
        self.best: float | None = None

    def measure(self, step: int, metrics: Metrics) -> None:
        """Step 0 is the untrained model: measured for comparison, not kept."""
        if self._evaluate is None:
            return
        score = self._evaluate(self._encoder)
        metrics.log({"step": step, "evaluation": score})
        tqdm.write(f"step {step}: evaluation {score:.2f}")
        if step == 0:
            self.start = score
        elif self.best is None or score > self.best:
            self.best = score
            self._encoder.save_pretrained(self.folder)

    def finish(self) -> None:
        """The end of a run that does not measure."""
        if self._evaluate is None:
            self._encoder.save_pretrained(self.folder)

    def rescue(self) -> None:
        """A run that ends before its time leaves its weights, if they are numbers, in `interrupted/` beside the best."""
        trained = [parameter for parameter in self._encoder.model.parameters() if parameter.requires_grad]
        if all(math.isfinite(float(parameter.detach().sum())) for parameter in trained):
            folder = self.folder.with_name("interrupted")
            self._encoder.save_pretrained(folder)
            tqdm.write(f"the run ended early; its last weights are in {folder}")

    @property
    def what_is_kept(self) -> str:
        """For the message of a run that stops."""
        return "No model was kept yet." if self.best is None else f"The best model so far is in {self.folder}."
