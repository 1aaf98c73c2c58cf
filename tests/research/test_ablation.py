"""The grid runner on a tiny LLaMA: rows are trained, measured once, and compared pair by pair."""

import csv
import json
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ablation import Settings, joined, main
from ablation_parts.grid import changed, experiments, load_grid
from ablation_parts.results import (
    MEAN,
    MEASUREMENTS,
    SCORES,
    Cached,
    Line,
    Results,
    differences,
    load_cached,
    measurement,
    save_scores,
)
from programs import run as run_program
from programs import start
from tiny import save_tiny_base

from angle_llm import SentenceEncoder
from angle_llm.evaluate import PairScores, evaluate, select_tasks
from angle_llm.evaluate.bootstrap import mean_difference, spearman
from angle_llm.settings.parsing import SettingsError
from angle_llm.train.objectives import make_losses

ROOT = Path(__file__).parents[2]
GRIDS = sorted((ROOT / "eval" / "grids").glob("*.yaml"))
DATA = Path("/data")
GRID = """
title: Tiny
seeds: [1]
reference: as-is
train:
  model: {{path: {base}, dtype: float32, prompt: plain, max_length: 32}}
  lora: {{rank: 0}}
  data: {{path: DATA/pairs.tsv, format: scored_pair, limit: 16}}  # the file is pairs.jsonl
  objective: {{in_batch_weight: 0, cosine_weight: 1}}
  optimizer: {{learning_rate: 0.01}}
  batch_size: 8
measures: {{sts: [stsb-dev], retrieval: [DATA/beir]}}
rows:
  as-is: {{train: null}}
  one: {{}}
  two: {{after: one, label: second stage, measures: {measures}}}
"""
WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sings", "sleeps", "fast"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, base model and a grid."""
    folder = tmp_path_factory.mktemp("grid")
    generator = np.random.default_rng(0)
    rows = [(" ".join(generator.choice(WORDS, 4)), " ".join(generator.choice(WORDS, 4)), i % 5) for i in range(40)]
    (folder / "data" / "stsb").mkdir(parents=True)
    lines = [json.dumps({"text1": a, "text2": b, "score": s / 4}) for a, b, s in rows]
    (folder / "data" / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = "\n".join(["sentence1\tsentence2\tscore", *(f"{a}\t{b}\t{s}" for a, b, s in rows)])
    (folder / "data" / "stsb" / "dev.tsv").write_text(table + "\n", encoding="utf-8")
    (folder / "data" / "beir" / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", [b for _, b, _ in rows]), ("queries", [a for a, _, _ in rows])):
        found = "".join(json.dumps({"_id": f"{name}{i}", "text": text}) + "\n" for i, text in enumerate(texts))
        (folder / "data" / "beir" / f"{name}.jsonl").write_text(found, encoding="utf-8")
    judged = "".join(f"queries{i}\tcorpus{i}\t1\n" for i in range(20))
    (folder / "data" / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    save_tiny_base("llama", folder / "base")
    write_grid(folder)
    return folder


def write_grid(folder: Path, measures: str = "{sts: [stsb-dev]}", *changes: tuple[str, str]) -> None:
    text = GRID.format(base=folder / "base", measures=measures)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")


def settings_in(folder: Path) -> Settings:
    results, runs = folder / "results.csv", folder / "runs"
    return Settings(grid=folder / "tiny.yaml", data_dir=folder / "data", results=results, runs=runs, device="cpu")


def lines(path: Path, **where: str) -> list[Line]:
    with path.open(encoding="utf-8", newline="") as file:
        return [line for line in csv.DictReader(file) if all(line[name] == value for name, value in where.items())]


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    main(settings_in(folder))
    return folder / "results.csv"


def test_each_row_is_trained_and_measured(folder: Path, results: Path) -> None:
    runs = lines(folder / "runs.csv")
    assert [(run["row"], run["seed"], run["label"]) for run in runs] == [
        ("as-is", "", "as-is"),
        ("one", "1", "one"),
        ("two", "1", "second stage"),
    ]
    task = select_tasks(["stsb-dev"], folder / "data", "raw")
    models = [folder / "base", folder / "runs/tiny/one-seed1/model", folder / "runs/tiny/two-seed1/model"]
    values = []
    for run, model in zip(runs, models, strict=True):
        how = {} if run["seed"] else {"prompt": "plain", "max_length": 32}
        direct = evaluate(SentenceEncoder.from_pretrained(model, device="cpu", **how).encode, task)
        (line,) = lines(results, row=run["row"], kind="sts", metric="spearman", task="stsb-dev")
        assert float(line["value"]) == pytest.approx(direct.tasks["stsb-dev"].spearman, rel=1e-6)
        assert float(line["low"]) < float(line["value"]) < float(line["high"])
        assert line["n"] == "40"
        values.append(float(line["value"]))
    assert len(set(values)) == 3
    (steps,) = lines(results, row="one", metric="steps")
    assert steps["value"] == "2"
    config = (folder / "runs/tiny/two-seed1/settings.yaml").read_text(encoding="utf-8")
    assert str(folder / "runs/tiny/one-seed1/model") in config


def test_rows_are_compared_pair_by_pair(folder: Path, results: Path) -> None:
    one, two = lines(results, kind="difference", metric="spearman")
    assert (one["row"], two["row"], one["reference"]) == ("one", "two", "as-is")
    spearman = {line["row"]: float(line["value"]) for line in lines(results, kind="sts", metric="spearman")}
    assert float(one["value"]) == pytest.approx(spearman["one"] - spearman["as-is"], abs=1e-4)
    assert float(one["low"]) < float(one["value"]) < float(one["high"])
    assert len(load_cached(folder / "runs/tiny/one-seed1").pairs["stsb-dev"].cosine) == 40


def test_names_of_tasks_may_have_a_slash(tmp_path: Path) -> None:
    scores = PairScores(np.array([0.5, 1.0]), np.array([0.0, 1.0]))
    save_scores({"stsb/test": scores, "sick/test": scores}, tmp_path / SCORES)
    assert list(load_cached(tmp_path).pairs) == ["stsb/test", "sick/test"]


def test_rows_are_compared_query_by_query(folder: Path, results: Path) -> None:
    found = {line["row"]: float(line["value"]) for line in lines(results, kind="retrieval", metric="nDCG@10")}
    assert found.keys() == {"as-is", "one"}
    (one,) = lines(results, kind="difference", metric="nDCG@10")
    assert (one["row"], one["task"], one["reference"]) == ("one", "beir", "as-is")
    assert float(one["value"]) == pytest.approx(found["one"] - found["as-is"], abs=1e-4)
    values = {row: load_cached(folder / f"runs/tiny/{row}").queries["beir"] for row in ("as-is", "one-seed1")}
    expected = mean_difference(values["one-seed1"], values["as-is"], stream="beir")
    ends = expected.interval.low, expected.interval.high
    assert (float(one["low"]), float(one["high"])) == pytest.approx(ends, abs=1e-4)


def test_several_seeds_are_compared_by_the_mean_of_each_query() -> None:
    generator = np.random.default_rng(0)
    keys = {(row, seed): ("tiny", row, seed) for row in ("one", "base") for seed in ("1", "2", "3")}
    cached = {key: Cached({}, {"beir": 100 * generator.random(50)}) for key in keys.values()}
    rows: Any = [SimpleNamespace(key=key, reference="base") for key in keys.values()]
    blank = dict.fromkeys(MEASUREMENTS, "") | {"kind": "retrieval", "task": "beir", "metric": "nDCG@10", "n": "50"}
    values = {key: float(one.queries["beir"].mean()) for key, one in cached.items()}
    measured = [blank | {"row": row, "seed": seed, "value": str(values[key])} for (row, seed), key in keys.items()]
    of_row = {
        row: np.mean([cached["tiny", row, seed].queries["beir"] for seed in "123"], axis=0) for row in ("one", "base")
    }
    expected = mean_difference(of_row["one"], of_row["base"], stream="beir")

    *single, mean = differences(rows, measured, cached)
    assert [one["seed"] for one in single] == ["1", "2", "3"]
    assert (mean["row"], mean["reference"], mean["seed"]) == ("one", "base", "mean")
    assert mean["value"] == pytest.approx(np.mean([one["value"] for one in single]), abs=1e-9)
    assert (mean["low"], mean["high"]) == (expected.interval.low, expected.interval.high)

    without = [line for line in measured if (line["row"], line["seed"]) != ("one", "2")]
    assert {one["seed"] for one in differences(rows, without, cached)} == {"1", "3"}, "not all seeds are measured"
    fixed = SimpleNamespace(key=("tiny", "fixed", ""), reference="base")
    of_fixed = blank | {"row": "fixed", "seed": "", "value": "50.0"}
    found = differences([*rows, fixed], [*measured, of_fixed], cached | {fixed.key: Cached({}, {})})
    assert {one["seed"] for one in found if one["row"] == "fixed"} == {"1", "2", "3"}, "one model is not several"


def test_published_tasks_and_files_have_averages_of_their_own() -> None:
    """The average over files has an interval; a file is not part of the published average."""
    generator = np.random.default_rng(0)
    tasks = {"stsb": "raw", "sickr": "raw", "stsb-dev": "raw", "first": "file", "second": "file"}
    gold = {task: generator.random(60) for task in tasks}
    keys = {row: ("tiny", row, "1") for row in ("one", "base")}
    cosines = {
        row: {task: gold[task] + noise * generator.random(60) for task in tasks}
        for row, noise in (("one", 1), ("base", 3))
    }
    cached = {
        key: Cached({task: PairScores(cosines[row][task], gold[task]) for task in tasks}, {})
        for row, key in keys.items()
    }
    rows: Any = [SimpleNamespace(key=key, reference="base") for key in keys.values()]
    blank = dict.fromkeys(MEASUREMENTS, "") | {"kind": "sts", "metric": "spearman", "seed": "1", "n": "60"}
    measured = [
        blank | {"row": row, "task": task, "text": text, "value": str(100 * spearman(cosines[row][task], gold[task]))}
        for row in keys
        for task, text in tasks.items()
    ]
    found = {line["task"]: line for line in differences(rows, measured, cached)}
    assert found.keys() == {*tasks, "average", "average of files"}
    for name, of in (("average", ("stsb", "sickr")), ("average of files", ("first", "second"))):
        assert found[name]["value"] == pytest.approx(np.mean([found[task]["value"] for task in of]), abs=1e-9)
        assert found[name]["low"] < found[name]["value"] < found[name]["high"]
        assert found[name]["n"] == 2


def test_nothing_is_measured_twice_and_a_new_measure_is_added(folder: Path, results: Path) -> None:
    before = {path: path.read_bytes() for path in (results, folder / "runs.csv")}
    models = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*.safetensors")}
    main(settings_in(folder))
    assert {path: path.read_bytes() for path in before} == before
    pairs = "{path: DATA/pairs.jsonl, format: scored_pair, limit: %d}"
    files = f"{{first: {pairs % 20}, second: {pairs % 30}}}"
    write_grid(folder, f"{{sts: [stsb-dev], pairs: {files}, saturation: {pairs % 40}}}")
    try:
        main(replace(settings_in(folder), rows=("two",)))
    finally:
        write_grid(folder)
    shares = [float(x["value"]) for x in lines(results, kind="saturation", task="pairs") if "to" in x["metric"]]
    assert sum(shares) == pytest.approx(100)
    found = {x["task"]: float(x["value"]) for x in lines(results, row="two", kind="sts", metric="spearman")}
    assert found["first"] != found["second"]
    assert found["average of files"] == pytest.approx((found["first"] + found["second"]) / 2, abs=1e-4)
    assert set(before[results].splitlines()) < set(results.read_bytes().splitlines())
    assert {path: path.stat().st_mtime_ns for path in models} == models


def test_commits_of_later_measurements_are_added() -> None:
    assert [joined(line, "commit", "b") for line in (None, {"commit": ""}, {"commit": "a; b"}, {"commit": "a"})] == [
        "b", "b", "a; b", "a; b",
    ]  # fmt: skip


def test_a_merge_of_trained_models_is_a_row_without_training_and_a_teacher(folder: Path, results: Path) -> None:
    shutil.copytree(folder / "runs/tiny/one-seed1/model", folder / "runs/tiny/merged/model")
    model = "{path: RUNS/tiny/merged/model, prompt: null, max_length: null}"
    taught = "{train: {objective: {teacher: RUNS/tiny/merged/model, teacher_similarity_weight: 1}}}"
    rows = f"one: {{}}\n  merged: {{train: null, model: {model}}}\n  taught: {taught}"
    write_grid(folder, "{sts: [stsb-dev]}", ("one: {}", rows))
    try:
        main(replace(settings_in(folder), rows=("merged", "taught")))
    finally:
        write_grid(folder)
    of_rows = [
        {(line["kind"], line["metric"]): line["value"] for line in lines(results, row=row, task="stsb-dev")}
        for row in ("merged", "one")
    ]
    assert of_rows[0]["sts", "spearman"] == of_rows[1]["sts", "spearman"]
    assert not lines(results, row="merged", kind="training")
    assert lines(results, row="taught", kind="training")


def test_results_of_other_settings_are_refused(folder: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the settings of an earlier stage have changed. Recorded differences of these rows are kept."""
    write_grid(folder, "{sts: [stsb-dev]}", ("one: {}", "one: {train: {optimizer: {learning_rate: 0.5}}}"))
    before = results.read_bytes()
    try:
        for again in (False, True):
            with pytest.raises(RuntimeError, match=r"(?s)one-seed1.*optimizer\.learning_rate"):
                main(replace(settings_in(folder), rows=("one",), again=again))
        with pytest.raises(RuntimeError, match=r"(?s)two-seed1.*after\.optimizer\.learning_rate"):
            main(replace(settings_in(folder), rows=("two",)))
        capsys.readouterr()
        main(replace(settings_in(folder), list=True))
        listed = capsys.readouterr().out
        main(replace(settings_in(folder), rows=("as-is",), again=True))
    finally:
        write_grid(folder)
    assert re.search(r"as-is +has a result\n", listed)
    assert re.search(r"one-seed1 +has a result with other settings: optimizer\.learning_rate\n", listed)
    assert re.search(r"two-seed1 +has a result with other settings: after\.optimizer\.learning_rate\n", listed)
    assert results.read_bytes() == before


def test_an_earlier_stage_that_is_added_is_a_changed_setting(tmp_path: Path) -> None:
    write_grid(tmp_path)
    one, two = (experiments(load_grid(tmp_path / "tiny.yaml"), DATA, [row])[0].given for row in ("one", "two"))
    assert {name.split(".")[0] for name in changed(one, two)} == {"after"}
    assert {name.split(".")[0] for name in changed(two, one)} == {"after"}
    del one["after"]  # as recorded by earlier versions
    assert not changed(one, two)


def test_differences_of_other_runs_and_of_equal_values_are_kept(tmp_path: Path) -> None:
    """`a` and `b` are rows of seeds 1 and 2, compared with `reference`."""
    results = Results(tmp_path / "results.csv")
    for row in ("a", "b", "reference"):
        for seed in ("1", "2"):
            results.record(("tiny", row, seed), {"measures": "{sts: {}}"}, [measurement("sts", "x", "spearman", 40.0)])
    recorded = [
        measurement("difference", "x", "spearman", value, row=row, reference="reference", seed=seed)
        for value, (row, seed) in enumerate([("a", "1"), ("a", "2"), ("a", MEAN), ("b", "1")])
    ]

    def kept() -> list[tuple[str, str, str]]:
        return [(line["row"], line["seed"], line["value"]) for line in lines(results_path, kind="difference")]

    results_path = tmp_path / "results.csv"
    results.replace_differences("tiny", [], recorded)
    everything = [("a", "1", "0"), ("a", "2", "1"), ("a", MEAN, "2"), ("b", "1", "3")]
    assert kept() == everything
    results.record(("tiny", "a", "1"), {"measures": "{sts: {}}"}, [measurement("sts", "x", "spearman", 40.0)])
    assert kept() == everything
    results.record(("tiny", "a", "1"), {"measures": "{sts: {}}"}, [measurement("sts", "x", "spearman", 41.0)])
    assert kept() == [("a", "2", "1"), ("b", "1", "3")]
    again = [measurement("difference", "x", "spearman", 7, row="a", reference="reference", seed="1")]
    results.replace_differences("tiny", {("tiny", "a", "1"), ("tiny", "reference", "1")}, again)
    assert kept() == [("a", "1", "7"), ("a", "2", "1"), ("b", "1", "3")]
    results.replace_differences("tiny", {("tiny", "b", "1"), ("tiny", "reference", "1")}, [])
    assert kept() == [("a", "1", "7"), ("a", "2", "1")]


def test_a_row_that_cannot_run_stops_no_other_row(folder: Path, results: Path) -> None:
    """Results with another name have their own file of runs."""
    missing = "lost: {train: null, model: {path: RUNS/tiny/nowhere-seed1/model}}"
    write_grid(folder, "{sts: [stsb-dev]}", ("one: {}", f"{missing}\n  one: {{}}"))
    before = {path: path.read_bytes() for path in (results, folder / "runs.csv")}
    new = replace(settings_in(folder), results=folder / "new.csv", rows=("lost", "one"))
    try:
        with pytest.raises(RuntimeError, match=r"1 of 2 experiments did not run\.\nlost: .*nowhere-seed1"):
            main(new)
        (folder / "new.csv").unlink()  # runs without results are measured again
        main(replace(new, rows=("one",)))
    finally:
        write_grid(folder)
    assert {path: path.read_bytes() for path in before} == before
    assert [run["row"] for run in lines(folder / "new.runs.csv")] == ["one"]
    (value,) = lines(folder / "new.csv", kind="sts", metric="spearman", task="stsb-dev")
    assert value in lines(results, row="one")


@pytest.mark.slow
def test_a_stopped_run_resumes(folder: Path, tmp_path: Path) -> None:
    """Training writes a checkpoint on SIGTERM; the same command resumes it."""
    grid = GRID.format(base=folder / "base", measures="{sts: [stsb-dev]}")
    (tmp_path / "tiny.yaml").write_text(grid.replace("batch_size: 8", "batch_size: 8\n  epochs: 40"), encoding="utf-8")
    flags = ["--grid", "tiny.yaml", "--data-dir", str(folder / "data"), "--results", "results.csv", "--device", "cpu"]
    command = ["python", str(ROOT / "eval" / "ablation.py"), *flags, "--rows", "as-is", "one"]
    metrics = tmp_path / "runs/tiny/one-seed1/metrics.jsonl"
    program = start(*command, cwd=tmp_path)
    while not (metrics.is_file() and metrics.stat().st_size):
        assert program.process.is_alive()
        time.sleep(0.02)
    program.process.terminate()
    assert program.wait(60).returncode == 128 + signal.SIGTERM
    assert len(metrics.read_text().splitlines()) < 80
    assert any((metrics.parent / "checkpoints").iterdir())
    (metrics.parent / "model").mkdir()  # as an evaluation during the run writes it
    first = lines(tmp_path / "results.csv")
    assert {line["row"] for line in first} == {"as-is"}
    again = run_program(*command, cwd=tmp_path)
    assert (again.returncode, again.stdout.count("measuring")) == (0, 2), "sts and retrieval"
    assert lines(tmp_path / "results.csv", row="as-is") == first
    assert lines(tmp_path / "results.csv", row="one", metric="steps")[0]["value"] == "80"


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_of_the_project_can_be_run(path: Path) -> None:
    """Settings are valid, something is measured, and a model trained on STS-B train is not measured on STS12 to 16."""
    chosen = experiments(load_grid(path), DATA)
    seen = {one.row for one in chosen if one.seed is not None and "stsb/train" in str(one.given)}
    while more := {one.row for one in chosen if one.after in seen} - seen:
        seen |= more
    for one in chosen:
        if one.is_trained:
            make_losses(one.settings)
            assert one.settings.seed == one.seed
        assert one.stated
        assert one.row not in seen or not {"sts12", "sts13", "sts14", "sts15", "sts16"}.intersection(one.measures.sts)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("rows:", "rosw:"), "rosw"),
        (("after: one", "after: none"), "row two.*none"),
        (("after: one", "after: two"), "row two.*two"),
        (("after: one", "seeds: [8], after: one"), "row two.*seed 8"),
        (("reference: as-is", "reference: best"), "best"),
        (("  one: {", "  ../up: {"), "../up"),
        (("  one: {", "  one: {train: {optimizer: {warmpu: 3}}"), "row one.*warmpu.*warmup"),
        (("  one: {", "  one: {train: {seed: 3}"), "row one.*seed"),
        (("title: Tiny", "title: ["), "tiny.yaml"),
    ],
)
def test_a_mistake_in_a_grid_is_reported_with_its_key(change: tuple[str, str], named: str, tmp_path: Path) -> None:
    write_grid(tmp_path, "{}", change)
    with pytest.raises(SettingsError, match=f"(?s){named}"):
        experiments(load_grid(tmp_path / "tiny.yaml"), DATA)


def test_the_path_of_a_model_may_contain_the_seed(tmp_path: Path) -> None:
    text = "title: t\nseeds: [1, 2]\ntrain: {{model: {{path: 'other-{}/model'}}}}\nrows: {{given: {{train: null}}, tuned: {{}}}}"
    for part, due in (("{seed}", ["other-1/model", "other-2/model"] * 2), ("x", ["other-x/model"] * 3)):
        (tmp_path / "grid.yaml").write_text(text.format(part))
        made = experiments(load_grid(tmp_path / "grid.yaml"), DATA)
        assert [one.settings.model.path for one in made] == due
        assert [one.is_trained for one in made[-2:]] == [True, True]
    (tmp_path / "grid.yaml").write_text("title: t\nrows: {given: {train: null}}")
    (one,) = experiments(load_grid(tmp_path / "grid.yaml"), DATA)
    assert (one.seed, one.is_trained) == (None, False)
