"""The in-batch contrast: equal to the slow formulas in value and gradient; which rows are positives and negatives."""

import math
from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import TRIPLES, Pairs, batches, random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, blocks
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS

every_form = pytest.mark.parametrize("form", CONTRASTIVE_FORMS)


def loss(
    x_ND: Tensor,
    pairs: Pairs,
    form: str,
    *,
    temperature: float = 0.3,
    positive_above: float = 0.5,
    text: list[int] | None = None,
) -> Tensor:
    objective = AngleObjective(in_batch_temperature=temperature, contrastive_form=form, positive_above=positive_above)
    return objective(x_ND, relation(pairs, text=None if text is None else torch.tensor(text))).loss


def rows_with_gradient(embeddings_ND: Tensor, pairs: Pairs, form: str) -> set[int]:
    _, gradient = reference.value_and_gradient(lambda x: loss(x, pairs, form), embeddings_ND)
    return set(gradient.any(dim=1).nonzero().flatten().tolist())


@every_form
@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    batch=batches(((0.0, 0.3, 0.5, 0.8, 1.0),)),
    temperature=st.sampled_from([0.05, 1.0]),
    block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]),
    texts=st.none() | st.lists(st.sampled_from([3, 5, 8, 9, 11]), min_size=6, max_size=6),
)
def test_equals_the_slow_formula_in_value_and_gradient(
    form: str, batch: tuple[Tensor, Pairs], temperature: float, block_elements: int, texts: list[int] | None
) -> None:
    """In blocks of one row a side, of three, and in one block; with a text as one row, and as several."""
    embeddings_ND, pairs = batch
    text = None if texts is None else texts[: len(embeddings_ND)]

    def slow(x: Tensor) -> Tensor:
        return reference.CONTRASTIVE_FORMS[form](reference.rows_of(x), pairs, temperature, 0.5, text)

    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        found = reference.value_and_gradient(
            lambda x: loss(x, pairs, form, temperature=temperature, text=text), embeddings_ND
        )
    assert found[1].isfinite().all()
    assert_close(found, reference.value_and_gradient(slow, embeddings_ND), rtol=1e-10, atol=1e-10)


@every_form
@pytest.mark.parametrize("temperature", [1.0, 1e-6])
def test_a_single_pair_has_no_negative_and_loss_zero(form: str, temperature: float) -> None:
    opposite_ND = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    value, gradient = reference.value_and_gradient(
        lambda x: loss(x, [(0, 1, 1.0)], form, temperature=temperature), opposite_ND
    )
    assert value == 0
    assert not gradient.any()


def test_triples_equal_torch_cross_entropy() -> None:
    """Queries 0, 1; positives 2, 3; hard negatives 4, 5. Forward: cross-entropy of each query over rows 2 .. 5."""
    embeddings_ND = random(6, 4)
    unit_ND = torch.nn.functional.normalize(embeddings_ND)
    logits = unit_ND[:2] @ unit_ND[2:].T / 0.3
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]))
    assert_close(loss(embeddings_ND, TRIPLES, "forward"), expected)

    all_logits = (unit_ND @ unit_ND.T / 0.3).fill_diagonal_(-math.inf)
    expected = torch.nn.functional.cross_entropy(all_logits[:4], torch.tensor([2, 3, 0, 1]))
    assert_close(loss(embeddings_ND, TRIPLES, "symmetric"), expected)


def test_partners_of_a_repeated_text_are_not_its_negatives() -> None:
    """Row 0 has partners 1 and 2: as two copies it would be its own negative."""
    assert loss(random(3, 4), [(0, 1, 1.0), (0, 2, 1.0)], "forward") == 0


@every_form
def test_a_repeated_pair_and_a_contradictory_label_do_not_change_the_loss(form: str) -> None:
    pairs = [(0, 1, 1.0), (0, 2, 1.0), (3, 4, 1.0)]
    for more in ([pairs[0], pairs[0]], [(0, 1, 0.0)]):  # a pair labelled both ways is positive
        assert_close(loss(random(5, 4), [*pairs, *more], form), loss(random(5, 4), pairs, form))


def test_forward_does_not_repel_a_partner_given_in_the_other_direction() -> None:
    """(2, 0, 1) makes 2 a partner of 0; on the right of (3, 2), row 2 would be a candidate for anchor 0."""
    embeddings_ND = random(4, 4)
    without = [(0, 1, 1.0), (3, 2, 0.0)]
    assert rows_with_gradient(embeddings_ND, without, "forward") == {0, 1, 2}  # anchor 0 repels 2
    pairs = [*without, (2, 0, 1.0)]
    # Anchor 0: positive 1, no negatives; it adds 0 to the mean over two anchors. Anchor 2: positive 0, negative 1.
    unit_ND = torch.nn.functional.normalize(embeddings_ND)
    near, far = unit_ND[2] @ unit_ND[0] / 0.3, unit_ND[2] @ unit_ND[1] / 0.3
    assert_close(loss(embeddings_ND, pairs, "forward"), torch.log1p((far - near).exp()) / 2)


def test_forward_omits_queries_and_symmetric_does_not() -> None:
    """Row 4 is on no right side, so it is not a candidate of the forward form."""
    pairs = [(0, 1, 1.0), (2, 3, 1.0), (4, 3, 0.0)]
    assert rows_with_gradient(random(5, 4), pairs, "forward") == {0, 1, 2, 3}
    assert rows_with_gradient(random(5, 4), pairs, "symmetric") == {0, 1, 2, 3, 4}


def test_a_text_on_two_sides_is_no_negative_of_itself_or_its_partners() -> None:
    """Rows 0 and 2 are one text. Anchor 0 skips 2; anchor 2 skips 0, and 1, the partner of its text."""
    pairs, text = [(0, 1, 1.0), (3, 2, 1.0)], [7, 8, 7, 9]
    unit_ND = torch.nn.functional.normalize(random(4, 4))
    near, far = unit_ND[3] @ unit_ND[2] / 0.3, unit_ND[3] @ unit_ND[1] / 0.3
    expected = torch.log1p((far - near).exp()) / 2  # anchor 0 has no negatives
    assert_close(loss(random(4, 4), pairs, "forward", text=text), expected)


@every_form
def test_positive_above_is_the_threshold(form: str) -> None:
    pairs = [(0, 1, 3.0), (2, 3, 4.0), (0, 3, 1.0)]
    assert_close(
        loss(random(4, 4), pairs, form, positive_above=3.5),
        loss(random(4, 4), [(0, 1, 0.0), (2, 3, 1.0), (0, 3, 0.0)], form),
    )


@every_form
def test_few_anchors_need_no_square_of_all_rows(form: str) -> None:
    """One positive among 20,000 rows: the similarities are at most 2 × 20,000; rows × rows would be 3.2 GB."""
    assert loss(random(20_000, 2), [(0, 1, 1.0), (0, 2, 0.0)], form).isfinite()


@every_form
def test_large_logits_neither_overflow_nor_give_nan(form: str) -> None:
    embeddings_ND = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0]])
    found = reference.value_and_gradient(
        lambda x: loss(x, [(0, 1, 1.0), (2, 3, 1.0), (0, 2, 0.0)], form, temperature=1e-4), embeddings_ND
    )
    assert all(part.isfinite().all() for part in found)
