"""Rotary position embeddings of attention layers as one compiled kernel on a GPU.

The function `apply_rotary_pos_emb` of transformers reads and writes queries and keys about 30 times, with the backward pass.
Compiled, it reads and writes them once in each pass. In a replaced attention layer the forward method is the same code,
in which this name refers to the compiled function. Other models of the process do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from angle_llm.io import log
from angle_llm.model.layers.fused_lora import are_plain
from angle_llm.model.source.checks import relative_difference, trial_problem

_ROTATE = "apply_rotary_pos_emb"


class CompiledRotary(nn.Module):
    """Mixin that marks attention layers with compiled rotary position embeddings."""


def use_compiled_rotary(adapted: nn.Module, backend: str = "inductor") -> None:
    """Compile the rotary position embeddings of a backbone on a GPU, by changing the class of its attention layers in place.

    A layer is changed if the compiled function has the values and gradients of the original for its heads and dtype.
    `backend` is the backend of torch.compile; other backends than inductor are used on a CPU, too.
    """
    weight = next(adapted.parameters())
    if are_plain() or torch._dynamo.config.disable or (weight.device.type != "cuda" and backend == "inductor"):
        return
    for layer in adapted.modules():
        kind: Any = type(layer)
        forward, config = kind.forward, getattr(layer, "config", None)
        sizes = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
        sizes += [getattr(layer, "head_dim", None)]
        replaced = isinstance(layer, CompiledRotary) or "forward" in vars(layer)
        if isinstance(forward, FunctionType) and _ROTATE in forward.__code__.co_names and all(sizes) and not replaced:
            rotate = forward.__globals__[_ROTATE]
            if _problem(rotate, tuple(sizes), weight.dtype, weight.device, backend) is None:
                layer.__class__ = _compiled_class(kind, backend)


def use_plain_rotary(adapted: nn.Module) -> None:
    """Give the layers that `use_compiled_rotary` changed their original class again."""
    for layer in adapted.modules():
        if isinstance(layer, CompiledRotary):
            layer.__class__ = type(layer).__bases__[1]


@cache
def _compiled(rotate: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a compiled function. torch compiles it for any length; a call that it cannot compile runs as it is."""
    compiled: Callable[..., Any] = torch._dynamo.config.patch(recompile_limit=64)(
        torch.compile(rotate, backend=backend)
    )
    return compiled


@cache
def _compiled_class(kind: Any, backend: str) -> Any:
    """Return a subclass of an attention class, with the same name, whose forward method calls the compiled function."""
    forward = kind.forward
    names = {**forward.__globals__, _ROTATE: _compiled(forward.__globals__[_ROTATE], backend)}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (CompiledRotary, kind), {"forward": copied})


@cache
def _problem(
    rotate: Callable[..., Any], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, backend: str
) -> str | None:
    """Compare a function with the compiled function, and return why it cannot be used; None if the results are equal.

    Without and with gradients, torch compiles at the second length for all lengths.
    """
    cases = [(trained, tokens) for trained in (False, True) for tokens in (256, 384)]
    found = (_difference(rotate, sizes, dtype, device, backend, *case) for case in cases)
    # transformers rounds every product and sum, the kernel only the result.
    problem = trial_problem(found, 4 * torch.finfo(dtype).eps)
    if problem is not None:
        log(f"warning: rotary position embeddings are not compiled: {problem}")
    return problem


def _difference(
    rotate: Callable[..., Any],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    trained: bool,
    tokens: int,
) -> float:
    """Return the largest relative difference of values, and of gradients if `trained`, between both functions."""
    *heads, width = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    leaves = [draw(tokens, count * width).requires_grad_(trained) for count in heads]
    upstream = [draw(1, count, tokens, width) for count in heads]
    angle_1TS = draw(1, tokens, width // 2).repeat(1, 1, 2)
    results = []
    with torch.set_grad_enabled(trained):
        for function in (_compiled(rotate, backend), rotate):
            # Views, as attention layers compute them.
            states = [leaf.view(1, tokens, -1, width).transpose(1, 2) for leaf in leaves]
            rotated = function(*states, angle_1TS.cos(), angle_1TS.sin())
            slopes = torch.autograd.grad(rotated, leaves, upstream) if trained else ()
            results.append([one.detach() for one in (*rotated, *slopes)])
    return max(relative_difference(one, other) for one, other in zip(*results, strict=True))
