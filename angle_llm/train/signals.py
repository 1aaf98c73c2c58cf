"""SIGINT and SIGTERM during training: the run stops between two steps, after it has written a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """A signal ended the run after a checkpoint. The exit code is 130 for SIGINT and 143 for SIGTERM."""


class StopSignals:
    """Context manager that records a signal in `received`; SIGINT after one raises KeyboardInterrupt at once.

    The previous handlers are restored at the end. A signal that is ignored (`nohup`, `&`) stays ignored. Only the main
    thread can install handlers; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        message = f"\n{self.received.name}: writing a checkpoint after this step; Ctrl-C again stops at once\n"
        with suppress(OSError):  # the same Ctrl-C may have ended the program that reads stderr
            os.write(2, message.encode())  # print is not safe in a signal handler
