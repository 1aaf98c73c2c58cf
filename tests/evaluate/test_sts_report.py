"""What is told about the figures: the tables, the published rows, the JSON file."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from sts_samples import hashed_words, rows_of

from angle_llm.evaluate import (
    PUBLISHED,
    PUBLISHED_TASKS,
    PairScores,
    StsPair,
    StsResults,
    StsTask,
    compare,
    evaluate,
    markdown_report,
    read_scores,
    results_dict,
)
from angle_llm.evaluate.sts_files import figures_csv
from angle_llm.io import write_json

PAIRS = (StsPair("a b", "a b", 5.0, "one"), StsPair("a b", "a c", 3.0, "one"), StsPair("a b", "d e", 0.0, "two"))


def results(*names: str, variant: str = "raw", official_pairs: int | None = 3) -> StsResults:
    tasks = [StsTask(name, name.upper(), variant, "here", PAIRS, official_pairs) for name in names]
    return evaluate(hashed_words, tasks)


def test_published_averages_are_the_means_of_their_rows() -> None:
    for row in PUBLISHED:
        if row.spearman:
            assert set(row.spearman) == set(PUBLISHED_TASKS)
            assert sum(row.spearman.values()) / 7 == pytest.approx(row.average, abs=0.006)
        assert row.average_over(PUBLISHED_TASKS) == row.average
        assert row.average_over(()) is None
        assert (row.average_over(("stsb",)) is None) == (not row.spearman)


def test_the_table_compares_over_the_tasks_that_are_here() -> None:
    rows = rows_of(markdown_report(results("sts12", "stsb", "stsb-dev"), "my model"))

    assert rows["model"] == ["text", "STS12", "STSB", "STSB-DEV", "average"]
    assert rows["**my model**"] == ["raw", "100.00", "100.00", "100.00", "100.00"]
    assert rows["AnglE-LLaMA2-7B v1"] == ["senteval", "78.68", "88.92", "–", "83.80"]
    assert "SimCSE-LLaMA2-7B" not in rows  # only its average over all seven is known


def test_all_seven_tasks_bring_the_rows_with_an_average_only() -> None:
    rows = rows_of(markdown_report(results(*PUBLISHED_TASKS), "my model"))
    assert {row.model for row in PUBLISHED} <= set(rows)
    assert rows["AnglE-LLaMA2-7B v2"][-1] == "85.96"
    assert rows["SimCSE-LLaMA2-7B"] == ["senteval", *["–"] * 7, "85.24"]


def test_a_file_alone_stands_alone() -> None:
    report = markdown_report(results("mine", variant="file", official_pairs=None), "my model")
    assert rows_of(report)["**my model**"] == ["file", "100.00"]
    assert "AnglE" not in report
    assert "Published" not in report
    assert "the sentences as in the file" in report


def test_the_report_says_which_text_each_number_is_on() -> None:
    raw, senteval = (markdown_report(results("sts12", variant=variant), "m") for variant in ("raw", "senteval"))
    assert "Text `raw`" in raw
    assert "Not the same text as the published rows: STS12" in raw
    assert "Text `senteval`" in senteval
    assert "Not the same text" not in senteval
    for report in (raw, senteval):
        assert "Published rows are on SentEval's text" in report


def test_every_task_and_subtask_has_its_figures() -> None:
    report = markdown_report(results("sts12"), "m")
    assert re.search(r"\| STS12 +\| raw +\| +3 \| +100\.00 \|", report)
    assert re.search(r"\| STS12 · one +\| +2 \| +100\.00 \| +– \| +100\.00 \|", report)
    assert re.search(r"\| STS12 · two +\| +1 \| +nan \| +– \| +nan \|", report)


def test_what_is_odd_is_said() -> None:
    report = markdown_report(results("sts12", official_pairs=3108), "m")
    assert "STS12: 3 pairs here, 3,108 in the published task" in report
    assert "STS12, two: no correlation: of similarities and gold scores, at least two pairs are needed" in report

    zero = evaluate(lambda texts: np.zeros((len(texts), 4)), [StsTask("sts12", "STS12", "raw", "here", PAIRS)])
    report = markdown_report(zero, "m")
    assert "3 of 3 sentences have the zero vector" in report
    assert rows_of(report)["**m**"] == ["raw", "nan", "nan"]


def test_a_pipe_in_a_name_does_not_break_the_table() -> None:
    lines = markdown_report(results("sts12"), "a|b").split("\n\n")[0].split("\n")
    assert "a\\|b" in lines[2]
    assert len({len(line) for line in lines}) == 1


def test_json_holds_model_settings_variant_and_figures(tmp_path: Path) -> None:
    settings = {"model": "m", "data_dir": tmp_path, "tasks": ("sts12",)}
    path = tmp_path / "new" / "sts.json"
    write_json(
        path,
        results_dict(results("sts12", "mine", variant="senteval"), "m", settings=settings, encoder={"pooling": "last"}),
    )
    content = json.loads(path.read_text())

    assert content["model"] == "m"
    assert content["variant"] == "senteval"
    assert content["settings"] == {"model": "m", "data_dir": str(tmp_path), "tasks": ["sts12"]}
    assert content["encoder"] == {"pooling": "last"}
    assert content["average"] == {"tasks": ["sts12"], "spearman": pytest.approx(100), "interval": None}
    assert content["tasks"]["sts12"]["mean_over_subtasks"] == {"spearman": None, "pearson": None}  # one of two is NaN
    assert content["pairs"]["sts12"]["gold"] == [5, 3, 0]
    assert content["tasks"]["sts12"]["spearman"] == pytest.approx(100)
    assert content["tasks"]["sts12"]["pairs"] == 3
    assert content["tasks"]["sts12"]["variant"] == "senteval"
    assert content["tasks"]["sts12"]["subtasks"]["two"]["spearman"] is None
    assert "at least two pairs" in content["tasks"]["sts12"]["subtasks"]["two"]["undefined"]
    assert [file.name for file in path.parent.iterdir()] == ["sts.json"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sts.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"new": math.nan})

    def killed(self: Path, target: Path) -> None:
        raise OSError("killed before the rename")

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(OSError, match="before the rename"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["sts.json"]


def many_pairs() -> tuple[StsPair, ...]:
    """Sixty pairs whose sentences share as many words as their score says, or a few more or less."""
    rng = np.random.default_rng(0)
    pairs = []
    for i in range(60):
        words, score = rng.choice(500, 12, replace=False).tolist(), int(rng.integers(0, 6))
        noise = 1 if i % 3 else 4  # one sub-task is harder than the other
        shared = max(0, min(6, score + int(rng.integers(-noise, noise + 1))))
        sides = words[:6], words[:shared] + words[6 : 12 - shared]
        one, two = (" ".join(f"w{word}" for word in side) for side in sides)
        pairs.append(StsPair(one, two, float(score), "one" if i % 3 else "two"))
    return tuple(pairs)


MANY = many_pairs()


def resampled(*names: str, variant: str = "raw") -> StsResults:
    tasks = [StsTask(name, name.upper(), variant, "here", MANY, len(MANY)) for name in names]
    return evaluate(hashed_words, tasks, resamples=100)


def test_all_mean_and_weighted_mean_stand_side_by_side() -> None:
    task = resampled("sts12").tasks["sts12"]
    one, two = task.subtasks["one"], task.subtasks["two"]
    mean, weighted = task.mean_over_subtasks, task.weighted_mean_over_subtasks
    assert mean is not None
    assert weighted is not None
    assert (one.pairs, two.pairs) == (40, 20)
    assert mean.spearman == pytest.approx((one.spearman + two.spearman) / 2)
    assert mean.pearson == pytest.approx((one.pearson + two.pearson) / 2)
    assert weighted.spearman == pytest.approx((2 * one.spearman + two.spearman) / 3)
    assert weighted.pearson == pytest.approx((2 * one.pearson + two.pearson) / 3)
    assert len({f"{x:.2f}" for x in (task.spearman, mean.spearman, weighted.spearman)}) == 3

    _, spearman, pearson, *_ = markdown_report(resampled("sts12"), "m").split("\n\n")
    assert re.search(r"Spearman +\| text +\| pairs +\| +all +\| +95 % interval +\| +mean +\| +weighted mean", spearman)
    assert f"{task.spearman:.2f}" in spearman
    for cell in (mean.spearman, weighted.spearman):
        assert f" {cell:.2f} |" in spearman
    for cell in (task.pearson, mean.pearson, weighted.pearson):
        assert f" {cell:.2f} |" in pearson


def test_figures_have_intervals_where_resamples_were_asked_for() -> None:
    here = resampled("sts12", "sickr")
    task, average = here.tasks["sts12"], here.average_interval
    for figures in (task, *task.subtasks.values()):
        assert figures.interval is not None
        assert figures.interval.low < figures.spearman < figures.interval.high
    assert average is not None
    assert average.low < (here.average or 0) < average.high
    content = results_dict(here, "m")
    assert content["average"]["interval"] == {"low": average.low, "high": average.high}
    one = content["tasks"]["sts12"]["subtasks"]["one"]
    assert one["interval"]["low"] < one["spearman"] < one["interval"]["high"]
    report = markdown_report(here, "m")
    assert f"{average.low:.2f}–{average.high:.2f}" in report
    assert "not what another training seed would" in report
    assert "another training seed" not in markdown_report(results("sts12"), "m")


def test_an_interval_that_does_not_exist_is_no_number() -> None:
    zero = evaluate(lambda texts: np.zeros((len(texts), 4)), [StsTask("sts12", "S", "raw", "", MANY)], resamples=10)
    assert "nan–nan" in markdown_report(zero, "m")
    assert "S: no correlation: " in markdown_report(zero, "m")
    few = evaluate(hashed_words, [StsTask("sts12", "S", "raw", "", PAIRS)], resamples=50)
    assert "S: no interval: some resamples drew pairs that are all alike" in markdown_report(few, "m")
    content = results_dict(zero, "m")
    assert content["average"]["interval"] == {"low": None, "high": None}
    assert content["tasks"]["sts12"]["subtasks"]["two"]["interval"] == {"low": None, "high": None}


def test_the_report_of_all_tasks_fits_a_terminal() -> None:
    """120 columns, whatever the model is called."""
    report = markdown_report(resampled(*PUBLISHED_TASKS, variant="senteval"), "runs/" + 100 * "long" + "/model")
    tables = [line for line in report.split("\n") if line.startswith("|")]
    assert max(map(len, tables)) <= 120
    assert "longlong/model**" in tables[2]
    assert "runs/longlong" in report


def test_a_comparison_is_told_with_interval_p_and_what_was_left_out() -> None:
    ours = resampled("sts12", "mine")
    theirs = {"sts12": PairScores(ours.scores["sts12"].gold, ours.scores["sts12"].gold), "sickr": ours.scores["mine"]}
    comparison = compare(ours.scores, theirs, resamples=100)
    report = markdown_report(ours, "m", comparison=comparison, other="the gold scores")

    one = comparison.tasks["sts12"]
    assert one.difference < 0
    row = rf"\| STS12 +\| +60 \| +{one.spearman:.2f} \| +100\.00 \| +{one.difference:.2f} \| +-.* … .* \| 0\.0198 \|"
    assert re.search(row, report)
    assert re.search(row.replace("STS12", "average"), report)
    assert "The other: the gold scores." in report
    assert "for one of the two only: mine, sickr" in report
    content = results_dict(ours, "m", comparison=comparison)["comparison"]
    assert content["tasks"]["sts12"]["p_value"] == one.p_value
    assert content["average"]["interval"]["low"] == one.interval.low


def test_the_figures_as_csv() -> None:
    here = resampled("sts12", "mine")
    lines = list(csv.DictReader(io.StringIO(figures_csv(here, 'a "model", mine'))))
    kinds = ["all", "mean", "weighted mean", "subtask", "subtask"]
    assert [line["figure"] for line in lines] == [*kinds, *kinds, "average"]
    task = here.tasks["sts12"]
    assert {line["model"] for line in lines} == {'a "model", mine'}
    assert float(lines[0]["spearman"]) == task.spearman
    assert task.interval is not None
    assert float(lines[0]["spearman_low"]) == task.interval.low
    assert float(lines[3]["pearson"]) == task.subtasks[lines[3]["subtask"]].pearson
    assert (lines[-1]["task"], float(lines[-1]["spearman"])) == ("sts12", here.average)

    undefined = list(csv.DictReader(io.StringIO(figures_csv(results("sts12"), "m"))))
    assert undefined[1]["spearman"] == undefined[-2]["spearman"] == "nan"
    assert "at least two pairs" in undefined[-2]["undefined"]


def test_scores_come_back_from_json_bit_for_bit(tmp_path: Path) -> None:
    here = resampled("sts12", "sickr")
    write_json(tmp_path / "sts.json", results_dict(here, "some/model"))
    saved = read_scores(tmp_path / "sts.json")
    assert saved.model == "some/model"
    assert list(saved.scores) == ["sts12", "sickr"]
    for name, scores in saved.scores.items():
        np.testing.assert_array_equal(scores.cosine, here.scores[name].cosine)
        np.testing.assert_array_equal(scores.gold, here.scores[name].gold)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"model": "m"}',
        '{"model": "m", "pairs": [1]}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [0.5]}}}',
        '{"model": "m", "pairs": {"sts12": {"cosine": ["x"], "gold": [1]}}}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [0.5, 0.6], "gold": [1]}}}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [NaN], "gold": [1]}}}',
        '{"model": "m", "pairs": {"sts12": {"cosine": [null], "gold": [1]}}}',
    ],
)
def test_a_file_that_holds_no_scores_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_scores(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError, match=r"no results file at .*gone\.json"):
        read_scores(tmp_path / "gone.json")
