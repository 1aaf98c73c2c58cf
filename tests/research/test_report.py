"""The report of the committed results: each figure has its data, and values are those of the file."""

import json
import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import pandas as pd
import report
from ablation_parts.grid import load_grid
from report_figures import FIGURES, PICTURES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results.csv"


@pytest.fixture(scope="module")
def data() -> pd.DataFrame:
    return report.summarise(*report.read(RESULTS))


def line(data: pd.DataFrame, **where: str) -> pd.Series:
    found = data.loc[(data[list(where)] == pd.Series(where)).all(axis=1)]
    assert len(found) == 1
    return found.iloc[0]


def test_make_report_draws_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, pictures = tmp_path / "report.html", tmp_path / "pictures"
    monkeypatch.chdir(ROOT)
    report.main(report.Settings(page=page, pictures=pictures))
    shown = capsys.readouterr().out
    assert f"{len(FIGURES)} figures" in shown
    assert "not drawn" not in shown
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == text.count("</svg>") == len(FIGURES) <= 15
    assert "src=" not in text
    assert "<script" not in text
    assert {path.stem for path in pictures.iterdir()} == set(PICTURES.values())
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} == {path.name for path in pictures.iterdir()}


def test_mean_deviation_and_interval_over_seeds(data: pd.DataFrame) -> None:
    """Three seeds: 79.00, 78.60 and 78.94 (docs/history/LOG-2026.md); the difference has a t interval."""
    headline = line(data, grid="nli", row="in-batch", kind="sts", task="average", metric="spearman")
    assert (round(headline.value, 2), round(headline.sd, 2), headline.seeds) == (78.85, 0.21, 3)
    published = line(data, grid="nli", row="published", kind="difference", task="average")
    assert [round(published[name], 2) for name in ("value", "low", "high")] == [0.06, -0.26, 0.39]
    one_seed = line(data, grid="nli", row="cosent", kind="difference", task="average")
    assert [round(one_seed[name], 2) for name in ("value", "low", "high")] == [-8.9, -9.6, -8.18]


def test_one_model_has_no_interval_over_the_seeds_of_its_reference(data: pd.DataFrame) -> None:
    one = line(data, row="all-seeds", kind="difference", task="average")
    assert one.seeds == 3
    assert math.isnan(one.low)


def test_an_undefined_value_of_a_seed_makes_the_mean_undefined() -> None:
    measured, runs = report.read(RESULTS)
    value = (measured.grid == "nli") & (measured.row == "in-batch") & (measured.kind == "sts") & (measured.seed == "1")
    measured.loc[value, "value"] = math.nan
    found = line(
        report.summarise(measured, runs), grid="nli", row="in-batch", kind="sts", task="average", metric="spearman"
    )
    assert found.seeds == 3
    assert math.isnan(found.value)


def test_measured_rows_are_not_listed_as_missing(data: pd.DataFrame) -> None:
    """Row all-average is not trained, but has a model for each seed."""
    _, runs = report.read(RESULTS)
    grid = load_grid(ROOT / "eval" / "grids" / "encoder.yaml")
    assert grid.rows["all-average"].train is None
    before = report.section("encoder", grid, data, runs)
    assert not [name for name in before["missing"] if name.startswith("all-average-")]
    settings = "{model: {path: RUNS/other}}"
    runs.loc[(runs.row == "all-average") & (runs.seed == "2"), "settings"] = settings
    runs = runs[(runs.row != "all-average") | (runs.seed != "1")]
    after = report.section("encoder", grid, data, runs)
    assert set(after["missing"]) - set(before["missing"]) == {"all-average-seed1"}
    assert set(after["other"]) - set(before["other"]) == {"all-average-seed2"}


def test_a_speed_comparison_is_added(tmp_path: Path) -> None:
    for name in ("results.csv", "runs.csv"):
        shutil.copy(RESULTS.with_name(name), tmp_path)
    runs = {"angle_llm": [2.0, 4.0], "angle-emb": [6.0, 8.0], "other": [math.pi, None]}
    scenario = {
        "title": "Training",
        "units": 16,
        "runs": {
            name: [{"seconds": s, "peak_bytes": 2**30, "problem": None if s else "out of memory"} for s in seconds]
            for name, seconds in runs.items()
        },
    }
    machine = {"cores": 2, "processor": "p", "system": "s"}
    written = {
        "finished": "2026-11-23T00:00",
        "machine": machine,
        "packages": {"angle-emb": {"torch": "2.13.0", "peft": "0.18.1"}},
        "settings": {"train": True, "encode": False, "encode_batch": 32, "max_length": [256, 50], "json": None},
        "scenarios": [scenario],
    }
    (tmp_path / "speed.json").write_text(json.dumps(written), encoding="utf-8")
    for _ in range(2):
        report.add_speed(tmp_path / "speed.json", tmp_path / "results.csv")
    measured, listed = report.read(tmp_path / "results.csv")
    assert len(measured[measured.grid == "speed"]) == 12
    listed_now = listed[listed.grid == "speed"]
    assert len(listed_now) == 6
    assert set(listed_now.command) == {"python eval/speed.py --train --encode-batch 32 --max-length 256 50"}
    assert set(listed_now[listed_now.row == "angle-emb"].versions) == {"torch 2.13.0, peft 0.18.1"}
    written_as = pd.read_csv(tmp_path / "results.csv", dtype=str, keep_default_na=False).query("row == 'other'")
    assert written_as[["value", "n"]].to_numpy().tolist() == [["3.141593", "16"], ["1", ""], ["", "16"], ["1", ""]]
    before = RESULTS.read_text(encoding="utf-8").splitlines()
    assert set(before) < set((tmp_path / "results.csv").read_text(encoding="utf-8").splitlines())
    ratio = line(report.summarise(measured, listed), grid="speed", metric="times ours", row="angle-emb")
    assert (ratio.value, ratio.low, ratio.high, ratio.peak) == (2.5, 2, 3, 1)


def test_results_refer_to_existing_runs() -> None:
    measured, runs = report.read(RESULTS)
    key = ["grid", "row", "seed"]
    of_runs = set(map(tuple, runs[key].to_numpy()))
    values = measured[measured.kind != "difference"]
    assert set(map(tuple, values[key].to_numpy())) == of_runs
    assert not measured.duplicated([*key, "kind", "task", "text", "metric", "reference"]).any()
    assert (measured.value.isna() == (measured.note != "")).all()
    assert not runs.command.str.contains("/work|/home|/root").any()
