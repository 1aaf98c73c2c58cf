"""Token budgets of a training step, and out-of-memory errors that all ranks handle together.

After an error on any rank, all ranks repeat the step with a smaller budget. The update is the same, in more micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.memory.out_of_memory import is_out_of_memory


class RankMemoryError(RuntimeError):
    """Raised on all ranks when a rank ran out of memory. The gradients of the step are invalid."""


@contextmanager
def guard_oom(max_of_ranks: Callable[[int], int]) -> Iterator[None]:
    """Run the body on all ranks; raise on all ranks if a rank runs out of memory.

    `max_of_ranks` returns the maximum of an integer over all ranks.

    Raises:
        RankMemoryError: on every rank, if a rank ran out of memory.
    """
    reason = ""
    try:
        yield
    except (RuntimeError, MemoryError) as first:
        if not is_out_of_memory(first):
            raise
        reason = str(first) or "out of memory"
    if max_of_ranks(bool(reason)):
        error = RankMemoryError(reason or "another rank ran out of memory")
        try:
            raise error
        finally:
            error.__context__ = None  # the first error would keep the tensors of its frames alive


@dataclass(frozen=True)
class TokenBudget:
    """Limits of the tokens that a process computes at once, which bound the memory of a training step."""

    micro_batch_tokens: int
    """Maximum number of computed tokens in a forward pass. A single longer text is allowed."""
    graph_tokens: int
    """Maximum number of computed tokens whose activations are kept for the backward pass. Batches encoded together that
    have more tokens use gradient caching: they are encoded twice."""
    activation_checkpointing: bool = False
    """Whether layers save only their inputs, and run a second time in the backward pass."""

    def __str__(self) -> str:
        layers = ", activation checkpointing" if self.activation_checkpointing else ""
        return f"micro_batch_tokens {self.micro_batch_tokens:,}, graph_tokens {self.graph_tokens:,}{layers}"

    def halved(self, plans: Sequence[Plan]) -> TokenBudget | None:
        """Return half the budget, or half of the tokens in the failed plans if they have fewer.

        None if nothing can be halved: every micro-batch is a single text, and no activations are kept.
        """
        largest = max(group.computed_tokens for plan in plans for group in plan.groups)
        shares = [plan.largest_share for plan in plans]
        single_texts = all(len(group.rows) == 1 for plan in plans for group in plan.groups)
        if single_texts and min(shares) > self.graph_tokens:
            return None
        micro, graph = min(self.micro_batch_tokens, largest) // 2, min(self.graph_tokens, max(shares)) // 2
        return replace(self, micro_batch_tokens=max(micro, 1), graph_tokens=graph)
