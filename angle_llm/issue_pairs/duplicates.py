"""What was closed as a duplicate of what.

People say it under the issue: "Duplicate of #12". GitHub's API keeps that an issue was closed as a duplicate
(`state_reason`), and that somebody with write access marked it (the event `marked_as_duplicate`, which that comment makes),
but not of which one, so the target is always read from the closing comments. Those are the comments made within some days of
the closing. Why a claim is believed, in this order:

| why | the closing comments | and |
|---|---|---|
| comment | say "duplicate of" and an issue | a maintainer says it |
| state_reason | say it, or refer to exactly one issue | the issue was closed as a duplicate |
| label | say it, or refer to exactly one issue | a label of the issue has the word |
| event | say it | the issue has the event |

Denials and guesses ("not a duplicate of", "possible duplicate of", "a duplicate of #12?") say nothing, nor do quoted lines
and code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from angle_llm.issue_pairs.records import Comment, Issue, Key

# Every part has a bound, so that a text of a megabyte takes a moment.
_NAME = r"[A-Za-z0-9][\w-]{0,38}/(?!\.{1,2}[#/])[\w.-]{1,100}"
_REFERENCE = (
    rf"https?://[\w.-]{{0,60}}github[\w.-]{{0,60}}/(?P<home>{_NAME})/(?:issues|pull)/(?P<at>\d{{1,9}})\b(?:[?#][\w=&-]{{0,80}})?"
    rf"|(?:(?<![\w.-])(?P<repo>{_NAME})|(?<![&\w/])|\bissues?)#(?P<number>\d{{1,9}})\b"
    r"|\bGH-(?P<gh>\d{1,9})\b"
)
REFERENCE = re.compile(_REFERENCE, re.IGNORECASE)
_ANY = f"(?:{re.sub('[?]P<[a-z]+>', '?:', _REFERENCE)})"
_BETWEEN = (
    r"(?:[\s:;,.*_\[\]()<~`-]|\b(?:of|with|to|by|issues?|bug|ticket|the|this|that|an|one|see|is|as|in|favou?r|already|existing|"
    r"reported|tracked|here|closing|closed)\b){0,20}?"
)
SAYING = re.compile(
    rf"\b(?:duplicates?|duplicated|duplicating|dupes?|dups?)\b{_BETWEEN}{_ANY}"
    rf"(?:(?:[\s,&+\[\]()*<>]|\band\b){{0,6}}{_ANY}){{0,9}}\)?",
    re.IGNORECASE,
)
"""The words by which people close a duplicate, with all that they name."""
_DOUBT = re.compile(
    r"n['’]t\b|\b(?:not|cannot|never|possibl[ey]|potential(?:ly)?|maybe|may|might|could|whether|if|unless)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?\n]\s")
_CODE = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTED = re.compile(r"^[ \t]{0,3}>.*$", re.MULTILINE)
_LABEL = re.compile(r"\b(?:duplicate|dupe|dup)\b", re.IGNORECASE)


class Claim(NamedTuple):
    """One issue is a duplicate of another, and why that is believed."""

    duplicate: Key
    target: Key
    why: str


def says_duplicate(label: str) -> bool:
    """Whether a label calls an issue a duplicate, and not perhaps one."""
    words = re.sub(r"[_/:-]", " ", label)
    return _LABEL.search(words) is not None and not _DOUBT.search(words)


def is_labelled(issue: Issue) -> bool:
    """Whether an issue has such a label."""
    return any(map(says_duplicate, issue.labels))


def references(text: str, repo: str) -> list[Key]:
    """The issues and pull requests that a text refers to, those without a name in `repo`; code and quotes are left out."""
    return list(_keys(_own_words(text), repo))


def said_duplicates(text: str, repo: str) -> list[Key]:
    """What a text says to be a duplicate of, without doubt."""
    text = _own_words(text)
    return [key for match in SAYING.finditer(text) if not _doubted(text, match) for key in _keys(match[0], repo)]


def find_claims(
    issues: Mapping[Key, Issue],
    comments: Mapping[Key, Sequence[Comment]],
    closing_days: float,
    is_marked: Callable[[Issue], bool],
) -> tuple[list[Claim], Counter[str]]:
    """The claims that are believed, and how many issues seem to be duplicates and name no target that can be told.

    `is_marked` is asked only where nothing else confirms what somebody said.
    """
    claims, unclear = list[Claim](), Counter[str]()
    for issue in issues.values():
        found, reason = _claims_of(issue, comments.get(issue.key, ()), timedelta(days=closing_days), is_marked)
        claims += found
        unclear.update([reason] if reason else [])
    return claims, unclear


def _claims_of(
    issue: Issue, comments: Sequence[Comment], window: timedelta, is_marked: Callable[[Issue], bool]
) -> tuple[list[Claim], str]:
    if not issue.closed:
        return [], ""
    closing = [comment for comment in comments if _is_near(comment, issue, window)]
    by_maintainers = _distinct(
        (said_duplicates(each.text, issue.repo) for each in closing if each.by_maintainer), issue
    )
    said = _distinct((said_duplicates(each.text, issue.repo) for each in closing), issue)
    why = "state_reason" if issue.state_reason == "duplicate" else "label" if is_labelled(issue) else ""
    if by_maintainers:
        return [Claim(issue.key, target, "comment") for target in by_maintainers], ""
    if said and (why or is_marked(issue)):
        return [Claim(issue.key, target, why or "event") for target in said], ""
    if not why:
        return [], "said by others alone" if said else ""
    named = _distinct((references(each.text, issue.repo) for each in closing), issue)
    if len(named) == 1:
        return [Claim(issue.key, named[0], why)], ""
    return [], f"{'several references' if named else 'no reference'} ({why})"


def _is_near(comment: Comment, issue: Issue, window: timedelta) -> bool:
    if comment.created_at is None or issue.closed_at is None:
        return False
    return abs(comment.created_at - issue.closed_at) <= window


def _distinct(found: Iterable[Iterable[Key]], issue: Issue) -> list[Key]:
    return list(dict.fromkeys(key for keys in found for key in keys if key != issue.key))


def _own_words(text: str) -> str:
    return _QUOTED.sub(
        "", _CODE.sub(lambda code: f" {code[0][1:-1]} " if REFERENCE.fullmatch(code[0][1:-1]) else " ", text)
    )


def _doubted(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 60) : match.start()]
    sentence = _SENTENCE_END.split(before)[-1].rpartition("\n")[2]
    return _DOUBT.search(sentence) is not None or text[match.end() : match.end() + 2].strip().startswith("?")


def _keys(text: str, repo: str) -> Iterator[Key]:
    for found in REFERENCE.finditer(text):
        number = int(found["at"] or found["number"] or found["gh"])
        if number:
            yield (found["home"] or found["repo"] or repo).lower(), number
