"""The training loop: examples in, a saved encoder out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from angle_llm.config import TrainSettings
from angle_llm.data.formats import Example
from angle_llm.data.mixture import Mixture
from angle_llm.io import paused, progress_bar
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train.batches import BatchPlanner, PlannedBatch, Wordings, ahead, tokens_of
from angle_llm.train.checkpoint import (
    Checkpoints,
    Progress,
    TrainingState,
    random_state,
    run_identity,
    seed_process,
    set_random_state,
    step_of,
)
from angle_llm.train.distributed import Launch
from angle_llm.train.memory import MemoryShortError, TokenBudget
from angle_llm.train.metrics import BestKeeper, Evaluate, Metrics, StepMeter, mean_loss
from angle_llm.train.process_loss import exit_lock
from angle_llm.train.schedule import BatchPlan
from angle_llm.train.signals import Interrupted, StopSignals
from angle_llm.train.step import LossNotFiniteError, StepResult, boundary_step
from angle_llm.train.strategies import Strategy, make_strategy


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
    objective: Objective | Sequence[Objective],
    settings: TrainSettings,
    evaluate: Evaluate | None = None,
    launch: Launch | None = None,
) -> TrainResult:
    """Trains the encoder's trainable weights and writes the run to `settings.run_dir`.

    `examples` may be a `Mixture` of several sets; `objective` is one for all of them, or one for each.

    Each optimizer step averages `accumulation` batches. With `evaluate`, the encoder is measured before the first step,
    every `evaluation.every_steps` steps and at the end, and the best is kept in `model/`. What would make the run fail
    late (a target that cannot be written, an unreadable text of data in memory) is looked for before the first step; a run
    that breaks all the same leaves its weights in `interrupted/`.

    `settings.checkpoint` and SIGINT or SIGTERM write checkpoints, and `settings.resume` goes on from one: the weights and
    metrics at the end are those of a run that was never interrupted, bit for bit.

    Every process of a `launch` calls this with an equal encoder and the same examples and settings. They share the texts of
    each batch out among them; batches, losses and update are those of one process, up to the order of additions.

    Raises:
        TrainingError: for a loss or gradient that is not finite (before the optimizer steps), or a run that cannot start.
        CheckpointError: for a checkpoint that cannot be written, or is asked for and not whole.
        RemoteRankError: if another process has failed, or other data or weights than the main one.
        Interrupted: a `SystemExit`, after a signal and its checkpoint.
    """
    run_dir, model_dir = settings.run_path, settings.run_path / "model"
    launch = launch or Launch.join(run_dir)
    accelerator, processes = launch.accelerator, launch.processes
    encoder.check_savable(model_dir)
    if not examples:
        raise TrainingError("there is no example to train on. Look at the data report: rows may all be dropped.")
    checkpoints = Checkpoints.of(settings)
    origin = processes.from_main(lambda: checkpoints.find(settings.resume))
    # TensorBoard hides what an interrupted run has logged from here on.
    purge = {"tensorboard": {"purge_step": step_of(origin) + 1 if origin else None}}
    accelerator.init_trackers("tensorboard", init_kwargs=purge)
    if not any(parameter.requires_grad for parameter in encoder.model.parameters()):
        raise TrainingError("no weight is trainable: the model has an adapter already. Start from its base.")

    data = Mixture.of(examples)
    objectives = [objective] * len(data.sets) if callable(objective) else objective
    if len(objectives) != len(data.sets):
        raise TrainingError(
            f"{len(data.sets)} sets need as many objectives, or one for all; there are {len(objectives)}."
        )
    plan = BatchPlan(data.draws, settings)
    if processes.is_main:
        for remark in plan.remarks():
            tqdm.write(remark)
    run = run_identity(settings, data.digest, encoder.base_fingerprint, processes.device)
    together = {"run directory": str(run_dir), "checkpoints": settings.checkpoint, "resume": settings.resume}
    for what, mine in {**run, **together}.items():
        processes.check_same(what, mine)
    meter = StepMeter.of(encoder, processes)
    state = TrainingState.of(
        encoder.model, lambda: make_strategy(encoder.model, settings.optimizer, launch), run, settings.seed
    )
    state.strategy.check_replicas()
    seed_process(settings.seed, processes.rank)
    keeper = BestKeeper(encoder, evaluate, model_dir, state.strategy)
    wordings = Wordings(encoder, data)
    with tokens_of(wordings, data, run_dir, processes) as tokens:
        # Processes that planned a batch otherwise would take one another's texts.
        processes.check_same("way of computing", (encoder.sharing, encoder.pooling, encoder.pad_id, tokens.digest()))
        came = checkpoints.begin(origin, state)
        keeper.resume(came)
        step = came.step
        budget = came.budget or TokenBudget(settings.micro_batch_tokens, settings.graph_tokens)
        planner = BatchPlanner(encoder, tokens, wordings, data, objectives, processes.count, budget)
        with (
            Metrics(run_dir / "metrics.jsonl", accelerator, came.metrics_bytes, writes=processes.is_main) as metrics,
            progress_bar("train", plan.steps, "step", done=step, enabled=processes.is_main) as progress,
            StopSignals() as stop,
        ):
            pause = _Pause(plan, planner, keeper, metrics, checkpoints, state, stop, came.step)
            try:
                with paused(progress):
                    pause(step)
                started = time.perf_counter()
                for epoch, batches in ahead(planner.all(plan.after(step))):
                    rate = plan.learning_rate(step + 1)
                    results = _accumulate(state.strategy, planner, batches)
                    norm = state.strategy.update(rate)
                    if not math.isfinite(norm):
                        raise LossNotFiniteError(
                            f"the gradient norm is {norm}; nothing of this step is kept. Lower the learning rate, or use "
                            "bfloat16 or float32 in place of float16."
                        )
                    step += 1
                    counts = meter.counts(results, time.perf_counter() - started) | _of_sets(batches)
                    metrics.log_step(step, epoch, results, rate=rate, norm=norm, counts=counts)
                    progress.set_postfix_str(f"loss {mean_loss(results):.4f}, {meter.shown(counts)}", refresh=False)
                    progress.update()
                    with paused(progress):
                        pause(step)
                    started = time.perf_counter()
                keeper.finish()
            except Interrupted:
                accelerator.end_training()  # TensorBoard's lines are written
                raise
            except Exception as error:
                if step:
                    with exit_lock:  # to the end, even if another process is lost
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
    planner: BatchPlanner
    keeper: BestKeeper
    metrics: Metrics
    checkpoints: Checkpoints
    state: TrainingState
    stop: StopSignals
    came: int

    def __call__(self, step: int) -> None:
        keeper, processes = self.keeper, self.state.processes
        asked = self._asked()
        if self.plan.evaluates_at(step) and not asked:
            keeper.measure(step, self.metrics)
            asked = self._asked()
        if asked or (self.plan.saves_at(step) and step > self.came):
            here = Progress(
                step, self.metrics.bytes_on_disk(), keeper.measured, keeper.start, keeper.best, self.planner.budget
            )
            self.state.strategy.check_replicas()
            path = self.checkpoints.write(self.state, here)
            if asked:
                if processes.is_main:
                    tqdm.write(f"checkpoint of step {step} in {path}; go on with the same settings and --resume auto")
                raise Interrupted(128 + asked)

    def _asked(self) -> int:
        """The signal, 0 without one; it may have reached one process first."""
        return self.state.processes.highest(int(self.stop.asked or 0))


def _of_sets(batches: Sequence[PlannedBatch]) -> dict[str, float]:
    """How many examples of a step were of which set."""
    names = {name: 0 for planned in batches for name in planned.sets}
    return {f"examples/{name}": sum(planned.sets.get(name, 0) for planned in batches) for name in names}


def _accumulate(strategy: Strategy, planner: BatchPlanner, batches: Sequence[PlannedBatch]) -> list[StepResult]:
    """Adds up the gradients of an optimizer step's batches, each with an equal share.

    When memory runs out, all is forgotten and done again with half the tokens at once: the update is the same.
    """
    strategy.model.train()
    generators = random_state(strategy.processes.device)
    while True:
        if any(planned.plan.token_budget > planner.budget.micro_batch_tokens for planned in batches):
            batches = [planner.again(planned) for planned in batches]
        try:
            return [
                boundary_step(
                    strategy.model,
                    planned.plan,
                    planned.batch,
                    planned.objective,
                    graph_tokens=planner.budget.graph_tokens,
                    share=1 / len(batches),
                    strategy=strategy,
                )
                for planned in batches
            ]
        except MemoryShortError as error:
            budget = planner.budget.halved([planned.plan for planned in batches])
            told = str(error)
        if budget is None:
            raise TrainingError(
                f"memory ran out ({told}), with each text alone in the model. Lower model.max_length, or take a smaller model "
                "or more memory."
            )
        if strategy.processes.is_main:
            tqdm.write(
                f"memory ran out: the step is done again, and from here on at most {budget.micro_batch_tokens} tokens go "
                f"through the model at once, and up to {budget.graph_tokens} keep their activations (the same update, but for "
                "the masks of dropout)"
            )
        planner.budget = budget
        strategy.zero_grad()
        set_random_state(generators, strategy.processes.device)
        if strategy.processes.device.type == "cuda":
            torch.cuda.empty_cache()
