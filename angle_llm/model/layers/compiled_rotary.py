"""Rotary position embeddings of attention layers as one compiled kernel on a GPU.

The function `apply_rotary_pos_emb` of transformers computes products, sums and copies of queries and keys one after another.
Compiled, each pass reads and writes queries and keys once. In a replaced attention layer the forward method is the same
code, in which this name refers to the compiled function. Other models of the process do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.device import compiled_if_equal
from angle_llm.model.layers.fused_lora import are_plain

_ROTATE = "apply_rotary_pos_emb"


class CompiledRotary(nn.Module):
    """Mixin that marks attention layers with compiled rotary position embeddings."""


def use_compiled_rotary(adapted: nn.Module, backend: str = "inductor") -> None:
    """Compile the rotary position embeddings of a backbone on a GPU, by changing the class of its attention layers in place.

    A layer is changed if the compiled function has the values and gradients of the original for texts in one sequence.
    `backend` is the backend of torch.compile; other backends than inductor are used on a CPU, too.
    """
    weight = next(adapted.parameters())
    if are_plain() or (weight.device.type != "cuda" and backend == "inductor"):
        return
    for layer in adapted.modules():
        layer_class: Any = type(layer)
        rotate, sizes = _rotation(layer_class), _sizes(layer)
        if rotate is not None and sizes is not None and "forward" not in vars(layer):
            compiled = _compiled(rotate, sizes, weight.dtype, weight.device, backend)
            if compiled is not rotate:
                layer.__class__ = _compiled_class(layer_class, compiled)


def _rotation(layer_class: Any) -> Callable[..., Any] | None:
    """Return the function of (q, k, cos, sin) that the forward method of a layer class calls; None if it calls none."""
    forward = inspect.unwrap(layer_class.forward)  # transformers 5.24 decorates it, to rename an argument
    if issubclass(layer_class, CompiledRotary) or not isinstance(forward, FunctionType):
        return None
    rotate = forward.__globals__.get(_ROTATE) if _ROTATE in forward.__code__.co_names else None
    known = rotate is not None and list(inspect.signature(rotate).parameters)[:4] == ["q", "k", "cos", "sin"]
    return rotate if known else None


def _sizes(layer: Any) -> tuple[int, int, int] | None:
    """Return the numbers of heads, key-value heads and dimensions of a head; None for layers without these projections."""
    query, key, width = (getattr(layer, name, None) for name in ("q_proj", "k_proj", "head_dim"))
    return (query.out_features // width, key.out_features // width, width) if query and key and width else None


@cache
def _compiled(
    rotate: Callable[..., Any], sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: str
) -> Callable[..., Any]:
    """Compile a rotary position embedding for texts of any length; return it unchanged if the results are not equal.

    For the first length, torch compiles the function for this length; for the second length, for any length. With the
    backend inductor, tensors on a CPU are passed to the original function.
    """
    # transformers rounds every product and sum, the kernel only the result.
    tolerance = 4 * torch.finfo(dtype).eps
    results = partial(_results, sizes, dtype, device)
    compiled = compiled_if_equal("rotary position embeddings are", rotate, results, tolerance, backend=backend)

    def call(query: Tensor, *others: Any, **named: Any) -> Any:
        used = compiled if query.is_cuda or backend != "inductor" else rotate  # the model may have moved to the CPU
        return used(query, *others, **named)

    return rotate if compiled is rotate else call


@cache
def _compiled_class(layer_class: Any, compiled: Callable[..., Any]) -> Any:
    """Return a subclass of an attention class, with the same name, whose forward method calls the compiled function."""
    forward = inspect.unwrap(layer_class.forward)
    names = {**forward.__globals__, _ROTATE: compiled}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return type(layer_class.__name__, (CompiledRotary, layer_class), {"forward": copied})


def _results(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, function: Callable[..., Any]
) -> Iterator[Tensor]:
    """Yield rotated queries and keys for two lengths, first without, then with their gradients, by a function to compare."""
    *head_counts, width = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    for trained, tokens in product((False, True), (256, 384)):
        leaves = [draw(tokens, count * width).requires_grad_(trained) for count in head_counts]
        upstream = [draw(1, count, tokens, width) for count in head_counts]
        angle_1TS = draw(1, tokens, width // 2).repeat(1, 1, 2)
        with torch.set_grad_enabled(trained):
            # Views, as attention layers compute them.
            states = [leaf.view(1, tokens, -1, width).transpose(1, 2) for leaf in leaves]
            rotated = function(*states, angle_1TS.cos(), angle_1TS.sin())
            slopes = torch.autograd.grad(rotated, leaves, upstream) if trained else ()
        yield from (tensor.detach() for tensor in (*rotated, *slopes))
