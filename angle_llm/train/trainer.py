"""The training loop: train an encoder on examples and save it."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import FrameType, MappingProxyType
from typing import Any, Literal

import torch
from tqdm import tqdm

from angle_llm.data.formats import SINGLE_TEXTS, Example
from angle_llm.data.mixture import Mixture
from angle_llm.device import matmul_precision, release_cached_memory
from angle_llm.io import progress_bar
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.model.pipeline import prefetch
from angle_llm.model.text_vectors import PrecomputedVectors
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner, PlannedGroup, StepSchedule
from angle_llm.train.best_model import BestModel, Evaluate
from angle_llm.train.callbacks import Callback, TrainingState
from angle_llm.train.checkpoint import (
    Checkpoints,
    Progress,
    random_state,
    seed_rank,
    set_random_state,
    set_torch_state,
    torch_state,
)
from angle_llm.train.distributed import exit_lock
from angle_llm.train.metrics import Metrics, StepMeter, mean_loss, peak_flops
from angle_llm.train.run_folder import FineTuned, Run
from angle_llm.train.step import DivergedError, StepResult, group_step
from angle_llm.train.strategies import make_strategy
from angle_llm.train.token_budget import RankMemoryError, TokenBudget, default_budget, is_kernel_error


class Interrupted(SystemExit):
    """Raised when a signal stops the run, after its checkpoint.

    The exit code is 130 for SIGINT, 143 for SIGTERM, and 129 for SIGHUP.
    """


class StopSignals:
    """Context manager that records SIGINT, SIGTERM or SIGHUP, so that the run can write a checkpoint before it stops.

    A second SIGINT raises KeyboardInterrupt at once. The previous handlers are restored at the end. A signal that is
    ignored (`nohup`, `&`) stays ignored. Outside of the main thread, which alone can install handlers, nothing is
    recorded.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """Last signal; None before a signal."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal and print what happens next; raise KeyboardInterrupt for SIGINT after an earlier signal."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        message = f"\n{self.received.name}: writing a checkpoint after this step; Ctrl-C now stops at once\n"
        with suppress(OSError):  # the same Ctrl-C may have ended the program that reads stderr
            os.write(2, message.encode())  # print is not safe in a signal handler


_STOPPING = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # not on Windows; a closed terminal sends it
    _STOPPING.append(signal.SIGHUP)
_FIRST_STEPS = 10
"""Number of optimizer steps after which a run stops if all gradients were 0. The gradient of a single batch can be 0."""


class TrainingError(RuntimeError):
    """Raised when a run cannot start, or has to stop; the message names the step, the reason and what to do."""


class Trainer:
    """Trains the trainable weights of an encoder and writes the run directory.

    An optimizer step averages the gradients of `accumulation` batches. With `evaluate`, the encoder is evaluated before
    the first step, every `evaluation.every_steps` steps and at the end, and the best encoder is saved in `model/`. A
    run that fails leaves its weights in `interrupted/`.

    Checkpoints are written every `checkpoint.every_steps` steps and on SIGINT, SIGTERM or SIGHUP; `resume` continues from a
    checkpoint. A resumed run ends with exactly the weights and metrics of an uninterrupted run (tested on a CPU).

    Every rank creates a trainer with an equal encoder and the same examples and settings. The texts of a batch are
    distributed over the ranks. Batches, losses and updates are the same as in a single process, except for rounding.
    """

    def __init__(
        self,
        run: Run,
        encoder: SentenceEncoder,
        data: Sequence[Example],
        losses: Sequence[Objective],
        evaluate: Evaluate | None,
        settings: TrainSettings,
        budget: TokenBudget | None = None,
        vectors: Mapping[str, PrecomputedVectors] | None = None,
        callbacks: Sequence[Callback] = (),
        more_identity: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Check that the run can start, and prepare its schedule, batches, optimizer and checkpoints.

        Args:
            run: processes and directory of the run.
            data: a `Mixture` of datasets, or the examples of one dataset.
            losses: one loss per dataset.
            evaluate: function that returns metrics of an encoder; None: no evaluation.
            budget: token budget of a process for a new run; None: the default. A resumed run uses the budget of its
                checkpoint, unless the settings set a budget.
            vectors: embeddings of the texts from a guide or teacher encoder, by field of `Relation`.
            callbacks: called on the first process between steps; equal on all ranks.
            more_identity: names and values that must be equal on all ranks and when the run resumes.

        Raises:
            TrainingError: for a dataset from which nothing can be learned.
            ArtifactError: if the encoder could not be saved at the end.
            RemoteRankError: if another rank failed, or has other data, weights or settings.
        """
        # Settings, data and schedule.
        encoder.check_savable(run.folder / "model")
        self._run, self._processes, self._settings = run, run.processes, settings
        mixture = Mixture.of(data)
        self._schedule = StepSchedule(mixture.draws, settings)
        for warning in self._schedule.warnings():
            run.log(f"warning: {warning}")
        identity = {  # equal for runs that compute the same results; the keys appear in messages
            "settings": settings.fingerprint(),
            "examples": mixture.digest,
            "base weights": encoder.base_fingerprint,
            "dtype": settings.model.dtype,
            "kind of device": self._processes.device.type,
        }
        identity |= {f"vectors of {name}": text_vectors.digest for name, text_vectors in (vectors or {}).items()}
        identity |= more_identity
        # Plan of the batches.
        self._encoder = encoder
        self._budget = budget or default_budget(settings)
        self._planner = BatchPlanner(encoder, mixture, losses, self._processes.world_size, vectors)
        for warning in self._planner.warnings:
            run.log(f"warning: {warning}")
        if (name := next(self._planner.sets_without_pairs(), None)) is not None:
            raise TrainingError(
                f"{name}: expected pairs of two different texts, got rows that all pair a text with itself: nothing can be "
                "learned from them. Use texts that belong together, such as a title with its body or a question with its "
                f"answer. {SINGLE_TEXTS}."
            )
        identity["prompts"] = "+".join(self._planner.prompt_fingerprints)
        for fact, value in {**identity, "tokens and layout": self._planner.digest()}.items():
            self._processes.check_equal(fact, value)
        # Speed, strategy, checkpoints and the saved model. Matrix products in float32 use TF32 on a GPU.
        self._precision = "high" if encoder.dtype == torch.float32 else "highest"
        product_dtype = torch.bfloat16 if encoder.model.options.autocasts else encoder.dtype
        peak = peak_flops(self._processes.device, product_dtype)
        self._meter = StepMeter(encoder, peak, self._processes.world_size)
        self._strategy = make_strategy(encoder.model, settings.optimizer, self._processes)
        self._strategy.check_replicas()
        self._checkpoints = Checkpoints(settings, identity, self._strategy)
        self._callbacks = callbacks
        self._state = TrainingState(run.folder, self._schedule.steps, encoder)
        self._model = BestModel(encoder, evaluate, run.folder / "model", self._strategy)
        # Set by `fit`.
        self._step = self._resumed = 0
        """Number of completed optimizer steps, now and in the checkpoint that the run resumed from."""
        self._learns = False
        """Whether a gradient was not 0 so far."""
        self._metrics: Metrics
        self._signals: StopSignals

    def fit(self, on_accepted: Callable[[], None] = lambda: None) -> FineTuned:
        """Train from the first step, or from a checkpoint, to the end, and return the results of the run.

        `on_accepted` is called when the checkpoint of a resumed run is accepted: a refused run changes no file.

        Raises:
            TrainingError: for a loss or gradient that is not finite, or zero embeddings, before the optimizer step.
                Also for a gradient of 0 in all first steps, too little memory for a single text, or an error of a compiled
                kernel.
            RankMemoryError: if an evaluation does not have enough memory for a single text.
            CheckpointFileError: if a checkpoint cannot be written, or no checkpoint can be read.
            FolderError: if the checkpoints belong to another run.
            RemoteRankError: if another rank failed.
            Interrupted: a `SystemExit`, if a signal stopped the run after a checkpoint.
        """
        # Resume from a checkpoint.
        main = self._processes.is_main
        seed_rank(self._settings.seed, self._processes.rank)
        progress = self._checkpoints.resume()
        on_accepted()
        self._model.resume(progress)
        budget = self._budget
        if progress.budget is not None:
            budget = default_budget(self._settings, progress.budget)
            self._run.log(f"budget of the checkpoint, or as set: {budget}")
        self._use(budget)
        self._step = self._resumed = progress.step
        self._state.stopped = progress.stopped
        self._learns = progress.step > 0
        # Train; an error keeps the model so far.
        with (
            Metrics(self._settings, progress.metrics_bytes, progress.step, enabled=main) as self._metrics,
            progress_bar("train", self._schedule.steps, "step", done=self._step, enabled=main) as bar,
            StopSignals() as self._signals,
        ):
            try:
                self._call("on_start")
                self._train(bar)
                self._model.finish()
                self._call("on_end")
            except Exception as error:
                if self._learns:
                    with exit_lock:  # if another rank is lost, `ProcessWatch` waits for the saved files
                        self._model.rescue()
                if is_kernel_error(error):
                    raise TrainingError(
                        f"step {self._step + 1}: a compiled kernel failed: {error!s:.300}. Resume with --resume auto --layout "
                        "padded; if texts are padded already, set ANGLE_LLM_PLAIN=1."
                    ) from error
                if not isinstance(error, DivergedError):
                    raise
                raise TrainingError(self._diverged_message(error)) from error
        # Result.
        encoder = self._encoder
        model = self._model
        result = FineTuned(
            folder=model.folder,
            steps=self._step,
            best=model.best,
            start=model.start,
            budget=self._budget,
            used={"prompt": encoder.prompts.name, "pooling": encoder.pooling, "max_length": encoder.max_length},
            verdict=model.verdict() if main else None,
            stopped=self._state.stopped if self._step < self._schedule.steps else None,
        )
        if result.stopped is not None:
            self._run.log(f"stopped after step {self._step} of {self._schedule.steps}: {result.stopped}")
        self._run.finish(result)
        return result

    def _diverged_message(self, error: DivergedError) -> str:
        """Return the error message of a step whose loss or gradient norm is not finite: what to change, and what is saved."""
        rate = self._schedule.learning_rate(self._step + 1)
        best = "No model was saved" if self._model.best is None else f"The best model is in {self._model.folder}"
        # DeepSpeed checks no gradient norm before it updates the weights.
        kept = "" if self._processes.zero_stage else "The optimizer did not take this step. "
        return (
            f"step {self._step + 1}: {error}. {kept}Lower the learning rate (--optimizer.learning-rate; {rate:.3g} in this "
            f"step), set --model.dtype float32 if it trains in float16, or check the texts of the batch. {best}."
        )

    def _train(self, bar: tqdm[Any]) -> None:
        """Run all remaining optimizer steps, with evaluations and checkpoints, and show progress in `bar`.

        Steps are planned ahead for one token budget. If it changes, planning starts again after the current step.
        """
        stops = self._evaluate_and_save()
        bar.unpause()  # its rate does not count this evaluation
        # One thread for the whole run: after an out-of-memory error, memory may not suffice for the stack of another.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
            while self._step < self._schedule.steps and not stops:
                budget = self._budget
                started = time.perf_counter()
                steps = self._planner.steps(self._schedule.after(self._step), budget, self._processes.rank)
                for epoch, groups in prefetch(steps, worker):
                    # Increments `_step`; lowers `_budget` after an out-of-memory error.
                    self._take_step(epoch, groups, started, bar)
                    self._call("on_step")
                    stops = self._evaluate_and_save()
                    if stops or self._budget != budget:  # the steps ahead are planned again
                        break
                    started = time.perf_counter()

    def _take_step(self, epoch: int, groups: Sequence[PlannedGroup], started: float, bar: tqdm[Any]) -> None:
        """Take an optimizer step, log it and show it in `bar`; `started` is the time at which the step began.

        Raises:
            DivergedError: if the gradient norm is not finite.
            TrainingError: if the gradient of the first steps, up to `_FIRST_STEPS`, is 0.
        """
        # Gradient and update.
        rate = self._schedule.learning_rate(self._step + 1)
        results = self._accumulate(groups)
        norm = self._strategy.update(rate)
        if norm is not None and not math.isfinite(norm):
            raise DivergedError(f"the loss is {mean_loss(results)} and the gradient norm is {norm}")
        self._step += 1
        if norm is None and (scale := self._strategy.scale) is not None:
            self._run.log(f"step {self._step}: float16 overflow, no weight changes; gradient scale {scale.factor:g}")
        self._learns |= norm is None or norm > 0  # None: the gradient overflowed, so it is not 0
        if not self._learns and self._step == min(_FIRST_STEPS, self._schedule.steps):
            raise TrainingError(
                f"step {self._step}: the gradient is exactly 0, as in all steps before (loss {mean_loss(results):.3g}). "
                "The in-batch term needs several pairs of different texts in a batch, and --objective.cosine-weight and "
                "--objective.angle-weight need different scores: use a larger --batch-size, or see `angle-llm data check`."
            )
        # Metrics and progress.
        seconds = time.perf_counter() - started
        batches = [batch for group in groups for batch in group.batches]
        names = dict.fromkeys(name for batch in batches for name in batch.counts)
        examples = {f"examples/{name}": sum(batch.counts.get(name, 0) for batch in batches) for name in names}
        gradient = {"overflow": 1.0} if norm is None else {"gradient_norm": norm}
        counts = self._meter.counts(results, seconds, checkpointing=self._budget.activation_checkpointing)
        self._metrics.log_step(self._step, epoch, results, rate, gradient | counts | examples)
        unit = self._encoder.model.head.unit
        speed = f"{counts[unit] / seconds:.1f} {unit}/s, {counts['logical_tokens'] / seconds:,.0f} tokens/s"
        bar.set_postfix_str(f"loss {mean_loss(results):.4f}, {speed}", refresh=False)
        bar.update()

    def _accumulate(self, groups: Sequence[PlannedGroup]) -> list[StepResult]:
        """Compute the mean gradient of the batches of an optimizer step, and return the losses of each group.

        A group is a list of batches that are encoded together. If a rank runs out of memory, the step is repeated with
        half the tokens at a time. If micro-batches already are single texts, activation checkpointing is turned on. The
        update is the same.

        Raises:
            TrainingError: if memory does not suffice for a single text.
        """
        strategy, device = self._strategy, self._processes.device
        model = strategy.model
        model.train()
        generators = torch_state(device)
        batches = [batch for group in groups for batch in group.batches]
        while True:
            try:
                weight = 1 / len(batches)
                graph_tokens = self._budget.graph_tokens
                with matmul_precision(device, self._precision):
                    return [
                        group_step(model, plan, planned, graph_tokens=graph_tokens, weight=weight, strategy=strategy)
                        for planned, plan in groups
                    ]
            except RankMemoryError as error:
                reason = str(error)  # in the handler, the error would keep the tensors of its frames alive
            self._use_less_memory(groups, reason)
            groups = self._planner.grouped(batches, self._budget)
            strategy.zero_grad()
            set_torch_state(generators, device)
            release_cached_memory()

    def _use_less_memory(self, groups: Sequence[PlannedGroup], reason: str) -> None:
        """Halve the token budget after an out-of-memory error in the given groups, or turn on activation checkpointing.

        Raises:
            TrainingError: if neither is possible.
        """
        budget = self._budget.halved([group.plan for group in groups])
        can_checkpoint = self._settings.activation_checkpointing == "auto" and not self._budget.activation_checkpointing
        if budget is None and can_checkpoint and checkpointing_problem(self._encoder.model.backbone) is None:
            budget = replace(self._budget, activation_checkpointing=True)
        if budget is None:
            raise TrainingError(
                f"out of memory ({reason}) with a single text per micro-batch. Lower --model.max-length, set "
                "--activation-checkpointing auto if it is never, or use a smaller model or more memory."
            )
        self._run.log(f"out of memory: repeating the step with {budget} (the same update, except for dropout masks)")
        self._use(budget)

    def _use(self, budget: TokenBudget) -> None:
        """Set the token budget of the next steps, with activation checkpointing if the budget has it."""
        self._budget = budget
        if budget.activation_checkpointing:
            self._encoder.model.checkpoint_activations(True)

    def _call(self, event: Literal["on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end"]) -> None:
        """Call a method of all callbacks, on the first process; `TrainingState.stopped` is then equal on all ranks."""
        if not self._callbacks:
            return
        state = self._state
        state.step = self._step
        state.numbers = self._metrics.last

        def call() -> str | None:
            device = self._processes.device
            generators = random_state(device)  # a callback that draws numbers must not change the training
            for callback in self._callbacks:
                getattr(callback, event)(state)
            set_random_state(generators, device)
            return state.stopped

        state.stopped = self._processes.from_main(call)

    def _evaluate_and_save(self) -> bool:
        """Evaluate the encoder and write a checkpoint if the schedule has them after the current step.

        Returns whether a callback stops the run after this step, with its evaluation and checkpoint. A stop at a checkpoint
        or before step 1 is for the next step. After a signal, the evaluation is skipped, and a checkpoint is always written.
        The resumed run evaluates then.

        Raises:
            Interrupted: after the checkpoint, if any rank received a signal.
        """
        step = self._step
        schedule = self._schedule
        model = self._model
        signal_number = self._signal()
        is_new = step == 0 or self._learns  # otherwise the model equals the model before training
        stops = self._state.stopped is not None and step > 0
        if (schedule.evaluates_at(step) or stops) and is_new and not signal_number:
            if model.evaluate(step, self._metrics):
                self._call("on_evaluation")
                stops = self._state.stopped is not None and step > 0
            signal_number = self._signal()
        # Without a last checkpoint, a rerun of a resumed run would train again from the checkpoint that it resumed from.
        ends = not self._run.starts_over and (stops or step == schedule.steps)
        is_due = step > self._resumed and (ends or schedule.saves_at(step, stops=stops))
        if signal_number or is_due:
            self._strategy.check_replicas()
            path = self._checkpoints.write(
                Progress(
                    step=step,
                    metrics_bytes=self._metrics.bytes_on_disk(),
                    evaluated=model.evaluated,
                    start=model.start,
                    best=model.best,
                    budget=self._budget,
                    stopped=self._state.stopped if stops else None,
                )
            )
            self._call("on_checkpoint")
            if signal_number:
                self._run.log(
                    f"checkpoint of step {step} in {path}; to resume, start again with --resume auto (in Python: resume='auto')"
                )
                raise Interrupted(128 + signal_number)
        return stops

    def _signal(self) -> int:
        """Return the number of a stop signal that any rank received, equal on all ranks; 0 without a signal."""
        return self._processes.max(int(self._signals.received or 0))
