"""A training step of a model without weights: `training.step`, as far as memory goes.

Legend: U texts with different ids, N texts of the batch, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.forecast.ledger import CpuFlash, GpuKernels, MemoryLedger
from angle_llm.losses.nested import Objective
from angle_llm.model.micro_batches import MicroBatch
from angle_llm.train import step

META = torch.device("meta")
MOST_EXAMPLES = 1024
"""Of a batch whose loss is computed to see what it takes; what larger ones take grows in a straight line."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the model's part of a step, beside its weights."""

    tokens: int
    """Computed tokens whose activations were kept at once."""
    kept: int
    """What the forward pass leaves for the backward pass."""
    peak: int
    """The most there was at once, in either."""
    gradients: int
    """Gradients of weights among them."""


def model_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    on_gpu: bool,
    gradients_before: bool = False,
) -> StepMemory:
    """A forward pass over micro-batches whose graphs are all kept, and the backward pass, on the meta device.

    `gradients_before`: an earlier micro-batch or batch has left gradients.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    with ledger, _kernels(micro_batches, on_gpu=on_gpu):
        for parameter in trained if gradients_before else ():
            parameter.grad = torch.empty_like(parameter)
        rows_UD = torch.cat([model(**micro.inputs(META)) for micro in micro_batches])
        kept = ledger.live - sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
        torch.autograd.backward((rows_UD * torch.empty_like(rows_UD)).sum())
    gradients = ledger.of_peak([parameter.grad for parameter in trained if parameter.grad is not None])
    for parameter in trained:
        parameter.grad = None
    return StepMemory(sum(micro.computed_tokens for micro in micro_batches), kept, ledger.peak, gradients)


def _kernels(micro_batches: Sequence[MicroBatch], *, on_gpu: bool) -> AbstractContextManager[Any]:
    """Those that `training.step` would take."""
    if on_gpu:
        return GpuKernels()
    longest = max(
        int(micro.trie.depth_1T.max()) + 1 if micro.trie is not None else micro.ids_BT.shape[1]
        for micro in micro_batches
    )
    return CpuFlash() if longest > step.PLAIN_UP_TO else nullcontext()


def loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    """Bytes at once while the loss of a batch and its gradient are computed, embeddings included; `dimensions` of a row.

    A batch of that many examples is computed, with random embeddings; of a large one a part.
    """
    whole, part = len(examples), min(len(examples), MOST_EXAMPLES)
    if part == whole:
        return _loss_memory(objective, examples, dimensions)
    least, most = (_loss_memory(objective, examples[:count], dimensions) for count in (part // 2, part))
    return most + (most - least) * (whole - part) // (part - part // 2)


def _loss_memory(objective: Objective, examples: Sequence[Example], dimensions: int) -> int:
    batch = TextBatch.from_examples(examples)
    with MemoryLedger() as ledger:
        rows_UD = torch.randn(len(batch), dimensions)
        leaf_UD = rows_UD.detach().requires_grad_()
        loss = objective(leaf_UD, batch.left, batch.right, batch.score).loss
        torch.autograd.grad(loss, leaf_UD)
    peak: int = ledger.peak
    return peak
