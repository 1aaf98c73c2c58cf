"""Bootstrap: resamples equal scipy on the drawn items, coverage of intervals, false positive rate of comparisons."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from angle_llm.evaluate import Interval, PairScores, compare, spearman
from angle_llm.evaluate.bootstrap import (
    Difference,
    PairedDifferences,
    _draws,
    mean_difference,
    mean_interval,
    percentile_interval,
    resampled_spearman,
    two_sided_p,
)


def draws(size: int, resamples: int, stream: str) -> np.ndarray:
    return np.concatenate(list(_draws(size, resamples, stream)))


@pytest.mark.parametrize("kinds", [3, 12, 1000])
def test_each_resample_equals_scipy_on_the_drawn_items(kinds: int) -> None:
    """Few distinct values: many ties. 300 resamples: more than two blocks."""
    rng = np.random.default_rng(kinds)
    gold, scores = rng.integers(0, 6, 50), rng.integers(0, kinds, 50)
    values = resampled_spearman(scores, gold, resamples=300, stream="sts12")
    assert values.shape == (300,)
    for value, drawn in zip(values, draws(50, 300, "sts12"), strict=True):
        slow = stats.spearmanr(scores[drawn], gold[drawn]).statistic
        assert value == pytest.approx(slow, abs=1e-12)  # rounding of a sum of 50 products


def test_interval_of_a_mean_equals_that_of_means_of_drawn_items() -> None:
    values = np.random.default_rng(0).standard_normal(40)
    means = [values[drawn].mean() for drawn in draws(40, 200, "accuracy")]
    found = mean_interval(values, resamples=200, stream="accuracy")
    assert vars(found) == pytest.approx(vars(percentile_interval(means)), abs=1e-13)


def correlated(seed: int) -> float:
    """Coverage of one interval of Spearman: normal pairs of correlation ρ have a rank correlation of 6/π · asin(ρ/2)."""
    x, noise = np.random.default_rng(seed).standard_normal((2, 200))
    y = 0.7 * x + math.sqrt(0.51) * noise
    interval = percentile_interval(resampled_spearman(x, y, resamples=200, stream=str(seed)))
    return interval.low <= 6 / math.pi * math.asin(0.7 / 2) <= interval.high


def right(seed: int) -> float:
    interval = mean_interval(np.random.default_rng(seed).random(300) < 0.8, resamples=200, stream=str(seed))
    return interval.low <= 0.8 <= interval.high


@pytest.mark.parametrize("covers", [pytest.param(correlated, marks=pytest.mark.slow), right])
def test_coverage_of_intervals_is_95_percent(covers: Callable[[int], float]) -> None:
    """0.95 ± 3.5 standard errors of 300 tries; at 200 pairs a percentile interval may be 1 % too short."""
    assert 0.895 < np.mean([covers(seed) for seed in range(300)]) < 0.995


def test_interval_is_nan_if_a_resample_is_undefined() -> None:
    """With three pairs some resamples draw one pair three times."""
    values = resampled_spearman([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], resamples=100)
    assert np.isnan(values).any()
    assert math.isnan(percentile_interval(values).low)
    assert math.isnan(percentile_interval(values).high)
    assert math.isnan(two_sided_p(values))
    assert np.isnan(resampled_spearman([2.0, 2.0], [0.0, 1.0], resamples=10)).all()
    assert math.isnan(mean_interval([1.0, math.nan], resamples=50).low)


def test_interval_is_the_middle_95_percent_and_p_value_twice_the_share_beyond_zero() -> None:
    assert percentile_interval(np.arange(1001)) == Interval(pytest.approx(25), pytest.approx(975))
    assert two_sided_p(np.full(999, 0.3)) == two_sided_p(np.full(999, -0.3)) == pytest.approx(2 / 1000)
    assert two_sided_p([*[0.3] * 980, *[-0.1] * 19]) == pytest.approx(40 / 1000)
    assert two_sided_p(np.zeros(999)) == 1
    assert two_sided_p([-1.0, 1.0]) == 1


def models(seed: int, pairs: int, noise: tuple[float, float], shared: float = 0.0) -> tuple[PairScores, PairScores]:
    """Scores of two models: gold plus independent noise and `shared` noise."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 26, pairs) / 5
    common = gold + shared * rng.standard_normal(pairs)
    one, two = (common + size * rng.standard_normal(pairs) for size in noise)
    return PairScores(one, gold), PairScores(two, gold)


def differences(of: PairedDifferences) -> list[Difference]:
    """All differences, the average last."""
    return [*of.tasks.values(), *([of.average] if of.average else [])]


@pytest.mark.parametrize(
    "shared", [pytest.param(0.0, marks=pytest.mark.slow), 2.0], ids=["independent errors", "shared errors"]
)
def test_p_values_of_equally_good_models_are_uniform(shared: float) -> None:
    p_values = []
    for seed in range(120):
        one, two = models(seed, 150, noise=(1.0, 1.0), shared=shared)
        comparison = compare({"stsb": one}, {"stsb": two}, resamples=250)
        p_values.append(comparison.tasks["stsb"].p_value)
    # 120 tries of probability p: p ± 3.5 standard errors.
    assert np.mean(np.array(p_values) <= 0.05) <= 0.12
    for level, tolerance in ((0.2, 0.128), (0.5, 0.160)):
        assert np.mean(np.array(p_values) <= level) == pytest.approx(level, abs=tolerance)


