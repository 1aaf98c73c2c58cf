"""Choice of the token budgets that fit the memory of the device, at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from angle_llm.config import TrainSettings
from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings_io import SettingsError
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.device_memory import GIB, Sharding, free_memory
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget
from angle_llm.train.step_forecast import MICRO_TOKENS, StepForecast, StepSample

CPU_BUDGET = TokenBudget(8192, 16_384)
"""Of a CPU, if it fits: a result does not depend on the memory of the machine."""
ROUND_TOKENS = 256
"""Chosen budgets are multiples of it."""
LEAST_GRAPH_TOKENS = 16_384
"""Chosen if they fit, even if the sampled steps are smaller."""
ROOM = 1.25
"""Largest step of the run for which there is room, relative to the largest sampled one."""
SMALL_TOKENS = 1024
"""Smaller micro-batches use a GPU badly: products of about 300 rows take the time of reading the weights (H100:
989 TFLOP/s, 3.35 TB/s), 4-bit weights are unpacked for each micro-batch, and each layer is launched for it."""
USABLE, USABLE_WITH_ZERO = 0.92, 0.85
"""Share of free memory that a forecast may fill. ZeRO cannot repeat a step after running out of memory."""
SAMPLED_EXAMPLES = 512


@dataclass(frozen=True)
class BudgetChoice:
    """Token budgets, and whether they are forecast to fit."""

    budget: TokenBudget
    forecast_bytes: int
    """Memory of the largest step within the budget."""
    fits: bool


def choose_budget(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    data: Mixture,
    objectives: list[Objective],
    processes: Processes,
) -> TokenBudget:
    """Return the budgets of a run on this device: as set, or the largest useful ones that fit; equal on all ranks.

    Raises:
        SettingsError: for `activation_checkpointing: always` where it is not possible.
    """
    free = free_memory(processes)
    kind = "cuda" if processes.device.type == "cuda" else "cpu"
    sharding = Sharding.of(processes)

    def choose() -> TokenBudget:
        if settings.activation_checkpointing == "always":
            check_checkpointing(encoder)
        if settings.activation_checkpointing != "auto" and None not in (
            settings.micro_batch_tokens,
            settings.graph_tokens,
        ):
            return default_budget(settings)
        if free is None:
            return default_budget(settings)
        try:
            with torch.random.fork_rng(devices=[]):
                planner = BatchPlanner(encoder, data, objectives, processes.world_size, CPU_BUDGET)
                sample = StepSample.of(planner, settings, SAMPLED_EXAMPLES)
                backbone = encoder.model.backbone
                forecast = StepForecast(
                    settings, encoder, backbone, encoder.dtype, objectives[0], sample, sharding, kind
                )
                choice = best_budget(settings, forecast, free)
        except Exception as error:  # an architecture can fail without weights in any way; the run itself may not
            budget = default_budget(settings)
            log(f"warning: no forecast of memory ({type(error).__name__}: {error}); {budget}")
            return budget
        log(described(choice, free, sample))
        return choice.budget

    return processes.from_main(choose)


def default_budget(settings: TrainSettings) -> TokenBudget:
    """Return the budgets that are set, and those of a CPU for others."""
    micro, graph = settings.micro_batch_tokens, settings.graph_tokens
    return TokenBudget(
        CPU_BUDGET.micro_batch_tokens if micro is None else micro,
        CPU_BUDGET.graph_tokens if graph is None else graph,
        settings.activation_checkpointing == "always",
    )


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the budgets for a device with so many bytes, those of the settings where they are set.

    Activation checkpointing has the cost of gradient caching, one more forward pass, and a batch may need both. So
    `auto` uses it only if the longest text does not fit otherwise, or on a GPU if a batch that is too large for its
    graphs would be computed in micro-batches of less than `SMALL_TOKENS`; half of that if the batch would need both.
    """
    usable = round(memory * (USABLE_WITH_ZERO if forecast.device.sharding.zero else USABLE))
    wanted = settings.activation_checkpointing

    room = round(ROOM * forecast.sample.step_tokens)

    def largest(checkpointing: bool) -> BudgetChoice:
        for budget in candidates(settings, forecast):
            budget = replace(budget, activation_checkpointing=checkpointing)
            if settings.graph_tokens is None:
                total = chosen = forecast.full(budget).total
            else:  # steps of the run do not fill a large one
                total = forecast.full(replace(budget, graph_tokens=min(budget.graph_tokens, room))).total
                chosen = forecast.cached(budget).total
            if chosen <= usable:
                break
        return BudgetChoice(budget, total, total <= usable)

    if wanted == "always":
        return largest(True)
    plain = largest(False)
    if wanted == "never" or not forecast.supports_checkpointing():
        return plain
    batch, micro = forecast.sample.batch_tokens, plain.budget.micro_batch_tokens
    large = micro >= SMALL_TOKENS or forecast.device.kind == "cpu"
    if plain.fits and (large or plain.budget.graph_tokens >= batch):
        return plain
    again = largest(True)
    small = SMALL_TOKENS if again.budget.graph_tokens >= batch else SMALL_TOKENS // 2  # with caching too, it costs more
    gains = again.fits and micro < small and again.budget.micro_batch_tokens >= 2 * micro
    return again if gains or not plain.fits else plain


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield the budgets to try, the best first: those of the settings where they are set."""
    micro, graph = settings.micro_batch_tokens, settings.graph_tokens
    most = CPU_BUDGET.micro_batch_tokens if forecast.device.kind == "cpu" else MICRO_TOKENS
    useful = LEAST_GRAPH_TOKENS
    if forecast.device.kind != "cpu":
        useful = max(useful, round(ROOM * forecast.sample.step_tokens))
    sizes = range(-(-useful // ROUND_TOKENS) * ROUND_TOKENS, 0, -ROUND_TOKENS)
    if graph is None:
        for tokens in sizes:
            yield TokenBudget(min(most, tokens) if micro is None else micro, tokens)
        graph = 0
    for tokens in (size for size in sizes if size <= most):
        yield TokenBudget(tokens if micro is None else micro, graph)


def check_checkpointing(encoder: SentenceEncoder) -> None:
    """Refuse activation checkpointing where it is not possible.

    Raises:
        SettingsError: with the reason.
    """
    try:
        encoder.model.checkpoint_activations(True)
    except ValueError as error:
        raise SettingsError(f"--activation-checkpointing always: {error} Set it to auto or never.") from error


def described(choice: BudgetChoice, free: int, sample: StepSample) -> str:
    """Return the line of the log."""
    needed = f"forecast {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    text = f"budget: {choice.budget} ({needed}; sampled steps have up to {sample.step_tokens:,} tokens a process)"
    if choice.fits:
        return text
    return (
        f"warning: {text}. The run may not fit: lower --model.max-length or --lora.rank, set --model.bits 4, or use "
        "ZeRO-3 on several devices."
    )
