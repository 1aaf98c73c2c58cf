"""One step through the embedding boundary: rows, loss, dE, and back through the encoder.

Legend: N texts of the batch, U different ids of them, R texts of a micro-batch, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from angle_llm.data.batch import TextBatch
from angle_llm.losses import Objective, ObjectiveValue, Relation
from angle_llm.model import fast_paths
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.train.checkpoint import device_state, set_device_state
from angle_llm.train.strategies import SingleProcess, StepStrategy

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


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
    """Tokens that went forward in all processes, padding included; a cached step does so twice and counts once."""
    largest_share: int
    """Those of the process that computed most."""
    cached: bool
    """Whether each micro-batch was encoded twice (gradient caching)."""
    layout: str
    """How the texts were computed: trie or padded."""
    reason: str
    """Why this way."""


class LossNotFiniteError(RuntimeError):
    """The loss became NaN or infinite; nothing was back-propagated, so no weight has changed."""


def boundary_step(
    model: nn.Module,
    plan: Plan,
    batch: TextBatch,
    objective: Objective,
    *,
    graph_tokens: int,
    share: float = 1.0,
    strategy: StepStrategy | None = None,
) -> StepResult:
    """Adds the gradient of `share` times the loss of a batch to the model's parameters.

    `model` maps a micro-batch of the plan to rows (R, D), and is called as it came, wrapped or not. Activations are kept
    when no process computes more than `graph_tokens` tokens; otherwise each micro-batch is encoded again for its share of
    the backward pass (gradient caching, Gao et al. 2021, arXiv 2101.06983), with the same dropout masks. The gradient is
    the same. Under dropout, texts that share a prefix share its mask.

    Several processes (`strategy`) call this with the same batch and plan. Each encodes its share of the plan; the rows of
    all make one `E`, so every text is everyone's negative and ranking partner; each computes loss and `dE`, and
    back-propagates the rows it has encoded. What is added to a process's parameters is its part of a sum.

    Raises:
        LossNotFiniteError: before anything is back-propagated, in every process.
        MemoryShortError: see `StepStrategy.attempt`; what was added is to be forgotten then.
    """
    strategy = strategy or SingleProcess(model)
    cached = plan.largest_share > graph_tokens
    way = _step_cached if cached else _step_with_graphs
    plain = strategy.processes.device.type == "cpu" and plan.longest_text <= fast_paths.PLAIN_ATTENTION_TOKENS
    with sdpa_kernel([SDPBackend.MATH] if plain else _KERNELS):
        value = way(model, plan, _Boundary(batch, objective, share), strategy)
    parts = {name: float(part) for name, part in value.parts.items()}
    return StepResult(
        float(value.loss),
        parts,
        len(batch),
        len(batch.left),
        plan.logical_tokens,
        plan.computed_tokens,
        plan.largest_share,
        cached,
        plan.layout,
        plan.reason,
    )


@dataclass(frozen=True)
class _Boundary:
    """From detached rows of unique texts to the objective's value and dE.

    Two texts of a batch may have the same ids (after an edit, cut at `max_length`, or by letters the tokenizer takes for the
    same): they are one row, as a repeated text is, and not each other's negatives at a cosine of 1.
    """

    batch: TextBatch
    objective: Objective
    share: float

    def __call__(self, rows_UD: Tensor, plan: Plan) -> tuple[ObjectiveValue, Tensor]:
        row_of_N = torch.tensor(plan.row_of)
        leaf_UD = rows_UD.detach().requires_grad_()
        value = self.objective(
            leaf_UD, Relation(row_of_N[self.batch.left], row_of_N[self.batch.right], self.batch.score)
        )
        if not torch.isfinite(value.loss):
            parts = ", ".join(f"{name} {float(part)}" for name, part in value.parts.items())
            state = "are finite" if torch.isfinite(leaf_UD).all() else "are not finite either"
            raise LossNotFiniteError(
                f"the loss is {float(value.loss.detach())} ({parts}) and the embeddings {state}. Nothing was updated. Lower the "
                "learning rate, use bfloat16 or float32 in place of float16, or look at this batch's texts."
            )
        (gradient_UD,) = torch.autograd.grad(value.loss * self.share, leaf_UD)
        # Without its graph, which holds the rows of the whole batch.
        return replace(value, loss=value.loss.detach()), gradient_UD


def _step_with_graphs(model: nn.Module, plan: Plan, boundary: _Boundary, strategy: StepStrategy) -> ObjectiveValue:
    device = strategy.processes.device
    mine = plan.share(strategy.processes.rank)
    parts = strategy.guard_oom(lambda: [(micro.rows, model(**micro.inputs(device))) for micro in mine])
    value, gradient_UD = _gather_and_loss(
        plan, strategy, boundary, [(rows, part_RD.detach()) for rows, part_RD in parts]
    )
    # The gradient of this scalar is dE, row by row. One backward pass: after several forward passes, ZeRO-3 adds a wrong
    # gradient for every backward pass but the first.
    strategy.guard_oom(
        lambda: strategy.backward(
            torch.stack([_surrogate_loss(rows, part_RD, gradient_UD) for rows, part_RD in parts]).sum()
        )
    )
    return value


def _step_cached(model: nn.Module, plan: Plan, boundary: _Boundary, strategy: StepStrategy) -> ObjectiveValue:
    device = strategy.processes.device
    mine = plan.share(strategy.processes.rank)
    states = []

    def forward(micro: MicroBatch) -> tuple[list[int], Tensor]:
        states.append(_random_state(device))
        return micro.rows, model(**micro.inputs(device))

    def again() -> None:
        for micro, state in zip(mine, states, strict=True):
            _set_random_state(device, state)  # the same dropout masks as the first time
            strategy.backward(_surrogate_loss(micro.rows, model(**micro.inputs(device)), gradient_UD))

    with torch.no_grad():
        parts = strategy.guard_oom(lambda: [forward(micro) for micro in mine])
    value, gradient_UD = _gather_and_loss(plan, strategy, boundary, parts)
    del parts
    after = _random_state(device)
    strategy.guard_oom(again)
    _set_random_state(device, after)
    return value


def _gather_and_loss(
    plan: Plan, strategy: StepStrategy, boundary: _Boundary, parts: Sequence[tuple[list[int], Tensor]]
) -> tuple[ObjectiveValue, Tensor]:
    """The boundary on the rows (U, D) of all processes. Each row is one process's and 0 in the others, so their sum is
    exact. A large batch's rows take as much as its gradient; they are gone when this returns."""
    rows_UD = strategy.guard_oom(lambda: parts[0][1].new_zeros(plan.unique, parts[0][1].shape[1]))
    for rows, part_RD in parts:
        rows_UD[rows] = part_RD[: len(rows)]
    strategy.processes.sum(rows_UD)
    return strategy.guard_oom(lambda: boundary(rows_UD, plan))


def _surrogate_loss(rows: list[int], part_RD: Tensor, gradient_UD: Tensor) -> Tensor:
    """A scalar whose gradient by `part_RD` is that of its rows; by a stand-in's row, which is no text's, 0."""
    return (part_RD * (gradient_UD[rows] if rows else 0)).sum()


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the generators dropout draws from: the CPU's, and the device's if it has one of its own."""
    return torch.get_rng_state(), device_state(device)


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    set_device_state(device, state[1])
