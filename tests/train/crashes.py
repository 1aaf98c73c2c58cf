"""Kill a tiny run with SIGKILL at seeded moments, resume it, and compare the result with that of an undisturbed run.

    python tests/train/crashes.py FOLDER SEED TIMED WRITES [PROCESSES]

TIMED kills happen after a random time, to all processes of the run at once; WRITES kills before a random write of the main
process. A run is killed up to twice. Processes are forked after the imports, which take seconds, and before any work.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import kills
import torch
import torch.utils.tensorboard  # once, before the forks
from runs import outcome, run_settings

from angle_llm import fine_tune
from angle_llm.settings.train import TrainSettings
from angle_llm.train import distributed as process_loss


def in_processes(
    count: int, work: Callable[[], object], log: Path, seconds: float | None = None, write: int | None = None
) -> int:
    """Exit code of the main process of a run; all are killed after `seconds`, or the main one before its write `write`."""

    def run(rank: int) -> None:
        if write is not None and rank == 0:
            kills.kill_before_write(write)
        work()

    pids = forked.start(count, run, log)
    if seconds is not None:
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    codes = [kills.wait(pid) for pid in pids]
    return codes[0]


def main(folder: Path, seed: int, timed: int, writes: int, count: int = 1) -> None:
    torch.set_num_threads(1)
    process_loss.LOST_SECONDS = 4  # no process here is busy for longer
    settings, log = run_settings(folder), folder / "log"

    def output() -> str:
        return "\n".join(path.read_text()[-3000:] for path in folder.glob("log.*"))

    started = time.perf_counter()
    assert in_processes(count, lambda: fine_tune(settings), log) == 0, output()
    seconds = time.perf_counter() - started
    expected = outcome(settings.run_path)
    draw, runs, last_write = random.Random(seed), 0, 500
    left = [True] * timed + [False] * writes
    draw.shuffle(left)

    def killed_run(mine: TrainSettings) -> None:
        nonlocal last_write
        for by_time in left[:2]:
            moment, write = (draw.uniform(0.1, seconds), None) if by_time else (None, draw.randrange(1, last_write))
            code = in_processes(count, lambda: fine_tune(mine), log, moment, write)
            if code == 0:  # it finished before the kill
                last_write = min(last_write, write or last_write)
                break
            assert code == -signal.SIGKILL, f"{mine.run_dir}: exit code {code}\n{output()}"
            left.remove(by_time)
        assert in_processes(count, lambda: fine_tune(mine), log) == 0, f"{mine.run_dir}\n{output()}"
        got = outcome(mine.run_path)
        for what, due in expected.items():
            assert got[what] == due, f"{mine.run_dir}: {what} differs\n{got[what]}\n{due}"

    while left:
        runs += 1
        killed_run(replace(settings, run_dir=str(folder / f"killed{runs}")))
    print(
        f"{timed + writes} kills of {runs} runs in {count} processes, up to write {last_write}; {seconds:.1f} s a run"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:]))
