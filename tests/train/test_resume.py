"""A run that was stopped goes on bit for bit; signals stop it between two steps, and tell how to go on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import outcome, run_settings
from safetensors.torch import load_file
from tiny import save_tiny_base

from angle_llm.config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    OptimizerSettings,
    SettingsError,
    TrainSettings,
    load_settings,
)
from angle_llm.run import fine_tune
from angle_llm.train.checkpoint import CheckpointError, SavedWeightsError
from angle_llm.train.metrics import BestKeeper, Metrics
from angle_llm.train.signals import Interrupted, StopSignals


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """As in a terminal: what was started in the background may ignore SIGINT, and so would its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def settings(place: Path) -> TrainSettings:
    """Twelve steps of two batches, three an epoch, dropout; measured every third step. Checkpoints on signals alone."""
    return replace(run_settings(place), checkpoint=CheckpointSettings())


@pytest.fixture(scope="module")
def undisturbed(settings: TrainSettings) -> dict[str, Any]:
    return {**outcome_of(settings), "checkpoints": ["none"]}


def outcome_of(settings: TrainSettings) -> dict[str, Any]:
    fine_tune(settings)
    (settings.run_path / "checkpoints").mkdir(exist_ok=True)
    return outcome(settings.run_path)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def stop_at(
    monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM, *, evaluation: bool = False
) -> None:
    """Sends a signal when a step's line, or its evaluation's, is logged."""
    real = Metrics.log

    def log(self: Metrics, values: dict[str, float], notes: Any = None) -> None:
        real(self, values, notes)
        if values["step"] == step and ("evaluation" in values) is evaluation:
            send(number)

    monkeypatch.setattr(Metrics, "log", log)


def assert_alike(came: dict[str, Any], due: dict[str, Any]) -> None:
    assert came["metrics"] == due["metrics"]
    assert came["model"] == due["model"]
    assert came["settings"] == due["settings"]
    assert came["left"] == due["left"]


