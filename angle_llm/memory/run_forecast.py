"""Forecast the work and the memory of a training run for `angle-llm plan`, without loading weights.

The model is built without weights (`model/meta_model`), and the batches of the first steps are planned as in training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.memory.budget import BudgetChoice, best_budget
from angle_llm.memory.device_memory import GIB, Memory, Sharding
from angle_llm.memory.step_forecast import StepForecast, first_steps
from angle_llm.memory.step_memory import StepMemory
from angle_llm.model.layers.lora import count_parameters, without_adapter
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.meta_model import meta_backbone, stored_dtype, tiny_encoder_copy
from angle_llm.model.source.backbone import state_sizes
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.saved_lora import lora_of_run
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.plan import PlanSettings
from angle_llm.train.batches import BatchPlanner, PlannedGroup, StepSchedule
from angle_llm.train.loading import check_zero_3
from angle_llm.train.objectives import make_losses, task_of
from angle_llm.train.token_budget import TokenBudget, budget_of, check_checkpointing, default_budget

PLANNED_EXAMPLES = 2048
"""Number of examples that are tokenised and planned; the work of the run is extrapolated from them."""


@dataclass(frozen=True)
class Work:
    """Number of steps, tokens and operations of a run; tokens and operations are extrapolated from its first steps."""

    examples: int
    """Number of examples in the dataset."""
    steps: int
    """Number of optimizer steps."""
    logical_tokens: int
    """Tokens of all texts, repeated texts included."""
    computed_tokens: int
    """Tokens of the first forward passes, padding included. Repeated forward passes are not counted."""
    operations: float
    """Floating-point operations of the linear layers."""
    sampled_groups: int
    """Number of sampled groups. A group is the batches of a step that `graph_tokens` allows to encode together."""
    cached_groups: int
    """Number of sampled groups that use gradient caching, which encodes them twice."""
    largest_group: int
    """Maximum number of tokens that one process computes in a group."""
    layout: str
    """Layout of the first group: `trie`, `packed` or `padded`."""
    reason: str
    """Reason for the layout of the first group."""


@dataclass(frozen=True)
class Forecast:
    """Memory and work of a training run."""

    architecture: str
    """Model type in the configuration, such as `llama`."""
    parameters: int
    """Number of all parameters."""
    trainable: int
    """Number of trained parameters."""
    work: Work
    budget: TokenBudget
    """Token budget from the settings; missing values are chosen for `memory`, or the defaults without `memory`."""
    choice: BudgetChoice | None
    """Token budget chosen for `memory` and whether it fits; None without `memory`."""
    step: StepMemory
    """Memory of the encoder in the largest sampled step."""
    expected: Memory
    """Memory of the device in the largest sampled step."""
    at_budget: Memory
    """Memory of the device in the largest step that the budget allows."""
    host_bytes: int
    """Host memory of one process, if the run offloads to it; else 0."""


def forecast(settings: PlanSettings) -> Forecast:
    """Forecast the memory and the work of a run from its configuration, tokenizer and data.

    Raises:
        SettingsError, DataError, ArtifactError, PromptError, ValueError, FileNotFoundError: as the training run.
    """
    # 1. Settings and data, as in `fine_tune`.
    losses = make_losses(settings)
    source = resolve_model(settings.model.path, attention=settings.model.attention)
    check_zero_3(source, settings, settings.zero)
    settings = replace(settings, lora=lora_of_run(source, settings.model, settings.lora))
    data = load_mixture(settings.data, cache_folder())

    # 2. The encoder: a tiny copy that plans micro-batches, and the backbone without weights.
    encoder, config = tiny_encoder_copy(source, settings.loaded_model)
    layouts = LayoutSupport("padded", "as requested")
    if settings.layout == "auto":
        causal, device = encoder.model.options.causal, torch.device(settings.device_kind)
        layouts = probe_layouts(encoder.model.backbone, encoder.pooling, causal=causal, device=device)
    if settings.activation_checkpointing == "always":
        check_checkpointing(encoder)
    dtype = stored_dtype(config, settings.loaded_model.dtype)
    lora = settings.lora if settings.lora.rank else None
    backbone = meta_backbone(config, dtype, lora, bits=settings.model.bits, divided=settings.zero == 3)
    head = task_of(settings).planned_head(encoder, backbone)
    encoder = encoder.changed(layouts=layouts, model=encoder.model.changed(head))
    if not source.dense:
        losses[0].check_width(state_sizes(without_adapter(backbone))[0])

    # 3. The token budget.
    sharding = Sharding(settings.processes, settings.zero, settings.offload)
    steps = StepForecast.of(settings, encoder, backbone, data, losses, sharding, settings.device_kind)
    choice = None if settings.memory is None else best_budget(settings, steps, round(settings.memory * GIB))
    budget = default_budget(settings, budget_of(settings.device_kind)) if choice is None else choice.budget

    # 4. The first steps with this budget.
    planner = BatchPlanner(encoder, data, losses, settings.processes)
    sampled = list(first_steps(planner, settings, budget, PLANNED_EXAMPLES))
    groups = [group for _, groups in sampled for group in groups]
    share = sum(len(indices) for batches, _ in sampled for indices in batches) / _drawn(settings, data)
    step, expected, at_budget = _largest_step(groups, steps, budget)
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=_work(settings, data, groups, share, budget, FlopsPerToken.of(backbone, head.passes)),
        budget=budget,
        choice=choice,
        step=step,
        expected=expected,
        at_budget=at_budget,
        host_bytes=steps.device.host_bytes,
    )


def _is_cached(group: PlannedGroup, budget: TokenBudget) -> bool:
    """Return whether a group uses gradient caching, by the rule of `train/step`."""
    return group.plan.largest_share > budget.graph_tokens


def _largest_step(
    groups: list[PlannedGroup], steps: StepForecast, budget: TokenBudget
) -> tuple[StepMemory, Memory, Memory]:
    """Return memory in the sampled step that needs the most: of the encoder, of the device, and with a full budget.

    The micro-batches of this step are counted, because its texts may need more memory per token than the sampled texts.
    """
    sizes: list[tuple[StepMemory, Memory, Memory]] = []
    checkpointing = budget.activation_checkpointing
    if kept := [group.plan for group in groups if not _is_cached(group, budget)]:
        largest_plan = max(kept, key=lambda plan: plan.largest_share)
        shares = [list(largest_plan.share(process)) for process in range(len(largest_plan.shares))]
        share = max(shares, key=lambda share: sum(micro.computed_tokens for micro in share))
        step = steps.count(share, checkpointing=checkpointing, gradients_before=steps.device.accumulates)
        sizes.append((step, steps.device.memory(step, cached=False), steps.kept(budget)))
    if cached := [texts for group in groups if _is_cached(group, budget) for texts in group.plan.groups]:
        largest_texts = max(cached, key=lambda texts: texts.computed_tokens)
        step = steps.count([largest_texts.make()], checkpointing=checkpointing)
        sizes.append((step, steps.device.memory(step, cached=True), steps.cached(budget)))
    step, expected, at_budget = max(sizes, key=lambda size: size[1].total)
    return step, expected, max(at_budget, expected, key=lambda memory: memory.total)


def _drawn(settings: PlanSettings, data: Mixture) -> int:
    """Return the number of examples that a run draws."""
    in_steps = StepSchedule(data.draws, settings).steps * settings.accumulation * settings.batch_size
    return min(in_steps, sum(data.draws.counts) * settings.epochs)


def _work(
    settings: PlanSettings,
    data: Mixture,
    groups: list[PlannedGroup],
    share: float,
    budget: TokenBudget,
    flops: FlopsPerToken,
) -> Work:
    """Extrapolate the work of a run from sampled groups, which have the given share of its examples."""
    computed = sum(group.plan.computed_tokens for group in groups) / share
    twice = sum(group.plan.computed_tokens for group in groups if _is_cached(group, budget)) / share
    again = computed if budget.activation_checkpointing else 0
    return Work(
        examples=len(data),
        steps=StepSchedule(data.draws, settings).steps,
        logical_tokens=round(sum(group.plan.logical_tokens for group in groups) / share),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + (twice + again) * flops.forward,
        sampled_groups=len(groups),
        cached_groups=sum(_is_cached(group, budget) for group in groups),
        largest_group=max(group.plan.largest_share for group in groups),
        layout=groups[0].plan.layout,
        reason=groups[0].plan.reason,
    )
