"""One step through the embedding boundary: rows, loss, dE, and back through the encoder.

Legend: N texts of the batch, U of them with different ids, R texts of a micro-batch, D dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from angle_llm.data.batching import TextBatch
from angle_llm.modeling.microbatches import Plan
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
    pairs: int
    """Scored pairs of the relation; a triple is two."""
    logical_tokens: int
    """Tokens of the texts, without padding."""
    computed_tokens: int
    """Tokens that went forward, padding included; a cached step does so twice and counts once."""
    cached: bool
    """Whether each micro-batch was encoded twice (gradient caching)."""
    way: str
    """How the texts were computed: trie or padded."""
    reason: str
    """Why this way."""


class LossNotFiniteError(RuntimeError):
    """The loss became NaN or infinite; nothing was back-propagated, so no weight has changed."""


def boundary_step(
    model: nn.Module,
    plan: Plan,
    batch: TextBatch,
    objective: AngleObjective,
    *,
    graph_tokens: int,
    share: float = 1.0,
    backward: Backward = torch.Tensor.backward,
) -> StepResult:
    """Adds the gradient of `share` times the loss of a batch to the model's parameters.

    `model` maps a micro-batch of the plan to rows (R, D), and is called as it came, wrapped or not. Activations are kept
    when the plan computes at most `graph_tokens` tokens; otherwise each micro-batch is encoded again for its share of the
    backward pass (gradient caching, Gao et al. 2021, arXiv 2101.06983), with the same dropout masks. The gradient is the
    same. Under dropout, texts that share a prefix share its mask.

    Raises:
        LossNotFiniteError: before anything is back-propagated.
    """
    cached = plan.computed_tokens > graph_tokens
    way = _encode_twice if cached else _keep_graphs
    with sdpa_kernel(_ATTENTION_KERNELS[_device(model).type]):
        value = way(model, plan, _Boundary(batch, objective, share), backward)
    parts = {name: float(part) for name, part in value.parts.items()}
    return StepResult(
        float(value.loss.detach()),
        parts,
        len(batch),
        len(batch.left),
        plan.logical_tokens,
        plan.computed_tokens,
        cached,
        plan.way,
        plan.reason,
    )


@dataclass(frozen=True)
class _Boundary:
    """From detached rows of unique texts to the objective's value and dE.

    Two texts of a batch may have the same ids (after an edit, or cut at `max_length`): then one row of the model is two
    rows of `E`, and its gradient the sum of theirs.
    """

    batch: TextBatch
    objective: AngleObjective
    share: float

    def __call__(self, rows_UD: Tensor, plan: Plan) -> tuple[ObjectiveValue, Tensor]:
        row_of_N = torch.tensor(plan.row_of, device=rows_UD.device)
        leaf_ND = rows_UD.detach()[row_of_N].requires_grad_()
        value = self.objective(leaf_ND, self.batch.left, self.batch.right, self.batch.score)
        if not torch.isfinite(value.loss):
            parts = ", ".join(f"{name} {float(part)}" for name, part in value.parts.items())
            state = "are finite" if torch.isfinite(leaf_ND).all() else "are not finite either"
            raise LossNotFiniteError(
                f"the loss is {float(value.loss.detach())} ({parts}) and the embeddings {state}. Nothing was updated. Lower the "
                "learning rate, use bfloat16 or float32 in place of float16, or look at this batch's texts."
            )
        (gradient_ND,) = torch.autograd.grad(value.loss * self.share, leaf_ND)
        return value, torch.zeros_like(rows_UD).index_add_(0, row_of_N, gradient_ND)


def _keep_graphs(model: nn.Module, plan: Plan, boundary: _Boundary, backward: Backward) -> ObjectiveValue:
    device = _device(model)
    parts = [model(**micro.on(device)) for micro in plan.micro_batches]
    order = torch.tensor([row for micro in plan.micro_batches for row in micro.rows], device=device)
    rows_UD = torch.cat(parts)[order.argsort()]
    value, gradient_UD = boundary(rows_UD, plan)
    backward((rows_UD * gradient_UD).sum())  # the gradient of this scalar is dE, row by row
    return value


def _encode_twice(model: nn.Module, plan: Plan, boundary: _Boundary, backward: Backward) -> ObjectiveValue:
    device = _device(model)
    rows_UD: Tensor | None = None
    states = []
    with torch.no_grad():
        for micro in plan.micro_batches:
            states.append(_random_state(device))
            rows_RD = model(**micro.on(device))
            if rows_UD is None:
                rows_UD = rows_RD.new_empty(plan.unique, rows_RD.shape[1])
            rows_UD[micro.rows] = rows_RD
    assert rows_UD is not None, "a batch has at least one micro-batch"
    value, gradient_UD = boundary(rows_UD, plan)
    after = _random_state(device)
    for micro, state in zip(plan.micro_batches, states, strict=True):
        _set_random_state(device, state)  # the same dropout masks as the first time
        rows_RD = model(**micro.on(device))
        backward((rows_RD * gradient_UD[micro.rows]).sum())
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
