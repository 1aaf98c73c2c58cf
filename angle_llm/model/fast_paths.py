"""Fast paths that patch a library, each with its reason, measured gain, and the test that proves it equal.

use_short_lora        (`lora_product`) LoRA layers of peft in fewer passes over memory, also with dropout and on a
                      quantized base. SmolLM2, CPU: float32 229 to 243 tokens/s, bfloat16 306 to 401; in bfloat16 with
                      dropout 1.19x and 0.53 of the peak memory, on 4 bits 1.10x and 0.67, on 8 bits 1.25x and 0.58.
keep_fewer_activations  (`kept_activations`) norms and MLPs beside LoRA layers that keep fewer activations. LLaMA-7B on
                      the meta device, gathered keys: 6.00 to 4.13 MB a token (dropout 0.1, from peft: 10.13 to 5.24).
                      SmolLM2, CPU, bfloat16: 0.70 of the peak memory, equal time. On a GPU, a norm is one kernel of
                      torch instead of six (by reading; not measured).
PooledLastLayer       last layer of a decoder for pooled positions only. 2.5 % fewer operations at 30 layers.
attention_kernels     attention of short texts on a CPU without a fused kernel: up to 2x in bfloat16. On a GPU without
                      cuDNN: torch prefers it on Hopper, and it plans again for each shape (by reading; not measured).
patch_bitsandbytes    quantized layers that train correctly after an evaluation.
bound_kernel_caches   fewer oneDNN kernels in memory. Peak of a step of 4,096 triples: 4,338 to 3,168 MiB.
keep_freed_memory     no page faults for temporaries. 12 % of the time of encoding in float32 on a CPU.

Tests: `tests/model/test_fast_paths.py`, for attention `tests/train/test_step.py`, for bitsandbytes
`tests/model/test_quantization.py`. Measurements: docs/LOG.md and docs/history.

Legend: B sequences, T tokens (any leading shape, flattened), D dimensions, R pooled positions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from angle_llm.model.checks import evaluating, relative_difference

PLAIN_ATTENTION_TOKENS = 128
"""Longest text (tokens) for which a CPU attends without a fused kernel: its flash kernel is slower there (2x in
bfloat16), and faster from 256 tokens on, where plain attention also keeps the scores of every layer."""

_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN: its plans are cached by exact shape, in an unbounded cache, and micro-batches have many shapes."""


def attention_kernels(device: torch.device, longest_text: int | None = None) -> AbstractContextManager[None]:
    """Return a context that selects the kernels of attention; `longest_text` (tokens) is that of a training step."""
    if device.type != "cpu":
        return sdpa_kernel(_GPU_KERNELS)
    plain = longest_text is not None and longest_text <= PLAIN_ATTENTION_TOKENS
    return sdpa_kernel(SDPBackend.MATH) if plain else nullcontext()


