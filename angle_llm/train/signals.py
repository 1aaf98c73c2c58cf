"""SIGINT and SIGTERM while a run trains: they ask it to stop between two steps, once it has written a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(SystemExit):
    """A signal ended the run, and a checkpoint is written. The exit code is 128 and the signal's number: 130 for SIGINT,
    143 for SIGTERM."""


class StopSignals:
    """While entered, the first signal is noted in `asked`, and SIGINT after it ends the run at once, by KeyboardInterrupt.

    The handlers of before are put back. A signal that is ignored (as `nohup` and `&` do) stays so, and outside the main
    thread, which alone may install handlers, none is.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number)
        # Not print: a signal may come in the middle of one.
        os.write(2, f"\n{self.asked.name}: a checkpoint follows this step; SIGINT (Ctrl-C) now ends at once\n".encode())
