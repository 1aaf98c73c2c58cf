"""The regression term: equal to the slow formula in value and gradient, on the cosine's scale, a part like the others."""

from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, ObjectiveValue, blocks

Pairs = list[tuple[int, int, float]]
REGRESSION = AngleObjective(in_batch_weight=0, regression_weight=1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def apply(objective: AngleObjective, embeddings_ND: Tensor, pairs: Pairs) -> ObjectiveValue:
    left, right, score = zip(*pairs, strict=True) if pairs else ((), (), ())
    return objective(
        embeddings_ND,
        torch.tensor(left, dtype=torch.long),
        torch.tensor(right, dtype=torch.long),
        torch.tensor(score, dtype=torch.float64),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Pairs]:
    """Small batches with repeated pairs, a row with itself, a row of zeros, odd and even sizes."""
    rows = draw(st.integers(2, 6))
    row = st.integers(0, rows - 1)
    pairs = draw(st.lists(st.tuples(row, row, st.sampled_from([-1.0, 0.0, 0.25, 0.6, 1.0])), max_size=8))
    embeddings_ND = random(rows, draw(st.integers(1, 6)), seed=draw(st.integers(0, 99)))
    if draw(st.booleans()):
        embeddings_ND[0] = 0
    return embeddings_ND, pairs


@settings(derandomize=True, deadline=None, max_examples=60)
@given(batch=batches(), block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]))
def test_equals_the_slow_formula_in_value_and_gradient(batch: tuple[Tensor, Pairs], block_elements: int) -> None:
    embeddings_ND, pairs = batch

    def slow(x: Tensor) -> Tensor:
        rows = reference.rows_of(x)
        cosines = [reference.cosine(rows[left], rows[right]) for left, right, _ in pairs]
        return reference.regression_loss(cosines, [score for _, _, score in pairs])

    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        fast = reference.value_and_gradient(lambda x: apply(REGRESSION, x, pairs).loss, embeddings_ND)
    assert_close(fast, reference.value_and_gradient(slow, embeddings_ND), rtol=1e-10, atol=1e-10)


def test_is_added_to_the_other_parts_under_its_name() -> None:
    """It shares the cosines of pairs with ranking and contrast: their gradients meet."""
    embeddings_ND, pairs = random(6, 4), [(0, 1, 0.2), (2, 3, 0.9), (0, 4, 0.6)]
    others = AngleObjective(0.7, 1.3, 0.2)
    both = apply(AngleObjective(0.7, 1.3, 0.2, 0.5), embeddings_ND, pairs)
    assert list(both.parts) == ["cosine", "in_batch", "angle", "regression"]
    alone = apply(REGRESSION, embeddings_ND, pairs)
    assert both.parts["regression"] == alone.loss == alone.parts["regression"]

    def gradient(objective: AngleObjective) -> Tensor:
        return reference.value_and_gradient(lambda x: apply(objective, x, pairs).loss, embeddings_ND)[1]

    together = gradient(others) + 0.5 * gradient(REGRESSION)
    assert_close(gradient(AngleObjective(0.7, 1.3, 0.2, 0.5)), together, rtol=1e-10, atol=1e-12)


def test_is_zero_where_cosines_are_the_scores_and_without_pairs() -> None:
    rows_ND = torch.tensor([[1.0, 0], [0, 2], [3, 0]], requires_grad=True)
    assert apply(REGRESSION, rows_ND, [(0, 1, 0.0), (0, 2, 1.0)]).loss == 0
    nothing = apply(REGRESSION, rows_ND, [])
    nothing.loss.backward()
    assert nothing.loss == 0
    assert rows_ND.grad is not None
    assert not rows_ND.grad.any()


def test_grades_on_another_scale_than_the_cosine_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"scores from -1 to 1.*pair 1 has 4.5.*data.score_range"):
        apply(REGRESSION, random(3, 4), [(0, 1, 1.0), (1, 2, 4.5)])


def test_a_weight_that_cannot_be_meant_is_an_error() -> None:
    with pytest.raises(ValueError, match="regression_weight must be a finite number, 0 or more; got -1"):
        AngleObjective(regression_weight=-1)
