"""The weighted sum: equal to the slow formulas and to angle-emb, faithful to its settings, helpful when misused."""

import importlib.util
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import ANGLE_FORMS, CONTRASTIVE_FORMS, AngleObjective, ObjectiveValue, blocks

Pairs = list[tuple[int, int, float]]
WEIGHTS = {"cosine": 0.7, "in_batch": 1.3, "angle": 0.2}
every_combination = pytest.mark.parametrize(("angle", "contrastive"), list(product(ANGLE_FORMS, CONTRASTIVE_FORMS)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def all_parts(angle: str = "phase", contrastive: str = "forward") -> AngleObjective:
    return AngleObjective(
        cosine_weight=WEIGHTS["cosine"],
        in_batch_weight=WEIGHTS["in_batch"],
        angle_weight=WEIGHTS["angle"],
        cosine_temperature=0.05,
        in_batch_temperature=0.1,
        angle_temperature=0.5,
        angle_form=angle,
        contrastive_form=contrastive,
    )


def apply(objective: AngleObjective, embeddings_ND: Tensor, pairs: Pairs) -> ObjectiveValue:
    left, right, score = zip(*pairs, strict=True) if pairs else ((), (), ())
    return objective(
        embeddings_ND,
        torch.tensor(left, dtype=torch.long),
        torch.tensor(right, dtype=torch.long),
        torch.tensor(score, dtype=torch.float64),
    )


def gradient_of(objective: AngleObjective, embeddings_ND: Tensor, pairs: Pairs) -> Tensor:
    return reference.value_and_gradient(lambda x: apply(objective, x, pairs).loss, embeddings_ND)[1]


TRIPLES = [(0, 2, 1.0), (1, 3, 1.0), (0, 4, 0.0), (1, 5, 0.0)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Pairs]:
    """Small batches with repeated texts, ties, fractions or 0-5 scores, one label, zero or identical rows."""
    rows = draw(st.integers(2, 6))
    row = st.integers(0, rows - 1)
    scores = draw(st.sampled_from([[0.0, 1.0], [0.0, 0.25, 0.6, 1.0], [0.0, 2.5, 5.0], [1.0]]))
    pairs = draw(st.lists(st.tuples(row, row, st.sampled_from(scores)), max_size=6))
    embeddings_ND = random(rows, draw(st.sampled_from([2, 4, 6])), seed=draw(st.integers(0, 99)))
    special = draw(st.sampled_from(["none", "zero", "identical"]))
    if special == "zero":
        embeddings_ND[0] = 0
    if special == "identical":
        embeddings_ND[0] = embeddings_ND[1]
    return embeddings_ND, pairs


@every_combination
@settings(derandomize=True, deadline=None, max_examples=60)
@given(batch=batches(), block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]))
def test_equals_the_slow_formula_in_value_gradient_and_parts(
    angle: str, contrastive: str, batch: tuple[Tensor, Pairs], block_elements: int
) -> None:
    """In blocks of one row a side, of two to four, and in one block."""
    embeddings_ND, pairs = batch

    def slow_parts(x: Tensor) -> dict[str, Tensor]:
        return reference.objective_parts(
            x, pairs, angle_form=angle, contrastive_form=contrastive, positive_above=0.5, temperatures=(0.05, 0.1, 0.5)
        )

    def slow_loss(x: Tensor) -> Tensor:
        parts = slow_parts(x)
        return torch.stack([WEIGHTS[name] * parts[name] for name in WEIGHTS]).sum()

    objective = all_parts(angle, contrastive)
    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        parts = apply(objective, embeddings_ND, pairs).parts
        fast = reference.value_and_gradient(lambda x: apply(objective, x, pairs).loss, embeddings_ND)
    assert_close(parts, slow_parts(embeddings_ND), rtol=1e-10, atol=1e-10)
    assert fast[1].isfinite().all()
    assert_close(fast, reference.value_and_gradient(slow_loss, embeddings_ND), rtol=1e-10, atol=1e-10)


