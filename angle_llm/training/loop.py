"""The training loop: examples in, a saved encoder out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.objectives.angle import AngleObjective
from angle_llm.settings import TrainSettings
from angle_llm.training.batches import PlannedBatch, TokenStore, ahead, plan_batches
from angle_llm.training.meter import StepMeter
from angle_llm.training.records import BestKeeper, Evaluate, Metrics, mean_loss
from angle_llm.training.schedule import SCHEDULES, BatchPlan, rate_share
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
    late (an unreadable text, a target that cannot be written) is looked for before the first step; a run that ends early
    all the same leaves its weights in `interrupted/`.

    Raises:
        TrainingError: for a loss or gradient that is not finite (before the optimizer steps), or a run that cannot start.
    """
    run_dir = settings.run_path
    keeper = BestKeeper(encoder, evaluate, run_dir / "model")
    encoder.check_savable(keeper.folder)
    if not examples:
        raise TrainingError("there is no example to train on. Look at the data report: rows may all be dropped.")
    accelerator = _accelerator(run_dir)
    encoder.model.to(accelerator.device)
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    if not trainable:
        raise TrainingError("no weight is trainable: the model has an adapter already. Start from its base.")

    plan = BatchPlan(len(examples), settings)
    shape, warmup = SCHEDULES[settings.optimizer.schedule], settings.optimizer.warmup_steps(plan.steps)
    if warmup >= plan.steps:
        tqdm.write(f"warm-up takes {warmup} steps and the run only {plan.steps}: the rate never falls")
    adamw = AdamW(trainable, lr=settings.optimizer.learning_rate, weight_decay=settings.optimizer.weight_decay)
    model, optimizer = accelerator.prepare(encoder.model, adamw)
    schedule = LambdaLR(optimizer, lambda done: rate_share(shape, done + 1, warmup, plan.steps))

    meter = StepMeter.of(encoder, accelerator.device)
    texts = TextBatch.from_examples(examples).texts
    step = 0
    with (
        TokenStore(texts, encoder.sentences, run_dir / "tokens.int32") as tokens,
        Metrics(run_dir / "metrics.jsonl", accelerator) as metrics,
        tqdm(total=plan.steps, desc="train", disable=None) as progress,
    ):
        try:
            keeper.measure(0, metrics)
            started = time.perf_counter()
            for epoch, batches in ahead(
                plan_batches(encoder, tokens, examples, iter(plan), settings.micro_batch_tokens)
            ):
                results = _accumulate(accelerator, model, batches, objective, settings)
                norm = float(accelerator.clip_grad_norm_(trainable, settings.optimizer.max_gradient_norm))
                if not math.isfinite(norm):
                    raise LossNotFiniteError(
                        f"the gradient norm is {norm}, so the step was not taken. Lower the learning rate, or use bfloat16 or "
                        "float32 in place of float16."
                    )
                rate = float(schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                counts = meter.counts(results, time.perf_counter() - started)
                metrics.log_step(step, epoch, results, rate=rate, norm=norm, counts=counts)
                progress.update()
                progress.set_postfix_str(f"loss {mean_loss(results):.4f}, {meter.shown(counts)}", refresh=False)
                if plan.evaluates_at(step):
                    keeper.measure(step, metrics)
                started = time.perf_counter()
            keeper.finish()
        except BaseException as error:
            if step:
                keeper.rescue()
            if isinstance(error, LossNotFiniteError):
                raise TrainingError(f"step {step + 1}: {error} {keeper.what_is_kept}") from error
            raise
    accelerator.end_training()
    return TrainResult(keeper.folder, step, keeper.best, keeper.start)


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


def _accelerator(run_dir: Path) -> Accelerator:
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
    accelerator.init_trackers("tensorboard")
    return accelerator
