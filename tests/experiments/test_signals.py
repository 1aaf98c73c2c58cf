"""A signal to a grid reaches the training run below it, which is waited for."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from angle_llm.experiments.training import run_to_its_end

ABOVE = "import sys; from angle_llm.experiments.training import run_to_its_end; sys.exit(run_to_its_end(sys.argv[1:]))"
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:]).wait())"  # as accelerate's for one process
BELOW = """
import os, signal, sys, time
from pathlib import Path

asked = []

def ask(number, frame):  # as a training run does
    if asked and number == signal.SIGINT:
        Path("at_once").touch()
        os._exit(1)
    asked.append(number)

signal.signal(signal.SIGTERM, ask)
signal.signal(signal.SIGINT, ask)
Path("started").touch()
for _ in range(6000):
    if asked:
        break
    time.sleep(0.01)
Path("asked").touch()
time.sleep(float(sys.argv[1]))
Path("checkpoint").touch()
sys.exit(128 + asked[0])
"""
A_WHILE = "1"  # more than the quarter of a second that subprocess.run leaves it


def wait_for(path: Path, above: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert above.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hear() -> None:
    """As in a terminal, though the tests be started where signals are ignored, as `nohup` and `&` do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(folder: Path, *between: str, seconds: str = A_WHILE) -> subprocess.Popen[bytes]:
    (folder / "below.py").write_text(BELOW, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-c", ABOVE, *between, sys.executable, "below.py", seconds],
        cwd=folder,
        start_new_session=True,  # a process group, which a terminal signals as a whole
        preexec_fn=hear,
    )


def end(above: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(above.pid, signal.SIGKILL)
    above.wait()


@pytest.mark.parametrize(
    ("number", "to_all", "launcher"),
    [
        (signal.SIGTERM, False, ()),
        (signal.SIGTERM, False, (sys.executable, "-c", LAUNCHER)),
        (signal.SIGHUP, False, ()),
        (signal.SIGINT, True, (sys.executable, "-c", LAUNCHER)),
    ],
    ids=["SIGTERM", "SIGTERM, launched", "SIGHUP", "Ctrl-C, launched"],
)
def test_a_signal_is_passed_on_and_the_checkpoint_waited_for(
    number: signal.Signals, to_all: bool, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    above = start(tmp_path, *launcher)
    try:
        wait_for(tmp_path / "started", above)
        (os.killpg if to_all else os.kill)(above.pid, number)
        assert above.wait(timeout=30) == 128 + number
    finally:
        end(above)
    assert (tmp_path / "checkpoint").exists(), "the program above did not wait"
    assert not (tmp_path / "at_once").exists()


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    above = start(tmp_path, seconds="60")
    try:
        wait_for(tmp_path / "started", above)
        os.kill(above.pid, signal.SIGINT)
        wait_for(tmp_path / "asked", above)
        os.kill(above.pid, signal.SIGINT)
        assert above.wait(timeout=30) == 128 + signal.SIGINT
    finally:
        end(above)
    assert (tmp_path / "at_once").exists()


def test_the_exit_code_comes_back_and_the_handlers_are_put_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert run_to_its_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert [signal.getsignal(number) for number in numbers] == before
