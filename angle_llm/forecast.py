"""Forecast of a training run for `angle-llm plan`: its first batches, its memory, and budgets that fit a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.losses import NestedObjective
from angle_llm.model import outline
from angle_llm.model.backbone import state_sizes
from angle_llm.model.lora import count_parameters, without_adapter
from angle_llm.model.micro_batches import Plan
from angle_llm.model.saved_lora import lora_of_run
from angle_llm.model.sharing import sharing_on
from angle_llm.model.step_memory import StepMemory
from angle_llm.model.weights import FlopsPerToken
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.budget import (
    SAMPLED_EXAMPLES,
    BudgetChoice,
    best_budget,
    budget_of,
    check_checkpointing,
    default_budget,
)
from angle_llm.train.device_memory import GIB, Memory, Sharding
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import StepSchedule
from angle_llm.train.step_forecast import MAX_BATCHES, StepForecast, StepSample

if TYPE_CHECKING:
    from angle_llm.plan import PlanSettings


@dataclass(frozen=True)
class Work:
    """Work of a run. Tokens and operations are extrapolated from the sample."""

    examples: int
    steps: int
    logical_tokens: int
    """Tokens of all texts, repeats included."""
    computed_tokens: int
    """Tokens of forward passes, padding included; passes for the backward pass are not counted."""
    operations: float
    """Floating-point operations of the linear layers."""
    sampled_groups: int
    """Groups of batches that are encoded together: those of a step, as far as `graph_tokens` allows."""
    cached_groups: int
    """Sampled groups that are encoded twice."""
    largest_group: int
    """Maximum computed tokens of one process in a group."""
    layout: str
    """trie, packed or padded, for the first group."""
    reason: str
    """Reason for the layout."""


@dataclass(frozen=True)
class Forecast:
    """Memory and work of a run."""

    architecture: str
    parameters: int
    trainable: int
    work: Work
    budget: TokenBudget
    """The budgets that are set; the others are chosen for `memory`, or those of a CPU without it."""
    choice: BudgetChoice | None
    """The budget and whether it fits; None: `memory` is not set."""
    step: StepMemory
    """The encoder in the largest step of the sample."""
    expected: Memory
    """Memory in that step."""
    at_budget: Memory
    """Memory of a step that fills the budget."""
    host_bytes: int
    """Host memory of one process with offloading."""


def forecast(settings: PlanSettings) -> Forecast:
    """Forecast memory and work of a run; reads configuration, tokenizer and data, but no weights.

    Raises:
        SettingsError, DataError, ArtifactError, PromptError, ValueError, FileNotFoundError: as the run itself would.
    """
    losses = make_losses(settings)
    settings = replace(settings, lora=lora_of_run(settings.model, settings.lora))
    data = load_mixture(settings.data, cache_folder())
    encoder, config = outline.encoder_twin(settings.loaded_model)
    encoder.sharing = sharing_on(encoder, settings.device_kind)
    dtype = outline.stored_dtype(config, settings.loaded_model.dtype)
    lora = settings.lora if settings.lora.rank else None
    backbone = outline.backbone_outline(config, dtype, lora, bits=settings.model.bits, divided=settings.zero == 3)
    if isinstance(losses[0], NestedObjective):
        losses[0].check_width(state_sizes(without_adapter(backbone))[0])
    sharding = Sharding(settings.processes, settings.zero, settings.offload)
    if settings.activation_checkpointing == "always":
        check_checkpointing(encoder)
    plain = default_budget(settings, budget_of(settings.device_kind))
    planner = BatchPlanner(encoder, data, losses, settings.processes, plain)
    steps = StepForecast(
        settings,
        encoder,
        backbone,
        dtype,
        losses[0],
        StepSample.of(planner, settings, SAMPLED_EXAMPLES),
        sharding,
        settings.device_kind,
    )
    choice = None if settings.memory is None else best_budget(settings, steps, round(settings.memory * GIB))
    planner.budget = plain if choice is None else choice.budget
    sample = _sample(settings, planner)
    step, cached = _largest_step(sample, steps, planner.budget)
    expected = steps.device.memory(step, cached=cached)
    at_budget = (steps.cached if cached else steps.kept)(planner.budget)
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=_work(settings, data, sample, FlopsPerToken.of(backbone), planner.budget),
        budget=planner.budget,
        choice=choice,
        step=step,
        expected=expected,
        at_budget=max(at_budget, expected, key=lambda memory: memory.total),
        host_bytes=steps.device.host_bytes,
    )


class _Planned(NamedTuple):
    """Batches of a step that are encoded together."""

    examples: int
    plan: Plan
    cached: bool
    """Whether they are encoded twice; the rule of `train.step`."""


def _sample(settings: PlanSettings, planner: BatchPlanner) -> list[_Planned]:
    """Return the first steps of the run."""
    found: list[_Planned] = []
    batches = examples = 0
    for step in StepSchedule(planner.data.draws, settings).after(0):
        sizes = iter(map(len, step[1]))
        for _, groups in planner.steps(iter([step])):
            for group in groups:
                cached = group.plan.largest_share > planner.budget.graph_tokens
                found.append(_Planned(sum(next(sizes) for _ in group.batches), group.plan, cached))
                examples += found[-1].examples
                batches += len(group.batches)
        if batches >= MAX_BATCHES or examples >= settings.sample:
            break
    return found


def _largest_step(sample: list[_Planned], steps: StepForecast, budget: TokenBudget) -> tuple[StepMemory, bool]:
    """Return the step with the largest memory, and whether it is cached."""
    found = []
    again = budget.activation_checkpointing
    if kept := [one.plan for one in sample if not one.cached]:
        plan = max(kept, key=lambda plan: plan.largest_share)
        shares = [list(plan.share(process)) for process in range(len(plan.shares))]
        share = max(shares, key=lambda share: sum(micro.computed_tokens for micro in share))
        before = steps.device.accumulates
        found.append((steps.count(share, checkpointing=again, gradients_before=before), False))
    if groups := [group for one in sample if one.cached for group in one.plan.groups]:
        group = max(groups, key=lambda group: group.computed_tokens)
        found.append((steps.count([group.make()], checkpointing=again), True))
    return max(found, key=lambda step: steps.device.memory(step[0], cached=step[1]).total)


def _work(
    settings: PlanSettings, data: Mixture, sample: list[_Planned], flops: FlopsPerToken, budget: TokenBudget
) -> Work:
    steps = StepSchedule(data.draws, settings).steps
    drawn = min(steps * settings.accumulation * settings.batch_size, sum(data.draws.counts) * settings.epochs)
    scale = drawn / sum(one.examples for one in sample)
    computed = scale * sum(one.plan.computed_tokens for one in sample)
    twice = scale * sum(one.plan.computed_tokens for one in sample if one.cached)
    again = computed if budget.activation_checkpointing else 0
    return Work(
        examples=len(data),
        steps=steps,
        logical_tokens=round(scale * sum(one.plan.logical_tokens for one in sample)),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + (twice + again) * flops.forward,
        sampled_groups=len(sample),
        cached_groups=sum(one.cached for one in sample),
        largest_group=max(one.plan.largest_share for one in sample),
        layout=sample[0].plan.layout,
        reason=sample[0].plan.reason,
    )
