"""One step through the embedding boundary: rows, loss, dE, and back through the encoder.

Legend: N unique texts of the batch, D dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from angle_llm.data.batching import TextBatch
from angle_llm.modeling.microbatches import MicroBatch, padded_tokens
from angle_llm.objectives.angle import AngleObjective, ObjectiveValue

Backward = Callable[[Tensor], None]
"""Back-propagates a scalar: `Accelerator.backward`, or `torch.Tensor.backward` in a test."""


_ATTENTION_KERNELS = defaultdict(
    lambda: [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    cpu=[SDPBackend.MATH],  # at 25-50 tokens the CPU's flash kernel is four times slower backwards (docs/LOG.md)
)


@dataclass(frozen=True)
class StepResult:
    """What a step computed."""

    loss: float
    parts: dict[str, float]
    texts: int
    computed_tokens: int
    """Tokens that went forward with padding; a cached step does so twice and counts once."""


class LossNotFiniteError(RuntimeError):
    """The loss became NaN or infinite; nothing was back-propagated, so no weight has changed."""


def boundary_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    batch: TextBatch,
    objective: AngleObjective,
    *,
    graph_tokens: int,
    share: float = 1.0,
    backward: Backward = torch.Tensor.backward,
) -> StepResult:
    """Adds the gradient of `share` times the loss of a batch to the model's parameters.

    `model` maps (ids_BT, mask_BT) to rows (B, D), and is called as it came, wrapped or not. Activations are kept when the
    micro-batches have at most `graph_tokens` padded tokens; otherwise each is encoded again for its share of the backward
    pass (gradient caching, Gao et al. 2021, arXiv 2101.06983), with the same dropout masks. The gradient is the same.

    Raises:
        LossNotFiniteError: before anything is back-propagated.
    """
    tokens = padded_tokens(micro_batches)
    way = _keep_graphs if tokens <= graph_tokens else _encode_twice
    with sdpa_kernel(_ATTENTION_KERNELS[_device(model).type]):
        value = way(model, micro_batches, len(batch), _Boundary(batch, objective, share), backward)
    parts = {name: float(part) for name, part in value.parts.items()}
    return StepResult(float(value.loss.detach()), parts, len(batch), tokens)


@dataclass(frozen=True)
class _Boundary:
    """From detached rows to the objective's value and dE."""

    batch: TextBatch
    objective: AngleObjective
    share: float

    def __call__(self, rows_ND: Tensor) -> tuple[ObjectiveValue, Tensor]:
        leaf_ND = rows_ND.detach().requires_grad_()
        value = self.objective(leaf_ND, self.batch.left, self.batch.right, self.batch.score)
        if not torch.isfinite(value.loss):
            parts = ", ".join(f"{name} {float(part)}" for name, part in value.parts.items())
            state = "are finite" if torch.isfinite(leaf_ND).all() else "are not finite either"
            raise LossNotFiniteError(
                f"the loss is {float(value.loss.detach())} ({parts}) and the embeddings {state}. Nothing was updated. Lower the "
                "learning rate, use bfloat16 or float32 in place of float16, or look at this batch's texts."
            )
        (gradient_ND,) = torch.autograd.grad(value.loss * self.share, leaf_ND)
        return value, gradient_ND


def _keep_graphs(
    model: nn.Module, micro_batches: Sequence[MicroBatch], texts: int, boundary: _Boundary, backward: Backward
) -> ObjectiveValue:
    device = _device(model)
    parts = [model(micro.ids_BT.to(device), micro.mask_BT.to(device)) for micro in micro_batches]
    order = torch.tensor([row for micro in micro_batches for row in micro.rows], device=device)
    rows_ND = torch.cat(parts)[order.argsort()]
    value, gradient_ND = boundary(rows_ND)
    backward((rows_ND * gradient_ND).sum())  # the gradient of this scalar is dE, row by row
    return value


def _encode_twice(
    model: nn.Module, micro_batches: Sequence[MicroBatch], texts: int, boundary: _Boundary, backward: Backward
) -> ObjectiveValue:
    device = _device(model)
    rows_ND: Tensor | None = None
    states = []
    with torch.no_grad():
        for micro in micro_batches:
            states.append(_random_state(device))
            rows_BD = model(micro.ids_BT.to(device), micro.mask_BT.to(device))
            if rows_ND is None:
                rows_ND = rows_BD.new_empty(texts, rows_BD.shape[1])
            rows_ND[micro.rows] = rows_BD
    assert rows_ND is not None, "a batch has at least one micro-batch"
    value, gradient_ND = boundary(rows_ND)
    after = _random_state(device)
    for micro, state in zip(micro_batches, states, strict=True):
        _set_random_state(device, state)  # the same dropout masks as the first time
        rows_BD = model(micro.ids_BT.to(device), micro.mask_BT.to(device))
        backward((rows_BD * gradient_ND[micro.rows]).sum())
    _set_random_state(device, after)
    return value


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the generators dropout draws from: the CPU's, and the device's if it has one of its own."""
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return torch.get_rng_state(), on_device


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1])
