"""Memory of the forward and backward passes of a training step, counted without weights.

`count_passes` runs a model on torch's `meta` device (see `model/meta_model`), where tensors have shapes but no values.
`MemoryLedger` counts the storages that operations allocate, as long as they exist. Temporary memory inside an operation is
not counted, except in attention, which `FusedKernels` replaces by an operation with the memory of a fused kernel.
`Autocast` has the dtypes of autocast.

Legend: attention: H heads, K key-value heads, Q queries, L keys, S dimensions of a head.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layout import attention
from angle_llm.model.layout.micro_batches import MicroBatch

META = torch.device("meta")
GRANULE = 512
"""Granularity in bytes: torch's GPU allocator rounds sizes up to a multiple of it."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Count the bytes of tensors that operations allocate inside this context, as `live` (now) and `peak`.

    Tensors that exist before are not counted. Pass the weights of the model and their gradients as `held`, because
    operations return views of them.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self.ignores_new = False
        """Whether new tensors are not counted."""
        self._counted: Any = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in held})
        """Keys: storages that are counted already, or held."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            # transformers checks whether positions restart within a sequence; here they do not.
            return True
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._counted:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        """Add a new storage to the live bytes until it is freed, unless `ignores_new` is set."""
        self._counted[storage] = True
        if self.ignores_new:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size


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


_HALF: set[Any] = {
    functional.linear, functional.conv1d, functional.scaled_dot_product_attention, torch.matmul, torch.bmm, torch.addmm,
    torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__,
}  # fmt: skip
"""Functions that autocast computes in bfloat16."""
_FLOAT32: set[Any] = {
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.softplus,
    torch.softmax, torch.pow, torch.exp, torch.rsqrt, torch.cumsum, torch.Tensor.softmax, torch.Tensor.pow,
    torch.Tensor.__pow__, torch.Tensor.exp, torch.Tensor.cumsum,
}  # fmt: skip
"""Functions that autocast computes in float32 on a GPU."""


class Autocast(TorchFunctionMode):
    """Context with the dtypes of autocast to bfloat16, which torch does not support on the meta device.

    The copies of weights are not counted.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = torch.bfloat16 if func in _HALF else torch.float32 if func in _FLOAT32 else None
        if dtype is None:
            return func(*args, **(kwargs or {}))
        args, named = tree_map_only(Tensor, lambda tensor: self._cast(tensor, dtype), (args, kwargs or {}))
        return func(*args, **named)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a floating-point tensor in `dtype`; other tensors are not changed."""
        self._ledger.ignores_new = isinstance(tensor, nn.Parameter)
        try:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor
        finally:
            self._ledger.ignores_new = False


def _gpu_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return dropout as a GPU computes it: it saves a mask with a byte per element. Arguments as in `dropout`."""
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if training and p else input
    return dropped


def _attention(
    on_gpu: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Return attention with the memory of a fused kernel; arguments as for `scaled_dot_product_attention`.

    A GPU uses flash attention for half precision without a mask. All other kernels need a key for every head.
    """
    flash = on_gpu and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1 and not flash:
        key, value = (states.repeat_interleave(repeats, dim=-3) for states in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: Tensor = _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return output


class _FusedAttention(torch.autograd.Function):
    """Attention that allocates and saves the tensors of a fused kernel, without the workspace of its backward pass.

    Query (…, H, Q, S); key and value (…, K, L, S).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        per_query = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, per_query)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _backward(scalar: Tensor) -> None:
    """Back-propagate from a scalar with `FusedKernels` active in layers that activation checkpointing runs again.

    `torch.autograd.backward` is a torch function, and `TorchFunctionMode` is disabled inside torch functions. So this
    calls the autograd engine.
    """
    engine: Any = Variable._execution_engine
    engine.run_backward((scalar,), (torch.ones_like(scalar),), False, False, (), True, True)


class PassMemory(NamedTuple):
    """Bytes that the forward and backward passes of a micro-batch need, without weights and their gradients."""

    kept: int
    """Bytes that the forward pass saves for the backward pass."""
    peak: int
    """Peak bytes in both passes."""


def count_passes(
    model: EmbeddingModel, micro_batch: MicroBatch, *, on_gpu: bool, autocasts: bool = False
) -> PassMemory:
    """Run the forward and backward passes of a micro-batch on the meta device, and count their memory.

    Args:
        model: a model on the meta device. Its weights get gradients, which are not counted.
        on_gpu: count as on a GPU, where attention is a fused kernel.
        autocasts: count as under autocast to bfloat16, without the copies of weights.
    """
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
    ledger = MemoryLedger([*model.parameters(), *model.buffers(), *gradients])
    fused = on_gpu or micro_batch.longest_text > attention.PLAIN_ATTENTION_TOKENS
    kernels = FusedKernels(on_gpu=on_gpu) if fused else nullcontext()
    with ledger, kernels, Autocast(ledger) if autocasts else nullcontext():
        rows_RD = model(**micro_batch.inputs(META))
        kept = ledger.live
        _backward((rows_RD * torch.empty_like(rows_RD)).sum())
    return PassMemory(kept, ledger.peak)
