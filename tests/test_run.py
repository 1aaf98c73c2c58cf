"""A run looks at what is cheap before what takes long: names and places, then data, then weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from angle_llm.config import DataSettings, EvaluationSettings, ModelSettings, TrainSettings
from angle_llm.data import DataError
from angle_llm.model.checks import CARD_NAME, ArtifactError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.prompts import PromptError
from angle_llm.run import fine_tune


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this was to be done later")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSettings:
    """A run whose model is a hub id that is never asked for, and whose weights must not be loaded."""
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", never)
    return TrainSettings(
        run_dir=str(tmp_path / "run"), model=ModelSettings(path="org/absent"), data=DataSettings("starter:nothing.tsv")
    )


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"path": "./nowhere"}, FileNotFoundError, "no model at nowhere"),
        ({"path": "package:no_such_package/model"}, FileNotFoundError, "no Python package"),
        ({"pooling": "lats"}, ValueError, "unknown pooling 'lats'. Did you mean 'last'"),
        ({"prompt": "sumarize_one_word"}, PromptError, "Did you mean 'summarize_one_word'"),
        ({"prompt": "none.yaml"}, PromptError, "no prompt file at none.yaml"),
    ],
)
def test_a_wrong_name_is_refused_before_the_data_is_read(
    wrong: dict[str, Any], kind: type[Exception], told: str, settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", never)
    with pytest.raises(kind, match=told):
        fine_tune(replace(settings, model=replace(settings.model, **wrong)))
    assert not settings.run_path.exists()


def test_a_damaged_card_is_refused_before_the_data_is_read(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", never)
    (tmp_path / CARD_NAME).write_text("{")
    with pytest.raises(ArtifactError, match="is not valid JSON"):
        fine_tune(replace(settings, model=ModelSettings(path=str(tmp_path))))


def test_missing_pairs_are_refused_before_the_data_is_read(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", never)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tsv"):
        fine_tune(replace(settings, evaluation=EvaluationSettings("nowhere.tsv")))


def test_wrong_data_are_refused_before_weights_load(settings: TrainSettings) -> None:
    with pytest.raises(DataError, match=r"starter:nothing\.tsv"):
        fine_tune(settings)
