"""Terms that learn from a teacher: equal to sentence-transformers in value and gradient, in blocks too."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import reference
import torch
from library import GivenVectors, columns, library_loss, pairs_of_columns
from loss_batches import random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Part, Relation, blocks

pairwise_cos_sim = pytest.importorskip("sentence_transformers.util").pairwise_cos_sim
BATCH, COLUMNS, WIDTH = 5, 4, 6
in_blocks = pytest.mark.parametrize("elements", [1, 48, blocks.BLOCK_ELEMENTS])


def scored(teacher: Tensor) -> Relation:
    """Of `BATCH` queries with `COLUMNS` - 1 documents each, the first one positive; scores (BATCH, COLUMNS - 1)."""
    pairs = pairs_of_columns(BATCH, COLUMNS)
    group = torch.tensor([left for left, _, _ in pairs]) * 3 + 2
    return relation(pairs, group=group, teacher=teacher.flatten())


def objective(**options: Any) -> AngleObjective:
    return AngleObjective(**{"in_batch_weight": 0.0} | options)


def assert_equal(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], at: Tensor) -> None:
    found, expected = reference.value_and_gradient(one, at), reference.value_and_gradient(other, at)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


@in_blocks
def test_cosines_and_temperatures_equal_distill_kl_div(elements: int) -> None:
    """The library multiplies by the square of the student's temperature."""
    theirs = library_loss("DistillKLDivLoss")(
        GivenVectors(), similarity_fct=pairwise_cos_sim, student_temperature=0.1, teacher_temperature=0.5
    )
    ours = objective(kl_weight=0.1**2, in_batch_temperature=0.1, teacher_temperature=0.5)
    teacher = random(BATCH, COLUMNS - 1, seed=4)
    with patch.object(blocks, "BLOCK_ELEMENTS", elements):
        assert_equal(
            lambda x: ours(x, scored(teacher)).loss,
            lambda x: theirs(columns(x, COLUMNS), teacher),
            random(BATCH * COLUMNS, WIDTH),
        )


@in_blocks
@pytest.mark.parametrize("documents", [2, 4])
def test_margins_equal_margin_mse(elements: int, documents: int) -> None:
    """One negative, and several; with other temperatures, the library is given the scaled scores."""
    theirs = library_loss("MarginMSELoss")(GivenVectors(), similarity_fct=pairwise_cos_sim)
    teacher = random(BATCH, documents, seed=4)
    pairs = pairs_of_columns(BATCH, documents + 1)
    known = relation(pairs, group=torch.tensor([left for left, _, _ in pairs]) * 3, teacher=teacher.flatten())
    _, known = known.subset(torch.arange(len(pairs)).flip(0))
    for temperatures, scale in (({}, 1.0), ({"in_batch_temperature": 0.1, "teacher_temperature": 0.5}, 0.2)):
        ours = objective(margin_mse_weight=1.0, **temperatures)
        with patch.object(blocks, "BLOCK_ELEMENTS", elements):
            assert_equal(
                lambda x, ours=ours: ours(x, known).loss,
                lambda x, scale=scale: theirs(columns(x, documents + 1), teacher * scale),
                random(BATCH * (documents + 1), WIDTH),
            )


@in_blocks
@pytest.mark.parametrize("count", [1, 2])
def test_vectors_equal_embed_distill(elements: int, count: int) -> None:
    """One column of texts, and two with a teacher vector for each text."""
    theirs = library_loss("EmbedDistillLoss")(GivenVectors(), distance_metric="cosine")
    ours = objective(teacher_vector_weight=1.0)
    teacher = random(8, WIDTH, seed=4)
    with patch.object(blocks, "BLOCK_ELEMENTS", elements):
        assert_equal(
            lambda x: ours(x, relation([], teacher_vectors=teacher)).loss,
            lambda x: theirs(columns(x, count), torch.stack(teacher.chunk(count), dim=1)),
            random(8, WIDTH),
        )


@pytest.mark.parametrize("width", [4, 8])
def test_vectors_of_another_width_are_compared_in_the_first_dimensions(width: int) -> None:
    x_ND, teacher = random(5, 6), random(5, width, seed=1)
    ours = objective(teacher_vector_weight=1.0)
    least = min(6, width)
    expected = 1 - torch.nn.functional.cosine_similarity(x_ND[:, :least], teacher[:, :least])
    assert_close(ours(x_ND, relation([], teacher_vectors=teacher)).loss, expected.mean())


@in_blocks
@pytest.mark.parametrize("text", [None, [0, 1, 2, 0, 4, 5, 2, 0], [0] * 8], ids=["distinct", "repeated", "one text"])
def test_cosines_of_the_teacher_equal_the_slow_formula(elements: int, text: list[int] | None) -> None:
    """A zero row, two equal rows, and a teacher of another width; blocks of one row, of a few rows, and of all rows."""
    x_ND, teacher = random(8, WIDTH), random(8, WIDTH + 3, seed=4)
    x_ND[1], x_ND[2] = 0, x_ND[3]
    ours = objective(teacher_similarity_weight=1.0, in_batch_temperature=0.2, teacher_temperature=0.1)
    known = relation([], teacher_vectors=teacher, text=None if text is None else torch.tensor(text))
    with patch.object(blocks, "BLOCK_ELEMENTS", elements):
        assert_equal(
            lambda x: ours(x, known).loss,
            lambda x: reference.teacher_similarity(reference.rows_of(x), reference.rows_of(teacher), 0.2, 0.1, text),
            x_ND,
        )


