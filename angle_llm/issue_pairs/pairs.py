"""Pairs of texts from claims: clusters, their splits, the positives and the negatives of each split.

Issues that are duplicates of one another, through any chain and through issues that cannot be read, are one cluster; so are
issues with the same text. A cluster stands in one split, chosen by a hash of its oldest member: it stays there when more is
fetched later, unless two clusters turn out to be one. A negative joins two clusters of one repository and one split, of which
nobody named the one in the other, and whose words are not too alike (`negatives`).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from angle_llm.data.keys import near
from angle_llm.issue_pairs.duplicates import Claim
from angle_llm.issue_pairs.negatives import Pool, negative_counts
from angle_llm.issue_pairs.records import Issue, Key
from angle_llm.issue_pairs.settings import SPLITS, IssueSettings

SAME_CLUSTER = "same cluster"
"""Why two issues of which nobody said it are duplicates."""

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


@dataclass(frozen=True)
class Made:
    """The pairs of each split, and what came of all that could have been one."""

    pairs: dict[str, list[Pair]]
    claims_left_out: dict[str, int]
    """Reason → claims without a pair; each of the others has one."""
    negatives_wanted: int
    """More than there are where no issue was found that fits."""

    def positives(self) -> dict[str, int]:
        """Why → pairs of duplicates."""
        return dict(sorted(Counter(pair.why for rows in self.pairs.values() for pair in rows if pair.label).items()))


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
    issues: Mapping[Key, Issue],
    texts: Mapping[Key, str],
    claims: Sequence[Claim],
    settings: IssueSettings,
    *,
    named: Set[frozenset[Key]] = frozenset(),
    absent: Mapping[Key, str] | None = None,
) -> Made:
    """The pairs of each split, in an order that has nothing to do with their labels.

    `texts` holds those that are long enough; claims may name issues without one, and `absent` says why they have none. `named`:
    two issues of which one names the other, so that they are no negative.
    """
    words = {key: near(text) for key, text in texts.items()}
    clusters = Clusters([*((claim.duplicate, claim.target) for claim in claims), *_same_texts(words)])
    pools = defaultdict[Place, list[Key]](list)
    for key in sorted(texts):
        pools[issues[key].repo, split_of(clusters[key], settings.splits)].append(key)
    suspected = {frozenset(clusters[key] for key in both) for both in named}
    positives = defaultdict[Place, list[tuple[Key, Key, str]]](list)
    seen = set[frozenset[str]]()  # issues are opened twice with the same words; a row is not written twice
    for one, other, why in POSITIVES[settings.pairs](texts, claims, clusters, settings.cluster_pairs):
        both = frozenset((words[one], words[other]))
        if len(both) == 2 and both not in seen:  # a text is told from itself without learning
            seen.add(both)
            positives[issues[one].repo, split_of(clusters[one], settings.splits)].append((one, other, why))
    left_out = _left_out(
        claims, words, {frozenset(row[:2]) for here in positives.values() for row in here}, absent or {}
    )
    wanted = 0
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for place, here in sorted(positives.items()):
        repo, split = place
        members = pools[place]
        pool = Pool(
            [issues[key] for key in members],
            [words[key] for key in members],
            [clusters[key] for key in members],
            suspected,
        )
        anchors = [one for one, _, _ in sorted(here, key=lambda item: _digest(f"{item[:2]}"))]
        chance = random.Random(f"{settings.seed} {repo} {split}")
        pairs[split] += [_pair(issues, texts, (one, other), 1, "duplicate", why) for one, other, why in here]
        counts = negative_counts(settings.negatives, len(anchors))
        wanted += sum(counts.values())
        for one, other, kind, why in pool.negatives(anchors, counts, chance, seen):
            pairs[split].append(_pair(issues, texts, (one, other), 0, kind, why))
    pairs = {split: sorted(found, key=lambda pair: _digest(f"{pair.id1} {pair.id2}")) for split, found in pairs.items()}
    return Made(pairs, left_out, wanted)


def _left_out(
    claims: Sequence[Claim], words: Mapping[Key, str], written: Set[frozenset[Key]], absent: Mapping[Key, str]
) -> dict[str, int]:
    """Why claims have no pair of their own: each is counted once, or stands in a pair alone."""
    reasons, told = Counter[str](), set[frozenset[Key]]()
    texts_told = {frozenset(words[key] for key in both) for both in written}
    for claim in claims:
        both = frozenset(claim[:2])
        without = [key for key in claim[:2] if key not in words]
        if without:
            reasons[absent.get(without[0], "an issue that was not read")] += 1
        elif both in told:
            reasons["said before"] += 1
        elif both in written:
            told.add(both)
        elif words[claim.duplicate] == words[claim.target]:
            reasons["the same text"] += 1
        elif frozenset(words[key] for key in both) in texts_told:
            reasons["the texts of another pair"] += 1
        else:
            reasons["more than cluster_pairs"] += 1
    return dict(sorted(reasons.items()))


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
    claimed = {_by_age(one, other): why for one, other, why in reversed(claims)}
    members = defaultdict[Key, set[Key]](set)
    for one, other, _ in claims:
        members[clusters[one]].update(key for key in (one, other) if key in texts)
    for _, keys in sorted(members.items()):
        order = {key: int.from_bytes(_digest(f"{key}")[:8], "big") for key in keys}
        both = ((one, other) for other, one in itertools.combinations(sorted(keys, key=_age), 2))
        # Never all in memory: a cluster of thousands has millions. The order is any that is the same in each run.
        ranked = ((pair not in claimed, order[pair[0]] ^ order[pair[1]], pair) for pair in both)
        for _, _, pair in heapq.nsmallest(most, ranked):
            yield *pair, claimed.get(pair, SAME_CLUSTER)


def _by_age(one: Key, other: Key) -> tuple[Key, Key]:
    return (one, other) if _age(one) > _age(other) else (other, one)


POSITIVES: dict[str, Callable[[Mapping[Key, str], Sequence[Claim], Clusters, int], Links]] = {
    "chain": _chain,
    "all": _all,
}


def count_kinds(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, dict[str, int]]:
    """Split → kind → rows."""
    return {split: dict(sorted(Counter(pair.kind for pair in rows).items())) for split, rows in pairs.items()}
