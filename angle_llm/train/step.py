"""Forward and backward pass of batches: embeddings E, losses, dE = ∂loss/∂E, and back-propagation of dE.

Shapes: N texts of all batches, U texts with different token ids, B texts of a batch with different token ids, R texts
of a micro-batch, D dimensions, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.positives import components
from angle_llm.device import matmul_precision, on_device, start_copy_to_cpu, time_mark
from angle_llm.losses import Objective, Relation
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.layout.micro_batches import Plan, TextGroup
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.checkpoint import set_torch_state, torch_state
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import SingleProcess


@dataclass(frozen=True)
class BatchLoss:
    """Loss of a training batch and its terms, as Python numbers."""

    loss: float
    parts: dict[str, float]
    """Value of each term of the loss by name, before multiplication by its weight."""
    cosines: dict[str, float] = field(default_factory=dict)
    """Mean cosines of the texts by kind of pair (see `mean_cosines`)."""


@dataclass(frozen=True)
class StepResult:
    """Losses and counts of batches that were encoded together in an optimizer step."""

    losses: list[BatchLoss]
    """Losses in the order of the batches."""
    texts: int
    """Sum over the batches of the number of unique texts."""
    pairs: int
    """Number of scored pairs in all batches; a triple (anchor, positive, negative) has two."""
    plan: Plan
    """Micro-batches of the texts, with their layout and token counts."""
    cached: bool
    """Whether every micro-batch was encoded twice, to keep fewer activations (gradient caching)."""

    @property
    def loss(self) -> float:
        """Mean loss of the batches."""
        return sum(batch.loss for batch in self.losses) / len(self.losses)


class DivergedError(RuntimeError):
    """Raised for a loss or gradient norm that is not finite, or zero embeddings; the optimizer step is not taken."""


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
    """Add the gradient of `weight` times the loss of a single batch to the `grad` of the model's parameters.

    `plan` has the micro-batches of the texts in `batch`. See `group_step` for all other arguments and the errors.
    """
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
    """Add the gradient of `weight` times the sum of the batch losses to the `grad` of the model's parameters.

    `plan` has the micro-batches of the texts of all batches, concatenated. A text that two batches contain is encoded
    once. The loss of a batch uses the embeddings of this batch only: texts of other batches are not negatives.

    `model` maps a micro-batch to embeddings (R texts, D dimensions). Activations are kept if no rank computes more than
    `graph_tokens` tokens. Otherwise, every micro-batch is encoded again in the backward pass, with the same dropout
    masks (gradient caching, Gao et al. 2021, arXiv 2101.06983). The gradient is the same. Texts that share a prefix
    share its dropout mask.

    All ranks of `strategy` call this function with equal batches and plans. A rank encodes its micro-batches, and a sum
    over ranks gives every rank the embeddings E of all texts. So every text is a negative for every other text of its
    batch. A rank computes all losses and dE = ∂loss/∂E, and back-propagates only the embeddings that it encoded. The
    gradient of the step is the sum over ranks.

    Raises:
        DivergedError: on every rank, for a loss that is not finite, or a zero embedding. Discard the gradients.
        RankMemoryError: on every rank, if a rank ran out of memory. Discard the gradients before the next attempt.
    """
    strategy = strategy or SingleProcess(Processes(device=next(model.parameters()).device))
    device = strategy.processes.device
    cached = plan.largest_share > graph_tokens
    encoding = (RecomputedGraphs if cached else KeptGraphs)(model, plan.share(strategy.processes.rank), strategy)
    with attention_kernels(device, plan.longest_text):
        with strategy.guard_ranks():
            rows_UD = encoding.forward(plan.unique)
        strategy.processes.sum(rows_UD)  # a row is 0 on all ranks but one, so the sum is exact
        with strategy.guard_ranks(), matmul_precision(device, "highest"):
            losses, gradient_UD = losses_and_gradient(plan, batches, weight, rows_UD)
        del rows_UD  # as large as the gradient
        with strategy.guard_ranks():
            encoding.backward(gradient_UD)
    texts = sum(len(planned.batch) for planned in batches)
    pairs = sum(len(planned.batch.left) for planned in batches)
    return StepResult(losses.read(), texts, pairs, plan, cached)


class KeptGraphs:
    """Encodes the micro-batches of this rank once, and keeps all activations for a single backward pass."""

    def __init__(self, model: nn.Module, micro_batches: Sequence[TextGroup], strategy: SingleProcess) -> None:
        self._model, self._micro_batches, self._strategy = model, micro_batches, strategy
        self._device = strategy.processes.device
        self._parts: list[tuple[Tensor, Tensor]] = []

    def forward(self, unique: int) -> Tensor:
        """Return a matrix (U unique texts, D dimensions) with the embeddings of this rank's texts, detached.

        Rows of texts that other ranks encode are 0. `unique` is U.
        """
        self._parts = [(row_index(micro, self._device), self._encode(micro)) for micro in self._micro_batches]
        return own_rows(unique, ((index_R, part_RD.detach()) for index_R, part_RD in self._parts))

    def backward(self, gradient_UD: Tensor) -> None:
        """Back-propagate dE = ∂loss/∂E, (U unique texts, D dimensions), through the embeddings of this rank's texts."""
        # One backward pass: after several forward passes, ZeRO-3 adds a wrong gradient for every pass but the first.
        self._strategy.backward(torch.stack([surrogate_loss(*part, gradient_UD) for part in self._parts]).sum())

    def _encode(self, micro: TextGroup) -> Tensor:
        """Return the embeddings of a micro-batch, (R texts, D dimensions)."""
        rows_RD: Tensor = self._model(**micro.make().inputs(self._device))
        return rows_RD


