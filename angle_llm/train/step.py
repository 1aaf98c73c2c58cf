"""One training step at the embedding boundary: encode, loss, dE, and back-propagation through the encoder.

Legend: N texts of the batch, U of them with different token ids, R texts of a micro-batch, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from angle_llm.data.batch import TextBatch
from angle_llm.losses import Objective, ObjectiveValue, Relation
from angle_llm.model.fast_paths import attention_kernels
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.train.distributed import Processes
from angle_llm.train.rng import set_torch_state, torch_state
from angle_llm.train.strategies import SingleProcess

Boundary = Callable[[Tensor], tuple[ObjectiveValue, Tensor]]
"""Map the rows of unique texts (U, D) to the loss and dE (U, D)."""


@dataclass(frozen=True)
class StepResult:
    """Loss and counts of a step."""

    loss: float
    parts: dict[str, float]
    texts: int
    pairs: int
    """Scored pairs of the relation; a triple is two."""
    plan: Plan
    """Layout and tokens."""
    cached: bool
    """Whether each micro-batch was encoded twice (gradient caching)."""


class DivergedError(RuntimeError):
    """The loss is NaN or infinite, or embeddings are zero; nothing was back-propagated and no weight has changed."""


def boundary_step(
    model: nn.Module,
    plan: Plan,
    batch: TextBatch,
    objective: Objective,
    *,
    graph_tokens: int,
    weight: float = 1.0,
    strategy: SingleProcess | None = None,
) -> StepResult:
    """Add the gradient of `weight` times the loss of a batch to the model's parameters.

    `model` maps a micro-batch of the plan to rows (R, D). Activations are kept if no rank computes more than
    `graph_tokens` tokens; otherwise each micro-batch is encoded again for its part of the backward pass (gradient
    caching, Gao et al. 2021, arXiv 2101.06983), with the same dropout masks. The gradient is the same. Texts that share
    a prefix share its dropout mask.

    All ranks of a `strategy` call this with the same batch and plan. Each encodes its share of the plan; the rows of
    all ranks form one `E`, so every text is a negative for every other text. Each rank computes loss and `dE`, and
    back-propagates the rows it encoded. The gradient of the step is the sum over ranks.

    Raises:
        DivergedError: on every rank, before anything is back-propagated.
        RankMemoryError: see `SingleProcess.guard_oom`; the gradients must be discarded then.
    """
    strategy = strategy or SingleProcess(Processes(device=next(model.parameters()).device))
    cached = plan.largest_share > graph_tokens
    run = step_cached if cached else step_with_graphs
    with attention_kernels(strategy.processes.device, plan.longest_text):
        value = run(model, plan, partial(loss_and_gradient, plan, batch, objective, weight), strategy)
    parts = {name: float(part) for name, part in value.parts.items()}
    return StepResult(float(value.loss), parts, len(batch), len(batch.left), plan, cached)


def loss_and_gradient(
    plan: Plan, batch: TextBatch, objective: Objective, weight: float, rows_UD: Tensor
) -> tuple[ObjectiveValue, Tensor]:
    """Return the loss of detached rows of unique texts, and `weight` times dE.

    Two texts of a batch may have the same ids (cut at `max_length`, or with letters that the tokenizer maps to the same
    ids). They are one row, like a repeated text, and not each other's negatives at a cosine of 1.
    """
    row_of_N = torch.tensor(plan.row_of)
    leaf_UD = rows_UD.detach().requires_grad_()
    value = objective(leaf_UD, Relation(row_of_N[batch.left], row_of_N[batch.right], batch.score))
    zero = (leaf_UD == 0).all(dim=1)  # weights that overflow can give zeros instead of NaN
    if zero.any() or not torch.isfinite(value.loss):
        parts = ", ".join(f"{name} {float(part)}" for name, part in value.parts.items())
        state = "finite" if torch.isfinite(leaf_UD).all() else "not finite either"
        state = f"zero for {int(zero.sum())} of {len(zero)} texts" if zero.any() else state
        raise DivergedError(f"the loss is {float(value.loss.detach())} ({parts}); the embeddings are {state}")
    (gradient_UD,) = torch.autograd.grad(value.loss * weight, leaf_UD)
    # Without its graph, which holds the rows of the whole batch.
    return replace(value, loss=value.loss.detach()), gradient_UD


def step_with_graphs(model: nn.Module, plan: Plan, boundary: Boundary, strategy: SingleProcess) -> ObjectiveValue:
    """Encode every micro-batch once and keep its activations for one backward pass."""
    device = strategy.processes.device
    own = plan.share(strategy.processes.rank)
    parts = strategy.guard_oom(lambda: [(micro.rows, model(**micro.inputs(device))) for micro in own])
    value, gradient_UD = gather_and_loss(
        plan, strategy, boundary, [(rows, part_RD.detach()) for rows, part_RD in parts]
    )

    def backward() -> None:
        # One backward pass: after several forward passes, ZeRO-3 adds a wrong gradient for every pass but the first.
        losses = [surrogate_loss(rows, part_RD, gradient_UD) for rows, part_RD in parts]
        strategy.backward(torch.stack(losses).sum())

    strategy.guard_oom(backward)
    return value


def step_cached(model: nn.Module, plan: Plan, boundary: Boundary, strategy: SingleProcess) -> ObjectiveValue:
    """Encode every micro-batch without activations, then again, one by one, for the backward pass."""
    device = strategy.processes.device
    own = plan.share(strategy.processes.rank)
    states = []

    def forward(micro: MicroBatch) -> tuple[list[int], Tensor]:
        states.append(torch_state(device))
        return micro.rows, model(**micro.inputs(device))

    def backward() -> None:
        for micro, state in zip(own, states, strict=True):
            set_torch_state(state, device)  # the same dropout masks as in the first pass
            strategy.backward(surrogate_loss(micro.rows, model(**micro.inputs(device)), gradient_UD))

    with torch.no_grad():
        parts = strategy.guard_oom(lambda: [forward(micro) for micro in own])
    value, gradient_UD = gather_and_loss(plan, strategy, boundary, parts)
    del parts
    after = torch_state(device)
    strategy.guard_oom(backward)
    set_torch_state(after, device)
    return value


def gather_and_loss(
    plan: Plan, strategy: SingleProcess, boundary: Boundary, parts: Sequence[tuple[list[int], Tensor]]
) -> tuple[ObjectiveValue, Tensor]:
    """Return the loss and dE of the rows (U, D) of all ranks. Each row is 0 on all ranks but one, so their sum is
    exact. The rows of a large batch need as much memory as its gradient; they are freed on return."""
    rows_UD = strategy.guard_oom(lambda: parts[0][1].new_zeros(plan.unique, parts[0][1].shape[1]))
    for rows, part_RD in parts:
        rows_UD[rows] = part_RD[: len(rows)]
    strategy.processes.sum(rows_UD)
    return strategy.guard_oom(lambda: boundary(rows_UD))


def surrogate_loss(rows: list[int], part_RD: Tensor, gradient_UD: Tensor) -> Tensor:
    """Return a scalar whose gradient with respect to `part_RD` is dE of its rows; 0 for a dummy without rows."""
    return (part_RD * (gradient_UD[rows] if rows else 0)).sum()
