"""End every process of a run, with a message that names the rank, when one of them is killed, stopped or fails.

torchrun ends the processes of its own machine when one exits, and gloo fails on a closed connection. Neither detects a
stopped process or names the lost rank on another machine, and NCCL blocks. So each process increments a counter in the
TCPStore of the launcher every second; if the counter does not change for `LOST_SECONDS`, the process is lost. For a
process of the same machine that has ended, `ENDED_SECONDS` suffice. A process that fails writes its error there, and
the others end after `GRACE_SECONDS`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from angle_llm.train.distributed import Processes

INTERVAL = 1.0
"""Seconds between two increments."""
LOST_SECONDS = 12
"""A process also increments nothing while something holds Python's interpreter lock."""
ENDED_SECONDS = 3
"""Seconds without an increment after which an ended process of this machine is lost; until then its last counter or
error is read."""
GRACE_SECONDS = 3
"""Time for a process to end by itself, with its own message, after another one has failed."""
EXIT_CODE = 3
"""Exit code of a process that ends because another one is lost."""
LEFT, FAILED = "left", "failed"
"""Counters of a process that has left the run, and of one that fails: FAILED and its error."""
exit_lock = threading.Lock()
"""While it is held, this process does not end because another one is lost: it is saving something."""


class ProcessWatch:
    """Context manager for the part of a run in which processes communicate.

    One thread calls the store, and a second one counts: if the process of the store is stopped, a call blocks forever,
    whatever its timeout. Missing increments are counted in intervals of the second thread, so that a process that was
    itself suspended does not report the others as lost.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._stopped = threading.Event()
        self._last = LEFT
        self._handles: dict[int, int] = {}
        """Processes of this machine; unlike a process id, a handle never refers to a later process."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._watch)]

    def __enter__(self) -> ProcessWatch:
        if self._processes.world_size > 1:
            run = self._processes.from_main(lambda: os.urandom(8).hex())  # a restarted run may use the same store
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            limit = timedelta(seconds=LOST_SECONDS)
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
            self._store = PrefixStore(f"angle_llm/{run}", store)
            self._ranks = [str(rank) for rank in range(self._processes.world_size)]
            self._store.set(self._ranks[self._processes.rank], "0")
            self._places = self._processes.gather((_machine(), socket.gethostname(), os.getpid()))
            for rank, (machine, _, pid) in enumerate(self._places):
                if machine == _machine():
                    with suppress(OSError, AttributeError):  # Linux only
                        self._handles[rank] = os.pidfd_open(pid)
            self._counters = self._store.multi_get(self._ranks)  # every rank has set its counter before the gather
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes.world_size == 1:
            return
        if isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection")):
            # `_watch` names the rank and ends this process; on a busy machine it takes longer than `LOST_SECONDS`.
            self._threads[1].join(3 * LOST_SECONDS)
        left = error is None or isinstance(error, SystemExit)  # all ranks agree on it
        self._last = LEFT if left else f"{FAILED}: {type(error).__name__}: {error}"
        self._stopped.set()
        self._threads[0].join(LOST_SECONDS if left else 2 * INTERVAL)  # without LEFT, others take this process as lost
        if self._processes.is_main and not left:
            time.sleep(2 * INTERVAL)  # the store may end with this process: the others read it first
        for handle in self._handles.values():
            os.close(handle)

    def _talk(self) -> None:
        count = 0
        with suppress(RuntimeError):  # no answer: `_watch` detects it
            while not self._stopped.wait(INTERVAL):
                count += 1
                self._store.set(self._ranks[self._processes.rank], str(count))
                self._counters = self._store.multi_get(self._ranks)
            self._store.set(self._ranks[self._processes.rank], self._last)

    def _watch(self) -> None:
        last, unanswered, silent = self._counters, 0, [0] * self._processes.world_size
        while not self._stopped.wait(INTERVAL):
            counters = self._counters
            for rank, counter in enumerate(counters):
                if counter.startswith(FAILED.encode()):
                    if not self._stopped.wait(GRACE_SECONDS):  # else this process fails too, with an error of its own
                        self._exit(rank, counter.decode(errors="replace"))
                    return
            unanswered = unanswered + 1 if counters is last else 0
            if unanswered * INTERVAL >= LOST_SECONDS:  # rank 0 may have left the run, and the store with it
                self._exit(0, "or its launcher was killed or stopped, or has failed")
            if counters is not last:
                for rank, counter in enumerate(counters):
                    silent[rank] = silent[rank] + 1 if counter == last[rank] != LEFT.encode() else 0
                    if silent[rank] * INTERVAL >= self._limit(rank):
                        self._exit(rank, "was killed or stopped")
                last = counters

    def _limit(self, rank: int) -> float:
        """Return the seconds without an increment after which a process is lost."""
        if rank not in self._handles:
            return LOST_SECONDS
        ended = select.poll()
        ended.register(self._handles[rank], select.POLLIN)
        return ENDED_SECONDS if ended.poll(0) else LOST_SECONDS

    def _exit(self, rank: int, what: str) -> None:
        machine, host, pid = self._places[rank]
        if not what.startswith(FAILED):
            with suppress(OSError):  # if it is only stopped, its launcher would wait for it
                if rank in self._handles:
                    signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
                elif machine == _machine():  # no handles, as on macOS
                    os.kill(pid, signal.SIGKILL)
        if self._processes.is_main:
            time.sleep(2 * INTERVAL)  # as above
        lost = f"rank {rank} (host {host}, process {pid}) {what}"
        message = f"rank {self._processes.rank} exits: {lost}. Resume with --resume auto."
        with exit_lock:
            if self._stopped.wait(INTERVAL):  # it has failed itself meanwhile
                return
            os.write(2, f"\nerror: {message}\n".encode())
            os._exit(EXIT_CODE)  # the main thread may be waiting in a collective


def _machine() -> str:
    """Return an id of the process namespace: two containers can have equal host names."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()
