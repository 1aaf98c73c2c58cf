"""A signal to a grid reaches the training run below it, which is waited for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angle_llm.experiments.training import run_to_its_end

ABOVE = "import sys; from angle_llm.experiments.training import run_to_its_end; sys.exit(run_to_its_end(sys.argv[1:]))"
BELOW = """
import signal, sys, time
from pathlib import Path

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
Path("started").touch()
while not asked:
    time.sleep(0.01)
time.sleep(1)  # more than the quarter of a second that subprocess.run leaves it
Path("checkpoint").touch()
sys.exit(128 + asked[0])
"""


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)],
    ids=["SIGTERM", "SIGINT", "Ctrl-C"],
)
def test_a_signal_is_passed_on_and_the_checkpoint_waited_for(
    number: signal.Signals, to_all: bool, tmp_path: Path
) -> None:
    (tmp_path / "below.py").write_text(BELOW, encoding="utf-8")
    above = subprocess.Popen(
        [sys.executable, "-c", ABOVE, sys.executable, "below.py"],
        cwd=tmp_path,
        start_new_session=True,  # a process group, which a terminal signals as a whole
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # heard, even where the tests ignore it
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert above.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (os.killpg if to_all else os.kill)(above.pid, number)
        assert above.wait(timeout=30) == 128 + number
    finally:
        if above.poll() is None:
            os.killpg(above.pid, signal.SIGKILL)
            above.wait()
    assert (tmp_path / "checkpoint").exists(), "the program above did not wait"


def test_the_exit_code_comes_back_and_the_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run_to_its_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
