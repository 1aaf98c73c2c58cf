"""Forecast of a training run: plans of its first batches, memory of its largest step, budgets that fit a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example
from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.losses import NestedObjective, Objective, Relation
from angle_llm.model import outline
from angle_llm.model.backbone import state_sizes
from angle_llm.model.lora import count_parameters, without_adapter
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.model.step_memory import MemoryLedger, StepMemory, model_step
from angle_llm.model.weights import FlopsPerToken
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.device_memory import GIB, Device, Memory, Sharding
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import StepSchedule

if TYPE_CHECKING:
    from angle_llm.plan import PlanSettings

ROUND_TOKENS = 256
MAX_TOKENS = 65_536
"""Proposed budgets are multiples of ROUND_TOKENS up to MAX_TOKENS; larger budgets gain nothing."""
LARGEST_STEP = 8192
"""Tokens of the largest measured step; other sizes are interpolated linearly."""
MAX_BATCHES = 64
"""Maximum batches of the sample."""
MAX_EXAMPLES = 1024
"""The loss of a larger batch is extrapolated linearly from batches up to this size."""


@dataclass(frozen=True)
class Work:
    """Work of a run. Tokens and operations are extrapolated from the sample."""

    examples: int
    steps: int
    logical_tokens: int
    """Tokens of all texts, repeats included."""
    computed_tokens: int
    """Tokens of forward passes, padding included; the second pass of a cached step is not counted."""
    operations: float
    """Floating-point operations of the linear layers."""
    sampled_batches: int
    cached_batches: int
    """Sampled batches that are encoded twice."""
    largest_batch: int
    """Maximum computed tokens of one process in a batch."""
    layout: str
    """trie or padded, for the first batch."""
    reason: str
    """Reason for the layout."""


@dataclass(frozen=True)
class Forecast:
    """Memory and work of a run."""

    architecture: str
    parameters: int
    trainable: int
    work: Work
    step: StepMemory
    """The encoder in the largest step of the sample."""
    expected: Memory
    """Memory in that step."""
    at_budget: Memory
    """Memory of batches that fill `graph_tokens`, or of cached micro-batches that fill `micro_batch_tokens`."""
    host_bytes: int
    """Host memory of one process with offloading."""
    proposed_tokens: int | None
    """Largest token budgets that fit `memory`; 0: none fits; None: `memory` is not set."""
    proposed: Memory | None
    """Memory of batches that fill those budgets."""


def forecast(settings: PlanSettings) -> Forecast:
    """Forecast memory and work of a run; reads configuration, tokenizer and data, but no weights.

    Raises:
        SettingsError, DataError, ArtifactError, PromptError, ValueError, FileNotFoundError: as the run itself would.
    """
    losses = make_losses(settings)
    data = load_mixture(settings.data, cache_folder())
    encoder, config = outline.encoder_twin(settings.model)
    backbone = outline.backbone_outline(
        config,
        outline.stored_dtype(config, settings.model.dtype),
        settings.lora if settings.lora.rank else None,
        bits=settings.model.bits,
        divided=settings.zero == 3,
    )
    budget = TokenBudget(settings.micro_batch_tokens, settings.graph_tokens)
    planner = BatchPlanner(encoder, data, losses, settings.processes, budget)
    sample = _sample(settings, data, planner)
    model = outline.put_in(encoder.model, backbone)
    model.read_layers(settings.nested.layers)

    def measure(micro_batches: Sequence[MicroBatch], *, gradients_before: bool) -> StepMemory:
        on_gpu = settings.device_kind == "cuda"
        return model_step(model, micro_batches, on_gpu=on_gpu, gradients_before=gradients_before)

    dimensions, width = state_sizes(without_adapter(backbone))
    if isinstance(losses[0], NestedObjective):
        losses[0].check_width(dimensions)
    columns = dimensions * (1 + len(settings.nested.layers))
    most_texts = max(sample, key=lambda one: len(one.texts))
    device = Device.of(
        backbone,
        width,
        Sharding(settings.processes, settings.zero, settings.offload),
        settings.device_kind,
        embeddings=4 * columns * len(most_texts.texts),
        loss=loss_memory(losses[0], most_texts.examples, columns),
        accumulates=settings.accumulation > 1,
    )

    step, cached = _largest_step(sample, device, measure)
    expected = device.memory(step, cached=cached)
    ids = _token_ids(sample, planner)
    most = min(LARGEST_STEP, encoder.plan_ids(ids, sum(map(len, ids))).computed_tokens)
    sizes = {}
    for tokens in (most // 16, most // 4, most):
        group = max(encoder.plan_ids(ids, max(tokens, 1)).groups, key=lambda group: group.computed_tokens)
        sizes[group.computed_tokens] = measure([group.make()], gradients_before=True)
    line = [sizes[tokens] for tokens in sorted(sizes)]
    line.insert(0, StepMemory(0, 0, line[0].gradients, line[0].gradients))
    full = budget.micro_batch_tokens if cached else budget.graph_tokens
    at_budget = device.memory(_at(line, full), cached=cached)
    proposed = None
    if settings.memory is not None:
        proposed = _fitting(round(settings.memory * GIB), device, line, sample, budget)
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=_work(settings, data, sample, FlopsPerToken.of(backbone)),
        step=step,
        expected=expected,
        at_budget=max(at_budget, expected, key=lambda memory: memory.total),
        host_bytes=device.host_bytes,
        proposed_tokens=proposed,
        proposed=device.memory(_at(line, proposed), cached=True) if proposed else None,
    )


class _Planned(NamedTuple):
    """A batch of the sample."""

    examples: list[Example]
    texts: TextBatch
    plan: Plan
    cached: bool
    """Whether it is encoded twice; the rule of `train.step`."""


def _sample(settings: PlanSettings, data: Mixture, planner: BatchPlanner) -> list[_Planned]:
    """Return the first batches of the run."""
    found: list[_Planned] = []
    for _, batches in StepSchedule(data.draws, settings).after(0):
        for indices in batches:
            batch = planner.batch(indices)
            plan = planner.plan(batch)
            cached = plan.largest_share > settings.graph_tokens
            found.append(_Planned([data[index] for index in indices], batch, plan, cached))
            if len(found) == MAX_BATCHES or sum(len(one.examples) for one in found) >= settings.sample:
                return found
    return found


def _largest_step(
    sample: list[_Planned], device: Device, measure: Callable[..., StepMemory]
) -> tuple[StepMemory, bool]:
    """Return the step with the largest memory, and whether it is cached."""
    steps = []
    if kept := [one.plan for one in sample if not one.cached]:
        plan = max(kept, key=lambda plan: plan.largest_share)
        shares = [list(plan.share(process)) for process in range(len(plan.shares))]
        share = max(shares, key=lambda share: sum(micro.computed_tokens for micro in share))
        steps.append((measure(share, gradients_before=device.accumulates), False))
    if groups := [group for one in sample if one.cached for group in one.plan.groups]:
        group = max(groups, key=lambda group: group.computed_tokens)
        steps.append((measure([group.make()], gradients_before=True), True))
    return max(steps, key=lambda step: device.memory(step[0], cached=step[1]).total)


def _token_ids(sample: list[_Planned], planner: BatchPlanner) -> list[list[int]]:
    """Return the token ids of distinct texts, only as many as fill the largest step:
    texts of many batches share more prefixes."""
    texts: dict[tuple[int, str], None] = {}
    ids: list[list[int]] = []
    for one in sample:
        texts.update(dict.fromkeys(zip(one.texts.prompts, one.texts.texts, strict=True)))
        ids = planner.tokenize([text for _, text in texts], [prompt for prompt, _ in texts])
        if sum(map(len, ids)) > 2 * LARGEST_STEP:
            break
    return ids


def _at(line: list[StepMemory], tokens: int) -> StepMemory:
    """Return the memory of a step of one micro-batch of `tokens` tokens,
    interpolated between the nearest measured ones."""
    above = next((place for place, step in enumerate(line) if place and step.tokens >= tokens), len(line) - 1)
    before, after = line[above - 1], line[above]
    share = (tokens - before.tokens) / (after.tokens - before.tokens)
    kept = before.kept + share * (after.kept - before.kept)
    peak = before.peak + share * (after.peak - before.peak)
    return StepMemory(tokens, round(kept), round(peak), after.gradients)


def _fitting(memory: int, device: Device, line: list[StepMemory], sample: list[_Planned], budget: TokenBudget) -> int:
    """Return the largest token budget that fits, up to the largest batch; 0 if the longest text does not fit."""
    plans = [one.plan for one in sample]
    useful = max(budget.micro_batch_tokens, budget.graph_tokens, *(plan.largest_share for plan in plans))
    longest = max(group.computed_tokens // len(group.rows) for plan in plans for group in plan.groups)
    for tokens in range(min(MAX_TOKENS, -(-useful // ROUND_TOKENS) * ROUND_TOKENS), 0, -ROUND_TOKENS):
        if device.memory(_at(line, tokens), cached=True).total <= memory:
            return tokens if tokens >= longest else 0
    return 0


def _work(settings: PlanSettings, data: Mixture, sample: list[_Planned], flops: FlopsPerToken) -> Work:
    steps = StepSchedule(data.draws, settings).steps
    drawn = min(steps * settings.accumulation * settings.batch_size, sum(data.draws.counts) * settings.epochs)
    scale = drawn / sum(len(one.examples) for one in sample)
    computed = scale * sum(one.plan.computed_tokens for one in sample)
    twice = scale * sum(one.plan.computed_tokens for one in sample if one.cached)
    return Work(
        examples=len(data),
        steps=steps,
        logical_tokens=round(scale * sum(one.plan.logical_tokens for one in sample)),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + twice * flops.forward,
        sampled_batches=len(sample),
        cached_batches=sum(one.cached for one in sample),
        largest_batch=max(one.plan.largest_share for one in sample),
        layout=sample[0].plan.layout,
        reason=sample[0].plan.reason,
    )


def loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    """Return the peak bytes of loss and gradient of a batch, including its (random) embeddings (N, `dimensions`)."""
    whole, part = len(examples), min(len(examples), MAX_EXAMPLES)

    def peak(count: int) -> int:
        batch = TextBatch.from_examples(examples[:count])
        with MemoryLedger() as ledger:
            rows_UD = torch.randn(len(batch), dimensions)
            leaf_UD = rows_UD.detach().requires_grad_()
            loss = objective(leaf_UD, Relation(batch.left, batch.right, batch.score)).loss
            torch.autograd.grad(loss, leaf_UD)
        return int(ledger.peak)

    if part == whole:
        return peak(whole)
    least, most = peak(part // 2), peak(part)
    return most + (most - least) * (whole - part) // (part - part // 2)
