"""Objectives of different sets in one batch: each on its own pairs and rows, added up by share."""

import torch
from torch import Tensor

from angle_llm.losses import AngleObjective
from angle_llm.losses.joint import JointObjective, Part

RANKING = AngleObjective(cosine_weight=1, in_batch_weight=0)
CONTRAST = AngleObjective(cosine_weight=0.5, in_batch_weight=1)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(first: list[int], second: list[int]) -> JointObjective:
    pairs = len(first) + len(second)
    return JointObjective(
        [
            Part(RANKING, len(first) / pairs, torch.tensor(first)),
            Part(CONTRAST, len(second) / pairs, torch.tensor(second)),
        ]
    )


def test_value_and_gradient_are_those_of_the_parts_on_batches_of_their_own() -> None:
    left, right = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 0, 4, 5, 4])
    score = torch.tensor([0.1, 0.9, 0.5, 1.0, 1.0, 0.0])
    joint = rows().requires_grad_()
    value = both([0, 2, 1], [3, 4, 5])(joint, left, right, score)
    value.loss.backward()

    apart = rows().requires_grad_()
    ranked = RANKING(apart[:3], torch.tensor([0, 2, 1]), torch.tensor([1, 0, 2]), score[[0, 2, 1]])
    # Rows 0, 3, 4, 5: a text of both sets is a row of both.
    contrasted = CONTRAST(apart[[0, 3, 4, 5]], torch.tensor([1, 2, 0]), torch.tensor([2, 3, 2]), score[3:])
    (0.5 * ranked.loss + 0.5 * contrasted.loss).backward()
    torch.testing.assert_close(value.loss, 0.5 * ranked.loss + 0.5 * contrasted.loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(joint.grad, apart.grad, rtol=1e-13, atol=1e-16)
    assert set(value.parts) == {"cosine", "in_batch"}
    torch.testing.assert_close(value.parts["in_batch"], contrasted.parts["in_batch"])
    torch.testing.assert_close(value.parts["cosine"], (ranked.parts["cosine"] + contrasted.parts["cosine"]) / 2)


def test_rows_of_another_set_are_no_negatives() -> None:
    left, right, score = torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([0.3, 1.0])
    objective = both([0], [1])
    near, far = rows(), rows()
    near[0] = near[2] * 0.99  # a text of the other set that is almost the anchor
    one = objective(near, left, right, score).loss
    other = objective(far, left, right, score).loss
    # Of the second part nothing has changed, and the first, a single pair, has nothing to rank.
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    alone = CONTRAST(far, left[1:], right[1:], score[1:])
    together = CONTRAST(far, left, right, torch.tensor([0.3, 1.0]))
    assert alone.loss != together.loss
