"""Pairs of texts from claims: clusters, their splits, the positives and the negatives of each split.

Issues that are duplicates of one another, through any chain and through issues that cannot be read, are one cluster; so are
issues with the same text. A cluster stands in one split, chosen by a hash of its oldest member: it stays there when more is
fetched later, unless two clusters turn out to be one. A negative joins two clusters of one repository and one split.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from angle_llm.data_tools.keys import near
from angle_llm.issue_pairs.duplicates import Claim, says_duplicate
from angle_llm.issue_pairs.overlap import Overlap
from angle_llm.issue_pairs.records import Issue, Key
from angle_llm.issue_pairs.settings import SPLITS, IssueSettings

TOO_ALIKE = 0.85
"""Cosine of shared words above which two issues may be duplicates that nobody marked: no negative."""
_LOOKED_AT = 20

Place = tuple[str, str]
"""A repository and a split."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of the files. `why`: what makes a duplicate one, or how alike a negative's words are."""

    text1: str
    text2: str
    label: int
    repo: str
    id1: str
    id2: str
    kind: str
    why: str

    def row(self) -> dict[str, Any]:
        return asdict(self)


class Clusters:
    """Keys that belong together, whether they can be read or not."""

    def __init__(self, links: Iterable[tuple[Key, Key]]) -> None:
        self._above = dict[Key, Key]()
        for one, other in links:
            # The oldest of a cluster stands for it: issues of later have higher numbers.
            older, younger = sorted((self[one], self[other]), key=_age)
            self._above[younger] = older
            self._above.setdefault(older, older)

    def __getitem__(self, key: Key) -> Key:
        path = list[Key]()
        while (above := self._above.get(key, key)) != key:
            path.append(key)
            key = above
        for passed in path:
            self._above[passed] = key
        return key


def _age(key: Key) -> tuple[int, str]:
    return key[1], key[0]


def split_of(cluster: Key, shares: Sequence[float]) -> str:
    """The split of a cluster, by its oldest member alone."""
    number = int.from_bytes(_digest(f"{cluster[0]}#{cluster[1]}")[:7], "big") / 2**56 * sum(shares)
    for name, upto in zip(SPLITS, itertools.accumulate(shares), strict=True):
        if number < upto:
            return name
    return next(name for name, share in reversed(list(zip(SPLITS, shares, strict=True))) if share)


def make_pairs(
    issues: Mapping[Key, Issue], texts: Mapping[Key, str], claims: Sequence[Claim], settings: IssueSettings
) -> dict[str, list[Pair]]:
    """The pairs of each split, in an order that has nothing to do with their labels.

    `texts` holds those that are long enough; claims may name issues without one.
    """
    words = {key: near(text) for key, text in texts.items()}
    clusters = Clusters([*((claim.duplicate, claim.target) for claim in claims), *_same_texts(words)])
    pools = defaultdict[Place, list[Key]](list)
    for key in sorted(texts):
        pools[issues[key].repo, split_of(clusters[key], settings.splits)].append(key)
    positives = defaultdict[Place, list[tuple[Key, Key, str]]](list)
    seen = set[frozenset[str]]()  # issues are opened twice with the same words; a row is not written twice
    for one, other, why in POSITIVES[settings.pairs](texts, claims, clusters, settings.cluster_pairs):
        both = frozenset((words[one], words[other]))
        if len(both) == 2 and both not in seen:  # a text is told from itself without learning
            seen.add(both)
            positives[issues[one].repo, split_of(clusters[one], settings.splits)].append((one, other, why))
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for place, here in sorted(positives.items()):
        repo, split = place
        pool = _Pool([issues[key] for key in pools[place]], [words[key] for key in pools[place]], clusters)
        anchors = [one for one, _, _ in sorted(here, key=lambda item: _digest(f"{item[:2]}"))]
        chance = random.Random(f"{settings.seed} {repo} {split}")
        pairs[split] += [_pair(issues, texts, (one, other), 1, "duplicate", why) for one, other, why in here]
        for one, other, kind, why in pool.negatives(anchors, settings.negatives, chance, seen):
            pairs[split].append(_pair(issues, texts, (one, other), 0, kind, why))
    return {split: sorted(found, key=lambda pair: _digest(f"{pair.id1} {pair.id2}")) for split, found in pairs.items()}


def _same_texts(words: Mapping[Key, str]) -> Iterator[tuple[Key, Key]]:
    first = dict[str, Key]()
    for key, text in words.items():
        yield key, first.setdefault(text, key)


def _pair(
    issues: Mapping[Key, Issue], texts: Mapping[Key, str], keys: tuple[Key, Key], label: int, kind: str, why: str
) -> Pair:
    one, other = keys
    names = issues[one].name, issues[other].name
    return Pair(texts[one], texts[other], label, issues[one].repo, *names, kind, why)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


