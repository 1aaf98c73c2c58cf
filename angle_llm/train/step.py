"""One training step at the embedding boundary: encode, losses, dE, and back-propagation through the encoder.

Legend: N texts of the batches, U of them with different token ids, B of them in one batch, R texts of a micro-batch, D
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.positives import components
from angle_llm.losses import Objective, Relation
from angle_llm.losses.relation import on_device
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.layout.micro_batches import MicroBatch, Plan
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.checkpoint import set_torch_state, torch_state
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import SingleProcess


@dataclass(frozen=True)
class BatchLoss:
    """The loss of one batch."""

    loss: float
    parts: dict[str, float]
    """Value of each term of the loss, before its weight."""


@dataclass(frozen=True)
class StepResult:
    """Losses and counts of batches that were encoded together."""

    losses: list[BatchLoss]
    """The loss of each batch."""
    texts: int
    """Number of texts, summed over the batches."""
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
    device, cached = strategy.processes.device, plan.largest_share > graph_tokens
    encoding = (RecomputedGraphs if cached else KeptGraphs)(model, plan.share(strategy.processes.rank), strategy)
    with attention_kernels(device, plan.longest_text):
        with strategy.guard_oom():
            rows_UD = encoding.forward(plan.unique)
        strategy.processes.sum(rows_UD)  # a row is 0 on all ranks but one, so the sum is exact
        with strategy.guard_oom(), matmul_precision(device, "highest"):
            losses, gradient_UD = losses_and_gradient(plan, batches, weight, rows_UD)
        del rows_UD  # as large as the gradient
        with strategy.guard_oom():
            encoding.backward(gradient_UD)
    texts, pairs = sum(len(each.batch) for each in batches), sum(len(each.batch.left) for each in batches)
    return StepResult(losses, texts, pairs, plan, cached)


class KeptGraphs:
    """Encodes each micro-batch of this rank once; all activations are kept for one backward pass."""

    def __init__(self, model: nn.Module, micro_batches: Sequence[MicroBatch], strategy: SingleProcess) -> None:
        self._model, self._micro_batches, self._strategy = model, micro_batches, strategy
        self._device = strategy.processes.device
        self._parts: list[tuple[Tensor, Tensor]] = []

    def forward(self, unique: int) -> Tensor:
        """Encode the texts of this rank; return their rows in a matrix of all `unique` texts (U, D), 0 elsewhere, no graph."""
        self._parts = [(row_index(each, self._device), self._encode(each)) for each in self._micro_batches]
        return own_rows(unique, ((index_R, part_RD.detach()) for index_R, part_RD in self._parts))

    def backward(self, gradient_UD: Tensor) -> None:
        """Back-propagate dE (U, D) through the rows of this rank."""
        # One backward pass: after several forward passes, ZeRO-3 adds a wrong gradient for every pass but the first.
        self._strategy.backward(torch.stack([surrogate_loss(*part, gradient_UD) for part in self._parts]).sum())

    def _encode(self, micro: MicroBatch) -> Tensor:
        rows_RD: Tensor = self._model(**micro.inputs(self._device))
        return rows_RD


class RecomputedGraphs(KeptGraphs):
    """Encodes each micro-batch without activations, and again for its part of the backward pass (gradient caching)."""

    def forward(self, unique: int) -> Tensor:
        self._states = list[Any]()
        with torch.no_grad():
            return own_rows(unique, map(self._encode_once, self._micro_batches))

    def _encode_once(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        self._states.append(torch_state(self._device))
        return row_index(micro, self._device), self._encode(micro)

    def backward(self, gradient_UD: Tensor) -> None:
        after = torch_state(self._device)
        for micro, state in zip(self._micro_batches, self._states, strict=True):
            set_torch_state(state, self._device)  # the same dropout masks as in the first pass
            self._strategy.backward(surrogate_loss(row_index(micro, self._device), self._encode(micro), gradient_UD))
        set_torch_state(after, self._device)


def losses_and_gradient(
    plan: Plan, batches: Sequence[PlannedBatch], weight: float, rows_UD: Tensor
) -> tuple[list[BatchLoss], Tensor]:
    """Return the loss of each batch, and dE (U, D) of `weight` times their sum, from the rows of all unique texts."""
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
    """Yield for each batch the rows of its texts in `E`, and the relation of these rows.

    Two texts of a batch may have the same ids (cut at `max_length`, or with letters that the tokenizer maps to the same
    ids). They are one row, like a repeated text, and not each other's negatives at a cosine of 1.
    """
    first = 0
    for planned in batches:
        batch = planned.batch
        place: dict[int, int] = {}  # of a row of the plan among those of the batch
        row_of = plan.row_of[first : first + len(batch)]
        row_of_N = torch.tensor([place.setdefault(row, len(place)) for row in row_of], dtype=torch.int64)
        first += len(batch)
        left_P, right_P = row_of_N[batch.left], row_of_N[batch.right]
        text = text_of_row(batch.texts, row_of_N)
        _, first_text = np.unique(row_of_N.numpy(), return_index=True)  # of each row
        known = {name: tensor[first_text] for name, tensor in planned.vectors.items()}
        relation = Relation(left_P, right_P, batch.score, group=batch.group, teacher=batch.teacher, text=text, **known)
        yield list(place), relation


def text_of_row(texts: Sequence[str], row_of_N: Tensor) -> Tensor | None:
    """Number the rows (B,) so that rows of the same text are equal, such as its query and document; None if all differ.

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
    """Scalar results of a loss, still on the device."""

    loss: Tensor
    zero_rows: Tensor
    """Number of zero embeddings: overflowing weights can give zeros instead of NaN."""
    finite: Tensor
    """Whether all embeddings are finite."""
    parts: dict[str, Tensor]
    rows: int