class RecomputedGraphs(KeptGraphs):
    """Encodes micro-batches without activations, then again in the backward pass (gradient caching)."""

    def forward(self, unique: int) -> Tensor:
        self._states = list[Any]()
        with torch.no_grad():
            return own_rows(unique, map(self._encode_once, self._micro_batches))

    def _encode_once(self, micro: TextGroup) -> tuple[Tensor, Tensor]:
        """Return row numbers and embeddings of a micro-batch, and save the random state for the second pass."""
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
) -> tuple[PendingLosses, Tensor]:
    """Return the batch losses, and the gradient of `weight` times their sum at the embeddings of all unique texts.

    Embeddings and gradient are (U unique texts, D dimensions). The losses are read after the backward pass is launched, so
    that the device does not wait for the host in between.
    """
    if len(batches) == 1:  # all rows belong to this batch
        ((_, relation),) = relations(plan, batches)
        value, gradient_UD = loss_and_gradient(batches[0].loss, relation, weight, rows_UD)
        return PendingLosses([value]), gradient_UD
    values = []
    gradient_UD = torch.zeros_like(rows_UD)
    for batch, (rows, relation) in zip(batches, relations(plan, batches), strict=True):
        index_B = on_device(torch.tensor(rows), rows_UD.device)
        value, gradient_BD = loss_and_gradient(batch.loss, relation, weight, rows_UD[index_B])
        gradient_UD.index_add_(0, index_B, gradient_BD)  # a row occurs once in index_B, so the sum is deterministic
        values.append(value)
    return PendingLosses(values), gradient_UD


def relations(plan: Plan, batches: Sequence[PlannedBatch]) -> Iterator[tuple[list[int], Relation]]:
    """Yield, for each batch, the row numbers of its texts in the embedding matrix, and the scored pairs of these rows.

    Two texts of a batch may have the same token ids: cut at `max_length`, or with letters that the tokenizer maps to
    the same ids. Such texts are one row, like a repeated text. Otherwise they would be negatives with a cosine of 1.
    """
    first = 0
    for planned in batches:
        # Rows of the texts, in the plan and in the batch.
        batch = planned.batch
        plan_rows = plan.row_of[first : first + len(batch)]
        batch_row_of = {row: number for number, row in enumerate(dict.fromkeys(plan_rows))}  # by row in the plan
        row_of_N = torch.tensor([batch_row_of[row] for row in plan_rows], dtype=torch.int64)  # row of each text
        first += len(batch)
        # Pairs of rows, and data of the texts by row.
        left_P, right_P = row_of_N[batch.left], row_of_N[batch.right]
        text = text_of_row(batch.texts, row_of_N)
        _, first_text = np.unique(row_of_N.numpy(), return_index=True)  # first text of each row
        vectors = {name: tensor[first_text] for name, tensor in planned.vectors.items()}
        scored = Relation(left_P, right_P, batch.score, batch.group, batch.teacher, text, label=batch.label, **vectors)
        yield list(batch_row_of), scored


