"""Make pairs of the lines in answers of language models. Every line becomes a pair, or is dropped for a reason."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from angle_llm.data.keys import normalized, pair_key
from angle_llm.tools.language_models import Answer, LlmRequest
from angle_llm.tools.replies import read_answer

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

    request: LlmRequest
    text: str
    dropped: str | None
    generators: list[str]
    """Language models that wrote this pair."""
    cosine: float | None = None
    """Cosine of the two sentences by the encoder `--judge`. None: not computed."""


def kept(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs that are not dropped."""
    return [pair for pair in pairs if pair.dropped is None]


def read_pairs(requests: Sequence[LlmRequest], answers: Mapping[str, Answer], prompts: Mapping[str, str]) -> list[Pair]:
    """Parse all answers into pairs of a source sentence and a line; mark lines that fail a filter as dropped."""
    pairs = []
    for request in requests:
        prompt = prompts[request.kind].replace("{size}", " ").replace("{text}", " ")
        answer = answers.get(request.key)
        for text, dropped in () if answer is None else read_answer(answer.text, finished=answer.finished):
            reason = dropped or why_dropped(text, request.text, prompt)
            pairs.append(Pair(request, text, reason, [request.llm]))
    return pairs


def drop_repeats(pairs: Sequence[Pair]) -> None:
    """Mark repeated pairs, and pairs that occur as synonyms and as antonyms, as dropped."""
    first, sides = dict[tuple[int, str], Pair](), defaultdict[int, set[str]](set)
    keys = {id(pair): pair_key(normalized(pair.request.text), normalized(pair.text)) for pair in kept(pairs)}
    for pair in kept(pairs):
        key, side = keys[id(pair)], pair.request.kind
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
