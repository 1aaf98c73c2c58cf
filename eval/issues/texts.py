"""Find which issue is a duplicate of which, and clean issue texts so that they do not contain this information.

GitHub stores that an issue was closed as a duplicate (`state_reason`, or the event `marked_as_duplicate`), but not of
which issue. The comments within a week of the closing name the other issue:

| reason | what the comments say | condition |
|---|---|---|
| comment | name a duplicate | a maintainer wrote the comment |
| state_reason | name a duplicate, or refer to exactly one issue | the issue was closed as a duplicate |
| label | name a duplicate, or refer to exactly one issue | the issue has a duplicate label |
| event | name a duplicate | the issue has the event |

Negated or doubtful phrases ("not a duplicate of", "possible duplicate of", "a duplicate of #12?"), quoted lines and
code do not count. Every pattern takes linear time, because a body may have any content and size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from datetime import timedelta
from typing import NamedTuple

from issues.github import Comment, Found, Issue, Key

_NAME = r"[A-Za-z0-9][\w-]{0,38}/(?!\.{1,2}[#/])[\w.-]{1,100}"
_REFERENCE = (
    rf"https?://[\w.-]{{0,60}}github[\w.-]{{0,60}}/(?P<home>{_NAME})/(?:issues|pull)/(?P<at>\d{{1,9}})\b(?:[?#][\w=&-]{{1,80}})?"
    rf"|(?:(?<![\w.-])(?P<repo>{_NAME})|(?<![&\w/])|\bissues?)#(?P<number>\d{{1,9}})\b"
    r"|\bGH-(?P<gh>\d{1,9})\b|(?:(?<=\bof )|(?<=\bof the ))issues?\s(?P<word>\d{1,9})\b"
)
REFERENCE = re.compile(_REFERENCE, re.IGNORECASE)
"""A reference to an issue, such as #12, OWNER/REPO#12, GH-12 or its address."""
_ANY_REFERENCE = f"(?:{re.sub('[?]P<[a-z]+>', '?:', _REFERENCE)})"
# The title in [The title](https://…/issues/12); a title can contain brackets.
_LINK_TEXT = r"\[(?:[^\[\]\n]|\[[^\[\]\n]{0,80}\]){0,200}\](?=\(https?://[\w.-]{0,60}github)"
_LINK = re.compile(_LINK_TEXT, re.IGNORECASE)
_BETWEEN = (
    r"(?:[\s:;,.*_\[\]()<>~`'\"‘’“”–—→-]|\b(?:of|with|to|by|issues?|bug|ticket|the|this|that|an|one|see|is|as|in|favou?r|already|existing|"
    r"reported|tracked|here|closing|closed)\b){0,20}?"
)
_DUPLICATE_WORD = r"\b(?:duplicates?|duplicated|duplicating|duplication(?=\s+(?:of|with)\b)|dupes?|dups?)\b"
DUPLICATE_WORD = re.compile(_DUPLICATE_WORD, re.IGNORECASE)
DUPLICATE_PHRASE = re.compile(
    rf"{_DUPLICATE_WORD}{_BETWEEN}(?:{_LINK_TEXT}\(<?)?{_ANY_REFERENCE}"
    rf"(?:(?:[\s,&+\[\]()*<>]|\band\b){{0,6}}{_ANY_REFERENCE}){{0,9}}\)?",
    re.IGNORECASE,
)
"""A phrase that names a duplicate, such as "Duplicate of #12 and #13"."""
_DOUBT = re.compile(
    r"n['’]t\b|\b(?:not|cannot|never|hardly|unlikely|possibl[ey]|potential(?:ly)?|maybe|may|might|could|whether|if|unless|doubt|"
    r"unsure|wrongly|mistakenly|incorrectly|falsely|erroneously|accidentally)\b"
    r"|\bno(?:\s+longer\b|\s+(?:\w+\s+)?$)|^\W*(?:is|are|was|were)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"[\s*_)\]>\"'”’`]{0,6}\?")
_SENTENCE_END = re.compile(r"[.!?\n]\s")
_CODE = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTED = re.compile(r"^[ \t]{0,3}>.*$", re.MULTILINE)
_LABEL = re.compile(r"\b(?:duplicate|dupe|dup)\b", re.IGNORECASE)


CLOSING_WINDOW = timedelta(days=7)
"""Time before and after the closing of an issue in which a comment can name the duplicate."""


