"""Memory of the steps of a run by token budget: micro-batches of its data are run without weights.

Memory is linear in tokens and in layers, so a few sizes are counted, on the first layers of a deep model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from angle_llm.config import TrainSettings
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example, pairs_of
from angle_llm.losses import Objective, Relation
from angle_llm.model import outline
from angle_llm.model.backbone import state_sizes
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import without_adapter
from angle_llm.model.micro_batches import MicroBatch
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.model.step_memory import MemoryLedger, StepMemory, model_step
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.device_memory import Device, Memory, Sharding
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import StepSchedule

MICRO_TOKENS = 16_384
"""More tokens in one forward pass gain nothing."""
COUNTED_TOKENS = 8192
"""Tokens of the counted micro-batch; memory is proportional to tokens (0.1 % between 512 and 8,192 at 7B)."""
FEW_LAYERS = (2, 4)
"""Layers of the counted models; the memory of deeper ones is extrapolated linearly."""
MAX_BATCHES = 64
"""Maximum batches of a sample."""
MAX_EXAMPLES = 1024
"""The loss of a larger batch is extrapolated linearly from batches up to this size."""
SEARCHED_EXAMPLES = 100_000
"""Examples among which the longest texts are searched; of more, evenly many are skipped."""
LONGEST_TEXTS = 16


@dataclass(frozen=True)
class StepSample:
    """The first steps of a run: the batches and texts that its memory depends on."""

    examples: list[Example]
    """Those of the batch with the most texts."""
    batch_texts: int
    """Most texts of a batch."""
    batch_tokens: int
    """Computed tokens of one process in that batch."""
    step_texts: int
    """Most texts of an optimizer step."""
    step_tokens: int
    """Most computed tokens of one process in an optimizer step."""
    longest_text: int
    """Tokens of the longest text, also of texts after the first steps."""
    ids: list[list[int]]
    """Token ids of distinct texts, as many as fill the largest counted micro-batch: texts of many batches share more
    prefixes."""

    @classmethod
    def of(cls, planner: BatchPlanner, settings: TrainSettings, examples: int) -> StepSample:
        """Return a sample of at least one step, and of about so many examples."""
        data, before = planner.data, planner.budget
        planner.budget = TokenBudget(MICRO_TOKENS, 10**12)  # so that all batches of a step are encoded together
        texts: dict[tuple[int, str], None] = {}
        batches: list[tuple[list[int], TextBatch]] = []
        step_texts, step_tokens = 0, 0
        for step in StepSchedule(data.draws, settings).after(0):
            for _, groups in planner.steps(iter([step])):
                made = [planned.batch for group in groups for planned in group.batches]
                step_tokens = max(step_tokens, *(group.plan.largest_share for group in groups))
            batches += zip(step[1], made, strict=True)
            step_texts = max(step_texts, sum(map(len, made)))
            for batch in made:
                texts.update(dict.fromkeys(zip(batch.prompts, batch.texts, strict=True)))
            if len(batches) >= MAX_BATCHES or sum(len(indices) for indices, _ in batches) >= examples:
                break
        planner.budget = before
        ids: list[list[int]] = []
        for start in range(0, len(texts), 256):
            some = list(texts)[start : start + 256]
            ids += planner.tokenize([text for _, text in some], [prompt for prompt, _ in some])
            if sum(map(len, ids)) > 2 * COUNTED_TOKENS:
                break
        indices, largest = max(batches, key=lambda each: len(each[1]))
        longest = max([*map(len, ids), _longest_text(planner)])
        plan = planner.encoder.plan_ids(
            planner.tokenize(largest.texts, largest.prompts), MICRO_TOKENS, planner.world_size
        )
        return cls(
            [data[index] for index in indices], len(largest), plan.largest_share, step_texts, step_tokens, longest, ids
        )


def _longest_text(planner: BatchPlanner) -> int:
    """Return the tokens of the longest text of the data, by characters."""
    data = planner.data
    places = range(0, len(data), max(1, len(data) // SEARCHED_EXAMPLES))

    def characters(index: int) -> int:
        return max(max(len(left), len(right)) for left, right, _ in pairs_of(data[index]))

    batch = planner.batch(heapq.nlargest(LONGEST_TEXTS, places, key=characters))
    return max(map(len, planner.tokenize(batch.texts, batch.prompts)))


class StepForecast:
    """The memory of one device in the steps of a run."""

    def __init__(
        self,
        settings: TrainSettings,
        encoder: SentenceEncoder,
        backbone: Any,
        dtype: torch.dtype,
        objective: Objective,
        sample: StepSample,
        sharding: Sharding,
        kind: str,
    ) -> None:
        """`encoder` has the model, or its twin; `backbone` the real shapes, with or without weights, and the adapter.
        `dtype` is that of the base, `kind` cuda or cpu."""
        self._on_gpu, self._counted = kind == "cuda", dict[bool, StepMemory]()
        self.sample, self._encoder = sample, encoder
        config = without_adapter(backbone).config
        layers: int = config.get_text_config().num_hidden_layers  # type: ignore[operator,union-attr]
        shallow = layers > FEW_LAYERS[-1] and not settings.nested.layers
        self._layers = layers
        self.bits = encoder.bits or settings.model.bits  # a base may be stored in bits; a plan has no weights
        self._models: list[EmbeddingModel] = [
            outline.put_in(
                encoder.model,
                outline.backbone_outline(
                    config,
                    dtype,
                    settings.lora if settings.lora.rank else None,
                    bits=self.bits,
                    divided=sharding.zero == 3,
                    layers=count,
                ),
            )
            for count in (FEW_LAYERS if shallow else (layers,))
        ]
        dimensions, width = state_sizes(without_adapter(backbone))
        projection = encoder.model.projection  # None in a plan, which does not know the width of the teacher
        projected = projection.out_features if projection else dimensions * settings.objective.teacher_projection
        row = 4 * (dimensions * (1 + len(settings.nested.layers)) + projected)
        loss = loss_memory(objective, sample.examples, row // 4, projected)
        self.device = Device.of(
            backbone,
            width,
            sharding,
            kind,
            embeddings=row * sample.batch_texts,
            loss=loss + 2 * row * (sample.step_texts - sample.batch_texts),
            accumulates=settings.accumulation > 1,
        )
        more, device = (dimensions + 1) * projected, self.device
        numbers = device.trained_numbers + more
        self.device = replace(device, trained_bytes=device.trained_bytes + 4 * more, trained_numbers=numbers)
        self._copies = 2 * product_weights(backbone) if settings.autocasts else 0
        """Bytes of the bfloat16 weights of a micro-batch, which its graph keeps."""

    def supports_checkpointing(self) -> bool:
        """Return whether the layers can be computed again in the backward pass."""
        try:
            for enabled in (True, False):
                self._models[0].checkpoint_activations(enabled)
        except ValueError:
            return False
        return True

    def count(
        self, micro_batches: Sequence[MicroBatch], *, checkpointing: bool, gradients_before: bool = True
    ) -> StepMemory:
        """Return the memory of a step that keeps the graphs of these micro-batches."""
        found = self._count(micro_batches, checkpointing=checkpointing, gradients_before=gradients_before)
        return _larger(found, self._copies * len(micro_batches))

    def _count(
        self, micro_batches: Sequence[MicroBatch], *, checkpointing: bool, gradients_before: bool = True
    ) -> StepMemory:
        found = []
        for model in self._models:
            if checkpointing:
                model.checkpoint_activations(True)
            found.append(model_step(model, micro_batches, on_gpu=self._on_gpu, gradients_before=gradients_before))
            if checkpointing:
                model.checkpoint_activations(False)
        if len(found) == 1:
            return found[0]
        few, more = FEW_LAYERS
        return _between(found[0], found[1], (self._layers - few) / (more - few))

    def kept(self, budget: TokenBudget) -> Memory:
        """Return the memory of a step whose graphs fill `graph_tokens`."""
        micro = min(budget.micro_batch_tokens, budget.graph_tokens)
        whole, part = self._at(budget.graph_tokens, budget), self._at(micro, budget)
        step = replace(whole, peak=whole.kept + max(part.peak - part.kept, 0))
        return self.device.memory(_larger(step, self._copies * -(-step.tokens // max(micro, 1))), cached=False)

    def cached(self, budget: TokenBudget) -> Memory:
        """Return the memory of a step that is encoded twice, with a micro-batch that fills `micro_batch_tokens`, or of
        the longest text."""
        tokens = max(self._micro_tokens(budget), self.sample.longest_text)
        return self.device.memory(_larger(self._at(tokens, budget), self._copies), cached=True)

    def _micro_tokens(self, budget: TokenBudget) -> int:
        # No micro-batch is larger than a step.
        return min(budget.micro_batch_tokens, max(self.sample.step_tokens, budget.graph_tokens))

    def _at(self, tokens: int, budget: TokenBudget) -> StepMemory:
        """Return the memory of a micro-batch of so many tokens."""
        checkpointing = budget.activation_checkpointing
        if checkpointing not in self._counted:
            ids, encoder = self.sample.ids, self._encoder
            plan = encoder.plan_ids(ids, min(COUNTED_TOKENS, sum(map(len, ids))))
            group = max(plan.groups, key=lambda group: group.computed_tokens)
            self._counted[checkpointing] = self._count([group.make()], checkpointing=checkpointing)
        counted = self._counted[checkpointing]
        nothing = StepMemory(0, 0, counted.gradients, counted.gradients)
        return replace(_between(nothing, counted, tokens / counted.tokens), tokens=tokens)


def _larger(step: StepMemory, size: int) -> StepMemory:
    return replace(step, kept=step.kept + size, peak=step.peak + size)


def product_weights(backbone: nn.Module) -> int:
    """Return the number of weights in matrix products: all matrices but embeddings."""
    layers = [layer for layer in backbone.modules() if not isinstance(layer, nn.Embedding)]
    return sum(one.numel() for layer in layers for one in layer.parameters(recurse=False) if one.ndim == 2)


def _between(one: StepMemory, other: StepMemory, share: float) -> StepMemory:
    """Return one + share · (other - one) for each size; a `share` above 1 extrapolates."""

    def at(before: int, after: int) -> int:
        return round(before + share * (after - before))

    kept, peak = at(one.kept, other.kept), at(one.peak, other.peak)
    return StepMemory(other.tokens, kept, peak, at(one.gradients, other.gradients))


def loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int, projected: int = 0) -> int:
    """Return the peak bytes of loss and gradient of a batch, including its (random) embeddings (N, `dimensions`), the
    last `projected` of which are projections to the width of a teacher."""
    whole, part = len(examples), min(len(examples), MAX_EXAMPLES)

    def peak(count: int) -> int:
        batch = TextBatch.from_examples(examples[:count])
        with MemoryLedger() as ledger:
            rows_UD = torch.randn(len(batch), dimensions, generator=torch.Generator())
            leaf_UD = rows_UD.detach().requires_grad_()
            known = Relation(
                batch.left, batch.right, batch.score, group=batch.group, teacher=batch.teacher, guide=rows_UD,
                teacher_vectors=rows_UD[:, -projected:],
            )  # fmt: skip
            loss = objective(leaf_UD, known).loss
            torch.autograd.grad(loss, leaf_UD)
        found: int = ledger.peak
        return found

    if part == whole:
        return peak(whole)
    least, most = peak(part // 2), peak(part)
    return most + (most - least) * (whole - part) // (part - part // 2)
