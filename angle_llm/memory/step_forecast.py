"""Device memory of training steps by token budget, forecast without weights or measured on a GPU.

`Device` computes weights, gradients, optimizer state and communication buffers from the number of parameters and the
ZeRO stage. The formulas are from the documentation of torch and DeepSpeed, with the buffer sizes that accelerate sets.
`StepForecast` adds the activations: it measures two micro-batches of the training texts on a GPU, or runs one on the meta
model and counts tensors.
`budget` chooses token budgets by this forecast, and `angle-llm plan` prints it.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example, pairs_of
from angle_llm.device import is_out_of_memory
from angle_llm.losses import Objective, Relation
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
from angle_llm.train.distributed import Processes
from angle_llm.train.token_budget import TokenBudget

GIB = 2**30
MASTER_BYTES = 4
"""Bytes of the float32 copy that DeepSpeed keeps of each trained weight in ZeRO stages 1 and 2."""
LIVE_NUMBERS = 10**9
"""Maximum number of weights that ZeRO-3 keeps gathered (`stage3_max_live_parameters` of DeepSpeed)."""
CONTEXT = round(0.6 * GIB)
"""Bytes in use before the first tensor: CUDA context and workspaces, or the loaded libraries on a CPU."""
EXCHANGE_CONTEXT = round(0.4 * GIB)
"""Bytes of the NCCL buffers in a run with several GPUs."""
LOST = {"cuda": 0.05, "cpu": 0.3}
"""Fraction of the activations that allocators waste: measured on a CPU (docs/history), assumed on a GPU."""
MICRO_TOKENS = 16_384
"""Largest useful micro-batch in tokens: a larger forward pass is not faster."""
MEASURED_TOKENS = (512, 2048)
"""Sizes of the two micro-batches that are measured on a GPU, in tokens."""
GPU_OVERHEAD_TOKENS = 300.0
"""Overhead of a micro-batch on a GPU that was not measured, in tokens. Below 300 tokens, reading the weights takes longer
than the products (H100: 989 TFLOP/s, 3.35 TB/s)."""
COUNTED_TOKENS = 8192
"""Size of the micro-batch that is counted. Memory is proportional to tokens: 0.1 % error from 512 to 8,192 at 7B."""
MAX_BATCHES = 64
"""Maximum number of batches in a sample."""
MAX_EXAMPLES = 1024
"""Largest batch whose loss is computed to count its memory; the memory of a larger batch is extrapolated linearly."""
SEARCHED_EXAMPLES = 100_000
"""Number of examples searched for the longest text; a larger dataset is searched at regular intervals."""
LONGEST_TEXTS = 16
"""Number of examples, longest in characters, that are tokenized to find the longest text in tokens."""


@dataclass(frozen=True)
class Sharding:
    """Number of processes, ZeRO stage and offloading of a run."""

    processes: int = 1
    zero: int = 0
    """ZeRO stage; 0 without ZeRO."""
    offload: str = "none"
    """State that ZeRO keeps in host memory: `none`, `optimizer` or `parameters` (the optimizer state and all weights)."""

    @classmethod
    def of(cls, processes: Processes) -> Sharding:
        """Return the sharding of launched processes."""
        return cls(processes.world_size, processes.zero_stage, processes.offload)

    def __str__(self) -> str:
        if not self.zero:
            return f"processes: {self.processes}"
        return f"ZeRO-{self.zero}, processes: {self.processes}, offloaded: {self.offload}"

    def part(self, size: int, from_stage: int) -> int:
        """Return the bytes on one process of a tensor group of `size` bytes that ZeRO partitions from stage `from_stage`.

        Examples: optimizer state from stage 1, gradients from stage 2, weights from stage 3.
        """
        return -(-size // self.processes) if self.zero >= from_stage else size


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device in bytes, by purpose."""

    base_weights: int
    """Frozen weights."""
    trained_weights: int
    """Weights of the adapter, or all weights if there is no adapter."""
    optimizer: int
    """AdamW state and temporary tensors of the update."""
    gradients: int
    activations: int
    """Saved and temporary tensors of the forward and backward passes."""
    embeddings: int
    """Embeddings of the batch, their gradient, and the tensors of the loss."""
    exchange: int
    """Buffers for gradient reduction and for gathered weights."""
    allowance: int
    """Estimate of memory outside tensors: device context, libraries and fragmentation."""

    @property
    def tensors(self) -> int:
        """Bytes of tensors, comparable to `torch.cuda.max_memory_allocated`."""
        return self.total - self.allowance

    @property
    def total(self) -> int:
        """Sum of all purposes in bytes."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Device:
    """The sizes that determine the memory of a training step on one device, activations excepted."""

    kind: str
    """Device type, `cuda` or `cpu`."""
    sharding: Sharding
    base_bytes: int
    """Bytes of the frozen weights, before partitioning."""
    trained_bytes: int
    """Bytes of the trained weights, before partitioning."""
    trained_numbers: int
    """Number of trained weights."""
    bucket_numbers: int
    """Number of elements in a gradient bucket of DeepSpeed."""
    embedding_bytes: int
    """Bytes of the embeddings of a batch."""
    loss_bytes: int
    """Peak bytes of the loss and its gradient, embeddings included."""
    accumulates: bool = False
    """Whether an optimizer step averages the gradients of several batches."""

    def memory(self, step: StepMemory, *, cached: bool) -> Memory:
        """Return the peak memory of a training step: in the backward pass, the loss or the update.

        `cached`: gradient caching encodes every micro-batch twice, and `step` is its largest micro-batch.
        """
        before = self.trained_bytes if cached or self.accumulates else 0
        pending = 2 * self.embedding_bytes if cached else 0  # without caching, embeddings are among the activations
        # On a GPU, AdamW updates all weights at once with a temporary copy; on a CPU one tensor after another.
        update = self.trained_bytes if self.kind == "cuda" and self.sharding.offload == "none" else 0
        moments = [
            self._moment(gradients=step.gradients, activations=step.peak - step.gradients, embeddings=pending),
            self._moment(gradients=before, activations=0 if cached else step.kept, embeddings=self.loss_bytes),
            self._moment(gradients=self.trained_bytes, update=update),
        ]
        return max(moments, key=lambda memory: memory.total)

    def _moment(self, *, gradients: int, activations: int = 0, embeddings: int = 0, update: int = 0) -> Memory:
        """Return the memory at a moment of a step, from the sizes in bytes that change during the step."""
        sharding = self.sharding
        weights_here, states_here = sharding.offload != "parameters", sharding.offload == "none"
        nccl = EXCHANGE_CONTEXT if sharding.processes > 1 and self.kind == "cuda" else 0
        return Memory(
            base_weights=sharding.part(self.base_bytes, 3) * weights_here,
            trained_weights=sharding.part(self.trained_bytes, 3) * weights_here,
            optimizer=self._states * states_here + sharding.part(update, 1),
            gradients=sharding.part(gradients, 2),
            activations=activations,
            embeddings=embeddings,
            exchange=self._exchange,
            allowance=CONTEXT + nccl + round(LOST[self.kind] * activations),
        )

    @property
    def _states(self) -> int:
        """Bytes of the optimizer state per process: two moments of AdamW, in float32 with DeepSpeed."""
        if not self.sharding.zero:
            return 2 * self.trained_bytes
        copies = MASTER_BYTES if self.sharding.zero < 3 else 0
        return self.sharding.part((8 + copies) * self.trained_numbers, 1)

    @property
    def _exchange(self) -> int:
        """Bytes of the buffers for gradient reduction and for gathered weights."""
        if not self.sharding.zero:  # DataParallelStrategy copies the gradients to sum them
            return self.trained_bytes if self.sharding.processes > 1 else 0
        gathered = min(self.base_bytes + self.trained_bytes, 2 * LIVE_NUMBERS) if self.sharding.zero == 3 else 0
        return 4 * self.bucket_numbers + gathered

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that offloading needs per process."""
        weights = self.sharding.part(self.base_bytes + self.trained_bytes, 3)
        return {"none": 0, "optimizer": self._states, "parameters": self._states + weights}[self.sharding.offload]


