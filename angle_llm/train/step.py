"""One training step at the embedding boundary: encode, losses, dE, and back-propagation through the encoder.

Legend: N texts of the batches, U of them with different token ids, B of them in one batch, R texts of a micro-batch, D
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.positives import components
from angle_llm.losses import Objective, Relation
from angle_llm.losses.relation import on_device
from angle_llm.model.fast_paths import attention_kernels
from angle_llm.model.micro_batches import MicroBatch, Plan
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.distributed import Processes
from angle_llm.train.rng import set_torch_state, torch_state
from angle_llm.train.strategies import SingleProcess


@dataclass(frozen=True)
class BatchLoss:
    """The loss of one batch."""

    loss: float
    parts: dict[str, float]
    """Each part before its weight."""


@dataclass(frozen=True)
class StepResult:
    """Losses and counts of batches that were encoded together."""

    losses: list[BatchLoss]
    """One per batch."""
    texts: int
    """Sum over the batches; a text of two batches counts twice."""
    pairs: int
    """Scored pairs of the relations; a triple is two."""
    plan: Plan
    """Layout and tokens."""
    cached: bool
    """Whether each micro-batch was encoded twice (gradient caching)."""

    @property
    def loss(self) -> float:
        """Mean over the batches."""
        return sum(each.loss for each in self.losses) / len(self.losses)


Boundary = Callable[[Tensor], tuple[list[BatchLoss], Tensor]]
"""Map the rows of unique texts (U, D) to the losses and dE (U, D)."""


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
    """Add the gradient of `weight` times the loss of one batch to the model's parameters; see `group_step`."""
    batches = [PlannedBatch(batch, objective, {})]
    return group_step(model, plan, batches, graph_tokens=graph_tokens, weight=weight, strategy=strategy)


def group_step(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[PlannedBatch],
    *,
    graph_tokens: int,
    weight: float = 1.0,
    strategy: SingleProcess | None = None,
) -> StepResult:
    """Add the gradient of `weight` times the sum of the losses of some batches to the model's parameters.

    `plan` is that of the texts of all batches, one batch after the other; a text of two batches is encoded once. The
    loss of a batch gets the rows of its own texts only: texts of other batches are not negatives.

    `model` maps a micro-batch of the plan to rows (R, D). Activations are kept if no rank computes more than
    `graph_tokens` tokens; otherwise each micro-batch is encoded again for its part of the backward pass (gradient
    caching, Gao et al. 2021, arXiv 2101.06983), with the same dropout masks. The gradient is the same. Texts that share
    a prefix share its dropout mask.

    All ranks of a `strategy` call this with the same batches and plan. Each encodes its share of the plan; the rows of
    all ranks form one `E`, so every text is a negative for every other text of its batch. Each rank computes losses and
    `dE`, and back-propagates the rows it encoded. The gradient of the step is the sum over ranks.

    Raises:
        DivergedError: on every rank, before anything is back-propagated.
        RankMemoryError: see `SingleProcess.guard_oom`; the gradients must be discarded then.
    """
    strategy = strategy or SingleProcess(Processes(device=next(model.parameters()).device))
    cached = plan.largest_share > graph_tokens
    run = step_cached if cached else step_with_graphs
    with attention_kernels(strategy.processes.device, plan.longest_text):
        losses = run(model, plan, partial(losses_and_gradient, plan, batches, weight), strategy)
    texts, pairs = sum(len(each.batch) for each in batches), sum(len(each.batch.left) for each in batches)
    return StepResult(losses, texts, pairs, plan, cached)


def losses_and_gradient(
    plan: Plan, batches: Sequence[PlannedBatch], weight: float, rows_UD: Tensor
) -> tuple[list[BatchLoss], Tensor]:
    """Return the losses of the rows of unique texts, and `weight` times dE of their sum."""
    if len(batches) == 1:  # its rows are those of the plan
        ((_, relation),) = relations(plan, batches)
        value, gradient_UD = loss_and_gradient(batches[0].loss, relation, weight, rows_UD)
        return checked_losses([value]), gradient_UD
    values = []
    gradient_UD = torch.zeros_like(rows_UD)
    for each, (rows, relation) in zip(batches, relations(plan, batches), strict=True):
        index_B = on_device(torch.tensor(rows), rows_UD.device)
        value, gradient_BD = loss_and_gradient(each.loss, relation, weight, rows_UD[index_B])
        gradient_UD.index_add_(0, index_B, gradient_BD)  # a row occurs once: no order of additions
        values.append(value)
    return checked_losses(values), gradient_UD


