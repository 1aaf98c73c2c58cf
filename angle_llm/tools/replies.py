"""Parse replies of language models into lines: sentences or questions, and lines that are dropped for a reason.

A reply can be a numbered list, bullets, quoted lines or a JSON list, inside code fences, between remarks, or cut off.
It can have any content and length, so every pattern takes linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"\s*(```|~~~)")
_MARKER = re.compile(r"\A\s*(?:\(?\d{1,2}[.):]+(?!\d)|\[\d{1,3}\]|[-*•‣–—·+](?=\s)|\(?[a-z]\))\s*", re.IGNORECASE)
_INLINE = re.compile(r"(?:(?<=\s)|\A)\(?(\d{1,2})[.)]\s+")
_LABEL = re.compile(
    r"\A\s*\**(?:(?:output|answer|response|input|question|q|query|keywords?|title|sentence"
    r"|synonym|synonymous|synonymous sentences?|antonym|antonymous sentences?"
    r"|paraphrase|opposite|same meaning|opposite meaning|generated sentences?|option|version)"
    r"(?:\s*\d{1,3})?)(?:\s*\*+)?\s*:\s*\**\s*",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"\s*(?:sure\b|certainly\b|of course\b|okay\b|here (?:is|are)\b|here's\b|these (?:are|sentences)\b|i hope\b|let me know\b"
    r"|the following\b[^\n]*:\s*\Z|note\b\s*:|explanation\s*:|feel free\b|below (?:is|are)\b|this is the output\b)",
    re.IGNORECASE,
)
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_QUOTES = {'"': '"', "“": "”", "'": "'", "‘": "’", "«": "»", "„": "“", "「": "」", "`": "`", "**": "**", "*": "*"}


class Line(NamedTuple):
    """A line of an answer of a language model: its text, and the reason if it is dropped."""

    text: str
    """The sentence without list markers and quotes; for a dropped line, the line unchanged."""
    dropped: str | None
    """Reason to drop the line: blank, fence, remark, cut or thought. None for a sentence."""


def read_answer(answer: str, *, finished: bool = True) -> list[Line]:
    """Parse the answer of a language model into lines, which are sentences or dropped lines.

    With `finished=False` the answer was cut off, and its last line is dropped. Lines inside <think> … </think> are dropped
    as thoughts. If the answer contains a list, lines outside the list are dropped as remarks.
    """
    thoughts, end, rest = answer.rpartition("</think>")
    if not end and answer.lstrip().startswith("<think>"):
        thoughts, rest = answer, ""
    lines = [Line(line, "thought") for line in (thoughts + end).splitlines()]
    return lines + (_read(rest, finished) if rest.strip() or not lines else [])


def _read(answer: str, finished: bool) -> list[Line]:
    """Parse an answer without <think> blocks into lines."""
    if not answer.strip():
        return [Line(answer, "blank")]
    if (texts := _json_list(answer)) is not None:
        return [Line(text, None if text else "blank") for text in texts]
    pieces = [piece for line in answer.splitlines() for piece in _inline_pieces(line)]
    is_list = any(_MARKER.match(piece) for piece in pieces)
    dropped = [_why_dropped(piece, is_list) for piece in pieces]
    last = max((index for index, reason in enumerate(dropped) if reason != "blank"), default=None)
    if not finished and last is not None:
        dropped[last] = dropped[last] or "cut"
    lines = (Line(piece if why else _without_marks(piece), why) for piece, why in zip(pieces, dropped, strict=True))
    return [line if line.text.strip() else Line(line.text, "blank") for line in lines]


def _why_dropped(piece: str, is_list: bool) -> str | None:
    """Return the reason to drop a line of an answer, None for a sentence. `is_list`: the answer contains a list."""
    if not piece.strip():
        return "blank"
    if _FENCE.match(piece):
        return "fence"
    outside = _MARKER.match(piece) is None and (is_list or _REMARK.match(piece))
    return "remark" if outside or _without_marks(piece).endswith((":", ":**", "[", "{")) else None


def _without_marks(line: str) -> str:
    """Return a line without list marker, label such as `Output:`, and quotes or stars around the whole line."""
    return _without_quotes(_LABEL.sub("", _MARKER.sub("", line.strip(), count=1), count=1).strip())


def _without_quotes(text: str) -> str:
    """Return a text without quotes or stars around the whole text; quotes that also occur inside are kept."""
    text = text.removesuffix(",") if text.endswith(('",', "',", "”,")) else text
    for start, end in _QUOTES.items():
        inner = text[len(start) : len(text) - len(end)]
        letters = _APOSTROPHE.sub("", inner)
        if inner and text.startswith(start) and text.endswith(end) and start not in letters and end not in letters:
            return _without_quotes(inner.strip())
    return text


def _inline_pieces(line: str) -> Iterator[str]:
    """Yield the items of a line that is a list numbered from 1, such as `1. … 2. …`; yield any other line unchanged."""
    markers = list(_INLINE.finditer(line))
    numbers = [int(marker[1]) for marker in markers]
    starts = [marker.start() for marker in markers]
    before = line[: starts[0]].strip() if starts else ""
    if len(starts) < 2 or numbers != list(range(1, len(starts) + 1)) or (before and not before.endswith(":")):
        yield line
        return
    if before:
        yield before
    yield from (line[start:end] for start, end in zip(starts, [*starts[1:], len(line)], strict=True))


def _json_list(answer: str) -> list[str] | None:
    """Return the texts of an answer that is a JSON list of strings, or an object whose only value is one; else None."""
    bare = answer.strip()
    if _FENCE.match(bare) and bare.endswith(("```", "~~~")):
        bare = bare.partition("\n")[2][:-3].strip()
    try:
        value = json.loads(bare) if bare.startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    # An escape can be a lone surrogate, which UTF-8 cannot encode, or a line end.
    return [" ".join(item.encode(errors="replace").decode().split()) for item in value]
