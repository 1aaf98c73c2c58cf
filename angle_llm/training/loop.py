"""The training loop: batches in, a saved encoder out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from angle_llm.data.batching import TextBatch, batch_indices
from angle_llm.data.formats import Example
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.modeling.microbatches import plan_micro_batches
from angle_llm.objectives.angle import AngleObjective
from angle_llm.settings import TrainSettings
from angle_llm.training.schedule import SCHEDULES, rate_share
from angle_llm.training.step import LossNotFiniteError, StepResult, boundary_step

Evaluate = Callable[[SentenceEncoder], float]
"""From an encoder to one number, the larger the better."""


@dataclass(frozen=True)
class TrainResult:
    """Where a run ended."""

    model_dir: Path
    """The encoder to use: the best one seen if the run evaluates, else the last one."""
    steps: int
    best_score: float | None
    """The best evaluation, None without one."""
    start_score: float | None
    """The evaluation before the first step, None without one."""


class TrainingError(RuntimeError):
    """A run that had to stop, with the step, the reason and what is kept."""


def train(
    encoder: SentenceEncoder,
    examples: Sequence[Example],
    objective: AngleObjective,
    settings: TrainSettings,
    evaluate: Evaluate | None = None,
) -> TrainResult:
    """Trains the encoder's trainable weights and writes the run to `settings.run_dir`.

    A batch is a function of (seed, epoch, position) alone. Each optimizer step averages `accumulation` batches. With
    `evaluate`, the model is measured before the first step, every `evaluation.every_steps` steps and at the end, and the
    best is kept in `model/`.

    Raises:
        TrainingError: for a loss or gradient that is not finite (before the optimizer steps), or no example.
    """
    from accelerate import Accelerator

    run_dir = Path(settings.run_dir)
    schedule = _StepSchedule(len(examples), settings)
    accelerator = Accelerator(mixed_precision="no", log_with="tensorboard", project_dir=run_dir)
    if accelerator.num_processes != 1:
        raise TrainingError(
            f"this version trains in one process, {accelerator.num_processes} were launched. Use "
            "`accelerate launch --num_processes 1`."
        )
    accelerator.init_trackers("tensorboard")
    encoder.model.to(accelerator.device)
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trainable, lr=settings.optimizer.learning_rate, weight_decay=settings.optimizer.weight_decay)
    model, optimizer = accelerator.prepare(encoder.model, optimizer)
    shape = SCHEDULES[settings.optimizer.schedule]
    warmup = settings.optimizer.warmup_steps(schedule.steps)
    learning_rate = LambdaLR(optimizer, lambda done: rate_share(shape, done + 1, warmup, schedule.steps))
    keeper = _BestKeeper(encoder, evaluate, run_dir / "model")

    with (
        _Metrics(run_dir / "metrics.jsonl", accelerator) as metrics,
        tqdm(total=schedule.steps, desc="train") as progress,
    ):
        keeper.measure(0, metrics)
        step, started = 0, time.perf_counter()
        for epoch, batches in schedule:
            model.train()
            results: list[StepResult] = []
            for indices in batches:
                batch = TextBatch.from_examples([examples[index] for index in indices])
                micro_batches = plan_micro_batches(
                    encoder.sentences(batch.texts), settings.micro_batch_tokens, encoder.pad_id
                )
                try:
                    result = boundary_step(
                        model,
                        micro_batches,
                        batch,
                        objective,
                        graph_tokens=settings.graph_tokens,
                        share=1 / len(batches),
                        backward=accelerator.backward,
                    )
                except LossNotFiniteError as error:
                    raise TrainingError(f"step {step + 1}: {error} {keeper.what_is_kept}") from error
                results.append(result)
            norm = accelerator.clip_grad_norm_(trainable, settings.optimizer.max_gradient_norm)
            if not math.isfinite(norm):
                raise TrainingError(
                    f"step {step + 1}: the gradient norm is {float(norm)}, so the step was not taken. Lower the learning "
                    f"rate, or use bfloat16 or float32 in place of float16. {keeper.what_is_kept}"
                )
            rate = float(learning_rate.get_last_lr()[0])
            optimizer.step()
            learning_rate.step()
            optimizer.zero_grad()
            step += 1
            now = time.perf_counter()
            metrics.log_step(step, epoch, results, rate=rate, norm=float(norm), seconds=now - started)
            started = now
            progress.update()
            progress.set_postfix(loss=f"{metrics.last_loss:.4f}", refresh=False)
            if step == schedule.steps or schedule.evaluates_at(step):
                keeper.measure(step, metrics)
                started = time.perf_counter()
    keeper.finish()
    accelerator.end_training()
    return TrainResult(keeper.folder, step, keeper.best, keeper.start)


class _StepSchedule:
    """Which examples each optimizer step sees, and how many steps there are."""

    def __init__(self, examples: int, settings: TrainSettings) -> None:
        if examples == 0:
            raise TrainingError("there is no example to train on. Look at the data report: rows may all be dropped.")
        self._examples = examples
        self._settings = settings
        per_epoch = math.ceil(math.ceil(examples / settings.batch_size) / settings.accumulation)
        self.steps = min(per_epoch * settings.epochs, settings.max_steps or per_epoch * settings.epochs)

    def __iter__(self) -> Iterator[tuple[int, list[list[int]]]]:
        settings, done = self._settings, 0
        for epoch in range(settings.epochs):
            batches = batch_indices(self._examples, settings.batch_size, seed=settings.seed, epoch=epoch)
            for first in range(0, len(batches), settings.accumulation):
                if done == self.steps:
                    return
                yield epoch, batches[first : first + settings.accumulation]
                done += 1

    def evaluates_at(self, step: int) -> bool:
        every = self._settings.evaluation.every_steps
        return every > 0 and step % every == 0


class _BestKeeper:
    """Measures the encoder now and then and keeps the best one on disk."""

    def __init__(self, encoder: SentenceEncoder, evaluate: Evaluate | None, folder: Path) -> None:
        self._encoder = encoder
        self._evaluate = evaluate
        self.folder = folder
        self.start: float | None = None
        self.best: float | None = None

    def measure(self, step: int, metrics: _Metrics) -> None:
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
        if self._evaluate is None:
            self._encoder.save_pretrained(self.folder)

    @property
    def what_is_kept(self) -> str:
        return "No model was saved yet." if self.best is None else f"The best model so far is kept in {self.folder}."


class _Metrics:
    """metrics.jsonl, one object a line, and the same numbers for TensorBoard."""

    def __init__(self, path: Path, accelerator: Any) -> None:
        self._path = path
        self._accelerator = accelerator
        self._file: IO[str] | None = None
        self.last_loss = math.nan

    def __enter__(self) -> _Metrics:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def log(self, values: dict[str, float]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        self._accelerator.log({key: value for key, value in values.items() if key != "step"}, step=values["step"])

    def log_step(
        self, step: int, epoch: int, results: Sequence[StepResult], *, rate: float, norm: float, seconds: float
    ) -> None:
        names = results[0].parts
        tokens = sum(result.computed_tokens for result in results)
        self.last_loss = sum(result.loss for result in results) / len(results)
        self.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": self.last_loss,
                **{f"loss/{name}": sum(result.parts[name] for result in results) / len(results) for name in names},
                "learning_rate": rate,
                "gradient_norm": norm,
                "texts": sum(result.texts for result in results),
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "seconds": seconds,
            }
        )
