"""Token budgets of a training step, and errors of a step that all ranks handle together.

If a rank runs out of memory, all ranks repeat the step with a smaller budget. The update is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from angle_llm.device import is_out_of_memory
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.activation_checkpointing import checkpointing_problem
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings


class RankMemoryError(RuntimeError):
    """Raised on all ranks when a rank ran out of memory. The gradients of the step are invalid."""


_COMPILERS = re.compile(r"torch\._(dynamo|inductor)|triton\.(runtime|compiler|backends)|CheckpointError")


def is_kernel_error(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, comes from a compiled kernel, the compiler or recomputed activations."""
    while error is not None:
        error_class = type(error)
        if _COMPILERS.search(f"{error_class.__module__}.{error_class.__name__} {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def guard_ranks(max_of_ranks: Callable[[int], int]) -> Iterator[None]:
    """Run the body on all ranks; raise `RankMemoryError` on all ranks if a rank ran out of memory.

    `max_of_ranks` returns the maximum of an integer over all ranks.
    """
    reason = ""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
    if max_of_ranks(int(bool(reason))):
        rank_error = RankMemoryError(reason or "another rank ran out of memory")
        try:
            raise rank_error
        finally:
            rank_error.__context__ = None  # the first error would keep the tensors of its frames alive


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
        """Return a smaller budget to repeat a step that ran out of memory; None if no smaller one can help.

        It is half the budget, or half of the tokens in the failed plans if they have fewer. None: every micro-batch is a
        single text, and no activations are kept.
        """
        largest = max(group.computed_tokens for plan in plans for group in plan.groups)
        shares = [plan.largest_share for plan in plans]
        single_texts = all(len(group.rows) == 1 for plan in plans for group in plan.groups)
        if single_texts and min(shares) > self.graph_tokens:
            return None
        micro, graph = min(self.micro_batch_tokens, largest) // 2, min(self.graph_tokens, max(shares)) // 2
        return replace(self, micro_batch_tokens=max(micro, 1), graph_tokens=graph)


CPU_BUDGET = TokenBudget(2048, 16_384)
"""Token budget on a CPU if it fits. It is constant, so that results do not depend on the memory of the machine."""
OTHER_BUDGET = TokenBudget(8192, 16_384)
"""Token budget on other devices whose memory is unknown."""


def budget_of(kind: str) -> TokenBudget:
    """Return the token budget for a device type (`cpu`, `cuda`, …) without a forecast."""
    return CPU_BUDGET if kind in ("cpu", "mps") else OTHER_BUDGET


def default_budget(settings: TrainSettings, others: TokenBudget = CPU_BUDGET) -> TokenBudget:
    """Return the token budget of the settings, with values of `others` where the settings have none."""
    micro, graph, layers = settings.micro_batch_tokens, settings.graph_tokens, settings.activation_checkpointing
    return replace(
        others,
        micro_batch_tokens=others.micro_batch_tokens if micro is None else micro,
        graph_tokens=others.graph_tokens if graph is None else graph,
        activation_checkpointing=others.activation_checkpointing if layers == "auto" else layers == "always",
    )


def check_checkpointing(encoder: SentenceEncoder) -> None:
    """Check that activation checkpointing is possible for the layers of the encoder.

    Raises:
        SettingsError: with the reason.
    """
    if problem := checkpointing_problem(encoder.model.backbone):
        raise SettingsError(f"--activation-checkpointing always: {problem} Set it to auto or never.")
