"""Resume after a signal or a kill gives the same bytes; a lost process ends the others."""

import json
import os
import signal
import time
from pathlib import Path

import programs
import pytest
from commands import TREE, Files, command, free_port, names, training
from tiny_folders import read_rows

LONG = ["--epochs", "6", "--lora.dropout", "0.1", "--batch-size", "5"]
"""30 steps, the last batch of an epoch smaller; dropout draws random numbers in each."""


@pytest.fixture(scope="module")
def uninterrupted(files: Files) -> Path:
    run = files.folder / "uninterrupted"
    command("angle-llm", "train", *training(files, run), *LONG)
    return run


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_rows(run / "metrics.jsonl")]


def stopped(files: Files, run: Path, number: int, *flags: str) -> tuple[int, str]:
    """Exit code and output of a run that gets a signal once some steps are done."""
    words = ["angle-llm", "train", *training(files, run), *LONG, *flags]
    program = programs.start(*words, environment=os.environ)
    metrics, end = run / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 6):
        assert program.process.is_alive(), program.wait().stderr
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(program.process.pid or 0, number)
    done = program.wait(120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "code", "flags"),
    [
        (signal.SIGTERM, 143, []),
        pytest.param(signal.SIGINT, 130, [], marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL, ["--checkpoint.every-steps", "4"]),
    ],
    ids=["SIGTERM", "SIGINT", "SIGKILL"],
)
def test_a_stopped_run_resumes_to_the_same_bytes(
    number: int, code: int, flags: list[str], files: Files, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended, shown = stopped(files, run, number, *flags)
    assert ended == code, shown
    saved = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert saved
    assert not (run / "model").exists()
    if code > 0:
        names(shown, "--resume auto", saved[-1])
        steps = len(losses(run))
        assert 6 <= steps < 30
        assert saved == [f"step-{steps:06d}"]
        done = command("angle-llm", "train", *training(files, run), *LONG, *flags, code=2)
        names(done.stderr, saved[-1], "--resume auto", "--resume never")
        assert (run / "checkpoints" / saved[-1]).is_dir()
    command("angle-llm", "train", *training(files, run), *LONG, *flags, "--resume", "auto")
    weights = "model/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (uninterrupted / weights).read_bytes()
    assert losses(run) == losses(uninterrupted)
    assert len(losses(run)) == 30


def test_a_lost_process_ends_the_others(files: Files, tmp_path: Path) -> None:
    """Sets the variables of torchrun itself, so that no launcher ends the other process."""
    words = ["angle-llm", "train", *training(files, tmp_path / "run"), *LONG, "--epochs", "2000"]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["ANGLE_LLM_LOST_SECONDS"] = "3"
    each = [
        programs.start(
            *words, environment={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=TREE
        )
        for rank in range(2)
    ]
    metrics, end = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(each[1].process.pid or 0, signal.SIGKILL)
    started = time.monotonic()
    done = each[0].wait(60)
    each[1].wait(10)
    assert done.returncode == 3, json.dumps([done.stdout[-2000:], done.stderr[-2000:]])
    assert time.monotonic() - started < 60
    names(done.stdout + done.stderr, r"(process|rank) 1\b")
