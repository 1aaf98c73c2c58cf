"""From what a language model answered to sentences: every line becomes a sentence, or is left out for a named reason.

Answers come as numbered lists, bullets, quoted lines, with a word before and after (*Sure! Here are …*), in code fences, as
one JSON list, and cut in the middle. `read_answer` is a row of small steps:

    pieces       one JSON list: its texts; else lines, where a list was written on one line that line cut at its numbers
    unmarked     each without its number, bullet, label, quotes, stars
    kinds        `blank`, `fence`, `remark` (talk around the list), `cut` (the last line of an answer that was cut), or none;
                 before all that, what is within <think> … </think> is a `thought`

An answer may be anything, of any length, so no pattern here takes more than linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

LeftOut = Literal["blank", "fence", "remark", "cut", "thought"]

_FENCE = re.compile(r"\s*(```|~~~)")
_THINK, _THOUGHT = "<think>", "</think>"
_MARKER = re.compile(r"\A\s*(?:\(?\d{1,3}[.):]+(?!\d)|\[\d{1,3}\]|[-*•‣–—·+](?=\s)|\(?[a-z]\))\s*", re.IGNORECASE)
_INLINE = re.compile(r"(?:(?<=\s)|\A)\(?(\d{1,2})[.)]\s+")
_LABEL = re.compile(
    r"\A\s*\**(?:(?:output|answer|response|input|sentence|synonym|synonymous|synonymous sentences?|antonym|antonymous sentences?"
    r"|paraphrase|opposite|same meaning|opposite meaning|generated sentences?|option|version)"
    r"(?:\s*\d{1,3})?)(?:\s*\*+)?\s*:\s*\**\s*",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"\s*(?:sure\b|certainly\b|of course\b|okay\b|here (?:is|are)\b|here's\b|the following\b|these (?:are|sentences)\b"
    r"|i hope\b|let me know\b|note\b\s*:|explanation\b|feel free\b|below (?:is|are)\b|this is the output\b)",
    re.IGNORECASE,
)
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_QUOTES = {'"': '"', "“": "”", "'": "'", "‘": "’", "«": "»", "„": "“", "「": "」", "`": "`", "**": "**", "*": "*"}


class Line(NamedTuple):
    """A piece of an answer."""

    text: str
    """The sentence, without marks; of what is left out, the piece as it came."""
    left_out: LeftOut | None


def read_answer(answer: str, *, finished: bool = True) -> list[Line]:
    """Every piece of an answer in its order; an empty one is one blank piece.

    `finished` False: the answer was cut, so its last line is too.
    """
    thoughts, end, said = answer.rpartition(_THOUGHT)
    if not end and answer.lstrip().startswith(_THINK):
        thoughts, said = answer, ""  # it came to no answer
    if thoughts or end:
        lines = [Line(line, "thought") for line in (thoughts + end).splitlines()]
        return lines + (_read_said(said, finished=finished) if said.strip() else [])
    return _read_said(answer, finished=finished)


def _read_said(answer: str, *, finished: bool) -> list[Line]:
    if not answer.strip():
        return [Line(answer, "blank")]
    listed = _json_texts(answer)
    if listed is not None:
        return [Line(text, None if text else "blank") for text in listed]
    pieces = [piece for line in answer.splitlines() for piece in _inline_pieces(line)]
    is_list = any(_MARKER.match(piece) for piece in pieces)
    kinds = [_kind(piece, is_list=is_list) for piece in pieces]
    if not finished:
        last = max((place for place, kind in enumerate(kinds) if kind != "blank"), default=None)
        if last is not None and kinds[last] is None:
            kinds[last] = "cut"
    read = []
    for piece, kind in zip(pieces, kinds, strict=True):
        text = unmarked(piece) if kind is None else piece
        read.append(Line(text, kind) if text else Line(piece, "blank"))
    return read


def unmarked(line: str) -> str:
    """A line without the marks of a list: number or bullet, label, quotes around it, a comma behind them."""
    text = line.strip()
    text = _LABEL.sub("", _MARKER.sub("", text, count=1), count=1).strip()
    return _unquoted(text)


def _unquoted(text: str) -> str:
    """Without quotes, stars or backticks that stand around all of it."""
    while True:
        bare = text.removesuffix(",") if text.endswith(('",', "',", "”,")) else text
        for start, end in _QUOTES.items():
            inner = bare[len(start) : len(bare) - len(end)]
            around = len(bare) > len(start) + len(end) and bare.startswith(start) and bare.endswith(end)
            within = _APOSTROPHE.sub("", inner)
            if around and start not in within and end not in within:
                bare = inner.strip()
                break
        else:
            return bare
        text = bare


def _kind(piece: str, *, is_list: bool) -> LeftOut | None:
    """Why a piece is no sentence. In an answer with a list, what is not of the list is talk around it."""
    if not piece.strip():
        return "blank"
    if _FENCE.match(piece):
        return "fence"
    marked = _MARKER.match(piece) is not None
    bare = unmarked(piece)
    if bare.endswith((":", ":**", "[", "{")) or (not marked and (is_list or _REMARK.match(piece))):
        return "remark"
    return None


def _inline_pieces(line: str) -> Iterator[str]:
    """A line, or its parts where a whole list, counted from 1, stands on it."""
    found = list(_INLINE.finditer(line))
    if len(found) < 2 or [int(match[1]) for match in found] != list(range(1, len(found) + 1)):
        yield line
        return
    starts = [match.start() for match in found]
    before = line[: starts[0]].strip()
    if before and not before.endswith(":"):
        yield line
        return
    if before:
        yield before
    for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:end]


def _json_texts(answer: str) -> list[str] | None:
    """The texts of an answer that is one JSON list of texts, or an object with one such list; bare or in a code fence."""
    bare = answer.strip()
    if _FENCE.match(bare) and bare.endswith(("```", "~~~")):
        bare = bare.partition("\n")[2][:-3].strip()
    if not bare.startswith(("[", "{")):
        return None
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    # An escape may name half a character, which no file can hold, or end a line.
    return [" ".join(item.encode(errors="replace").decode().split()) for item in value]