class Claim(NamedTuple):
    """A claim on GitHub that issue `duplicate` is a duplicate of issue `target`. `reason` is the kind of evidence."""

    duplicate: Key
    target: Key
    reason: str


# --- duplicates -------------------------------------------------------------------------------------------------------


def is_duplicate_label(label: str) -> bool:
    """Return whether the name of a label means duplicate, without a negation, doubt or question mark."""
    words = re.sub(r"[_/:-]", " ", label)
    found = _LABEL.search(words)
    return found is not None and not any(map(_DOUBT.search, (words, words[: found.start()]))) and "?" not in words


def mark(issue: Issue) -> str:
    """Return the field of an issue that marks it as a duplicate: `state_reason` or `label`; else an empty string."""
    if issue.state_reason == "duplicate":
        return "state_reason"
    return "label" if any(is_duplicate_label(label.name) for label in issue.labels) else ""


def references(text: str, repo: str) -> list[Key]:
    """Return the issues that a text refers to, outside code and quotes. `repo` completes references such as #12."""
    return list(_keys(_without_quotes(text), repo))


def named_duplicates(text: str, repo: str) -> list[Key]:
    """Return the issues that a text names as duplicates, outside code, quotes, negations and doubts."""
    text = _without_quotes(text)
    return [
        key for match in DUPLICATE_PHRASE.finditer(text) if not _doubtful(text, match) for key in _keys(match[0], repo)
    ]


def mentioned_pairs(found: Found) -> set[frozenset[Key]]:
    """Return the pairs of issues that are linked by a reference in a title, body or comment."""
    pairs = set[frozenset[Key]]()
    for key, issue in found.issues.items():
        texts = [issue.title or "", *(each.body or "" for each in (issue, *found.comments.get(key, ())))]
        pairs.update(frozenset((key, other)) for text in texts for other in _keys(text, issue.repo) if other != key)
    return pairs


def find_claims(found: Found, has_event: Callable[[Issue], bool]) -> tuple[list[Claim], dict[str, int]]:
    """Return the claims that an issue is a duplicate of another issue, and count duplicates without a clear target.

    The second result is reason → number of issues.

    `has_event` sends a request, so it is called only where the result depends on it.
    """
    claims, unclear = list[Claim](), Counter[str]()
    for key, issue in found.issues.items():
        if issue.closed_at is None:
            continue
        closed = issue.closed_at
        comments = [one for one in found.comments.get(key, ()) if abs(one.created_at - closed) <= CLOSING_WINDOW]
        by_maintainers = _targets(named_duplicates, [one for one in comments if one.by_maintainer], issue)
        named, referred = _targets(named_duplicates, comments, issue), _targets(references, comments, issue)
        marked = mark(issue)
        if by_maintainers:
            claims += [Claim(key, target, "comment") for target in by_maintainers]
        elif named and (marked or has_event(issue)):
            claims += [Claim(key, target, marked or "event") for target in named]
        elif named:
            unclear["named by others only"] += 1
        elif marked and len(referred) == 1:
            claims.append(Claim(key, referred[0], marked))
        elif marked:
            unclear[f"{'several references' if referred else 'no reference'} ({marked})"] += 1
    return claims, dict(unclear)


def _targets(find: Callable[[str, str], list[Key]], comments: Iterable[Comment], issue: Issue) -> list[Key]:
    """Return the distinct issues that `find` returns for the comments, without the issue itself."""
    keys = (key for comment in comments for key in find(comment.body or "", issue.repo))
    return list(dict.fromkeys(key for key in keys if key != issue.key))


def _without_quotes(text: str) -> str:
    """Return a text without code, quoted lines and link texts; references that are formatted as code are kept."""
    text = _CODE.sub(lambda code: f" {code[0][1:-1]} " if REFERENCE.fullmatch(code[0][1:-1]) else " ", text)
    return _LINK.sub("", _QUOTED.sub("", text))


def _doubtful(text: str, match: re.Match[str]) -> bool:
    """Return whether a matched phrase is negated or doubtful, by the words before it or a question mark after it."""
    before = text[max(0, match.start() - 60) : match.start()]
    sentence = _SENTENCE_END.split(before)[-1].rpartition("\n")[2]
    return _DOUBT.search(sentence) is not None or _QUESTION.match(text, match.end()) is not None


