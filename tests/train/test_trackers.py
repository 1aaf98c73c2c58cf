"""Experiment trackers: TensorBoard after a resume, others through accelerate, refused and failing ones."""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from angle_llm import fine_tune
from angle_llm.settings.parsing import SettingsError, settings_from_dict
from angle_llm.settings.train import LoraSettings, TrainSettings
from angle_llm.train.callbacks import read_metrics
from angle_llm.train.metrics import Metrics


class FakeTracker(GeneralTracker):
    """A tracker that keeps its calls."""

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False
    calls: ClassVar[list[tuple[Any, ...]]] = []
    fails_at: ClassVar[int | None] = None

    def __init__(self, run_name: str, **options: object) -> None:
        self.calls.append(("made", run_name, options))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("settings", values))

    def log(self, values: dict[str, float], step: int | None = None, **_: object) -> None:
        if step == self.fails_at:
            raise ConnectionError("no server")
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    PartialState()  # as a run has it: accelerate's trackers write on the main process
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", FakeTracker)
    monkeypatch.setattr(FakeTracker, "calls", [])
    return FakeTracker


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_hides_the_values_after_the_checkpoint(fake: type[FakeTracker], tmp_path: Path) -> None:
    settings = TrainSettings(run_dir=str(tmp_path / "mine"), report_to=["tensorboard", "trackio"])
    with Metrics(settings) as metrics:
        metrics.log({"step": 1, "loss": 4.0})
        kept = metrics.bytes_on_disk()
        metrics.log({"step": 2, "loss": 3.0}, notes={"layout": "trie"})
        metrics.log({"step": 3, "loss": 2.0})
    with Metrics(settings, kept, step=1) as metrics:
        metrics.log({"step": 2, "loss": 2.5, "evaluation/beir@valid/nDCG@10": 50.0})
    assert scalars(tmp_path / "mine", "loss") == [(1, 4.0), (2, 2.5)]
    assert scalars(tmp_path / "mine", "evaluation/beir_valid/nDCG_10") == [(2, 50.0)]
    assert len((tmp_path / "mine/metrics.jsonl").read_text().splitlines()) == 2
    assert [call for call in fake.calls if call[0] != "settings"] == [
        ("made", "angle_llm", {"name": "mine"}),
        *(("log", {"loss": loss}, step) for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0))),
        ("finish",),
        ("made", "angle_llm", {"name": "mine from step 2"}),
        ("log", {"loss": 2.5, "evaluation/beir_valid/nDCG_10": 50.0}, 2),
        ("finish",),
    ]
    with Metrics(settings) as metrics:  # the run starts again
        metrics.log({"step": 1, "loss": 5.0})
    assert scalars(tmp_path / "mine", "loss") == [(1, 5.0)]
    with (tmp_path / "mine/metrics.jsonl").open("rb+") as file:  # lines are lost, the last in part
        file.truncate(9)
    with Metrics(settings, kept, step=1) as metrics:
        metrics.log({"step": 2, "loss": 2.5})
    assert [line["step"] for line in read_metrics(tmp_path / "mine")] == [2]
    stored = next(call[1] for call in fake.calls if call[0] == "settings")
    assert (stored["lora.rank"], stored["report_to"]) == (32, "['tensorboard', 'trackio']")
    assert all(isinstance(value, bool | int | float | str) for value in stored.values())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    metrics = Metrics(TrainSettings(run_dir=str(tmp_path), report_to=[]))
    with metrics, Path("/dev/full").open("w") as full:
        assert metrics._file is not None
        os.dup2(full.fileno(), metrics._file.fileno())
        with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: .*No space left.* --resume auto"):
            metrics.log({"step": 1, "loss": 4.0})


def test_a_tracker_that_fails_is_off_and_the_run_continues(
    fake: type[FakeTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake, "fails_at", 2)
    with Metrics(TrainSettings(run_dir=str(tmp_path), report_to=["trackio"])) as metrics:
        for step in (1, 2, 3):
            metrics.log({"step": step, "loss": 1.0})
    assert [call[0] for call in fake.calls] == ["made", "settings", "log"]
    assert capsys.readouterr().out.count("trackio") == 1, "one warning"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "tensorboard").exists()


def test_no_name_of_mlflow_is_the_folder_of_another(
    fake: type[FakeTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store in files writes a file for a metric."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", lambda project, run_name: FakeTracker(run_name))
    with Metrics(TrainSettings(run_dir=str(tmp_path / "mine"), report_to=["mlflow"])) as metrics:
        metrics.log({"step": 1, "loss": 4.0, "loss/cosine": 4.0, "evaluation": 3.0, "evaluation/a/b": 3.0})
    (names,) = [call[1].keys() for call in fake.calls if call[0] == "log"]
    assert names == {"loss/total", "loss/cosine", "evaluation/total", "evaluation/a/b"}


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.train.metrics.importlib.util.find_spec", lambda name: None)
    settings = TrainSettings(run_dir=str(tmp_path / "run"), report_to=["wandb"], lora=LoraSettings(rank=4))
    with pytest.raises(SettingsError, match=r"--report-to.*pip install wandb"):
        fine_tune(settings)
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingsError, match=r"report_to\.0.*'wandbb'"):
        settings_from_dict(TrainSettings, {"report_to": ["wandbb"]}, "run.yaml")


def test_trackers_do_not_change_what_a_run_computes() -> None:
    one, other = TrainSettings(), TrainSettings(report_to=["wandb"])
    assert one.identity == other.identity
    assert one.fingerprint() == other.fingerprint()
