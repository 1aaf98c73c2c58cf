"""Hashes of texts (8 bytes), to compare millions of texts exactly or without case, spacing and punctuation."""

from __future__ import annotations

import re
import unicodedata
from hashlib import blake2b

_KEPT = ("L", "M", "N", "So")  # letters, marks, numbers, and symbols such as emoji, which carry meaning


class _Separators(dict[int, int | None]):
    """Table for `str.translate` that replaces characters other than letters, marks, numbers and symbols by spaces.

    Invisible characters inside words, such as a soft hyphen or the variation selector of an emoji, are removed.
    """

    def __missing__(self, code: int) -> int | None:
        category = unicodedata.category(chr(code))
        removed = category == "Cf" or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
        self[code] = None if removed else code if category.startswith(_KEPT) else ord(" ")
        return self[code]


SCRIPTS_WITHOUT_SPACES = (
    "\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u3005-\\u3007\\u3040-\\u30ff\\u3400-\\u9fff\\uf900-\\ufaff"
    "\\U00020000-\\U0003ffff"
)
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, as a range of a regular expression."""
_WITHOUT_SPACES = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]")
_SPACE = re.compile(f" (?=[{SCRIPTS_WITHOUT_SPACES}])|(?<=[{SCRIPTS_WITHOUT_SPACES}]) ")
"""Pattern of a space beside a character of these scripts, where it has no meaning."""
_SEPARATORS = _Separators({ord(sign): ord(sign) for sign in "+#"})
_NOT_IN_A_NAME = re.compile(
    rf"(?<![\w+#])[+#]+|[+#]+(?=(?![{SCRIPTS_WITHOUT_SPACES}])[^\W\d])|(?<=[{SCRIPTS_WITHOUT_SPACES}])[+#]+|#+(?=\d)"
)
"""Pattern of the signs + and # that are not at the end of a word, so are not part of names such as C++ and C#."""


def normalized(text: str) -> str:
    """Return the text in lower case without punctuation, repeated spaces and Unicode variants, to compare texts.

    "Isn't it 1.5?" and "isn 't it 1.5 ?" (SentEval) give equal results; 1.5 and 15 give different results, and so do C,
    C++ and C#. Punctuation is kept if the text has nothing else. In scripts without spaces, spaces are removed.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = " ".join(_NOT_IN_A_NAME.sub(" ", folded.translate(_SEPARATORS)).split())
    return (words if words.isascii() else _SPACE.sub("", words)) or "".join(folded.split())


def is_distinctive(normalized_text: str) -> bool:
    """Return whether a text is long enough that a repeat in another file is unlikely to be chance.

    A long text has 4 words or more; two characters of a script without spaces are a word.
    """
    if normalized_text.count(" ") >= 3:
        return True
    characters = len(_WITHOUT_SPACES.findall(normalized_text))
    return len(_WITHOUT_SPACES.sub(" ", normalized_text).split()) + characters / 2 >= 4


def key(*parts: str) -> int:
    """Return a 64-bit hash of one or several texts in order. A collision among a million keys has probability 3e-8."""
    content = "\0".join(parts).encode(errors="backslashreplace")  # a lone surrogate cannot be encoded
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def pair_key(left: str, right: str) -> int:
    """Return a 64-bit hash of two texts that does not depend on their order."""
    return key(*sorted((left, right)))


def printable(text: str) -> str:
    """Return the text with lone surrogates escaped, so that the result can be printed and encoded in UTF-8."""
    return text.encode(errors="backslashreplace").decode()