# ------------------------------------------------------------------------------------------------- positives

Links = Iterator[tuple[Key, Key, str]]


def _chain(texts: Mapping[Key, str], claims: Sequence[Claim], clusters: Clusters, most: int) -> Links:
    """Each duplicate with its target."""
    seen = set[frozenset[Key]]()
    for one, other, why in claims:
        if one in texts and other in texts and frozenset((one, other)) not in seen:
            seen.add(frozenset((one, other)))
            yield one, other, why


def _all(texts: Mapping[Key, str], claims: Sequence[Claim], clusters: Clusters, most: int) -> Links:
    """Any two of a cluster, younger first; of a large one as many as `most`, the claims before the others."""
    claimed = {frozenset((one, other)): why for one, other, why in reversed(claims)}
    members = defaultdict[Key, set[Key]](set)
    for one, other, _ in claims:
        members[clusters[one]].update(key for key in (one, other) if key in texts)
    for _, keys in sorted(members.items()):
        both = [(one, other) for other, one in itertools.combinations(sorted(keys, key=_age), 2)]
        ordered = sorted(both, key=lambda pair: (frozenset(pair) not in claimed, _digest(f"{pair}")))
        for one, other in ordered[:most]:
            yield one, other, claimed.get(frozenset((one, other)), "same cluster")


POSITIVES: dict[str, Callable[[Mapping[Key, str], Sequence[Claim], Clusters, int], Links]] = {
    "chain": _chain,
    "all": _all,
}


# ------------------------------------------------------------------------------------------------- negatives


class _Pool:
    """The issues of one repository in one split, and their words."""

    def __init__(self, issues: Sequence[Issue], words: Sequence[str], clusters: Clusters) -> None:
        self.issues, self.words = issues, words
        self.cluster = [clusters[issue.key] for issue in issues]

    @cached_property
    def overlap(self) -> Overlap:
        return Overlap(self.words)

    @cached_property
    def by_label(self) -> dict[str, list[int]]:
        found = defaultdict[str, list[int]](list)
        for place, issue in enumerate(self.issues):
            for label in issue.labels:
                if not says_duplicate(label):
                    found[label].append(place)
        return found

    def negatives(
        self, anchors: Sequence[Key], shares: Mapping[str, float], chance: random.Random, seen: set[frozenset[str]]
    ) -> Iterator[tuple[Key, Key, str, str]]:
        """Pairs of two clusters that are not `seen`: of each kind its share of the number of anchors.

        Where a kind finds none, a random one.
        """
        places = {issue.key: place for place, issue in enumerate(self.issues)}
        turn = itertools.cycle(anchors)
        # Rounded as they add up, so that the rows together are what was asked for.
        upto = [
            round(total * len(anchors)) for total in itertools.accumulate(share for _, share in sorted(shares.items()))
        ]
        for kind, count in zip(
            sorted(shares), (end - start for start, end in zip([0, *upto], upto, strict=False)), strict=True
        ):
            for anchor in itertools.islice(turn, count):
                one = places[anchor]
                for way in dict.fromkeys((kind, "random")):
                    fits = (
                        (other, why)
                        for other, why in NEGATIVES[way](self, one, chance)
                        if self.cluster[other] != self.cluster[one] and self._words_of(one, other) not in seen
                    )
                    if (found := next(fits, None)) is not None:
                        seen.add(self._words_of(one, found[0]))
                        yield anchor, self.issues[found[0]].key, way, found[1]
                        break

    def _words_of(self, one: int, other: int) -> frozenset[str]:
        return frozenset((self.words[one], self.words[other]))


def _random(pool: _Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """Any issue."""
    for _ in range(_LOOKED_AT):
        yield chance.randrange(len(pool.issues)), "any other issue"


def _overlapping(pool: _Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """One of those that share most words, but so many that it may be a duplicate nobody marked."""
    for cosine, other in pool.overlap.nearest(one, _LOOKED_AT):
        if cosine <= TOO_ALIKE:
            yield other, f"shared words {cosine:.2f}"


def _labelled(pool: _Pool, one: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """One that has a label of the issue, the rarest first."""
    for label in sorted(pool.issues[one].labels, key=lambda label: (len(pool.by_label.get(label, ())), label)):
        if having := pool.by_label.get(label):
            for other in chance.sample(having, min(_LOOKED_AT, len(having))):
                yield other, f"same label {label}"


NEGATIVES: dict[str, Callable[[_Pool, int, random.Random], Iterator[tuple[int, str]]]] = {
    "random": _random,
    "overlap": _overlapping,
    "labels": _labelled,
}


def count_kinds(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, dict[str, int]]:
    """Split → kind → rows."""
    return {split: dict(sorted(Counter(pair.kind for pair in rows).items())) for split, rows in pairs.items()}
