"""The text of an issue: title, blank line, body, without what gives the answer away and without user names.

Taken out: the hidden comments of issue templates (not those that code shows), lines that say "Duplicate of #12" (quoted or
guessed too), the mark `[duplicate]` of a title, NUL, half characters. `@name` and links to a profile become `@someone`.
Everything else stays: stack traces, code, logs; in code only the names of people who are known to have written here are
replaced, as `@property` is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set

from angle_llm.issue_pairs.duplicates import CODE, SAYING, SAYING_WORD

SOMEONE = "@someone"
_OPENING = re.compile(r"<!--|```|~~~|`")
_TITLE_MARK = re.compile(r"[\[({]\s*(?:duplicate|dupe|dup)\b[^\[\](){}]{0,80}[\])}][\s:,-]*", re.IGNORECASE)
# An underscore stands within the names of managed users; around a name it is emphasis.
_LOGIN = r"([A-Za-z0-9](?:[A-Za-z0-9-]|_(?=[A-Za-z0-9])){0,58})"
_MENTION = re.compile(rf"(?<![^\W_])(?<![^\W_]_)(?<![.@/+-])@{_LOGIN}(?:\[bot\])?(?![^\W_]|-|/[\w-])")
_PROFILE = re.compile(rf"https?://(?:www\.)?github\.com/{_LOGIN}(?![^\W_]|-|\.\w|/\.{{0,2}}[\w-])/?", re.IGNORECASE)
_LONGEST_LINE = 300  # of a longer one, the words alone are taken out
_PASSES = 4  # people's own texts take two


def issue_text(title: str, body: str, people: Set[str], longest: int) -> str:
    """Title and body as one text of at most `longest` characters; `people` are user names in lower case."""
    title, body = _TITLE_MARK.sub("", title[:longest]), body[: 4 * longest]  # a body of any size takes a moment
    text = f"{title.strip()}\n\n{body}" if body.strip() else title
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").encode(errors="replace").decode()
    text = "".join(piece for opened_by, piece in _pieces(text) if opened_by != "<!--")
    text = "".join(_without_names(piece, people if opened_by else None) for opened_by, piece in _pieces(text))
    # The answer last: what stands before may bring its words together, the cut too.
    return _without_sayings(_tidy(text)[:longest]).strip()


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces, each with what opened it: nothing, a hidden comment, or a fence or tick of code.

    What opens first wins, so a comment may hold code, and code a comment. By hand: as one regular expression, comments that are
    never closed take the square of their number.
    """
    done = look = 0
    last_end = text.rfind("-->")
    while found := _OPENING.search(text, look):
        start, look = found.span()
        if found[0] == "<!--":
            end = text.find("-->", look) + 3 if last_end >= look else 0
        else:
            code = CODE.match(text, start)
            end = code.end() if code else 0
        if end:
            yield "", text[done:start]
            yield found[0], text[start:end]
            done = look = end
    yield "", text[done:]


def _tidy(text: str) -> str:
    """Without spaces at the ends of lines, and with one empty line in the place of several."""
    # Line by line: `[ \t]+\n` as a regular expression takes the square of the spaces.
    lines = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip()


def _without_sayings(text: str) -> str:
    """Without the lines on which a duplicate is named; where taking words out brings new ones together, again."""
    for _ in range(_PASSES):
        found = list(SAYING.finditer(text))
        if not found:
            return text
        kept, end = list[str](), 0
        for match in found:
            start = text.rfind("\n", 0, match.start()) + 1
            stop = text.find("\n", match.end())
            stop = len(text) if stop < 0 else stop
            if stop - start > _LONGEST_LINE:
                start, stop = match.span()
            kept.append(text[end : max(start, end)])
            end = max(stop, end)
        text = _tidy(" ".join([*kept, text[end:]]))
    # A text made to be taken apart for ever: every line with a word that such a saying begins with.
    return "\n".join(line for line in text.split("\n") if not SAYING_WORD.search(line))


def _without_names(text: str, known: Set[str] | None) -> str:
    """`known`: replace these names alone; None: all that look like one."""

    def replaced(instead: str) -> Callable[[re.Match[str]], str]:
        return lambda match: instead if known is None or match[1].lower() in known else match[0]

    return _PROFILE.sub(replaced(f"https://github.com/{SOMEONE[1:]}"), _MENTION.sub(replaced(SOMEONE), text))