def free_memory(processes: Processes) -> int | None:
    """Return the device memory in bytes that a rank can use, the minimum over ranks; None if unknown.

    Memory that this process already uses counts as free, because a forecast (`Memory`) includes it.
    """
    processes.max(0)  # wait until all ranks have loaded their weights
    device = processes.device
    free = None
    if device.type == "cuda":
        context = CONTEXT + (EXCHANGE_CONTEXT if processes.world_size > 1 else 0)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + context
    elif device.type == "cpu" and (available := _available_memory()) is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
        free = available // local + _own_memory()
    least = -processes.max(-(free or 0))
    return least or None


_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat"), "anon"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.stat"), "rss"),
)
"""Files with the memory limit and use of a container, and the key of the use: cgroup version 2, then version 1."""


def _available_memory() -> int | None:
    """Return the bytes that this machine or container can still allocate; None if the system does not report them."""
    if not _MEMINFO.is_file():
        return None
    available = 1024 * _kernel_number(_MEMINFO, "MemAvailable:")
    for limit, use, name in _CGROUPS:
        if limit.is_file() and (most := limit.read_text().strip()).isdecimal():
            available = min(available, int(most) - _kernel_number(use, name))
    return max(available, 0)


def _own_memory() -> int:
    """Return the bytes that the end of this process would free; `MemAvailable` already includes mapped file pages."""
    return 1024 * sum(_kernel_number(_STATUS, name) for name in ("RssAnon:", "RssShmem:"))


