"""Out of memory: what is detected, and how the budget is halved."""

import pytest
import torch
from tiny import tiny_encoder
from torch.utils.checkpoint import CheckpointError

from angle_llm.device import is_out_of_memory
from angle_llm.train.checkpoint import CheckpointFileError
from angle_llm.train.distributed import RemoteRankError
from angle_llm.train.token_budget import (
    RankMemoryError,
    TokenBudget,
    guard_ranks,
    is_kernel_error,
)


def test_the_budget_is_halved_from_what_was_used_until_nothing_is_left() -> None:
    texts = [f"Text {number} is about a house, a dog and {number} cats." for number in range(8)]
    encoder = tiny_encoder("llama")
    budget: TokenBudget | None = TokenBudget(10**6, 10**6)
    used = []
    while budget is not None:
        plan = encoder.plan(texts, budget.micro_batch_tokens)
        cached = plan.largest_share > budget.graph_tokens
        used.append((max(group.computed_tokens for group in plan.groups), cached))
        budget = budget.halved([plan])
    assert [tokens for tokens, _ in used] == sorted((tokens for tokens, _ in used), reverse=True)
    assert used[0][1] is False
    assert all(cached for _, cached in used[1:]), "no activations are kept after the first failure"
    assert used[-1][0] == max(map(len, encoder.tokenize(texts))), "at last each text is alone"
    assert 3 <= len(used) <= 8


def test_out_of_memory_errors_are_distinguished_from_others() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RankMemoryError, match="memory"), guard_ranks(int):
        torch.empty(2**60)
    with pytest.raises(RankMemoryError) as raised, guard_ranks(int):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.__context__ is None, "the first error would keep the tensors of its frames alive"
    with pytest.raises(RankMemoryError, match="another rank"), guard_ranks(lambda number: 1):
        pass
    with pytest.raises(RuntimeError, match="shapes differ"), guard_ranks(int):
        raise RuntimeError("shapes differ")


def test_errors_of_compiled_kernels_are_distinguished_from_others() -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    assert is_kernel_error(InternalTorchDynamoError("graph"))
    assert is_kernel_error(CheckpointError("a recomputed tensor differs"))
    assert is_kernel_error(RuntimeError("Triton compilation failed: triton.runtime.errors.OutOfResources"))
    others: list[Exception | None] = [
        CheckpointFileError("no space left on device"),
        RuntimeError("shapes differ"),
        OSError("/data/triton/sts.tsv"),
        ValueError("loss is nan"),
        None,
    ]
    others.append(RemoteRankError("rank 0 failed: CheckpointFileError: no space left on device"))
    for other in others:
        assert not is_kernel_error(other)
    outer = RuntimeError("in layer 3")
    outer.__cause__ = InternalTorchDynamoError("graph")
    assert is_kernel_error(outer)
