"""Runs a program and ends it when it takes more memory than it may, before the machine runs out."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
_INTERVAL_S = 0.1
_SPARE = 0.5 * GIB


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    code: int
    """Its exit code; negative: ended by that signal."""
    over_limit: bool
    """Whether it was ended here for its memory."""
    peak_bytes: int
    """The most resident memory that was seen."""
    limit_bytes: int
    other_cores: float | None
    """How many cores other programs kept busy meanwhile, on average; None where the system does not say."""


def run_watched(command: Sequence[str], *, env: Mapping[str, str], limit_bytes: int, log: Path) -> Outcome:
    """Runs a program to its end, with its output in a file; kills it by its own id when it exceeds the limit.

    The limit is lower where the machine has less to give: memory nobody has is not promised, and the kernel's own
    choice of whom to end could fall on another program.
    """
    available = available_bytes()
    if available is not None:
        limit_bytes = int(min(limit_bytes, available - _SPARE))
    peak, over = 0, False
    started, busy_before, own_before = time.monotonic(), busy_seconds(), _children_seconds()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    peak = max(peak, resident_bytes(process.pid))
                if peak > limit_bytes:
                    over = True
                    process.kill()
                    code = process.wait()
                    break
        finally:
            if process.poll() is None:  # interrupted here: leave nothing running
                process.kill()
                process.wait()
    others = None
    if busy_before is not None and (busy_after := busy_seconds()) is not None:
        others = busy_after - busy_before - (_children_seconds() - own_before)
        others = max(others / max(time.monotonic() - started, 0.1), 0.0)
    return Outcome(code, over, peak, limit_bytes, others)


def busy_seconds() -> float | None:
    """Processor time of all programs since the machine started; None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _idle, _waiting, interrupts, soft = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    """Processor time of the programs that were run and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def resident_bytes(pid: int) -> int:
    """Memory a process has resident; 0 when it has just ended."""
    if Path("/proc/self/statm").is_file():
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(told.stdout.strip() or 0) * 1024


def available_bytes() -> int | None:
    """Memory that can be given out without swapping; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
