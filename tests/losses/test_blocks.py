"""The loss in blocks: equal to one block, no large matrix, one gradient, deterministic.

Equality with the slow formulas, in blocks of one row and of a few, is in ``test_angle`` and ``test_contrastive``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from cases import one_in
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from angle_llm.losses import AngleObjective, Relation, blocks
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS
from angle_llm.losses.similarity import ANGLE_FORMS

ROWS, COLUMNS, PAIRS = 40, 8, 100


@contextmanager
def block_elements(count: int) -> Iterator[None]:
    with patch.object(blocks, "BLOCK_ELEMENTS", count):
        yield


def batch(seed: int = 0, rows: int = ROWS, pairs: int = PAIRS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs that repeat and contradict each other, a hub, ties, a zero row, equal rows; a row in no pair."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(rows, COLUMNS, dtype=torch.float64, generator=generator)
    x_ND[1], x_ND[2] = 0, x_ND[3]
    left_P, right_P = torch.randint(0, rows - 1, (2, pairs), generator=generator)
    left_P[: pairs // 10] = 5
    return x_ND, left_P, right_P, torch.randint(0, 4, (pairs,), generator=generator) / 3


def objective(form: str = "symmetric", angle: str = "phase") -> AngleObjective:
    return AngleObjective(0.7, 1.3, 0.2, contrastive_form=form, angle_form=angle)


def loss_and_gradient(
    of: AngleObjective, x_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor
) -> tuple[Tensor, Tensor]:
    leaf_ND = x_ND.clone().requires_grad_()
    loss = of(leaf_ND, left_P, right_P, score_P).loss
    (gradient_ND,) = torch.autograd.grad(0.5 * loss, leaf_ND)
    return loss.detach(), gradient_ND


@one_in(5, "form, angle, elements", CONTRASTIVE_FORMS, ANGLE_FORMS, [1, 2 * 3 * COLUMNS, 2 * 7 * COLUMNS, 1000])
def test_any_block_size_gives_the_result_of_one_block(form: str, angle: str, elements: int) -> None:
    whole = loss_and_gradient(objective(form, angle), *batch())
    with block_elements(elements):
        assert_close(loss_and_gradient(objective(form, angle), *batch()), whole, rtol=1e-10, atol=1e-12)


class Tensors(TorchDispatchMode):
    """Records the size of every tensor an operation makes, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.floats: list[int] = []
        self.others: list[int] = []

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in before:
                (self.floats if tensor.is_floating_point() else self.others).append(tensor.numel())
        return result


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@one_in(2, "form, angle", CONTRASTIVE_FORMS, ANGLE_FORMS)
def test_there_is_one_gradient_and_no_other_large_tensor(form: str, angle: str) -> None:
    """N × D = 1920. The anchors times candidates are over 10,000, the pairs times columns 3840."""
    rows, pairs, elements = 240, 480, 410
    x_ND, left_P, right_P, score_P = batch(rows=rows, pairs=pairs)
    x_ND.requires_grad_()
    with block_elements(elements), Tensors() as forward:
        loss = objective(form, angle)(x_ND, left_P, right_P, score_P).loss
    with block_elements(elements), Tensors() as backward:
        (gradient_ND,) = torch.autograd.grad(0.5 * loss, x_ND)
    assert gradient_ND.numel() == rows * COLUMNS
    assert [size for size in backward.floats if size > max(elements, pairs)] == [rows * COLUMNS]
    assert max(forward.floats) <= max(elements, pairs + 1)
    assert max(forward.others + backward.others) <= 3 * pairs  # two edges for a pair, and each anchor itself


def test_cosines_of_a_teacher_need_no_large_matrix() -> None:
    """N × D = 1600; the cosines of all texts would be 40,000. The teacher's vectors are scaled, which copies them."""
    rows, elements = 200, 340
    x_ND, taught = batch(rows=rows)[0].requires_grad_(), AngleObjective(in_batch_weight=0, teacher_similarity_weight=1)
    none = torch.zeros(0, dtype=torch.long)
    known = Relation(none, none, torch.zeros(0), teacher_vectors=batch(1, rows)[0])
    with block_elements(elements), Tensors() as made:
        torch.autograd.grad(taught(x_ND, known).loss, x_ND)
    assert max(made.floats + made.others) == rows * COLUMNS


@one_in(3, "form, elements", CONTRASTIVE_FORMS, [2 * 16 * COLUMNS, blocks.BLOCK_ELEMENTS])
def test_every_run_gives_the_same_bits(form: str, elements: int) -> None:
    """Rows repeat, so the order of summing their gradients shows in float32."""
    x_ND, left_P, right_P, score_P = batch(rows=100, pairs=5000)
    with block_elements(elements):
        runs = [loss_and_gradient(objective(form), x_ND.float(), left_P, right_P, score_P) for _ in range(3)]
    assert all(torch.equal(loss, runs[0][0]) and torch.equal(gradient, runs[0][1]) for loss, gradient in runs)


def test_blocks_work_in_a_larger_graph() -> None:
    """Rows computed from parameters, a loss used further: two backward passes accumulate."""
    x_ND, *relation = batch()

    def accumulated(elements: int) -> Tensor:
        scale_D = torch.ones(COLUMNS, dtype=torch.float64, requires_grad=True)
        with block_elements(elements):
            loss = objective()(x_ND * scale_D, *relation).loss.square()
            loss.backward(retain_graph=True)
            loss.backward()
        assert scale_D.grad is not None
        return scale_D.grad

    assert_close(accumulated(50), accumulated(blocks.BLOCK_ELEMENTS), rtol=1e-10, atol=1e-12)


def test_autocast_around_the_backward_pass_does_not_lower_the_precision() -> None:
    x_ND, *relation = batch()
    leaf_ND = x_ND.float().requires_grad_()
    with block_elements(50):
        expected = loss_and_gradient(objective(), leaf_ND.detach(), *relation)[1]
        with torch.autocast("cpu", torch.bfloat16):
            (gradient_ND,) = torch.autograd.grad(0.5 * objective()(leaf_ND, *relation).loss, leaf_ND)
    assert torch.equal(gradient_ND, expected)
