"""Rotary position embeddings of attention layers as one kernel on a GPU.

transformers rotates queries and keys with a function `apply_rotary_pos_emb`, in about 30 passes over memory with the backward
pass. torch.compile makes one kernel of each pass. The forward method of an attention layer is kept; only the name of
this function refers to the compiled function. Other models in the process do not change.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from angle_llm.io import log
from angle_llm.model.layers.fused_lora import are_plain
from angle_llm.model.memory.out_of_memory import is_out_of_memory
from angle_llm.model.source.checks import relative_difference

_ROTATE = "apply_rotary_pos_emb"


class CompiledRotary(nn.Module):
    """Mark of attention layers whose rotary position embeddings are computed by a compiled function."""


def use_compiled_rotary(adapted: nn.Module, backend: Any = "inductor") -> None:
    """Make the attention layers of a backbone on a GPU use compiled rotary embeddings, by changing their class in place.

    A layer is changed if the compiled function gives equal values and gradients for its heads and dtype. `backend` is the
    backend of torch.compile; another than the default is used on a CPU, too.
    """
    weight = next(adapted.parameters())
    if are_plain() or torch._dynamo.config.disable or (weight.device.type != "cuda" and backend == "inductor"):
        return
    for layer in adapted.modules():
        forward: Any = type(layer).forward
        if isinstance(forward, FunctionType) and _ROTATE in forward.__code__.co_names and "forward" not in vars(layer):
            original = forward.__globals__[_ROTATE]
            sizes = _sizes(layer)
            if sizes is not None and not _problem(original, sizes, weight.dtype, weight.device, backend):
                layer.__class__ = _compiled_class(type(layer), backend)


@cache
def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return a function that is compiled for all lengths and batches. A call that torch cannot compile runs as it is."""
    return torch._dynamo.config.patch(recompile_limit=64)(torch.compile(function, backend=backend))


@cache
def _compiled_class(kind: Any, backend: Any) -> Any:
    """Return a subclass of an attention class, with the same name, whose forward method calls the compiled function."""
    forward = kind.forward
    names = {**forward.__globals__, _ROTATE: compiled(forward.__globals__[_ROTATE], backend)}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = copy.copy(forward.__kwdefaults__)
    return type(kind.__name__, (CompiledRotary, kind), {"forward": copied})


def _sizes(layer: Any) -> tuple[int, int, int] | None:
    """Return the numbers of heads, of key-value heads and of dimensions of a head; None if the config lacks them."""
    config = getattr(layer, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(layer, "head_dim", None)
    return (heads, getattr(config, "num_key_value_heads", None) or heads, width) if heads and width else None


@cache
def _problem(
    function: Callable[..., Any], sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: Any
) -> str | None:
    """Compare a function with the compiled function on a device; return why it cannot be used, or None if equal.

    Forward and backward passes run for two lengths, with which torch compiles for all lengths, without and with gradients.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler are no failure
            worst = max(
                _difference(function, sizes, dtype, device, backend, tokens, trained)
                for trained in (False, True)
                for tokens in (256, 384)
            )
    except Exception as error:  # compilers and drivers can fail in any way
        if is_out_of_memory(error):  # an exception is not cached
            raise
        problem: str | None = f"{type(error).__name__}: {error!s:.300}"
    else:
        # The compiled function rounds once, and transformers rounds every product and sum.
        problem = None if worst <= 4 * torch.finfo(dtype).eps else f"its results differ by {worst:.1e}"
    if problem is not None:
        log(f"warning: rotary embeddings are not compiled: {problem}")
    return problem


def _difference(
    function: Callable[..., Any],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    backend: Any,
    tokens: int,
    trained: bool,
) -> float:
    """Return the largest relative difference of values and gradients between a function and the compiled function."""
    *heads, width = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    # Views of (1, T, H, S), as attention layers compute them.
    states = [draw(1, tokens, count, width).transpose(1, 2).requires_grad_(trained) for count in heads]
    upstream = [draw(1, count, tokens, width) for count in heads]
    angles = draw(1, tokens, width // 2).repeat(1, 1, 2)
    results = []
    with torch.set_grad_enabled(trained):
        for rotate in (function, compiled(function, backend)):
            rotated = rotate(*states, angles.cos(), angles.sin())
            slopes = torch.autograd.grad(rotated, states, upstream) if trained else ()
            results.append([one.detach() for one in (*rotated, *slopes)])
    return max(relative_difference(one, other) for one, other in zip(*results, strict=True))
