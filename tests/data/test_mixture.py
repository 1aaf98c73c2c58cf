"""Several sets as one: how they are named, what each says for itself, and how often each comes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from angle_llm.config import (
    DataSettings,
    MixedSet,
    SettingsError,
    TrainSettings,
    load_settings,
    parse_settings,
    settings_from_dict,
)
from angle_llm.data import DataError, PositivePair, ScoredPair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture, load_mixture, sets_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """stsb/train.tsv (6 scored pairs), nli/train.jsonl (4 triples), my.jsonl (2 positive pairs), as a working directory."""
    (tmp_path / "stsb").mkdir()
    (tmp_path / "nli").mkdir()
    rows = "".join(f"left {number}\tright {number}\t{number % 6}\n" for number in range(6))
    (tmp_path / "stsb" / "train.tsv").write_text(f"sentence1\tsentence2\tscore\n{rows}")
    triples = [{"anchor": f"a{n}", "positive": f"p{n}", "negative": f"n{n}"} for n in range(4)]
    (tmp_path / "nli" / "train.jsonl").write_text("\n".join(map(json.dumps, triples)))
    (tmp_path / "my.jsonl").write_text("\n".join(json.dumps({"query": f"q{n}", "answer": f"w{n}"}) for n in range(2)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_line_names_sets_and_weights(folder: Path) -> None:
    data = DataSettings(path="nli@train,my.jsonl:2.5", batches="by_set")
    mixture = load_mixture(data)
    assert [(each.name, each.weight) for each in mixture.sets] == [("nli@train", 1.0), ("my", 2.5)]
    assert mixture.draws.counts == (4, 5)
    assert mixture.draws.by_set
    assert list(mixture) == [
        *(Triple(f"a{n}", f"p{n}", f"n{n}") for n in range(4)),
        PositivePair("q0", "w0"),
        PositivePair("q1", "w1"),
    ]
    assert [mixture.set_of(index) for index in range(6)] == [0, 0, 0, 0, 1, 1]
    assert mixture[2:5] == [mixture[2], mixture[3], mixture[4]]
    assert mixture[-1] == mixture[5]
    for outside in (-7, 6):
        with pytest.raises(IndexError):
            mixture[outside]


def test_what_data_says_goes_for_all_sets_of_a_list(folder: Path) -> None:
    (folder / "more.tsv").write_text("sentence1\tsentence2\tscore\nx\ty\t5\nx\tz\tNaN\nu\tv\t1\n")
    data = DataSettings(path="stsb@train,more.tsv", score_range=(0, 5), limit=2, on_bad_row="skip", max_bad_ratio=0.5)
    assert list(load_mixture(data)) == [
        ScoredPair("left 0", "right 0", 0.0),
        ScoredPair("left 1", "right 1", 0.2),
        ScoredPair("x", "y", 1.0),
        ScoredPair("u", "v", 0.2),
    ]


def test_a_yaml_list_says_it_for_each(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "data:\n"
        "  temperature: 2\n"
        "  sets:\n"
        "  - {path: stsb@train, weight: 2, score_range: [0, 5], prompt: plain, objective: {cosine_weight: 1}}\n"
        "  - {path: my.jsonl, format: positive_pair, limit: 1}\n"
    )
    settings = load_settings(TrainSettings, folder / "run.yaml")
    mixture = load_mixture(settings.data)
    assert [(each.prompt, each.objective) for each in mixture.sets] == [
        ("plain", {"cosine_weight": 1}),
        (None, {}),
    ]
    assert mixture.draws.sizes == (6, 1)
    # 2 · √6 : 1 · √1 of the 13 that an epoch has without a temperature
    assert mixture.draws.counts == (11, 2)
    told = "\n".join(mixture.summary())
    assert "stsb@train: 11 of an epoch's 13 examples (84.6%), prompt plain, cosine_weight 1" in told
    assert (
        settings_from_dict(TrainSettings, {"data": {"sets": []}}, where="x").fingerprint()
        == TrainSettings().fingerprint()
    )
    assert settings.fingerprint() != TrainSettings().fingerprint()


def test_one_set_is_what_it_always_was(folder: Path) -> None:
    mixture = load_mixture(DataSettings(path="nli/train.jsonl"))
    assert mixture.draws.counts == mixture.draws.sizes == (4,)
    assert mixture.digest == Mixture.of(list(mixture)).digest
    assert Mixture.of(mixture) is mixture
    assert len(list(mixture.summary())) == 1


def test_an_epoch_of_a_mixture_has_each_set_by_its_weight(folder: Path) -> None:
    mixture = load_mixture(DataSettings(path="nli@train:0.5,my.jsonl:3"))
    drawn = [mixture[index] for batch in mixture.draws.epoch(0, 4, seed=1) for index in batch]
    counts = Counter(type(example) for example in drawn)
    assert counts == {Triple: 2, PositivePair: 6}
    later = [mixture[index] for batch in mixture.draws.epoch(1, 4, seed=1) for index in batch]
    assert {example for example in drawn + later if isinstance(example, Triple)} == set(list(mixture)[:4])


def test_a_file_whose_name_looks_like_a_list_is_itself(folder: Path) -> None:
    row = '{"query": "a", "answer": "b"}\n'
    for name in ("a,b.jsonl", "x@y.jsonl"):
        (folder / name).write_text(row)
        assert list(load_mixture(DataSettings(path=name))) == [PositivePair("a", "b")]


def test_sets_below_the_data_folder_are_found(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(DataError, match="no such file or folder"):
        load_mixture(DataSettings(path="nli/train.jsonl"))
    monkeypatch.setenv("ANGLE_LLM_DATA", str(folder))
    assert len(load_mixture(DataSettings(path="nli@train,my.jsonl"))) == 6


def test_names_are_short_and_differ(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "my.jsonl").write_text('{"query": "a", "answer": "b"}\n')
    names = [
        each.name
        for each in load_mixture(DataSettings(path="my.jsonl,other/my.jsonl,starter:nli_triples.jsonl.gz")).sets
    ]
    assert names == ["my", "my#2", "nli_triples"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my.jsonl,my.jsonl", "my.jsonl is named twice; a weight, as in my.jsonl:2"),
        ("my.jsonl:2,my.jsonl:3", "named twice"),
        ("my.jsonl,,nli@train", "one of them has no name"),
        ("nli@dev", "no file dev.* in nli; there: train.jsonl"),
        ("nil@train", "nil is no folder and no hub id"),
        ("my.jsonl,absent.jsonl", "absent.jsonl: no such file"),
        ("my.jsonl:1e-1", "A weight is a plain number behind a colon"),
        ("/home/someone@somewhere/x.jsonl", "/home/someone@somewhere/x.jsonl: no such file"),
    ],
)
def test_names_that_mean_nothing_are_told(path: str, message: str, folder: Path) -> None:
    with pytest.raises(DataError) as told:
        load_mixture(DataSettings(path=path))
    assert message in str(told.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"sets": [{"path": "a", "weight": 0}]},
        {"sets": [{"path": "a", "weight": float("nan")}]},
        {"batches": "homogeneous"},
        {"sets": [{"path": "a"}], "limit": 5},
        {"sets": [{"path": "a"}], "path": "b.jsonl"},
    ],
)
def test_settings_of_a_mixture_are_checked(values: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        settings_from_dict(TrainSettings, {"data": values}, where="x")


def test_an_unknown_setting_of_a_set_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"weigth.*weight"):
        settings_from_dict(TrainSettings, {"data": {"sets": [{"path": "a", "weigth": 2}]}}, where="x")


def test_the_same_file_read_in_two_ways_is_two_sets() -> None:
    both = [MixedSet(path="a.jsonl", where={"side": "x"}), MixedSet(path="a.jsonl", where={"side": "y"})]
    assert sets_of(DataSettings(sets=both)) == both


def test_a_mixture_of_plain_sets() -> None:
    sets = [LoadedSet("a", [PositivePair("x", "y")]), LoadedSet("b", [ScoredPair("x", "y", 0.5)], weight=2)]
    assert Mixture(sets).draws.counts == (1, 2)
    assert Mixture(sets).digest != Mixture(sets[::-1]).digest


def test_sets_of_a_file_take_the_place_of_a_recipes_own_source(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text("data:\n  sets:\n  - {path: my.jsonl}\n")
    recipe = TrainSettings(data=DataSettings(path="org/set", format="triple", limit=5))
    settings = load_settings(TrainSettings, folder / "run.yaml", recipe)
    assert settings.data == DataSettings(sets=[MixedSet(path="my.jsonl")])
    with pytest.raises(SystemExit):
        parse_settings(recipe, ["--config", str(folder / "run.yaml"), "--data.limit", "3"])
    assert "data.sets is given, and data.limit is 3" in capsys.readouterr().err


def test_a_share_of_bad_rows_decides_nothing_of_what_is_computed() -> None:
    some, other = (
        TrainSettings(data=DataSettings(sets=[MixedSet(path="a", max_bad_ratio=ratio)])).fingerprint()
        for ratio in (0.1, 0.5)
    )
    assert some == other


def test_how_examples_are_drawn_and_worded_is_a_part_of_what_a_run_is() -> None:
    pair = [PositivePair("x", "y"), PositivePair("u", "v")]
    ways = [
        Mixture([LoadedSet("a", pair)]),
        Mixture([LoadedSet("a", pair, weight=2)]),
        Mixture([LoadedSet("a", pair, prompt="plain")]),
        Mixture([LoadedSet("a", pair)], by_set=True),
    ]
    assert len({way.digest for way in ways}) == 4
    assert Mixture([LoadedSet("b", pair)]).digest == ways[0].digest
