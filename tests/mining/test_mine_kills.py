"""Killed with SIGKILL before any write it makes, the command goes on to the same bytes."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs_for_mining import many_pairs, write_pairs
from tiny import save_tiny_base

from angle_llm.mining.command import mine_main
from angle_llm.mining.settings import MineSettings

PAIRS = many_pairs(30)


def in_a_fork(body: Callable[[], object], log: Path) -> int:
    """Exit code of the body in a process of its own; negative for a signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_before(number: int) -> None:
    """From now on the process kills itself before the call with this number, from 1, of those that put bytes on disk, name
    them or remove them."""
    calls = 0

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(owner, name, watched)

    for owner, name in [(os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "replace"), (Path, "unlink")]:
        watch(owner, name)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_any_of_its_writes_it_goes_on_to_the_same_bytes(step: int, tmp_path: Path) -> None:
    base, pairs = save_tiny_base("bert", tmp_path / "base"), write_pairs(tmp_path / "pairs.jsonl", PAIRS)

    def run(out: Path, block_pairs: int = 8) -> None:
        mine_main(
            MineSettings(
                str(pairs),
                str(base),
                out / "t.jsonl",
                ranks=(2, 20),
                negatives=2,
                relative_margin=None,
                shard_rows=16,
                block_pairs=block_pairs,
            )
        )

    def struck(out: Path, number: int) -> None:
        killed_before(number)
        run(out)

    (tmp_path / "once").mkdir()
    run(tmp_path / "once")
    due = contents(tmp_path / "once")
    assert set(due) == {"t.jsonl", "t.report.json"}
    assert due["t.jsonl"].count(b"\n") == 2 * len(PAIRS)

    unfinished, number, log = 0, 0, tmp_path / "log"
    while True:  # until a number is reached that is larger than the number of writes
        number += step
        out = tmp_path / f"struck-{number}"
        out.mkdir()
        code = in_a_fork(lambda out=out, number=number: struck(out, number), log)
        if code == 0:
            break
        assert code == -signal.SIGKILL, log.read_text()
        unfinished += not (out / "t.jsonl").exists()
        block = 8 if number % 2 else 5
        assert in_a_fork(lambda out=out, block=block: run(out, block), log) == 0, log.read_text()
        assert contents(out) == due, f"killed before write {number}"
    assert unfinished >= 30 / step, "too few kills came in the middle of the work"


@pytest.mark.parametrize("number", [9])
def test_what_was_begun_with_other_settings_is_refused(number: int, tmp_path: Path) -> None:
    base, pairs = save_tiny_base("bert", tmp_path / "base"), write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    usual: dict[str, Any] = {"pairs": str(pairs), "model": str(base), "out": tmp_path / "t.jsonl", "shard_rows": 16}

    def begin() -> None:
        killed_before(number)
        mine_main(MineSettings(**usual, ranks=(2, 20)))

    assert in_a_fork(begin, tmp_path / "log") == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"was begun with settings ranks \[2, 20\], not \[2, 19\]"):
        mine_main(MineSettings(**usual, ranks=(2, 19)))
