"""Forecast the work and the memory of a training run for `angle-llm plan`, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.memory.budget import SAMPLED_EXAMPLES, BudgetChoice, best_budget
from angle_llm.memory.step_forecast import GIB, Memory, Sharding, StepForecast, StepSample, first_steps
from angle_llm.memory.step_memory import StepMemory
from angle_llm.model.layers.lora import count_parameters, without_adapter
from angle_llm.model.layout.micro_batches import LayoutSupport, Plan
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.meta_model import meta_backbone, stored_dtype, tiny_encoder_copy
from angle_llm.model.source.backbone import state_sizes
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.saved_lora import lora_of_run
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.plan import PlanSettings
from angle_llm.train.batches import BatchPlanner, StepSchedule
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
    losses = make_losses(settings)
    source = resolve_model(settings.model.path, attention=settings.model.attention)
    check_zero_3(source, settings, settings.zero)
    settings = replace(settings, lora=lora_of_run(source, settings.model, settings.lora))
    data = load_mixture(settings.data, cache_folder())
    encoder, config = tiny_encoder_copy(source, settings.loaded_model)
    layouts = LayoutSupport("padded", "as requested")
    if settings.layout == "auto":
        causal, device = encoder.model.options.causal, torch.device(settings.device_kind)
        layouts = probe_layouts(encoder.model.backbone, encoder.pooling, causal=causal, device=device)
    dtype, lora = stored_dtype(config, settings.loaded_model.dtype), settings.lora if settings.lora.rank else None
    backbone = meta_backbone(config, dtype, lora, bits=settings.model.bits, divided=settings.zero == 3)
    head = task_of(settings).planned_head(encoder, backbone)
    encoder = encoder.changed(layouts=layouts, model=encoder.model.changed(head))
    if not source.dense:
        losses[0].check_width(state_sizes(without_adapter(backbone))[0])
    if settings.activation_checkpointing == "always":
        check_checkpointing(encoder)
    plain = default_budget(settings, budget_of(settings.device_kind))
    planner = BatchPlanner(encoder, data, losses, settings.processes)
    sharding = Sharding(settings.processes, settings.zero, settings.offload)
    step_sample = StepSample.of(planner, settings, SAMPLED_EXAMPLES)
    steps = StepForecast(settings, encoder, backbone, losses[0], step_sample, sharding, settings.device_kind)
    choice = None if settings.memory is None else best_budget(settings, steps, round(settings.memory * GIB))
    budget = plain if choice is None else choice.budget
    sample = _sample(settings, planner, budget)
    step, cached = _largest_step(sample, steps, budget)
    expected = steps.device.memory(step, cached=cached)
    at_budget = (steps.cached if cached else steps.kept)(budget)
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=_work(settings, data, sample, FlopsPerToken.of(backbone, head.passes), budget),
        budget=budget,
        choice=choice,
        step=step,
        expected=expected,
        at_budget=max(at_budget, expected, key=lambda memory: memory.total),
        host_bytes=steps.device.host_bytes,
    )


class _Group(NamedTuple):
    """Batches of a step that are encoded together, and their plan."""

    examples: int
    plan: Plan
    cached: bool
    """Whether the group uses gradient caching, by the rule of `train/step`."""


def _sample(settings: PlanSettings, planner: BatchPlanner, budget: TokenBudget) -> list[_Group]:
    """Plan the groups of the first steps, until they contain at least `PLANNED_EXAMPLES` examples."""
    sample: list[_Group] = []
    for indices_of_step, groups in first_steps(planner, settings, budget, PLANNED_EXAMPLES):
        sizes = iter(map(len, indices_of_step))
        for group in groups:
            cached = group.plan.largest_share > budget.graph_tokens
            sample.append(_Group(sum(next(sizes) for _ in group.batches), group.plan, cached))
    return sample


def _largest_step(sample: list[_Group], steps: StepForecast, budget: TokenBudget) -> tuple[StepMemory, bool]:
    """Return the memory of the sampled step that needs the most, and whether the step uses gradient caching."""
    found = []
    checkpointing = budget.activation_checkpointing
    if kept := [group.plan for group in sample if not group.cached]:
        plan = max(kept, key=lambda plan: plan.largest_share)
        shares = [list(plan.share(process)) for process in range(len(plan.shares))]
        share = max(shares, key=lambda share: sum(micro.computed_tokens for micro in share))
        before = steps.device.accumulates
        found.append((steps.count(share, checkpointing=checkpointing, gradients_before=before), False))
    if texts := [texts for group in sample if group.cached for texts in group.plan.groups]:
        largest = max(texts, key=lambda texts: texts.computed_tokens)
        found.append((steps.count([largest.make()], checkpointing=checkpointing), True))
    return max(found, key=lambda step: steps.device.memory(step[0], cached=step[1]).total)


def _work(
    settings: PlanSettings, data: Mixture, sample: list[_Group], flops: FlopsPerToken, budget: TokenBudget
) -> Work:
    """Extrapolate the work of a run from sampled groups, in proportion to examples."""
    steps = StepSchedule(data.draws, settings).steps
    drawn = min(steps * settings.accumulation * settings.batch_size, sum(data.draws.counts) * settings.epochs)
    scale = drawn / sum(group.examples for group in sample)
    computed = scale * sum(group.plan.computed_tokens for group in sample)
    twice = scale * sum(group.plan.computed_tokens for group in sample if group.cached)
    again = computed if budget.activation_checkpointing else 0
    return Work(
        examples=len(data),
        steps=steps,
        logical_tokens=round(scale * sum(group.plan.logical_tokens for group in sample)),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + (twice + again) * flops.forward,
        sampled_groups=len(sample),
        cached_groups=sum(group.cached for group in sample),
        largest_group=max(group.plan.largest_share for group in sample),
        layout=sample[0].plan.layout,
        reason=sample[0].plan.reason,
    )
