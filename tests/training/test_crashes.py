"""A run that is killed with SIGKILL, wherever, ends as one that was not, once it goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("crashes.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the driver forks")
@pytest.mark.parametrize(
    ("seed", "timed", "inside"),
    [(1, 2, 4), pytest.param(2, 40, 20, marks=pytest.mark.slow)],
    ids=["six moments", "sixty moments"],
)
def test_killed_runs_end_alike(seed: int, timed: int, inside: int, tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(seed), str(timed), str(inside)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(DRIVER), *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{timed + inside} kills of " in done.stdout
