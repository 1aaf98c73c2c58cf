"""The weighted sum of the parts: equal to the slow formulas and to angle-emb; invalid arguments."""

import importlib.util
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import reference
import torch
from cases import one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import TRIPLES, Pairs, batches, random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Part, blocks
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS
from angle_llm.losses.similarity import ANGLE_FORMS
from angle_llm.settings.train import TrainSettings
from angle_llm.train.objectives import make_losses

WEIGHTS = {"cosine": 0.7, "in_batch": 1.3, "angle": 0.2, "regression": 0.4}
SCORES = ((0.0, 1.0), (0.0, 0.25, 0.6, 1.0), (-1.0, 0.5), (1.0,))
every_combination = pytest.mark.parametrize(("angle", "contrastive"), list(product(ANGLE_FORMS, CONTRASTIVE_FORMS)))


def all_parts(angle: str = "phase", contrastive: str = "forward") -> AngleObjective:
    return AngleObjective(
        **{f"{name}_weight": weight for name, weight in WEIGHTS.items()},  # type: ignore[arg-type]
        cosine_temperature=0.05,
        in_batch_temperature=0.1,
        angle_temperature=0.5,
        angle_form=angle,
        contrastive_form=contrastive,
    )


def gradient_of(objective: AngleObjective, embeddings_ND: Tensor, pairs: Pairs) -> Tensor:
    return reference.value_and_gradient(lambda x: objective(x, relation(pairs)).loss, embeddings_ND)[1]


def slow_parts(x: Tensor, pairs: Pairs, angle: str, contrastive: str) -> dict[str, Tensor]:
    return reference.objective_parts(
        x, pairs, angle_form=angle, contrastive_form=contrastive, positive_above=0.5, temperatures=(0.05, 0.1, 0.5)
    )


@every_combination
@settings(derandomize=True, deadline=None, max_examples=30)
@given(batch=batches(SCORES), block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]))
def test_equals_the_slow_formula_in_value_gradient_and_parts(
    angle: str, contrastive: str, batch: tuple[Tensor, Pairs], block_elements: int
) -> None:
    """In blocks of one row a side, of two to four, and in one block."""
    embeddings_ND, pairs = batch

    def slow_loss(x: Tensor) -> Tensor:
        parts = slow_parts(x, pairs, angle, contrastive)
        return torch.stack([WEIGHTS[name] * parts[name] for name in WEIGHTS]).sum()

    objective = all_parts(angle, contrastive)
    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        parts = objective(embeddings_ND, relation(pairs)).parts
        fast = reference.value_and_gradient(lambda x: objective(x, relation(pairs)).loss, embeddings_ND)
    assert_close(parts, slow_parts(embeddings_ND, pairs, angle, contrastive), rtol=1e-10, atol=1e-10)
    assert fast[1].isfinite().all()
    assert_close(fast, reference.value_and_gradient(slow_loss, embeddings_ND), rtol=1e-10, atol=1e-10)


@every_combination
def test_opposite_rows_have_the_right_value_and_a_finite_gradient(angle: str, contrastive: str) -> None:
    """Separate from the test above: the phase has a kink at exactly 180°, where two correct gradients differ."""
    embeddings_ND = random(4, 6)
    embeddings_ND[1], embeddings_ND[3] = -embeddings_ND[0], embeddings_ND[2]
    pairs = [(0, 1, 0.0), (2, 3, 1.0), (0, 2, 0.4)]
    value = all_parts(angle, contrastive)(embeddings_ND, relation(pairs))
    assert_close(value.parts, slow_parts(embeddings_ND, pairs, angle, contrastive), rtol=1e-10, atol=1e-10)
    assert gradient_of(all_parts(angle, contrastive), embeddings_ND, pairs).isfinite().all()


