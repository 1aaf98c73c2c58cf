"""Micro-batches: every text once, padded on the right, within the budget, longest first."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.modeling.microbatches import MicroBatch, padded_tokens, plan_micro_batches

PAD = 9

texts = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), max_size=25)  # PAD is a real id too
budgets = st.integers(1, 60)
several = settings(derandomize=True, deadline=None, max_examples=150)


def real_ids(batch: MicroBatch, position: int) -> list[int]:
    return batch.ids_BT[position][batch.mask_BT[position].bool()].tolist()


@several
@given(texts, budgets)
def test_every_text_is_in_exactly_one_micro_batch_unchanged(ids: list[list[int]], budget: int) -> None:
    batches = plan_micro_batches(ids, budget, PAD)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(ids)))
    for batch in batches:
        assert [real_ids(batch, position) for position in range(len(batch.rows))] == [ids[row] for row in batch.rows]


@several
@given(texts, budgets)
def test_the_budget_holds_padding_included_unless_one_text_is_longer(ids: list[list[int]], budget: int) -> None:
    for batch in plan_micro_batches(ids, budget, PAD):
        assert batch.ids_BT.numel() <= budget or len(batch.rows) == 1


@several
@given(texts, budgets)
def test_padding_is_on_the_right_and_no_wider_than_the_longest(ids: list[list[int]], budget: int) -> None:
    for batch in plan_micro_batches(ids, budget, PAD):
        assert batch.ids_BT.shape == batch.mask_BT.shape
        assert batch.ids_BT.dtype == batch.mask_BT.dtype == torch.long
        lengths = batch.mask_BT.sum(dim=1)
        assert batch.mask_BT.shape[1] == lengths.max()
        for mask_T, ids_T, length in zip(batch.mask_BT, batch.ids_BT, lengths.tolist(), strict=True):
            assert mask_T.tolist() == [1] * length + [0] * (len(mask_T) - length)
            assert (ids_T[length:] == PAD).all()


@several
@given(texts, budgets)
def test_longest_first_and_equal_lengths_in_the_order_given(ids: list[list[int]], budget: int) -> None:
    rows = [row for batch in plan_micro_batches(ids, budget, PAD) for row in batch.rows]
    assert rows == sorted(range(len(ids)), key=lambda row: -len(ids[row]))


@several
@given(texts, budgets)
def test_no_micro_batch_has_room_for_the_next_text(ids: list[list[int]], budget: int) -> None:
    batches = plan_micro_batches(ids, budget, PAD)
    for batch in batches[:-1]:
        assert (len(batch.rows) + 1) * batch.ids_BT.shape[1] > budget


def test_padded_tokens_counts_what_the_model_computes() -> None:
    batches = plan_micro_batches([[1, 2, 3], [4], [5, 6]], 6, PAD)
    assert [batch.rows for batch in batches] == [[0, 2], [1]]
    assert padded_tokens(batches) == 2 * 3 + 1


def test_no_texts_make_no_micro_batches() -> None:
    assert plan_micro_batches([], 8, PAD) == []
