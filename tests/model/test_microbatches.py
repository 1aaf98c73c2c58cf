"""Plans: every text once, within the budget, by the cheaper way.

Padded: on the right, longest first. Trie: every token's ancestors are its text's beginning.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.model.micro_batches import MicroBatch, Plan, PrefixSharing, plan_micro_batches

PAD = 9
NO_SHARING = PrefixSharing("not in this test")
SHARING = PrefixSharing(None)

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)  # few, so that texts share beginnings
texts = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12) | few_ids, max_size=25)  # PAD is a real id too
budgets = st.integers(1, 60)
several = settings(derandomize=True, deadline=None, max_examples=150)


def padded_plan(ids: list[list[int]], budget: int) -> Plan:
    return plan_micro_batches(ids, budget, PAD, NO_SHARING)


def real_ids(batch: MicroBatch, position: int) -> list[int]:
    assert batch.mask_BT is not None
    ids: list[int] = batch.ids_BT[position][batch.mask_BT[position].bool()].tolist()
    return ids


def unique_texts(ids: list[list[int]], plan: Plan) -> list[list[int]]:
    """The text each row of the plan stands for."""
    texts = dict(zip(plan.row_of, ids, strict=True))
    assert sorted(texts) == list(range(plan.unique))
    return [texts[row] for row in range(plan.unique)]


@several
@given(texts, budgets, st.booleans())
def test_texts_with_equal_ids_are_one_row_and_others_are_not(ids: list[list[int]], budget: int, shares: bool) -> None:
    plan = plan_micro_batches(ids, budget, PAD, SHARING if shares else NO_SHARING)
    assert [unique_texts(ids, plan)[row] for row in plan.row_of] == ids
    assert plan.unique == len({tuple(text) for text in ids})
    assert sorted(row for micro in plan.micro_batches for row in micro.rows) == list(range(plan.unique))
    assert plan.logical_tokens == sum(map(len, ids))
    assert plan.computed_tokens == sum(micro.ids_BT.numel() for micro in plan.micro_batches)


# --- padded -----------------------------------------------------------------------------------------------------------


@several
@given(texts, budgets)
def test_every_text_is_in_exactly_one_micro_batch_unchanged(ids: list[list[int]], budget: int) -> None:
    plan = padded_plan(ids, budget)
    rows = unique_texts(ids, plan)
    for batch in plan.micro_batches:
        assert [real_ids(batch, position) for position in range(len(batch.rows))] == [rows[row] for row in batch.rows]


@several
@given(texts, budgets)
def test_the_budget_holds_padding_included_unless_one_text_is_longer(ids: list[list[int]], budget: int) -> None:
    for batch in padded_plan(ids, budget).micro_batches:
        assert batch.computed_tokens <= budget or len(batch.rows) == 1


@several
@given(texts, budgets)
def test_padding_is_on_the_right_and_no_wider_than_the_longest(ids: list[list[int]], budget: int) -> None:
    for batch in padded_plan(ids, budget).micro_batches:
        ids_BT, mask_BT = batch.ids_BT, batch.mask_BT
        assert mask_BT is not None
        assert ids_BT.shape == mask_BT.shape
        assert ids_BT.dtype == mask_BT.dtype == torch.long
        lengths = mask_BT.sum(dim=1)
        assert mask_BT.shape[1] == lengths.max()
        for mask_T, ids_T, length in zip(mask_BT, ids_BT, lengths.tolist(), strict=True):
            assert mask_T.tolist() == [1] * length + [0] * (len(mask_T) - length)
            assert (ids_T[length:] == PAD).all()


@several
@given(texts, budgets)
def test_longest_first_and_equal_lengths_in_the_order_given(ids: list[list[int]], budget: int) -> None:
    plan = padded_plan(ids, budget)
    rows = [row for batch in plan.micro_batches for row in batch.rows]
    lengths = [len(text) for text in unique_texts(ids, plan)]
    assert rows == sorted(range(plan.unique), key=lambda row: -lengths[row])


@several
@given(texts, budgets)
def test_no_micro_batch_has_room_for_the_next_text(ids: list[list[int]], budget: int) -> None:
    batches = padded_plan(ids, budget).micro_batches
    for batch in batches[:-1]:
        assert (len(batch.rows) + 1) * batch.ids_BT.shape[1] > budget


def test_padding_counts_as_computed() -> None:
    plan = padded_plan([[1, 2, 3], [4], [5, 6]], 6)
    assert [batch.rows for batch in plan.micro_batches] == [[0, 2], [1]]
    assert plan.computed_tokens == 2 * 3 + 1


@pytest.mark.parametrize("sharing", [NO_SHARING, SHARING])
def test_no_texts_make_no_micro_batches(sharing: PrefixSharing) -> None:
    plan = plan_micro_batches([], 8, PAD, sharing)
    assert (plan.groups, plan.row_of, plan.unique, plan.logical_tokens) == ([], [], 0, 0)


# --- trie -------------------------------------------------------------------------------------------------------------


@several
@given(st.lists(few_ids, min_size=2, max_size=25))
def test_with_room_no_prefix_is_computed_twice(ids: list[list[int]]) -> None:
    plan = plan_micro_batches(ids, 10**6, PAD, SHARING)
    prefixes = {tuple(text[: length + 1]) for text in ids for length in range(len(text))}
    assert plan.computed_tokens == len(prefixes), "padded only where it computes no more"


@several
@given(st.lists(few_ids, min_size=1, max_size=25), budgets)
def test_a_trie_keeps_to_the_budget_unless_one_text_is_longer(ids: list[list[int]], budget: int) -> None:
    plan = plan_micro_batches(ids, budget, PAD, SHARING)
    for micro in plan.micro_batches:
        longest = max(len(unique_texts(ids, plan)[row]) for row in micro.rows)
        assert micro.computed_tokens <= max(budget, longest)


SHARED = [[1, 2, 3, 4, 5, 6, number] for number in range(10, 20)]
DISTINCT = [[number, 2, 3, 4, 5, 6, 7] for number in range(10, 20)]


def test_the_cheaper_way_is_taken_and_the_reason_has_both_counts() -> None:
    shared = plan_micro_batches(SHARED, 1000, PAD, SHARING)
    assert (shared.layout, shared.computed_tokens) == ("trie", 16)
    assert shared.reason == "16 tokens as a trie, 70 padded"
    distinct = plan_micro_batches(DISTINCT, 1000, PAD, SHARING)
    assert (distinct.layout, distinct.computed_tokens) == ("padded", 70)


def test_a_refusal_and_a_window_are_the_reason() -> None:
    refused = plan_micro_batches(SHARED, 1000, PAD, PrefixSharing("it looks ahead"))
    assert (refused.layout, refused.reason) == ("padded", "it looks ahead")
    narrow = plan_micro_batches(SHARED, 1000, PAD, PrefixSharing(None, max_tokens=6))
    assert (narrow.layout, narrow.reason) == (
        "padded",
        "every text is longer than 6 tokens, more than may share prefixes",
    )
    assert plan_micro_batches(SHARED, 1000, PAD, PrefixSharing(None, max_tokens=7)).layout == "trie"


def test_too_long_texts_are_padded_beside_the_trie() -> None:
    ids = [[*SHARED[0], 99, 99], *SHARED]
    plan = plan_micro_batches(ids, 1000, PAD, PrefixSharing(None, max_tokens=7))
    assert (plan.layout, plan.computed_tokens) == ("trie", 16 + 9)
    assert plan.reason == "16 tokens as a trie, 70 padded; 1 texts longer than 7 tokens are padded"
    assert sorted(row for micro in plan.micro_batches for row in micro.rows) == list(range(11))


def test_plans_are_the_same_each_time() -> None:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 3, size=size).tolist() for size in generator.integers(1, 12, size=60)]
    one, other = (plan_micro_batches(ids, 40, PAD, SHARING) for _ in range(2))
    assert [micro.rows for micro in one.micro_batches] == [micro.rows for micro in other.micro_batches]
    for left, right in zip(one.micro_batches, other.micro_batches, strict=True):
        assert torch.equal(left.ids_BT, right.ids_BT)
