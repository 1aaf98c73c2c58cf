"""Linear layers with frozen weights in FP8 (e4m3), whose matrix products are computed in FP8 on a GPU.

    W = s_O · Q        Q: e4m3 (O, I); s_O: a float32 scale per output
    y = x Wᵀ           activations are rounded to e4m3 with a scale per token
    dx = dy W          (dy · s_O) is rounded to e4m3 with a scale per token, so both products use the same Q

`torch._scaled_mm` multiplies rows by rows, so the backward pass needs a transposed copy of Q. Recipes as in FP8-LM
(arXiv 2310.18313), with scales per row. A CPU computes the same products from the same rounded numbers. The gradient treats
the rounding of activations as the identity.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.device import compiled_if_equal, relative_difference, trial_problem

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""Largest number in e4m3, 448. A scale maps the largest absolute number of a row to it."""
LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 (Ada: L4, L40S, RTX 40; then Hopper)."""


def to_fp8(x_TI: Tensor, factor_1I: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to e4m3: return numbers (T, I) and float32 scales (T, 1), whose product is about `x_TI` · `factor_1I`."""
    wide_TI = x_TI.float() if factor_1I is None else x_TI.float() * factor_1I
    scale_T1 = (wide_TI.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return (wide_TI / scale_T1).to(FP8), scale_T1


@cache
def rounding(dtype: torch.dtype, device: torch.device, backend: Any = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `to_fp8` for a device: compiled on a GPU, where separate kernels would take about as long as the product saves.

    `backend` is a backend of torch.compile, which is then used on a CPU, too. The compiled function is used if its results
    are equal, but for numbers between two numbers in e4m3.
    """
    if device.type != "cuda" and backend is None:
        return to_fp8

    def results(function: Callable[..., Any]) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for tokens in (256, 384):
            x_TI = torch.randn(tokens, 96, generator=generator, device="cpu").to(device, dtype)
            for factor in (None, torch.linspace(0.5, 2, 96, device=device)[None]):
                numbers, scale_T1 = function(x_TI, factor)
                yield numbers.float() * scale_T1

    settings: Any = {"dynamic": True, "fullgraph": True, "backend": backend or "inductor"}
    return compiled_if_equal("rounding to FP8 is", to_fp8, results, 1e-2, **settings)


def multiplies_fp8(q_OI: Tensor) -> bool:
    """Return whether products with Q are computed in FP8: on a GPU, if both sizes are multiples of 16."""
    return q_OI.is_cuda and not (q_OI.shape[0] % 16 or q_OI.shape[1] % 16)


def scaled_product(x_TI: Tensor, q_OI: Tensor, scale_1O: Tensor, factor_1I: Tensor | None = None) -> Tensor:
    """Return x Qᵀ, scaled by column, in the dtype of `x_TI`; `x_TI` · `factor_1I` is rounded to e4m3 by row.

    A GPU multiplies in FP8 and rounds the result to bfloat16.
    """
    rounded_TI, scale_T1 = rounding(x_TI.dtype, x_TI.device)(x_TI.detach(), factor_1I)
    if multiplies_fp8(q_OI):
        product_TO: Tensor = torch._scaled_mm(
            rounded_TI, q_OI.T, scale_a=scale_T1, scale_b=scale_1O, out_dtype=torch.bfloat16
        )
        return product_TO.to(x_TI.dtype)
    # Numbers in e4m3 are exact in every wider dtype, but sums of their products overflow in float16.
    dtype = torch.float32 if x_TI.dtype == torch.float16 else x_TI.dtype
    return ((rounded_TI.to(dtype) @ q_OI.to(dtype).T) * scale_T1 * scale_1O).to(x_TI.dtype)


class _Fp8Product(torch.autograd.Function):
    """Autograd function for x Wᵀ of an `Fp8Linear` layer."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, layer: Fp8Linear) -> Tensor:
        ctx.layer = layer
        return scaled_product(x_TI, layer.weight.view(FP8), layer.scale_O1.T.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.input_gradient(gradient_TO), None


class Fp8Linear(nn.Linear):
    """Linear layer with a frozen weight in e4m3. `weight` holds the bytes, which no cast of the model changes."""

    scale_O1: Tensor
    _transposed_IO: Tensor | None

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        """Round the weight of a linear layer, row by row, on `device`. The bias is set by `quantize`."""
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        q_OI, scale_O1 = to_fp8(layer.weight.data.to(device).float())
        self.weight = nn.Parameter(q_OI.view(torch.uint8), requires_grad=False)
        self.register_buffer("scale_O1", scale_O1, persistent=False)
        self.register_buffer("_transposed_IO", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y_TO: Tensor = _Fp8Product.apply(x.flatten(0, -2), self)  # type: ignore[no-untyped-call]
        # No view of a matrix: LoRA calls this layer in a custom function, whose views must not change in place.
        y = y_TO if x.ndim == 2 else y_TO.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (outputs, inputs), rounded to `dtype`."""
        return (self.weight.view(FP8).float() * self.scale_O1).to(dtype)

    def input_gradient(self, gradient_TO: Tensor) -> Tensor:
        """Return the gradient at the input, (T, I), for a gradient at the output. Keeps a transposed copy of the weight."""
        if self._transposed_IO is None:
            self._transposed_IO = self.weight.T.contiguous()
        ones_1I = self.scale_O1.new_ones(1, self.in_features)
        return scaled_product(gradient_TO, self._transposed_IO.view(FP8), ones_1I, self.scale_O1.T)


def fp8_problem(device: torch.device) -> str | None:
    """Return why a device cannot compute FP8 layers; None if it can. A CPU computes the same products without FP8."""
    if device.type not in ("cpu", "cuda"):
        return f"device {device.type} has no FP8"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
            return f"{name} has no FP8 (expected an L4, L40S, RTX 40, H100 or later)"
        if problem := product_problem(device):
            return f"torch {torch.__version__} cannot compute FP8 products on {name}: {problem}"
    return None


@cache
def product_problem(device: torch.device) -> str | None:
    """Compare a product in FP8 with a product of the same numbers in float32; return why it cannot be used, if so."""

    def differences() -> Iterator[float]:
        x_TI, weight_OI = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
        (x, scale_T1), (q_OI, scale_O1) = to_fp8(x_TI), to_fp8(weight_OI)
        expected_TO = (x.float() @ q_OI.float().T) * scale_T1 * scale_O1.T
        yield relative_difference(scaled_product(x_TI, q_OI, scale_O1.T), expected_TO)

    return trial_problem(differences(), 1e-2)  # the product is rounded to bfloat16