def loss_and_gradient(
    objective: Objective, relation: Relation, weight: float, rows_BD: Tensor
) -> tuple[_LossValue, Tensor]:
    """Return the loss of a batch, and `weight` times its gradient dE (B, D). The graph of the loss is freed."""
    leaf_BD = rows_BD.detach().requires_grad_()
    value = objective(leaf_BD, relation)
    (gradient_BD,) = torch.autograd.grad(value.loss * weight, leaf_BD)
    largest_B = torch.linalg.vector_norm(rows_BD, math.inf, dim=1)
    zero_rows, finite = (largest_B == 0).sum(), largest_B.isfinite().all()
    return _LossValue(value.loss.detach(), zero_rows, finite, value.parts, len(rows_BD)), gradient_BD


def checked_losses(values: Sequence[_LossValue]) -> list[BatchLoss]:
    """Check losses and return them as numbers, read from the device at once because each read waits for it.

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


def own_rows(unique: int, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return `E` (U, D) with the rows of this rank, 0 elsewhere. `parts`: index (R,) and rows (R, D) of micro-batches."""
    rows_UD = torch.empty(0)
    for index_R, part_RD in parts:
        if not rows_UD.numel():
            rows_UD = part_RD.new_zeros(unique, part_RD.shape[1])
        rows_UD[index_R] = part_RD[: len(index_R)]
    return rows_UD


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Set the precision of float32 products on a GPU inside this context: high (TF32, about 8 times as fast) or highest.

    See `torch.set_float32_matmul_precision`. The environment variable NVIDIA_TF32_OVERRIDE=0 prevents TF32.
    """
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
    """Return a scalar whose gradient at `part_RD` is dE of these rows; 0 for a dummy micro-batch without rows."""
    return (part_RD[: len(index_R)] * gradient_UD[index_R]).sum()


def row_index(micro: MicroBatch, device: torch.device) -> Tensor:
    """Return the rows of a micro-batch as an index (R,) on the device."""
    return on_device(torch.tensor(micro.rows, dtype=torch.int64), device)
