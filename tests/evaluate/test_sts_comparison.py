"""Two models on the same pairs: fair when they are equally good, sharp when one is better, and no number about nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from angle_llm.evaluate import Interval, PairScores, compare, percentile_interval, resampled_spearman, spearman


def models(seed: int, pairs: int, noise: tuple[float, float], shared: float = 0.0) -> tuple[PairScores, PairScores]:
    """Two models that see the gold score through noise of their own and `shared` noise."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 26, pairs) / 5
    common = gold + shared * rng.standard_normal(pairs)
    one, two = (common + size * rng.standard_normal(pairs) for size in noise)
    return PairScores(one, gold), PairScores(two, gold)


@pytest.mark.parametrize("shared", [0.0, 2.0], ids=["errors apart", "errors shared"])
def test_equally_good_models_are_told_apart_one_time_in_twenty(shared: float) -> None:
    p_values = []
    for seed in range(300):
        one, two = models(seed, 150, noise=(1.0, 1.0), shared=shared)
        comparison = compare({"stsb": one}, {"stsb": two}, resamples=250, seed=seed)
        p_values.append(comparison.tasks["stsb"].p_value)
    # 300 tries of probability p: p ± 3.5 standard errors.
    for level, tolerance in ((0.05, 0.044), (0.2, 0.081), (0.5, 0.101)):
        assert np.mean(np.array(p_values) <= level) == pytest.approx(level, abs=tolerance)


def test_the_average_of_equally_good_models_is_fair_too() -> None:
    p_values = []
    for seed in range(150):
        tasks = {name: models(seed + 1000 * i, 80, (1.0, 1.0)) for i, name in enumerate(("sts12", "stsb", "sickr"))}
        ours, theirs = ({name: pair[side] for name, pair in tasks.items()} for side in (0, 1))
        average = compare(ours, theirs, resamples=150, seed=seed).average
        assert average is not None
        p_values.append(average.p_value)
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.062)  # 3.5 standard errors of 150 tries


def test_a_better_model_is_found_and_surer_than_its_interval_alone_says() -> None:
    better, worse = models(0, 1000, noise=(0.5, 1.1), shared=2.0)
    one = compare({"stsb": better}, {"stsb": worse}).tasks["stsb"]

    assert one.spearman == pytest.approx(100 * spearman(better.cosine, better.gold))
    assert one.other == pytest.approx(100 * spearman(worse.cosine, worse.gold))
    assert one.difference == one.spearman - one.other > 0
    assert 0 < one.interval.low < one.difference < one.interval.high
    assert one.p_value < 0.01
    # The same data, taken as two unrelated samples: even one model's interval is longer.
    alone = percentile_interval(100 * resampled_spearman([better.cosine], better.gold)[0])
    assert one.interval.high - one.interval.low < 0.7 * (alone.high - alone.low)


def test_exchanging_the_two_changes_the_sign_alone() -> None:
    one, two = models(1, 200, (1.0, 1.2))
    there, back = compare({"sts12": one}, {"sts12": two}), compare({"sts12": two}, {"sts12": one})
    for forth, reverse in ((there.tasks["sts12"], back.tasks["sts12"]), (there.average, back.average)):
        assert forth is not None
        assert reverse is not None
        assert forth.difference == -reverse.difference
        assert forth.p_value == reverse.p_value
        assert forth.interval.low == pytest.approx(-reverse.interval.high, abs=1e-12)  # percentiles interpolate
        assert forth.interval.high == pytest.approx(-reverse.interval.low, abs=1e-12)


def test_equal_models_do_not_differ_at_all() -> None:
    one, _ = models(2, 100, (1.0, 1.0))
    doubled = PairScores(2 * one.cosine, one.gold)  # the same order: the same model to a rank correlation
    comparison = compare({"stsb": one}, {"stsb": doubled})
    for difference in (comparison.tasks["stsb"], comparison.average):
        assert difference is not None
        assert (difference.difference, difference.interval, difference.p_value) == (0, Interval(0, 0), 1)


def test_the_average_is_over_the_published_tasks_both_have() -> None:
    ours, theirs = {}, {}
    for seed, name in enumerate(("sts12", "stsb", "mine")):
        ours[name], theirs[name] = models(seed, 300, (1.0, 1.4))
    ours["sickr"] = theirs["sts16"] = ours["mine"]

    comparison = compare(ours, theirs)

    assert list(comparison.tasks) == ["sts12", "stsb", "mine"]
    assert comparison.averaged == ("sts12", "stsb")
    assert comparison.left_out == ("sickr", "sts16")
    average, tasks = comparison.average, comparison.tasks
    assert average is not None
    assert average.pairs == 600
    assert average.difference == pytest.approx((tasks["sts12"].difference + tasks["stsb"].difference) / 2)
    lengths = [one.interval.high - one.interval.low for one in (average, tasks["sts12"], tasks["stsb"])]
    assert lengths[0] < min(lengths[1:])  # two independent tasks know more than one
    assert compare({"mine": ours["mine"]}, {"mine": theirs["mine"]}).average is None


def test_a_figure_that_does_not_exist_leaves_no_difference() -> None:
    one, two = models(3, 50, (1.0, 1.0))
    collapsed = PairScores(np.full(50, 0.5) + 1e-16 * np.arange(50), two.gold)  # constant but for rounding
    comparison = compare({"stsb": one, "sickr": one}, {"stsb": collapsed, "sickr": two})
    for difference in (comparison.tasks["stsb"], comparison.average):
        assert difference is not None
        for number in (difference.other, difference.difference, difference.interval.low, difference.p_value):
            assert math.isnan(number)
    assert not math.isnan(comparison.tasks["sickr"].p_value)


def test_other_pairs_cannot_be_compared() -> None:
    one, two = models(4, 50, (1.0, 1.0))
    with pytest.raises(ValueError, match=r"task 'stsb': .*not measured on the same pairs \(50 and 50 gold scores"):
        compare({"stsb": one}, {"stsb": PairScores(two.cosine, two.gold[::-1])})
    with pytest.raises(ValueError, match=r"not measured on the same pairs \(50 and 49"):
        compare({"stsb": one}, {"stsb": PairScores(two.cosine[1:], two.gold[1:])})
    with pytest.raises(ValueError, match=r"no task in common: one has stsb, the other sickr"):
        compare({"stsb": one}, {"sickr": two})