@every_combination
@pytest.mark.parametrize("pairs", [[], [(0, 0, 1.0)], [(0, 1, 0.0)], [(0, 1, 0.5), (2, 3, 0.5)]])
def test_the_loss_is_zero_without_pairs_to_rank_or_contrast(angle: str, contrastive: str, pairs: Pairs) -> None:
    embeddings_ND = random(4, 6).requires_grad_()
    objective = replace(all_parts(angle, contrastive), regression_weight=0)
    value = objective(embeddings_ND, relation(pairs))
    value.loss.backward()
    assert value.loss == 0
    assert value.parts == {"cosine": 0, "in_batch": 0, "angle": 0}
    assert embeddings_ND.grad is not None
    assert not embeddings_ND.grad.any()


def test_an_odd_number_of_columns_is_refused_with_an_angle_only() -> None:
    assert AngleObjective(cosine_weight=1)(random(6, 5), relation(TRIPLES)).loss > 0
    with pytest.raises(ValueError, match=r"even number of columns.*got 5.*set angle_weight to 0"):
        AngleObjective(angle_weight=1)(random(6, 5), relation(TRIPLES))


def test_autocast_does_not_lower_the_precision() -> None:
    """The only matrix product is that of the in-batch part: in bfloat16 this loss is off by 2e-4 of itself."""
    embeddings_ND = random(60, 64).float()
    pairs = relation([(row, row + 30, 1.0) for row in range(30)])
    objective = AngleObjective(in_batch_temperature=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        inside = objective(embeddings_ND, pairs).loss
    assert inside.dtype == torch.float32
    assert_close(inside.double(), objective(embeddings_ND.double(), pairs).loss, rtol=1e-5, atol=0)


@one_in(5, "angle, contrastive, block_elements", ANGLE_FORMS, CONTRASTIVE_FORMS, [8, blocks.BLOCK_ELEMENTS])
def test_no_value_is_read_from_the_device_of_the_embeddings(angle: str, contrastive: str, block_elements: int) -> None:
    """A read waits for a GPU. Meta tensors have no values: whatever reads one fails."""
    embeddings_ND = torch.empty(6, 4, device="meta", requires_grad=True)
    plain = all_parts(angle, contrastive)
    mixed = MixedObjective([Part(plain, 0.5, torch.tensor([0, 1])), Part(plain, 0.5, torch.tensor([2, 3]))])
    no_autocast = patch.object(torch, "autocast", lambda *_, **__: nullcontext())  # it does not accept "meta"
    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements), no_autocast:
        for objective in (plain, NestedObjective(plain, dimensions=[2]), mixed):
            value = objective(embeddings_ND, relation(TRIPLES))
            assert {part.device.type for part in (value.loss, *value.parts.values())} == {"meta"}
            (gradient_ND,) = torch.autograd.grad(value.loss, embeddings_ND)
            assert gradient_ND.shape == embeddings_ND.shape


def test_defaults_are_those_of_the_settings() -> None:
    assert make_losses(TrainSettings()) == [AngleObjective()]
    with pytest.raises(FrozenInstanceError):
        AngleObjective().angle_weight = 1.0  # type: ignore[misc]


