"""The changes of a training step that `gpu_visit.py` measures: for each, a context in which a plain function replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import gpu_check
import torch
from torch import Tensor

from angle_llm import SentenceEncoder
from angle_llm.model.layers import low_memory_layers
from angle_llm.model.layers.compiled_rotary import CompiledRotary
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.train import step

Plain = Callable[[SentenceEncoder], AbstractContextManager[SentenceEncoder]]
"""A context in which a plain function replaces a change of the training step, with the encoder to use."""


@contextmanager
def plain_rotary(encoder: SentenceEncoder) -> Iterator[SentenceEncoder]:
    """Use the rotary position embeddings of transformers in place of the compiled ones."""
    for layer in encoder.model.modules():
        if isinstance(layer, CompiledRotary):
            layer.__class__ = type(layer).__bases__[1]
    with patch.object(gpu_check, "match_layout"):  # which would compile them again
        yield encoder


@contextmanager
def waiting(encoder: SentenceEncoder) -> Iterator[SentenceEncoder]:
    """Make the tensors of micro-batches in the step, and read the losses before the backward pass."""

    class ReadLosses(step.PendingLosses):
        """Losses that are read at once."""

        def __init__(self, values: Any) -> None:
            super().__init__(values)
            self.read()

    with patch.object(Plan, "prepared", lambda plan, _: plan), patch.object(step, "PendingLosses", ReadLosses):
        yield encoder


@contextmanager
def weight_after_norm(encoder: SentenceEncoder) -> Iterator[SentenceEncoder]:
    """Multiply by the weight of a norm in a kernel of its own."""

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, eps=epsilon) * weight

    with patch.object(low_memory_layers, "_fused_norm", norm):
        yield encoder


CHANGES: dict[str, tuple[float, Plain]] = {
    "rotary": (40, plain_rotary),
    "c masks, losses": (15, waiting),
    "e norm": (4, weight_after_norm),
}
"""Changes of a training step: the predicted gain in milliseconds, of 304 for a batch of 120 triples on an H200, and the
context without the change."""
