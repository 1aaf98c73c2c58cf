"""`angle-llm plan`: settings in, forecast out.

The model is built without weights (`modeling.outline`), batches are planned as training plans them, and the largest of
them goes through a training step whose tensors are counted (`forecast.step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from angle_llm.config import settings_to_dict
from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.forecast.memory import GIB, Device, Memory, Spread
from angle_llm.forecast.step import StepMemory, loss_memory, model_step
from angle_llm.io import plain, write_json
from angle_llm.losses.nested import NestedObjective, Objective
from angle_llm.model import outline
from angle_llm.model.backbone import FlopsPerToken
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import count_parameters
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.plan import PlanSettings
from angle_llm.train.batches import Wordings, objectives_of
from angle_llm.train.schedule import BatchPlan

ROUND_TOKENS = 256
MOST_TOKENS = 65_536
"""Proposed budgets are multiples of the one and not above the other, where nothing is gained any more."""
LARGEST_STEP = 8192
"""Tokens of the largest of some steps that are counted; what other sizes take lies on the lines through them."""
MOST_BATCHES = 64
"""Of the sample."""


def _spread(settings: PlanSettings) -> Spread:
    return Spread(settings.processes, settings.zero, settings.offload)


@dataclass(frozen=True)
class Work:
    """What a run computes. Tokens and operations are extrapolated from the sample."""

    examples: int
    steps: int
    logical_tokens: int
    """Of the texts, repeats counted."""
    computed_tokens: int
    """That go through the model, padding included; twice in a cached step, and counted once."""
    operations: float
    """Floating-point operations of the linear layers."""
    sampled_batches: int
    cached_batches: int
    """Of the sampled ones, those that are encoded twice."""
    largest_batch: int
    """Computed tokens, of the process that has most."""
    layout: str
    """trie or padded, in the first batch."""
    reason: str
    """Why this way."""


@dataclass(frozen=True)
class Forecast:
    """What a run will need."""

    architecture: str
    parameters: int
    trainable: int
    work: Work
    step: StepMemory
    """The model's part of the most demanding step of the sample."""
    expected: Memory
    """In that step."""
    at_budget: Memory
    """If batches filled `graph_tokens`, or micro-batches of cached steps `micro_batch_tokens`."""
    host_bytes: int
    """What one process offloads to the host."""
    proposed_tokens: int | None
    """The largest token budgets that fit `memory`; 0: none does; None: `memory` was not given."""
    proposed: Memory | None
    """With those budgets filled."""


def forecast(settings: PlanSettings) -> Forecast:
    """Tells what a run with these settings will need; reads configuration, tokenizer and data, but no weights.

    Raises:
        SettingsError, DataError, ArtifactError, PromptError, ValueError, FileNotFoundError: as the run itself would.
    """
    objectives = objectives_of(settings)
    examples = load_mixture(settings.data, cache_folder())
    encoder, config = outline.encoder_twin(settings.model)
    backbone = outline.backbone_outline(
        config,
        outline.stored_dtype(config, settings.model.dtype),
        settings.lora if settings.lora.rank else None,
        bits=settings.model.bits,
        divided=settings.zero == 3,
    )
    sample = _Sample.of(settings, encoder, examples)
    device = _device(settings, config, backbone, objectives[0], sample)
    model = outline.put_in(encoder.model, backbone)
    model.read_layers(settings.nested.layers)
    outlined = _Outlined(model, on_gpu=settings.device == "cuda")

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
    """A model without weights."""

    model: EmbeddingModel
    on_gpu: bool

    def step(self, micro_batches: Sequence[MicroBatch], *, gradients_before: bool) -> StepMemory:
        return model_step(self.model, micro_batches, on_gpu=self.on_gpu, gradients_before=gradients_before)


@dataclass(frozen=True)
class _Sample:
    """The first batches of a run, planned."""

    batches: list[list[Example]]
    texts: list[TextBatch]
    plans: list[Plan]
    wordings: Wordings
    graph_tokens: int
    accumulates: bool

    @classmethod
    def of(cls, settings: PlanSettings, encoder: SentenceEncoder, examples: Mixture) -> _Sample:
        found = cls([], [], [], Wordings(encoder, examples), settings.graph_tokens, settings.accumulation > 1)
        for _, batches in BatchPlan(examples.draws, settings).after(0):
            for indices in batches:
                batch = found.wordings.batch(examples, indices)
                ids = found.wordings.ids(batch.texts, batch.prompts)
                found.batches.append([examples[index] for index in indices])
                found.texts.append(batch)
                found.plans.append(encoder.plan_ids(ids, settings.micro_batch_tokens, settings.processes))
                if len(found.plans) == MOST_BATCHES or found.examples >= settings.sample:
                    return found
        return found

    @property
    def examples(self) -> int:
        return sum(map(len, self.batches))

    @property
    def largest(self) -> int:
        """Tokens of the largest share of a batch."""
        return max(plan.largest_share for plan in self.plans)

    @property
    def most_texts(self) -> list[Example]:
        """The batch that has most rows."""
        return max(self.batches, key=lambda batch: len(TextBatch.from_examples(batch)))

    def is_cached(self, plan: Plan) -> bool:
        """As `training.step` decides it."""
        return plan.largest_share > self.graph_tokens

    def most_demanding(self, outlined: _Outlined, device: Device) -> tuple[StepMemory, bool]:
        """The step that takes most, and whether it is a cached one."""
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
    """What steps of one micro-batch take, by its size: straight lines between some of them, and beyond the last."""

    steps: list[StepMemory]

    @classmethod
    def of(cls, outlined: _Outlined, encoder: SentenceEncoder, sample: _Sample) -> _Sizes:
        worded: dict[tuple[int, str], None] = {}
        ids: list[list[int]] = []
        # As few as fill the largest step: texts of many batches would share more than one's do.
        for batch in sample.texts:
            worded.update(dict.fromkeys(zip(batch.prompts, batch.texts, strict=True)))
            ids = sample.wordings.ids([text for _, text in worded], [prompt for prompt, _ in worded])
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
        """Of so many tokens."""
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
    return Device.holding(
        backbone,
        width,
        _spread(settings),
        settings.device,
        embeddings=4 * columns * len(TextBatch.from_examples(batch)),
        loss=loss_memory(objective, batch, columns),
        accumulates=sample.accumulates,
    )


