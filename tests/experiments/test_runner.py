"""A grid is run for real, on a tiny LLaMA: trained in processes of its own, measured, kept, and never run twice."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from tiny import save_tiny_base

from angle_llm import SentenceEncoder
from angle_llm.config import DataSource, changed_settings
from angle_llm.evaluate import PairScores, evaluate, select_tasks, spearman
from angle_llm.experiments import GridError, Result, RunnerSettings, load_results, run_grid
from angle_llm.experiments.comparisons import _agree
from angle_llm.experiments.grid import Measures, experiments, load_grid
from angle_llm.experiments.measure import KINDS
from angle_llm.experiments.provenance import commit_of, portable
from angle_llm.experiments.results import COMPARISONS, ResultError
from angle_llm.experiments.runner import GoldScores, changed, settings_told
from angle_llm.experiments.scores import load_scores, save_scores
from angle_llm.experiments.training import ExperimentError

GRID = """
title: Tiny
seeds: [1]
reference: as-is
train:
  model: {{path: {base}, dtype: float32, prompt: plain, max_length: 32}}
  lora: {{rank: 0}}
  data: {{path: DATA/pairs.jsonl, format: scored_pair, limit: 16}}
  objective: {{in_batch_weight: 0, cosine_weight: 1}}
  optimizer: {{learning_rate: 0.01}}
  batch_size: 8
measures: {{sts: [stsb-dev]}}
rows:
  as-is: {{train: null}}
  one: {{}}
  two: {{after: one, label: second stage, measures: {measures}}}