def _keys(text: str, repo: str) -> Iterator[Key]:
    """Yield the issues that a text refers to. `repo` completes references such as #12."""
    for found in REFERENCE.finditer(text):
        number = int(found["at"] or found["number"] or found["gh"] or found["word"])
        if number:
            yield (found["home"] or found["repo"] or repo).lower(), number


# --- clean texts ------------------------------------------------------------------------------------------------------

_HIDDEN_OR_CODE = re.compile(rf"(<!--.*?-->|{_CODE.pattern})", re.DOTALL)
_TITLE_MARK = re.compile(r"[\[({]\s*(?:duplicate|dupe|dup)\b[^\[\](){}]{0,80}[\])}][\s:,-]*", re.IGNORECASE)
_LOGIN = r"([A-Za-z0-9](?:[A-Za-z0-9-]|_(?=[A-Za-z0-9])){0,58})"
_MENTION = re.compile(rf"(?<![^\W_])(?<![^\W_]_)(?<![.@/+-])@{_LOGIN}(?:\[bot\])?(?![^\W_]|-|/[\w-])")
_PROFILE = re.compile(rf"https?://(?:www\.)?github\.com/{_LOGIN}(?![^\W_]|-|\.\w|/\.{{0,2}}[\w-])/?", re.IGNORECASE)
_LONG_LINE = 300
"""Line length from which on only the phrase that names a duplicate is removed, instead of the whole line."""
_PASSES = 4
"""Maximum number of passes that remove phrases naming a duplicate; a removal can form a new phrase."""


def issue_text(title: str, body: str, people: Set[str], max_characters: int) -> str:
    """Return title, blank line and body of an issue, without hidden comments, duplicate phrases and user names.

    `@name` and links to profiles are replaced by `@someone`. In code only names in `people` (lower case) are replaced,
    because `@property` is not a person. Stack traces, code and logs are kept.
    """
    title, body = " ".join(_TITLE_MARK.sub(" ", title[:max_characters]).split()), body[: 4 * max_characters]
    text = f"{title}\n\n{body}" if body.strip() else title
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").encode(errors="replace").decode()
    text = "".join(piece for n, piece in enumerate(_pieces(text)) if n % 2 == 0 or not piece.startswith("<!--"))
    text = "".join(_without_names(piece, people if n % 2 else None) for n, piece in enumerate(_pieces(text)))
    # Phrases are removed last: each earlier step, and the cut, can join words to a phrase.
    return _without_phrases(_tidy(text)[:max_characters]).strip()


def _pieces(text: str) -> list[str]:
    """Return the text in pieces: prose at even indices, a hidden comment or code at odd indices.

    Inside code, `<!--` is code.
    """
    end = text.rfind("-->") + 3
    # A comment without an end is prose. The mark \0 avoids a search to the end of the text for each such comment.
    marked = text[:end] + text[end:].replace("<!--", "<\0!--")
    return [piece.replace("\0", "") for piece in _HIDDEN_OR_CODE.split(marked)]


def _tidy(text: str) -> str:
    """Return a text without spaces at line ends, and with at most one blank line in succession."""
    # Line by line, because the pattern `[ \t]+\n` takes quadratic time.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip(" \t") for line in text.split("\n"))).strip()


def _without_phrases(text: str) -> str:
    """Return a text without lines that name a duplicate; in a long line, only the phrase is removed."""
    for _ in range(_PASSES):
        found = list(DUPLICATE_PHRASE.finditer(text))
        if not found:
            return text
        kept, end = list[str](), 0
        for match in found:
            start, stop = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            stop = len(text) if stop < 0 else stop
            if stop - start > _LONG_LINE:
                start, stop = match.span()
            kept.append(text[end : max(start, end)])
            end = max(stop, end)
        text = _tidy(" ".join([*kept, text[end:]]))
    # Only an adversarial text needs more passes: remove every line with such a word.
    return "\n".join(line for line in text.split("\n") if not DUPLICATE_WORD.search(line))


def _without_names(text: str, known: Set[str] | None) -> str:
    """Replace mentions of the user names in `known` by `@someone`; None: replace all mentions."""

    def replace(instead: str) -> Callable[[re.Match[str]], str]:
        return lambda match: instead if known is None or match[1].lower() in known else match[0]

    return _PROFILE.sub(replace("https://github.com/someone"), _MENTION.sub(replace("@someone"), text))
