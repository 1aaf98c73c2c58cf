"""SwiGLU, silu(gate) · up, and its gradient: each is one compiled kernel on a GPU, and saves only `gate` and `up`.

torch computes them in seven kernels, which read and write 19 matrices (tokens, intermediate size) instead of nine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from angle_llm.device import compiled_if_equal


def _compiled_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes tensors on a GPU by the compiled form of `function`, if its results are equal."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        gate = arguments[0]
        used = _compiled(function, gate.dtype, gate.device) if gate.is_cuda else function
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
def _compiled(
    function: Callable[..., Any], dtype: torch.dtype, device: torch.device, backend: Any = "inductor"
) -> Callable[..., Any]:
    """Compile `product` or `slopes` for tensors of any size; return the function itself if the results differ."""

    def results(used: Callable[..., Any]) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for tokens in (256, 384):
            drawn = torch.randn(3, tokens, 40, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
            if function.__name__ == "product":
                yield used(*drawn[:2])
            else:
                yield from (*used(*drawn, True), *used(*drawn, False)[:2])  # the third value is None

    options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
    # A sigmoid differs in the last digits; half precision can then round to the next number.
    tolerance = 4 * torch.finfo(dtype).eps
    settings: Any = {"dynamic": True, "fullgraph": True, "backend": backend, "options": options}
    compiled = compiled_if_equal("SwiGLU layers are", function, results, tolerance, **settings)
    # Detached, because torch would compile again for tensors that require gradients.
    return lambda *arguments: compiled(*(one.detach() if isinstance(one, Tensor) else one for one in arguments))
