"""Memory of the forward and backward passes of a training step: measured on a GPU, or counted without weights.

`measured_step` runs the passes of a real model and reads the allocator of the GPU. `model_step` runs them for a model on
torch's `meta` device (see `model/meta_model`), where tensors have shapes but no values. There, `MemoryLedger` counts the storages
that operations allocate, as long as they exist. Temporary memory inside an operation is not counted, except in attention,
which `FusedKernels` replaces by an operation with the memory of a fused kernel.

Legend: U unique texts, R texts of a micro-batch, D dimensions; attention: H heads, K key-value heads, Q queries, L keys,
S dimensions of a head.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layout import attention
from angle_llm.model.layout.micro_batches import MicroBatch, TextGroup

META = torch.device("meta")
GRANULE = 512
"""Granularity in bytes: torch's GPU allocator rounds sizes up to a multiple of it."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Count the bytes of tensors that operations allocate inside this context, as `live` (now) and `peak`.

    Tensors that exist before are not counted. Pass the weights of the model as `held`, because operations return views of
    weights.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._allocations = self._peak_allocation = 0
        self._allocation_of: Any = WeakIdKeyDictionary({tensor.untyped_storage(): 0 for tensor in held})
        """Number of the allocation of each storage, from 1; 0 for `held`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _META_RESULTS.get(func.name())
        if replacement is not None and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in args):
            result = replacement(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._allocation_of:
                self._count(leaf.untyped_storage())
        return result

    def of_peak(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes that the given tensors took at the peak; tensors allocated later count 0."""
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values()
        at_peak = [storage for storage in storages if 0 < self._allocation_of.get(storage, 0) <= self._peak_allocation]
        return sum(_round_up(storage.nbytes(), GRANULE) for storage in at_peak)

    def _count(self, storage: Any) -> None:
        """Add a new storage to the live bytes until it is freed."""
        self._allocations += 1
        self._allocation_of[storage] = self._allocations
        size = _round_up(storage.nbytes(), GRANULE)
        self.live += size
        weakref.finalize(storage, self._release, size)
        if self.live > self.peak:
            self.peak, self._peak_allocation = self.live, self._allocations

    def _release(self, size: int) -> None:
        self.live -= size


