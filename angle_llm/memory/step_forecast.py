"""Memory of the training steps of a run, by token budget.

`StepSample` has sizes and texts of the first steps. `StepForecast` adds the activations of these texts to the other
memory of the device: it measures two micro-batches on a GPU, or runs one on a model without weights and counts tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example, pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.device import is_out_of_memory
from angle_llm.losses import Objective, Relation
from angle_llm.memory.device_memory import Device, Memory, Sharding
from angle_llm.memory.step_memory import MemoryLedger, PassCosts, StepMemory, measured_step, model_step
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.layout.micro_batches import LayoutSupport, MicroBatch, TextGroup, plan_micro_batches
from angle_llm.model.meta_model import held_bytes, meta_backbone, put_in
from angle_llm.model.pooling import embedding_size
from angle_llm.model.source.backbone import state_sizes
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner, PlannedGroup, StepSchedule
from angle_llm.train.token_budget import TokenBudget

MICRO_TOKENS = 16_384
"""Largest useful micro-batch in tokens: a larger forward pass is not faster."""
MEASURED_TOKENS = (512, 2048)
"""Sizes of the two micro-batches that are measured on a GPU, in tokens."""
GPU_OVERHEAD_TOKENS = 300.0
"""Overhead of a micro-batch on a GPU that was not measured, in tokens. Below 300 tokens, reading the weights takes longer
than the products (H100: 989 TFLOP/s, 3.35 TB/s)."""
COUNTED_TOKENS = 8192
"""Size of the micro-batch that is counted. Memory is proportional to tokens: 0.1 % error from 512 to 8,192 at 7B."""
SAMPLED_EXAMPLES = 512
"""Number of examples whose first steps are sampled."""
SAMPLED_TEXTS = 512
"""Number of distinct texts for the micro-batches that are counted or measured."""
MAX_BATCHES = 64
"""Maximum number of batches in a sample."""
MAX_EXAMPLES = 1024
"""Largest batch whose loss is computed to count its memory; the memory of a larger batch is extrapolated linearly."""
SEARCHED_EXAMPLES = 100_000
"""Number of examples searched for the longest text; a larger dataset is searched at regular intervals."""
LONGEST_TEXTS = 16
"""Number of examples, longest in characters, that are tokenized to find the longest text in tokens."""


def first_steps(
    planner: BatchPlanner, settings: TrainSettings, budget: TokenBudget, examples: int
) -> Iterator[tuple[list[list[int]], list[PlannedGroup]]]:
    """Yield the first optimizer steps of a run, until they contain `examples` examples or `MAX_BATCHES` batches.

    A step is given by the example indices of its batches, and by its groups of batches that are encoded together.
    """
    batches = drawn = 0
    for step in StepSchedule(planner.data.draws, settings).after(0):
        for _, groups in planner.steps(iter([step]), budget):
            yield step[1], groups
        batches += len(step[1])
        drawn += sum(map(len, step[1]))
        if batches >= MAX_BATCHES or drawn >= examples:
            break


@dataclass(frozen=True)
class StepSample:
    """Sizes and texts from the first steps of a run, on which the forecast is based."""

    examples: list[Example]
    """Examples of the batch with the most texts."""
    batch_texts: int
    """Maximum number of texts in a batch."""
    batch_tokens: int
    """Computed tokens of one process in the batch with the most texts."""
    step_texts: int
    """Maximum number of texts in an optimizer step."""
    step_tokens: int
    """Maximum number of tokens that one process computes in an optimizer step."""
    longest_text: int
    """Tokens of the longest text in the dataset, not only in the first steps."""
    ids: list[list[int]]
    """Token ids of distinct texts. Texts of several batches share more prefixes."""

    @classmethod
    def of(
        cls,
        settings: TrainSettings,
        encoder: SentenceEncoder,
        data: Mixture,
        losses: Sequence[Objective],
        processes: int,
    ) -> StepSample:
        """Return the sizes and texts of the first optimizer steps with together at least `SAMPLED_EXAMPLES` examples.

        `losses` and `processes` are as in `BatchPlanner`.
        """
        # With unlimited graph tokens, all batches of a step are encoded together.
        planner = BatchPlanner(encoder, data, losses, processes)
        unlimited = TokenBudget(MICRO_TOKENS, 10**12)
        batches: list[tuple[list[int], TextBatch]] = []
        step_texts = 0
        step_tokens = 0
        for indices_of_step, (group,) in first_steps(planner, settings, unlimited, SAMPLED_EXAMPLES):
            made = [planned.batch for planned in group.batches]
            batches += zip(indices_of_step, made, strict=True)
            step_texts = max(step_texts, sum(map(len, made)))
            step_tokens = max(step_tokens, group.plan.largest_share)

        # Token ids of distinct texts, and of the largest batch.
        pairs = (pair for _, batch in batches for pair in zip(batch.texts, batch.prompts, strict=True))
        texts, prompts = zip(*list(dict.fromkeys(pairs))[:SAMPLED_TEXTS], strict=True)
        ids = encoder.model.head.input_ids(planner.tokenize(texts, prompts), 0)
        indices, largest = max(batches, key=lambda pair: len(pair[1]))
        plan = encoder.plan_ids(planner.tokenize(largest.texts, largest.prompts), MICRO_TOKENS, processes)
        return cls(
            examples=[data[index] for index in indices],
            batch_texts=len(largest),
            batch_tokens=plan.largest_share,
            step_texts=step_texts,
            step_tokens=step_tokens,
            longest_text=max([*map(len, ids), _longest_text(planner)]),
            ids=ids,
        )


def _longest_text(planner: BatchPlanner) -> int:
    """Return the number of tokens of the longest text in the dataset; candidates are chosen by characters."""
    data = planner.data
    searched = range(0, len(data), max(1, len(data) // SEARCHED_EXAMPLES))

    def characters(index: int) -> int:
        return max(max(len(left), len(right)) for left, right, _ in pairs_of(data[index]))

    batch = planner.batch(heapq.nlargest(LONGEST_TEXTS, searched, key=characters))
    return max(map(len, planner.tokenize(batch.texts, batch.prompts)))


@dataclass(frozen=True)
class StepForecast:
    """Memory of one device in the training steps of a run, by token budget."""

    device: Device
    sample: StepSample
    encoder: SentenceEncoder
    """Encoder of the run, or its tiny copy; it plans the micro-batches."""
    model: EmbeddingModel
    """Model whose passes are measured or counted: with weights on a GPU, else on the meta device."""
    copies: int
    """Bytes of the bfloat16 copies of weights that the graph of a micro-batch keeps under autocast."""
    _costs: dict[bool, PassCosts] = field(default_factory=dict, init=False)
    """Costs of the passes, without and with activation checkpointing."""

    @classmethod
    def of(
        cls,
        settings: TrainSettings,
        encoder: SentenceEncoder,
        backbone: Any,
        data: Mixture,
        losses: Sequence[Objective],
        sharding: Sharding,
        kind: str,
        *,
        measure: bool = False,
    ) -> StepForecast:
        """Return the forecast of a run.

        Args:
            encoder: the encoder of the run, or its tiny copy.
            backbone: the backbone with its adapter, with weights or on the meta device.
            kind: device type, `cuda` or `cpu`.
            measure: measure the passes of `encoder`, whose weights are on a GPU.
        """
        sample = StepSample.of(settings, encoder, data, losses, sharding.processes)
        model = encoder.model
        if not measure:
            meta = _without_weights(settings, encoder, backbone, sharding)
            model = put_in(encoder.model, meta, "flex" if kind == "cuda" else None)
        return cls(
            _device(settings, encoder, backbone, losses[0], sample, sharding, kind),
            sample,
            encoder,
            model,
            copies=2 * product_weights(backbone) if settings.autocasts else 0,
        )

    def supports_checkpointing(self) -> bool:
        """Return whether activation checkpointing is possible for the layers of the model."""
        return checkpointing_problem(self.model.backbone) is None

    def costs(self, *, checkpointing: bool) -> PassCosts:
        """Return the memory and time of the forward and backward passes per token and per micro-batch."""
        if checkpointing not in self._costs:
            if next(self.model.parameters()).is_meta:
                step = self.count([self.sampled(COUNTED_TOKENS).make()], checkpointing=checkpointing)
                overhead = GPU_OVERHEAD_TOKENS if self.device.kind == "cuda" else 0.0
                self._costs[checkpointing] = PassCosts.proportional(step, self.copies, overhead)
            else:
                with checkpointed(self.model, checkpointing):
                    self._costs[checkpointing] = self._measured(*MEASURED_TOKENS)
        return self._costs[checkpointing]

    def count(
        self, micro_batches: Sequence[MicroBatch], *, checkpointing: bool, gradients_before: bool = True
    ) -> StepMemory:
        """Return the memory of a step that keeps the activations of all given micro-batches, counted without weights."""
        with checkpointed(self.model, checkpointing):
            on_gpu = self.device.kind == "cuda"
            step = model_step(self.model, micro_batches, on_gpu=on_gpu, gradients_before=gradients_before)
        # The meta model predicts no tokens. Cross-entropy keeps a logarithm per logit, and its backward pass two gradients.
        logits = self.encoder.model.head.logits_per_token
        kept = round(4 * logits * step.tokens) + self.copies * len(micro_batches)
        temporary = round(8 * logits * max(micro.computed_tokens for micro in micro_batches))
        return replace(step, kept=step.kept + kept, peak=step.peak + kept + temporary)

    def kept(self, budget: TokenBudget) -> Memory:
        """Return the memory of a step that keeps the activations of `graph_tokens` tokens."""
        costs = self.costs(checkpointing=budget.activation_checkpointing)
        return self.device.memory(costs.step(budget.graph_tokens, budget.micro_batch_tokens), cached=False)

    def cached(self, budget: TokenBudget) -> Memory:
        """Return the memory of a step with gradient caching, in a micro-batch of `micro_batch_tokens` tokens or more.

        A micro-batch exceeds the budget if the longest text does.
        """
        largest_step = max(self.sample.step_tokens, budget.graph_tokens)
        tokens = max(min(budget.micro_batch_tokens, largest_step), self.sample.longest_text)
        costs = self.costs(checkpointing=budget.activation_checkpointing)
        return self.device.memory(costs.step(tokens, tokens), cached=True)

    def token_cost(self) -> float | None:
        """Measure the time of a token in a sequence of texts, relative to a padded token, rounded to tenths.

        Rounding makes runs choose equal layouts. None if all texts are padded, are too long for a sequence, or do not fit
        the memory.
        """
        layouts = self.encoder.layouts
        ids = [text for text in self.sample.ids if len(text) <= (layouts.max_tokens or len(text))]
        if layouts.layout == "padded" or not ids:
            return None
        seconds = []
        for tried in (replace(layouts, token_cost=1e-9), LayoutSupport("padded")):
            plan = plan_micro_batches(ids, MEASURED_TOKENS[1], self.encoder.pad_id, tried)
            texts = max(plan.groups, key=lambda group: group.computed_tokens)
            try:
                best = min(measured_step(self.model, texts)[1] for _ in range(3))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None
            seconds.append(best / texts.computed_tokens)
        return max(round(seconds[0] / seconds[1], 1), 0.1)

    def sampled(self, tokens: int) -> TextGroup:
        """Plan micro-batches of at most `tokens` tokens for the sampled texts; return the one with the most tokens."""
        plan = self.encoder.plan_ids(self.sample.ids, tokens)
        return max(plan.groups, key=lambda group: group.computed_tokens)

    def _measured(self, small: int, large: int) -> PassCosts:
        """Measure two micro-batches of at most `small` and `large` tokens; fewer if the memory does not suffice."""
        try:
            less, more = (measured_step(self.model, self.sampled(size)) for size in (small, large))
            if more[0].tokens < 1.5 * less[0].tokens:  # long texts, or few texts: differences would be noise
                return PassCosts.proportional(more[0], 0, GPU_OVERHEAD_TOKENS)
            return PassCosts.between(less, more)
        except RuntimeError as error:
            if not is_out_of_memory(error) or small < MEASURED_TOKENS[0] // 8:
                raise
        return self._measured(small // 2, large // 2)


def _without_weights(settings: TrainSettings, encoder: SentenceEncoder, backbone: Any, sharding: Sharding) -> Any:
    """Return a backbone with its adapter on the meta device, or the argument if it is there already."""
    bare: Any = without_adapter(backbone)
    if next(bare.parameters()).is_meta:
        return backbone
    lora = settings.lora if settings.lora.rank else None
    return meta_backbone(bare.config, encoder.dtype, lora, bits=encoder.bits, divided=sharding.zero == 3)


def _device(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    backbone: Any,
    objective: Objective,
    sample: StepSample,
    sharding: Sharding,
    kind: str,
) -> Device:
    """Return the sizes of weights, gradients, embeddings and loss; arguments as in `StepForecast.of`."""
    bare: Any = without_adapter(backbone)
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    trained_bytes = sum(weight.nbytes for weight in trained)
    columns = embedding_size(bare, encoder.model.dense) * max(1, objective.embeddings_per_text)
    return Device(
        kind,
        sharding,
        base_bytes=held_bytes(nn.ModuleList([backbone, encoder.model.head])) - trained_bytes,
        trained_bytes=trained_bytes,
        trained_numbers=sum(weight.numel() for weight in trained),
        bucket_numbers=state_sizes(bare)[1] ** 2,
        embedding_bytes=4 * columns * sample.batch_texts,
        loss_bytes=loss_memory(objective, sample.examples, columns)
        + 8 * columns * (sample.step_texts - sample.batch_texts),
        accumulates=settings.accumulation > 1,
    )


@contextmanager
def checkpointed(model: EmbeddingModel, enabled: bool) -> Iterator[None]:
    """Enable activation checkpointing inside this context, if `enabled`."""
    if enabled:
        model.checkpoint_activations(True)
    try:
        yield
    finally:
        if enabled:
            model.checkpoint_activations(False)


def product_weights(backbone: nn.Module) -> int:
    """Return the number of weights in matrix products: all weight matrices except embeddings."""
    layers = [layer for layer in backbone.modules() if not isinstance(layer, nn.Embedding)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim == 2)


def loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    """Return the peak bytes of the loss of a batch and its gradient, for random embeddings (N, `dimensions`)."""

    def peak(count: int) -> int:
        batch = TextBatch.from_examples(examples[:count])
        with MemoryLedger() as ledger:
            rows_UD = torch.randn(len(batch), dimensions, generator=torch.Generator())
            leaf_UD = rows_UD.detach().requires_grad_()
            relation = Relation(
                batch.left, batch.right, batch.score, group=batch.group, teacher=batch.teacher, guide=rows_UD,
                teacher_vectors=rows_UD,
            )  # fmt: skip
            loss = objective(leaf_UD, relation).loss
            torch.autograd.grad(loss, leaf_UD)
        bytes_at_peak: int = ledger.peak
        return bytes_at_peak

    if len(examples) <= MAX_EXAMPLES:
        return peak(len(examples))
    half = MAX_EXAMPLES // 2
    return peak(MAX_EXAMPLES) + (peak(MAX_EXAMPLES) - peak(half)) * (len(examples) - MAX_EXAMPLES) // half
