"""Kill processes at a chosen write; check that files are flushed to disk before they are renamed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WRITES: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"),
]  # fmt: skip
"""Calls that put bytes on disk, name them or remove them."""


def fork(body: Callable[[], object], log: Path) -> int:
    """Start the body in a new process, whose output goes to a file; return the process id."""
    process = os.fork()
    if process == 0:
        gc.freeze()  # a garbage collection would copy the pages of all objects
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            body()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def wait(process: int) -> int:
    """Return the exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def in_a_fork(body: Callable[[], object], log: Path) -> int:
    """Run the body in a new process, with output to a file; return its exit code, negative for a signal."""
    return wait(fork(body, log))


def kill_before_write(number: int) -> None:
    """Make this process kill itself with SIGKILL before its `number`-th write from now, counted from 1."""
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

    for owner, name in WRITES:
        watch(owner, name)


def check_resumes_after_any_kill(work: Callable[[Path], object], folder: Path, step: int = 1) -> int:
    """Kill `work(place)` before its every `step`-th write, run it again, and compare all files, hidden ones too, with those of
    an undisturbed run. Returns the number of kills. Nothing is flushed: the file system keeps what a killed process wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        return _check_resumes(work, folder, step)


def _check_resumes(work: Callable[[Path], object], folder: Path, step: int) -> int:
    log, due_in = folder / "log", folder / "undisturbed"
    due_in.mkdir()
    work(due_in)
    due, number = contents(due_in), 0
    while True:  # until there are fewer writes
        number += step
        place = folder / f"killed-{number}"
        place.mkdir()
        code = in_a_fork(lambda number=number, place=place: (kill_before_write(number), work(place)), log)  # type: ignore[misc]
        if code == 0:
            return number // step - 1
        assert code == -signal.SIGKILL, log.read_text()
        assert in_a_fork(lambda place=place: work(place), log) == 0, log.read_text()  # type: ignore[misc]
        assert contents(place) == due, f"killed before write {number}"


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file in a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def flushed_before_renamed(is_record: Callable[[Path], bool]) -> Iterator[list[str]]:
    """Yield a list of faults, filled meanwhile: a file renamed before it was flushed, a folder whose new names were not flushed
    at the end, or not before a record (manifest, index) was renamed into place."""
    faults: list[str] = []
    flushed: set[tuple[int, int]] = set()
    renamed_in: dict[int, Path] = {}
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        flushed.add((status.st_ino, status.st_mtime_ns))
        renamed_in.pop(status.st_ino, None)
        real_fsync(descriptor)

    def replace(path: Path, target: Any) -> Any:
        for file in [path, *path.rglob("*")]:
            status = file.stat()
            if file.is_file() and (status.st_ino, status.st_mtime_ns) not in flushed:
                faults.append(f"{file} was not flushed before {path.name} was renamed")
        if is_record(Path(target)) and renamed_in:
            faults.append(f"{target} was renamed before the files that it lists")
        renamed_in[Path(target).parent.stat().st_ino] = Path(target).parent
        return real_replace(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "replace", replace)
        yield faults
    faults.extend(f"the names in {folder} were not flushed" for folder in renamed_in.values())
