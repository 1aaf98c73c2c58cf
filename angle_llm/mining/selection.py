"""A negative or several for each pair, some pairs at a time; every pair accounted for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from angle_llm.mining.guards import Guards, Judge, Window
from angle_llm.mining.pairs import Material, Pair
from angle_llm.mining.search import grid_rows
from angle_llm.mining.settings import MineSettings
from angle_llm.search import cosines
from angle_llm.vectors import Array

Part = dict[str, Any]
"""What came of some pairs: `rows` of the output, `counts` of pairs, `refused` candidates by reason. Plain JSON values."""

_DIGITS = 6
SCORES_AT_ONCE = 10_000_000
"""Anchors are compared some at a time, so that their cosines with candidates, half a dozen arrays, hold so many numbers each."""


class Index(Protocol):
    """Finds the candidates nearest to anchors; see `search`."""

    def nearest(self, anchors_AD: Array, ranks: int) -> tuple[Array, Array]:
        """Places of candidates (A, R) and cosines (A, R), best first."""
        ...


@dataclass(frozen=True)
class Miner:
    """Everything it takes to mine a part."""

    material: Material
    settings: MineSettings
    vectors: Array
    index: Index
    judge_vectors: Array | None = None

    @property
    def parts(self) -> int:
        """How many there are."""
        return -(-len(self.material.pairs) // self.settings.block_pairs)

    def part(self, number: int) -> Part:
        """Mines the pairs of a part; what comes of a pair does not depend on the others."""
        size = self.settings.block_pairs
        pairs = self.material.pairs[number * size : (number + 1) * size]
        guards = Guards(self.material, self.settings, self._judge())
        counts: Counter[str] = Counter({"full": 0, "short": 0, "without": 0, "left out": 0})
        refused: Counter[str] = Counter()
        rows: list[dict[str, Any]] = []
        for pair, window in self._windows(pairs):
            left = guards.left(window, refused)
            taken = left.where(SAMPLING[self.settings.sampling](left, self.settings, pair.example))
            found = len(taken.text_W)
            came = "full" if found == self.settings.negatives else "short" if found else "without"
            counts[came] += 1
            if came == "short" and self.settings.short == "drop":
                counts["left out"] += 1
            else:
                rows.extend(self._rows(pair, taken))
        return {"rows": rows, "counts": dict(counts), "refused": dict(refused)}

    def _windows(self, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Window]]:
        candidates = len(self.material.candidates_C)
        last = self.settings.ranks[1] or candidates
        size = max(1, SCORES_AT_ONCE // (last + min(candidates, self.settings.block_candidates)))
        for start in range(0, len(pairs), size):
            yield from self._windows_at_once(pairs[start : start + size], last)

    def _windows_at_once(self, pairs: Sequence[Pair], last: int) -> Iterator[tuple[Pair, Window]]:
        first = self.settings.ranks[0]
        anchors, place_of = np.unique([pair.anchor for pair in pairs], return_inverse=True)
        anchor_AD = grid_rows(self.vectors[anchors])
        place_AR, cosine_AR = self.index.nearest(anchor_AD, last)
        positive_PD = grid_rows(self.vectors[[pair.positive for pair in pairs]])
        positive_cosine_P = cosines(anchor_AD[place_of], positive_PD)
        rank_W = np.arange(first, last + 1)
        for pair, place, positive_cosine in zip(pairs, place_of, positive_cosine_P, strict=True):
            yield (
                pair,
                Window(
                    anchor=pair.anchor,
                    positive=pair.positive,
                    positive_cosine=float(positive_cosine),
                    text_W=self.material.candidates_C[place_AR[place, first - 1 :]],
                    cosine_W=cosine_AR[place, first - 1 :],
                    rank_W=rank_W,
                ),
            )

    def _rows(self, pair: Pair, taken: Window) -> Iterator[dict[str, Any]]:
        texts = self.material.texts
        own: dict[str, Any] = {}
        if pair.own_negatives:
            own["own_negative"], *others = pair.own_negatives  # one text: training can read the column
            own |= {"other_own_negatives": others} if others else {}
        for text, cosine, rank in zip(taken.text_W, taken.cosine_W, taken.rank_W, strict=True):
            yield {
                "anchor": texts[pair.anchor],
                "positive": texts[pair.positive],
                "negative": texts[int(text)],
                **own,
                "rank": int(rank),
                "positive_cosine": round(taken.positive_cosine, _DIGITS),
                "negative_cosine": round(float(cosine), _DIGITS),
                "example": pair.example,
                "negative_text": int(text),
            }

    def _judge(self) -> Judge | None:
        vectors = self.judge_vectors
        if vectors is None:
            return None

        def judge(anchor: int, text_W: Array) -> Array:
            return cosines(grid_rows(vectors[[anchor]]), grid_rows(vectors[text_W]))

        return judge


def _top(left: Window, settings: MineSettings, example: int) -> Array:
    return np.arange(min(settings.negatives, len(left.text_W)))


def _random(left: Window, settings: MineSettings, example: int) -> Array:
    """Sorted by random(), the one generator that gives the same numbers in every version of Python; nearest first again."""
    generator = random.Random(settings.seed * 2**64 + example)
    keys = [generator.random() for _ in left.text_W]
    chosen = sorted(range(len(keys)), key=keys.__getitem__)[: settings.negatives]
    return np.array(sorted(chosen), dtype=np.int64)


SAMPLING: dict[str, Callable[[Window, MineSettings, int], Array]] = {"top": _top, "random": _random}
"""How negatives are taken from those left: their places."""
