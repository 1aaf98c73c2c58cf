"""Memory of the training steps of a run, by token budget, and the budget that fits the memory of the device.

The first steps of the run give the number of texts and tokens. The passes of one of their micro-batches are counted on a
model without weights (`step_memory`). Memory is proportional to tokens: 0.1 % error from 512 to 8,192 tokens at 7B.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from angle_llm.data.formats import DataError, pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.io import log
from angle_llm.losses import Objective
from angle_llm.memory.device_memory import GIB, Device, Memory, Sharding, free_memory
from angle_llm.memory.step_memory import count_passes
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.layers.low_memory_layers import use_low_memory_layers
from angle_llm.model.layout.flex import padded_length
from angle_llm.model.layout.micro_batches import TextGroup
from angle_llm.model.meta_model import frozen_bytes, meta_backbone, put_in
from angle_llm.model.pooling import embedding_size
from angle_llm.model.source.backbone import state_sizes
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner, PlannedGroup, StepSchedule
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import SUM_BUFFER
from angle_llm.train.token_budget import CPU_BUDGET, TokenBudget, budget_of, default_budget

ROUND_TOKENS = 256
"""Chosen budgets are multiples of this number of tokens."""
MICRO_TOKENS = 16_384
"""Largest useful micro-batch on a GPU in tokens: a larger forward pass is not faster."""
LEAST_GRAPH_TOKENS = 16_384
"""`graph_tokens` chosen if it fits, even if the sampled steps are smaller."""
MARGIN = 1.25
"""Largest step that a chosen budget allows, relative to the largest sampled step."""
OVERHEAD_TOKENS = {"cuda": 300, "cpu": 0}
"""Time of a micro-batch that does not depend on its tokens, divided by the time per token. On a GPU with fewer tokens,
reading the weights takes longer than the products (H100: 989 TFLOP/s, 3.35 TB/s)."""
LEAST_GAIN = 0.1
"""Fraction of the time of a step that activation checkpointing must save to be chosen if the step fits without it."""
SMALL_MODEL = 10_000_000
"""A model with fewer weights gets the constant budget on a CPU, without a forecast."""
USABLE, USABLE_WITH_ZERO = 0.92, 0.85
"""Fraction of free memory that a forecast may fill. ZeRO and FSDP cannot repeat a step after running out of memory."""


COUNTED_TOKENS = 8192
"""Maximum number of tokens of the micro-batch that is counted."""
SAMPLED_EXAMPLES = 2048
"""Number of examples whose first steps are sampled."""
SAMPLED_BATCHES = 64
"""Maximum number of batches in a sample."""
SEARCHED_EXAMPLES = 100_000
"""Number of examples searched for the longest text; a larger dataset is searched at regular intervals."""
LONGEST_TEXTS = 16
"""Number of examples, longest in characters, that are tokenized to find the longest text in tokens."""


def first_steps(
    planner: BatchPlanner, settings: TrainSettings, budget: TokenBudget
) -> Iterator[tuple[list[list[int]], list[PlannedGroup]]]:
    """Yield the first optimizer steps of a run, until they contain `SAMPLED_EXAMPLES` examples or `SAMPLED_BATCHES` batches.

    A step is given by the example indices of its batches, and by its groups of batches that are encoded together.
    """
    batches = drawn = 0
    for step in StepSchedule(planner.data.draws, settings).after(0):
        for _, groups in planner.steps(iter([step]), budget):
            yield step[1], groups
        batches += len(step[1])
        drawn += sum(map(len, step[1]))
        if batches >= SAMPLED_BATCHES or drawn >= SAMPLED_EXAMPLES:
            break


@dataclass(frozen=True)
class PassCosts:
    """Bytes that the forward and backward passes of a micro-batch need."""

    kept_per_token: float
    """Bytes per token that the forward pass saves for the backward pass."""
    kept_per_micro_batch: int
    """Bytes that the forward pass saves, whatever the number of tokens."""
    temporary_per_token: float
    """Bytes per token that both passes free again."""
    largest_gradient: int
    """Bytes of the largest gradient of a weight. It exists until it is added to the accumulated gradient."""
    in_blocks: bool
    """Whether a micro-batch is a sequence of whole blocks of FlexAttention."""

    def activations(self, tokens: int, micro_batch_tokens: int, longest_text: int) -> int:
        """Return the peak bytes of passes that keep the activations of `tokens` tokens, computed in micro-batches."""
        micro_batches = -(-tokens // micro_batch_tokens)
        if self.in_blocks:
            tokens = micro_batches * padded_length(-(-tokens // micro_batches))
            micro_batch_tokens = padded_length(micro_batch_tokens)
        kept = self.kept_per_token * tokens + self.kept_per_micro_batch * micro_batches
        temporary = self.temporary_per_token * min(tokens, max(micro_batch_tokens, longest_text))
        return round(kept + max(temporary, self.largest_gradient))


@dataclass(frozen=True)
class StepForecast:
    """Memory of one device in the training steps of a run, by token budget."""

    device: Device
    encoder: SentenceEncoder
    """Encoder of the run, or its tiny copy."""
    model: EmbeddingModel
    """Model on the meta device, whose passes are counted."""
    autocasts: bool
    """Whether products are computed with bfloat16 copies of float32 weights."""
    texts: TextGroup
    """Texts of the micro-batch whose passes are counted."""
    step_tokens: int
    """Maximum number of tokens that one process computes in a sampled optimizer step."""
    batch_tokens: int
    """Maximum of the mean number of tokens that one process computes in a batch of a sampled optimizer step."""
    longest_text: int
    """Tokens of the longest text in the dataset, not only in the sampled steps."""
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
    ) -> StepForecast:
        """Return the forecast of a run.

        Args:
            encoder: the encoder of the run, or its tiny copy.
            backbone: the backbone with its adapter on the meta device.
            losses: one loss per dataset of `data`.
            kind: device type, `cuda` or `cpu`.
        """
        # The largest of the first steps. With unlimited graph tokens, all batches of a step are encoded together.
        planner = BatchPlanner(encoder, data, losses, sharding.processes)
        unlimited = TokenBudget(COUNTED_TOKENS, 10**12)
        steps = [group for _, (group,) in first_steps(planner, settings, unlimited)]
        largest = max(steps, key=lambda step: step.plan.largest_share)
        step_texts = max(sum(len(planned.batch) for planned in step.batches) for step in steps)
        # Sizes of weights and embeddings.
        bare: Any = without_adapter(backbone)
        if kind == "cuda" and sharding.zero < 3:  # as `replace_layers_of_encoder` for weights on a GPU
            use_low_memory_layers(backbone)
        weights = chain(backbone.parameters(), encoder.model.dense.parameters())
        trained = [parameter for parameter in weights if parameter.requires_grad]
        trained_bytes, numbers = sum(weight.nbytes for weight in trained), sum(weight.numel() for weight in trained)
        # With 8 bits, a moment has a byte per weight, and a scale in float32 per block of 256 weights.
        moments = 2 * (numbers + numbers // 64 if settings.optimizer.name == "adamw_8bit" else trained_bytes)
        columns = embedding_size(bare, encoder.model.dense) * max(1, losses[0].embeddings_per_text)
        device = Device(
            kind,
            sharding,
            base_bytes=frozen_bytes(backbone, encoder.model.head, encoder.bits or settings.model.bits),
            trained_bytes=trained_bytes,
            trained_numbers=numbers,
            moment_bytes=moments,
            bucket_numbers=state_sizes(bare)[1] ** 2,
            embedding_bytes=4 * columns * step_texts,
            number_bytes=bare.dtype.itemsize,
            summed_bytes=4 * min(numbers, SUM_BUFFER + max((weight.numel() for weight in trained), default=0)),
            gathered_bytes=gathered_bytes(bare) if sharding.fsdp else 0,
        )
        return cls(
            device,
            encoder,
            model=put_in(encoder.model, backbone, "flex" if kind == "cuda" else None),
            autocasts=settings.autocasts,
            texts=max(largest.plan.groups, key=lambda group: group.computed_tokens),
            step_tokens=largest.plan.largest_share,
            batch_tokens=-(-largest.plan.largest_share // len(largest.batches)),
            longest_text=_longest_text(planner),
        )

    def supports_checkpointing(self) -> bool:
        """Return whether activation checkpointing is possible for the layers of the model."""
        return checkpointing_problem(self.model.backbone) is None

    def costs(self, *, checkpointing: bool) -> PassCosts:
        """Return the memory of the forward and backward passes per token and per micro-batch."""
        if checkpointing not in self._costs:
            if checkpointing:
                self.model.checkpoint_activations(True)
            micro_batch = self.texts.make()
            on_gpu = self.device.kind == "cuda"
            passes = count_passes(self.model, micro_batch, on_gpu=on_gpu, autocasts=self.autocasts)
            if checkpointing:
                self.model.checkpoint_activations(False)
            # The meta model predicts no tokens. Cross-entropy keeps a logarithm per logit, its backward pass two gradients.
            logits = self.encoder.model.head.logits_per_token
            in_blocks = on_gpu and micro_batch.sequence is not None
            tokens = padded_length(self.texts.computed_tokens) if in_blocks else self.texts.computed_tokens
            temporary = (passes.peak - passes.kept) / tokens + 8 * logits
            copies = 2 * kept_copies(self.model.backbone, checkpointing=checkpointing) if self.autocasts else 0
            gradient = max((weight.nbytes for weight in self.model.parameters() if weight.requires_grad), default=0)
            self._costs[checkpointing] = PassCosts(
                passes.kept / tokens + 4 * logits, copies, temporary, gradient, in_blocks
            )
        return self._costs[checkpointing]

    def memory(self, tokens: int, budget: TokenBudget) -> Memory:
        """Return the memory of a step that keeps the activations of `tokens` tokens, in micro-batches of a budget."""
        costs = self.costs(checkpointing=budget.activation_checkpointing)
        return self.device.memory(costs.activations(tokens, budget.micro_batch_tokens, self.longest_text))

    def full(self, budget: TokenBudget) -> Memory:
        """Return the memory of the largest step that a budget allows.

        It keeps the activations of `graph_tokens` tokens, or of a single text. If a batch has more tokens, gradient caching
        keeps the activations of a micro-batch.
        """
        cached = budget.micro_batch_tokens if self.batch_tokens > budget.graph_tokens else 0
        tokens = max(budget.graph_tokens, min(cached, self.batch_tokens), self.longest_text)
        return self.memory(tokens, budget)


def _longest_text(planner: BatchPlanner) -> int:
    """Return the number of tokens of the longest text in the dataset; candidates are chosen by characters."""
    data = planner.data
    searched = range(0, len(data), max(1, len(data) // SEARCHED_EXAMPLES))

    def characters(index: int) -> int:
        example = data[index]
        instruction = max(len(example.instruction or ""), len(example.document_instruction or ""))
        return instruction + max(max(len(left), len(right)) for left, right, _ in pairs_of(example))

    batch = planner.batch(heapq.nlargest(LONGEST_TEXTS, searched, key=characters))
    return max(map(len, planner.tokenize(batch)))


def gathered_bytes(backbone: Any) -> int:
    """Return the maximum number of bytes of the weights of a backbone that FSDP gathers at a time.

    These are the token embeddings, or the first layer, which stays gathered in the backward pass, a layer that is computed,
    and the next one, in its communication buffer and as weights.
    """
    layers = max(map(frozen_bytes, LayerStack.of(backbone).layers))
    return 4 * layers + frozen_bytes(backbone.get_input_embeddings())


def product_weights(backbone: nn.Module) -> int:
    """Return the number of weights in matrix products: all weight matrices except embeddings."""
    layers = [layer for layer in backbone.modules() if not isinstance(layer, nn.Embedding)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim == 2)


def kept_copies(backbone: nn.Module, *, checkpointing: bool) -> int:
    """Return the number of weights whose copies the graph of a micro-batch keeps under autocast.

    With activation checkpointing, the graph keeps the copies of the last layer, and of a layer that is computed again.
    """
    copies = product_weights(backbone)
    if checkpointing:
        sizes = [product_weights(layer) for layer in LayerStack.of(backbone).layers]
        copies += sizes[-1] + max(sizes) - sum(sizes)
    return copies


@dataclass(frozen=True)
class BudgetChoice:
    """A token budget, its forecast memory, and whether it fits the device."""

    budget: TokenBudget
    forecast_bytes: int
    """Forecast memory of the largest step that the budget allows."""
    fits: bool


def choose_budget(
    settings: TrainSettings, encoder: SentenceEncoder, data: Mixture, losses: Sequence[Objective], processes: Processes
) -> TokenBudget:
    """Return the token budget of a run on this device, equal on all ranks; values in the settings are kept.

    `losses` has one loss per dataset of `data`.
    """
    free = free_memory(processes, sum(weight.nbytes for weight in encoder.model.parameters()))
    return processes.from_main(lambda: _chosen(settings, encoder, data, losses, processes, free))


def _chosen(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    data: Mixture,
    losses: Sequence[Objective],
    processes: Processes,
    free: int | None,
) -> TokenBudget:
    """Return the token budget of the main rank for `free` bytes of memory, and log it; arguments as in `choose_budget`."""
    # 1. Budgets that need no forecast.
    budget = default_budget(settings, budget_of(processes.device.type))
    fixed = None not in (settings.micro_batch_tokens, settings.graph_tokens)
    if free is None or (fixed and settings.activation_checkpointing != "auto"):
        return budget
    device_type = "cuda" if processes.device.type == "cuda" else "cpu"
    if device_type == "cpu" and sum(weight.numel() for weight in encoder.model.parameters()) < SMALL_MODEL:
        log(f"token budget: {budget}")
        return budget

    # 2. The forecast.
    sharding = Sharding(processes.world_size, processes.zero_stage, processes.offload, processes.uses_fsdp)
    bare: Any = without_adapter(encoder.model.backbone)
    lora = settings.lora if settings.lora.rank else None
    try:
        with torch.random.fork_rng(devices=[]):
            backbone = meta_backbone(bare.config, encoder.dtype, lora, divided=sharding.zero == 3)
            forecast = StepForecast.of(settings, encoder, backbone, data, losses, sharding, device_type)
            choice = best_budget(settings, forecast, free)
    except DataError:
        raise
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # the model needs values of tensors
        log(f"warning: the memory of a step is unknown ({type(error).__name__}: {error}); {budget}")
        return budget

    # 3. The reason.
    needed = f"at most {choice.forecast_bytes / GIB:.1f} of {free / GIB:.1f} GiB"
    sampled = f"sampled steps have up to {forecast.step_tokens:,} tokens per process"
    text = f"token budget: {choice.budget} ({needed}; {sampled})"
    log(text if choice.fits else f"warning: {text}. The run may not fit: {advice(settings)}.")
    return choice.budget


def advice(settings: TrainSettings) -> str:
    """Return how to lower the memory of a run that may not fit."""
    if not settings.lora.rank:
        return "train an adapter (--lora.rank 32), lower --model.max-length, or use ZeRO on several devices"
    if settings.model.bits == 4:
        return "lower --model.max-length or --lora.rank, or use a smaller model"
    return "lower --model.max-length or --lora.rank, set --model.bits 4, or use FSDP or ZeRO on several devices"


def best_budget(settings: TrainSettings, forecast: StepForecast, memory: int) -> BudgetChoice:
    """Return the token budget with the least time per token that fits a device with `memory` bytes.

    Values in the settings are kept. Activation checkpointing must save `LEAST_GAIN` of the time. Of budgets with equal
    times, the largest is chosen. If no budget fits, the result is the smallest.
    """
    sharding = forecast.device.sharding
    usable = round(memory * (USABLE_WITH_ZERO if sharding.zero or sharding.fsdp else USABLE))
    choices = []
    for budget in candidates(settings, forecast):
        graph_tokens = budget.graph_tokens
        if settings.graph_tokens is not None:  # a step does not need more than its data
            graph_tokens = min(graph_tokens, round(MARGIN * forecast.step_tokens))
        needed = forecast.full(replace(budget, graph_tokens=graph_tokens)).total
        choices.append(BudgetChoice(budget, needed, needed <= usable))

    def time(choice: BudgetChoice) -> float:
        return time_per_token(choice.budget, forecast) / (1 - LEAST_GAIN * choice.budget.activation_checkpointing)

    return min((choice for choice in choices if choice.fits), key=time, default=choices[-1])


def candidates(settings: TrainSettings, forecast: StepForecast) -> Iterator[TokenBudget]:
    """Yield token budgets to try, the largest first; values in the settings are kept.

    First `graph_tokens` decreases in steps of `ROUND_TOKENS`, with micro-batches of at most this size. Then `graph_tokens` is
    0 (gradient caching), and micro-batches decrease. Then the same with activation checkpointing.
    """
    on_cpu = forecast.device.kind == "cpu"
    largest_micro = CPU_BUDGET.micro_batch_tokens if on_cpu else MICRO_TOKENS
    largest_graph = LEAST_GRAPH_TOKENS if on_cpu else max(LEAST_GRAPH_TOKENS, round(MARGIN * forecast.step_tokens))
    sizes = range(-(-largest_graph // ROUND_TOKENS) * ROUND_TOKENS, 0, -ROUND_TOKENS)
    kept = [(min(largest_micro, size), size) for size in sizes]
    cached = [(micro, 0) for micro, _ in kept]
    allowed = {"never": [False], "always": [True], "auto": [False, True]}[settings.activation_checkpointing]
    if settings.activation_checkpointing == "auto" and not forecast.supports_checkpointing():
        allowed = [False]
    for checkpointing in allowed:
        for micro, graph in kept + cached:
            yield default_budget(settings, TokenBudget(micro, graph, checkpointing))


def time_per_token(budget: TokenBudget, forecast: StepForecast) -> float:
    """Return the time per token of a batch with this budget, in forward passes of a token.

    A backward pass takes as long as two forward passes. Activation checkpointing and gradient caching need one more forward
    pass each.
    """
    batch = forecast.batch_tokens
    passes = 3 + budget.activation_checkpointing + (batch > budget.graph_tokens)
    return passes * (1 + OVERHEAD_TOKENS[forecast.device.kind] / min(budget.micro_batch_tokens, batch))
