"""Gradient shares of the loss terms, compared with a formula derived by hand."""

import math

import pytest
import torch
from ablation_parts.saturation import EDGES, TERMS, saturation

from angle_llm.data.formats import ScoredPair


def at_angles(*degrees: float) -> tuple[dict[str, torch.Tensor], list[ScoredPair]]:
    """Pairs in the plane, each in directions of its own, `degrees` apart; scores fall with the angle."""
    rows, examples = {}, []
    for number, degree in enumerate(degrees):
        start, angle = 0.3 * number, math.radians(degree)
        rows[f"a{number}"] = 3.0 * torch.tensor([math.cos(start), math.sin(start)], dtype=torch.float64)
        rows[f"b{number}"] = 0.5 * torch.tensor([math.cos(start + angle), math.sin(start + angle)], dtype=torch.float64)
        examples.append(ScoredPair(f"a{number}", f"b{number}", number / len(degrees)))
    return rows, examples


def test_gradient_of_the_regression_term() -> None:
    """d/dθ of (cos θ − s)² is 2 (cos θ − s) sin θ, for each of the two directions of a pair."""
    degrees = (10.0, 40.0, 100.0, 170.0)
    rows, examples = at_angles(*degrees)
    found = saturation(rows, examples)
    pull = [
        abs(math.cos(math.radians(d)) - e.score) * math.sin(math.radians(d))
        for d, e in zip(degrees, examples, strict=True)
    ]
    zones = [0.0] * (len(EDGES) - 1)
    for degree, share in zip(degrees, pull, strict=True):
        zone = max(i for i, edge in enumerate(EDGES[:-1]) if math.cos(math.radians(degree)) >= edge)
        zones[zone] += share / sum(pull)
    assert found["terms"]["regression"] == pytest.approx(zones, abs=1e-12)
    assert found["saturated"]["regression"] == pytest.approx((pull[0] + pull[3]) / sum(pull), abs=1e-12)
    assert found["saturated"]["pairs"] == 0.5


def test_shares_sum_to_one_and_do_not_depend_on_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(8, generator=generator, dtype=torch.float64) for name in map(str, range(60))}
    examples = [ScoredPair(str(i), str((7 * i + 1) % 60), (i % 6) / 5) for i in range(60)]  # rows in several pairs
    found = saturation(rows, examples, batch_size=25)
    assert set(found["terms"]) == set(TERMS)
    for shares in (found["pairs"], *found["terms"].values()):
        assert sum(shares) == pytest.approx(1)
    longer = saturation({name: row * (1 + int(name)) for name, row in rows.items()}, examples, batch_size=25)
    for name in ("cosine", "in_batch", "regression"):
        assert longer["terms"][name] == pytest.approx(found["terms"][name], abs=1e-9)
