"""The in-batch contrast: equal to the slow formulas in value and gradient, and who counts as what for whom."""

import math
from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import blocks
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, contrastive_loss

every_form = pytest.mark.parametrize("form", CONTRASTIVE_FORMS)
Pairs = list[tuple[int, int, float]]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss(
    embeddings_ND: Tensor, pairs: Pairs, form: str, *, temperature: float = 0.3, positive_above: float = 0.5
) -> Tensor:
    left, right, score = zip(*pairs, strict=True) if pairs else ((), (), ())
    return contrastive_loss(
        embeddings_ND,
        torch.tensor(left, dtype=torch.long),
        torch.tensor(right, dtype=torch.long),
        torch.tensor(score, dtype=torch.float64),
        temperature=temperature,
        positive_above=positive_above,
        form=CONTRASTIVE_FORMS[form],
    )


def moved_rows(embeddings_ND: Tensor, pairs: Pairs, form: str) -> set[int]:
    """Rows that receive a gradient."""
    _, gradient = reference.value_and_gradient(lambda x: loss(x, pairs, form), embeddings_ND)
    return set(gradient.any(dim=1).nonzero().flatten().tolist())


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Pairs]:
    """Few rows, so that texts repeat, pairs contradict each other, and a row meets itself; some rows are zero."""
    rows = draw(st.integers(1, 6))
    row = st.integers(0, rows - 1)
    pairs = draw(st.lists(st.tuples(row, row, st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])), max_size=8))
    embeddings_ND = random(rows, 4, seed=draw(st.integers(0, 99)))
    embeddings_ND[draw(st.lists(row, max_size=1))] = 0
    return embeddings_ND, pairs


@every_form
@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    batch=batches(),
    temperature=st.sampled_from([0.05, 1.0]),
    block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]),
)
def test_equals_the_slow_formula_in_value_and_gradient(
    form: str, batch: tuple[Tensor, Pairs], temperature: float, block_elements: int
) -> None:
    """In blocks of one row a side, of three, and in one block."""
    embeddings_ND, pairs = batch

    def slow(x: Tensor) -> Tensor:
        return reference.CONTRASTIVE_FORMS[form](reference.rows_of(x), pairs, temperature, 0.5)

    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        value, gradient = reference.value_and_gradient(
            lambda x: loss(x, pairs, form, temperature=temperature), embeddings_ND
        )
    assert gradient.isfinite().all()
    assert_close((value, gradient), reference.value_and_gradient(slow, embeddings_ND), rtol=1e-10, atol=1e-10)


@every_form
def test_gradient_equals_finite_differences(form: str) -> None:
    pairs = [(0, 1, 1.0), (0, 2, 0.0), (3, 4, 1.0), (1, 5, 1.0)]
    _, gradient = reference.value_and_gradient(lambda x: loss(x, pairs, form), random(6, 4))
    numeric = reference.numeric_gradient(lambda x: loss(x, pairs, form), random(6, 4))
    assert_close(gradient, numeric, rtol=1e-6, atol=1e-7)


@every_form
@pytest.mark.parametrize("pairs", [[], [(0, 1, 0.0), (2, 3, 0.5)], [(0, 0, 1.0), (2, 2, 1.0)]])
def test_without_a_positive_the_loss_is_exactly_zero_and_backward_works(form: str, pairs: Pairs) -> None:
    embeddings_ND = random(4, 6).requires_grad_()
    value = loss(embeddings_ND, pairs, form)
    value.backward()
    assert value == 0
    assert embeddings_ND.grad is not None
    assert not embeddings_ND.grad.any()


@every_form
@pytest.mark.parametrize("temperature", [1.0, 1e-6])
def test_one_pair_alone_has_no_negative_and_loss_zero(form: str, temperature: float) -> None:
    opposite_ND = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    value, gradient = reference.value_and_gradient(
        lambda x: loss(x, [(0, 1, 1.0)], form, temperature=temperature), opposite_ND
    )
    assert value == 0
    assert not gradient.any()


def test_triples_by_hand() -> None:
    """Queries 0, 1; positives 2, 3; hard negatives 4, 5. Forward: cross-entropy of each query over rows 2 .. 5."""
    embeddings_ND = random(6, 4)
    pairs = [(0, 2, 1.0), (1, 3, 1.0), (0, 4, 0.0), (1, 5, 0.0)]
    unit_ND = torch.nn.functional.normalize(embeddings_ND)
    logits = unit_ND[:2] @ unit_ND[2:].T / 0.3
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]))
    assert_close(loss(embeddings_ND, pairs, "forward"), expected)

    everyone = unit_ND @ unit_ND.T / 0.3
    everyone.fill_diagonal_(-math.inf)
    expected = torch.nn.functional.cross_entropy(everyone[:4], torch.tensor([2, 3, 0, 1]))
    assert_close(loss(embeddings_ND, pairs, "symmetric"), expected)


