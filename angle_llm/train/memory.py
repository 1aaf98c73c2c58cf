"""Running out of memory, and the token budget that is halved then: the same update in smaller pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from angle_llm.model.micro_batches import Plan

_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryShortError(RuntimeError):
    """The device, of this process or another, has no room for what was to be computed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused; a CPU's says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _WORDS)


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens go through the model at once, and up to how many their activations are kept."""

    micro_batch_tokens: int
    graph_tokens: int

    def halved(self, plans: Sequence[Plan]) -> TokenBudget | None:
        """Half of what was too much: of the budget, or of what these plans really held. None if nothing is left to halve:
        every micro-batch is one text already, and no activation is kept for later."""
        most = max(group.computed_tokens for plan in plans for group in plan.groups)
        kept = max(plan.largest_share for plan in plans)
        if self.graph_tokens < kept and all(len(group.rows) == 1 for plan in plans for group in plan.groups):
            return None
        return TokenBudget(max(min(self.micro_batch_tokens, most) // 2, 1), min(self.graph_tokens, kept) // 2)
