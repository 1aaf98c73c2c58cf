"""STS reports: tables, published rows, intervals, CSV, JSON."""

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from evaluate_samples import hashed_words, rows_of

from angle_llm.evaluate import PUBLISHED, PUBLISHED_TASKS, PairScores, StsPair, StsTask, compare, evaluate
from angle_llm.evaluate.encoding import EncoderFacts
from angle_llm.evaluate.sts import StsResults, read_scores, sts_report
from angle_llm.io import plain, write_json
from angle_llm.prompts import load_prompt

PAIRS = (StsPair("a b", "a b", 5.0, "one"), StsPair("a b", "a c", 3.0, "one"), StsPair("a b", "d e", 0.0, "two"))


def results(*names: str, variant: str = "raw", official_pairs: int | None = 3) -> StsResults:
    tasks = [StsTask(name, name.upper(), variant, "here", PAIRS, official_pairs) for name in names]
    return evaluate(hashed_words, tasks)


def many_pairs() -> tuple[StsPair, ...]:
    """60 pairs; the number of shared words is the score plus noise, larger in one sub-task."""
    rng = np.random.default_rng(0)
    pairs = []
    for i in range(60):
        words, score = rng.choice(500, 12, replace=False).tolist(), int(rng.integers(0, 6))
        noise = 1 if i % 3 else 4
        shared = max(0, min(6, score + int(rng.integers(-noise, noise + 1))))
        sides = words[:6], words[:shared] + words[6 : 12 - shared]
        one, two = (" ".join(f"w{word}" for word in side) for side in sides)
        pairs.append(StsPair(one, two, float(score), "one" if i % 3 else "two"))
    return tuple(pairs)


MANY = many_pairs()


def resampled(*names: str, variant: str = "raw") -> StsResults:
    tasks = [StsTask(name, name.upper(), variant, "here", MANY, len(MANY)) for name in names]
    return evaluate(hashed_words, tasks, resamples=100)


def test_published_averages_are_the_means_of_their_rows() -> None:
    tasks = PUBLISHED_TASKS
    for row in PUBLISHED:
        if row.scores:
            assert tuple(row.scores) == tasks
            assert sum(row.scores.values()) / 7 == pytest.approx(row.average, abs=0.006)
        assert row.average_over(tasks, tasks) == row.average
        assert row.average_over((), tasks) is None
        assert (row.average_over(tasks[:1], tasks) is None) == (not row.scores)


def test_published_rows_are_averaged_over_the_evaluated_tasks() -> None:
    rows = rows_of(sts_report(results("sts12", "stsb", "stsb-dev"), "my model"))
    assert rows["model"] == ["STS12", "STSB", "STSB-DEV", "average"]
    assert rows["**my model**"] == ["100.00", "100.00", "100.00", "100.00"]
    assert rows["AnglE-LLaMA2-7B v1"] == ["78.68", "88.92", "–", "83.80"]
    assert "SimCSE-LLaMA2-7B" not in rows  # only its average over all seven is known

    rows = rows_of(sts_report(results(*PUBLISHED_TASKS), "my model"))
    assert {row.model for row in PUBLISHED} <= set(rows)
    assert rows["AnglE-LLaMA2-7B v2"][-1] == "85.96"
    assert rows["SimCSE-LLaMA2-7B"] == [*["–"] * 7, "85.24"]

    mine = results("mine", variant="file", official_pairs=None)
    assert (mine.average, mine.averaged) == (None, ())
    report = sts_report(mine, "my model")
    assert rows_of(report)["**my model**"] == ["100.00"]
    assert "AnglE" not in report