def relations(plan: Plan, batches: Sequence[PlannedBatch]) -> Iterator[tuple[list[int], Relation]]:
    """Yield the rows of each batch among the plan's unique texts, and its relation on these rows.

    Two texts of a batch may have the same ids (cut at `max_length`, or with letters that the tokenizer maps to the same
    ids). They are one row, like a repeated text, and not each other's negatives at a cosine of 1.
    """
    first = 0
    for batch, _, _, vectors in batches:
        place: dict[int, int] = {}  # of a row of the plan among those of the batch
        row_of = plan.row_of[first : first + len(batch)]
        row_of_N = torch.tensor([place.setdefault(row, len(place)) for row in row_of], dtype=torch.int64)
        first += len(batch)
        left_P, right_P = row_of_N[batch.left], row_of_N[batch.right]
        text = text_of_row(batch.texts, row_of_N)
        _, first_text = np.unique(row_of_N.numpy(), return_index=True)  # of each row
        known = {name: tensor[first_text] for name, tensor in vectors.items()}
        relation = Relation(left_P, right_P, batch.score, group=batch.group, teacher=batch.teacher, text=text, **known)
        yield list(place), relation


def text_of_row(texts: Sequence[str], row_of_N: Tensor) -> Tensor | None:
    """Return equal numbers (B,) for rows that have a text in common, such as the query and the document of one text;
    None if no text has two rows.

    A row has several texts if their ids are equal. Then all rows of these texts have one number.
    """
    number: dict[str, int] = {}
    text_of_N = torch.tensor([number.setdefault(text, len(number)) for text in texts], dtype=torch.int64)
    if len(number) == len(texts):
        return None
    rows = int(row_of_N.max()) + 1
    links = list(zip(row_of_N.tolist(), (rows + text_of_N).tolist(), strict=True))
    return torch.from_numpy(components(rows + len(number), links)[:rows]).long()


class _LossValue(NamedTuple):
    """Scalars of a batch, on the device."""

    loss: Tensor
    zero_rows: Tensor
    """Number of embeddings that are zero: weights that overflow can give zeros instead of NaN."""
    finite: Tensor
    """Whether all embeddings are."""
    parts: dict[str, Tensor]
    rows: int


def loss_and_gradient(
    objective: Objective, relation: Relation, weight: float, rows_BD: Tensor
) -> tuple[_LossValue, Tensor]:
    """Return the loss of detached rows of a batch, and `weight` times dE. The graph, which holds the rows, is freed."""
    leaf_BD = rows_BD.detach().requires_grad_()
    value = objective(leaf_BD, relation)
    (gradient_BD,) = torch.autograd.grad(value.loss * weight, leaf_BD)
    largest_B = torch.linalg.vector_norm(rows_BD, math.inf, dim=1)
    zero_rows, finite = (largest_B == 0).sum(), largest_B.isfinite().all()
    return _LossValue(value.loss.detach(), zero_rows, finite, value.parts, len(rows_BD)), gradient_BD


def checked_losses(values: Sequence[_LossValue]) -> list[BatchLoss]:
    """Return the losses of batches. All scalars are read at once, because a read waits for the device.

    Raises:
        DivergedError: for a loss that is not finite, or a zero row.
    """
    scalars = [scalar for each in values for scalar in (*each[:3], *each.parts.values())]
    numbers = iter(torch.stack([scalar.to(scalars[0]) for scalar in scalars]).tolist())
    losses = []
    for value in values:
        loss, zero_rows, finite = next(numbers), int(next(numbers)), next(numbers)
        parts = {name: next(numbers) for name in value.parts}
        if zero_rows or not math.isfinite(loss):
            state = "finite" if finite else "not finite either"
            state = f"zero for {zero_rows} of {value.rows} texts" if zero_rows else state
            listed = ", ".join(f"{name} {part}" for name, part in parts.items())
            raise DivergedError(f"the loss is {loss} ({listed}); the embeddings are {state}")
        losses.append(BatchLoss(loss, parts))
    return losses


