"""Choose the token budgets of a run so that its largest training step fits the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.memory.token_budget import TokenBudget
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.distributed import Processes
from angle_llm.train.forecast import CONTEXT, GIB, MICRO_TOKENS, Sharding, StepForecast, StepSample, free_memory

CPU_BUDGET = TokenBudget(2048, 16_384)
"""Token budget on a CPU if it fits. It is constant, so that results do not depend on the memory of the machine."""
OTHER_BUDGET = TokenBudget(8192, 16_384)
"""Token budget on other devices without a forecast."""
ROUND_TOKENS = 256
"""Chosen budgets are multiples of this number of tokens."""
LEAST_GRAPH_TOKENS = 16_384
"""`graph_tokens` chosen if it fits, even if the sampled steps are smaller."""
MARGIN = 1.25
"""Largest step that a chosen budget allows, relative to the largest sampled step."""
SMALL_TOKENS = 1024
"""Micro-batches with fewer tokens use a GPU poorly. Below about 300 tokens, reading the weights takes longer than the
product (H100: 989 TFLOP/s, 3.35 TB/s). Each micro-batch also launches every kernel and dequantises 4-bit weights."""
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
                    settings, encoder, encoder.model.backbone, objectives[0], sample, sharding, kind
                )
                choice = best_budget(settings, forecast, free)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the model needs values of tensors
                log(f"warning: no forecast of memory ({type(error).__name__}: {error}); {budget}")
                return budget
        log(describe_choice(choice, free, settings, forecast))
        return choice.budget

    return processes.from_main(choose)


def upper_bound(settings: TrainSettings, encoder: SentenceEncoder, budget: TokenBudget) -> float:
    """Return an upper bound in bytes of the memory of a step, so that small models need no forecast.

    The bound counts float32 values: 5 per weight (weight, gradient, AdamW state), 80 hidden states per token and layer,
    4 attention weights per token, layer, head and key, and 8 embeddings per text of a step. Llama needs 14 hidden states
    and no attention weights. Training of all weights adds a bfloat16 copy of the weights per micro-batch. The bound is
    infinite if the configuration of the model does not contain the sizes.
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
    """Return the token budget for a device type (`cpu`, `cuda`, …) without a forecast."""
    return CPU_BUDGET if kind == "cpu" else OTHER_BUDGET


def default_budget(settings: TrainSettings, others: TokenBudget = CPU_BUDGET) -> TokenBudget:
    """Return the token budget of the settings, with values of `others` where the settings have none."""
    micro, graph, layers = settings.micro_batch_tokens, settings.graph_tokens, settings.activation_checkpointing
    return TokenBudget(
        others.micro_batch_tokens if micro is None else micro,
        others.graph_tokens if graph is None else graph,
        others.activation_checkpointing if layers == "auto" else layers == "always",
    )


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the largest useful token budget for a device with `memory` bytes; values in the settings are kept.

    Activation checkpointing costs one more forward pass, like gradient caching, and a batch may need both. So `auto`
    uses activation checkpointing in two cases only. First, the longest text does not fit without it. Second, on a GPU,
    a batch that exceeds `graph_tokens` would have micro-batches of fewer than `SMALL_TOKENS` tokens, or of fewer than
    half as many if the batch would need gradient caching with checkpointing, too. If `micro_batch_tokens` is set, a step
    with gradient caching need not fit. If both budgets are set, `auto` depends on the longest text only.
    """
    usable = round(memory * (USABLE_WITH_ZERO if forecast.device.sharding.zero else USABLE))
    wanted, batch = settings.activation_checkpointing, forecast.sample.batch_tokens

    def largest(checkpointing: bool) -> tuple[BudgetChoice, bool]:
        """Return the largest budget, and whether it fits as far as the settings leave it open."""
        trial = _first_fitting(settings, forecast, usable, checkpointing)
        total = trial.whole_step(settings, batch)
        enough = (total if settings.micro_batch_tokens is None else trial.open_parts(settings)) <= usable
        return BudgetChoice(trial.budget, total, total <= usable), enough

    if wanted == "always":
        return largest(True)[0]
    plain, enough = largest(False)
    if wanted == "never" or not forecast.supports_checkpointing():
        return plain
    tokens = plain.budget.micro_batch_tokens
    large = tokens >= SMALL_TOKENS or forecast.device.kind == "cpu"
    if enough and (large or plain.budget.graph_tokens >= batch):
        return plain
    checkpointed, _ = largest(True)
    small = SMALL_TOKENS if checkpointed.budget.graph_tokens >= batch else SMALL_TOKENS // 2
    gains = checkpointed.fits and tokens < small and checkpointed.budget.micro_batch_tokens >= 2 * tokens
    return checkpointed if gains or not enough else plain


class _Trial(NamedTuple):
    """A token budget, and the forecast bytes of three kinds of steps within it."""

    budget: TokenBudget
    kept: int
    """A step that keeps its activations, with as many tokens as the budget allows or the data need."""
    cached: int
    """A step with gradient caching."""
    text: int
    """A step with gradient caching whose micro-batches are single texts."""

    def open_parts(self, settings: TrainSettings) -> int:
        """Return the bytes of the steps whose token budget the settings leave open."""
        kept = self.kept if settings.graph_tokens is None else 0
        return max(kept, self.cached if settings.micro_batch_tokens is None else self.text)

    def whole_step(self, settings: TrainSettings, batch_tokens: int) -> int:
        """Return the bytes of the largest step. A set `micro_batch_tokens` counts if a batch needs gradient caching."""
        caches = settings.micro_batch_tokens is None or batch_tokens > self.budget.graph_tokens
        return max(self.kept, self.cached if caches else self.text)


def _first_fitting(settings: TrainSettings, forecast: StepForecast, usable: int, checkpointing: bool) -> _Trial:
    """Return the first candidate whose open parts need at most `usable` bytes, else the last candidate."""
    most_tokens = round(MARGIN * forecast.sample.step_tokens)
    for candidate in candidates(settings, forecast):
        budget = replace(candidate, activation_checkpointing=checkpointing)
        graphs = budget.graph_tokens if settings.graph_tokens is None else min(settings.graph_tokens, most_tokens)
        trial = _Trial(
            budget,
            forecast.kept(replace(budget, graph_tokens=graphs)).total,
            forecast.cached(budget).total,
            forecast.cached(replace(budget, micro_batch_tokens=1)).total,
        )
        if trial.open_parts(settings) <= usable:
            break
    return trial


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


def check_checkpointing(encoder: SentenceEncoder) -> None:
    """Check that activation checkpointing is possible for the layers of the encoder.

    Raises:
        SettingsError: with the reason.
    """
    if problem := checkpointing_problem(encoder.model.backbone):
        raise SettingsError(f"--activation-checkpointing always: {problem} Set it to auto or never.")


def describe_choice(choice: BudgetChoice, free: int, settings: TrainSettings, forecast: StepForecast) -> str:
    """Return the log line of a chosen budget; if it does not fit, a warning with advice."""
    sample = forecast.sample
    needed = f"forecast {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
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
