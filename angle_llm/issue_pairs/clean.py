"""The text of an issue: title, blank line, body, without what gives the answer away and without user names.

Taken out: the hidden comments of issue templates, lines that say "Duplicate of #12" (quoted or guessed too), the mark
`[duplicate]` of a title, NUL, half characters. `@name` and links to a profile become `@someone`. Everything else stays: stack
traces, code, logs; in code only the names of people who are known to have written here are replaced, as `@property` is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from angle_llm.issue_pairs.duplicates import SAYING

SOMEONE = "@someone"
_CODE = re.compile(r"(```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`)", re.DOTALL)
_TITLE_MARK = re.compile(r"[\[({]\s*(?:duplicate|dupe|dup)\b[^\[\](){}]{0,80}[\])}][\s:,-]*", re.IGNORECASE)
_MENTION = re.compile(r"(?<![\w.@/+-])@([A-Za-z0-9](?:[A-Za-z0-9-]{0,38}))(?:\[bot\])?(?![\w/-])")
_PROFILE = re.compile(
    r"https?://(?:www\.)?github\.com/([A-Za-z0-9][A-Za-z0-9-]{0,38})(?![\w./-]|/[\w.-])/?", re.IGNORECASE
)
_LONGEST_LINE = 300  # of a longer one, the words alone are taken out


def issue_text(title: str, body: str, people: Set[str], longest: int) -> str:
    """Title and body as one text of at most `longest` characters; `people` are user names in lower case."""
    title, body = _TITLE_MARK.sub("", title[:longest]), body[: 4 * longest]  # a body of any size takes a moment
    text = f"{title.strip()}\n\n{body}" if body.strip() else title
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").encode(errors="replace").decode()
    # Code stands at the odd places of the split.
    parts = [part if at % 2 else _without_hidden(part) for at, part in enumerate(_CODE.split(text))]
    text = _without_sayings("".join(parts))
    parts = [_without_names(part, people if at % 2 else None) for at, part in enumerate(_CODE.split(text))]
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", "".join(parts))).strip()[:longest].rstrip()


def _without_hidden(text: str) -> str:
    # By hand: as a regular expression, openings that are never closed take the square of their number.
    kept, rest = "", text
    while (start := rest.find("<!--")) >= 0 and (end := rest.find("-->", start + 4)) >= 0:
        kept, rest = kept + rest[:start], rest[end + 3 :]
    return kept + rest


def _without_sayings(text: str) -> str:
    """Without the lines on which a duplicate is named; where taking words out brings new ones together, again."""
    while found := list(SAYING.finditer(text)):
        kept, end = list[str](), 0
        for match in found:
            start = text.rfind("\n", 0, match.start()) + 1
            stop = text.find("\n", match.end())
            stop = len(text) if stop < 0 else stop
            if stop - start > _LONGEST_LINE:
                start, stop = match.span()
            kept.append(text[end : max(start, end)])
            end = max(stop, end)
        text = "".join(kept) + text[end:]
    return text


def _without_names(text: str, known: Set[str] | None) -> str:
    """`known`: replace these names alone; None: all that look like one."""

    def replaced(instead: str) -> Callable[[re.Match[str]], str]:
        return lambda match: instead if known is None or match[1].lower() in known else match[0]

    return _PROFILE.sub(replaced(f"https://github.com/{SOMEONE[1:]}"), _MENTION.sub(replaced(SOMEONE), text))