@every_combination
def test_opposite_rows_have_the_right_value_and_a_finite_gradient(angle: str, contrastive: str) -> None:
    """Apart from the test above, as the phase has a kink at exactly 180° where two right programs may differ."""
    embeddings_ND = random(4, 6)
    embeddings_ND[1], embeddings_ND[3] = -embeddings_ND[0], embeddings_ND[2]
    pairs = [(0, 1, 0.0), (2, 3, 1.0), (0, 2, 0.4)]
    value = apply(all_parts(angle, contrastive), embeddings_ND, pairs)
    expected = reference.objective_parts(
        embeddings_ND,
        pairs,
        angle_form=angle,
        contrastive_form=contrastive,
        positive_above=0.5,
        temperatures=(0.05, 0.1, 0.5),
    )
    assert_close(value.parts, expected, rtol=1e-10, atol=1e-10)
    assert gradient_of(all_parts(angle, contrastive), embeddings_ND, pairs).isfinite().all()


@every_combination
@pytest.mark.parametrize("pairs", [[], [(0, 0, 1.0)], [(0, 1, 0.0)], [(0, 1, 0.5), (2, 3, 0.5)]])
def test_a_batch_that_says_nothing_is_exactly_zero_and_backward_works(
    angle: str, contrastive: str, pairs: Pairs
) -> None:
    embeddings_ND = random(4, 6).requires_grad_()
    value = apply(all_parts(angle, contrastive), embeddings_ND, pairs)
    value.loss.backward()
    assert value.loss == 0
    assert value.parts == {"cosine": 0, "in_batch": 0, "angle": 0}
    assert embeddings_ND.grad is not None
    assert not embeddings_ND.grad.any()


def test_the_loss_is_the_weighted_sum_of_its_detached_parts() -> None:
    value = apply(all_parts(), random(6, 4).requires_grad_(), TRIPLES)
    assert value.loss.requires_grad
    assert not any(part.requires_grad for part in value.parts.values())
    assert_close(value.loss.detach(), sum(WEIGHTS[name] * part for name, part in value.parts.items()))


@pytest.mark.parametrize("absent", ["cosine", "in_batch", "angle"])
def test_a_part_of_weight_zero_is_absent_and_does_not_act(absent: str) -> None:
    embeddings_ND = random(6, 4)
    without = replace(all_parts(), **{f"{absent}_weight": 0.0})
    value, whole = apply(without, embeddings_ND, TRIPLES), apply(all_parts(), embeddings_ND, TRIPLES)
    assert value.parts == {name: part for name, part in whole.parts.items() if name != absent}
    assert_close(value.loss, whole.loss - WEIGHTS[absent] * whole.parts[absent])


def test_a_weight_scales_the_gradient() -> None:
    one = gradient_of(AngleObjective(in_batch_weight=1, angle_weight=0), random(6, 4), TRIPLES)
    seven = gradient_of(AngleObjective(in_batch_weight=7, angle_weight=0), random(6, 4), TRIPLES)
    assert_close(seven, 7 * one)


