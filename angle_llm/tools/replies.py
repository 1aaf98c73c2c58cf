"""Parse replies of language models into lines: sentences or questions, and lines that are dropped for a reason.

A reply has a sentence or question per line: plain, numbered, with bullets or quoted; inside code fences, between remarks,
or cut off; or it is a JSON list. It can have any content and length, so every pattern takes linear time.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_FENCE = re.compile(r"\s*(```|~~~)")
_MARKER = re.compile(
    r"\A[\s\u200e\u200f]*(?:"
    r"[(（]?\d{1,2}\\?[.):、．）：]+(?!\d|x\b)|1?\d\s+[-–—]\s+(?![\d\s])"
    r"|q(?:uestion)? ?\d{1,2}[.)](?!\d)|\*\*(?:q(?:uestion)? ?)?\d{1,2}[.):]\*\*"
    r"|[①-⑳](?![和与到]|[、,]\s*[①-⑳])[、．.]?|[一二三四五六七八九十]{1,2}、(?![一二三四五六七八九十])"
    r"|\[\d{1,3}\]|[-*•‣–—·+](?=\s)|\(?[a-z]\))\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\A\s*#{1,6}\s+")
_TITLE = re.compile(r"(?:questions?|query|queries|q)\s*\d{0,3}[.:]?", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<=\s)|\A)\(?(\d{1,2})[.)]\s+")
_LABEL = re.compile(
    r"\A\s*\**(?:(?:output|answer|response|input|question|q|query|keywords?|title|sentence"
    r"|synonym|synonymous|synonymous sentences?|antonym|antonymous sentences?"
    r"|paraphrase|opposite|same meaning|opposite meaning|generated sentences?|option|version"
    r"|问题|問題|问|問|質問|クエリ|질문)"
    r"(?:\s*\d{1,3})?)(?:\s*\*+)?\s*[:：]\s*\**\s*",
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
    """Parse the answer of a language model into lines, at least one, which are sentences or dropped lines.

    With `finished=False` the answer was cut off, and its last line is dropped. Lines inside <think> … </think> are dropped
    as thoughts. If the answer contains a list, lines outside the list are dropped as remarks. Lines with two numbered items,
    and headings without a question, are also dropped as remarks. If the answer is a JSON list, each text is a line.
    """
    thoughts, end, rest = answer.rpartition("</think>")
    if not end and answer.lstrip().startswith("<think>"):
        thoughts, rest = answer, ""
    lines = [Line(line, "thought") for line in (thoughts + end).splitlines()]
    if (items := _json_list(rest)) is not None:
        lines += [Line(item, None if item else "blank") for item in items]
        return lines or [Line(answer, "blank")]
    texts = rest.splitlines()
    is_list = any(map(_is_item, texts))
    levels = {(_HEADING.match(text) or [None])[0] for text in texts if text.strip()}
    are_headings = len(levels) == 1 and None not in levels
    dropped = [_why_dropped(text, is_list, are_headings) for text in texts]
    last = max((index for index, reason in enumerate(dropped) if reason != "blank"), default=None)
    if not finished and last is not None:
        dropped[last] = dropped[last] or "cut"
    lines += [
        Line(text if reason else _without_marks(text), reason) for text, reason in zip(texts, dropped, strict=True)
    ]
    return lines or [Line(answer, "blank")]


def _why_dropped(line: str, is_list: bool, are_headings: bool) -> str | None:
    """Return the reason to drop a line of an answer, None for a sentence.

    `is_list`: the answer contains a list. `are_headings`: all its lines are headings of one level.
    """
    if _FENCE.match(line):
        return "fence"
    sentence = _without_marks(line)
    if not sentence:
        return "blank"
    is_outside = not _is_item(line) and (is_list or _REMARK.match(line))
    is_sentence = are_headings or _is_item(line) or sentence.endswith(("?", "？"))
    is_heading = _TITLE.fullmatch(sentence) or (_HEADING.match(line) and not is_sentence)
    numbers = [int(number) for number in _NUMBER.findall(line)]
    has_two_items = len(numbers) > 1 and numbers[1] == numbers[0] + 1
    is_json = re.match(r'\[?\{\s*"\w+"\s*:|"\w+":\s*["\[{\d]', sentence) or not sentence.strip("[]{}, ")
    is_remark = (
        is_outside or is_heading or has_two_items or is_json or sentence.endswith((":", "：", ":**", "：**", "[", "{"))
    )
    return "remark" if is_remark else None


def _json_list(answer: str) -> list[str] | None:
    """Return the texts of an answer that is a JSON list, or an object whose only value is a list; else None.

    The items of the list are texts, or objects with one value, a text.
    """
    bare = answer.strip()
    if _FENCE.match(bare) and bare.endswith(("```", "~~~")):
        bare = bare.partition("\n")[2][:-3].strip()
    try:
        value = json.loads(bare) if bare.startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if isinstance(value, list):
        value = [next(iter(item.values())) if isinstance(item, dict) and len(item) == 1 else item for item in value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    # An escape can be a lone surrogate, which UTF-8 cannot encode, or a line end.
    return [" ".join(item.encode(errors="replace").decode().split()) for item in value]


def _is_item(line: str) -> bool:
    """Return whether a line has a list marker and a text after it."""
    bare = _without_quotes(_HEADING.sub("", line.strip(), count=1))
    marker = _MARKER.match(bare)
    return marker is not None and marker.end() < len(bare)


def _without_marks(line: str) -> str:
    """Return a line without the signs of a heading, list marker, label such as `Output:`, and quotes or stars around it."""
    bare = _without_quotes(_HEADING.sub("", line.strip(), count=1))
    return _without_quotes(_LABEL.sub("", _MARKER.sub("", bare, count=1), count=1).strip())


def _without_quotes(text: str) -> str:
    """Return a text without quotes or stars around the whole text; quotes that also occur inside are kept."""
    text = text.removesuffix(",") if text.endswith(('",', "',", "”,")) else text
    for start, end in _QUOTES.items():
        inner = text[len(start) : len(text) - len(end)]
        letters = _APOSTROPHE.sub("", inner)
        if inner and text.startswith(start) and text.endswith(end) and start not in letters and end not in letters:
            return _without_quotes(inner.strip())
    return text
