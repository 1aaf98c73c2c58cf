"""A run that is killed with SIGKILL, wherever, ends as one that was not, once it goes on."""

import os
from pathlib import Path

import pytest
from programs import run

DRIVER = Path(__file__).with_name("crashes.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the driver forks")
@pytest.mark.parametrize(
    ("seed", "timed", "inside", "processes"),
    [
        (1, 2, 4, 1),
        (3, 1, 1, 2),
        pytest.param(2, 40, 20, 1, marks=pytest.mark.slow),
        pytest.param(4, 6, 4, 2, marks=pytest.mark.slow),
    ],
    ids=["six moments", "two moments of two processes", "sixty moments", "ten moments of two processes"],
)
def test_killed_runs_end_alike(seed: int, timed: int, inside: int, processes: int, tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(seed), str(timed), str(inside), str(processes)]
    done = run("python", DRIVER, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{timed + inside} kills of " in done.stdout
