"""`AngleObjective`: the loss against an independent slow formula, and invalid arguments."""

import pytest
import reference_loss
import torch

from angle_llm import AngleObjective, ObjectiveValue

TEXTS = 9
LEFT, RIGHT = [0, 0, 2, 4, 4, 6, 8, 3, 0], [1, 2, 3, 5, 7, 7, 8, 2, 5]
SCORE = [1.0, 0.0, 0.9, 0.7, 0.1, 1.0, 1.0, 0.4, 0.8]
"""Rows with two partners, a pair given both ways with two scores, and a text paired with itself."""


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TEXTS, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def value(objective: AngleObjective, x: torch.Tensor) -> ObjectiveValue:
    return objective(x, torch.tensor(LEFT), torch.tensor(RIGHT), torch.tensor(SCORE, dtype=torch.float64))


@pytest.mark.parametrize("angle_form", ["phase", "reference", "paper"])
@pytest.mark.parametrize("contrastive_form", ["symmetric", "forward"])
def test_value_parts_and_gradient_equal_the_slow_formula(angle_form: str, contrastive_form: str) -> None:
    weights = {"cosine": 1.0, "in_batch": 17.5, "angle": 0.5, "regression": 2.0}
    objective = AngleObjective(
        **{f"{name}_weight": weight for name, weight in weights.items()},
        cosine_temperature=0.1,
        in_batch_temperature=0.07,
        angle_temperature=0.9,
        angle_form=angle_form,
        contrastive_form=contrastive_form,
    )
    forms = {"angle_form": angle_form, "contrastive_form": contrastive_form}
    x, y = rows(), rows()
    due = reference_loss.parts(y, LEFT, RIGHT, SCORE, temperature=(0.1, 0.07, 0.9), **forms)
    loss = sum(weights[name] * part for name, part in due.items())
    result = value(objective, x)
    torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=1e-10)
    assert set(result.parts) == set(due)
    for name, part in due.items():
        torch.testing.assert_close(result.parts[name], part.detach(), rtol=1e-10, atol=1e-10)
    result.loss.backward()
    (gradient,) = torch.autograd.grad(loss, y)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("part", ["cosine", "in_batch", "angle", "regression"])
def test_a_part_of_weight_0_is_absent(part: str) -> None:
    names = ("cosine", "in_batch", "angle", "regression")
    weights = {f"{name}_weight": float(name == part) for name in names}
    result = value(AngleObjective(**weights), rows(torch.float32))
    assert list(result.parts) == [part]
    assert float(result.loss.detach()) == pytest.approx(float(result.parts[part]))


def test_half_precision_is_raised_to_float32() -> None:
    x = rows(torch.bfloat16)
    result = value(AngleObjective(cosine_weight=1, angle_weight=1), x)
    assert result.loss.dtype == torch.float32
    result.loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "settings",
    [
        {"in_batch_weight": 0.0},
        {"cosine_weight": -1.0},
        {"angle_weight": float("nan")},
        {"in_batch_temperature": 0.0},
        {"angle_form": "fase"},
        {"contrastive_form": "backward"},
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        AngleObjective(**settings)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("left", torch.tensor([TEXTS] * len(LEFT))),
        ("right", torch.zeros(2, dtype=torch.int64)),
        ("left", torch.tensor(SCORE)),
    ],
)
def test_a_relation_that_does_not_match_the_rows_is_refused(name: str, wrong: torch.Tensor) -> None:
    relation = {"left": torch.tensor(LEFT), "right": torch.tensor(RIGHT)} | {name: wrong}
    with pytest.raises(ValueError, match=name):
        AngleObjective()(rows(), relation["left"], relation["right"], torch.tensor(SCORE))


def test_scores_that_are_not_finite_are_refused() -> None:
    score = torch.tensor([float("nan"), *SCORE[1:]])
    with pytest.raises(ValueError, match=r"(?i)score.*nan|nan.*score"):
        AngleObjective(cosine_weight=1)(rows(), torch.tensor(LEFT), torch.tensor(RIGHT), score)
