"""Which generated sentences are left out, and why: one small question each, in a table, asked in its order."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from angle_llm.config import SettingsError
from angle_llm.data.keys import near

_RUN = 4
"""Words in a row that a sentence shares with the prompt by no accident."""
_SAME_SCRIPT = 0.5
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


@dataclass(frozen=True)
class Limits:
    """Lengths of a generated sentence, in characters."""

    shortest: int = 6
    """A shorter one is left out."""
    longest: int = 400
    """A longer one is left out."""
    least_ratio: float = 0.35
    """Left out when shorter than this share of its source."""
    most_ratio: float = 2.5
    """Left out when longer than so many times its source."""

    def __post_init__(self) -> None:
        if not 0 <= self.shortest <= self.longest:
            raise SettingsError(f"limits: shortest {self.shortest} must be between 0 and longest {self.longest}.")
        if not 0 <= self.least_ratio <= self.most_ratio:
            raise SettingsError(
                f"limits: least_ratio {self.least_ratio} must be between 0 and most_ratio {self.most_ratio}."
            )


@dataclass(frozen=True)
class Candidate:
    """A generated sentence, and what it was made from."""

    sentence: str
    source: str
    asked: str
    """The prompt's own words."""
    limits: Limits


def no_words(one: Candidate) -> bool:
    """Nothing but signs, such as a line across, or characters that cannot be seen; in it or in its source."""
    return not (any(map(str.isalnum, one.sentence)) and any(map(str.isalnum, one.source)))


def too_short(one: Candidate) -> bool:
    return len(one.sentence) < max(one.limits.shortest, one.limits.least_ratio * len(one.source))


def too_long(one: Candidate) -> bool:
    return len(one.sentence) > min(one.limits.longest, one.limits.most_ratio * len(one.source))


def copy(one: Candidate) -> bool:
    """The source itself, but for case, spacing and punctuation."""
    return near(one.sentence) == near(one.source)


def refusal(one: Candidate) -> bool:
    """The model speaks of itself; not where the source does."""
    return _REFUSAL.search(one.sentence) is not None and _REFUSAL.search(one.source) is None


def talk(one: Candidate) -> bool:
    """It speaks of sentences and meanings, of which the source does not."""
    return _TALK.search(one.sentence) is not None and _TALK.search(one.source) is None


def prompt_words(one: Candidate) -> bool:
    """Words of the prompt in a row that are not the source's."""
    return bool(_runs(near(one.sentence)) & _runs(near(one.asked)) - _runs(near(one.source)))


def other_script(one: Candidate) -> bool:
    """Most letters are of scripts that the source has none of."""
    known = {_script(letter) for letter in one.source if letter.isalpha()}
    letters = [_script(letter) for letter in one.sentence if letter.isalpha()]
    if not known or not letters:
        return False
    return sum(script in known for script in letters) < _SAME_SCRIPT * len(letters)


FILTERS: dict[str, Callable[[Candidate], bool]] = {
    "no_words": no_words,
    "refusal": refusal,
    "prompt_words": prompt_words,
    "talk": talk,
    "copy": copy,
    "too_short": too_short,
    "too_long": too_long,
    "other_script": other_script,
}


def why_left_out(one: Candidate) -> str | None:
    """The first filter that leaves a sentence out; None if none does."""
    return next((name for name, leaves_out in FILTERS.items() if leaves_out(one)), None)


@lru_cache(maxsize=64)
def _runs(near_text: str) -> frozenset[tuple[str, ...]]:
    words = near_text.split()
    return frozenset(tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1))


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """LATIN, CYRILLIC, CJK, …: the first word of the letter's name."""
    return unicodedata.name(letter, "unknown").partition(" ")[0]
