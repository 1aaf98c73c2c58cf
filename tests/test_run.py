"""A run checks names and paths before it reads data, and data before it loads weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm.config import DataSettings, EvaluationSettings, MixedSet, ModelSettings, ObjectiveSettings, TrainSettings
from angle_llm.data import DataError
from angle_llm.model.checks import CARD_NAME, ArtifactError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.objective_settings import FalseNegativeSettings
from angle_llm.prompts import PromptError
from angle_llm.run import fine_tune
from angle_llm.settings_io import SettingsError


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("called too early")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose base is not where it was."""
    folder = tmp_path_factory.mktemp("moved")
    adapter = save_tiny_adapter(save_tiny_base("llama", folder / "a base"), folder / "adapter")
    card = adapter / CARD_NAME
    card.write_text(card.read_text().replace("a base", "moved base"))
    return adapter


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSettings:
    """A run whose model is a hub id that does not exist, and whose weights must not be loaded."""
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", never)
    (tmp_path / CARD_NAME).write_text("{")
    return TrainSettings(
        run_dir=str(tmp_path / "run"), model=ModelSettings(path="org/absent"), data=DataSettings("starter:nothing.tsv")
    )


@pytest.mark.parametrize(
    ("model", "dataset", "kind", "message"),
    [
        ({"path": "package:no_such_package/model"}, {}, FileNotFoundError, "no_such_package"),
        ({"path": "DAMAGED"}, {}, ArtifactError, CARD_NAME),
        ({"path": "MOVED"}, {}, FileNotFoundError, r"moved base.* change it there"),
        ({"prompt": "none.yaml"}, {}, PromptError, r"none\.yaml"),
        ({}, {"prompt": "palin"}, PromptError, "'palin'.*'plain'"),
        ({}, {"objective": {"cosine_wieght": 1}}, ValueError, "cosine_wieght"),
        ({}, {"objective": {"in_batch_weight": 0}}, ValueError, "weight"),
    ],
)
def test_a_wrong_name_is_refused_before_data_are_read(
    model: dict[str, Any],
    dataset: dict[str, Any],
    kind: type[Exception],
    message: str,
    moved: Path,
    settings: TrainSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", never)
    places = {"DAMAGED": str(tmp_path), "MOVED": str(moved)}
    wrong = {name: places.get(value, value) for name, value in model.items()}
    data = DataSettings(sets=[MixedSet("rows.jsonl", **dataset)])
    with pytest.raises(kind, match=message):
        fine_tune(replace(settings, model=replace(settings.model, **wrong), data=data))
    assert not settings.run_path.exists()


def test_a_missing_base_of_a_guide_is_found_before_data_are_read(
    moved: Path, settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", never)
    rules = FalseNegativeSettings(margin=0.0, guide=str(moved))
    with pytest.raises(FileNotFoundError, match="moved base"):
        fine_tune(replace(settings, objective=ObjectiveSettings(false_negatives=rules)))


def test_wrong_data_are_refused_before_weights_load(settings: TrainSettings) -> None:
    with pytest.raises(DataError, match=r"starter:nothing\.tsv"):
        fine_tune(settings)


def test_a_teacher_term_without_scores_is_refused_before_weights_load(settings: TrainSettings) -> None:
    taught = replace(
        settings,
        model=ModelSettings(),
        data=DataSettings("starter:nli_triples.jsonl.gz", limit=8),
        objective=ObjectiveSettings(kl_weight=1.0),
    )
    with pytest.raises(SettingsError, match=r"expected groups with teacher scores.* nli_triples has none"):
        fine_tune(taught)


def test_evaluation_files_are_compared_with_the_training_data(
    settings: TrainSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"Where is file {n}?\tIn folder {n}.\n" for n in range(4)]
    for name, some in (("train", rows[:3]), ("valid", rows[2:])):
        (tmp_path / f"{name}.tsv").write_text("question\tanswer\n" + "".join(some))
    mine = replace(
        settings,
        data=DataSettings(str(tmp_path / "train.tsv")),
        evaluation=EvaluationSettings(tasks=[str(tmp_path / "valid.tsv")]),
    )
    with pytest.raises(FileNotFoundError, match="org/absent"):
        fine_tune(mine)
    assert "valid.tsv: the training data contain 1 of its 2 pairs, 1 of its 2 queries" in capsys.readouterr().out