def test_paired_interval_is_shorter_than_that_of_one_model() -> None:
    better, worse = models(0, 1000, noise=(0.5, 1.1), shared=2.0)
    one = compare({"stsb": better}, {"stsb": worse}).tasks["stsb"]

    assert one.value == pytest.approx(100 * spearman(better.cosine, better.gold))
    assert one.other == pytest.approx(100 * spearman(worse.cosine, worse.gold))
    assert one.difference == one.value - one.other > 0
    assert 0 < one.interval.low < one.difference < one.interval.high
    assert one.p_value < 0.01
    # Without pairing, even the interval of one model is longer.
    alone = percentile_interval(100 * resampled_spearman(better.cosine, better.gold))
    assert one.interval.high - one.interval.low < 0.7 * (alone.high - alone.low)


def test_a_few_items_have_no_interval() -> None:
    """Also if all of them agree: the bootstrap of equal differences has no width."""
    few, enough = (mean_difference([100.0] * count, [50.0] * count) for count in (5, 6))
    assert (few.difference, enough.difference) == (50, 50)
    assert all(map(math.isnan, (few.interval.low, few.interval.high, few.p_value)))
    assert (enough.interval, enough.p_value < 0.05) == (Interval(50, 50), True)
    assert math.isnan(mean_interval([100.0]).low)


def test_average_is_over_common_published_tasks() -> None:
    ours, theirs = {}, {}
    for seed, name in enumerate(("sts12", "stsb", "mine")):
        ours[name], theirs[name] = models(seed, 300, (1.0, 1.4))
    ours["sickr"] = theirs["sts16"] = ours["mine"]

    comparison = compare(ours, theirs)

    assert list(comparison.tasks) == ["sts12", "stsb", "mine"]
    assert comparison.left_out == ("sickr", "sts16")
    average, tasks = comparison.average, comparison.tasks
    assert average.items == 600
    assert average.difference == pytest.approx((tasks["sts12"].difference + tasks["stsb"].difference) / 2)
    lengths = [one.interval.high - one.interval.low for one in (average, tasks["sts12"], tasks["stsb"])]
    assert lengths[0] < min(lengths[1:])  # the mean of two independent tasks varies less
    assert compare({"mine": ours["mine"]}, {"mine": theirs["mine"]}).average is None


def test_mean_over_subtasks_equals_the_average_over_tasks() -> None:
    ours, theirs = {}, {}
    for seed, name in enumerate(("mine/b", "mine/a")):
        ours[name], theirs[name] = models(seed, 300, (1.0, 1.4))
    whole = [
        PairScores(*map(np.concatenate, zip(*(of[name][:2] for name in of), strict=True))) for of in (ours, theirs)
    ]
    named = whole[0]._replace(subtask=np.repeat(["b", "a"], 300))

    comparison = compare({"mine": named}, {"mine": whole[1]})  # read from a file, the other has no names

    assert comparison.means == {"mine": compare(ours, theirs, averaged=tuple(ours)).average}
    assert comparison.means["mine"] != comparison.tasks["mine"]
    assert not compare({"mine": whole[0]}, {"mine": named}).means
    assert list(named._replace(subtask=np.repeat(["", "a"], 300)).by_subtask()) == ["a"]


def test_undefined_correlation_gives_nan_differences() -> None:
    one, two = models(3, 50, (1.0, 1.0))
    collapsed = PairScores(np.full(50, 0.5) + 1e-16 * np.arange(50), two.gold)  # constant but for rounding
    comparison = compare({"stsb": one, "sickr": one}, {"stsb": collapsed, "sickr": two})
    exchanged = compare({"stsb": collapsed, "sickr": two}, {"stsb": one, "sickr": one})
    for there, back in zip(differences(comparison), differences(exchanged), strict=True):
        assert (there.value, back.value) == pytest.approx((back.other, there.other), nan_ok=True)
    assert not math.isnan(exchanged.tasks["stsb"].other)
    for difference in (comparison.tasks["stsb"], comparison.average):
        for number in (difference.other, difference.difference, difference.interval.low, difference.p_value):
            assert math.isnan(number)
    assert not math.isnan(comparison.tasks["sickr"].p_value)


def test_different_pairs_cannot_be_compared() -> None:
    one, two = models(4, 50, (1.0, 1.0))
    for other in (PairScores(two.cosine, two.gold[::-1]), PairScores(two.cosine[1:], two.gold[1:])):
        with pytest.raises(ValueError, match=r"stsb.*different pairs"):
            compare({"stsb": one}, {"stsb": other})
    with pytest.raises(ValueError, match=r"stsb.*sickr"):
        compare({"stsb": one}, {"sickr": two})
