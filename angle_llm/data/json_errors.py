"""Why a text is not JSON, in plain words."""

from __future__ import annotations

import json

_LINE_SHOWN = 60
"""Characters of a broken line that a message shows."""

_JSON_WORDS = {
    "Expecting value": "a value is missing at column {column}, or is a word without quotes",
    "Expecting property name enclosed in double quotes": "at column {column} a key in double quotes is needed",
    "Expecting ':' delimiter": "a colon is needed at column {column}, between key and value",
    "Expecting ',' delimiter": "at column {column} a comma or a closing bracket is needed (is a quote inside a text not "
    'written \\"?)',
    "Unterminated string starting at": "the text that opens at column {column} has no closing quote",
    "Invalid control character at": "a tab or another control character stands at column {column} inside a text; write "
    "\\t, \\n or \\u00XX",
    "Illegal trailing comma before end of object": "a comma has nothing after it at column {column}; remove it",
    "Illegal trailing comma before end of array": "a comma has nothing after it at column {column}; remove it",
    "Extra data": "it is complete before column {column}, and more follows; {shape}",
}
"""What the json module says → what is meant. Its other messages are about backslashes, and plain enough."""


def what_is_wrong(error: ValueError | RecursionError, shape: str) -> str:
    """Why a text is not JSON, in plain words, and how the line at fault begins; `shape` is what the kind of file holds."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= len(error.doc.rstrip()):
        reason = f"it ends before it is complete (cut off?); {shape}"
    elif error.doc[error.pos] == "'":
        reason = f"a single quote at column {error.colno}; JSON wants keys and texts in double quotes"
    elif error.doc[error.pos] in "]}" and error.doc[: error.pos].rstrip().endswith(","):
        reason = f"a comma has nothing after it at column {error.colno}; remove it"
    else:
        words = _JSON_WORDS.get(error.msg, f"{error.msg[0].lower()}{error.msg[1:]} at column {{column}}")
        reason = words.format(column=error.colno, shape=shape)
    line = error.doc.split("\n")[error.lineno - 1].strip()
    start = "".join(sign if sign.isprintable() else "�" for sign in line[:_LINE_SHOWN])
    return f"{reason}; the line begins `{start}{'…' if len(line) > _LINE_SHOWN else ''}`" if start else reason