_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class PooledLastLayer:
    """Makes a backbone return rows (R, D) instead of states (B, T, D), inside `pooled`.

    Last-token pooling reads one state per text. After the keys and values of the last layer, which need every token,
    its output projection, MLP and the final norm run on R rows, not B × T. For decoders whose layers are *norm,
    attention, add, norm, MLP, add* (LLaMA, Mistral, Qwen, …); `find` compares states with those of the unchanged
    backbone.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @classmethod
    def find(cls, backbone: nn.Module) -> PooledLastLayer | None:
        """Return the last layer of a backbone, None if it has another form."""
        layers = getattr(backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList) or {name for name, _ in layers[-1].named_children()} != _LAYER_PARTS:
            return None
        if not isinstance(getattr(layers[-1].self_attn, "o_proj", None), nn.Linear) or "forward" in vars(layers[-1]):
            return None  # a forward of its own: a library, such as accelerate, has wrapped the layer
        last = cls(layers[-1])
        return last if last._is_equal(backbone) else None

    @contextmanager
    def pooled(self, end_R: Tensor) -> Iterator[None]:
        """Compute the layer only at the positions `end_R` of the flattened B × T."""
        self._layer.forward = lambda states_BTD, **named: self._pooled_forward(states_BTD, end_R, named)
        try:
            yield
        finally:
            del self._layer.forward  # back to the class's own

    def _pooled_forward(self, states_BTD: Tensor, end_R: Tensor, named: dict[str, Any]) -> Tensor:
        layer = self._layer
        # With the hook, the last step of attention gets the pooled rows only, and returns (R, D).
        hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[end_R],))
        try:
            attended_RD, _ = layer.self_attn(hidden_states=layer.input_layernorm(states_BTD), **named)
        finally:
            hook.remove()
        middle_RD = states_BTD.flatten(0, 1)[end_R] + attended_RD
        rows_RD: Tensor = middle_RD + layer.mlp(layer.post_attention_layernorm(middle_RD))
        return rows_RD

    def _is_equal(self, backbone: nn.Module) -> bool:
        """Return whether states are equal: layers can combine the same parts differently (Granite scales sums)."""
        try:
            with evaluating(backbone) as device:
                ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=device)
                end_R = torch.tensor([2, 7], device=device)
                with self.pooled(end_R):
                    rows_RD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
                states_BTD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        except Exception:  # another architecture can fail in any way
            return False
        # The same sums for fewer rows; half precision rounds them to three digits.
        tolerance = 4e-2 if states_BTD.dtype.itemsize == 2 else 1e-3
        return relative_difference(rows_RD, states_BTD.flatten(0, 1)[end_R]) < tolerance


_BITS_BY_CLASS = {"Linear4bit": 4, "LinearNF4": 4, "LinearFP4": 4, "Linear8bitLt": 8}
"""Of bitsandbytes, by name: no import is needed."""


def bits_of_layer(layer: nn.Module) -> int | None:
    """Return the bits of a quantized layer, None for any other."""
    # The wrappers of peft have the same names, but are not linear layers.
    return _BITS_BY_CLASS.get(type(layer).__name__) if isinstance(layer, nn.Linear) else None


def patch_bitsandbytes(model: nn.Module) -> None:
    """Make quantized layers train correctly; call it before their first forward pass.

    bitsandbytes 0.50.2 on a CPU with AVX512-BF16: a forward pass of a 4-bit layer in evaluation repacks its weights for
    a kernel without a backward pass. Later training steps use that kernel, with wrong gradients and no error.

    An 8-bit layer keeps its scales in an object that does not move to another device with the layer, and loses them
    when its weight is set again (as peft does for DoRA on a CPU).
    """
    for layer in model.modules():
        held: Any = layer
        if bits_of_layer(layer) == 4:
            held.support_avx512bf16_for_cpu = False
        elif bits_of_layer(layer) == 8 and not hasattr(layer, "scale_O"):
            scale_O = (
                held.state.SCB if held.weight.SCB is None else held.weight.SCB
            )  # in the state after a forward pass
            held.register_buffer("scale_O", scale_O, persistent=False)
            held.register_forward_pre_hook(set_scale)


def set_scale(layer: Any, _: object) -> None:
    """Hook before the forward pass of an 8-bit layer: set the scales of its products."""
    layer.state.CB, layer.state.SCB = layer.weight.data, layer.scale_O.float()
    layer.weight.CB = layer.weight.SCB = None


def bound_kernel_caches() -> None:
    """Limit two caches of oneDNN kernels, of torch and of oneDNN, to 128 kernels each instead of 1,024; x86 only.

    Each size of a micro-batch needs kernels of its own, 5 to 13 MiB, so memory grows with the batch. All layers share
    the kernels of a size. Variables of the environment that are already set stay. Call it before the first product in
    bfloat16.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
            os.environ.setdefault(name, "128")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT = 1 << 30
# The limits that glibc's own adjustment reaches once a process has freed a block of 32 MiB; setting one ends the
# adjustment.
_USUAL_MMAP = 32 << 20
_USUAL_TRIM = 2 * _USUAL_MMAP


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Reuse up to 1 GiB of freed memory instead of returning it to the system; afterwards, glibc's usual limits hold.

    By default glibc returns the top of its heap at some MiB. The temporaries of a layer are tens of MiB, so the kernel
    would map them again page by page. This is a setting of the process: it has an effect in the main thread, and the
    first of two concurrent contexts to exit ends it for both. No effect without glibc, or where its own variables are
    set.
    """
    mallopt = _mallopt()
    own = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is None or own:
        yield
        return
    if not mallopt(_MMAP_THRESHOLD, _KEPT):  # an older glibc accepts at most 32 MiB
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """Return `mallopt` of glibc, None without it."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