def _round_up(size: int, tile: int) -> int:
    """Return the smallest multiple of `tile` that is at least `size`."""
    return -(-size // tile) * tile


def _int8_rows(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of the LLM.int8() quantization of activations: rounded rows, scales and outlier dimensions.

    The number of outlier dimensions depends on values, so it is 0 here.
    """
    scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
    return rows.new_empty(rows.shape, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)


def _int8_product(rows: Tensor, rounded: Tensor, weight: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an empty result of the LLM.int8() matrix product, and of its outlier part."""
    return rows.new_empty(*rounded.shape[:-1], weight.shape[0]), rows.new_empty(0)


_META_RESULTS: dict[str, Any] = {
    # transformers checks whether positions restart within a sequence; here they do not.
    "aten::_local_scalar_dense": lambda tensor: True,
    "bitsandbytes::int8_vectorwise_quant": _int8_rows,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_product,
}
"""Functions that return results on the meta device for operations that need values, by name of the operation."""


class FusedKernels(TorchFunctionMode):
    """Context in which attention and dropout save the tensors that fused kernels save for the backward pass.

    On the meta device, torch decomposes attention into operations that save the scores. Fused kernels save queries, keys,
    values, the output and one number per query. A GPU also saves one byte per element of a dropout mask. The flash kernel
    of a CPU has no dropout.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        self.on_gpu = on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention and (self.on_gpu or not named.get("dropout_p")):
            return _attention(self.on_gpu, *args, **named)
        if func is functional.dropout and self.on_gpu:
            return _gpu_dropout(*args, **named)
        return func(*args, **named)


def _gpu_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return dropout as a GPU computes it: it saves a mask with a byte per element. Arguments as in `dropout`."""
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if training and p else input
    return dropped


def _attention(
    on_gpu: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Return attention with the memory of a fused kernel; arguments as for `scaled_dot_product_attention`.

    A GPU uses flash attention for half precision without a mask, and memory-efficient attention otherwise.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = "cpu" if not on_gpu else "flash" if half and attn_mask is None else "efficient"
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1 and kernel != "flash":  # these kernels need a key for every head
        key, value = (states.repeat_interleave(repeats, dim=-3) for states in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: Tensor = _FusedAttention.apply(query, key, value, attn_mask, kernel)  # type: ignore[no-untyped-call]
    return output


class _FusedAttention(torch.autograd.Function):
    """Attention that allocates and saves the tensors of a fused kernel: `cpu`, `flash` or `efficient`.

    Query (…, H, Q, S); key and value (…, K, L, S).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
        output = torch.empty_like(query)
        per_query = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, per_query)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, per_query = ctx.saved_tensors
        made = tuple(torch.empty_like(states) for states in (query, key, value))
        workspace = [torch.empty_like(per_query)]
        (*heads, queries, width) = query.shape
        if ctx.kernel == "flash":
            # Query gradients are summed in float32, in tiles. Gradients of shared keys are first computed for each head.
            workspace.append(
                query.new_empty(*heads, _round_up(queries, 128), _round_up(width, 32), dtype=torch.float32)
            )
            if query.shape[-3] != key.shape[-3]:
                workspace += [key.new_empty(*heads, key.shape[-2], width) for _ in range(2)]
        elif ctx.kernel == "efficient" and query.dtype != torch.float32:
            tile = 64 if width <= 64 else 128
            workspace.append(
                query.new_empty(*heads, _round_up(queries, tile), _round_up(width, tile), dtype=torch.float32)
            )
        del workspace
        return (*made, None, None)


def _backward(scalar: Tensor) -> None:
    """Back-propagate from a scalar with `FusedKernels` active in layers that activation checkpointing runs again.

    `torch.autograd.backward` is a torch function, and `TorchFunctionMode` is disabled inside torch functions. So this
    calls the autograd engine.
    """
    engine: Any = Variable._execution_engine
    engine.run_backward((scalar,), (torch.ones_like(scalar),), False, False, (), True, True)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that the forward and backward passes of the encoder need in a training step, without weights."""

    tokens: int
    """Number of computed tokens whose activations are in memory at the same time."""
    kept: int
    """Bytes that the forward pass saves for the backward pass."""
    peak: int
    """Peak bytes in both passes, gradients of weights included."""
    gradients: int
    """Bytes of the gradients of weights that exist at the peak."""


@dataclass(frozen=True)
class PassCosts:
    """Memory and time of the forward and backward passes of the encoder, as linear functions of the number of tokens."""

    kept_per_token: float
    """Bytes per token that the forward pass saves for the backward pass."""
    kept_per_micro_batch: float
    """Bytes per micro-batch that the forward pass saves, whatever its number of tokens."""
    temporary_per_token: float
    """Bytes per token of the current micro-batch that both passes free again."""
    gradients: int
    """Bytes of the gradients of weights."""
    overhead_tokens: float = 0.0
    """Time of a micro-batch that does not depend on its tokens, divided by the time per token."""

    @classmethod
    def proportional(cls, step: StepMemory, kept_per_micro_batch: int, overhead_tokens: float) -> PassCosts:
        """Estimate the costs from one micro-batch, as if its other memory grew with the number of tokens."""
        kept_per_token = (step.kept - kept_per_micro_batch) / step.tokens
        temporary = max(step.peak - step.gradients - step.kept, 0)
        return cls(kept_per_token, kept_per_micro_batch, temporary / step.tokens, step.gradients, overhead_tokens)

    @classmethod
    def between(cls, small: tuple[StepMemory, float], large: tuple[StepMemory, float]) -> PassCosts:
        """Fit the costs per token and per micro-batch to measurements of a small and a large micro-batch."""
        (less, less_seconds), (more, more_seconds) = small, large
        tokens = more.tokens - less.tokens
        kept_per_token = max(more.kept - less.kept, 0) / tokens
        kept_per_micro_batch = max(more.kept - kept_per_token * more.tokens, 0.0)
        seconds_per_token = max(more_seconds - less_seconds, 1e-9) / tokens
        overhead = max(less_seconds / seconds_per_token - less.tokens, 0.0)
        return cls(
            (more.kept - kept_per_micro_batch) / more.tokens,
            kept_per_micro_batch,
            max(more.peak - more.gradients - more.kept, 0) / more.tokens,
            more.gradients,
            min(overhead, float(more.tokens)),  # noise can make the time per token arbitrarily small
        )

    def step(self, tokens: int, micro_batch_tokens: int) -> StepMemory:
        """Return the memory of a step that keeps the activations of `tokens` tokens, computed in micro-batches."""
        micro = max(min(tokens, micro_batch_tokens), 1)
        kept = round(self.kept_per_token * tokens + self.kept_per_micro_batch * -(-tokens // micro))
        return StepMemory(tokens, kept, kept + round(self.temporary_per_token * micro) + self.gradients, self.gradients)


def measured_step(model: EmbeddingModel, texts: TextGroup) -> tuple[StepMemory, float]:
    """Run the forward and backward passes of a micro-batch on a GPU, and return their memory and time in seconds.

    The passes run twice. The first run compiles kernels and allocates the gradients of the weights; the second is measured,
    with a new micro-batch, because a micro-batch keeps the indices that attention computes for it.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.train()
    try:
        for _ in range(2):
            micro_batch = texts.make()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before, start = torch.cuda.memory_allocated(device), time.perf_counter()
            with attention.attention_kernels(device, micro_batch.longest_text):
                rows_RD = model(**micro_batch.inputs(device))
                kept = torch.cuda.memory_allocated(device) - before
                torch.autograd.backward(rows_RD, torch.ones_like(rows_RD))
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated(device) - before
            del rows_RD
        gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
        return StepMemory(micro_batch.computed_tokens, kept, peak + gradients, gradients), seconds
    finally:
        model.zero_grad()
        model.train(was_training)


def model_step(
    model: EmbeddingModel, micro_batches: Sequence[MicroBatch], *, on_gpu: bool, gradients_before: bool = False
) -> StepMemory:
    """Run the forward pass of all micro-batches and then one backward pass on the meta device, and count their memory.

    Args:
        model: a model on the meta device.
        on_gpu: count as on a GPU, where attention is a fused kernel.
        gradients_before: whether the weights already have gradients from an earlier micro-batch or batch.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    longest = max(micro.longest_text for micro in micro_batches)
    fused = on_gpu or longest > attention.PLAIN_ATTENTION_TOKENS
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    with ledger, FusedKernels(on_gpu=on_gpu) if fused else nullcontext():
        for parameter in trained if gradients_before else ():
            parameter.grad = torch.empty_like(parameter)
        rows_UD = torch.cat([model(**micro.inputs(META)) for micro in micro_batches])
        kept = ledger.live - sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        _backward((rows_UD * torch.empty_like(rows_UD)).sum())
    gradients = ledger.of_peak(parameter.grad for parameter in trained if parameter.grad is not None)
    for parameter in trained:
        parameter.grad = None
    return StepMemory(sum(micro.computed_tokens for micro in micro_batches), kept, ledger.peak, gradients)