def test_an_odd_size_is_fine_without_the_angle() -> None:
    assert apply(AngleObjective(cosine_weight=1, angle_weight=0), random(6, 5), TRIPLES).loss > 0
    with pytest.raises(ValueError, match="set angle_weight to 0"):
        apply(AngleObjective(angle_weight=1), random(6, 5), TRIPLES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_raised_and_double_stays(dtype: torch.dtype) -> None:
    embeddings_ND = random(6, 4).to(dtype)
    precise = torch.promote_types(dtype, torch.float32)
    value = apply(all_parts(), embeddings_ND, TRIPLES)
    assert value.loss.dtype == precise
    assert value.loss == apply(all_parts(), embeddings_ND.to(precise), TRIPLES).loss
    assert gradient_of(all_parts(), embeddings_ND, TRIPLES).dtype == dtype


def test_autocast_does_not_lower_the_precision() -> None:
    """The only matrix product is that of the in-batch part: in bfloat16 this loss is off by 2e-4 of itself."""
    embeddings_ND = random(60, 64).float()
    pairs = [(row, row + 30, 1.0) for row in range(30)]
    objective = AngleObjective(angle_weight=0, in_batch_temperature=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        inside = apply(objective, embeddings_ND, pairs).loss
    assert inside.dtype == torch.float32
    assert_close(inside.double(), apply(objective, embeddings_ND.double(), pairs).loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("index", [torch.int32, torch.uint8])
@pytest.mark.parametrize("label", [torch.float32, torch.int64, torch.bool])
def test_indices_and_labels_of_any_sensible_dtype(index: torch.dtype, label: torch.dtype) -> None:
    left, right, score = (torch.tensor(column) for column in zip(*TRIPLES, strict=True))
    value = all_parts()(random(6, 4), left.to(index), right.to(index), score.to(label))
    assert value.loss == apply(all_parts(), random(6, 4), TRIPLES).loss


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("angle_form", "phases", r"unknown angle_form 'phases'.*Did you mean 'phase'\?"),
        ("contrastive_form", "symetric", r"unknown contrastive_form 'symetric'.*Did you mean 'symmetric'\?"),
        ("cosine_weight", -1.0, "cosine_weight must be a finite number, 0 or more; got -1.0"),
        ("angle_weight", float("nan"), "angle_weight must be a finite number"),
        ("in_batch_weight", float("inf"), "in_batch_weight must be a finite number"),
        ("cosine_temperature", 0.0, "cosine_temperature must be a finite number greater than 0"),
        ("in_batch_temperature", -0.05, "in_batch_temperature must be a finite number greater than 0"),
        ("angle_temperature", float("nan"), r"angle_temperature must be .*tau multiplies"),
        ("positive_above", float("nan"), "positive_above must be a finite number"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_an_error(setting: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(AngleObjective(), **{setting: value})


def test_all_weights_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="At least one of cosine_weight, in_batch_weight, angle_weight"):
        AngleObjective(cosine_weight=0, in_batch_weight=0, angle_weight=0)


def test_an_objective_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        AngleObjective().angle_weight = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": torch.zeros(6)}, r"floating-point matrix \(N, D\).*shape \(6,\)"),
        ({"embeddings": torch.zeros(6, 4, dtype=torch.long)}, "floating-point matrix.*int64"),
        ({"left": torch.tensor([0, 1])}, r"left \(2,\), right \(3,\), score \(3,\)"),
        ({"score": torch.zeros(3, 1)}, r"vectors of one length.*score \(3, 1\)"),
        ({"left": torch.tensor([0.0, 1, 2])}, "left must hold row numbers, so an integer dtype; got torch.float32"),
        ({"right": torch.tensor([True, True, False])}, "right must hold row numbers, so an integer dtype"),
        ({"left": torch.tensor([0, 1, -1])}, r"left must hold row numbers in 0 .. 5.*got -1 .. 1"),
        ({"right": torch.tensor([0, 6, 1])}, r"right must hold row numbers in 0 .. 5.*got 0 .. 6"),
        ({"score": torch.tensor([0, float("nan"), 1])}, "pair 1 has nan"),
    ],
)
def test_a_batch_that_does_not_fit_is_an_error(change: dict[str, Tensor], message: str) -> None:
    batch = {
        "embeddings": torch.ones(6, 4),
        "left": torch.tensor([0, 1, 2]),
        "right": torch.tensor([3, 4, 5]),
        "score": torch.tensor([1.0, 0, 1]),
    }
    batch |= change
    with pytest.raises(ValueError, match=message):
        AngleObjective(angle_weight=0)(batch["embeddings"], batch["left"], batch["right"], batch["score"])


@pytest.fixture(scope="module")
def angle_emb_losses() -> ModuleType:
    """angle-emb's losses, read from the file: importing the package would load half of what is installed."""
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
@pytest.mark.parametrize("seed", range(20))
def test_equals_angle_emb_on_scored_pairs_without_repeats(angle_emb_losses: ModuleType, seed: int) -> None:
    """angle-emb's rows are interleaved, [a0, b0, a1, b1, ...], and so are its labels."""
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
@pytest.mark.parametrize("seed", range(20))
def test_equals_angle_emb_on_triples_without_repeats(angle_emb_losses: ModuleType, seed: int) -> None:
    """Queries against [positives; hard negatives] is our forward form; ranking adds (q, p, 1) and (q, n, 0)."""
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
