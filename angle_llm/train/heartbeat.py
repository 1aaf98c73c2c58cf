"""A process that is killed, stopped or fails takes the run with it, by name, within seconds.

Left alone, the others would wait in a sum for a process that never comes: half an hour on gloo, for ever in some kernels. So
every process says each second that it is alive, in a thread, through the store that the processes met at; one that has
said nothing for a while is dead or stopped, and everybody leaves.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from angle_llm.train.distributed import Processes

EVERY_SECONDS = 1.0
LOST_AFTER_SECONDS = 12.0
"""Silence that counts as death. A process stays silent while something holds Python's interpreter lock."""
_LOST = "was killed or stopped"
EXIT_CODE = 3
"""Of a process that leaves because another is lost."""


_RESCUING = threading.Event()


class Heartbeat:
    """While entered, watches the other processes and is watched by them. An error that leaves it is told to them.

    One thread talks to the store; another, which waits for nothing, looks at the clock: a store whose process is stopped
    answers no call, and ends none.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        if self._processes.count > 1:
            self._store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=LOST_AFTER_SECONDS),
            )
            run = self._processes.from_main(lambda: os.urandom(8).hex())
            self._keys = [f"angle_llm/{run}/{rank}" for rank in range(self._processes.count)]
            self._say("0")
            # Once all are here, everybody's first word is in the store.
            self._homes = self._processes.gather((_machine(), socket.gethostname(), os.getpid()))
            self._words = [""] * self._processes.count
            self._heard = [time.monotonic()] * self._processes.count
            self._answered = time.monotonic()
            for work in (self._talk, self._watch):
                self._threads.append(threading.Thread(target=work, name="heartbeat", daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._threads:
            return
        if isinstance(error, RuntimeError) and _of_a_connection(error):
            self._threads[1].join(LOST_AFTER_SECONDS + 5)  # somebody is lost; it finds out who, and ends this process
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * EVERY_SECONDS)
        failed = error is not None and not isinstance(error, SystemExit)  # that one is agreed on: see `Interrupted`
        with suppress(RuntimeError):  # the store may be gone
            self._say(f"failed: {type(error).__name__}: {error}" if failed else "left")
            if failed:
                time.sleep(2 * EVERY_SECONDS)  # the store may go with this process: the others read it first

    def _say(self, word: str) -> None:
        self._store.set(self._keys[self._processes.rank], word)

    def _talk(self) -> None:
        beat = 0
        while not self._stopped.wait(EVERY_SECONDS):
            beat += 1
            try:
                self._say(str(beat))
                words = [word.decode() for word in self._store.multi_get(self._keys)]
            except RuntimeError:
                return  # the watch notices that there was no answer
            self._answered = time.monotonic()
            for rank, word in enumerate(words):
                if word == "left" or word != self._words[rank]:
                    self._heard[rank] = self._answered
            self._words = words

    def _watch(self) -> None:
        """Never returns if a process is lost."""
        last = time.monotonic()
        while not self._stopped.wait(EVERY_SECONDS / 2):
            now = time.monotonic()
            if now - last > LOST_AFTER_SECONDS / 2:  # this process was stopped for a while: the others may have spoken
                self._answered = now
                self._heard = [now] * len(self._heard)
            last = now
            for rank, word in enumerate(self._words):
                if word.startswith("failed") and not _RESCUING.is_set():
                    self._leave(f"process {rank} {word}")
                if self._answered - self._heard[rank] > LOST_AFTER_SECONDS:
                    self._end(rank)
                    self._leave(
                        f"{self._who(rank)} has not been heard of for {LOST_AFTER_SECONDS:.0f} seconds: it {_LOST}"
                    )
            if now - self._answered > LOST_AFTER_SECONDS:
                self._end(0)
                self._leave(
                    f"the store at which the processes met does not answer: {self._who(0)} or its launcher {_LOST}"
                )

    def _who(self, rank: int) -> str:
        _, host, pid = self._homes[rank]
        return f"process {rank} ({host}, pid {pid})"

    def _end(self, rank: int) -> None:
        """A process that is stopped would hold its launcher up: it is killed, if it is on this machine."""
        machine, _, pid = self._homes[rank]
        if machine == _machine():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _leave(self, why: str) -> None:
        """At once: the main thread may be waiting for a process that will never come."""
        rank = self._processes.rank
        if self._processes.is_main:
            time.sleep(2 * EVERY_SECONDS)  # the store may go with this process: the others read it first
        os.write(2, f"\nerror: process {rank} leaves, for {why}. Go on with --resume auto.\n".encode())
        os._exit(EXIT_CODE)


@contextmanager
def unhurried() -> Iterator[None]:
    """What has failed elsewhere does not end this process within: it has something to save."""
    _RESCUING.set()
    try:
        yield
    finally:
        _RESCUING.clear()


def _machine() -> str:
    """Equal where process ids are those of the same processes; host names may be equal in two containers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _of_a_connection(error: RuntimeError) -> bool:
    """Whether a sum or broadcast failed because another process is gone."""
    return any(word in str(error) for word in ("gloo", "NCCL", "Connection"))
