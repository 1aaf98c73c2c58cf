"""From answers to scored pairs, and the account of it: of every line of every answer, what became of it.

    lines of a request ──► parsing ──► filters ──► repeats ──► contradictions ──► agreement ──► judge ──► at most `size`

What is made of the same answers is the same, in the order of the sources, whoever was asked first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from angle_llm.data.keys import near, pair_key
from angle_llm.generation.filters import Candidate, Limits, why_left_out
from angle_llm.generation.generators import Answer, Request
from angle_llm.generation.parsing import read_answer
from angle_llm.generation.wording import SCORES, Side, Wording

Ensemble = Literal["all", "agree"]
Cosines = Callable[[Sequence[tuple[str, str]]], Sequence[float]]
"""Pairs of texts → their cosines."""


@dataclass(frozen=True)
class Judge:
    """An encoder's opinion: pairs of a side whose cosine lies outside its bounds are left out."""

    cosines: Cosines
    least: Mapping[Side, float]
    """Side → smallest cosine."""
    most: Mapping[Side, float]
    """Side → largest cosine."""

    def leaves_out(self, side: Side, cosine: float) -> bool:
        return not self.least.get(side, -2.0) <= cosine <= self.most.get(side, 2.0)


@dataclass
class Line:
    """A line of an answer on its way to a pair."""

    request: Request
    text: str
    left_out: str | None
    """Why it is no pair; None as long as it is one."""
    generators: list[str] = field(default_factory=list)
    """Which wrote it."""
    cosine: float | None = None

    @property
    def pair(self) -> int:
        """The pair in any order, but for case, spacing and punctuation."""
        return pair_key(near(self.request.text), near(self.text))


def read_lines(
    requests: Sequence[Request], answers: Mapping[str, Answer], wording: Wording, limits: Limits
) -> list[Line]:
    """The lines of all answers, filtered one by one."""
    lines = []
    for request in requests:
        answer = answers.get(request.key)
        if answer is None:
            continue
        asked = wording.own_words(request.side)
        for text, left_out in read_answer(answer.text, finished=answer.finished):
            why = left_out or why_left_out(Candidate(text, request.text, asked, limits))
            lines.append(Line(request, text, why, [request.generator]))
    return lines


def choose(lines: Sequence[Line], *, size: int, generators: int, ensemble: Ensemble, judge: Judge | None) -> None:
    """Marks what is left out for the sake of the others; `generators` is how many were asked."""
    _repeats(lines)
    _contradictions(lines)
    if ensemble == "agree" and generators > 1:
        _disagreements(lines)
    if judge is not None:
        _judged(lines, judge)
    _surplus(lines, size)


def _kept(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.left_out is None]


def _repeats(lines: Sequence[Line]) -> None:
    first: dict[tuple[int, Side], Line] = {}
    for line in _kept(lines):
        earlier = first.setdefault((line.pair, line.request.side), line)
        if earlier is not line:
            line.left_out = "repeat"
            if line.request.generator not in earlier.generators:
                earlier.generators.append(line.request.generator)


def _contradictions(lines: Sequence[Line]) -> None:
    """A pair that was written as synonyms and as antonyms is neither."""
    sides = defaultdict(set)
    for line in _kept(lines):
        sides[line.pair].add(line.request.side)
    for line in _kept(lines):
        if len(sides[line.pair]) > 1:
            line.left_out = "contradiction"


def _disagreements(lines: Sequence[Line]) -> None:
    for line in _kept(lines):
        if len(line.generators) < 2:
            line.left_out = "alone"


def _judged(lines: Sequence[Line], judge: Judge) -> None:
    kept = _kept(lines)
    for line, cosine in zip(kept, judge.cosines([(line.request.text, line.text) for line in kept]), strict=True):
        line.cosine = round(float(cosine), 4)
        if judge.leaves_out(line.request.side, cosine):
            line.left_out = "judge"


def _surplus(lines: Sequence[Line], size: int) -> None:
    count: Counter[str] = Counter()
    for line in _kept(lines):
        count[line.request.key] += 1
        if count[line.request.key] > size:
            line.left_out = "surplus"


def as_row(line: Line, wording: Wording) -> dict[str, Any]:
    """A pair as it is written: what training reads, then where it comes from."""
    request = line.request
    return {
        "text1": request.text,
        "text2": line.text,
        "score": SCORES[request.side],
        "side": request.side,
        "generator": " + ".join(line.generators),
        "prompt": wording.name,
        "prompt_hash": wording.fingerprint(),
        "seed": request.seed,
        "row": request.row,
    } | ({} if line.cosine is None else {"cosine": line.cosine})


def account(requests: Sequence[Request], answers: Mapping[str, Answer], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For each generator and side: requests, answers, lines, and of the lines how many were kept and left out, and why.

    lines = kept + the sum of left_out.
    """
    asked = Counter((request.generator, request.side) for request in requests)
    answered = Counter((request.generator, request.side) for request in requests if request.key in answers)
    of_lines: dict[tuple[str, str], Counter[str | None]] = defaultdict(Counter)
    for line in lines:
        of_lines[line.request.generator, line.request.side][line.left_out] += 1
    return [
        {
            "generator": generator,
            "side": side,
            "requests": count,
            "answered": answered[generator, side],
            "lines": of_lines[generator, side].total(),
            "kept": of_lines[generator, side][None],
            "left_out": {why: many for why, many in of_lines[generator, side].most_common() if why is not None},
        }
        for (generator, side), count in asked.items()
    ]