def _fitting(there: int, device: Device, sizes: _Sizes, sample: _Sample, settings: PlanSettings) -> int:
    """The largest token budget that fits, 0 if even the longest text does not; more than a batch has is of no use."""
    useful = max(sample.largest, settings.micro_batch_tokens, settings.graph_tokens)
    longest = max(group.computed_tokens // len(group.rows) for plan in sample.plans for group in plan.groups)
    for tokens in range(min(MOST_TOKENS, -(-useful // ROUND_TOKENS) * ROUND_TOKENS), 0, -ROUND_TOKENS):
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


_PARTS = {
    "base_weights": "base weights",
    "trained_weights": "trained weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "embeddings": "embeddings and loss",
    "exchange": "exchange and gathering",
    "allowance": "allowance",
}


def shown(settings: PlanSettings, found: Forecast) -> str:
    """The forecast for a reader."""
    work = found.work
    bits = f", linear layers in {settings.model.bits} bits" if settings.model.bits else ""
    cached = (
        f"{work.cached_batches} of {work.sampled_batches} are encoded twice (more than graph_tokens {settings.graph_tokens:,})"
        if work.cached_batches
        else f"all are kept (graph_tokens {settings.graph_tokens:,})"
    )
    lines = [
        f"model       {settings.model.path}: {found.architecture}, {settings.model.dtype}{bits}",
        f"parameters  {found.parameters:,}, of them trained {found.trainable:,} ({found.trainable / found.parameters:.2%})",
        f"run         {work.examples:,} examples, {work.steps:,} steps of {settings.accumulation} × {settings.batch_size}",
        f"tokens      {work.logical_tokens:,} asked for, {work.computed_tokens:,} computed "
        f"({work.computed_tokens / work.logical_tokens:.0%}, {work.layout}), {work.operations:.3g} operations",
        f"batches     at most {work.largest_batch:,} computed tokens a process in {work.sampled_batches} sampled; {cached}",
        f"devices     {settings.device}, {_spread(settings)}",
        "",
        f"{'GiB on one device':26}{'expected':>10}{'budget full':>14}",
    ]
    expected, full = asdict(found.expected), asdict(found.at_budget)
    for part, name in _PARTS.items():
        if expected[part] or full[part]:
            lines.append(f"  {name:24}{_gib(expected[part]):>10}{_gib(full[part]):>14}")
    lines.append(f"  {'together':24}{_gib(found.expected.total):>10}{_gib(found.at_budget.total):>14}")
    if found.host_bytes:
        lines.append(f"  {'on the host, a process':24}{_gib(found.host_bytes):>10}")
    lines.append(
        f"\nActivations are {found.step.kept / found.step.tokens / 2**20:.3g} MiB a computed token. The allowance "
        "(context, libraries, fragments) is no prediction."
    )
    if found.proposed_tokens:
        assert found.proposed is not None
        lines += [
            f"\nThe largest budgets that fit {settings.memory:g} GiB ({_gib(found.proposed.total)} GiB if filled; more than "
            "the largest batch has would be of no use):",
            f"  --micro-batch-tokens {found.proposed_tokens} --graph-tokens {found.proposed_tokens}",
        ]
    elif found.proposed_tokens == 0:
        lines.append(
            f"\nNothing fits {settings.memory:g} GiB: without activations it is "
            f"{_gib(found.expected.total - found.expected.activations)} GiB. Try --model.bits 4, a smaller --lora.rank or "
            "--model.max-length, or --zero with more --processes."
        )
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def write_forecast(settings: PlanSettings, found: Forecast, path: Path) -> None:
    """The forecast for a program: settings, and all sizes in bytes."""
    content = {"settings": settings_to_dict(replace(settings, json=None)), **asdict(found)}
    for name in ("expected", "at_budget"):
        content[name]["total"] = getattr(found, name).total
    write_json(path, plain(content))
