"""Intervals: a resample computed from counts is the one computed the slow way, and intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from angle_llm.evaluate import (
    Interval,
    mean_interval,
    percentile_interval,
    resampled_means,
    resampled_spearman,
    two_sided_p,
)
from angle_llm.evaluate.resampling import _counts


def counts(size: int, resamples: int, seed: int, stream: str) -> np.ndarray:
    return np.concatenate(list(_counts(size, resamples, seed, stream)), axis=1).astype(int)


@pytest.mark.parametrize("kinds", [3, 12, 1000])
def test_every_resample_equals_scipy_on_the_items_drawn(kinds: int) -> None:
    """Few kinds: ties everywhere. 300 resamples: more than two blocks."""
    rng = np.random.default_rng(kinds)
    gold, one, two = rng.integers(0, 6, 50), rng.integers(0, kinds, 50), rng.standard_normal(50)
    drawn_PB = counts(50, 300, 7, "sts12")
    assert (drawn_PB.sum(axis=0) == 50).all()

    figures_2B = resampled_spearman([one, two], gold, resamples=300, seed=7, stream="sts12")

    assert figures_2B.shape == (2, 300)
    for resample, drawn in enumerate(drawn_PB.T):
        for scores, figure in zip((one, two), figures_2B[:, resample], strict=True):
            slow = stats.spearmanr(np.repeat(scores, drawn), np.repeat(gold, drawn)).statistic
            assert figure == pytest.approx(slow, abs=1e-12)  # rounding of a sum of 50 products


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_only_the_order_of_scores_counts(pairs: list[tuple[int, int]]) -> None:
    scores, gold = np.array(pairs, dtype=float).T
    one, cubed, opposite = resampled_spearman([scores, scores**3, -scores], gold, resamples=20)
    np.testing.assert_array_equal(one, cubed)
    np.testing.assert_array_equal(one, -opposite)


def test_resampled_means_are_means_of_the_items_drawn() -> None:
    values = np.random.default_rng(0).standard_normal(40)
    means = [np.repeat(values, drawn).mean() for drawn in counts(40, 200, 1, "accuracy").T]
    np.testing.assert_allclose(resampled_means(values, resamples=200, seed=1, stream="accuracy"), means, atol=1e-14)


def test_resamples_depend_on_seed_and_stream_and_on_nothing_else() -> None:
    rng = np.random.default_rng(0)
    gold, scores, other = rng.standard_normal((3, 60))
    alone = resampled_spearman([scores], gold, resamples=50, seed=3, stream="a")[0]

    np.testing.assert_array_equal(alone, resampled_spearman([other, scores], gold, resamples=50, seed=3, stream="a")[1])
    for seed, stream in ((4, "a"), (3, "b")):
        assert (alone != resampled_spearman([scores], gold, resamples=50, seed=seed, stream=stream)[0]).any()


def test_the_interval_is_the_middle_95_percent() -> None:
    assert percentile_interval(np.arange(1001)) == Interval(pytest.approx(25), pytest.approx(975))


def test_intervals_of_spearman_hold_the_truth_95_times_in_100() -> None:
    """Normal pairs of correlation ρ have a rank correlation of 6/π · asin(ρ/2)."""
    rng = np.random.default_rng(0)
    truth = 6 / math.pi * math.asin(0.7 / 2)
    held = 0
    for seed in range(300):
        x, noise = rng.standard_normal((2, 200))
        y = 0.7 * x + math.sqrt(1 - 0.7**2) * noise
        interval = percentile_interval(resampled_spearman([x], y, resamples=200, seed=seed)[0])
        held += interval.low <= truth <= interval.high
    # 0.95 ± 3.5 standard errors of 300 tries, and a percent a percentile interval may be short at 200 pairs.
    assert 0.895 < held / 300 < 0.995


def test_intervals_of_an_accuracy_hold_the_truth_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    intervals = [mean_interval(rng.random(300) < 0.8, resamples=200, seed=seed) for seed in range(400)]
    held = np.mean([interval.low <= 0.8 <= interval.high for interval in intervals])
    assert 0.90 < held < 0.99  # as above, of 400 tries


def test_a_resample_without_a_correlation_leaves_no_interval() -> None:
    """With three pairs some resamples draw one pair three times: a number here would hide that."""
    figures = resampled_spearman([[1.0, 2.0, 3.0]], [1.0, 2.0, 3.0], resamples=100)[0]
    assert np.isnan(figures).any()
    assert math.isnan(percentile_interval(figures).low)
    assert math.isnan(percentile_interval(figures).high)
    assert math.isnan(two_sided_p(figures))
    assert np.isnan(resampled_spearman([[2.0, 2.0]], [0.0, 1.0], resamples=10)).all()
    assert math.isnan(mean_interval([1.0, math.nan], resamples=50).low)


def test_p_is_twice_the_share_beyond_zero_and_never_zero() -> None:
    assert two_sided_p(np.full(999, 0.3)) == two_sided_p(np.full(999, -0.3)) == pytest.approx(2 / 1000)
    assert two_sided_p([*[0.3] * 980, *[-0.1] * 19]) == pytest.approx(40 / 1000)
    assert two_sided_p(np.zeros(999)) == 1
    assert two_sided_p([-1.0, 1.0]) == 1


@pytest.mark.parametrize(
    ("scores", "gold", "message"),
    [
        ([[1.0, 2.0]], [1.0, 2.0, 3.0], r"found shapes \(1, 2\) and \(3,\)"),
        ([1.0, 2.0], [1.0, 2.0], r"found shapes \(2,\) and \(2,\)"),
        ([[1.0, math.nan]], [1.0, 2.0], "must be finite"),
        (np.zeros((1, 0)), [], "at least one item"),
    ],
)
def test_what_cannot_be_resampled_is_an_error(scores: object, gold: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resampled_spearman(scores, gold)  # type: ignore[arg-type]


def test_what_cannot_be_averaged_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(P,\) is needed, found shape \(1, 2\)"):
        resampled_means([[1.0, 2.0]])
    for options in ({"resamples": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="at least one item and one resample, and a seed of at least 0"):
            resampled_means([1.0], **options)
