"""Memory that runs out while a run trains: the step is done again in smaller pieces, and the update is the same."""

import resource
from pathlib import Path

import pytest
import torch
from test_spread import program
from tiny import tiny_encoder

from angle_llm.train.memory import TokenBudget, is_out_of_memory


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="the program limits its address space")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_short_process_makes_all_do_the_step_again(processes: int, tmp_path: Path) -> None:
    printed = program("shortage.py", str(tmp_path), str(processes), str(50 // processes))
    times = int(printed.split(" times:")[0].split()[-1])
    assert 1 <= times <= 6
    assert "adapters by" in printed


def test_what_was_really_held_is_halved_until_nothing_is_left() -> None:
    texts = [f"Text {number} is about a house, a dog and {number} cats." for number in range(8)]
    encoder = tiny_encoder("llama")
    budget: TokenBudget | None = TokenBudget(10**6, 10**6)
    held = []
    while budget is not None:
        plan = encoder.plan(texts, budget.micro_batch_tokens)
        cached = plan.largest_share > budget.graph_tokens
        held.append((max(group.computed_tokens for group in plan.groups), cached))
        budget = budget.halved([plan])
    assert [tokens for tokens, _ in held] == sorted((tokens for tokens, _ in held), reverse=True)
    assert held[0][1] is False
    assert all(cached for _, cached in held[1:]), "activations are not kept after the first shortage"
    assert held[-1][0] == max(map(len, encoder.tokenize(texts))), "at last each text is alone"
    assert 3 <= len(held) <= 8


def test_other_errors_are_no_shortage() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
