"""The memory of operations: every storage they make is counted while it lives.

It works on any device, and so on torch's `meta` device, where tensors have shapes but neither values nor memory: what is
counted there is what the same operations would allocate elsewhere. What an operation allocates within itself and frees
again is not seen, except where `GpuKernels` says how much that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

GRANULE = 512
"""Bytes: what torch's allocator for GPUs rounds up to."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Within it, bytes that operations make are counted: those alive now, and the most there were at once.

    What exists before is not counted; tensors of the model are given as `held`, for operations return views of them.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        """Bytes alive."""
        self.peak: int = 0
        """The most bytes that were alive at once."""
        self._events = 0
        self._peak_event = 0
        self._born: Any = WeakIdKeyDictionary()
        for tensor in held:
            self._born[tensor.untyped_storage()] = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func.name())
        known = answer is not None and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in args)
        result = answer(*args) if known and answer is not None else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def of_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors that were there when most was."""
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values()
        return sum(_rounded(storage) for storage in storages if 0 <= self._born.get(storage, -1) <= self._peak_event)

    def _count(self, storage: Any) -> None:
        if storage in self._born:
            return
        self._events += 1
        self._born[storage] = self._events
        size = _rounded(storage)
        self.live += size
        weakref.finalize(storage, self._forget, size)
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, self._events

    def _forget(self, size: int) -> None:
        self.live -= size


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // GRANULE) * GRANULE


def _no_outliers(rows: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """LLM.int8() rounds rows; how many dimensions hold outliers only values tell. Here, none do."""
    scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
    return rows.new_empty(rows.shape, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)


def _mixed_product(
    rows: Tensor, rounded: Tensor, weight: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return rows.new_empty(*rounded.shape[:-1], weight.shape[0]), rows.new_empty(0)


_ANSWERS: dict[str, Any] = {
    # transformers asks whether positions begin anew within a sequence: as (all equal?), and here they do not
    "aten::_local_scalar_dense": lambda tensor: True,
    "bitsandbytes::int8_vectorwise_quant": _no_outliers,
    "bitsandbytes::int8_mixed_scaled_mm": _mixed_product,
}
"""What operations that need values answer where there are none."""


class GpuKernels(TorchFunctionMode):
    """Within it, attention and dropout keep for the backward pass what they keep on a GPU.

    On the meta device torch takes them apart, as on a CPU without fused kernels: scores would be kept, and dropout's mask
    in the states' dtype. A GPU keeps queries, keys, values, the answer and one number a query; and a byte for a mask.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if func is functional.dropout:
            return _dropout(*args, **named)
        return func(*args, **named)


class CpuFlash(TorchFunctionMode):
    """Within it, attention keeps what the CPU's flash kernel keeps, which does no dropout."""

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
    """A kernel of `_FusedAttention`; on a GPU flash attention where it is possible (half precision, no mask), memory-efficient
    attention elsewhere."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = kernel or ("flash" if half and attn_mask is None else "efficient")
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1 and kernel != "flash":  # the efficient kernel wants a key for every head
        key, value = (states.repeat_interleave(repeats, dim=-3) for states in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    answer: Tensor = _FusedAttention.apply(query, key, value, attn_mask, kernel)  # type: ignore[no-untyped-call]
    return answer


class _FusedAttention(torch.autograd.Function):
    """Allocates as a fused kernel does; shapes (…, H, Q, S), (…, K, L, S)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
        answer = torch.empty_like(query)
        per_query = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, answer, per_query)
        ctx.kernel = kernel
        return answer

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
