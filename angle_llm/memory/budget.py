"""Choose the token budget of a run so that its largest training step fits the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from angle_llm.data.formats import DataError
from angle_llm.data.mixture import Mixture
from angle_llm.device import is_out_of_memory
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.memory.device_memory import GIB, Sharding, free_memory
from angle_llm.memory.step_forecast import MICRO_TOKENS, StepForecast
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.train import TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.step import matmul_precision
from angle_llm.train.token_budget import CPU_BUDGET, TokenBudget, budget_of, check_checkpointing, default_budget

ROUND_TOKENS = 256
"""Chosen budgets are multiples of this number of tokens."""
LEAST_GRAPH_TOKENS = 16_384
"""`graph_tokens` chosen if it fits, even if the sampled steps are smaller."""
MARGIN = 1.25
"""Largest step that a chosen budget allows, relative to the largest sampled step."""
SMALL_MODEL = 10_000_000
"""A model with fewer weights gets the constant budget on a CPU, without a forecast."""
LEAST_GAIN = 0.1
"""Fraction of the time of a step that activation checkpointing must save to be chosen if the step fits without it."""
USABLE, USABLE_WITH_ZERO = 0.92, 0.85
"""Fraction of free memory that a forecast may fill. ZeRO cannot repeat a step after running out of memory."""


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
    free = free_memory(processes)
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
    weights = list(encoder.model.parameters())
    kind = "cuda" if processes.device.type == "cuda" else "cpu"
    if kind == "cpu" and sum(weight.numel() for weight in weights) < SMALL_MODEL:
        log(f"token budget: {budget}")
        return budget

    # 2. The forecast. It is measured on a GPU, unless ZeRO-3 partitions the weights: they are still on the CPU.
    measure = weights[0].is_cuda
    sharding = Sharding.of(processes)
    precision = matmul_precision(processes.device, "high" if encoder.dtype == torch.float32 else "highest")
    with torch.random.fork_rng(devices=[processes.device] if measure else []), precision:
        try:
            forecast = StepForecast.of(
                settings, encoder, encoder.model.backbone, data, losses, sharding, kind, measure=measure
            )
            choice = best_budget(settings, forecast, free)
            cost = forecast.token_cost() if measure else None
        except DataError:
            raise
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the model needs values of tensors
            if is_out_of_memory(error):  # a few tokens do not fit
                budget = default_budget(settings, TokenBudget(ROUND_TOKENS, 0))
            log(f"warning: the memory of a step is unknown ({type(error).__name__}: {error}); {budget}")
            return budget

    # 3. The reason.
    needed = f"{'measured' if measure else 'forecast'} {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    sampled = f"sampled steps have up to {forecast.sample.step_tokens:,} tokens per process"
    text = f"token budget: {choice.budget} ({needed}; {sampled})"
    log(text if choice.fits else f"warning: {text}. The run may not fit: {_advice(settings, encoder, sharding, kind)}.")
    return replace(choice.budget, token_cost=cost)


def _advice(settings: TrainSettings, encoder: SentenceEncoder, sharding: Sharding, kind: str) -> str:
    """Return settings that lower the memory of a run."""
    advice = ["lower --model.max-length or --lora.rank"]
    if encoder.bits != 4 and settings.lora.rank > 0 and sharding.zero < 3:
        advice.append("set --model.bits 4")
    if kind == "cuda" and encoder.bits is None and sharding.zero < 3:
        advice.append("use ZeRO-3 on several devices")
    return ", or ".join(advice)


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the token budget with the least time per token for a device with `memory` bytes; set values are kept.

    With `activation_checkpointing: auto`, the largest budget without activation checkpointing is compared with the largest
    budget with it, which needs one more forward pass but may have larger micro-batches. It must save `LEAST_GAIN` of the
    time, because measured times vary. If neither fits, the result has activation checkpointing.
    """
    usable = round(memory * (USABLE_WITH_ZERO if forecast.device.sharding.zero else USABLE))
    wanted = settings.activation_checkpointing
    plain = wanted != "always"
    choices = [largest_budget(settings, forecast, usable, checkpointing=False)] if plain else []
    if not plain or (wanted == "auto" and forecast.supports_checkpointing()):
        choices.append(largest_budget(settings, forecast, usable, checkpointing=True))
    fitting = [choice for choice in choices if choice.fits] or choices[-1:]
    first, last = fitting[0], fitting[-1]
    gains = time_per_token(last.budget, forecast) < (1 - LEAST_GAIN) * time_per_token(first.budget, forecast)
    return last if gains else first


def largest_budget(
    settings: TrainSettings, forecast: StepForecast, usable: int, *, checkpointing: bool
) -> BudgetChoice:
    """Return the first candidate whose largest step needs at most `usable` bytes, else the last candidate.

    A step that keeps its activations has at most `graph_tokens` tokens, and, if the settings fix that, not more than the
    data need. A step with gradient caching counts with single texts as micro-batches, unless the batch needs caching.
    """
    most_tokens = round(MARGIN * forecast.sample.step_tokens)
    for candidate in candidates(settings, forecast):
        budget = replace(candidate, activation_checkpointing=checkpointing)
        graphs = budget.graph_tokens if settings.graph_tokens is None else min(settings.graph_tokens, most_tokens)
        caches = forecast.sample.batch_tokens > budget.graph_tokens
        cached = budget if caches else replace(budget, micro_batch_tokens=1)
        needed = max(forecast.kept(replace(budget, graph_tokens=graphs)).total, forecast.cached(cached).total)
        if needed <= usable:
            break
    return BudgetChoice(budget, needed, needed <= usable)


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield token budgets to try, the largest first; values in the settings are kept.

    `graph_tokens` falls first, with micro-batches of at most this size; then micro-batches fall with gradient caching.
    """
    on_cpu = forecast.device.kind == "cpu"
    most = CPU_BUDGET.micro_batch_tokens if on_cpu else MICRO_TOKENS
    useful = LEAST_GRAPH_TOKENS if on_cpu else max(LEAST_GRAPH_TOKENS, round(MARGIN * forecast.sample.step_tokens))
    sizes = range(-(-useful // ROUND_TOKENS) * ROUND_TOKENS, 0, -ROUND_TOKENS)
    for micro, graph in [(min(most, size), size) for size in sizes] + [(min(most, size), 0) for size in sizes]:
        yield TokenBudget(
            micro if settings.micro_batch_tokens is None else settings.micro_batch_tokens,
            graph if settings.graph_tokens is None else settings.graph_tokens,
        )


def time_per_token(budget: TokenBudget, forecast: StepForecast) -> float:
    """Return the time per token of a batch with this budget, in forward passes of a token.

    A backward pass takes as long as two forward passes. Activation checkpointing and gradient caching need one more forward
    pass each.
    """
    batch = forecast.sample.batch_tokens
    passes = 3 + budget.activation_checkpointing + (batch > budget.graph_tokens)
    overhead = forecast.costs(checkpointing=budget.activation_checkpointing).overhead_tokens
    return passes * (1 + overhead / min(budget.micro_batch_tokens, batch))
