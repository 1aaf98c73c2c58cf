"""Parse answers of language models into pairs. Every line becomes a pair, or is dropped for a reason.

An answer can be a numbered list, bullets, quoted lines or a JSON list, inside code fences, between remarks, or cut off.
It can have any content and length, so every pattern takes linear time.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from llm_answers import Answer, Request

from angle_llm.data.keys import normalized, pair_key

_FENCE = re.compile(r"\s*(```|~~~)")
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
    last = max((place for place, why in enumerate(dropped) if why != "blank"), default=None)
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
    text = _LABEL.sub("", _MARKER.sub("", line.strip(), count=1), count=1).strip()
    while True:
        bare = text.removesuffix(",") if text.endswith(('",', "',", "”,")) else text
        for start, end in _QUOTES.items():
            inner = bare[len(start) : len(bare) - len(end)]
            within = _APOSTROPHE.sub("", inner)
            around = len(bare) > len(start) + len(end) and bare.startswith(start) and bare.endswith(end)
            if around and start not in within and end not in within:
                bare = inner.strip()
                break
        else:
            return bare
        text = bare


def _inline_pieces(line: str) -> Iterator[str]:
    """Yield the items of a line that is a list numbered from 1, such as `1. … 2. …`; yield any other line unchanged."""
    found = list(_INLINE.finditer(line))
    starts = [match.start() for match in found]
    before = line[: starts[0]].strip() if found else ""
    numbers = [int(match[1]) for match in found]
    if len(found) < 2 or numbers != list(range(1, len(found) + 1)) or (before and not before.endswith(":")):
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


# --- filters ----------------------------------------------------------------------------------------------------------

MIN_CHARACTERS, MAX_CHARACTERS = 6, 400
MIN_RATIO, MAX_RATIO = 0.35, 2.5
"""Smallest and largest length of a generated sentence, relative to its source sentence."""
_RUN = 4
"""Number of consecutive words of the prompt from which on a generated sentence counts as a copy of the prompt."""
_REFUSAL = re.compile(
    r"\bas an? (?:ai|artificial|language model|large language)|\bi(?:'m| am) (?:sorry|unable|not able)\b|\bi apologi[sz]e\b"
    r"|\bi (?:cannot|can't|can not|won't) (?:help|assist|generate|provide|fulfil|create|write|do that|comply|give)"
    r"|\b(?:ai|language) model\b|\bmy (?:knowledge cutoff|training data)\b",
    re.IGNORECASE,
)
_TALK = re.compile(
    r"\b(?:sentences?|synonym\w*|antonym\w*|(?:para|re)phras\w*|(?:same|opposite) meaning|original (?:message|statement|text)"
    r"|the (?:word|phrase|output|input)s?)\b",
    re.IGNORECASE,
)


def _no_words(sentence: str, source: str, prompt: str) -> bool:
    """Return whether a generated sentence or its source sentence has no letter or digit."""
    return not (any(map(str.isalnum, sentence)) and any(map(str.isalnum, source)))


def _prompt_words(sentence: str, source: str, prompt: str) -> bool:
    """Return whether a generated sentence copies four consecutive words of the prompt that are not in its source."""
    return bool(_runs(normalized(sentence)) & _runs(normalized(prompt)) - _runs(normalized(source)))


def _other_script(sentence: str, source: str, prompt: str) -> bool:
    """Return whether most letters of a generated sentence are of scripts that its source sentence does not use."""
    known = {_script(letter) for letter in source if letter.isalpha()}
    letters = [_script(letter) for letter in sentence if letter.isalpha()]
    return bool(known) and sum(script in known for script in letters) < len(letters) / 2


FILTERS: dict[str, Callable[[str, str, str], bool]] = {
    "no words": _no_words,
    "refusal": lambda sentence, source, _: bool(_REFUSAL.search(sentence)) and not _REFUSAL.search(source),
    "prompt words": _prompt_words,
    "talk": lambda sentence, source, _: bool(_TALK.search(sentence)) and not _TALK.search(source),
    "copy": lambda sentence, source, _: normalized(sentence) == normalized(source),
    "too short": lambda sentence, source, _: len(sentence) < max(MIN_CHARACTERS, MIN_RATIO * len(source)),
    "too long": lambda sentence, source, _: len(sentence) > min(MAX_CHARACTERS, MAX_RATIO * len(source)),
    "other script": _other_script,
}
"""Reason to drop a generated sentence → function of the sentence, its source sentence and the prompt. Words of the
source sentence are allowed."""


def why_dropped(sentence: str, source: str, prompt: str) -> str | None:
    """Return the first reason in `FILTERS` to drop a generated sentence, or None."""
    return next((reason for reason, applies in FILTERS.items() if applies(sentence, source, prompt)), None)


@lru_cache(maxsize=64)
def _runs(text: str) -> frozenset[tuple[str, ...]]:
    """Return all sequences of four consecutive words of a text."""
    words = text.split()
    return frozenset(tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1))


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """Return the script of a letter, such as LATIN or CJK."""
    return unicodedata.name(letter, "unknown").partition(" ")[0]


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A line of an answer, paired with the source sentence of its request. `dropped`: reason why it is not used."""

    request: Request
    text: str
    dropped: str | None
    generators: list[str]
    """Language models that wrote this pair."""
    cosine: float | None = None
    """Cosine of the two sentences by the encoder `--judge`. None: not computed."""


def kept(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs that are not dropped."""
    return [pair for pair in pairs if pair.dropped is None]


def read_pairs(requests: Sequence[Request], answers: Mapping[str, Answer], prompts: Mapping[str, str]) -> list[Pair]:
    """Parse all answers into pairs of a source sentence and a line; mark lines that fail a filter as dropped."""
    pairs = []
    for request in requests:
        prompt = prompts[request.side].replace("{size}", " ").replace("{text}", " ")
        answer = answers.get(request.key)
        for text, dropped in () if answer is None else read_answer(answer.text, finished=answer.finished):
            reason = dropped or why_dropped(text, request.text, prompt)
            pairs.append(Pair(request, text, reason, [request.generator]))
    return pairs


def drop_repeats(pairs: Sequence[Pair]) -> None:
    """Mark repeated pairs, and pairs that occur as synonyms and as antonyms, as dropped."""
    first, sides = dict[tuple[int, str], Pair](), defaultdict[int, set[str]](set)
    keys = {id(pair): pair_key(normalized(pair.request.text), normalized(pair.text)) for pair in kept(pairs)}
    for pair in kept(pairs):
        key, side = keys[id(pair)], pair.request.side
        sides[key].add(side)
        earlier = first.setdefault((key, side), pair)
        if earlier is not pair:
            pair.dropped = "repeat"
            earlier.generators = list(dict.fromkeys([*earlier.generators, *pair.generators]))
    for pair in kept(pairs):
        if len(sides[keys[id(pair)]]) > 1:
            pair.dropped = "contradiction"


def drop_surplus(pairs: Sequence[Pair], size: int) -> None:
    """Mark the pairs of each answer after the first `size` pairs as dropped."""
    count = Counter[str]()
    for pair in kept(pairs):
        count[pair.request.key] += 1
        if count[pair.request.key] > size:
            pair.dropped = "surplus"
