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
and code. Yet two issues of which one names the other, however and whoever says it, are never paired as different ones.
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
    rf"https?://[\w.-]{{0,60}}github[\w.-]{{0,60}}/(?P<home>{_NAME})/(?:issues|pull)/(?P<at>\d{{1,9}})\b(?:[?#][\w=&-]{{1,80}})?"
    rf"|(?:(?<![\w.-])(?P<repo>{_NAME})|(?<![&\w/])|\bissues?)#(?P<number>\d{{1,9}})\b"
    r"|\bGH-(?P<gh>\d{1,9})\b|(?:(?<=\bof )|(?<=\bof the ))issues?\s(?P<said>\d{1,9})\b"
)
REFERENCE = re.compile(_REFERENCE, re.IGNORECASE)
_ANY = f"(?:{re.sub('[?]P<[a-z]+>', '?:', _REFERENCE)})"
# [The title](https://…/issues/12); titles have brackets themselves.
_LINK_TEXT = r"\[(?:[^\[\]\n]|\[[^\[\]\n]{0,80}\]){0,200}\](?=\(https?://[\w.-]{0,60}github)"
_LINK = re.compile(_LINK_TEXT, re.IGNORECASE)
_BETWEEN = (
    r"(?:[\s:;,.*_\[\]()<>~`'\"‘’“”–—→-]|\b(?:of|with|to|by|issues?|bug|ticket|the|this|that|an|one|see|is|as|in|favou?r|already|existing|"
    r"reported|tracked|here|closing|closed)\b){0,20}?"
)
_SAYING_WORD = r"\b(?:duplicates?|duplicated|duplicating|duplication(?=\s+(?:of|with)\b)|dupes?|dups?)\b"
SAYING_WORD = re.compile(_SAYING_WORD, re.IGNORECASE)
"""The word that a saying begins with."""
SAYING = re.compile(
    rf"{_SAYING_WORD}{_BETWEEN}(?:{_LINK_TEXT}\(<?)?{_ANY}"
    rf"(?:(?:[\s,&+\[\]()*<>]|\band\b){{0,6}}{_ANY}){{0,9}}\)?",
    re.IGNORECASE,
)
"""The words by which people close a duplicate, with all that they name."""
_DOUBT = re.compile(
    r"n['’]t\b|\b(?:not|cannot|never|hardly|unlikely|possibl[ey]|potential(?:ly)?|maybe|may|might|could|whether|if|unless|doubt|"
    r"unsure|wrongly|mistakenly|incorrectly|falsely|erroneously|accidentally)\b"
    r"|\bno(?:\s+longer\b|\s+(?:\w+\s+)?$)|^\W*(?:is|are|was|were)\b",
    re.IGNORECASE,
)
_ASKED = re.compile(r"[\s*_)\]>\"'”’`]{0,6}\?")
_SENTENCE_END = re.compile(r"[.!?\n]\s")
CODE = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`", re.DOTALL)
"""What stands in fences or ticks; a fence that is not closed goes on to the end."""
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
    found = _LABEL.search(words)
    return found is not None and not any(map(_DOUBT.search, (words, words[: found.start()]))) and "?" not in words


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


def find_named(issues: Mapping[Key, Issue], comments: Mapping[Key, Sequence[Comment]]) -> set[frozenset[Key]]:
    """Every two issues of which one names the other: in its text or under it, at any time, in doubt, quoted, denied."""
    named = set[frozenset[Key]]()
    for issue in issues.values():
        texts = (issue.title, issue.body, *(comment.text for comment in comments.get(issue.key, ())))
        named.update(
            frozenset((issue.key, key)) for text in texts for key in _keys(text, issue.repo) if key != issue.key
        )
    return named


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
    text = CODE.sub(lambda code: f" {code[0][1:-1]} " if REFERENCE.fullmatch(code[0][1:-1]) else " ", text)
    return _LINK.sub("", _QUOTED.sub("", text))


def _doubted(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 60) : match.start()]
    sentence = _SENTENCE_END.split(before)[-1].rpartition("\n")[2]
    return _DOUBT.search(sentence) is not None or _ASKED.match(text, match.end()) is not None


def _keys(text: str, repo: str) -> Iterator[Key]:
    for found in REFERENCE.finditer(text):
        number = int(found["at"] or found["number"] or found["gh"] or found["said"])
        if number:
            yield (found["home"] or found["repo"] or repo).lower(), number
