"""Which issues share words: cosine of TF-IDF, over each text's most telling words.

A weight is (1 + log count) · log(1 + N / texts that have the word); a text keeps its 64 heaviest words, scaled to length 1. So
one megabyte of log counts as much as three lines, and only texts that share a telling word are ever compared.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]{2,40}")
_READ = 20_000  # characters of a text
_WORDS = 64


class Overlap:
    """An index of texts, by their places."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_WORD.findall(text[:_READ].casefold())) for text in texts]
        having = Counter(word for count in counts for word in count)
        self._vectors = [_vector(count, having, len(texts)) for count in counts]
        self._texts_with = defaultdict[str, list[tuple[int, float]]](list)
        for place, vector in enumerate(self._vectors):
            for word, weight in vector.items():
                self._texts_with[word].append((place, weight))

    def cosine(self, one: int, other: int) -> float:
        """How alike the words of two texts are, 0 to 1."""
        return sum(weight * self._vectors[other].get(word, 0.0) for word, weight in self._vectors[one].items())

    def nearest(self, place: int, count: int) -> list[tuple[float, int]]:
        """(cosine, place) of the other texts that share most with one, the most first; ties in the order of places."""
        scores = defaultdict[int, float](float)
        for word, weight in self._vectors[place].items():
            for other, other_weight in self._texts_with[word]:
                scores[other] += weight * other_weight
        scores.pop(place, None)
        return heapq.nlargest(
            count, ((score, other) for other, score in scores.items()), key=lambda at: (at[0], -at[1])
        )


def _vector(count: Counter[str], having: Counter[str], texts: int) -> dict[str, float]:
    weights = {word: (1 + math.log(n)) * math.log(1 + texts / having[word]) for word, n in count.items()}
    heaviest = heapq.nlargest(_WORDS, weights.items(), key=lambda item: (item[1], item[0]))
    length = math.sqrt(sum(weight**2 for _, weight in heaviest)) or 1.0
    return {word: weight / length for word, weight in heaviest}