@pytest.fixture(scope="module")
def angle_emb_losses() -> ModuleType:
    """angle-emb's losses, loaded from the file: importing the package would import many others."""
    package = importlib.util.find_spec("angle_emb")
    if package is None or not package.submodule_search_locations:
        pytest.skip("angle-emb 0.6.1 is not importable; its losses cannot be compared")
    path = Path(package.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("angle_emb_losses", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_equals_angle_emb_on_scored_pairs_without_repeats(angle_emb_losses: ModuleType, seed: int) -> None:
    """angle-emb interleaves rows, [a0, b0, a1, b1, ...], and labels."""
    pairs = 12
    interleaved_ND = random(2 * pairs, 16, seed=seed)
    label_P = torch.randint(0, 2, (pairs,), generator=torch.Generator().manual_seed(seed))
    label_P[:2] = torch.tensor([0, 1])
    label_N1 = label_P.repeat_interleave(2)[:, None]
    left_P = torch.arange(0, 2 * pairs, 2)
    anchors = 2 * int(label_P.sum())

    def theirs(x: Tensor) -> Tensor:
        cosine = angle_emb_losses.cosine_loss(label_N1, x, tau=20.0)
        in_batch = angle_emb_losses.in_batch_negative_loss(label_N1, x, tau=20.0)
        angle = angle_emb_losses.angle_loss(label_N1, x, tau=1.0)
        return cosine + in_batch * (2 * pairs / anchors) + angle

    ours = AngleObjective(1, 1, 1, angle_temperature=1.0, angle_form="reference", contrastive_form="symmetric")
    assert_close(
        reference.value_and_gradient(lambda x: ours(x, left_P, left_P + 1, label_P).loss, interleaved_ND),
        reference.value_and_gradient(theirs, interleaved_ND),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_equals_angle_emb_on_triples_without_repeats(angle_emb_losses: ModuleType, seed: int) -> None:
    """Queries against [positives; hard negatives] is our forward form; ranking uses (q, p, 1) and (q, n, 0)."""
    triples = 9
    embeddings_ND = random(3 * triples, 16, seed=seed)
    query, positive, negative = torch.arange(3 * triples).chunk(3)

    def theirs(x: Tensor) -> Tensor:
        interleaved = torch.stack((x[torch.cat((query, query))], x[torch.cat((positive, negative))]), dim=1).flatten(
            0, 1
        )
        label_N1 = torch.tensor([1, 0]).repeat_interleave(2 * triples)[:, None]
        return (
            0.3 * angle_emb_losses.cosine_loss(label_N1, interleaved, tau=20.0)
            + angle_emb_losses.contrastive_with_negative_loss(x[query], x[positive], x[negative], tau=20.0)
            + 0.02 * angle_emb_losses.angle_loss(label_N1, interleaved, tau=1.0)
        )

    ours = AngleObjective(0.3, 1, 0.02, angle_temperature=1.0, angle_form="reference", contrastive_form="forward")
    left_P, right_P = torch.cat((query, query)), torch.cat((positive, negative))
    score_P = torch.tensor([1.0, 0.0]).repeat_interleave(triples)
    assert_close(
        reference.value_and_gradient(lambda x: ours(x, left_P, right_P, score_P).loss, embeddings_ND),
        reference.value_and_gradient(theirs, embeddings_ND),
        rtol=1e-10,
        atol=1e-10,
    )


LEFT, RIGHT = torch.tensor([0, 0, 2, 4]), torch.tensor([1, 2, 3, 5])
SCORE = torch.tensor([1.0, 0.0, 0.9, 0.4])


def test_half_precision_is_raised_to_float32() -> None:
    x = random((9, 8)).to(torch.bfloat16).requires_grad_()
    result = AngleObjective(cosine_weight=1, angle_weight=1)(x, LEFT, RIGHT, SCORE)
    assert result.loss.dtype == torch.float32
    result.loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "given_settings",
    [
        {"in_batch_weight": 0.0},
        {"cosine_weight": -1.0},
        {"angle_weight": float("nan")},
        {"in_batch_temperature": 0.0},
        {"angle_form": "fase"},
        {"contrastive_form": "backward"},
    ],
)
def test_invalid_settings_are_refused(given_settings: dict[str, object]) -> None:
    (name,) = given_settings
    with pytest.raises(ValueError, match=name):
        AngleObjective(**given_settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("left", torch.full_like(LEFT, 9)),
        ("right", RIGHT[:2]),
        ("left", SCORE),
    ],
)
def test_a_relation_that_does_not_match_the_rows_is_refused(name: str, wrong: Tensor) -> None:
    given_relation = {"left": LEFT, "right": RIGHT, name: wrong}
    with pytest.raises(ValueError, match=name):
        AngleObjective()(random((9, 8)), given_relation["left"], given_relation["right"], SCORE)


def test_scores_that_are_not_finite_are_refused() -> None:
    score = SCORE.clone().index_fill_(0, torch.tensor(0), torch.nan)
    with pytest.raises(ValueError, match=r"(?i)score.*nan|nan.*score"):
        AngleObjective(cosine_weight=1)(random((9, 8)), LEFT, RIGHT, score)