def test_notes_on_missing_pairs_undefined_scores_and_zero_vectors() -> None:
    report = sts_report(results("sts12", official_pairs=3108), "m")
    assert re.search(r"STS12.*3,108", report)
    assert "STS12 · two: undefined" in report

    zero = evaluate(lambda texts: np.zeros((len(texts), 4)), [StsTask("sts12", "S", "raw", "", MANY)], resamples=10)
    report = sts_report(zero, "m")
    assert rows_of(report)["**m**"] == ["nan", "nan"]
    content = plain(zero.to_dict())
    assert content["average"]["interval"] == {"low": None, "high": None}
    assert content["tasks"]["sts12"]["subtasks"]["two"]["interval"] == {"low": None, "high": None}


def test_means_over_subtasks() -> None:
    task = resampled("sts12").tasks["sts12"]
    one, two = task.subtasks["one"], task.subtasks["two"]
    mean, weighted = task.mean_over_subtasks, task.weighted_mean_over_subtasks
    assert (one.pairs, two.pairs) == (40, 20)
    for metric in ("spearman", "pearson"):
        first, second = getattr(one, metric), getattr(two, metric)
        assert getattr(mean, metric) == pytest.approx((first + second) / 2)
        assert getattr(weighted, metric) == pytest.approx((2 * first + second) / 3)
    report = re.sub(" +", " ", sts_report(resampled("sts12"), "m"))
    for label, of in (("STS12", task), ("STS12, mean", mean), ("STS12, weighted mean", weighted)):
        assert re.search(rf"\| {label} \| raw \| 60 \| {of.spearman:.2f} \| \S+ \| {of.pearson:.2f} \|", report)


def test_scores_have_intervals_with_resamples() -> None:
    here = resampled("sts12", "sickr")
    task, average = here.tasks["sts12"], here.average_interval
    for one, interval in (
        (here.average, average),
        *((of.spearman, of.interval) for of in (task, *task.subtasks.values())),
    ):
        assert interval.low < one < interval.high
    content = plain(here.to_dict())
    assert content["average"]["interval"] == vars(average)
    assert content["tasks"]["sts12"]["subtasks"]["one"]["interval"] == vars(task.subtasks["one"].interval)
    assert f"{average.low:.2f}–{average.high:.2f}" in sts_report(here, "m")


def test_comparison_in_the_report() -> None:
    ours = resampled("sts12", "mine")
    theirs = {"sts12": PairScores(ours.scores["sts12"].gold, ours.scores["sts12"].gold), "sickr": ours.scores["mine"]}
    comparison = compare(ours.scores, theirs, resamples=100)
    report = sts_report(ours, "m", comparison=comparison, other="the gold scores")
    one = comparison.tasks["sts12"]
    row = rf"\| STS12 +\| +60 \| +{one.value:.2f} \| +100\.00 \| +{one.difference:.2f} \| +-.* … .* \| 0\.0198 \|"
    assert re.search(row, report)
    assert re.search(row.replace("STS12", "average"), report)
    mean = comparison.means["sts12"]
    assert (mean.value, mean.other) == pytest.approx((ours.tasks["sts12"].mean_over_subtasks.spearman, 100))
    assert f"| STS12, mean | 60 | {mean.value:.2f} |" in re.sub(" +", " ", report)
    assert "mine, sickr" in report  # not compared


FACTS = EncoderFacts(load_prompt("plain").to_dict(), "mean", 100, 10)


def test_saved_scores_are_read_exactly(tmp_path: Path) -> None:
    here = resampled("sts12", "sickr")
    write_json(tmp_path / "sts.json", plain({"model": "some/model", "encoder": asdict(FACTS), **here.to_dict()}))
    model, saved, _ = read_scores(tmp_path / "sts.json")
    assert (model, list(saved)) == (f"some/model ({FACTS})", ["sts12", "sickr"])
    for name, scores in saved.items():
        np.testing.assert_array_equal(scores[:2], here.scores[name][:2])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"model": "m", "pairs": [1]}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [0.5, 0.6], "gold": [1]}}}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [null], "gold": [1]}}}',
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_scores(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        read_scores(tmp_path / "gone.json")