def test_cosines_of_the_teacher_are_scores_of_all_pairs() -> None:
    """The term equals the KL term on a group for each text, with all other texts and the teacher's cosines as scores."""
    x_ND, teacher = random(BATCH, WIDTH), random(BATCH, WIDTH, seed=4)
    pairs = [(i, j, 1.0) for i in range(BATCH) for j in range(BATCH) if i != j]
    left, right, _ = map(list, zip(*pairs, strict=True))
    scores = torch.nn.functional.cosine_similarity(teacher[left], teacher[right])
    known = relation(pairs, group=torch.tensor(left), teacher=scores, teacher_vectors=teacher)
    assert_equal(
        lambda x: objective(teacher_similarity_weight=1.0)(x, known).loss,
        lambda x: objective(kl_weight=1.0)(x, known).loss,
        x_ND,
    )


@in_blocks
@pytest.mark.parametrize("rows", [0, 1])
def test_cosines_of_fewer_than_two_texts_have_loss_zero(elements: int, rows: int) -> None:
    known = relation([], teacher_vectors=random(rows, WIDTH))
    with patch.object(blocks, "BLOCK_ELEMENTS", elements):
        value, gradient = reference.value_and_gradient(
            lambda x: objective(teacher_similarity_weight=1.0)(x, known).loss, random(rows, WIDTH)
        )
    assert value == 0
    assert not gradient.any()


def test_groups_of_different_sizes_and_pairs_without_a_score() -> None:
    """Group 7: two positives, a negative and a pair without a score; group 1: one score only; group 4: no scores."""
    pairs = [(0, 1, 1.0), (0, 2, 1.0), (0, 3, 0.0), (0, 4, 0.0), (5, 6, 1.0), (5, 1, 0.0), (7, 2, 1.0)]
    teacher = torch.tensor([0.9, 0.7, 0.2, math.nan, 0.8, math.nan, math.nan], dtype=torch.float64)
    known = relation(pairs, group=torch.tensor([7, 7, 7, 7, 1, 1, 4]), teacher=teacher)
    x_ND = random(8, WIDTH)
    score = torch.nn.functional.cosine_similarity(x_ND[[0]], x_ND[1:4]) / 0.05
    taught = torch.softmax(teacher[:3] / 0.1, dim=0)
    kl = (taught * (taught.log() - score.log_softmax(dim=0))).sum()
    assert_close(objective(kl_weight=1.0, teacher_temperature=0.1)(x_ND, known).loss, kl)
    margins = (score[:2] * 0.05 - score[2] * 0.05) - (teacher[:2] - teacher[2])
    assert_close(objective(margin_mse_weight=1.0)(x_ND, known).loss, margins.square().mean())


def test_a_batch_without_a_teacher_score_has_loss_zero() -> None:
    none = scored(torch.full((BATCH, COLUMNS - 1), math.nan, dtype=torch.float64))
    for known in (none, none.subset(torch.tensor([], dtype=torch.int64))[1]):
        rows = random(BATCH * COLUMNS, WIDTH) if len(known) else random(0, WIDTH)
        value, gradient = reference.value_and_gradient(
            lambda x, known=known: objective(kl_weight=1.0, margin_mse_weight=1.0)(x, known).loss, rows
        )
        assert value == 0
        assert not gradient.any()


def test_nested_and_mixed_objectives_pass_teachers_on() -> None:
    """Half of the groups with a nested objective: equal to its objective on their rows, at each width."""
    plain = objective(kl_weight=1.0, margin_mse_weight=2.0, teacher_vector_weight=0.5, teacher_similarity_weight=0.3)
    pairs = pairs_of_columns(BATCH, COLUMNS)
    x_ND, vectors = random(BATCH * COLUMNS, WIDTH), random(BATCH * COLUMNS, WIDTH, seed=6)
    known = scored(random(BATCH, COLUMNS - 1, seed=4))
    known = Relation(**vars(known) | {"teacher_vectors": vectors})
    some = torch.tensor([place for place, (left, _, _) in enumerate(pairs) if left < 2])
    others = torch.tensor([place for place, (left, _, _) in enumerate(pairs) if left >= 2])
    mixed = MixedObjective([Part(NestedObjective(plain, [4]), 0.4, some), Part(plain, 0.6, others)])
    rows, own = known.subset(some)
    rest, of_rest = known.subset(others)
    expected = 0.4 * (plain(x_ND[rows], own).loss + plain(x_ND[rows, :4], own).loss) / 2
    assert_close(mixed(x_ND, known).loss, expected + 0.6 * plain(x_ND[rest], of_rest).loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_weight": 1.0}, "kl_weight: expected a relation with teacher"),
        ({"margin_mse_weight": 1.0}, "margin_mse_weight: expected a relation with teacher"),
        ({"teacher_vector_weight": 1.0}, "teacher_vector_weight: expected a relation with teacher_vectors"),
        ({"teacher_similarity_weight": 1.0}, "teacher_similarity_weight: expected a relation with teacher_vectors"),
    ],
)
def test_a_term_without_its_teacher_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**options)(random(2, 4), relation([(0, 1, 1.0)]))