@pytest.mark.parametrize(
    ("step", "evaluation"),
    [(0, True), (2, False), (3, False), (3, True), (7, False), (12, False), (12, True)],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    step: int,
    evaluation: bool,
    settings: TrainSettings,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        stop_at(patch, step, evaluation=evaluation)
        with pytest.raises(Interrupted) as stopped:
            fine_tune(settings)
    assert stopped.value.code == 128 + signal.SIGTERM == 143
    shown = capsys.readouterr().out
    path = settings.run_path / f"checkpoints/step-{step:06d}"
    assert f"checkpoint of step {step} in {path}; go on with the same settings and --resume auto" in shown
    assert path.is_dir()
    assert not (settings.run_path / "interrupted").exists()
    assert_alike(outcome_of(settings), undisturbed)


def test_stopped_again_and_again(
    settings: TrainSettings, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"))
    for step in range(1, 13, 2):
        with monkeypatch.context() as patch:
            stop_at(patch, step, signal.SIGINT)
            with pytest.raises(Interrupted) as stopped:
                fine_tune(settings)
        assert stopped.value.code == 130
        assert len(list((settings.run_path / "checkpoints").iterdir())) <= 2
    assert_alike(outcome_of(settings), undisturbed)


def test_checkpoints_change_nothing_and_a_finished_run_is_not_trained_again(
    settings: TrainSettings, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"), checkpoint=CheckpointSettings(every_steps=5, keep=3))
    came = outcome_of(settings)
    assert came["checkpoints"] == ["step-000005", "step-000010", "step-000012"]
    assert came["model"] == undisturbed["model"]
    assert came["metrics"] == undisturbed["metrics"]
    with monkeypatch.context() as patch:
        stop_at(patch, 12)  # nothing is logged, so no signal comes
        assert outcome_of(settings) == came
    assert (
        outcome_of(replace(settings, resume="step-000005", checkpoint=CheckpointSettings()))["model"] == came["model"]
    )


def test_a_run_that_broke_before_it_was_done_goes_on(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights, no evaluation: the model is written at the end."""
    settings = replace(
        settings,
        lora=LoraSettings(rank=0),
        evaluation=EvaluationSettings(),
        optimizer=OptimizerSettings(learning_rate=1e-3, weight_decay=0.1, schedule="cosine"),
        checkpoint=CheckpointSettings(every_steps=4),
        max_steps=9,
        run_dir=str(tmp_path / "undisturbed"),
    )
    due = outcome_of(settings)
    settings = replace(settings, run_dir=str(tmp_path / "broken"))

    def breaks(self: BestKeeper) -> None:
        raise OSError("the lights went out")

    with monkeypatch.context() as patch:
        patch.setattr(BestKeeper, "finish", breaks)
        with pytest.raises(OSError, match="lights"):
            fine_tune(settings)
    assert not (settings.run_path / "model").exists()
    came = outcome_of(settings)
    assert {**came, "left": due["left"]} == due
    assert "interrupted" in came["left"], "a run that breaks leaves its weights"


def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(
    settings: TrainSettings,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"), checkpoint=CheckpointSettings(every_steps=2))
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Interrupted):
            fine_tune(settings)
    damaged = settings.run_path / "checkpoints/step-000007/optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    came = outcome_of(settings)
    assert f"warning: {damaged} is damaged" in capsys.readouterr().out
    assert came["model"] == undisturbed["model"]
    assert came["metrics"] == undisturbed["metrics"]


def test_never_starts_over(
    settings: TrainSettings,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Interrupted):
            fine_tune(settings)
    came = outcome_of(replace(settings, resume="never"))
    assert "starting over: removing the checkpoints up to step-000007" in capsys.readouterr().out
    assert_alike(came, undisturbed)
    assert came["checkpoints"] == []


def test_resuming_is_no_other_setting(settings: TrainSettings, tmp_path: Path) -> None:
    short = replace(settings, run_dir=str(tmp_path / "run"), max_steps=1, evaluation=EvaluationSettings())
    fine_tune(replace(short, resume="never"))
    fine_tune(replace(short, resume="auto", checkpoint=CheckpointSettings(every_steps=1, keep=5)))
    saved = load_settings(TrainSettings, short.run_path / "settings.yaml")
    assert saved == replace(short, resume="never", checkpoint=CheckpointSettings(every_steps=1, keep=5))
    with pytest.raises(SettingsError, match="other settings"):
        fine_tune(replace(short, seed=5))
    with pytest.raises(SettingsError, match=r"auto, never, or a checkpoint .*there: step-000001.*'atuo'"):
        fine_tune(replace(short, resume="atuo"))


def test_other_data_is_refused(settings: TrainSettings, tmp_path: Path) -> None:
    rows = [f'{{"anchor": "Dog {n} runs.", "positive": "It moves.", "negative": "Cat {n} sleeps."}}' for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows))
    short = replace(
        settings,
        run_dir=str(tmp_path / "run"),
        data=DataSettings(path=str(data)),
        evaluation=EvaluationSettings(),
        checkpoint=CheckpointSettings(every_steps=1),
        epochs=1,
    )
    fine_tune(short)
    data.write_text("\n".join(rows).replace("Dog", "Cow"))
    with pytest.raises(CheckpointError, match="was written with other examples"):
        fine_tune(short)
    base = save_tiny_base("llama", tmp_path / "other base", seed=5)
    data.write_text("\n".join(rows))
    for path in base.iterdir():
        (Path(short.model.path) / path.name).rename(tmp_path / path.name)
        (Path(short.model.path) / path.name).write_bytes(path.read_bytes())
    try:
        with pytest.raises(CheckpointError, match="was written with other base weights"):
            fine_tune(short)
    finally:
        for path in base.iterdir():
            (tmp_path / path.name).replace(Path(short.model.path) / path.name)


def test_what_a_kill_left_of_the_best_model_is_put_back(
    settings: TrainSettings, undisturbed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"), checkpoint=CheckpointSettings(every_steps=12))
    outcome_of(settings)
    run_dir = settings.run_path
    (run_dir / "model").rename(run_dir / ".model.abcd.old")
    (run_dir / ".model.abcd").mkdir()
    came = outcome_of(settings)
    assert (came["model"], came["left"]) == (undisturbed["model"], undisturbed["left"])
    for path in (run_dir / "model").iterdir():
        path.unlink()
    (run_dir / "model").rmdir()
    capsys.readouterr()
    fine_tune(settings)
    assert "the best model so far, is gone" in capsys.readouterr().out


def test_lost_lines_of_metrics_are_told_and_do_not_stop_a_run(
    settings: TrainSettings, undisturbed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(settings, run_dir=str(tmp_path / "run"), checkpoint=CheckpointSettings(every_steps=12))
    outcome_of(settings)
    (settings.run_path / "metrics.jsonl").write_text("")
    came = outcome_of(settings)
    assert "lines are lost" in capsys.readouterr().out
    assert came["model"] == undisturbed["model"]


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_handlers_are_put_back() -> None:
    before = handlers()
    with StopSignals() as stop:
        assert handlers() != before
        send(signal.SIGTERM)
        assert stop.asked == signal.SIGTERM
        send(signal.SIGTERM)  # the same wish again
    assert handlers() == before
    with pytest.raises(ValueError, match="inside"), StopSignals():
        raise ValueError("inside")
    assert handlers() == before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_at_once(first: int) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), StopSignals():  # noqa: PT012
        send(first)
        send(signal.SIGINT)
    assert handlers() == before


def test_ignored_signals_stay_ignored_and_threads_install_none() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[Any] = []

    def elsewhere() -> None:
        with StopSignals():
            seen.extend(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == handlers()


def test_the_command_ends_with_the_documented_code(settings: TrainSettings, tmp_path: Path) -> None:
    """From outside, at any moment once the first step is done."""
    run = tmp_path / "run"
    arguments = ["--run-dir", str(run), "--model.path", settings.model.path, "--model.dtype", "float32"]
    arguments += ["--model.max-length", "100", "--lora.rank", "4", "--batch-size", "4", "--epochs", "500"]
    arguments += ["--data.limit", "20", "--resume", "auto"]
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from angle_llm.cli import main; sys.argv[0] = 'angle-llm'; main()"
    command = [sys.executable, "-c", program, "train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        threading.Event().wait(0.05)
    process.send_signal(signal.SIGINT)
    shown, told = process.communicate(timeout=60)
    assert process.returncode == 130, shown + told
    assert "SIGINT: a checkpoint follows this step" in told
    assert "Traceback" not in told
    (path,) = (run / "checkpoints").iterdir()
    assert f"in {path}; go on with the same settings and --resume auto" in shown


@pytest.mark.parametrize(
    "lora", [LoraSettings(rank=4), LoraSettings(rank=4, dora=True), LoraSettings(rank=4, rslora=True)]
)
def test_a_saved_adapter_is_read_again(
    lora: LoraSettings, settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(settings, lora=lora, max_steps=2, evaluation=EvaluationSettings(), run_dir=str(tmp_path / "run"))
    path = fine_tune(short) / "adapter_model.safetensors"
    assert any(name.endswith("lora_B.weight") for name in load_file(path))
    from angle_llm.model.encoder import SentenceEncoder

    real = SentenceEncoder.save_pretrained

    def spoilt(self: SentenceEncoder, folder: Any, check: Callable[[Path], None]) -> None:
        def spoil_first(written: Path) -> None:
            empty(written / "adapter_model.safetensors")
            check(written)

        real(self, folder, spoil_first)

    model = tmp_path / "run" / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    monkeypatch.setattr(SentenceEncoder, "save_pretrained", spoilt)
    with pytest.raises(SavedWeightsError, match=r"adapter_model\.safetensors.*missing"):
        fine_tune(short)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before, "a bad save replaces nothing"


def empty(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({}, path)


def test_an_adapter_that_has_learnt_nothing_is_an_error(settings: TrainSettings, tmp_path: Path) -> None:
    from angle_llm.data.formats import ScoredPair
    from angle_llm.losses import AngleObjective
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.train.trainer import train

    encoder = SentenceEncoder.from_pretrained(settings.model.path, max_length=100)
    encoder.add_lora(LoraSettings(rank=4))
    alike = [ScoredPair(f"Dog {n} runs.", f"Animal {n} moves.", 0.5) for n in range(8)]
    objective = AngleObjective(cosine_weight=1, in_batch_weight=0, angle_weight=0)
    short = replace(settings, run_dir=str(tmp_path / "run"), evaluation=EvaluationSettings(), epochs=1)
    with pytest.raises(SavedWeightsError, match="every lora_B is zero"):
        train(encoder, alike, objective, short)
    assert np.isfinite(encoder.encode(["A dog."])).all()
