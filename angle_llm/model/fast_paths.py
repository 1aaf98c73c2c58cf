"""Fast paths that patch a library: each with its reason, its gain and the test that proves it equal.

Legend: B sequences, T tokens (any leading shape, flattened), D dimensions, R pooled positions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PLAIN_ATTENTION_TOKENS = 128
"""Longest text (tokens) for which a CPU attends without a fused kernel: its flash kernel is slower there (2x in bfloat16), and
faster from 256 tokens on, where plain attention also keeps the scores of every layer."""


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        hidden_TR = (x_TI @ lora_a.to(x.dtype).T).mul_(scaling)
        y_TO = torch.nn.functional.linear(x_TI, weight, bias).addmm_(hidden_TR, lora_b.to(x.dtype).T)
        ctx.save_for_backward(x, hidden_TR, weight, lora_a, lora_b)
        ctx.scaling = scaling
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden_TR, weight, lora_a, lora_b = ctx.saved_tensors
        x_TI, gradient_TO = x.flatten(0, -2), gradient.flatten(0, -2)
        gradient_TR = (gradient_TO @ lora_b.to(x.dtype)).mul_(ctx.scaling)
        gradient_b = (gradient_TO.T @ hidden_TR).to(lora_b.dtype)
        gradient_a = (gradient_TR.T @ x_TI).to(lora_a.dtype)
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = (gradient_TO @ weight).addmm_(gradient_TR, lora_a.to(x.dtype)).view_as(x)
        return gradient_x, None, None, gradient_a, gradient_b, None


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """The layer above: x (…, in), weight (out, in) and bias (out,) frozen, lora_a (rank, in), lora_b (out, rank).

    `x` has the weight's dtype, and all is computed in it; a wider adapter is rounded for its products alone, as autocast
    does, and gets its gradient, and keeps its value, in its own dtype. Has no second derivative.
    """
    y: Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, scaling)  # type: ignore[no-untyped-call]
    return y


def shorten(adapted: nn.Module) -> None:
    """Lets plain LoRA layers compute by `lora_linear`; all else about them stays peft's."""
    from peft.tuners.lora.layer import Linear

    for layer in adapted.modules():
        if type(layer) is Linear:
            layer.__class__ = _short_linear()  # type: ignore[assignment]


