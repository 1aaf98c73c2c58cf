"""Plans: every text once, within the budget, in the layout with fewer tokens; few tokens on real sentences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import micro_batches_of

from angle_llm.model.layout.micro_batches import (
    SPLIT_SHARE,
    TOKEN_COST,
    LayoutSupport,
    MicroBatch,
    Plan,
    plan_micro_batches,
)

NO_SHARING = LayoutSupport("padded", "not in this test")
SHARING = LayoutSupport("trie")

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)  # few, so that texts share prefixes
texts = st.lists(  # the id of padding, 0, is a real id too
    st.lists(st.integers(0, 20), min_size=1, max_size=12) | few_ids, max_size=25
)
budgets = st.integers(1, 60)
several = settings(derandomize=True, deadline=None, max_examples=80)


def padded_plan(ids: list[list[int]], budget: int) -> Plan:
    return plan_micro_batches(ids, budget, NO_SHARING)


def real_ids(batch: MicroBatch, position: int) -> list[int]:
    assert batch.mask_BT is not None
    ids: list[int] = batch.ids_BT[position][batch.mask_BT[position].bool()].tolist()
    return ids


def unique_texts(ids: list[list[int]], plan: Plan) -> list[list[int]]:
    """The text of each row of the plan."""
    texts = dict(zip(plan.row_of, ids, strict=True))
    assert sorted(texts) == list(range(plan.unique))
    return [texts[row] for row in range(plan.unique)]


@several
@given(texts, budgets, st.booleans())
def test_texts_with_equal_ids_share_a_row_and_others_do_not(ids: list[list[int]], budget: int, shares: bool) -> None:
    plan = plan_micro_batches(ids, budget, SHARING if shares else NO_SHARING)
    assert [unique_texts(ids, plan)[row] for row in plan.row_of] == ids
    assert plan.unique == len({tuple(text) for text in ids})
    assert sorted(row for micro in micro_batches_of(plan) for row in micro.rows) == list(range(plan.unique))
    assert plan.logical_tokens == sum(map(len, ids))
    assert plan.computed_tokens == sum(micro.ids_BT.numel() for micro in micro_batches_of(plan))


@several
@given(texts, budgets)
def test_padded_micro_batches(ids: list[list[int]], budget: int) -> None:
    """Every text unchanged, padding on the right, longest first, as many texts as the budget allows."""
    plan = padded_plan(ids, budget)
    unique, batches = unique_texts(ids, plan), micro_batches_of(plan)
    rows = [row for batch in batches for row in batch.rows]
    assert rows == sorted(range(plan.unique), key=lambda row: -len(unique[row])), "equal lengths in the given order"
    for number, batch in enumerate(batches):
        assert [real_ids(batch, position) for position in range(len(batch.rows))] == [unique[row] for row in batch.rows]
        assert batch.ids_BT.numel() <= budget or len(batch.rows) == 1
        assert number == len(batches) - 1 or (len(batch.rows) + 1) * batch.ids_BT.shape[1] > budget
        ids_BT, mask_BT = batch.ids_BT, batch.mask_BT
        assert mask_BT is not None
        assert (ids_BT.shape, ids_BT.dtype, mask_BT.dtype) == (mask_BT.shape, torch.long, torch.long)
        lengths = mask_BT.sum(dim=1)
        assert mask_BT.shape[1] == lengths.max()
        for mask_T, ids_T, length in zip(mask_BT, ids_BT, lengths.tolist(), strict=True):
            assert mask_T.tolist() == [1] * length + [0] * (len(mask_T) - length)
            assert (ids_T[length:] == 0).all()


def test_texts_of_different_lengths_are_split_rather_than_padded() -> None:
    ids = [[number] * length for number in range(4) for length in range(1, 120)]
    plan = padded_plan(ids, 8192)
    for micro in micro_batches_of(plan):
        assert micro.mask_BT is not None
        assert micro.ids_BT.numel() - int(micro.mask_BT.sum()) <= SPLIT_SHARE * 8192
    assert 1 < plan.computed_tokens / plan.logical_tokens < 1.15


@pytest.mark.parametrize("layouts", [NO_SHARING, SHARING])
def test_without_texts_there_are_no_micro_batches(layouts: LayoutSupport) -> None:
    plan = plan_micro_batches([], 8, layouts)
    assert (plan.groups, plan.row_of, plan.unique, plan.logical_tokens) == ([], [], 0, 0)


@several
@given(st.lists(few_ids, min_size=2, max_size=25), budgets)
def test_a_trie_computes_each_prefix_once_and_keeps_to_the_budget(ids: list[list[int]], budget: int) -> None:
    plan = plan_micro_batches(ids, 10**6, SHARING)
    prefixes = {tuple(text[: length + 1]) for text in ids for length in range(len(text))}
    assert plan.computed_tokens <= TOKEN_COST["trie"] * len(prefixes), "padded only where it takes no more time"
    assert plan.layout == "padded" or plan.computed_tokens == len(prefixes)
    plan = plan_micro_batches(ids, budget, SHARING)
    for micro in micro_batches_of(plan):
        longest = max(len(unique_texts(ids, plan)[row]) for row in micro.rows)
        assert micro.ids_BT.numel() <= max(budget, longest)


SHARED = [[1, 2, 3, 4, 5, 6, number] for number in range(10, 20)]
DISTINCT = [[number, 2, 3, 4, 5, 6, 7] for number in range(10, 20)]


@pytest.mark.parametrize(
    ("ids", "layouts", "layout", "tokens", "reason"),
    [
        (SHARED, SHARING, "trie", 16, "16 tokens as a trie, 70 padded"),
        (DISTINCT, SHARING, "padded", 70, "70 tokens as a trie, 70 padded"),
        (SHARED, LayoutSupport("padded", "bidirectional"), "padded", 70, "bidirectional"),
        (SHARED, LayoutSupport("trie", "", 6), "padded", 70, "texts longer than 6 tokens are padded"),
        (SHARED, LayoutSupport("trie", "", 7), "trie", 16, "16 tokens as a trie"),
        ([[*SHARED[0], 99, 99], *SHARED], LayoutSupport("trie", "", 7), "trie", 16 + 9, "1 texts longer than 7 tokens"),
    ],
)
def test_the_layout_with_fewer_tokens_is_chosen_with_a_reason(
    ids: list[list[int]], layouts: LayoutSupport, layout: str, tokens: int, reason: str
) -> None:
    plan = plan_micro_batches(ids, 1000, layouts)
    assert (plan.layout, plan.computed_tokens) == (layout, tokens)
    assert reason in plan.reason
    assert sorted(row for micro in micro_batches_of(plan) for row in micro.rows) == list(range(len(ids)))
