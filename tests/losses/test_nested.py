"""Composed objectives: one on all cuts of the rows, and several on the pairs of one batch."""

from typing import Any

import pytest
import reference
import torch
from loss_batches import random
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Part, Relation

PLAIN = AngleObjective(0.7, 1.3, 0.2, 0.4)
RELATION = Relation(torch.tensor([0, 1, 0, 1]), torch.tensor([2, 3, 4, 5]), torch.tensor([1.0, 0.8, 0.0, 0.3]))
D = 6


def rows(vectors: int) -> Tensor:
    return random(6, vectors * D)


def nested(**cuts: Any) -> NestedObjective:
    return NestedObjective(PLAIN, **cuts)


def at(rows_NC: Tensor, place: int, width: int = D) -> Tensor:
    """The loss of the first columns of one of the vectors."""
    return PLAIN(rows_NC[:, place * D : place * D + width], RELATION).loss


def test_nested_is_the_mean_over_all_depths_and_widths_in_value_and_gradient() -> None:
    """Rows hold the vector after all layers, then those of the inner layers."""

    def ours(x: Tensor) -> Tensor:
        return nested(dimensions=[2, 4], layers=[1, 3])(x, RELATION).loss

    def plainly(x: Tensor) -> Tensor:
        return torch.stack([at(x, place, width) for place in range(3) for width in (2, 4, D)]).mean()

    found, expected = (reference.value_and_gradient(function, rows(3)) for function in (ours, plainly))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_nested_parts_are_those_of_the_whole_and_the_loss_of_every_cut() -> None:
    rows_NC = rows(2).requires_grad_()
    parts = nested(dimensions=[2], layers=[1])(rows_NC, RELATION).parts
    whole = PLAIN(rows_NC[:, :D], RELATION).parts
    assert parts == whole | {
        "dim2": at(rows_NC, 0, 2),
        "layer1_dim2": at(rows_NC, 1, 2),
        "layer1": at(rows_NC, 1),
    }
    assert not any(part.requires_grad for part in parts.values())


def test_widths_and_rows_that_do_not_fit_are_refused() -> None:
    assert NestedObjective(AngleObjective(), dimensions=[2, 3])(rows(1), RELATION).loss > 0, "without an angle"
    for width in (D, D + 2):
        with pytest.raises(ValueError, match=rf"nested\.dimensions.*{width}"):
            nested(dimensions=[2, width])(rows(1), RELATION)
    with pytest.raises(ValueError, match="zip"):
        nested(layers=[1])(torch.zeros(6, 5), RELATION)


RANKING = AngleObjective(cosine_weight=1, in_batch_weight=0)
CONTRAST = AngleObjective(cosine_weight=0.5, in_batch_weight=1)


def test_mixed_value_and_gradient_equal_those_of_the_parts_on_separate_batches() -> None:
    relation = Relation(
        torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 0, 4, 5, 4]), torch.tensor([0.1, 0.9, 0.5, 1.0, 1.0, 0.0])
    )
    parts = [Part(RANKING, 0.5, torch.tensor([0, 2, 1])), Part(CONTRAST, 0.5, torch.tensor([3, 4, 5]))]
    mixed = rows(1).requires_grad_()
    value = MixedObjective(parts)(mixed, relation)
    value.loss.backward()

    apart = rows(1).requires_grad_()
    ranked = RANKING(apart[:3], torch.tensor([0, 2, 1]), torch.tensor([1, 0, 2]), relation.score[[0, 2, 1]])
    # Rows 0, 3, 4, 5: a text of both datasets is a row of both.
    contrasted = CONTRAST(apart[[0, 3, 4, 5]], torch.tensor([1, 2, 0]), torch.tensor([2, 3, 2]), relation.score[3:])
    (0.5 * ranked.loss + 0.5 * contrasted.loss).backward()
    assert_close(value.loss, 0.5 * ranked.loss + 0.5 * contrasted.loss, rtol=1e-14, atol=0)
    assert_close(mixed.grad, apart.grad, rtol=1e-13, atol=1e-16)
    assert set(value.parts) == {"cosine", "in_batch"}
    assert_close(value.parts["in_batch"], contrasted.parts["in_batch"])
    assert_close(value.parts["cosine"], (ranked.parts["cosine"] + contrasted.parts["cosine"]) / 2)


def test_rows_of_another_part_are_not_negatives() -> None:
    relation = Relation(torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([0.3, 1.0]))
    objective = MixedObjective([Part(RANKING, 0.5, torch.tensor([0])), Part(CONTRAST, 0.5, torch.tensor([1]))])
    normalized, far = rows(1), rows(1)
    normalized[0] = normalized[2] * 0.99  # a text of the other part that is almost the anchor
    assert_close(objective(normalized, relation).loss, objective(far, relation).loss, rtol=0, atol=0)
    assert CONTRAST(normalized, relation).loss != CONTRAST(far, relation).loss