def _kernel_number(path: Path, name: str) -> int:
    """Return the number after `name` in a file of the Linux kernel; 0 without such a line."""
    lines = (line.split() for line in path.read_text().splitlines()) if path.is_file() else []
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)


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
    """Token ids of distinct texts for the counted micro-batch. Texts of several batches share more prefixes."""

    @classmethod
    def of(cls, planner: BatchPlanner, settings: TrainSettings, examples: int) -> StepSample:
        """Return the sizes and texts of the first optimizer steps with together at least `examples` examples."""
        data, budget = planner.data, TokenBudget(MICRO_TOKENS, 10**12)  # all batches of a step are encoded together
        texts: dict[tuple[int, str], None] = {}
        batches: list[tuple[list[int], TextBatch]] = []
        step_texts, step_tokens = 0, 0
        for indices_of_step, groups in first_steps(planner, settings, budget, examples):
            made = [planned.batch for group in groups for planned in group.batches]
            step_tokens = max(step_tokens, *(group.plan.largest_share for group in groups))
            batches += zip(indices_of_step, made, strict=True)
            step_texts = max(step_texts, sum(map(len, made)))
            for batch in made:
                texts.update(dict.fromkeys(zip(batch.prompts, batch.texts, strict=True)))
        ids: list[list[int]] = []
        for start in range(0, len(texts), 256):
            part = list(texts)[start : start + 256]
            ids += planner.tokenize([text for _, text in part], [prompt for prompt, _ in part])
            if sum(map(len, ids)) > 2 * COUNTED_TOKENS:
                break
        ids = planner.encoder.model.head.input_ids(ids, 0)
        indices, largest = max(batches, key=lambda pair: len(pair[1]))
        longest = max([*map(len, ids), _longest_text(planner)])
        plan = planner.encoder.plan_ids(
            planner.tokenize(largest.texts, largest.prompts), MICRO_TOKENS, planner.world_size
        )
        return cls(
            [data[index] for index in indices], len(largest), plan.largest_share, step_texts, step_tokens, longest, ids
        )


