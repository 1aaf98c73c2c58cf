"""Forecast of a training run: the plans of its first batches, the memory of its largest step, and budgets that fit a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example
from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.losses import NestedObjective, Objective, Relation
from angle_llm.model import outline
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import count_parameters
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.model.step_memory import MemoryLedger, StepMemory, model_step
from angle_llm.model.weights import FlopsPerToken
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.device_memory import GIB, Device, Memory, Sharding
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import BatchPlan

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
    examples = load_mixture(settings.data, cache_folder())
    encoder, config = outline.encoder_twin(settings.model)
    backbone = outline.backbone_outline(
        config,
        outline.stored_dtype(config, settings.model.dtype),
        settings.lora if settings.lora.rank else None,
        bits=settings.model.bits,
        divided=settings.zero == 3,
    )
    sample = _Sample.of(settings, encoder, examples, losses)
    device = _device(settings, config, backbone, losses[0], sample)
    model = outline.put_in(encoder.model, backbone)
    model.read_layers(settings.nested.layers)
    outlined = _Outlined(model, on_gpu=settings.device_kind == "cuda")

    step, cached = sample.most_demanding(outlined, device)
    expected = device.memory(step, cached=cached)
    sizes = _Sizes.of(outlined, encoder, sample)
    budget = settings.micro_batch_tokens if cached else settings.graph_tokens
    at_budget = device.memory(sizes.at(budget), cached=cached)
    tokens = (
        None if settings.memory is None else _fitting(round(settings.memory * GIB), device, sizes, sample, settings)
    )
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=_work(settings, examples, sample, FlopsPerToken.of(backbone)),
        step=step,
        expected=expected,
        at_budget=max(at_budget, expected, key=lambda memory: memory.total),
        host_bytes=device.host_bytes,
        proposed_tokens=tokens,
        proposed=device.memory(sizes.at(tokens), cached=True) if tokens else None,
    )


@dataclass(frozen=True)
class _Outlined:
    """A model on the meta device."""

    model: EmbeddingModel
    on_gpu: bool

    def step(self, micro_batches: Sequence[MicroBatch], *, gradients_before: bool) -> StepMemory:
        return model_step(self.model, micro_batches, on_gpu=self.on_gpu, gradients_before=gradients_before)


@dataclass(frozen=True)
class _Sample:
    """The first batches of a run with their plans."""

    batches: list[list[Example]]
    texts: list[TextBatch]
    plans: list[Plan]
    planner: BatchPlanner
    graph_tokens: int
    accumulates: bool

    @classmethod
    def of(
        cls, settings: PlanSettings, encoder: SentenceEncoder, examples: Mixture, losses: list[Objective]
    ) -> _Sample:
        budget = TokenBudget(settings.micro_batch_tokens, settings.graph_tokens)
        planner = BatchPlanner(encoder, examples, losses, settings.processes, budget)
        found = cls([], [], [], planner, settings.graph_tokens, settings.accumulation > 1)
        for _, batches in BatchPlan(examples.draws, settings).after(0):
            for indices in batches:
                batch = planner.batch(indices)
                found.batches.append([examples[index] for index in indices])
                found.texts.append(batch)
                found.plans.append(planner.plan(batch))
                if len(found.plans) == MAX_BATCHES or found.examples >= settings.sample:
                    return found
        return found

    @property
    def examples(self) -> int:
        return sum(map(len, self.batches))

    @property
    def largest(self) -> int:
        """Maximum computed tokens of one process in a batch."""
        return max(plan.largest_share for plan in self.plans)

    @property
    def most_texts(self) -> list[Example]:
        """The batch with the most texts."""
        return max(self.batches, key=lambda batch: len(TextBatch.from_examples(batch)))

    def is_cached(self, plan: Plan) -> bool:
        """Whether the batch is encoded twice; the rule of `train.step`."""
        return plan.largest_share > self.graph_tokens

    def most_demanding(self, outlined: _Outlined, device: Device) -> tuple[StepMemory, bool]:
        """The step with the largest memory, and whether it is cached."""
        steps = []
        if kept := [plan for plan in self.plans if not self.is_cached(plan)]:
            plan = max(kept, key=lambda plan: plan.largest_share)
            shares = [list(plan.share(process)) for process in range(len(plan.shares))]
            share = max(shares, key=lambda share: sum(micro.computed_tokens for micro in share))
            steps.append((outlined.step(share, gradients_before=self.accumulates), False))
        if groups := [group for plan in self.plans if self.is_cached(plan) for group in plan.groups]:
            group = max(groups, key=lambda group: group.computed_tokens)
            steps.append((outlined.step([group.make()], gradients_before=True), True))
        return max(steps, key=lambda step: device.memory(step[0], cached=step[1]).total)


@dataclass(frozen=True)
class _Sizes:
    """Memory of a step of one micro-batch by size, interpolated linearly between measured steps."""

    steps: list[StepMemory]

    @classmethod
    def of(cls, outlined: _Outlined, encoder: SentenceEncoder, sample: _Sample) -> _Sizes:
        formatted: dict[tuple[int, str], None] = {}
        ids: list[list[int]] = []
        # Only as many as fill the largest step: texts of many batches share more prefixes than those of one.
        for batch in sample.texts:
            formatted.update(dict.fromkeys(zip(batch.prompts, batch.texts, strict=True)))
            ids = sample.planner.tokenize([text for _, text in formatted], [prompt for prompt, _ in formatted])
            if sum(map(len, ids)) > 2 * LARGEST_STEP:
                break
        most = min(LARGEST_STEP, encoder.plan_ids(ids, sum(map(len, ids))).computed_tokens)
        steps = {}
        for budget in (most // 16, most // 4, most):
            groups = encoder.plan_ids(ids, max(budget, 1)).groups
            largest = max(groups, key=lambda group: group.computed_tokens)
            steps[largest.computed_tokens] = outlined.step([largest.make()], gradients_before=True)
        return cls([steps[tokens] for tokens in sorted(steps)])

    def at(self, tokens: int) -> StepMemory:
        """Memory at a number of tokens."""
        above = next((place for place, step in enumerate(self.steps) if step.tokens >= tokens), len(self.steps) - 1)
        after = self.steps[above]
        before = self.steps[above - 1] if above else StepMemory(0, 0, after.gradients, after.gradients)
        share = (tokens - before.tokens) / (after.tokens - before.tokens)
        kept = before.kept + share * (after.kept - before.kept)
        peak = before.peak + share * (after.peak - before.peak)
        return StepMemory(tokens, round(kept), round(peak), after.gradients)


def _device(settings: PlanSettings, config: Any, backbone: Any, objective: Objective, sample: _Sample) -> Device:
    text_config = config.get_text_config()
    width: int = text_config.hidden_size
    dimensions: int = getattr(text_config, "word_embed_proj_dim", None) or width
    if isinstance(objective, NestedObjective):
        objective.check_width(dimensions)
    columns = dimensions * (1 + len(settings.nested.layers))
    batch = sample.most_texts
    return Device.of(
        backbone,
        width,
        Sharding(settings.processes, settings.zero, settings.offload),
        settings.device_kind,
        embeddings=4 * columns * len(TextBatch.from_examples(batch)),
        loss=loss_memory(objective, batch, columns),
        accumulates=sample.accumulates,
    )


def _fitting(there: int, device: Device, sizes: _Sizes, sample: _Sample, settings: PlanSettings) -> int:
    """The largest token budget that fits, up to the largest batch; 0 if the longest text does not fit."""
    useful = max(sample.largest, settings.micro_batch_tokens, settings.graph_tokens)
    longest = max(group.computed_tokens // len(group.rows) for plan in sample.plans for group in plan.groups)
    for tokens in range(min(MAX_TOKENS, -(-useful // ROUND_TOKENS) * ROUND_TOKENS), 0, -ROUND_TOKENS):
        if device.memory(sizes.at(tokens), cached=True).total <= there:
            return tokens if tokens >= longest else 0
    return 0


def _work(settings: PlanSettings, examples: Mixture, sample: _Sample, flops: FlopsPerToken) -> Work:
    steps = BatchPlan(examples.draws, settings).steps
    seen = min(steps * settings.accumulation * settings.batch_size, sum(examples.draws.counts) * settings.epochs)
    logical, computed, twice = (
        count * seen / sample.examples
        for count in (
            sum(plan.logical_tokens for plan in sample.plans),
            sum(plan.computed_tokens for plan in sample.plans),
            sum(plan.computed_tokens for plan in sample.plans if sample.is_cached(plan)),
        )
    )
    return Work(
        examples=len(examples),
        steps=steps,
        logical_tokens=round(logical),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + twice * flops.forward,
        sampled_batches=len(sample.plans),
        cached_batches=sum(map(sample.is_cached, sample.plans)),
        largest_batch=sample.largest,
        layout=sample.plans[0].layout,
        reason=sample.plans[0].reason,
    )


def loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    """Peak bytes of the loss of a batch and its gradient, embeddings (N, `dimensions`) included; random embeddings are used."""
    whole, part = len(examples), min(len(examples), MAX_EXAMPLES)
    if part == whole:
        return _loss_memory(objective, examples, dimensions)
    least, most = (_loss_memory(objective, examples[:count], dimensions) for count in (part // 2, part))
    return most + (most - least) * (whole - part) // (part - part // 2)


def _loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    batch = TextBatch.from_examples(examples)
    with MemoryLedger() as ledger:
        rows_UD = torch.randn(len(batch), dimensions)
        leaf_UD = rows_UD.detach().requires_grad_()
        loss = objective(leaf_UD, Relation(batch.left, batch.right, batch.score)).loss
        torch.autograd.grad(loss, leaf_UD)
    peak: int = ledger.peak
    return peak
