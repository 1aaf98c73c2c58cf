"""Kills a tiny run with SIGKILL at seeded moments, lets it go on, and compares its end with that of an undisturbed run.

    python tests/train/crashes.py FOLDER SEED TIMED INSIDE [PROCESSES]

TIMED kills come by the clock (to all processes of the run at once), INSIDE ones at a call in the middle of a save, where
the main process kills itself. A run is killed up to twice. Processes are forked after the imports, which take seconds, and
before any work.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import torch
import torch.utils.tensorboard  # imported here, once
from runs import outcome, run_settings

import angle_llm.train.checkpoint
from angle_llm.config import TrainSettings
from angle_llm.run import fine_tune
from angle_llm.train import process_loss

Arm = Callable[[], object]


def in_processes(count: int, work: Arm, log: Path, seconds: float | None = None, arm: Arm | None = None) -> int:
    """Works in forks, killed after so many seconds, or the main one `arm`ed to kill itself; the main one's exit code."""

    def armed(rank: int) -> None:
        if arm is not None and rank == 0:
            arm()
        work()

    pids = forked.start(count, armed, log)
    if seconds is not None:
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return forked.wait(pids)[0]


def watch_saves(at_call: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Every call that a save is made of goes through `at_call`."""

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: at_call(name, lambda: real(*arguments, **named))

    for owner, name in [
        (os, "fsync"),
        (os, "replace"),
        (os, "rename"),
        (os, "unlink"),
        (shutil, "rmtree"),
        (tempfile, "mkdtemp"),
        (Path, "write_bytes"),
        (Path, "write_text"),
    ]:
        setattr(owner, name, watched(name, getattr(owner, name)))
    state: Any = angle_llm.train.checkpoint
    real_save = state.save_file

    def save_file(tensors: Any, path: Path) -> None:
        def half() -> None:
            real_save(tensors, path)
            size = path.stat().st_size
            os.truncate(path, size // 2)
            at_call("half a file", lambda: None)
            real_save(tensors, path)

        at_call("save_file", half)

    state.save_file = save_file


def kill_at(number: int, *, after: bool) -> Arm:
    """At the call with this number, before or after what it does."""
    calls = itertools.count()

    def at_call(name: str, call: Callable[[], Any]) -> Any:
        mine = next(calls) == number
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call()
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return lambda: watch_saves(at_call)


def count_saves(settings: TrainSettings, counted: Path) -> None:
    """An undisturbed run whose main process notes how many calls its saves make."""
    names: list[str] = []

    def at_call(name: str, call: Callable[[], Any]) -> Any:
        names.append(name)
        return call()

    watch_saves(at_call)
    fine_tune(settings)
    if os.environ["RANK"] == "0":
        counted.write_bytes(str(len(names)).encode())


def main(folder: Path, seed: int, timed: int, inside: int, count: int = 1) -> None:
    torch.set_num_threads(1)
    process_loss.LOST_SECONDS = 4  # nothing here holds a process up for longer
    settings, log = run_settings(folder), folder / "log"

    def said() -> str:
        return "\n".join(path.read_text()[-3000:] for path in folder.glob("log.*"))

    started = time.perf_counter()
    assert in_processes(count, lambda: fine_tune(settings), log) == 0, said()
    seconds = time.perf_counter() - started
    expected = outcome(folder / "undisturbed")
    counting = replace(settings, run_dir=str(folder / "counted"))
    assert in_processes(count, lambda: count_saves(counting, folder / "calls"), log) == 0, said()
    assert outcome(folder / "counted") == expected
    calls = int((folder / "calls").read_text())

    draw, runs = random.Random(seed), 0
    left = [True] * timed + [False] * inside
    draw.shuffle(left)

    def killed_run(mine: TrainSettings) -> None:
        """Two kills of those that are left, and on to the end."""
        for by_clock in left[:2]:
            arm = None if by_clock else kill_at(draw.randrange(calls), after=draw.random() < 0.5)
            moment = draw.uniform(0.1, seconds) if by_clock else None
            code = in_processes(count, lambda: fine_tune(mine), log, moment, arm)
            if code == 0:  # it was done before its moment
                break
            assert code == -signal.SIGKILL, f"{mine.run_dir}: exit code {code}\n{said()}"
            left.remove(by_clock)
        assert in_processes(count, lambda: fine_tune(mine), log) == 0, f"{mine.run_dir}\n{said()}"
        came = outcome(mine.run_path)
        for what, due in expected.items():
            assert came[what] == due, f"{mine.run_dir}: {what} differs\n{came[what]}\n{due}"

    while left:
        runs += 1
        killed_run(replace(settings, run_dir=str(folder / f"killed{runs}")))
    print(
        f"{timed + inside} kills of {runs} runs in {count} processes; an undisturbed one takes {seconds:.1f} s, {calls} calls "
        "in its saves"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:]))