def _longest_text(planner: BatchPlanner) -> int:
    """Return the number of tokens of the longest text in the dataset; candidates are chosen by characters."""
    data = planner.data
    places = range(0, len(data), max(1, len(data) // SEARCHED_EXAMPLES))

    def characters(index: int) -> int:
        return max(max(len(left), len(right)) for left, right, _ in pairs_of(data[index]))

    batch = planner.batch(heapq.nlargest(LONGEST_TEXTS, places, key=characters))
    return max(map(len, planner.tokenize(batch.texts, batch.prompts)))


class StepForecast:
    """Memory of one device in the training steps of a run, by token budget.

    Activations are measured with the weights on a GPU, otherwise counted on a meta model.
    """

    def __init__(
        self,
        settings: TrainSettings,
        encoder: SentenceEncoder,
        backbone: Any,
        objective: Objective,
        sample: StepSample,
        sharding: Sharding,
        kind: str,
        *,
        measure: bool = False,
    ) -> None:
        """Compute all memory except activations.

        Args:
            encoder: the encoder of the run, or its tiny copy; plans the micro-batches.
            backbone: the backbone with its adapter, with weights or on the meta device.
            kind: device type, `cuda` or `cpu`.
            measure: measure the passes of `encoder`, whose weights are on a GPU.
        """
        self.sample, self._encoder, self._on_gpu, self._measure = sample, encoder, kind == "cuda", measure
        self.bits = encoder.bits or settings.model.bits  # a folder may be stored in bits; a plan has no weights
        bare: Any = without_adapter(backbone)
        self._model = encoder.model
        if not measure:
            meta = backbone
            if not next(bare.parameters()).is_meta:
                lora = settings.lora if settings.lora.rank else None
                meta = meta_backbone(bare.config, encoder.dtype, lora, bits=self.bits, divided=sharding.zero == 3)
            self._model = put_in(encoder.model, meta, "flex" if self._on_gpu else None)
        self._costs: dict[bool, PassCosts] = {}
        """Costs of the passes, without and with activation checkpointing."""
        dimensions, width = embedding_size(bare, encoder.model.dense), state_sizes(bare)[1]
        columns = dimensions * max(1, objective.embeddings_per_text)
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        trained_bytes = sum(weight.nbytes for weight in trained)
        loss = loss_memory(objective, sample.examples, columns)
        self.device = Device(
            kind,
            sharding,
            base_bytes=held_bytes(nn.ModuleList([backbone, encoder.model.head])) - trained_bytes,
            trained_bytes=trained_bytes,
            trained_numbers=sum(weight.numel() for weight in trained),
            bucket_numbers=width**2,
            embedding_bytes=4 * columns * sample.batch_texts,
            loss_bytes=loss + 8 * columns * (sample.step_texts - sample.batch_texts),
            accumulates=settings.accumulation > 1,
        )
        self._copies = 2 * product_weights(backbone) if settings.autocasts else 0
        """Bytes of the bfloat16 copies of weights that the graph of a micro-batch keeps under autocast."""

    def supports_checkpointing(self) -> bool:
        """Return whether activation checkpointing is possible for the layers of the model."""
        return checkpointing_problem(self._model.backbone) is None

    def costs(self, *, checkpointing: bool) -> PassCosts:
        """Return the memory and time of the forward and backward passes per token and per micro-batch."""
        if checkpointing not in self._costs:
            with checkpointed(self._model, checkpointing):
                if self._measure:
                    self._costs[checkpointing] = self._measured(*MEASURED_TOKENS)
                else:
                    step = self._count([self._sampled(COUNTED_TOKENS).make()], gradients_before=True)
                    overhead = GPU_OVERHEAD_TOKENS if self._on_gpu else 0.0
                    self._costs[checkpointing] = PassCosts.proportional(step, self._copies, overhead)
        return self._costs[checkpointing]

    def _measured(self, small: int, large: int) -> PassCosts:
        """Measure two micro-batches of at most `small` and `large` tokens; fewer if the memory does not suffice."""
        try:
            less, more = (measured_step(self._model, self._sampled(size)) for size in (small, large))
            if more[0].tokens < 1.5 * less[0].tokens:  # long texts, or few texts: differences would be noise
                return PassCosts.proportional(more[0], 0, GPU_OVERHEAD_TOKENS)
            return PassCosts.between(less, more)
        except RuntimeError as error:
            if not is_out_of_memory(error) or small < MEASURED_TOKENS[0] // 8:
                raise
        return self._measured(small // 2, large // 2)

    def token_cost(self) -> float | None:
        """Measure the time of a token in a sequence of texts, relative to a padded token, rounded to tenths.

        Rounding makes runs choose equal layouts. None if all texts are padded, are too long for a sequence, or do not fit
        the memory.
        """
        layouts = self._encoder.layouts
        ids = [text for text in self.sample.ids if len(text) <= (layouts.max_tokens or len(text))]
        if layouts.layout == "padded" or not ids:
            return None
        seconds = []
        for tried in (replace(layouts, token_cost=1e-9), LayoutSupport("padded")):
            plan = plan_micro_batches(ids, MEASURED_TOKENS[1], self._encoder.pad_id, tried)
            texts = max(plan.groups, key=lambda group: group.computed_tokens)
            try:
                best = min(measured_step(self._model, texts)[1] for _ in range(3))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None
            seconds.append(best / texts.computed_tokens)
        return max(round(seconds[0] / seconds[1], 1), 0.1)

    def _sampled(self, tokens: int) -> TextGroup:
        """Plan micro-batches of at most `tokens` tokens for the sampled texts; return the one with the most tokens."""
        plan = self._encoder.plan_ids(self.sample.ids, tokens)
        return max(plan.groups, key=lambda group: group.computed_tokens)

    def count(
        self, micro_batches: Sequence[MicroBatch], *, checkpointing: bool, gradients_before: bool = True
    ) -> StepMemory:
        """Return the memory, without weights, of a step that keeps the activations of all given micro-batches."""
        with checkpointed(self._model, checkpointing):
            step = self._count(micro_batches, gradients_before=gradients_before)
        copies = self._copies * len(micro_batches)
        return replace(step, kept=step.kept + copies, peak=step.peak + copies)

    def _count(self, micro_batches: Sequence[MicroBatch], *, gradients_before: bool) -> StepMemory:
        step = model_step(self._model, micro_batches, on_gpu=self._on_gpu, gradients_before=gradients_before)
        # The meta model predicts no tokens. Cross-entropy keeps a logarithm per logit, and its backward pass two gradients.
        logits = self._encoder.model.head.logits_per_token
        kept = round(4 * logits * step.tokens)
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
    whole, part = len(examples), min(len(examples), MAX_EXAMPLES)

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

    if part == whole:
        return peak(whole)
    least, most = peak(part // 2), peak(part)
    return most + (most - least) * (whole - part) // (part - part // 2)
