"""Memory of a training step, counted without weights: tensors on torch's `meta` device have shapes but no values.

Every storage that an operation allocates is counted while it exists. Memory that an operation allocates and frees
internally is not counted, except where `_FusedAttention` states it. Legend: U unique texts, D dimensions.
"""

from __future__ import annotations

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

from angle_llm.model import fast_paths
from angle_llm.model.micro_batches import MicroBatch
from angle_llm.model.pooling import EmbeddingModel

META = torch.device("meta")
GRANULE = 512
"""Bytes: torch's GPU allocator rounds sizes up to multiples of this."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Count the bytes that operations allocate inside this context: `live` now, and at the `peak`.

    Tensors that exist before are not counted; pass those of the model as `held`, since operations return views of them.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._events = self._peak_event = 0
        self._born: Any = WeakIdKeyDictionary()
        """The event that allocated each storage; 0 for `held`."""
        for tensor in held:
            self._born[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _META_RESULTS.get(func.name())
        if replacement is not None and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in args):
            result = replacement(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._born:
                self._count(leaf.untyped_storage())
        return result

    def of_peak(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those tensors that existed at the peak."""
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values()
        return sum(_tiled(one.nbytes(), GRANULE) for one in storages if 0 < self._born.get(one, 0) <= self._peak_event)

    def _count(self, storage: Any) -> None:
        self._events += 1
        self._born[storage] = self._events
        size = _tiled(storage.nbytes(), GRANULE)
        self.live += size
        weakref.finalize(storage, self._release, size)
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, self._events

    def _release(self, size: int) -> None:
        self.live -= size


def _tiled(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _int8_rows(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows rounded as in LLM.int8(). The number of outlier dimensions depends on values; here it is 0."""
    scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
    return rows.new_empty(rows.shape, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)


def _int8_product(rows: Tensor, rounded: Tensor, weight: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return rows.new_empty(*rounded.shape[:-1], weight.shape[0]), rows.new_empty(0)


_META_RESULTS: dict[str, Any] = {
    # transformers checks whether positions restart within a sequence; they do not
    "aten::_local_scalar_dense": lambda tensor: True,
    "bitsandbytes::int8_vectorwise_quant": _int8_rows,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_product,
}
"""Results of operations that need values, on the meta device."""


class FusedKernels(TorchFunctionMode):
    """Make attention and dropout save the tensors that fused kernels save for the backward pass.

    On the meta device torch decomposes attention, as on a CPU without a fused kernel, and would save the scores. Fused
    kernels save queries, keys, values, the output and one number per query. A GPU also saves one byte per element of a
    dropout mask; the flash kernel of a CPU has no dropout.
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
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if training and p else input
    return dropped


def _attention(
    on_gpu: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Compute attention by `_FusedAttention`: on a GPU flash (half precision, no mask), else memory-efficient."""
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
    """Allocate like a fused kernel; shapes (…, H, Q, S), (…, K, L, S)."""

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
            # Gradients of queries are summed in float32, in tiles; those of shared keys for each head first.
            workspace.append(query.new_empty(*heads, _tiled(queries, 128), _tiled(width, 32), dtype=torch.float32))
            if query.shape[-3] != key.shape[-3]:
                workspace += [key.new_empty(*heads, key.shape[-2], width) for _ in range(2)]
        elif ctx.kernel == "efficient" and query.dtype != torch.float32:
            tile = 64 if width <= 64 else 128
            workspace.append(query.new_empty(*heads, _tiled(queries, tile), _tiled(width, tile), dtype=torch.float32))
        del workspace
        return (*made, None, None)


def _backward(scalar: Tensor) -> None:
    """Back-propagate by the engine itself: `torch.autograd.backward` is a torch function, and inside of one no
    `FusedKernels` are active for the layers that activation checkpointing computes again."""
    engine: Any = Variable._execution_engine
    engine.run_backward((scalar,), (torch.ones_like(scalar),), False, False, (), True, True)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the encoder in a training step, without its weights."""

    tokens: int
    """Computed tokens whose activations are kept at once."""
    kept: int
    """Saved by the forward pass for the backward pass."""
    peak: int
    """Peak of both passes."""
    gradients: int
    """Gradients of weights at the peak."""


def model_step(
    model: EmbeddingModel, micro_batches: Sequence[MicroBatch], *, on_gpu: bool, gradients_before: bool = False
) -> StepMemory:
    """Run a forward pass that keeps all graphs, and the backward pass, on the meta device.

    `gradients_before`: weights have gradients from an earlier micro-batch or batch. On a GPU,
    texts in one sequence use FlexAttention unless the model has another kernel.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    longest = max(
        int(micro.trie.depth_1T.max()) + 1 if micro.trie is not None else micro.ids_BT.shape[1]
        for micro in micro_batches
    )
    fused = on_gpu or longest > fast_paths.PLAIN_ATTENTION_TOKENS
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    given = model.attention_kernel
    model.attention_kernel = given or ("flex" if on_gpu else None)
    with ledger, FusedKernels(on_gpu=on_gpu) if fused else nullcontext():
        for parameter in trained if gradients_before else ():
            parameter.grad = torch.empty_like(parameter)
        rows_UD = torch.cat([model(**micro.inputs(META)) for micro in micro_batches])
        kept = ledger.live - sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        _backward((rows_UD * torch.empty_like(rows_UD)).sum())
    gradients = ledger.of_peak([parameter.grad for parameter in trained if parameter.grad is not None])
    model.attention_kernel = given
    for parameter in trained:
        parameter.grad = None
    return StepMemory(sum(micro.computed_tokens for micro in micro_batches), kept, ledger.peak, gradients)
