"""Ranking and regression: equal to the double sum in value and gradient, in linear memory, never NaN."""

import time

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective
from angle_llm.losses.ranking import ranking_loss, regression_loss

SCORES = [0.0, 0.2, 0.5, 1.0, 3.75, 5.0]  # few values, so that ties are common


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    pairs=st.lists(st.tuples(st.floats(-1, 1), st.sampled_from(SCORES)), max_size=9),
    temperature=st.sampled_from([0.05, 1.0, 3.0]),
)
def test_equal_to_the_double_sum_in_value_and_gradient(pairs: list[tuple[float, float]], temperature: float) -> None:
    similarity_P, score_P = tensor([x for x, _ in pairs]), tensor([y for _, y in pairs])
    for fast, slow in (
        (
            lambda x: ranking_loss(x, score_P, temperature),
            lambda x: reference.ranking_loss(list(x.unbind()), score_P.tolist(), temperature),
        ),
        (
            lambda x: regression_loss(x, score_P / 5),
            lambda x: reference.regression_loss(list(x.unbind()), (score_P / 5).tolist()),
        ),
    ):
        found, expected = (reference.value_and_gradient(function, similarity_P) for function in (fast, slow))
        assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("score", [[], [0.7], [1.0, 1.0, 1.0], [0.0, -0.0]])
def test_without_distinct_scores_the_loss_is_exactly_zero_and_backward_works(score: list[float]) -> None:
    similarity_P = torch.linspace(-1, 1, len(score), dtype=torch.float64, requires_grad=True)
    loss = ranking_loss(similarity_P, tensor(score), 0.05)
    loss.backward()
    assert loss == 0
    assert similarity_P.grad is not None
    assert not similarity_P.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("descending", [False, True])
def test_large_magnitudes_neither_overflow_nor_give_nan(dtype: torch.dtype, size: float, descending: bool) -> None:
    """exp(1000) is infinite; the loss is then the largest difference, and its gradient goes to the worst pairs."""
    similarity_P = (size * torch.linspace(-1, 1, 5, dtype=torch.float64)).to(dtype)
    score_P = torch.arange(5).flip(0) if descending else torch.arange(5)
    value, gradient = reference.value_and_gradient(lambda x: ranking_loss(x, score_P, 1.0), similarity_P)
    assert_close(value.item(), 2 * size if descending else 0.0, rtol=1e-3, atol=1e-6)
    assert_close(gradient, torch.tensor([-1, 0, 0, 0, 1.0], dtype=dtype) * descending, rtol=1e-3, atol=1e-3)


def test_two_hundred_thousand_pairs_take_seconds_and_linear_memory() -> None:
    """The matrix of differences would have 4e10 elements, 320 GB."""
    pairs = 200_000
    generator = torch.Generator().manual_seed(0)
    similarity_P = torch.rand(pairs, dtype=torch.float64, generator=generator)
    score_P = torch.randint(0, 50, (pairs,), generator=generator)
    start = time.perf_counter()
    value, gradient = reference.value_and_gradient(lambda x: ranking_loss(x, score_P, 0.05), similarity_P)
    assert time.perf_counter() - start < 20
    assert abs(gradient.sum()) < 1e-9  # only differences count
    # The product form, unprotected: Σ_j exp(-s_j) Σ_{i below j} exp(s_i), by score.
    up = torch.zeros(50, dtype=torch.float64).index_add(0, score_P, (similarity_P / 0.05).exp())
    down = torch.zeros(50, dtype=torch.float64).index_add(0, score_P, (-similarity_P / 0.05).exp())
    assert_close(value, torch.log1p((down * (up.cumsum(0) - up)).sum()), rtol=1e-10, atol=1e-10)


def test_regression_is_zero_where_cosines_are_the_scores_and_refuses_grades_beyond_the_cosine() -> None:
    objective = AngleObjective(in_batch_weight=0, regression_weight=1)
    assert objective(torch.tensor([[1.0, 0], [0, 2], [3, 0]]), relation([(0, 1, 0.0), (0, 2, 1.0)])).loss == 0
    with pytest.raises(ValueError, match=r"4\.5.*pair 1.*data\.score_range"):
        objective(random(3, 4), relation([(0, 1, 1.0), (1, 2, 4.5)]))
