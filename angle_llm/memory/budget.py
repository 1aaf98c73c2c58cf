"""Choose the token budgets of a run so that its largest training step fits the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.memory.step_forecast import GIB, MICRO_TOKENS, Sharding, StepForecast, StepSample, free_memory
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner
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
SAMPLED_EXAMPLES = 512
"""Number of examples whose first steps are sampled for the choice."""


@dataclass(frozen=True)
class BudgetChoice:
    """A token budget, its forecast memory, and whether it fits the device."""

    budget: TokenBudget
    forecast_bytes: int
    """Forecast memory of the largest step that the budget allows."""
    fits: bool


def choose_budget(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    data: Mixture,
    objectives: list[Objective],
    processes: Processes,
) -> TokenBudget:
    """Return the token budget of a run on this device, equal on all ranks; values in the settings are kept.

    Raises:
        SettingsError: for `activation_checkpointing: always` with a model whose layers cannot be checkpointed.
    """
    free = free_memory(processes)
    kind = "cuda" if processes.device.type == "cuda" else "cpu"
    sharding = Sharding.of(processes)

    def choose() -> TokenBudget:
        budget = default_budget(settings, budget_of(processes.device.type))
        if settings.activation_checkpointing == "always":
            check_checkpointing(encoder)
        fixed = None not in (settings.micro_batch_tokens, settings.graph_tokens)
        weights = list(encoder.model.parameters())
        if free is None or (fixed and settings.activation_checkpointing != "auto"):
            return budget
        if kind == "cpu" and sum(weight.numel() for weight in weights) < SMALL_MODEL:
            log(f"token budget: {budget}")
            return budget
        measure = weights[0].is_cuda  # unless ZeRO-3 partitions the weights: they are still on the CPU
        precision = matmul_precision(processes.device, "high" if encoder.dtype == torch.float32 else "highest")
        with torch.random.fork_rng(devices=[processes.device] if measure else []), precision:
            planner = BatchPlanner(encoder, data, objectives, processes.world_size)
            sample = StepSample.of(planner, settings, SAMPLED_EXAMPLES)
            try:
                choice, forecast = fitting_budget(settings, planner, sample, sharding, kind, free, measure=measure)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the model needs values of tensors
                log(f"warning: the memory of a step is unknown ({type(error).__name__}: {error}); {budget}")
                return budget
        log(describe_choice(choice, free, settings, forecast, measured=measure))
        return choice.budget

    return processes.from_main(choose)


def fitting_budget(
    settings: TrainSettings,
    planner: BatchPlanner,
    sample: StepSample,
    sharding: Sharding,
    kind: str,
    memory: int,
    *,
    measure: bool,
) -> tuple[BudgetChoice, StepForecast]:
    """Return the token budget with the least time per token for a device with `memory` bytes, and its forecast.

    `kind` is the device type, `cuda` or `cpu`. With `measure`, micro-batches of `sample` are measured on a GPU, and the
    budget contains the measured time of a token.
    """
    encoder = planner.encoder
    forecast = StepForecast(
        settings, encoder, encoder.model.backbone, planner.losses[0], sample, sharding, kind, measure=measure
    )
    choice = best_budget(settings, forecast, memory)
    token_cost = forecast.token_cost() if measure else None
    return replace(choice, budget=replace(choice.budget, token_cost=token_cost)), forecast


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


def time_per_token(budget: TokenBudget, forecast: StepForecast) -> float:
    """Return the time per token of a batch with this budget, in forward passes of a token.

    A backward pass takes as long as two forward passes. Activation checkpointing and gradient caching need one more forward
    pass each.
    """
    batch = forecast.sample.batch_tokens
    passes = 3 + budget.activation_checkpointing + (batch > budget.graph_tokens)
    overhead = forecast.costs(checkpointing=budget.activation_checkpointing).overhead_tokens
    return passes * (1 + overhead / min(budget.micro_batch_tokens, batch))


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield token budgets to try, the largest first; values in the settings are kept."""
    micro, graph = settings.micro_batch_tokens, settings.graph_tokens
    if micro is not None and graph is not None:
        yield TokenBudget(micro, graph)
        return
    most = CPU_BUDGET.micro_batch_tokens if forecast.device.kind == "cpu" else MICRO_TOKENS
    useful = LEAST_GRAPH_TOKENS
    if forecast.device.kind != "cpu":
        useful = max(useful, round(MARGIN * forecast.sample.step_tokens))
    sizes = range(-(-useful // ROUND_TOKENS) * ROUND_TOKENS, 0, -ROUND_TOKENS)
    if graph is None:
        for tokens in sizes:
            yield TokenBudget(min(most, tokens) if micro is None else micro, tokens)
        graph = 0
    for tokens in (size for size in sizes if size <= most):
        yield TokenBudget(tokens if micro is None else micro, graph)


def describe_choice(
    choice: BudgetChoice, free: int, settings: TrainSettings, forecast: StepForecast, *, measured: bool
) -> str:
    """Return the log line of a chosen budget; if it does not fit, a warning with advice."""
    sample = forecast.sample
    needed = f"{'measured' if measured else 'forecast'} {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    text = (
        f"token budget: {choice.budget} ({needed}; sampled steps have up to {sample.step_tokens:,} tokens per process)"
    )
    if choice.fits:
        return text
    zero_3 = forecast.device.sharding.zero == 3
    advice = ["lower --model.max-length or --lora.rank"]
    if forecast.bits != 4 and settings.lora.rank > 0 and not zero_3:
        advice.append("set --model.bits 4")
    if forecast.device.kind == "cuda" and forecast.bits is None and not zero_3:
        advice.append("use ZeRO-3 on several devices")
    return f"warning: {text}. The run may not fit: {', or '.join(advice)}."
