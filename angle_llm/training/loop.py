"""The training loop: examples in, a saved encoder out."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import AdamW
from tqdm import tqdm

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.objectives.angle import AngleObjective
from angle_llm.settings import TrainSettings
from angle_llm.training.batches import PlannedBatch, TokenStore, ahead, plan_batches
from angle_llm.training.checkpoint import Checkpoints, step_of
from angle_llm.training.meter import StepMeter
from angle_llm.training.records import BestKeeper, Evaluate, Metrics, mean_loss
from angle_llm.training.schedule import BatchPlan
from angle_llm.training.signals import Interrupted, StopSignals
from angle_llm.training.state import Progress, TrainingState, run_identity
from angle_llm.training.step import LossNotFiniteError, StepResult, boundary_step

if TYPE_CHECKING:
    from accelerate import Accelerator


class TrainingError(RuntimeError):
    """A run that cannot start or had to stop, with the step, the reason and what is kept."""


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


def train(
    encoder: SentenceEncoder,
    examples: Sequence[Example],
    objective: AngleObjective,
    settings: TrainSettings,
    evaluate: Evaluate | None = None,
) -> TrainResult:
    """Trains the encoder's trainable weights and writes the run to `settings.run_dir`.

    Each optimizer step averages `accumulation` batches. With `evaluate`, the encoder is measured before the first step,
    every `evaluation.every_steps` steps and at the end, and the best is kept in `model/`. What would make the run fail
    late (an unreadable text, a target that cannot be written) is looked for before the first step; a run that breaks all
    the same leaves its weights in `interrupted/`.

    `settings.checkpoint` and SIGINT or SIGTERM write checkpoints, and `settings.resume` goes on from one: the weights and
    metrics at the end are those of a run that was never interrupted, bit for bit.

    Raises:
        TrainingError: for a loss or gradient that is not finite (before the optimizer steps), or a run that cannot start.
        CheckpointError: for a checkpoint that cannot be written, or is asked for and not whole.
        Interrupted: a `SystemExit`, after a signal and its checkpoint.
    """
    run_dir = settings.run_path
    keeper = BestKeeper(encoder, evaluate, run_dir / "model")
    encoder.check_savable(keeper.folder)
    if not examples:
        raise TrainingError("there is no example to train on. Look at the data report: rows may all be dropped.")
    checkpoints = Checkpoints.of(settings)
    origin = checkpoints.find(settings.resume)
    accelerator = _accelerator(run_dir, first_step=step_of(origin) + 1 if origin else None)
    encoder.model.to(accelerator.device)
    weights = {name: parameter for name, parameter in encoder.model.named_parameters() if parameter.requires_grad}
    if not weights:
        raise TrainingError("no weight is trainable: the model has an adapter already. Start from its base.")

    plan = BatchPlan(len(examples), settings)
    if plan.warmup >= plan.steps:
        tqdm.write(f"warm-up takes {plan.warmup} steps and the run only {plan.steps}: the rate never falls")
    adamw = AdamW(weights.values(), lr=settings.optimizer.learning_rate, weight_decay=settings.optimizer.weight_decay)
    model, optimizer = accelerator.prepare(encoder.model, adamw)
    run = run_identity(settings, examples, encoder.base_fingerprint, accelerator.device)
    state = TrainingState(weights, adamw, accelerator.device, run)
    meter = StepMeter.of(encoder, accelerator.device)
    texts = TextBatch.from_examples(examples).texts
    with TokenStore(texts, encoder.sentences, run_dir / "tokens.int32") as tokens:
        came = checkpoints.begin(origin, state)
        keeper.go_on(came)
        step = came.step
        with (
            Metrics(run_dir / "metrics.jsonl", accelerator, came.metrics_bytes) as metrics,
            tqdm(total=plan.steps, initial=step, desc="train", disable=None) as progress,
            StopSignals() as stop,
        ):
            pause = _Pause(plan, keeper, metrics, checkpoints, state, stop, came.step)
            try:
                pause(step)
                started = time.perf_counter()
                steps = itertools.islice(plan, step, None)
                for epoch, batches in ahead(
                    plan_batches(encoder, tokens, examples, steps, settings.micro_batch_tokens)
                ):
                    rate = plan.learning_rate(step + 1)
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    results = _accumulate(accelerator, model, batches, objective, settings)
                    norm = float(accelerator.clip_grad_norm_(weights.values(), settings.optimizer.max_gradient_norm))
                    if not math.isfinite(norm):
                        raise LossNotFiniteError(
                            f"the gradient norm is {norm}, so the step was not taken. Lower the learning rate, or use bfloat16 "
                            "or float32 in place of float16."
                        )
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    counts = meter.counts(results, time.perf_counter() - started)
                    metrics.log_step(step, epoch, results, rate=rate, norm=norm, counts=counts)
                    progress.update()
                    progress.set_postfix_str(f"loss {mean_loss(results):.4f}, {meter.shown(counts)}", refresh=False)
                    pause(step)
                    started = time.perf_counter()
                keeper.finish()
            except Interrupted:
                accelerator.end_training()  # TensorBoard's lines are written
                raise
            except Exception as error:
                if step:
                    keeper.rescue()
                if isinstance(error, LossNotFiniteError):
                    raise TrainingError(f"step {step + 1}: {error} {keeper.what_is_kept}") from error
                raise
    accelerator.end_training()
    return TrainResult(keeper.folder, step, keeper.best, keeper.start)


@dataclass(frozen=True)
class _Pause:
    """Between two optimizer steps: measure, write a checkpoint, leave if a signal asks.

    A signal does not wait for a measurement that is due: the run that goes on makes it.
    """

    plan: BatchPlan
    keeper: BestKeeper
    metrics: Metrics
    checkpoints: Checkpoints
    state: TrainingState
    stop: StopSignals
    came: int

    def __call__(self, step: int) -> None:
        keeper = self.keeper
        if self.plan.evaluates_at(step) and not self.stop.asked:
            keeper.measure(step, self.metrics)
        if self.stop.asked or (self.plan.saves_at(step) and step > self.came):
            here = Progress(step, self.metrics.bytes_on_disk(), keeper.measured, keeper.start, keeper.best)
            path = self.checkpoints.write(self.state, here)
            if self.stop.asked:
                tqdm.write(f"checkpoint of step {step} in {path}; go on with the same settings and --resume auto")
                raise Interrupted(128 + self.stop.asked)


def _accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Sequence[PlannedBatch],
    objective: AngleObjective,
    settings: TrainSettings,
) -> list[StepResult]:
    """Adds up the gradients of an optimizer step's batches, each with an equal share."""
    model.train()
    return [
        boundary_step(
            model,
            plan,
            batch,
            objective,
            graph_tokens=settings.graph_tokens,
            share=1 / len(batches),
            backward=accelerator.backward,
        )
        for batch, plan in batches
    ]


def _accelerator(run_dir: Path, first_step: int | None) -> Accelerator:
    """TensorBoard hides what an interrupted run has logged from `first_step` on."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = Accelerator(
        mixed_precision="no",  # the settings choose the dtype, not the launcher
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # `share` averages, not `backward`
        log_with="tensorboard",
        project_dir=run_dir,
    )
    if accelerator.num_processes != 1:
        raise TrainingError(
            f"this version trains in one process, {accelerator.num_processes} were launched. Use "
            "`accelerate launch --num_processes 1`."
        )
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": first_step}})
    return accelerator
