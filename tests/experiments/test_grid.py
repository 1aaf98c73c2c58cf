"""A grid says what is run, and a mistake in it shows before anything is."""

from pathlib import Path

import pytest

from angle_llm.config import settings_to_dict
from angle_llm.experiments.grid import GridError, experiments, load_grid
from angle_llm.experiments.measure import KINDS
from angle_llm.losses.angle import AngleObjective

GRIDS = sorted((Path(__file__).parents[2] / "recipes" / "grids").glob("*.yaml"))
DATA = Path("/data")

SMALL = """
title: A table
seeds: [1, 2]
train:
  data: {path: DATA/train.tsv, limit: 8, where: {a: 1}}
  optimizer: {learning_rate: 0.5}
measures: {sts: [stsb]}
rows:
  as-is: {train: null, model: {prompt: plain}}
  first: {}
  second: {train: {data: {limit: 4, where: {b: 2}}, optimizer: {warmup: 3}}, seeds: [7]}
  third: {after: first, measures: {pairs: {mine: {path: DATA/mine.tsv}}}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_and_seeds_make_experiments_in_order(tmp_path: Path) -> None:
    chosen = experiments(load_grid(written(tmp_path, SMALL)), DATA)
    assert [experiment.name for experiment in chosen] == [
        "as-is",
        "first-seed1",
        "first-seed2",
        "second-seed7",
        "third-seed1",
        "third-seed2",
    ]
    assert {experiment.grid for experiment in chosen} == {"small"}


def test_a_row_differs_in_what_it_names_alone(tmp_path: Path) -> None:
    as_is, first, _, second, third, _ = experiments(load_grid(written(tmp_path, SMALL)), DATA)
    assert (as_is.trains, as_is.settings.model.prompt) == (False, "plain")
    assert (first.settings.data.limit, first.settings.optimizer.warmup, first.settings.data.where) == (8, 0.1, {"a": 1})
    assert (second.settings.data.limit, second.settings.optimizer.warmup) == (4, 3)
    assert second.settings.data.where == {"b": 2}, "a condition is replaced whole"
    assert second.settings.optimizer.learning_rate == 0.5
    assert third.after == "first"


def test_a_seed_decides_the_sample_the_start_and_the_order(tmp_path: Path) -> None:
    for experiment in experiments(load_grid(written(tmp_path, SMALL)), DATA):
        assert experiment.settings.seed == experiment.settings.data.shuffle_seed == experiment.seed


def test_DATA_stands_for_the_data_directory(tmp_path: Path) -> None:  # noqa: N802
    chosen = experiments(load_grid(written(tmp_path, SMALL)), DATA)
    assert chosen[1].settings.data.path == "/data/train.tsv"
    assert chosen[-1].measures.pairs["mine"].path == "/data/mine.tsv"
    assert chosen[1].measures.sts == ("stsb",)


def test_rows_and_seeds_can_be_chosen(tmp_path: Path) -> None:
    grid = load_grid(written(tmp_path, SMALL))
    assert [e.name for e in experiments(grid, DATA, rows=["first"], seeds=[2])] == ["first-seed2"]
    assert [e.name for e in experiments(grid, DATA, seeds=[7])] == ["as-is", "second-seed7"]
    with pytest.raises(GridError, match=r"unknown row 'frist'.*first"):
        experiments(grid, DATA, rows=["frist"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("rows:", "rosw:"), "unknown setting 'rosw'.*rows"),
        (("after: first", "after: nobody"), "third.*'nobody' cannot be that"),
        (("after: first", "after: third"), "third.*'third' cannot be that"),
        (("after: first", "after: as-is"), "third.*'as-is' cannot be that"),
        (("  first: {", "  first: {after: third, "), "first.*'third' cannot be that"),
        (("after: first", "seeds: [8], after: first"), "third goes on from first, which has no seed 8"),
        (("after: first", "reference: frist, after: first"), "unknown row 'frist'.*reference"),
        (("title: A table", "title: A table\nreference: best"), "unknown row 'best'.*reference"),
        (("  second:", "  ../up:"), "'../up' names a folder"),
        (("optimizer: {warmup: 3}", "optimizer: {warmpu: 3}"), "row second.*unknown setting 'warmpu'.*warmup"),
        (("optimizer: {warmup: 3}", "seed: 3"), "row second: seed is set by the run"),
        (("limit: 4", "shuffle_seed: 4"), "row second: data.shuffle_seed follows the seed"),
        (("title: A table", "title: ["), "cannot be read"),
    ],
)
def test_a_mistake_is_named(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    assert change[0] in SMALL
    path = written(tmp_path, SMALL.replace(*change))
    with pytest.raises(GridError, match=f"(?s){told}"):
        experiments(load_grid(path), DATA)


def test_a_missing_grid_is_named(tmp_path: Path) -> None:
    with pytest.raises(GridError, match="no grid file at"):
        load_grid(tmp_path / "none.yaml")
    with pytest.raises(GridError, match="has no rows"):
        load_grid(written(tmp_path, "title: nothing"))


def test_there_are_grids() -> None:
    assert {"nli", "ablation", "graded", "nontransfer", "bert", "prompts", "transfer", "nested"} <= {
        path.stem for path in GRIDS
    }


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_of_the_project_can_be_run(path: Path) -> None:
    grid = load_grid(path)
    assert grid.title
    for experiment in experiments(grid, DATA):
        if experiment.trains:
            AngleObjective(**settings_to_dict(experiment.settings.objective))
        assert any(kind.asked(experiment.measures) for kind in KINDS)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_what_has_seen_sts_b_train_is_not_measured_on_sts12_to_16(path: Path) -> None:
    """4,798 of its pairs are test pairs there."""
    grid = load_grid(path)
    chosen = experiments(grid, DATA)
    seen = {e.row for e in chosen if e.trains and "stsb/train" in e.settings.data.path}
    while more := {e.row for e in chosen if e.after in seen} - seen:
        seen |= more
    for experiment in chosen:
        if experiment.row in seen:
            assert not {"sts12", "sts13", "sts14", "sts15", "sts16"}.intersection(experiment.measures.sts)


def test_the_sets_of_a_mixture_are_shuffled_by_the_seed_and_lie_below_the_data(tmp_path: Path) -> None:
    grid = tmp_path / "mixed.yaml"
    grid.write_text(
        "title: t\nseeds: [3]\nrows: {one: {}}\n"
        "train:\n  data:\n    sets:\n    - {path: DATA/a.tsv, weight: 2}\n    - {path: b.tsv}\n"
    )
    (one,) = experiments(load_grid(grid), tmp_path)
    assert [(each.path, each.weight, each.shuffle_seed) for each in one.settings.data.sets] == [
        (str(tmp_path / "a.tsv"), 2, 3),
        ("b.tsv", 1, 3),
    ]