def text_of_row(texts: Sequence[str], row_of_N: Tensor) -> Tensor | None:
    """Return a text number for each of B rows, equal for rows of the same text; None if all N texts differ.

    A text has two rows if it occurs with two prompts, as a query and as a document. Several texts with equal token ids
    are a single row; all rows of these texts get the same number. `row_of_N` has the row of each text.
    """
    number: dict[str, int] = {}
    text_of_N = torch.tensor([number.setdefault(text, len(number)) for text in texts], dtype=torch.int64)
    if len(number) == len(texts):
        return None
    rows = int(row_of_N.max()) + 1
    links = list(zip(row_of_N.tolist(), (rows + text_of_N).tolist(), strict=True))
    return torch.from_numpy(components(rows + len(number), links)[:rows]).long()


class _LossValue(NamedTuple):
    """Loss of a batch and sizes of its embeddings, as tensors on the device (reading a value waits for the device)."""

    loss: Tensor
    largest_B: Tensor
    """(B,) largest absolute number in each embedding; 0 for an embedding of zeros, as from weights that overflow."""
    parts: dict[str, Tensor]
    """Value of each term of the loss by name, before multiplication by its weight."""
    cosines: dict[str, Tensor]
    """Mean cosines by kind of pair."""


def loss_and_gradient(
    objective: Objective, relation: Relation, weight: float, rows_BD: Tensor
) -> tuple[_LossValue, Tensor]:
    """Return the loss of a batch, and the gradient of `weight` · loss at its embeddings (B texts, D dimensions)."""
    leaf_BD = rows_BD.detach().requires_grad_()
    value = objective(leaf_BD, relation)
    (gradient_BD,) = torch.autograd.grad(value.loss * weight, leaf_BD)
    largest_B = torch.linalg.vector_norm(rows_BD, math.inf, dim=1)
    cosines = objective.cosines(rows_BD, relation)
    return _LossValue(value.loss.detach(), largest_B, value.parts, cosines), gradient_BD


class PendingLosses:
    """Losses of several batches, which are copied from the device in one transfer; a GPU is waited for in `read` only."""

    def __init__(self, values: Sequence[_LossValue]) -> None:
        scalars: list[Tensor] = []
        for value in values:
            zero_rows = (value.largest_B == 0).sum()
            scalars += [value.loss, zero_rows, *value.parts.values(), *value.cosines.values()]
        self._values = values
        numbers = torch.stack([scalar.to(scalars[0]) for scalar in scalars])
        self._copy = start_copy_to_cpu(numbers, time_mark(numbers.device))

    def read(self) -> list[BatchLoss]:
        """Wait for the copy, and return the losses as Python numbers; raise `DivergedError` for a diverged batch."""
        copied, _ = self._copy()  # does not wait for kernels that were launched later
        numbers = iter(copied.tolist())
        losses = []
        for value in self._values:
            loss, zeros = next(numbers), int(next(numbers))
            parts, cosines = ({name: next(numbers) for name in names} for names in (value.parts, value.cosines))
            if zeros or not math.isfinite(loss):
                state = "finite" if value.largest_B.isfinite().all() else "not finite either"
                state = f"zero for {zeros} of {len(value.largest_B)} texts" if zeros else state
                listed = ", ".join(f"{name} {part}" for name, part in parts.items())
                raise DivergedError(f"the loss is {loss} ({listed}); the embeddings are {state}")
            losses.append(BatchLoss(loss, parts, cosines))
        return losses


def own_rows(unique: int, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Copy the embeddings of micro-batches into a zero matrix with a row for each unique text, (U, D).

    `unique` is U. `parts` yields row numbers (R,) and embeddings (R, D) of a micro-batch.
    """
    rows_UD = torch.empty(0)
    for index_R, part_RD in parts:
        if not rows_UD.numel():
            rows_UD = part_RD.new_zeros(unique, part_RD.shape[1])
        rows_UD[index_R] = part_RD[: len(index_R)]
    return rows_UD


def surrogate_loss(index_R: Tensor, part_RD: Tensor, gradient_UD: Tensor) -> Tensor:
    """Return sum(embeddings · gradient), a scalar whose gradient at the embeddings is the given gradient.

    `part_RD` has the embeddings of a micro-batch: rows `index_R` of all U embeddings, which have gradient
    `gradient_UD`. The scalar is 0 for a dummy micro-batch, which has no rows.
    """
    return (part_RD[: len(index_R)] * gradient_UD[index_R]).sum()


def row_index(micro: TextGroup, device: torch.device) -> Tensor:
    """Return the row numbers of a micro-batch in the matrix of unique embeddings, (R,) integers on the device."""
    return on_device(torch.tensor(micro.rows, dtype=torch.int64), device)
