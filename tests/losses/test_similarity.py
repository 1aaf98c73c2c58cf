"""Cosine and the three angles: equal to the slow formulas in value and gradient, and the properties they document."""

import math
from collections.abc import Callable

import pytest
import reference
import torch
from loss_batches import random
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses.similarity import ANGLE_FORMS, Similarity, angle_phase, cosine

SIMILARITIES: dict[str, Similarity] = {"cosine": cosine, **ANGLE_FORMS}
SLOW = {"cosine": reference.cosine, **reference.ANGLE_FORMS}
every_similarity = pytest.mark.parametrize("name", SIMILARITIES)


def turned(x_PD: Tensor, degrees: float) -> Tensor:
    """Every complex column multiplied by exp(i·degrees)."""
    re, im = x_PD.chunk(2, dim=1)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.cat((re * cos - im * sin, re * sin + im * cos), dim=1)


def slow_similarity(name: str, both_2PD: Tensor) -> Tensor:
    return torch.stack(
        [
            torch.as_tensor(SLOW[name](x, y), dtype=torch.float64)
            for x, y in zip(*map(reference.rows_of, both_2PD), strict=True)
        ]
    )


def weighted_sum(similarity: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A scalar that distinguishes pairs: Σ (p + 1)·similarity_p."""
    return lambda both_2PD: (torch.arange(1, both_2PD.shape[1] + 1) * similarity(both_2PD)).sum()


@every_similarity
@pytest.mark.parametrize("columns", [2, 4, 10])
def test_equals_the_slow_formula_in_value_and_gradient(name: str, columns: int) -> None:
    both_2PD = random(2, 7, columns, seed=columns)
    both_2PD[1, 1] = both_2PD[0, 1]  # identical
    both_2PD[0, 2] = 0  # one zero row
    both_2PD[:, 3] = 0  # two zero rows
    both_2PD[0, 4, 0] = both_2PD[0, 4, columns // 2] = 0  # a complex column that is zero on one side
    both_2PD[1, 5] *= 1e3  # of very different norms

    def fast(both: Tensor) -> Tensor:
        return SIMILARITIES[name](both[0], both[1])

    assert_close(fast(both_2PD), slow_similarity(name, both_2PD), rtol=1e-10, atol=1e-10)
    _, gradient = reference.value_and_gradient(weighted_sum(fast), both_2PD)
    _, slow_gradient = reference.value_and_gradient(weighted_sum(lambda x: slow_similarity(name, x)), both_2PD)
    assert_close(gradient, slow_gradient, rtol=1e-10, atol=1e-10)
    assert gradient[0, 0].abs().max() > 0 or (name, columns) == ("paper", 2)


@every_similarity
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([0.0, 0, 0, 0], [1.0, 2, 3, 4]),
        ([0.0, 0, 0, 0], [0.0, 0, 0, 0]),
        ([1.0, 2, 3, 4], [1.0, 2, 3, 4]),
        ([1.0, 2, 3, 4], [-1.0, -2, -3, -4]),
        ([1.0, 0, 1, 0], [0.0, 1, 0, 1]),  # nothing in common
        ([1.0, 0, 0, 0], [0.0, 0, 1, 0]),  # turned by 90°
        ([1.0, 1e-30, 1, 1e-30], [1.0, -1e-30, 1, 1e-30]),  # squares underflow
        ([1e-30, 1e-30, 0, 0], [1.0, 2, 3, 4]),
        ([-1.0, 0, -0.0, 0], [1.0, 0, 0.0, 0]),  # negative real axis, negative zero
    ],
)
def test_value_and_gradient_are_finite_everywhere(
    name: str, dtype: torch.dtype, left: list[float], right: list[float]
) -> None:
    both = torch.tensor([[left], [right]], dtype=dtype)
    value, gradient = reference.value_and_gradient(lambda x: SIMILARITIES[name](x[0], x[1]).sum(), both)
    assert value.abs() <= math.sqrt(2) + 1e-6
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("form", "degrees", "expected"),
    [
        ("reference", 0, 1),
        ("reference", 45, math.sqrt(2)),
        ("reference", -45, 0),
        ("reference", 90, 1),
        ("reference", 135, 0),
        ("reference", 180, 1),  # the opposite row counts as identical
        ("paper", 0, -1),  # identical rows have Δθ = 1, its maximum
        ("paper", 45, -1),  # ignores a common rotation
        ("paper", 90, -1),
        ("paper", 180, -1),
        ("phase", 0, 1),
        ("phase", 45, 0.5),
        ("phase", -45, 0.5),
        ("phase", 90, 0),
        ("phase", 135, -0.5),
        ("phase", 180, -1),
    ],
)
def test_similarity_under_a_common_rotation(form: str, degrees: float, expected: float) -> None:
    right_PD = random(4, 6)
    value_P = ANGLE_FORMS[form](turned(right_PD, degrees), right_PD)
    assert_close(value_P, torch.full_like(value_P, expected), rtol=0, atol=1e-7)


def test_phase_decreases_with_a_common_rotation_at_a_constant_slope() -> None:
    """At 1° from agreement and from opposition the cosine is nearly flat; the slope of the phase is constant."""
    right_PD = random(1, 6)
    value = [angle_phase(turned(right_PD, degrees), right_PD).item() for degrees in range(0, 181, 5)]
    assert value == sorted(value, reverse=True)

    def slope(similarity: Similarity, degrees: float) -> float:
        after = similarity(turned(right_PD, degrees + 0.1), right_PD)
        return (similarity(turned(right_PD, degrees - 0.1), right_PD) - after).item()

    for degrees in (1, 90, 179):
        assert slope(angle_phase, degrees) == pytest.approx(0.2 / 90, rel=1e-6)
    assert slope(cosine, 1) < 0.02 * slope(cosine, 90)
    assert slope(cosine, 179) < 0.02 * slope(cosine, 90)
