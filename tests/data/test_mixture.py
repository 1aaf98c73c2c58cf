"""Several datasets as one: names, weights, settings of each, and how often each is drawn."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from angle_llm.data import DataError, PositivePair, ScoredPair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture, load_mixture, sets_of
from angle_llm.data.sources import without_extension
from angle_llm.settings.parsing import SettingsError, load_settings, parse_settings, settings_from_dict
from angle_llm.settings.train import DataSettings, MixedSet, TrainSettings

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """stsb/train.tsv (6 scored pairs), nli/train.jsonl (4 triples), my.jsonl (2 positive pairs), as a working directory."""
    for name in ("stsb", "nli"):
        (tmp_path / name).mkdir()
    rows = "".join(f"left {number}\tright {number}\t{number % 6}\n" for number in range(6))
    (tmp_path / "stsb" / "train.tsv").write_text(f"sentence1\tsentence2\tscore\n{rows}")
    triples = [{"anchor": f"a{n}", "positive": f"p{n}", "negative": f"n{n}"} for n in range(4)]
    (tmp_path / "nli" / "train.jsonl").write_text("\n".join(map(json.dumps, triples)))
    (tmp_path / "my.jsonl").write_text("\n".join(json.dumps({"query": f"q{n}", "answer": f"w{n}"}) for n in range(2)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_of_paths_and_weights(folder: Path) -> None:
    mixture = load_mixture(DataSettings(path="nli@train,my.jsonl:2.5", batches="by_set"))
    assert [(each.name, each.weight) for each in mixture.sets] == [("nli@train", 1.0), ("my", 2.5)]
    assert mixture.draws.counts == (4, 5)
    assert mixture.draws.by_set
    positives = [PositivePair("q0", "w0"), PositivePair("q1", "w1")]
    assert list(mixture) == [*(Triple(f"a{n}", f"p{n}", f"n{n}") for n in range(4)), *positives]
    assert [mixture.set_of(index) for index in range(6)] == [0, 0, 0, 0, 1, 1]
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            mixture[outside]
    parts = [f"part-{number:05d}-of-00012.jsonl" for number in range(12)]
    for number, part in enumerate(parts):
        (folder / part).write_text(json.dumps({"query": f"q{number}", "answer": "a"}))
    assert len(load_mixture(DataSettings(path=",".join(parts))).sets) == 12, "a list longer than a file name can be"


def test_data_settings_apply_to_all_datasets_of_a_list(folder: Path) -> None:
    rows = "x\ty\t5\nu\tv\t1\nu\tw\t1\n"
    (folder / "more.tsv").write_text(f"sentence1\tsentence2\tscore\n{rows}")
    data = DataSettings(path="stsb@train,more.tsv", score_range=(0, 5), limit=2)
    scores = [("left 0", "right 0", 0.0), ("left 1", "right 1", 0.2), ("x", "y", 1.0), ("u", "v", 0.2)]
    assert list(load_mixture(data)) == [ScoredPair(*pair) for pair in scores]


def test_yaml_list_has_settings_of_each_dataset(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "data:\n"
        "  sets:\n"
        "  - {path: stsb@train, weight: 2, score_range: [0, 5], prompt: plain, objective: {cosine_weight: 1}}\n"
        "  - {path: my.jsonl, format: positive_pair, limit: 1}\n"
    )
    mixture = load_mixture(load_settings(TrainSettings, folder / "run.yaml").data)
    assert [(each.prompt, each.objective) for each in mixture.sets] == [("plain", {"cosine_weight": 1}), (None, {})]
    assert mixture.draws.sizes == (6, 1)
    assert mixture.draws.counts == (12, 1)
    summary = "\n".join(mixture.summary())
    assert "stsb@train: 12 of an epoch's 13 examples (92.3%), prompt plain, cosine_weight 1" in summary


def test_list_and_yaml_file_of_the_documentation() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (listed,) = re.findall(r"--data\.path (\S+)", page)
    assert [(each.path, each.weight) for each in sets_of(DataSettings(path=listed))] == [
        ("stsb@train", 2.0),
        ("nli@train", 1.0),
        ("my.jsonl", 1.0),
    ]
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    settings = settings_from_dict(TrainSettings, yaml.safe_load(block), where="docs/data.md")
    assert [each.path for each in sets_of(settings.data)] == ["stsb@train", "nli@train", "my.jsonl"]
    assert settings.data.sets[0].objective == {"cosine_weight": 1, "in_batch_weight": 0}


def test_one_dataset_is_a_mixture_of_one(folder: Path) -> None:
    mixture = load_mixture(DataSettings(path="nli/train.jsonl"))
    assert mixture.draws.counts == mixture.draws.sizes == (4,)
    assert mixture.digest == Mixture.of(list(mixture)).digest
    assert Mixture.of(mixture) is mixture
    assert len(list(mixture.summary())) == 1


def test_epoch_draws_each_dataset_by_its_weight(folder: Path) -> None:
    mixture = load_mixture(DataSettings(path="nli@train:0.5,my.jsonl:3"))
    first, second = ([mixture[i] for batch in mixture.draws.epoch(epoch, 4, seed=1) for i in batch] for epoch in (0, 1))
    assert Counter(type(example) for example in first) == {Triple: 2, PositivePair: 6}
    assert {example for example in first + second if isinstance(example, Triple)} == set(list(mixture)[:4])


def test_file_whose_name_looks_like_a_list_is_one_file(folder: Path) -> None:
    for name in ("a,b.jsonl", "x@y.jsonl"):
        (folder / name).write_text('{"query": "a", "answer": "b"}\n')
        assert list(load_mixture(DataSettings(path=name))) == [PositivePair("a", "b")]


def test_names_have_no_known_extension() -> None:
    names = ["a/faq.valid.jsonl.gz", "FAQ.test.CSV", "folder", "b/v1.2", "q.parquet"]
    assert list(map(without_extension, names)) == ["faq.valid", "FAQ.test", "folder", "v1.2", "q"]


def test_names_are_short_and_different(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "my.jsonl").write_text('{"query": "a", "answer": "b"}\n')
    mixture = load_mixture(DataSettings(path="my.jsonl,other/my.jsonl,starter:nli_triples.jsonl.gz"))
    assert [each.name for each in mixture.sets] == ["my", "my#2", "nli_triples"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("my.jsonl,my.jsonl", "my.jsonl:2"),
        ("my.jsonl,,nli@train", "my.jsonl,,nli@train"),
        ("nli@dev", r"nli.*train\.jsonl"),
        ("nil@train", "nil"),
        ("my.jsonl:1e-1", r"my\.jsonl:1e-1"),
        ("/home/someone@somewhere/x.jsonl", r"/home/someone@somewhere/x\.jsonl"),
    ],
)
def test_unusable_list_is_refused(path: str, reason: str, folder: Path) -> None:
    with pytest.raises(DataError, match=reason):
        load_mixture(DataSettings(path=path))


def test_datasets_of_a_file_replace_the_source_of_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text("data:\n  sets:\n  - {path: my.jsonl}\n")
    recipe = TrainSettings(data=DataSettings(path="org/set", format="triple", limit=5))
    settings = load_settings(TrainSettings, folder / "run.yaml", recipe)
    assert settings.data == DataSettings(sets=[MixedSet(path="my.jsonl")])
    with pytest.raises((SystemExit, SettingsError)) as caught:
        parse_settings(recipe, ["--config", str(folder / "run.yaml"), "--data.limit", "3"])
    assert "data.limit" in f"{caught.value} {capsys.readouterr().err}"


def test_digest_depends_on_examples_draws_and_prompts() -> None:
    pair = [PositivePair("x", "y"), PositivePair("u", "v")]
    mixtures = [
        Mixture([LoadedSet("a", pair)]),
        Mixture([LoadedSet("a", pair[::-1])]),
        Mixture([LoadedSet("a", pair, weight=2)]),
        Mixture([LoadedSet("a", pair, prompt="plain")]),
        Mixture([LoadedSet("a", pair)], by_set=True),
        Mixture([LoadedSet("a", pair), LoadedSet("b", pair[:1])]),
        Mixture([LoadedSet("b", pair[:1]), LoadedSet("a", pair)]),
    ]
    assert len({mixture.digest for mixture in mixtures}) == len(mixtures)
    assert Mixture([LoadedSet("b", pair)]).digest == mixtures[0].digest


@pytest.mark.parametrize("path", ["nli.jsonl:0", "org/name:2024"])
def test_a_weight_out_of_range_is_refused_with_its_path(path: str) -> None:
    with pytest.raises(DataError, match=rf"{path}: expected a weight above 0 and at most 1000"):
        sets_of(DataSettings(path=path))
