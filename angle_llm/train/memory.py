"""Out of memory: detected on any rank, and handled on all ranks with smaller micro-batches and the same update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from angle_llm.model.micro_batches import Plan
from angle_llm.model.out_of_memory import is_out_of_memory

Value = TypeVar("Value")


class RankMemoryError(RuntimeError):
    """This rank or another one ran out of memory; no gradient of the step is valid."""


def guard_oom(work: Callable[[], Value], max_of_ranks: Callable[[int], int]) -> Value:
    """Call `work` on every rank and return its value.

    Raises:
        RankMemoryError: on every rank, if one ran out of memory.
    """
    reason = ""
    try:
        value = work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error) or "out of memory"  # the error itself would keep the tensors of its frames alive
    if max_of_ranks(bool(reason)):
        raise RankMemoryError(reason or "another rank ran out of memory")
    return value


@dataclass(frozen=True)
class TokenBudget:
    """Limits of memory use."""

    micro_batch_tokens: int
    """Computed tokens of one forward pass."""
    graph_tokens: int
    """Computed tokens, of batches encoded together, up to which activations are kept for the backward pass."""
    activation_checkpointing: bool = False
    """Whether layers keep their inputs only, and are computed again in the backward pass."""

    def __str__(self) -> str:
        layers = ", activation checkpointing" if self.activation_checkpointing else ""
        return f"micro_batch_tokens {self.micro_batch_tokens:,}, graph_tokens {self.graph_tokens:,}{layers}"

    def halved(self, plans: Sequence[Plan]) -> TokenBudget | None:
        """Return half of the budget, or of what the plans need if that is less. None if nothing can be halved: every
        micro-batch is a single text and no activations are kept."""
        largest = max(group.computed_tokens for plan in plans for group in plan.groups)
        shares = [plan.largest_share for plan in plans]
        single_texts = all(len(group.rows) == 1 for plan in plans for group in plan.groups)
        if single_texts and min(shares) > self.graph_tokens:
            return None
        micro, graph = min(self.micro_batch_tokens, largest) // 2, min(self.graph_tokens, max(shares)) // 2
        return replace(self, micro_batch_tokens=max(micro, 1), graph_tokens=graph)
