"""The nested objective: the plain one on every cut of the rows, weighted; faithful to its settings, helpful when misused."""

from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch.testing import assert_close

from angle_llm.config import NestedSettings, ObjectiveSettings, SettingsError, TrainSettings
from angle_llm.losses import AngleObjective
from angle_llm.losses.nested import NestedObjective, objective_for

PLAIN = AngleObjective(0.7, 1.3, 0.2, 0.4)
LEFT_P, RIGHT_P = torch.tensor([0, 1, 0, 1]), torch.tensor([2, 3, 4, 5])
SCORE_P = torch.tensor([1.0, 0.8, 0.0, 0.3])
D = 6


def rows(vectors: int) -> Tensor:
    return torch.randn(6, vectors * D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def nested(**settings: Any) -> NestedObjective:
    return NestedObjective(PLAIN, NestedSettings(**settings))


def at(rows_NC: Tensor, place: int, width: int = D) -> Tensor:
    """The loss of the first columns of one of the vectors."""
    return PLAIN(rows_NC[:, place * D : place * D + width], LEFT_P, RIGHT_P, SCORE_P).loss


def test_is_the_mean_over_all_depths_at_all_widths_in_value_and_gradient() -> None:
    """Rows hold the vector after all layers, then those of the inner layers."""

    def ours(x: Tensor) -> Tensor:
        return nested(dimensions=[2, 4], layers=[1, 3])(x, LEFT_P, RIGHT_P, SCORE_P).loss

    def plainly(x: Tensor) -> Tensor:
        return torch.stack([at(x, place, width) for place in range(3) for width in (2, 4, D)]).mean()

    assert_close(
        reference.value_and_gradient(ours, rows(3)),
        reference.value_and_gradient(plainly, rows(3)),
        rtol=1e-12,
        atol=1e-12,
    )


def test_weights_are_proportions_and_the_last_is_that_of_the_whole() -> None:
    objective = nested(dimensions=[2], layers=[1], dimension_weights=[1, 3], layer_weights=[2, 8])
    expected = 0.2 * (0.25 * at(rows(2), 1, 2) + 0.75 * at(rows(2), 1)) + 0.8 * (
        0.25 * at(rows(2), 0, 2) + 0.75 * at(rows(2), 0)
    )
    assert_close(objective(rows(2), LEFT_P, RIGHT_P, SCORE_P).loss, expected, rtol=1e-12, atol=1e-12)


def test_a_term_of_weight_zero_is_absent_and_does_not_act() -> None:
    objective = nested(dimensions=[2], dimension_weights=[1, 0])
    value, gradient = reference.value_and_gradient(lambda x: objective(x, LEFT_P, RIGHT_P, SCORE_P).loss, rows(1))
    assert value == at(rows(1), 0, 2)
    assert not gradient[:, 2:].any()
    assert list(objective(rows(1), LEFT_P, RIGHT_P, SCORE_P).parts) == ["dim2"]


def test_parts_are_those_of_the_whole_and_the_loss_of_every_cut() -> None:
    rows_NC = rows(2).requires_grad_()
    parts = nested(dimensions=[2], layers=[1])(rows_NC, LEFT_P, RIGHT_P, SCORE_P).parts
    whole = PLAIN(rows_NC[:, :D], LEFT_P, RIGHT_P, SCORE_P).parts
    cuts = {"dim2": at(rows_NC, 0, 2), "layer1_dim2": at(rows_NC, 1, 2), "layer1": at(rows_NC, 1)}
    assert parts == whole | cuts
    assert not any(part.requires_grad for part in parts.values())


def test_settings_that_name_no_cut_ask_for_the_plain_objective() -> None:
    assert objective_for(ObjectiveSettings(angle_weight=0.3), NestedSettings()) == AngleObjective(angle_weight=0.3)
    assert isinstance(objective_for(ObjectiveSettings(), NestedSettings(layers=[2])), NestedObjective)


@pytest.mark.parametrize("values", [[4, 2], [2, 2], [0, 2], [-2]])
@pytest.mark.parametrize("name", ["dimensions", "layers"])
def test_cuts_that_do_not_ascend_are_an_error(name: str, values: list[int]) -> None:
    with pytest.raises(SettingsError, match=f"nested.{name} must ascend from 1 or more, each number once"):
        NestedSettings(**{name: values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dimensions": [2, 4], "dimension_weights": [1.0, 1.0]},
            "dimension_weights needs 3 numbers, the last for all",
        ),
        ({"layer_weights": [1.0, 1.0]}, "layer_weights needs 1 numbers"),
        (
            {"layers": [2], "layer_weights": [1.0, -1.0]},
            "layer_weights must be finite numbers, 0 or more, and not all 0",
        ),
        ({"layers": [2], "layer_weights": [0.0, 0.0]}, "and not all 0"),
        ({"layers": [2], "layer_weights": [1.0, float("nan")]}, "must be finite numbers"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        NestedSettings(**settings)


def test_an_odd_width_is_an_error_with_an_angle_and_fine_without() -> None:
    with pytest.raises(ValueError, match=r"nested.dimensions has 3.*even number.*set objective.angle_weight to 0"):
        nested(dimensions=[2, 3])
    without = NestedObjective(AngleObjective(), NestedSettings(dimensions=[2, 3]))
    assert without(rows(1), LEFT_P, RIGHT_P, SCORE_P).loss > 0


@pytest.mark.parametrize("width", [D, D + 2])
def test_a_width_that_is_not_below_the_full_one_is_an_error(width: int) -> None:
    with pytest.raises(ValueError, match=f"nested.dimensions must be below {D}, which is the full width.*got {width}"):
        nested(dimensions=[2, width])(rows(1), LEFT_P, RIGHT_P, SCORE_P)


@pytest.mark.parametrize("embeddings", [torch.zeros(6, 7), torch.zeros(6)])
def test_rows_that_are_not_so_many_vectors_are_an_error(embeddings: Tensor) -> None:
    with pytest.raises(ValueError, match=r"matrix \(N, 2·D\).*Was the encoder told to read these layers\?"):
        nested(layers=[1])(embeddings, LEFT_P, RIGHT_P, SCORE_P)


def test_a_run_without_cuts_has_the_fingerprint_it_had_before_there_were_any() -> None:
    """Checkpoints are known by it; the figure is that of the version before."""
    assert TrainSettings().fingerprint() == "4ca8b9ecdd35551b"
    assert TrainSettings(nested=NestedSettings(dimensions=[64])).fingerprint() != TrainSettings().fingerprint()
