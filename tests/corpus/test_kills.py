"""The command as it is launched: killed with SIGKILL at random moments, by one process and by two under torchrun."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import TEXTS, contents, write_lines
from tiny import save_tiny_base

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "one": [str(BIN / "angle-llm")],
    "two": [
        str(BIN / "torchrun"),
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--no-python",
        str(BIN / "angle-llm"),
    ],
}
LINES = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    save_tiny_base("bert", folder / "base")
    draw = random.Random(0)
    words = [*" ".join(TEXTS).split(), "in", "on", "the", "park", "house", "small", "old", "two", "street"]
    write_lines(folder / "texts.txt", [" ".join(draw.choices(words, k=draw.randint(2, 8))) for _ in range(LINES)])
    return folder


def command(launcher: str, folder: Path, out: str) -> list[str]:
    paths = ["--model", str(folder / "base"), "--input", str(folder / "texts.txt"), "--output", str(folder / out)]
    return [*LAUNCHERS[launcher], "embed", *paths, "--shard-rows", "1000"]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> tuple[float, dict[str, bytes]]:
    """Seconds, and what is left."""
    began = time.monotonic()
    subprocess.run(command("one", folder, "once"), check=True, capture_output=True, env=environment())
    return time.monotonic() - began, contents(folder / "once")


def environment() -> dict[str, str]:
    """One thread whoever launches: the last bits of a product depend on their number."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_two_processes_make_what_one_makes(folder: Path, undisturbed: tuple[float, dict[str, bytes]]) -> None:
    shown = subprocess.run(command("two", folder, "two"), check=True, capture_output=True, text=True, env=environment())
    assert shown.stdout.count(f"{LINES} rows of 32 dimensions") == 1, "of two processes one speaks"
    assert contents(folder / "two") == undisturbed[1]


def kill(process: subprocess.Popen[bytes], *, one_worker: bool) -> None:
    """A launcher with its workers, which are in sessions of their own; or one of these, and the launcher ends the rest."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children if b"angle-llm" in Path(f"/proc/{child}/cmdline").read_bytes()]
    for pid in workers[-1:] if one_worker and workers else [process.pid, *workers]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("launcher", "kills"), [("one", 10), ("two", 4)])
def test_killed_at_random_it_goes_on_to_the_same_bytes(
    launcher: str, kills: int, folder: Path, undisturbed: tuple[float, dict[str, bytes]]
) -> None:
    seconds, due = undisturbed
    draw, struck, unfinished = random.Random(kills), 0, 0
    while struck < kills:
        out = f"{launcher}-{struck}"
        for _ in range(2):  # each folder is struck twice
            process = subprocess.Popen(
                command(launcher, folder, out),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
            )
            try:
                process.wait(draw.uniform(0.4, 1.1) * seconds)
            except subprocess.TimeoutExpired:
                kill(process, one_worker=struck % 2 == 1)
                struck += 1
                begun = (folder / out / "job.json").exists()
                unfinished += begun and not (folder / out / "embeddings.json").exists()
        subprocess.run(command(launcher, folder, out), check=True, capture_output=True, env=environment())
        assert contents(folder / out) == due
    assert unfinished, "no kill came in the middle of the work"
