"""Memory of a training step, counted without weights: tensors on torch's `meta` device have shapes but no values.

Every storage that an operation allocates is counted while it exists. Memory that an operation allocates and frees internally
is not counted, except where the kernels below state it. Legend: U unique texts, D dimensions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from angle_llm.model import fast_paths
from angle_llm.model.micro_batches import MicroBatch

META = torch.device("meta")
GRANULE = 512
"""Bytes: torch's GPU allocator rounds sizes up to multiples of this."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Count the bytes that operations allocate inside this context: the current total and the peak.

    Tensors that exist before are not counted; pass those of the model as `held`, since operations return views of them.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        """Bytes allocated now."""
        self.peak: int = 0
        """Most bytes allocated at once."""
        self._events = 0
        self._peak_event = 0
        self._born: Any = WeakIdKeyDictionary()
        for tensor in held:
            self._born[tensor.untyped_storage()] = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _META_RESULTS.get(func.name())
        known = replacement is not None and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in args)
        result = replacement(*args) if known and replacement is not None else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def of_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors that existed at the peak."""
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values()
        return sum(_rounded(storage) for storage in storages if 0 <= self._born.get(storage, -1) <= self._peak_event)

    def _count(self, storage: Any) -> None:
        if storage in self._born:
            return
        self._events += 1
        self._born[storage] = self._events
        size = _rounded(storage)
        self.live += size
        weakref.finalize(storage, self._release, size)
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, self._events

    def _release(self, size: int) -> None:
        self.live -= size


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // GRANULE) * GRANULE


def _no_outliers(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """LLM.int8() rounds rows. The number of outlier dimensions depends on values; here it is 0."""
    scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
    return rows.new_empty(rows.shape, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)


def _mixed_product(
    rows: Tensor, rounded: Tensor, weight: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return rows.new_empty(*rounded.shape[:-1], weight.shape[0]), rows.new_empty(0)


_META_RESULTS: dict[str, Any] = {
    # transformers checks whether positions restart within a sequence; they do not
    "aten::_local_scalar_dense": lambda tensor: True,
    "bitsandbytes::int8_vectorwise_quant": _no_outliers,
    "bitsandbytes::int8_mixed_scaled_mm": _mixed_product,
}
"""Results of operations that need values, on the meta device."""


class GpuKernels(TorchFunctionMode):
    """Make attention and dropout save the same tensors for the backward pass as on a GPU.

    On the meta device torch decomposes them, as on a CPU without fused kernels: scores would be saved, and dropout's mask in
    the dtype of the states. A GPU saves queries, keys, values, the output and one number per query; and one byte per mask
    element.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if func is functional.dropout:
            return _dropout(*args, **named)
        return func(*args, **named)


class CpuFlash(TorchFunctionMode):
    """Make attention save the tensors of the CPU flash kernel, which has no dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention and not named.get("dropout_p"):
            return _attention(*args, **{**named, "kernel": "cpu"})
        return func(*args, **named)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """Attention by `_FusedAttention`: on a GPU the flash kernel if possible (half precision, no mask), else memory-efficient."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = kernel or ("flash" if half and attn_mask is None else "efficient")
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1 and kernel != "flash":  # the efficient kernel needs a key for every head
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
        asked, width = query.shape[-2:]
        heads = query.shape[:-2]
        if ctx.kernel == "flash":
            # Gradients of queries are summed in float32, in tiles; those of shared keys for each head first.
            workspace.append(query.new_empty(*heads, _tiled(asked, 128), _tiled(width, 32), dtype=torch.float32))
            if query.shape[-3] != key.shape[-3]:
                workspace += [key.new_empty(*heads, key.shape[-2], width) for _ in range(2)]
        elif ctx.kernel == "efficient" and query.dtype != torch.float32:
            tile = 64 if width <= 64 else 128
            workspace.append(query.new_empty(*heads, _tiled(asked, tile), _tiled(width, tile), dtype=torch.float32))
        del workspace
        return (*made, None, None)


def _tiled(size: int, tile: int) -> int:
    return -(-size // tile) * tile


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
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    on_gpu: bool,
    gradients_before: bool = False,
) -> StepMemory:
    """Run a forward pass that keeps all graphs, and the backward pass, on the meta device.

    `gradients_before`: weights have gradients from an earlier micro-batch or batch.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    with ledger, _kernels(micro_batches, on_gpu=on_gpu):
        for parameter in trained if gradients_before else ():
            parameter.grad = torch.empty_like(parameter)
        rows_UD = torch.cat([model(**micro.inputs(META)) for micro in micro_batches])
        kept = ledger.live - sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        torch.autograd.backward((rows_UD * torch.empty_like(rows_UD)).sum())
    gradients = ledger.of_peak([parameter.grad for parameter in trained if parameter.grad is not None])
    for parameter in trained:
        parameter.grad = None
    return StepMemory(sum(micro.computed_tokens for micro in micro_batches), kept, ledger.peak, gradients)


def _kernels(micro_batches: Sequence[MicroBatch], *, on_gpu: bool) -> AbstractContextManager[Any]:
    """The attention kernels of the training step."""
    if on_gpu:
        return GpuKernels()
    longest = max(
        int(micro.trie.depth_1T.max()) + 1 if micro.trie is not None else micro.ids_BT.shape[1]
        for micro in micro_batches
    )
    return CpuFlash() if longest > fast_paths.PLAIN_ATTENTION_TOKENS else nullcontext()