"""
WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sings", "sleeps", "fast"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, grid and everything that is made of them."""
    folder = tmp_path_factory.mktemp("grid")
    generator = np.random.default_rng(0)
    rows = [(" ".join(generator.choice(WORDS, 4)), " ".join(generator.choice(WORDS, 4)), i % 5) for i in range(40)]
    (folder / "data" / "stsb").mkdir(parents=True)
    lines = [json.dumps({"text1": a, "text2": b, "score": s / 4}) for a, b, s in rows]
    (folder / "data" / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = "\n".join(["sentence1\tsentence2\tscore", *(f"{a}\t{b}\t{s}" for a, b, s in rows)])
    (folder / "data" / "stsb" / "dev.tsv").write_text(table + "\n", encoding="utf-8")
    save_tiny_base("llama", folder / "base")
    write_grid(folder, "{sts: [stsb-dev]}")
    return folder


def write_grid(folder: Path, measures: str) -> None:
    (folder / "tiny.yaml").write_text(GRID.format(base=folder / "base", measures=measures), encoding="utf-8")


def settings_in(folder: Path) -> RunnerSettings:
    return RunnerSettings(
        grid=folder / "tiny.yaml",
        data_dir=folder / "data",
        results=folder / "results",
        runs=folder / "runs",
        device="cpu",
    )


@pytest.fixture(scope="module")
def results(place: Path) -> list[Result]:
    return run_grid(settings_in(place))


def test_every_row_has_its_result(place: Path, results: list[Result]) -> None:
    assert [result.name for result in results] == ["as-is", "one-seed1", "two-seed1"]
    assert load_results(place / "results", "tiny") == sorted(results, key=lambda result: result.name)


def test_figures_are_those_of_the_model_that_was_trained(place: Path, results: list[Result]) -> None:
    task = select_tasks(["stsb-dev"], place / "data", "raw")
    models = [place / "base", place / "runs/tiny/one-seed1/model", place / "runs/tiny/two-seed1/model"]
    found = set()
    for result, model in zip(results, models, strict=True):
        how = {"prompt": "plain", "max_length": 32} if result.train is None else {}
        direct = evaluate(SentenceEncoder.from_pretrained(model, device="cpu", **how).encode, task)
        figures = result.measures["sts"]["tasks"]["stsb-dev"]
        assert figures["spearman"] == pytest.approx(direct.tasks["stsb-dev"].spearman, abs=1e-9)
        assert figures["interval"][0] < figures["spearman"] < figures["interval"][1]
        found.add(round(figures["spearman"], 6))
    assert len(found) == 3, "training changed something, twice"


def test_the_second_stage_goes_on_from_the_first(place: Path, results: list[Result]) -> None:
    config = (place / "runs/tiny/two-seed1/settings.yaml").read_text(encoding="utf-8")
    assert str(place / "runs/tiny/one-seed1/model") in config
    assert results[2].label == "second stage"


def test_a_result_says_how_to_repeat_it_and_nothing_of_the_machine(place: Path, results: list[Result]) -> None:
    one = results[1]
    assert one.command.endswith("--grid recipes/grids/tiny.yaml --data-dir DATA --rows one --seeds 1")
    assert one.settings["data"]["path"] == "DATA/pairs.jsonl"
    assert one.train is not None
    assert (one.train["steps"], one.seed) == (2, 1)
    text = (place / "results/tiny/one-seed1.json").read_text(encoding="utf-8")
    assert str(place / "data") not in text
    assert str(place / "runs") not in text


def test_rows_are_compared_with_the_reference_pair_by_pair(place: Path, results: list[Result]) -> None:
    found = json.loads((place / "results" / "tiny" / COMPARISONS).read_text(encoding="utf-8"))
    assert (found["reference"], set(found["rows"])) == ("as-is", {"one", "two"})
    one = found["rows"]["one"]["per_seed"]["1"]
    spearmans = [result.measures["sts"]["tasks"]["stsb-dev"]["spearman"] for result in results]
    assert one["difference"] == pytest.approx(spearmans[1] - spearmans[0], abs=1e-9)
    assert one["interval"][0] < one["difference"] < one["interval"][1]
    assert (found["rows"]["one"]["seeds"], found["rows"]["one"]["interval"]) == (1, None)


def gold_of(place: Path) -> dict[str, Any]:
    (task,) = select_tasks(["stsb-dev"], place / "data", "raw")
    return {"stsb-dev": np.array([pair.score for pair in task.pairs])}


def test_cosines_of_every_pair_stay_with_the_result(place: Path, results: list[Result]) -> None:
    path, gold = place / "results/tiny/one-seed1.npz", gold_of(place)
    scores = load_scores(path, lambda: gold)
    assert scores is not None
    figures = results[1].measures["sts"]["tasks"]["stsb-dev"]
    assert 100 * spearman(*scores["stsb-dev"]) == pytest.approx(figures["spearman"], abs=1e-4), "four bytes a cosine"
    counts = np.array(results[1].measures["sts"]["density"]["stsb-dev"]["counts"])
    assert counts.sum() == len(scores["stsb-dev"].cosine) == 40
    assert load_scores(path, lambda: {"stsb-dev": gold["stsb-dev"][::-1]}) == {}, "of other gold scores"
    assert load_scores(path.with_name("absent.npz"), lambda: gold) is None


def test_four_bytes_are_enough_where_all_cosines_are_near_one(tmp_path: Path) -> None:
    """As before training: some come to be equal, which must not look like another model's figures (`comparisons._agree`)."""
    generator = np.random.default_rng(0)
    gold = generator.integers(0, 6, 5000).astype(float)
    cosine = 1 - 1e-4 * generator.random(5000) + 1e-5 * gold
    save_scores({"t": PairScores(cosine, gold)}, tmp_path / "s.npz")
    kept = load_scores(tmp_path / "s.npz", lambda: {"t": gold})
    assert kept is not None
    assert len(np.unique(kept["t"].cosine)) < 3000
    one, other = ({"tasks": {"t": 100 * spearman(values, gold)}} for values in (kept["t"].cosine, cosine))
    assert one != other
    assert _agree(one, other)
    assert not _agree(one, {"tasks": {"t": other["tasks"]["t"] + 0.02}}), "of another training"


def test_what_has_a_result_is_not_run_again_and_a_new_measure_is_added(place: Path, results: list[Result]) -> None:
    files = {path: path.read_bytes() for path in (place / "results" / "tiny").glob("*.json")}
    models = {path: path.stat().st_mtime_ns for path in (place / "runs").rglob("*.safetensors")}
    assert models
    assert run_grid(settings_in(place)) == results
    assert {path: path.read_bytes() for path in files} == files

    write_grid(place, "{sts: [stsb-dev], saturation: {path: DATA/pairs.jsonl, format: scored_pair}}")
    try:
        again = run_grid(replace(settings_in(place), rows=("two",)))
    finally:
        write_grid(place, "{sts: [stsb-dev]}")
    assert again[0].measures["sts"] == results[2].measures["sts"]
    assert sum(again[0].measures["saturation"]["pairs"]) == pytest.approx(1)
    assert again[0].train == results[2].train
    one = place / "runs/tiny/one-seed1/model/model.safetensors"
    assert one.stat().st_mtime_ns == models[one]


def test_a_file_is_of_one_model(place: Path, results: list[Result], tmp_path: Path) -> None:
    """Where the model is gone and a measure is asked for, what is trained is another model: nothing old stays."""
    grid = (place / "tiny.yaml").read_text(encoding="utf-8")
    more = "measures: {sts: [stsb-dev], saturation: {path: DATA/pairs.jsonl, format: scored_pair}}\nrows"
    (tmp_path / "tiny.yaml").write_text(grid.replace("measures: {sts: [stsb-dev]}\nrows", more), encoding="utf-8")
    assert results[1].train is not None
    old = {"train": results[1].train | {"last_loss": 9.9}, "measures": {"sts": results[1].measures["sts"] | {"old": 1}}}
    replace(results[1], date="2000-01-01", **old).write(tmp_path / "results")
    again = replace(
        settings_in(place),
        grid=tmp_path / "tiny.yaml",
        results=tmp_path / "results",
        runs=tmp_path / "runs",
        rows=("one",),
    )
    assert run_grid(replace(again, train_only=True)) == []  # as if it was killed before it measured
    assert (tmp_path / "runs/tiny/one-seed1/model").is_dir()
    (result,) = run_grid(again)
    assert result.date != "2000-01-01"
    assert set(result.measures) == {"sts", "saturation"}
    assert "old" not in result.measures["sts"]


def test_a_row_is_run_again_where_neither_its_model_nor_the_one_before_it_is(
    place: Path, results: list[Result], tmp_path: Path
) -> None:
    """As in a clone, which has the results and no runs."""
    for result in results:
        replace(result, date="2000-01-01").write(tmp_path / "results")
    clone = replace(settings_in(place), results=tmp_path / "results", runs=tmp_path / "runs", rows=("two",))
    assert [result.date for result in run_grid(clone)] == ["2000-01-01"], "it has its result"
    assert not (tmp_path / "runs").exists()
    (again,) = run_grid(replace(clone, again=True))
    assert again.date != "2000-01-01"
    assert again.measures["sts"]["tasks"] == results[2].measures["sts"]["tasks"], "trained from the same first stage"
    (one,) = run_grid(replace(clone, rows=("one",)))
    assert one.date == "2000-01-01", "the first stage was trained, and its result left as it was"


def test_a_row_measures_what_another_grid_has_left(place: Path, results: list[Result], tmp_path: Path) -> None:
    grid = "title: T\nmeasures: {sts: [stsb-dev]}\nrows:\n  left: {train: null, model: {path: RUNS/tiny/one-seed1/model}}\n"
    (tmp_path / "other.yaml").write_text(grid, encoding="utf-8")
    other = replace(settings_in(place), grid=tmp_path / "other.yaml", results=tmp_path)
    (left,) = run_grid(other)
    due = results[1].measures["sts"]["tasks"]["stsb-dev"]["spearman"]
    assert left.measures["sts"]["tasks"]["stsb-dev"]["spearman"] == pytest.approx(due, abs=1e-9)
    assert left.settings["model"]["path"] == "RUNS/tiny/one-seed1/model"
    assert left.settings["trained"]["steps"] == 2
    with pytest.raises(ExperimentError, match=r"tiny\.yaml --data-dir DATA --rows one --seeds 1 --train-only"):
        run_grid(replace(other, again=True, runs=tmp_path / "elsewhere"))
    (tmp_path / "other.yaml").write_text(grid.replace("tiny/one-seed1/model", "model"), encoding="utf-8")
    with pytest.raises(ExperimentError, match="A grid names it as RUNS/GRID/ROW-seedN/model"):
        run_grid(replace(other, again=True))


def test_rows_before_one_that_fails_are_compared(place: Path, results: list[Result], tmp_path: Path) -> None:
    text = (place / "tiny.yaml").read_text(encoding="utf-8").replace("after: one, ", "after: one, reference: one, ")
    (tmp_path / "tiny.yaml").write_text(text + "  lost: {train: {data: {path: DATA/lost.jsonl}}}\n", encoding="utf-8")
    shutil.copytree(place / "results", tmp_path / "results")
    (tmp_path / "results/tiny" / COMPARISONS).unlink()
    with pytest.raises(ExperimentError, match="training lost-seed1 ended"):
        run_grid(
            replace(
                settings_in(place), grid=tmp_path / "tiny.yaml", results=tmp_path / "results", runs=tmp_path / "runs"
            )
        )
    rows = json.loads((tmp_path / "results/tiny" / COMPARISONS).read_text(encoding="utf-8"))["rows"]
    assert {name: row["reference"] for name, row in rows.items()} == {"one": "as-is", "two": "one"}
    spearmans = [result.measures["sts"]["tasks"]["stsb-dev"]["spearman"] for result in results]
    of_two = rows["two"]["per_seed"]["1"]
    assert of_two["difference"] == pytest.approx(spearmans[2] - spearmans[1], abs=1e-4)
    assert of_two["interval"][0] < of_two["difference"] < of_two["interval"][1], "from the cosines that were kept"


def test_a_setting_that_is_newer_than_a_result_was_at_its_default(results: list[Result]) -> None:
    older = replace(results[1], settings={key: of for key, of in results[1].settings.items() if key != "accumulation"})
    assert changed(older, results[1].settings) == []
    assert changed(older, results[1].settings | {"accumulation": 2}) == ["accumulation"]


def test_paths_of_a_list_of_sets_are_all_told_without_the_machines() -> None:
    told = portable({"path": "/mnt/data/a.tsv:2,starter:x,/mnt/data/b.tsv"}, Path("/mnt/data"))
    assert told == {"path": "DATA/a.tsv:2,starter:x,DATA/b.tsv"}


def test_a_result_names_the_commit_of_its_code(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/grid.yaml").write_text("a", encoding="utf-8")
    assert commit_of(tmp_path) == ""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = commit_of(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{10}", commit)
    (tmp_path / "notes.txt").write_text("b", encoding="utf-8")
    assert commit_of(tmp_path) == commit
    (tmp_path / "recipes/grid.yaml").write_text("b", encoding="utf-8")
    assert commit_of(tmp_path) == f"{commit}+"


def test_what_is_missing_is_listed_and_nothing_is_done(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = replace(settings_in(place), results=place / "empty", list=True)
    assert run_grid(elsewhere) == []
    told = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in told] == [
        f"{name} missing: sts" for name in ("as-is", "one-seed1", "two-seed1")
    ]
    assert not (place / "empty").exists()


def test_a_mistake_shows_before_anything_runs(place: Path) -> None:
    with pytest.raises(GridError, match="no data directory"):
        run_grid(replace(settings_in(place), data_dir=place / "absent"))
    (place / "damaged" / "tiny").mkdir(parents=True)
    (place / "damaged" / "tiny" / "as-is.json").write_text("{", encoding="utf-8")
    with pytest.raises(ResultError, match=r"as-is\.json is damaged"):
        run_grid(replace(settings_in(place), results=place / "damaged", rows=("as-is",)))


def test_a_result_of_other_settings_is_not_taken_for_this_rows(place: Path, results: list[Result]) -> None:
    grid = (place / "tiny.yaml").read_text(encoding="utf-8")
    (place / "tiny.yaml").write_text(grid.replace("learning_rate: 0.01", "learning_rate: 0.02"), encoding="utf-8")
    try:
        with pytest.raises(ExperimentError, match=r"one-seed1\.json was made with other.*optimizer.learning_rate"):
            run_grid(replace(settings_in(place), rows=("one",)))
    finally:
        (place / "tiny.yaml").write_text(grid, encoding="utf-8")


def test_a_second_stage_is_not_the_same_settings_without_a_first(results: list[Result]) -> None:
    assert (results[1].settings["after"], results[2].settings["after"]) == (None, "one")
    assert changed_settings(results[2].settings, results[1].settings) == ["after"]


def test_a_condition_that_goes_or_comes_is_a_change() -> None:
    then, now = {"data": {"where": {}, "limit": 3}}, {"data": {"where": {"sts_overlap": 0}, "limit": 3}, "new": 1}
    assert changed_settings(then, now) == changed_settings(now, then) == ["data.where"]


@pytest.mark.parametrize("damage", ["gone", "empty", "cut short", "a pointer", "other bytes"])
def test_comparisons_outlive_the_cosines_they_were_made_of(
    damage: str, place: Path, results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "results", tmp_path, dirs_exist_ok=True)
    path, cosines = tmp_path / "tiny" / COMPARISONS, tmp_path / "tiny/one-seed1.npz"
    before = json.loads(path.read_text(encoding="utf-8"))
    whole = cosines.read_bytes()
    content = {
        "other bytes": whole[:120] + bytes(8) + whole[128:],
        "empty": b"",
        "cut short": whole[:-40],
        "a pointer": b"version https://git-lfs",
    }
    cosines.write_bytes(content[damage]) if damage in content else cosines.unlink()
    run_grid(replace(settings_in(place), results=tmp_path))
    assert json.loads(path.read_text(encoding="utf-8")) == before
    assert before["rows"]
    assert ("one-seed1.npz is damaged" in capsys.readouterr().out) == (damage != "gone")


def test_damaged_comparisons_are_not_written_over(
    place: Path, results: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for result in results:
        result.write(tmp_path)
    (tmp_path / "tiny" / COMPARISONS).write_text("<<<<<<< HEAD", encoding="utf-8")
    assert run_grid(replace(settings_in(place), results=tmp_path)) == results
    assert (tmp_path / "tiny" / COMPARISONS).read_text(encoding="utf-8") == "<<<<<<< HEAD"
    assert "nothing was compared" in capsys.readouterr().out


def test_gold_scores_of_a_set_that_is_not_here_are_left_out(
    place: Path, results: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    here = GoldScores(place / "data").of(Measures(sts=("stsb", "stsb-dev")))
    assert set(here) == {"stsb-dev"}
    np.testing.assert_array_equal(here["stsb-dev"], gold_of(place)["stsb-dev"])
    assert "not compared pair by pair: task 'stsb'" in capsys.readouterr().out


def test_two_rows_that_want_one_first_stage_train_it_once(place: Path, results: list[Result], tmp_path: Path) -> None:
    settings = replace(settings_in(place), runs=tmp_path / "runs", train_only=True, rows=("two",))
    one = tmp_path / "runs/tiny/one-seed1"
    one.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(one / ".lock"):
            waits = pool.submit(run_grid, settings)
            with pytest.raises(FutureTimeoutError):
                waits.result(timeout=2)
            done = place / "runs/tiny/one-seed1"
            shutil.copytree(done, one, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))
            written = (one / "model/model.safetensors").stat().st_mtime_ns
        waits.result(timeout=60)
    assert (one / "model/model.safetensors").stat().st_mtime_ns == written, "it had been trained meanwhile"
    assert (tmp_path / "runs/tiny/two-seed1/model").is_dir(), "trained though it has its result: a model was asked for"


def test_what_was_never_compared_pair_by_pair_differs_all_the_same(
    place: Path, results: list[Result], tmp_path: Path
) -> None:
    before = (place / "results" / "tiny" / COMPARISONS).read_text(encoding="utf-8")
    for result in results:
        result.write(tmp_path)
    run_grid(replace(settings_in(place), results=tmp_path, runs=place / "elsewhere"))
    after = (tmp_path / "tiny" / COMPARISONS).read_text(encoding="utf-8")
    found, paired = (json.loads(text)["rows"]["one"] for text in (after, before))
    ours, theirs = found["per_seed"].pop("1"), paired["per_seed"].pop("1")
    assert (ours["interval"], ours["p_value"]) == (None, None)
    assert (ours["difference"], ours["tasks"]) == (
        pytest.approx(theirs["difference"], abs=1e-9),
        pytest.approx(theirs["tasks"], abs=1e-9),
    )
    assert found["mean_difference"] == pytest.approx(paired["mean_difference"], abs=1e-9)
    assert found | {"mean_difference": 0} == paired | {"mean_difference": 0}


def test_a_seed_that_was_run_elsewhere_stays_beside_one_that_was_run_here(place: Path, results: list[Result]) -> None:
    path = place / "results" / "tiny" / COMPARISONS
    before = path.read_text(encoding="utf-8")
    text = (place / "tiny.yaml").read_text(encoding="utf-8")
    (place / "tiny.yaml").write_text(text.replace("seeds: [1]", "seeds: [1, 2]"), encoding="utf-8")
    (planned,) = experiments(load_grid(place / "tiny.yaml"), place / "data", ["one"], [2])
    elsewhere = replace(results[1], seed=2, settings=portable(settings_told(planned), place / "data"))
    file = elsewhere.write(place / "results")
    difference = json.loads(before)["rows"]["one"]["per_seed"]["1"]["difference"]  # its figures are those of seed 1
    kept = {"difference": difference, "interval": [4.0, 6.0], "p_value": 0.5, "tasks": {"stsb-dev": difference}}

    def compared(of_the_other: dict[str, Any]) -> dict[str, Any]:
        known = json.loads(before)
        known["rows"]["one"]["per_seed"]["2"] = of_the_other
        path.write_text(json.dumps(known), encoding="utf-8")
        run_grid(replace(settings_in(place), rows=("as-is",)))
        return dict(json.loads(path.read_text(encoding="utf-8"))["rows"]["one"])

    try:
        found = compared(kept)
        stale = compared(kept | {"difference": 99.0, "tasks": {"stsb-dev": 99.0}})
        file.unlink()
        gone = compared(kept)
    finally:
        (place / "tiny.yaml").write_text(text, encoding="utf-8")
        path.write_text(before, encoding="utf-8")
    assert found["per_seed"]["2"] == kept
    assert found["seeds"] == 2
    assert found["interval"] == pytest.approx([difference, difference], abs=1e-6)
    assert stale["per_seed"]["2"]["difference"] == pytest.approx(difference, abs=1e-9), "of a result made anew since"
    assert stale["per_seed"]["2"]["interval"] is None
    assert set(gone["per_seed"]) == {"1"}, "no difference without a result"


@pytest.mark.parametrize(
    ("changed", "due"),
    [({"variant": "senteval"}, {}), ({"pairs": 7}, {}), ({"spearman": None}, {"mean_difference": None})],
    ids=["other text", "other pairs", "undefined"],
)
def test_figures_are_compared_where_they_are_of_the_same_pairs(
    changed: dict[str, Any], due: dict[str, Any], place: Path, results: list[Result], tmp_path: Path
) -> None:
    for result in results:
        if result.row == "one":
            figures = result.measures["sts"]["tasks"]["stsb-dev"] | changed
            sts = result.measures["sts"] | {"tasks": {"stsb-dev": figures}}
            result = replace(result, measures=result.measures | {"sts": sts})
        result.write(tmp_path)
    for _ in range(2):  # what was found is known the second time
        run_grid(replace(settings_in(place), results=tmp_path, runs=tmp_path / "elsewhere"))
        rows = json.loads((tmp_path / "tiny" / COMPARISONS).read_text(encoding="utf-8"))["rows"]
        assert ("one" in rows) == bool(due)
        assert rows.get("one", {}).items() >= due.items()


def test_a_measure_on_other_pairs_of_the_same_name_is_another() -> None:
    here, there = (Measures(saturation=DataSource(path=f"DATA/{name}/dev.tsv")) for name in ("stsb", "sick"))
    (kind,) = (kind for kind in KINDS if kind.name == "saturation")
    assert kind.asked(here) != kind.asked(there)
