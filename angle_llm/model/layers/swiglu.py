"""SwiGLU, silu(gate) · up, and its gradient: each is one compiled kernel on a GPU, and saves only `gate` and `up`.

torch computes them in seven kernels, which read and write 19 matrices (tokens, intermediate size) instead of nine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from angle_llm.device import largest, relative_difference, trial_problem
from angle_llm.io import log


def _compiled_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes tensors on a GPU by the compiled form of `function`, if its results are equal."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        gate = arguments[0]
        used = _compiled(function) if gate.is_cuda and _problem(gate.dtype, gate.device) is None else function
        return used(*arguments)

    return call


@_compiled_on_gpu
def product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, without a graph."""
    return functional.silu(gate).mul_(up)


@_compiled_on_gpu
def slopes(gate: Tensor, up: Tensor, gradient: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of silu(gate) · up with respect to `gate` and `up`, for an upstream `gradient`.

    The third value is the product itself, or None if not `with_product`.
    """
    silu = functional.silu(gate)
    value = silu * up if with_product else None
    return torch.ops.aten.silu_backward(gradient * up, gate), silu.mul_(gradient), value


class _SwiGlu(torch.autograd.Function):
    """Autograd function for silu(gate) · up that saves only `gate` and `up` for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Any:
        ctx.save_for_backward(gate, up)
        return product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return slopes(*ctx.saved_tensors, gradient, False)[:2]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up. The backward pass computes silu(gate) again, so only `gate` and `up` are saved."""
    value: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return value


@cache
def _compiled(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """Compile a function for tensors of any size; results are rounded where torch rounds them."""
    options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend, options=options)
    compiled = torch._dynamo.config.patch(recompile_limit=64)(compiled)
    # Detached, because torch would compile again for tensors that require gradients.
    return lambda *arguments: compiled(*(one.detach() if isinstance(one, Tensor) else one for one in arguments))


@cache
def _problem(dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare the compiled functions with the originals, and return why they cannot be used; None if results are equal."""
    # A sigmoid differs in the last digits; half precision can then round to the next number.
    problem = trial_problem(_differences(dtype, device), 4 * torch.finfo(dtype).eps)
    if problem is not None:
        log(f"warning: SwiGLU layers are not compiled: {problem}")
    return problem


def _differences(dtype: torch.dtype, device: torch.device) -> Iterator[float]:
    """Yield the relative differences of value, gradients and product between the compiled functions and the originals."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (256, 384):
        drawn = torch.randn(3, tokens, 40, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
        for function, arguments in ((product, drawn[1:]), (slopes, (*drawn, True)), (slopes, (*drawn, False))):
            plain = function.__wrapped__  # type: ignore[attr-defined]
            results = [used(*arguments) for used in (_compiled(plain), plain)]
            tensors = [[result] if isinstance(result, Tensor) else result for result in results]
            yield largest(
                relative_difference(tensor, expected)
                for tensor, expected in zip(*tensors, strict=True)
                if expected is not None
            )