def step_with_graphs(model: nn.Module, plan: Plan, boundary: Boundary, strategy: SingleProcess) -> list[BatchLoss]:
    """Encode every micro-batch once and keep its activations for one backward pass."""
    device = strategy.processes.device
    own = plan.share(strategy.processes.rank)

    def forward() -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        parts = [(row_index(micro, device), model(**micro.inputs(device))) for micro in own]
        return parts, own_rows(plan, ((index_R, part_RD.detach()) for index_R, part_RD in parts))

    def backward() -> None:
        # One backward pass: after several forward passes, ZeRO-3 adds a wrong gradient for every pass but the first.
        strategy.backward(torch.stack([surrogate_loss(*part, gradient_UD) for part in parts]).sum())

    parts, rows_UD = strategy.guard_oom(forward)
    losses, gradient_UD = gather_and_loss(strategy, boundary, rows_UD)
    del rows_UD
    strategy.guard_oom(backward)
    return losses


def step_cached(model: nn.Module, plan: Plan, boundary: Boundary, strategy: SingleProcess) -> list[BatchLoss]:
    """Encode every micro-batch without activations, then again, one by one, for the backward pass."""
    device = strategy.processes.device
    own = plan.share(strategy.processes.rank)
    states, indices = [], []

    def forward(micro: MicroBatch) -> tuple[Tensor, Tensor]:
        states.append(torch_state(device))
        indices.append(row_index(micro, device))
        return indices[-1], model(**micro.inputs(device))

    def backward() -> None:
        for micro, state, index_R in zip(own, states, indices, strict=True):
            set_torch_state(state, device)  # the same dropout masks as in the first pass
            strategy.backward(surrogate_loss(index_R, model(**micro.inputs(device)), gradient_UD))

    with torch.no_grad():
        rows_UD = strategy.guard_oom(lambda: own_rows(plan, map(forward, own)))
    losses, gradient_UD = gather_and_loss(strategy, boundary, rows_UD)
    del rows_UD  # they need as much memory as the gradient
    after = torch_state(device)
    strategy.guard_oom(backward)
    set_torch_state(after, device)
    return losses


def own_rows(plan: Plan, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the rows of unique texts (U, D), 0 for those of other ranks, from an index (R,) and rows of each part."""
    rows_UD = torch.empty(0)
    for index_R, part_RD in parts:
        if not rows_UD.numel():
            rows_UD = part_RD.new_zeros(plan.unique, part_RD.shape[1])
        rows_UD[index_R] = part_RD[: len(index_R)]
    return rows_UD


def gather_and_loss(strategy: SingleProcess, boundary: Boundary, rows_UD: Tensor) -> tuple[list[BatchLoss], Tensor]:
    """Return the losses and dE of the rows of all ranks. Each row is 0 on all ranks but one, so the sum is exact."""
    strategy.processes.sum(rows_UD)
    with matmul_precision(rows_UD.device, "highest"):
        return strategy.guard_oom(lambda: boundary(rows_UD))


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Compute float32 products of a GPU with a precision of `torch.set_float32_matmul_precision` in this context: high
    is TF32, about eight times as fast as highest. The environment variable NVIDIA_TF32_OVERRIDE=0 prevents TF32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def surrogate_loss(index_R: Tensor, part_RD: Tensor, gradient_UD: Tensor) -> Tensor:
    """Return a scalar whose gradient with respect to `part_RD` is dE of its rows; 0 for a dummy without rows."""
    return (part_RD[: len(index_R)] * gradient_UD[index_R]).sum()


def row_index(micro: MicroBatch, device: torch.device) -> Tensor:
    """Return the rows of a micro-batch as an index (R,) on the device."""
    return on_device(torch.tensor(micro.rows, dtype=torch.int64), device)
