"""A run checks names and paths before it reads data, and data before it loads weights."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import fine_tune
from angle_llm.data import DataError
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import DepthsHead, EmbeddingModel
from angle_llm.model.layers.compiled_rotary import use_compiled_rotary
from angle_llm.model.layers.lora import is_adapted
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import (
    DataSettings,
    EvaluationSettings,
    MixedSet,
    ModelSettings,
    NestedSettings,
    ObjectiveSettings,
    TrainSettings,
)
from angle_llm.train.distributed import RemoteRankError
from angle_llm.train.run_folder import Run


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
    """A run whose weights must not be loaded."""
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", never)
    (tmp_path / CARD_NAME).write_text("{")
    base = str(save_tiny_base("llama", tmp_path / "base"))
    return TrainSettings(
        run_dir=str(tmp_path / "run"), model=ModelSettings(path=base), data=DataSettings("starter:nothing.tsv")
    )


@pytest.mark.parametrize(
    ("model", "dataset", "kind", "message"),
    [
        ({"path": "package:no_such_package/model"}, {}, FileNotFoundError, "no_such_package"),
        ({"path": "DAMAGED"}, {}, ArtifactError, CARD_NAME),
        ({"path": "MOVED"}, {}, FileNotFoundError, "moved base"),
        ({"prompt": "none.yaml"}, {}, SettingsError, r"none\.yaml"),
        ({}, {"prompt": "palin"}, SettingsError, "'palin'.*'plain'"),
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
    monkeypatch.setattr("angle_llm.run.load_mixture", never)
    places = {"DAMAGED": str(tmp_path), "MOVED": str(moved)}
    wrong = {name: places.get(value, value) for name, value in model.items()}
    data = DataSettings(sets=[MixedSet("rows.jsonl", **dataset)])
    with pytest.raises(kind, match=message):
        fine_tune(replace(settings, model=replace(settings.model, **wrong), data=data))
    assert not settings.run_path.exists()


def test_wrong_data_are_refused_before_weights_load(settings: TrainSettings) -> None:
    with pytest.raises(DataError, match=r"starter:nothing\.tsv"):
        fine_tune(settings)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_the_log_names_the_layout_and_the_replaced_layers(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rotary embeddings are compiled on a GPU only; here, by a backend that runs on a CPU. Padded texts have none."""
    compiled = partial(use_compiled_rotary, backend="eager")
    monkeypatch.setattr("angle_llm.train.loading.use_compiled_rotary", compiled)
    model = ModelSettings(path=str(save_tiny_base("llama", tmp_path / "base")))
    data = DataSettings("starter:nli_triples.jsonl.gz", limit=8)
    fine_tune(TrainSettings(run_dir=str(tmp_path / "run"), model=model, data=data, batch_size=8, layout=layout))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "replaced layers" in line)
    start = {"auto": "trie; gathered keys", "padded": "padded (as requested); attention of the library"}[layout]
    assert line.startswith(f"texts: {start}; replaced layers: ")
    assert ("3 CompiledRotary" in line) == (layout == "auto")


def test_inner_layers_are_read_with_the_adapter_on_the_projection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT projects its states; an inner layer gets the projection of the model, which LoRA replaces."""
    adapted: list[bool] = []
    make = DepthsHead.__init__

    def record(head: DepthsHead, model: EmbeddingModel, layers: Any) -> None:
        adapted.append(is_adapted(model.backbone))
        make(head, model, layers)

    monkeypatch.setattr(DepthsHead, "__init__", record)
    fine_tune(
        TrainSettings(
            run_dir=str(tmp_path / "run"),
            model=ModelSettings(path=str(save_tiny_base("opt", tmp_path / "base"))),
            data=DataSettings("starter:nli_triples.jsonl.gz", limit=8),
            nested=NestedSettings(layers=[1]),
            batch_size=8,
        )
    )
    assert adapted == [True]


def test_a_teacher_term_without_scores_is_refused_before_weights_load(settings: TrainSettings) -> None:
    taught = replace(
        settings,
        data=DataSettings("starter:nli_triples.jsonl.gz", limit=8),
        objective=ObjectiveSettings(kl_weight=1.0),
    )
    with pytest.raises(SettingsError, match="nli_triples"):
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
    with pytest.raises(AssertionError, match="called too early"):
        fine_tune(mine)
    assert re.search(r"valid\.tsv.* 1 of its 2 pairs, 1 of its 2 queries", capsys.readouterr().out)


def test_a_second_run_in_the_same_directory_is_refused(settings: TrainSettings) -> None:
    with Run.start(settings), pytest.raises(FolderError, match="another process writes"), Run.start(settings):
        pass
    assert not settings.run_path.exists()
    with Run.start(settings):
        pass


def test_a_run_directory_of_the_user_is_kept(settings: TrainSettings) -> None:
    settings.run_path.mkdir(parents=True)
    with Run.start(settings):
        pass
    assert settings.run_path.exists()


def test_a_setting_that_another_run_of_the_directory_had_is_named(settings: TrainSettings) -> None:
    narrow = replace(settings, data=replace(settings.data, where={"lang": "en"}))
    with Run.start(narrow) as run:
        run.prepare()
    with pytest.raises(SettingsError, match=r'data\.where\.lang "en" \(now null\)'), Run.start(settings):
        pass


def test_ranks_with_other_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also settings that do not change the result: ranks would plan other batches, or write to another folder."""
    settings = TrainSettings(run_dir=str(tmp_path / "run"))
    other = replace(settings, run_dir=str(tmp_path / "other"), graph_tokens=5)
    processes = Mock(gather=lambda value: [value, value, other if value == settings else other.identity])
    monkeypatch.setattr("angle_llm.train.run_folder.Processes.start", lambda: processes)
    refused = pytest.raises(RemoteRankError, match=r"rank 2 \(now\) have .*: run_dir .*, graph_tokens null \(now 5\)")
    with refused, Run.start(settings):
        pass
    assert not (tmp_path / "run").exists()