def test_a_repeated_text_does_not_repel_itself_or_its_partners() -> None:
    """Row 0 occurs twice, with partners 1 and 2: as two copies it would be its own negative, and 2 one of (0, 1)."""
    pairs = [(0, 1, 1.0), (0, 2, 1.0)]
    for form in CONTRASTIVE_FORMS:
        embeddings_ND = random(3, 4)
        if form == "forward":
            assert loss(embeddings_ND, pairs, form) == 0  # nobody is left to repel
        assert_close(
            loss(embeddings_ND, pairs, form),
            reference.CONTRASTIVE_FORMS[form](reference.rows_of(embeddings_ND), pairs, 0.3, 0.5),
        )


@every_form
def test_a_pair_labelled_both_ways_is_positive(form: str) -> None:
    embeddings_ND = random(4, 4)
    clean = [(0, 1, 1.0), (2, 3, 1.0)]
    assert_close(loss(embeddings_ND, [*clean, (0, 1, 0.0)], form), loss(embeddings_ND, clean, form))


def test_forward_does_not_repel_a_partner_given_the_other_way_round() -> None:
    """(2, 0, 1) makes 2 a partner of 0; as 2 stands on the right of (3, 2), it would be a candidate for anchor 0."""
    embeddings_ND = random(4, 4)
    pairs = [(0, 1, 1.0), (3, 2, 0.0), (2, 0, 1.0)]
    without = [(0, 1, 1.0), (3, 2, 0.0)]
    assert moved_rows(embeddings_ND, without, "forward") == {0, 1, 2}  # 2 repels 0
    # Anchor 0: positive 1 and nobody left to repel. Anchor 2: positive 0, negative 1. So all but the bystander move ...
    assert moved_rows(embeddings_ND, pairs, "forward") == {0, 1, 2}
    unit_ND = torch.nn.functional.normalize(embeddings_ND)
    near, far = unit_ND[2] @ unit_ND[0] / 0.3, unit_ND[2] @ unit_ND[1] / 0.3
    # ... and anchor 0 adds nothing to the mean over the two anchors.
    assert_close(loss(embeddings_ND, pairs, "forward"), torch.log1p((far - near).exp()) / 2)


def test_forward_leaves_queries_alone_and_symmetric_does_not() -> None:
    """Row 4 stands on no right side: it is no candidate of the forward form."""
    pairs = [(0, 1, 1.0), (2, 3, 1.0), (4, 3, 0.0)]
    assert moved_rows(random(5, 4), pairs, "forward") == {0, 1, 2, 3}
    assert moved_rows(random(5, 4), pairs, "symmetric") == {0, 1, 2, 3, 4}


@every_form
def test_repeating_a_pair_changes_nothing(form: str) -> None:
    pairs = [(0, 1, 1.0), (0, 2, 1.0), (3, 4, 1.0)]
    assert_close(loss(random(5, 4), [*pairs, pairs[0], pairs[0]], form), loss(random(5, 4), pairs, form))


@every_form
def test_positive_above_draws_the_line(form: str) -> None:
    pairs = [(0, 1, 3.0), (2, 3, 4.0), (0, 3, 1.0)]
    assert_close(
        loss(random(4, 4), pairs, form, positive_above=3.5),
        loss(random(4, 4), [(0, 1, 0.0), (2, 3, 1.0), (0, 3, 0.0)], form),
    )


@every_form
def test_no_square_of_all_rows_is_needed_for_few_anchors(form: str) -> None:
    """One positive among 20,000 rows: the similarities are 2 × 20,000 at most, where rows × rows would be 3.2 GB."""
    embeddings_ND = random(20_000, 2)
    value = loss(embeddings_ND, [(0, 1, 1.0), (0, 2, 0.0)], form)
    assert value.isfinite()


@every_form
def test_a_huge_contrast_neither_overflows_nor_gives_nan(form: str) -> None:
    embeddings_ND = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0]])
    value, gradient = reference.value_and_gradient(
        lambda x: loss(x, [(0, 1, 1.0), (2, 3, 1.0), (0, 2, 0.0)], form, temperature=1e-4), embeddings_ND
    )
    assert value.isfinite()
    assert gradient.isfinite().all()


@every_form
def test_a_score_or_temperature_that_cannot_be_meant_is_an_error(form: str) -> None:
    with pytest.raises(ValueError, match="pair 1 has nan"):
        loss(random(4, 4), [(0, 1, 1.0), (2, 3, math.nan)], form)
    with pytest.raises(ValueError, match="temperature must be a finite number greater than 0"):
        loss(random(4, 4), [(0, 1, 1.0)], form, temperature=0)
