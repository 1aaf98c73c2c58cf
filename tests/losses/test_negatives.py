"""Options of the in-batch contrast: false negatives and hardness, in value and gradient."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library import GivenVectors, columns, library_loss, pairs_of_columns
from loss_batches import Pairs, batches, random, relation
from test_blocks import Tensors, block_elements
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, FalseNegatives, blocks

BATCH, COLUMNS, WIDTH = 7, 3, 6
BLOCKS = [1, 48, blocks.BLOCK_ELEMENTS]
in_blocks = pytest.mark.parametrize("elements", BLOCKS)


def loss(x_ND: Tensor, pairs: Pairs, *, guide: Tensor | None = None, text: Any = None, **options: Any) -> Tensor:
    objective = AngleObjective(**{"in_batch_temperature": 0.3, "contrastive_form": "forward"} | options)
    return objective(x_ND, relation(pairs, guide=guide, text=None if text is None else torch.tensor(text))).loss


def assert_equal(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], at: Tensor) -> None:
    found, expected = reference.value_and_gradient(one, at), reference.value_and_gradient(other, at)
    assert found[1].isfinite().all()
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    batch=batches(((0.0, 1.0),)),
    symmetric=st.booleans(),
    limit=st.sampled_from([None, {"margin": 0.1}, {"margin": -0.2}, {"ratio": 0.9}, {}]),
    scope=st.sampled_from(["in_batch", "all"]),
    guided=st.booleans(),
    hardness=st.sampled_from([0.0, 3.0]),
    texts=st.none() | st.lists(st.sampled_from([3, 5, 8, 9, 11]), min_size=6, max_size=6),
    elements=st.sampled_from(BLOCKS),
)
def test_equals_the_slow_formula(
    batch: tuple[Tensor, Pairs],
    symmetric: bool,
    limit: dict[str, float] | None,
    scope: str,
    guided: bool,
    hardness: float,
    texts: list[int] | None,
    elements: int,
) -> None:
    """Several positives of an anchor, contradictory labels, zero rows and every combination of options."""
    x_ND, pairs = batch
    x_ND = x_ND + 1e-3 * random(*x_ND.shape, seed=5)  # equal cosines would be ties at the threshold
    guide = random(len(x_ND), 4, seed=9) if guided else None
    text = None if texts is None else texts[: len(x_ND)]
    false = None if limit is None else FalseNegatives(**limit, scope=scope, guided=guided)

    def threshold(positive: float) -> float:
        assert limit is not None
        return (
            positive - (1 - limit["ratio"]) * abs(positive) if "ratio" in limit else positive - limit.get("margin", 0)
        )

    def slow(x: Tensor) -> Tensor:
        return reference.contrast_with_options(
            reference.rows_of(x), pairs, 0.3, symmetric=symmetric, text=text,
            threshold=None if limit is None else threshold, keep_own=scope == "in_batch",
            guide=None if guide is None else reference.rows_of(guide), strength=hardness,
        )  # fmt: skip

    options = {
        "contrastive_form": "symmetric" if symmetric else "forward",
        "false_negatives": false,
        "hardness_strength": hardness,
    }
    with block_elements(elements):
        assert_equal(lambda x: loss(x, pairs, guide=guide, text=text, **options), slow, x_ND)


@pytest.mark.parametrize("guided", [False, True])
def test_a_candidate_equal_to_the_positive_is_a_negative_in_float32(guided: bool) -> None:
    """The cosine of the positive is a sum, that of the candidate a matrix product."""
    for seed in range(50):
        anchor, positive, other = random(3, 384, seed=seed).float()
        x_ND = torch.stack((anchor, anchor + positive, anchor + positive, other))
        guide = x_ND if guided else None
        options = {"in_batch_temperature": 1.0, "false_negatives": FalseNegatives(margin=0.0, guided=guided)}
        assert loss(x_ND, [(0, 1, 1.0), (3, 2, 1.0)], guide=guide, **options) == pytest.approx(math.log(2), abs=1e-5)


@in_blocks
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("options", "library"),
    [
        ({}, {}),
        ({"hardness_strength": 9.0}, {"hardness_strength": 9.0, "hardness_mode": "in_batch_negatives"}),
    ],
)
@pytest.mark.needs("sentence_transformers")
def test_equals_multiple_negatives_ranking_loss(
    elements: int, count: int, options: dict[str, Any], library: dict[str, Any]
) -> None:
    """With one positive for each anchor, and no, or two, negatives."""
    theirs = library_loss("MultipleNegativesRankingLoss")(GivenVectors(), scale=1 / 0.3, **library)
    pairs = pairs_of_columns(BATCH, count)
    with block_elements(elements):
        assert_equal(
            lambda x: loss(x, pairs, **options),
            lambda x: theirs(columns(x, count), None),
            random(BATCH * count, WIDTH),
        )


@in_blocks
@pytest.mark.parametrize(
    ("limit", "library"),
    [
        ({"margin": 0.0}, {"margin": 0.0}),
        ({"margin": 0.15}, {"margin": 0.15}),
        ({"ratio": 0.95}, {"margin": 0.05, "margin_strategy": "relative"}),
    ],
)
@pytest.mark.needs("sentence_transformers")
def test_equals_cached_gist_embed_loss(elements: int, limit: dict[str, float], library: dict[str, Any]) -> None:
    """Guided, with a negative for each anchor; the library computes mini-batches of three."""
    guide_NG = random(BATCH * COLUMNS, 4, seed=3) + 0.5
    theirs = library_loss("CachedGISTEmbedLoss")(
        GivenVectors(), GivenVectors("guide"), temperature=0.3, mini_batch_size=3, **library,
        contrast_anchors=False, contrast_positives=False,
    )  # fmt: skip
    false = FalseNegatives(**limit, scope="all", guided=True)
    pairs = pairs_of_columns(BATCH, COLUMNS)
    x_ND = random(BATCH * COLUMNS, WIDTH)
    with block_elements(elements):
        found = reference.value_and_gradient(lambda x: loss(x, pairs, guide=guide_NG, false_negatives=false), x_ND)
    leaf_ND = x_ND.clone().requires_grad_()
    value = theirs(columns(leaf_ND, COLUMNS, guide_NG), None)
    value.backward()  # a hook of the library writes the gradient of the leaf
    assert_close(found, (value.detach(), leaf_ND.grad), rtol=1e-10, atol=1e-10)
    assert loss(x_ND, pairs, guide=guide_NG, false_negatives=false) < loss(x_ND, pairs)  # some are left out


@in_blocks
def test_equals_infonce_of_ms_swift(elements: int) -> None:
    """Its margin of +0.1 is -0.1 here."""

    def theirs(x: Tensor) -> Tensor:
        rows = reference.rows_of(x)
        groups = [(rows[row], [rows[row + BATCH], rows[row + 2 * BATCH]]) for row in range(BATCH)]
        return reference.infonce_without_fake_negatives(groups, 0.3, 0.1)

    false = FalseNegatives(margin=-0.1, scope="all")
    pairs = pairs_of_columns(BATCH, COLUMNS)
    with block_elements(elements):
        assert_equal(lambda x: loss(x, pairs, false_negatives=false), theirs, random(BATCH * COLUMNS, WIDTH))


def test_the_users_own_negatives_are_left_out_in_scope_all_only() -> None:
    """Row 2 is the own negative of row 0, and nearer to it than the positive, row 1."""
    x_ND = torch.tensor([[1.0, 0], [0.6, 0.8], [1, 0.1]], dtype=torch.float64)
    pairs = [(0, 1, 1.0), (0, 2, 0.0)]
    assert loss(x_ND, pairs, false_negatives=FalseNegatives(margin=0.0, scope="all")) == 0
    assert_close(loss(x_ND, pairs, false_negatives=FalseNegatives(margin=0.0)), loss(x_ND, pairs))


def test_a_hardness_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="hardness_strength: expected a finite number of 0 or more"):
        AngleObjective(hardness_strength=-1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": 0.1, "ratio": 0.9}, "expected a margin or a ratio"),
        ({"margin": 3.0}, "margin: expected a difference of cosines from -2 to 2"),
        ({"ratio": 0.0}, "ratio: expected a finite number greater than 0"),
        ({"scope": "own"}, "scope: expected one of in_batch, all"),
    ],
)
def test_false_negatives_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FalseNegatives(**options)


def test_a_guide_without_vectors_is_refused() -> None:
    with pytest.raises(ValueError, match="false_negatives: expected a relation with guide"):
        loss(random(3, 4), [(0, 1, 1.0)], false_negatives=FalseNegatives(guided=True))


def test_options_need_no_tensor_larger_than_a_block() -> None:
    """240 rows: N × D = 1440 is the gradient. Each comparison has 80 × 80 similarities or more."""
    x_ND, pairs, elements = random(240, WIDTH).requires_grad_(), pairs_of_columns(80, 3), 1024
    options = {
        "false_negatives": FalseNegatives(margin=0.1, guided=True),
        "hardness_strength": 3.0,
    }
    guide_NG = random(240, 4, seed=1)
    with block_elements(elements), Tensors() as made:
        value = loss(x_ND, pairs, guide=guide_NG, **options)
        torch.autograd.grad(value, x_ND)
    assert max(size for size in made.floats if size != x_ND.numel()) <= elements
    assert max(made.others) <= max(elements, 4 * len(pairs))  # indices of pairs
