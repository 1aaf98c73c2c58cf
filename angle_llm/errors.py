"""What every error message of the project leans on: the nearest known word to the one that came."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, came: str, known: Iterable[str]) -> str:
    """A sentence for an unknown name: what came, the nearest known one, and all that are known."""
    names = sorted(known)
    near = get_close_matches(came, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {came!r}.{hint} Known: {', '.join(names)}."


def raised_here(error: BaseException) -> bool:
    """Whether an error was raised by this package's own code, so that its message was written for whoever made the mistake;
    a library's error, passing through, was not."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")
