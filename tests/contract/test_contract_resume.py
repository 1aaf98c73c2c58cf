"""Resume after a signal or a kill gives the same bytes; several processes give the result of one."""

import json
import os
import signal
import time
from pathlib import Path

import programs
import pytest
from commands import TREE, Files, command, free_port, launched, names, training
from safetensors.torch import load_file
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


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(files: Files, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _ = stopped(files, run, signal.SIGTERM, "--checkpoint.every-steps", "5", "--checkpoint.keep", "3")
    assert code == 143
    newest = max((run / "checkpoints").glob("step-*"))
    for path in newest.glob("*.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # of the same length
    flags = [*LONG, "--checkpoint.every-steps", "5", "--checkpoint.keep", "3", "--resume", "auto"]
    done = command("angle-llm", "train", *training(files, run), *flags)
    names(done.stdout + done.stderr, newest.name)
    assert losses(run) == losses(uninterrupted)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(files: Files, tmp_path: Path) -> None:
    flags = ["--max-steps", "10", "--epochs", "4", "--batch-size", "7", "--objective.cosine-weight", "1"]
    command("angle-llm", "train", *training(files, tmp_path / "one"), *flags)
    two = [
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "recipes/llama2_nli.py",
    ]
    done = launched("torchrun", *two, "--config", tmp_path / "one/settings.yaml", "--run-dir", tmp_path / "two")
    names(done.stdout, r"\b2 processes|of 2\b|world.?size\W+2")
    assert done.stdout.count("from_pretrained") == 1, "one process reports"
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert [step for step, _ in two] == list(range(1, 11))
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-5)
    assert any(line["imbalance"] > 1 for line in read_rows(tmp_path / "two/metrics.jsonl")), "both had a share"
    first, second = (load_file(tmp_path / name / "model/adapter_model.safetensors") for name in ("one", "two"))
    for name, tensor in first.items():
        assert (second[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), name


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
