"""How far a long command is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

LINE_EVERY_SECONDS = 60
Piece = TypeVar("Piece")


def say(line: str) -> None:
    """Prints a line, beside a bar if one is being drawn."""
    from tqdm import tqdm

    tqdm.write(line)


class ProgressBar:
    """A bar where there is a terminal or a notebook; where there is none (a log file, a cluster's queue), a line after the first
    piece of work, one a minute, and one after the last. It goes to stderr.

    Args:
        name: what is being done.
        total: how many pieces there are.
        unit: what a piece is called.
        done: how many were there before; they count as done, not for the rate.
        speaks: whether this process tells anything; of several, the main one does.
        passing: of a part of something larger the bar goes when it is done, and a log hears of it only if it takes minutes.
    """

    def __init__(
        self, name: str, total: int, unit: str, *, done: int = 0, speaks: bool = True, passing: bool = False
    ) -> None:
        self._speaks = speaks and sys.stderr is not None and not sys.stderr.closed
        self.drawn = self._speaks and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        """Whether there is a bar."""
        self._name, self._total, self._unit = name, total, unit
        self._done = self._now = done
        self._note = ""
        # Not on top: tqdm reads TQDM_DISABLE when it is imported, and the program sets it for the libraries' bars.
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=unit,
            smoothing=0.1,
            disable=not self.drawn,
            leave=not passing,
        )
        self._passing = passing
        self._began = time.monotonic()
        self._told_at, self._told = self._began - (0 if passing else LINE_EVERY_SECONDS), (done, "")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The last word."""
        if not self._passing:
            self._tell()
        self._bar.close()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Time that does not count for the rate."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began
        if self.drawn:
            self._bar.unpause()

    def over(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces themselves, each counted when the next is asked for."""
        with self:
            for piece in pieces:
                yield piece
                self.add()

    def add(self, pieces: int = 1, note: str = "") -> None:
        """So many more are done. `note` stands behind the rate."""
        self._now += pieces
        self._note = note
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(pieces)
        if time.monotonic() - self._told_at >= LINE_EVERY_SECONDS:
            self._tell()

    def _tell(self) -> None:
        if not self._speaks or self.drawn or self._told == (self._now, self._note):
            return
        self._told_at, self._told = time.monotonic(), (self._now, self._note)
        line = self._bar.format_meter(
            self._now,
            self._total,
            self._told_at - self._began,
            ncols=0,
            prefix=self._name,
            unit=self._unit,
            postfix=self._note,
            initial=self._done,
        )
        with suppress(OSError, ValueError):  # nobody may be reading any more, which is no reason to stop
            print(line, file=sys.stderr, flush=True)
