"""Pairs of issues that are no duplicates: found at random, by shared words, or by shared labels, and refused where anything
speaks for their being duplicates after all.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property

from angle_llm.data.keys import sound
from angle_llm.issue_pairs.duplicates import says_duplicate
from angle_llm.issue_pairs.overlap import Overlap
from angle_llm.issue_pairs.records import Issue, Key

TOO_ALIKE = 0.85
"""Cosine of shared words above which two issues may be duplicates that nobody marked: no negative."""
_LOOKED_AT = 20


def negative_counts(shares: Mapping[str, float], anchors: int) -> dict[str, int]:
    """Negatives of each kind, rounded as they add up, so that all together are what was asked for."""
    upto = [round(total * anchors) for total in itertools.accumulate(share for _, share in sorted(shares.items()))]
    return {kind: end - start for kind, start, end in zip(sorted(shares), [0, *upto], upto, strict=False)}


class Pool:
    """The issues of one repository in one split, their words, and their clusters; `suspected`: two clusters that may be one."""

    def __init__(
        self, issues: Sequence[Issue], words: Sequence[str], clusters: Sequence[Key], suspected: Set[frozenset[Key]]
    ) -> None:
        self.issues, self._words, self._clusters, self._suspected = issues, words, clusters, suspected

    @cached_property
    def overlap(self) -> Overlap:
        return Overlap(self._words)

    @cached_property
    def by_label(self) -> dict[str, list[int]]:
        found = defaultdict[str, list[int]](list)
        for place, issue in enumerate(self.issues):
            for label in issue.labels:
                if not says_duplicate(label):
                    found[label].append(place)
        return found

    def negatives(
        self, anchors: Sequence[Key], counts: Mapping[str, int], chance: random.Random, seen: set[frozenset[str]]
    ) -> Iterator[tuple[Key, Key, str, str]]:
        """Pairs of two clusters that are not `seen`, so many of each kind. Where a kind finds none, a random one."""
        places = {issue.key: place for place, issue in enumerate(self.issues)}
        turn = itertools.cycle(anchors)
        for kind, count in counts.items():
            for anchor in itertools.islice(turn, count):
                one = places[anchor]
                for way in dict.fromkeys((kind, "random")):
                    fits = (found for found in NEGATIVES[way](self, one, chance) if self._differ(one, found[0], seen))
                    if (found := next(fits, None)) is not None:
                        seen.add(self._words_of(one, found[0]))
                        yield anchor, self.issues[found[0]].key, way, found[1]
                        break

    def _differ(self, one: int, other: int, seen: Set[frozenset[str]]) -> bool:
        """Whether nothing speaks for two issues being duplicates, and their texts are not a pair already."""
        both = frozenset((self._clusters[one], self._clusters[other]))
        return (
            len(both) == 2
            and both not in self._suspected
            and self._words_of(one, other) not in seen
            and self.overlap.cosine(one, other) <= TOO_ALIKE
        )

    def _words_of(self, one: int, other: int) -> frozenset[str]:
        return frozenset((self._words[one], self._words[other]))


def _random(pool: Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """Any issue."""
    for _ in range(_LOOKED_AT):
        yield chance.randrange(len(pool.issues)), "any other issue"


def _overlapping(pool: Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """One of those that share most words."""
    for cosine, other in pool.overlap.nearest(one, _LOOKED_AT):
        yield other, f"shared words {cosine:.2f}"


def _labelled(pool: Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """One that has a label of the issue, the rarest first."""
    for label in sorted(pool.issues[one].labels, key=lambda label: (len(pool.by_label.get(label, ())), label)):
        if having := pool.by_label.get(label):
            for other in chance.sample(having, min(_LOOKED_AT, len(having))):
                yield other, f"same label {sound(label)}"


NEGATIVES: dict[str, Callable[[Pool, int, random.Random], Iterator[tuple[int, str]]]] = {
    "random": _random,
    "overlap": _overlapping,
    "labels": _labelled,
}
