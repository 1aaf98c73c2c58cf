"""Choose the token budget of a run so that its largest training step fits the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from angle_llm.data.formats import DataError
from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.memory.device_memory import GIB, Sharding, free_memory
from angle_llm.memory.step_forecast import StepForecast
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.meta_model import meta_backbone
from angle_llm.settings.train import TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.token_budget import CPU_BUDGET, TokenBudget, budget_of, check_checkpointing, default_budget

ROUND_TOKENS = 256
"""Chosen budgets are multiples of this number of tokens."""
MICRO_TOKENS = 16_384
"""Largest useful micro-batch on a GPU in tokens: a larger forward pass is not faster."""
LEAST_GRAPH_TOKENS = 16_384
"""`graph_tokens` chosen if it fits, even if the sampled steps are smaller."""
MARGIN = 1.25
"""Largest step that a chosen budget allows, relative to the largest sampled step."""
OVERHEAD_TOKENS = {"cuda": 300, "cpu": 0}
"""Time of a micro-batch that does not depend on its tokens, divided by the time per token. On a GPU with fewer tokens,
reading the weights takes longer than the products (H100: 989 TFLOP/s, 3.35 TB/s)."""
LEAST_GAIN = 0.1
"""Fraction of the time of a step that activation checkpointing must save to be chosen if the step fits without it."""
SMALL_MODEL = 10_000_000
"""A model with fewer weights gets the constant budget on a CPU, without a forecast."""
USABLE, USABLE_WITH_ZERO = 0.92, 0.85
"""Fraction of free memory that a forecast may fill. ZeRO and FSDP cannot repeat a step after running out of memory."""


@dataclass(frozen=True)
class BudgetChoice:
    """A token budget, its forecast memory, and whether it fits the device."""

    budget: TokenBudget
    forecast_bytes: int
    """Forecast memory of the largest step that the budget allows."""
    fits: bool


def choose_budget(
    settings: TrainSettings, encoder: SentenceEncoder, data: Mixture, losses: Sequence[Objective], processes: Processes
) -> TokenBudget:
    """Return the token budget of a run on this device, equal on all ranks; values in the settings are kept.

    `losses` has one loss per dataset of `data`.

    Raises:
        SettingsError: for `activation_checkpointing: always` with a model whose layers cannot be checkpointed.
    """
    free = free_memory(processes, sum(weight.nbytes for weight in encoder.model.parameters()))
    return processes.from_main(lambda: _chosen(settings, encoder, data, losses, processes, free))


def _chosen(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    data: Mixture,
    losses: Sequence[Objective],
    processes: Processes,
    free: int | None,
) -> TokenBudget:
    """Return the token budget of the main rank for `free` bytes of memory, and log it; arguments as in `choose_budget`."""
    # 1. Budgets that need no forecast.
    budget = default_budget(settings, budget_of(processes.device.type))
    if settings.activation_checkpointing == "always":
        check_checkpointing(encoder)
    fixed = None not in (settings.micro_batch_tokens, settings.graph_tokens)
    if free is None or (fixed and settings.activation_checkpointing != "auto"):
        return budget
    device_type = "cuda" if processes.device.type == "cuda" else "cpu"
    if device_type == "cpu" and sum(weight.numel() for weight in encoder.model.parameters()) < SMALL_MODEL:
        log(f"token budget: {budget}")
        return budget

    # 2. The forecast.
    sharding = Sharding(processes.world_size, processes.zero_stage, processes.offload, processes.uses_fsdp)
    bare: Any = without_adapter(encoder.model.backbone)
    lora = settings.lora if settings.lora.rank else None
    try:
        with torch.random.fork_rng(devices=[]):
            backbone = meta_backbone(bare.config, encoder.dtype, lora, divided=sharding.zero == 3)
            forecast = StepForecast.of(settings, encoder, backbone, data, losses, sharding, device_type)
            choice = best_budget(settings, forecast, free)
    except DataError:
        raise
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the model needs values of tensors
        log(f"warning: the memory of a step is unknown ({type(error).__name__}: {error}); {budget}")
        return budget

    # 3. The reason.
    needed = f"forecast {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    sampled = f"sampled steps have up to {forecast.step_tokens:,} tokens per process"
    text = f"token budget: {choice.budget} ({needed}; {sampled})"
    log(text if choice.fits else f"warning: {text}. The run may not fit: {advice(settings)}.")
    return choice.budget


def advice(settings: TrainSettings) -> str:
    """Return how to lower the memory of a run that may not fit."""
    if not settings.lora.rank:
        return "train an adapter (--lora.rank 32), lower --model.max-length, or use ZeRO on several devices"
    if settings.model.bits == 4:
        return "lower --model.max-length or --lora.rank, or use a smaller model"
    return "lower --model.max-length or --lora.rank, set --model.bits 4, or use FSDP or ZeRO on several devices"


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the token budget with the least time per token that fits a device with `memory` bytes.

    Values in the settings are kept. Activation checkpointing must save `LEAST_GAIN` of the time. Of budgets with equal
    times, the largest is chosen. If no budget fits, the result is the smallest.
    """
    sharding = forecast.device.sharding
    usable = round(memory * (USABLE_WITH_ZERO if sharding.zero or sharding.fsdp else USABLE))
    choices = []
    for budget in candidates(settings, forecast):
        graph_tokens = budget.graph_tokens
        if settings.graph_tokens is not None:  # a step does not need more than its data
            graph_tokens = min(graph_tokens, round(MARGIN * forecast.step_tokens))
        needed = forecast.full(replace(budget, graph_tokens=graph_tokens)).total
        choices.append(BudgetChoice(budget, needed, needed <= usable))

    def time(choice: BudgetChoice) -> float:
        return time_per_token(choice.budget, forecast) / (1 - LEAST_GAIN * choice.budget.activation_checkpointing)

    return min((choice for choice in choices if choice.fits), key=time, default=choices[-1])


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield token budgets to try, the largest first; values in the settings are kept.

    First `graph_tokens` decreases in steps of `ROUND_TOKENS`, with micro-batches of at most this size. Then `graph_tokens` is
    0 (gradient caching), and micro-batches decrease. Then the same with activation checkpointing.
    """
    on_cpu = forecast.device.kind == "cpu"
    largest_micro = CPU_BUDGET.micro_batch_tokens if on_cpu else MICRO_TOKENS
    largest_graph = LEAST_GRAPH_TOKENS if on_cpu else max(LEAST_GRAPH_TOKENS, round(MARGIN * forecast.step_tokens))
    sizes = range(-(-largest_graph // ROUND_TOKENS) * ROUND_TOKENS, 0, -ROUND_TOKENS)
    kept = [(min(largest_micro, size), size) for size in sizes]
    cached = [(micro, 0) for micro, _ in kept]
    allowed = {"never": [False], "always": [True], "auto": [False, True]}[settings.activation_checkpointing]
    if settings.activation_checkpointing == "auto" and not forecast.supports_checkpointing():
        allowed = [False]
    for checkpointing in allowed:
        for micro, graph in kept + cached:
            yield TokenBudget(
                micro if settings.micro_batch_tokens is None else settings.micro_batch_tokens,
                graph if settings.graph_tokens is None else settings.graph_tokens,
                checkpointing,
            )


def time_per_token(budget: TokenBudget, forecast: StepForecast) -> float:
    """Return the time per token of a batch with this budget, in forward passes of a token.

    A backward pass takes as long as two forward passes. Activation checkpointing and gradient caching need one more forward
    pass each.
    """
    batch = forecast.batch_tokens
    passes = 3 + budget.activation_checkpointing + (batch > budget.graph_tokens)
    return passes * (1 + OVERHEAD_TOKENS[forecast.device.kind] / min(budget.micro_batch_tokens, batch))
