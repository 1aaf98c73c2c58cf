"""Choice of the token budgets that fit the memory of the device, at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from angle_llm.config import TrainSettings
from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import without_adapter
from angle_llm.settings_io import SettingsError
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.device_memory import CONTEXT, GIB, Sharding, free_memory
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget
from angle_llm.train.step_forecast import MICRO_TOKENS, StepForecast, StepSample

CPU_BUDGET = TokenBudget(2048, 16_384)
"""Budget on a CPU if it fits; constant, so that results do not depend on the memory of the machine."""
OTHER_BUDGET = TokenBudget(8192, 16_384)
"""Budget on another device without a forecast."""
ROUND_TOKENS = 256
"""Chosen budgets are multiples of it."""
LEAST_GRAPH_TOKENS = 16_384
"""Chosen if they fit, even if the sampled steps are smaller."""
MARGIN = 1.25
"""Largest step that a chosen budget allows, relative to the largest sampled one."""
SMALL_TOKENS = 1024
"""Smaller micro-batches use a GPU poorly. Below about 300 rows, reading weights takes longer than the product (H100:
989 TFLOP/s, 3.35 TB/s). Each micro-batch also launches every kernel and dequantises 4-bit weights."""
USABLE, USABLE_WITH_ZERO = 0.92, 0.85
"""Share of free memory that a forecast may fill. ZeRO cannot repeat a step after running out of memory."""
SAMPLED_EXAMPLES = 512
"""Examples on whose first steps the choice depends."""


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
        budget = default_budget(settings, budget_of(processes.device.type))
        if settings.activation_checkpointing == "always":
            check_checkpointing(encoder)
        fixed = None not in (settings.micro_batch_tokens, settings.graph_tokens)
        if free is None or (fixed and settings.activation_checkpointing != "auto"):
            return budget
        if (fixed or kind == "cpu") and upper_bound(settings, encoder, budget) <= free:
            log(f"token budget: {budget}")
            return budget
        with torch.random.fork_rng(devices=[]):
            planner = BatchPlanner(encoder, data, objectives, processes.world_size, budget)
            sample = StepSample.of(planner, settings, SAMPLED_EXAMPLES)
            try:
                forecast = StepForecast(
                    settings, encoder, encoder.model.backbone, encoder.dtype, objectives[0], sample, sharding, kind
                )
                choice = best_budget(settings, forecast, free)
            except (
                RuntimeError,
                ValueError,
                AttributeError,
                TypeError,
            ) as error:  # the model reads values, which a meta device lacks
                log(f"warning: no forecast of memory ({type(error).__name__}: {error}); {budget}")
                return budget
        log(described(choice, free, settings, forecast))
        return choice.budget

    return processes.from_main(choose)


def upper_bound(settings: TrainSettings, encoder: SentenceEncoder, budget: TokenBudget) -> float:
    """Return a simple upper bound in bytes of the memory of a step, so that small models need no forecast.

    It counts five float32 values per weight (weight, gradient, AdamW state; and with `autocasts` a bfloat16 copy per
    micro-batch), 80 hidden states and four attention weights
    per head and key of each token and layer (forecast for Llama: 14 and none), and 8 float32 rows per text of a step.
    Infinite for a model whose configuration does not have the sizes.
    """
    backbone = encoder.model.backbone
    config: Any = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    layers, hidden, heads = (
        getattr(config, name, math.inf) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    width = max(hidden, (getattr(config, "intermediate_size", None) or 4 * hidden) / 4)
    fixed = None not in (settings.micro_batch_tokens, settings.graph_tokens)
    tokens = encoder.max_length if fixed else max(budget.micro_batch_tokens, budget.graph_tokens)
    texts = 3 * settings.batch_size * settings.accumulation * (1 + len(settings.nested.layers))
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    states = tokens * layers * (80 * width + 4 * heads * encoder.max_length)
    copies = settings.autocasts * -(-tokens // budget.micro_batch_tokens) / 2
    return CONTEXT + 4 * ((5 + copies) * weights + states + 8 * texts * width)


def budget_of(kind: str) -> TokenBudget:
    """Return the budget of a kind of device without a forecast."""
    return CPU_BUDGET if kind == "cpu" else OTHER_BUDGET


def default_budget(settings: TrainSettings, others: TokenBudget = CPU_BUDGET) -> TokenBudget:
    """Return the budgets that are set, and `others` for those that are not."""
    micro, graph, layers = settings.micro_batch_tokens, settings.graph_tokens, settings.activation_checkpointing
    return TokenBudget(
        others.micro_batch_tokens if micro is None else micro,
        others.graph_tokens if graph is None else graph,
        others.activation_checkpointing if layers == "auto" else layers == "always",
    )


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the budgets for a device with so many bytes, those of the settings where they are set.

    Activation checkpointing has the cost of gradient caching, one more forward pass, and a batch may need both. So
    `auto` uses it only if the longest text does not fit otherwise, or on a GPU if a batch that is too large for its
    graphs would be computed in micro-batches of less than `SMALL_TOKENS`; half of that if the batch would need both.
    A micro-batch size that is set need not fit with gradient caching; if both budgets are set, `auto` depends on the
    longest text only.
    """
    micro, graph = settings.micro_batch_tokens, settings.graph_tokens
    usable = round(memory * (USABLE_WITH_ZERO if forecast.device.sharding.zero else USABLE))
    wanted = settings.activation_checkpointing
    most_tokens = round(MARGIN * forecast.sample.step_tokens)
    batch = forecast.sample.batch_tokens

    def largest(checkpointing: bool) -> tuple[BudgetChoice, bool]:
        """Return the first candidate that fits, or the last; and whether it fits apart from a set micro-batch size."""
        for budget in candidates(settings, forecast):
            budget = replace(budget, activation_checkpointing=checkpointing)
            graphs = budget.graph_tokens if graph is None else min(graph, most_tokens)
            kept, cached = forecast.kept(replace(budget, graph_tokens=graphs)).total, forecast.cached(budget).total
            text = forecast.cached(replace(budget, micro_batch_tokens=1)).total
            needed = max(kept if graph is None else 0, cached if micro is None else text)
            if needed <= usable:
                break
        total = max(kept, cached if micro is None or batch > budget.graph_tokens else text)
        enough = (total if micro is None else needed) <= usable
        return BudgetChoice(budget, total, total <= usable), enough

    if wanted == "always":
        return largest(True)[0]
    plain, enough = largest(False)
    if wanted == "never" or not forecast.supports_checkpointing():
        return plain
    tokens = plain.budget.micro_batch_tokens
    large = tokens >= SMALL_TOKENS or forecast.device.kind == "cpu"
    if enough and (large or plain.budget.graph_tokens >= batch):
        return plain
    again, _ = largest(True)
    small = SMALL_TOKENS if again.budget.graph_tokens >= batch else SMALL_TOKENS // 2  # with caching too, it costs more
    gains = again.fits and tokens < small and again.budget.micro_batch_tokens >= 2 * tokens
    return again if gains or not enough else plain


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield the budgets to try, the best first: those of the settings where they are set."""
    micro, graph = settings.micro_batch_tokens, settings.graph_tokens
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


def check_checkpointing(encoder: SentenceEncoder) -> None:
    """Refuse activation checkpointing where it is not possible.

    Raises:
        SettingsError: with the reason.
    """
    try:
        for enabled in (True, False):
            encoder.model.checkpoint_activations(enabled)
    except ValueError as error:
        raise SettingsError(f"--activation-checkpointing always: {error} Set it to auto or never.") from error


def described(choice: BudgetChoice, free: int, settings: TrainSettings, forecast: StepForecast) -> str:
    """Return the line of the log."""
    sample = forecast.sample
    needed = f"forecast {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    text = (
        f"token budget: {choice.budget} ({needed}; sampled steps have up to {sample.step_tokens:,} tokens per process)"
    )
    if choice.fits:
        return text
    more = forecast.bits != 4 and settings.lora.rank > 0 and forecast.device.sharding.zero < 3
    advice = ["lower --model.max-length or --lora.rank", *["set --model.bits 4"] * more]
    if forecast.device.kind == "cuda" and forecast.bits is None and forecast.device.sharding.zero < 3:
        advice.append("use ZeRO-3 on several devices")
    return f"warning: {text}. The run may not fit: {', or '.join(advice)}."
