"""An interrupted run resumes bit for bit; signals stop it between two steps, even if its output pipe is closed."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import contents
from programs import run, start
from runs import checkpoint_names, outcome, read_metrics, run_settings
from tiny import save_tiny_base

from angle_llm import fine_tune
from angle_llm.data.sources import resolve_source
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.parsing import SettingsError, save_settings
from angle_llm.settings.train import (
    CheckpointSettings,
    EvaluationSettings,
    LoraSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.train.best_model import BestModel
from angle_llm.train.metrics import Metrics
from angle_llm.train.token_budget import TokenBudget
from angle_llm.train.trainer import Interrupted, StopSignals


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """Tests would inherit ignored signals from `nohup` and `&`."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """Six steps of two batches, three an epoch, dropout; an evaluation every third step. Checkpoints on signals only."""
    return replace(run_settings(tmp_path_factory.mktemp("runs")), checkpoint=CheckpointSettings(), epochs=2)


@pytest.fixture(scope="module")
def undisturbed(settings: TrainSettings) -> dict[str, Any]:
    return outcome_of(settings)


@pytest.fixture
def mine(settings: TrainSettings, tmp_path: Path) -> TrainSettings:
    """Settings of the same run in a directory of this test."""
    return replace(settings, run_dir=str(tmp_path / "run"))


def outcome_of(settings: TrainSettings) -> dict[str, Any]:
    fine_tune(settings)
    return outcome(settings.run_path)


def check_alike(got: dict[str, Any], due: dict[str, Any]) -> None:
    for what in ("metrics", "model", "settings"):
        assert got[what] == due[what], what
    assert got["verdict"] == due["verdict"]
    assert [name for name in got["files"] if name != "checkpoints"] == due["files"]


def interrupt(
    settings: TrainSettings, step: int, number: int = signal.SIGTERM, *, evaluation: bool = False
) -> int | str | None:
    """Train, with a signal when the line of a step, or of its evaluation, is logged; return the exit code."""
    real = Metrics.log

    def log(self: Metrics, values: dict[str, float], notes: Any = None) -> None:
        real(self, values, notes)
        if values["step"] == step and ("evaluation" in values) is evaluation:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "log", log)
        with pytest.raises(Interrupted) as stopped:
            fine_tune(settings)
    return stopped.value.code


@pytest.mark.parametrize(
    ("step", "evaluation"),
    [
        *((0, True), (3, False), (3, True), (6, True)),
        *(pytest.param(step, False, marks=pytest.mark.slow) for step in (2, 5, 6)),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(
    step: int,
    evaluation: bool,
    mine: TrainSettings,
    undisturbed: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert interrupt(mine, step, evaluation=evaluation) == 128 + signal.SIGTERM == 143
    path = mine.run_path / f"checkpoints/step-{step:06d}"
    assert f"in {path}; to resume" in capsys.readouterr().out
    assert path.is_dir()
    assert not (mine.run_path / "interrupted").exists()
    check_alike(outcome_of(mine), undisturbed)
    lines = read_metrics(mine.run_path)
    fine_tune(mine)
    assert read_metrics(mine.run_path) == lines, "a finished run is not trained again"
    assert (mine.run_path / "result.json").exists()


def test_a_run_that_starts_over_has_no_checkpoint_of_the_run_before(
    mine: TrainSettings, undisturbed: dict[str, Any]
) -> None:
    interrupt(mine, 3)
    check_alike(outcome_of(replace(mine, resume="never")), undisturbed)
    assert not checkpoint_names(mine.run_path)


def test_a_resumed_run_keeps_its_budget_on_a_device_with_other_free_memory(
    mine: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(budget: TokenBudget) -> None:
        monkeypatch.setattr("angle_llm.run.choose_budget", lambda *_: budget)

    mine = replace(mine, max_steps=2)
    choose(TokenBudget(60, 90, activation_checkpointing=True))
    whole = outcome_of(replace(mine, run_dir=str(tmp_path / "whole")))
    interrupt(mine, 1)
    choose(TokenBudget(8192, 16_384))
    check_alike(outcome_of(mine), whole)
    result = json.loads((mine.run_path / "result.json").read_text())
    assert TokenBudget(**result["budget"]) == TokenBudget(60, 90, activation_checkpointing=True)


def test_a_run_resumes_with_another_token_budget(mine: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(mine, max_steps=4)
    interrupt(mine, 2)
    with monkeypatch.context() as patch:
        patch.setattr("angle_llm.train.token_budget.checkpointing_problem", lambda _: "no.")
        with pytest.raises(SettingsError, match=r"--activation-checkpointing always: no\."):
            fine_tune(replace(mine, activation_checkpointing="always"))
    fine_tune(replace(mine, micro_batch_tokens=70, graph_tokens=0, activation_checkpointing="always"))
    assert [line["step"] for line in read_metrics(mine.run_path) if "loss" in line] == [1, 2, 3, 4]
    result = json.loads((mine.run_path / "result.json").read_text())
    assert TokenBudget(**result["budget"]) == TokenBudget(70, 0, activation_checkpointing=True)


def test_checkpoints_change_nothing_and_a_finished_run_is_not_trained_again(
    mine: TrainSettings, undisturbed: dict[str, Any]
) -> None:
    often = replace(mine, checkpoint=CheckpointSettings(every_steps=2, keep=3))
    first = outcome_of(often)
    assert first["checkpoints"] == ["step-000002", "step-000004", "step-000006"]
    check_alike({**first, "settings": undisturbed["settings"]}, undisturbed)
    times = [line["seconds"] for line in read_metrics(mine.run_path) if "seconds" in line]
    assert outcome_of(often) == first
    assert [line["seconds"] for line in read_metrics(mine.run_path) if "seconds" in line] == times, "no step was taken"
    assert outcome_of(replace(mine, resume="step-000002"))["model"] == first["model"]
    with pytest.raises(SettingsError, match=r"finished run.*remove"):
        fine_tune(replace(often, resume="never"))
    assert outcome(mine.run_path)["model"] == first["model"]


def test_a_run_that_failed_at_its_end_resumes(mine: TrainSettings, tmp_path: Path) -> None:
    """All weights, computed in bfloat16, no evaluation: the model is written at the end, in float32."""
    full = replace(
        mine,
        model=replace(mine.model, dtype="bfloat16"),
        lora=LoraSettings(rank=0),
        evaluation=EvaluationSettings(),
        optimizer=OptimizerSettings(learning_rate=1e-3, weight_decay=0.1),
        checkpoint=CheckpointSettings(every_steps=2),
        max_steps=5,
    )
    due = outcome_of(replace(full, run_dir=str(tmp_path / "undisturbed")))
    exact = replace(full, run_dir=str(tmp_path / "exact"), model=replace(full.model, dtype="float32"), max_steps=1)
    fine_tune(exact)
    losses = [read_metrics(one)[0]["loss"] for one in (exact.run_path, tmp_path / "undisturbed")]
    assert 0 < abs(losses[0] - losses[1]) < 0.02 * losses[0], "products were computed in bfloat16"

    def fails(self: BestModel) -> None:
        raise OSError("no disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BestModel, "finish", fails)
        with pytest.raises(OSError, match="no disk"):
            fine_tune(full)
    assert not (mine.run_path / "model").exists()
    assert (mine.run_path / "interrupted").is_dir()
    assert outcome_of(full) == due, "without interrupted/"
    assert SentenceEncoder.from_pretrained(mine.run_path / "model", device="cpu").dtype == torch.float32


def test_other_base_weights_are_refused(mine: TrainSettings, tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    model, checkpoints = replace(mine.model, path=str(base)), CheckpointSettings(every_steps=1)
    short = replace(mine, model=model, max_steps=1, evaluation=EvaluationSettings(), checkpoint=checkpoints)
    fine_tune(short)
    save_tiny_base("llama", base, seed=5)
    before = contents(mine.run_path)
    with pytest.raises(FolderError, match=r"step-000001.*base weights"):
        fine_tune(short)
    assert contents(mine.run_path) == before, "also result.json"


def test_other_prompts_and_evaluation_files_are_refused(mine: TrainSettings, tmp_path: Path) -> None:
    pairs, prompt, data = (tmp_path / name for name in ("pairs.tsv", "mine.yaml", "triples.jsonl"))
    pairs.write_text(Path(mine.evaluation.tasks[0]).read_text())
    starter = resolve_source(mine.data.path).path
    assert starter is not None
    data.write_text(gzip.decompress(starter.read_bytes()).decode())
    prompt.write_text("name: mine\ntemplate: 'Text: {text}'\n")
    model, evaluation = replace(mine.model, prompt=str(prompt)), EvaluationSettings(tasks=[str(pairs)])
    checkpoints = CheckpointSettings(every_steps=1)
    short = replace(mine, model=model, max_steps=1, evaluation=evaluation, checkpoint=checkpoints)
    short = replace(short, data=replace(mine.data, path=str(data)))
    fine_tune(short)
    named = {prompt: "prompts", pairs: "evaluation files", data: "examples"}
    for file, words in ((prompt, ("Text", "Title")), (pairs, ("runs", "sleeps")), (data, ("The ", "A "))):
        before = file.read_text()
        file.write_text(before.replace(*words))
        assert file.read_text() != before
        with pytest.raises(FolderError, match=named[file]):
            fine_tune(short)
        file.write_text(before)
    fine_tune(short)


def test_files_that_a_kill_or_a_user_removed(
    mine: TrainSettings, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    mine = replace(mine, checkpoint=CheckpointSettings(every_steps=6))
    fine_tune(mine)
    run_dir = mine.run_path
    (run_dir / "model").rename(run_dir / ".model.old")  # killed between two renames
    (run_dir / ".model.7.tmp").mkdir()
    got = outcome_of(mine)
    assert got["model"] == undisturbed["model"]
    assert [name for name in got["files"] if name != "checkpoints"] == undisturbed["files"]
    (run_dir / "metrics.jsonl").write_text("")
    fine_tune(mine)
    assert "lines are lost" in capsys.readouterr().out
    (run_dir / "model").rename(run_dir / "moved")
    fine_tune(mine)
    assert "the best model so far, is missing" in capsys.readouterr().out
    assert (run_dir / "model").is_dir(), "evaluated again"


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_a_second_interrupt_stops_at_once_and_handlers_are_restored(first: int) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:  # noqa: PT012
        assert handlers() != before
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)  # has no further effect
        assert stop.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert handlers() == before


def test_ignored_signals_stay_ignored_and_threads_install_no_handler() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    seen: list[Any] = []

    def elsewhere() -> None:
        with StopSignals():
            seen.extend(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == handlers()


@pytest.mark.parametrize("reader", [pytest.param("stays", marks=pytest.mark.slow), "ends"])
def test_ctrl_c_writes_a_checkpoint_even_if_the_reader_of_the_output_ends(
    reader: str, settings: TrainSettings, tmp_path: Path
) -> None:
    """`angle-llm train … 2>&1 | tee log`: Ctrl-C reaches the whole process group, so the reader of the pipe may end first."""
    run_dir = tmp_path / "run"
    save_settings(
        replace(settings, run_dir=str(run_dir), epochs=500, evaluation=EvaluationSettings()), tmp_path / "run.yaml"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    output = os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # opens before the program writes
    train = start("angle-llm", "train", "--config", tmp_path / "run.yaml", pipe=pipe)
    metrics = run_dir / "metrics.jsonl"
    while train.process.is_alive() and not (metrics.exists() and metrics.stat().st_size):
        threading.Event().wait(0.05)
    if reader == "ends":
        output.close()
    assert train.process.pid is not None
    os.kill(train.process.pid, signal.SIGINT)
    code = train.wait(60).returncode
    shown = output.read() if reader == "stays" else ""
    output.close()
    assert code == 130, shown
    (name,) = checkpoint_names(run_dir)
    if reader == "stays":
        assert all(word in shown for word in ("SIGINT", f"checkpoints/{name}", "--resume auto"))
        assert "Traceback" not in shown


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the program forks")
@pytest.mark.parametrize(
    ("seed", "timed", "inside", "processes"),
    [
        pytest.param(1, 2, 4, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 1, 2, marks=pytest.mark.slow),
        pytest.param(2, 40, 20, 1, marks=pytest.mark.slow),
        pytest.param(4, 6, 4, 2, marks=pytest.mark.slow),
    ],
    ids=["6 kills", "2 kills of 2 processes", "60 kills", "10 kills of 2 processes"],
)
def test_a_killed_run_resumes_bit_for_bit(seed: int, timed: int, inside: int, processes: int, tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(seed), str(timed), str(inside), str(processes)]
    done = run("python", Path(__file__).with_name("crashes.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{timed + inside} kills of " in done.stdout
