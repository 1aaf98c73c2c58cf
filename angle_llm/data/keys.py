"""Texts as 8-byte keys, to compare millions of them."""

from __future__ import annotations

import re
import unicodedata
from hashlib import blake2b

_KEPT = ("L", "M", "N", "So")  # letters, marks, numbers, and symbols such as emoji, which carry meaning


class _Separators(dict[int, int]):
    """Character → itself if it is kept, else a space; filled on demand."""

    def __missing__(self, code: int) -> int:
        kept = unicodedata.category(chr(code)).startswith(_KEPT)
        self[code] = code if kept else ord(" ")
        return self[code]


_SEPARATORS = _Separators({ord(sign): ord(sign) for sign in "+#"})
_NOT_IN_A_NAME = re.compile(r"(?<![\w+#])[+#]+|[+#]+(?=[^\W\d])|#+(?=\d)")
"""Signs that do not end a word."""


def near(text: str) -> str:
    """Return the text without case, spacing, punctuation and compatibility forms: equal for near duplicates.

    "Isn't it 1.5?" equals SentEval's "isn 't it 1.5 ?"; 1.5 and 15 differ, and so do C, C++ and C#. Punctuation is kept
    if the text has nothing else.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = _NOT_IN_A_NAME.sub(" ", folded.translate(_SEPARATORS)).split()
    return " ".join(words) or "".join(folded.split())


def is_telling(near_text: str) -> bool:
    """Return whether a repeated text is hardly a coincidence: 4 words, or 8 letters of a script without spaces."""
    return near_text.count(" ") >= 3 or (not near_text.isascii() and len(near_text) >= 8)


def key(*parts: str) -> int:
    """Return a 64-bit key of the parts in their order; two of a million texts collide with probability 3e-8."""
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=8).digest(), "little")


def pair_key(left: str, right: str) -> int:
    """Return a 64-bit key of two texts in any order."""
    return key(*sorted((left, right)))


def sound(text: str) -> str:
    """Return the text with lone surrogates escaped, so that it can be printed and encoded."""
    return text.encode(errors="backslashreplace").decode()
