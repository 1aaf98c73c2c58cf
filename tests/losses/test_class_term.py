"""The supervised contrastive term: equal to the formula of Khosla et al. in value and gradient, also in blocks."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Part, Relation, blocks

CLASSES = AngleObjective(in_batch_weight=0.0, class_weight=1.0, class_temperature=0.2)


def labelled(*texts: tuple[int, int], text_of: Sequence[int] | None = None) -> Relation:
    """Relation of texts, as (row, class number), with the text number of each row."""
    rows = [row for row, _ in texts]
    numbers = None if text_of is None else torch.tensor(text_of)
    label = torch.tensor([number for _, number in texts]).long()
    return relation([(row, row, 1.0) for row in rows], label=label, text=numbers)


def plain(x_ND: Tensor, texts: list[tuple[int, int]], temperature: float, text_of: Sequence[int] = range(8)) -> Tensor:
    """Equation 2 of arXiv 2004.11362 as written, a loop over anchors, divided by their number."""
    unit_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    known = sorted({text for text in texts if text[1] >= 0})
    losses = []
    for row, number in known:
        positives = [other for other, same in known if same == number and text_of[other] != text_of[row]]
        others = sorted({other for other, _ in known if text_of[other] != text_of[row]})
        if positives:
            logits = unit_ND @ unit_ND[row] / temperature
            denominator = torch.stack([logits[other].exp() for other in others]).sum()
            losses.append(-torch.stack([(logits[p].exp() / denominator).log() for p in positives]).mean())
    return torch.stack(losses).mean() if losses else 0 * x_ND.sum()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 2)), max_size=12),
    st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]),
    st.sampled_from([0.1, 1.0]),
    st.sampled_from([None, [0, 1, 0, 3, 3, 5, 3, 7]]),
)
def test_equals_the_formula_in_value_and_gradient(
    texts: list[tuple[int, int]], elements: int, temperature: float, text_of: list[int] | None
) -> None:
    """Repeated texts, texts of two classes, rows or none, classes of one text; in blocks of one row, of two, and in one."""
    objective = AngleObjective(in_batch_weight=0.0, class_weight=1.0, class_temperature=temperature)
    with patch.object(blocks, "BLOCK_ELEMENTS", elements):
        found = reference.value_and_gradient(
            lambda x: objective(x, labelled(*texts, text_of=text_of)).loss, random(8, 6)
        )
    expected = reference.value_and_gradient(lambda x: plain(x, texts, temperature, text_of or range(8)), random(8, 6))
    assert_close(found, expected, rtol=1e-13, atol=1e-14)  # sums of up to 12 terms of size 1 / temperature


def test_a_repeated_text_is_no_positive_of_itself() -> None:
    once = CLASSES(random(4, 6), labelled((0, 0), (1, 0), (2, 1), (3, 1))).loss
    assert_close(CLASSES(random(4, 6), labelled((0, 0), (1, 0), (0, 0), (2, 1), (3, 1), (2, 1))).loss, once)


def test_a_text_with_two_instructions_is_neither_positive_nor_negative_of_itself() -> None:
    x_ND = random(3, 6)
    for texts in ([(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 1), (2, 1)]):
        assert_close(CLASSES(x_ND, labelled(*texts, text_of=[0, 0, 1])).loss, plain(x_ND, texts, 0.2, [0, 0, 1]))


def test_a_single_text_of_a_class_is_a_negative() -> None:
    x_ND = random(3, 6)
    alone = CLASSES(x_ND[:2], labelled((0, 0), (1, 0)))
    assert abs(alone.loss) < 1e-14  # rounding of two equal sums
    assert CLASSES(x_ND, labelled((0, 0), (1, 0), (2, 1))).loss > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_and_half_precision_have_finite_gradients(dtype: torch.dtype) -> None:
    x_ND = random(4, 6).to(dtype)
    x_ND[1] = 0
    leaf = x_ND.requires_grad_()
    CLASSES(leaf, labelled((0, 0), (1, 0), (2, 1), (3, 1))).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[1].any()


def test_term_beside_other_terms_and_at_nested_widths() -> None:
    x_ND, texts = random(6, 6), [(0, 0), (1, 0), (2, 1), (3, 1)]
    pairs = relation(
        [(row, row, 1.0) for row, _ in texts] + [(4, 5, 1.0)],
        label=torch.tensor([number for _, number in texts] + [-1]),
    )
    both = AngleObjective(class_weight=0.5, class_temperature=0.2)(x_ND, pairs)
    assert_close(both.parts["class"], plain(x_ND, texts, 0.2))
    assert_close(both.loss, both.parts["in_batch"] + 0.5 * both.parts["class"])
    parts = [Part(CLASSES, 0.8, torch.arange(4)), Part(AngleObjective(), 0.2, torch.tensor([4]))]
    assert_close(MixedObjective(parts)(x_ND, pairs).loss, 0.8 * plain(x_ND, texts, 0.2))
    nested = NestedObjective(CLASSES, dimensions=[2])
    halves = (plain(x_ND, texts, 0.2) + plain(x_ND[:, :2], texts, 0.2)) / 2
    assert_close(nested(x_ND, pairs).loss, halves)


def test_missing_labels_are_an_error() -> None:
    with pytest.raises(ValueError, match="class_weight: expected a relation with label"):
        CLASSES(random(2, 6), relation([(0, 1, 1.0)]))
    assert not CLASSES.needs_pairs
    assert CLASSES.needs == {"label"}