def _has_own_ways(layer: nn.Module) -> bool:
    """Whether somebody has hooked into its call or replaced it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@cache
def _short_linear() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class ShortLinear(Linear):
        """peft's layer, by the shorter way where nothing but plain LoRA is asked for."""

        def forward(self, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            base: Any = self.base_layer
            active = self.active_adapters
            plain = (
                not (args or named or self.disable_adapters or self.merged)
                and len(active) == 1
                and active[0] in self.lora_A
                and active[0] not in self.lora_variant
                and self.lora_B[active[0]].bias is None
                and type(base) is nn.Linear
                and not _has_own_ways(base)
                and not base.weight.requires_grad
                and not hasattr(base.weight, "ds_id")  # ZeRO-3 gathers a layer's weights when the layer is called
                and x.dtype == base.weight.dtype
                and not _autocasts(x.device.type)
                and not (self.training and isinstance(self.lora_dropout[active[0]], nn.Dropout))
            )
            if not plain:
                result: torch.Tensor = super().forward(x, *args, **named)
                return result
            lora_a: Any = self.lora_A[active[0]]
            lora_b: Any = self.lora_B[active[0]]
            return lora_linear(x, base.weight, base.bias, lora_a.weight, lora_b.weight, self.scaling[active[0]])

    return ShortLinear


_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class PooledLastLayer:
    """Makes a backbone return rows (R, D) in place of states (B, T, D), while `pooled` is in force.

    For decoders whose layers are *norm, attention, add, norm, MLP, add* (LLaMA, Mistral, Qwen, …); `find` asks the
    backbone whether it is one, and compares states.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @classmethod
    def find(cls, backbone: nn.Module) -> PooledLastLayer | None:
        """The last layer of the backbone, or None if it has another form."""
        layers = getattr(backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList) or {name for name, _ in layers[-1].named_children()} != _PARTS:
            return None
        if not isinstance(getattr(layers[-1].self_attn, "o_proj", None), nn.Linear) or "forward" in vars(layers[-1]):
            return None  # a forward of its own: somebody, such as accelerate's hooks, has wrapped the layer
        last = cls(layers[-1])
        return last if last._agrees(backbone) else None

    @contextmanager
    def pooled(self, end_R: Tensor) -> Iterator[None]:
        """Within this, the layer goes on with the positions `end_R` of the flattened B × T alone."""
        self._layer.forward = lambda states_BTD, **named: self._pooled_forward(states_BTD, end_R, named)
        try:
            yield
        finally:
            del self._layer.forward  # the class's own shows again

    def _pooled_forward(self, states_BTD: Tensor, end_R: Tensor, named: dict[str, Any]) -> Tensor:
        layer = self._layer
        # After the hook attention's last step sees the pooled rows only, and returns (R, D).
        hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[end_R],))
        try:
            attended_RD, _ = layer.self_attn(hidden_states=layer.input_layernorm(states_BTD), **named)
        finally:
            hook.remove()
        middle_RD = states_BTD.flatten(0, 1)[end_R] + attended_RD
        rows_RD: Tensor = middle_RD + layer.mlp(layer.post_attention_layernorm(middle_RD))
        return rows_RD

    @torch.no_grad()
    def _agrees(self, backbone: nn.Module) -> bool:
        """Layers of the same parts may put them together otherwise (Granite scales what it adds)."""
        ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=next(backbone.parameters()).device)
        end_R = torch.tensor([2, 7], device=ids_BT.device)
        was_training = backbone.training
        backbone.eval()
        try:
            with self.pooled(end_R):
                rows_RD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
            states_BTD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        except Exception:  # an architecture that is put together otherwise may fail in any way
            return False
        finally:
            backbone.train(was_training)
        if rows_RD.shape != (2, states_BTD.shape[-1]):
            return False
        similarity_R = torch.cosine_similarity(rows_RD.cpu().double(), states_BTD.flatten(0, 1)[end_R].cpu().double())
        # The sums are the same ones, of fewer rows; half precision rounds them to three digits.
        half = states_BTD.dtype in (torch.float16, torch.bfloat16)
        return bool((1 - similarity_R).max() < (1e-3 if half else 1e-6))


_BITS_OF_LAYER = {"Linear4bit": 4, "LinearNF4": 4, "LinearFP4": 4, "Linear8bitLt": 8}
"""By the names of bitsandbytes' classes, so that asking does not import it."""


def mend(model: nn.Module) -> None:
    """Makes quantized layers, however they came, ones that can be trained on; before their first forward pass.

    Of bitsandbytes 0.50.2, on a CPU with AVX512-BF16: a forward pass of a 4-bit layer in evaluation repacks its weights for a
    kernel without a backward pass, which later training steps then take, with wrong gradients and without a word.

    And an 8-bit layer keeps its scales in an object that does not move to another device with the layer, and that loses them
    when the weight is put in its place again (as peft does for DoRA on a CPU).
    """
    for layer in model.modules():
        held: Any = layer
        if bits_of_layer(layer) == 4:
            held.support_avx512bf16_for_cpu = False
        elif bits_of_layer(layer) == 8 and not hasattr(layer, "scale_O"):
            scale_O = held.state.SCB if held.weight.SCB is None else held.weight.SCB  # in the state once it has run
            held.register_buffer("scale_O", scale_O, persistent=False)
            held.register_forward_pre_hook(_give_scale)


def _give_scale(layer: Any, _: object) -> None:
    layer.state.CB, layer.state.SCB = layer.weight.data, layer.scale_O.float()
    layer.weight.CB = layer.weight.SCB = None


def bits_of_layer(layer: nn.Module) -> int | None:
    # peft's wrappers have the same names, and are no linear layers themselves.
    return _BITS_OF_LAYER.get(type(layer).__name__) if isinstance(layer, nn.Linear) else None


_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own, and oneDNN's below it

_KERNELS_KEPT = 128

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h

_KEPT = 1 << 30

# Where glibc's own adjusting ends once a process has freed a block of 32 MiB. Saying one threshold ends that adjusting for
# good, so these are what it is left with.
_USUAL_MMAP = 32 << 20

_USUAL_TRIM = 2 * _USUAL_MMAP


def bound_kernel_caches() -> None:
    """Has torch keep 128 of oneDNN's kernels in place of 1,024 in each of its caches; must come before the first product in
    bfloat16.

    Each size of a micro-batch needs kernels of its own, 5 to 13 MiB of them seen, and a large batch has as many sizes as
    micro-batches: memory grew with the batch (docs/history, "Where a cached step's memory went"). All layers share the kernels
    of a size. Variables of the environment that are set already stay. On x86 only, where it was looked at.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        for name in _KERNEL_CACHES:
            os.environ.setdefault(name, str(_KERNELS_KEPT))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this, up to 1 GiB of freed memory is used again rather than given back to the system. After it, some later
    `free` gives all of it back, once more than 64 MiB are free.

    Else glibc gives the top of its heap back as soon as some MiB of it are free. A layer's temporaries are tens of MiB, so
    they came back page by page, emptied by the kernel: an eighth of the time of encoding with SmolLM2 in float32
    (docs/history). This is a setting of the process: it helps in the main thread, whose heap it is; the first of two that
    are within to leave ends it for both. Nothing is done without glibc, nor where its own variables have set it up.
    """
    mallopt = _mallopt()
    if (
        mallopt is None
        or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") for name in os.environ)
    ):
        yield
        return
    if not mallopt(_MMAP_THRESHOLD, _KEPT):  # an older glibc takes no more than 32 MiB
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """glibc's, or None where there is none."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
