"""Pairs of long texts from GitHub issues that were closed as duplicates (pip install 'angle_llm[issues]').

    python recipes/duplicate_issues.py OWNER/REPO [OWNER/REPO …] --out FOLDER
    angle-llm train --data.path FOLDER/train.jsonl.gz …

Reads issues and comments through GitHub's REST API and writes train, valid and test.jsonl.gz with text1, text2 and
label, and report.json, which accounts for every duplicate. A token from the environment variable GITHUB_TOKEN allows
5,000 requests an hour instead of 60. Everything read is kept in FOLDER/cache: a killed command resumes, a later one
reads only what changed. The texts belong to their authors. User names are removed from the pairs, not from the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from github_issues import Found, GitHub, Issue, Key, read_repositories, read_targets, read_token
from issue_texts import Claim, find_claims, issue_text, mark, mentioned_pairs
from journal import Row
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from angle_llm.cli import guarded
from angle_llm.data import DataError
from angle_llm.data.keys import near
from angle_llm.io import write_file, write_json
from angle_llm.settings_io import SettingsError

SPLITS = ("train", "valid", "test")
SIMILAR = 0.85  # TF-IDF cosine above which two issues may be duplicates that are not marked
CANDIDATES = 20  # for each negative
SAME_CLUSTER = "same cluster"


@dataclass(frozen=True)
class IssueSettings:
    """Which issues are read, and which pairs are made of them."""

    repos: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/REPO [OWNER/REPO …]")]
    """Repositories on GitHub."""
    out: Path
    """Folder for the pairs, report.json and the cache; a new one, or one of an earlier run."""
    api: str = "https://api.github.com"
    """Address of the REST API; of an Enterprise server, https://HOST/api/v3."""
    offline: bool = False
    """Send no request: make pairs from the cache."""
    since: str = "2000-01-01"
    """Only issues and comments updated since this date, such as 2024-01-31."""
    max_issues: int | None = None
    """Stop reading a repository after this many issues and pull requests;
    those without updates for the longest time first."""
    comments: Literal["all", "marked"] = "all"
    """all: every comment, a hundred per request; finds duplicates that only a comment names. marked: the comments of
    issues that are labelled or closed as duplicates, a request for each."""
    closing_days: float = 7.0
    """Days before and after the closing in which a comment can name the duplicate."""
    cluster_pairs: int = 0
    """Further positives from each cluster: at most this many pairs of issues that are duplicates of a common issue."""
    negatives: dict[Literal["random", "overlap", "labels"], float] = field(
        default_factory=lambda: {"random": 0.5, "overlap": 0.35, "labels": 0.15}
    )
    """Negatives for each positive, by kind. random: any two issues; overlap: two with many common words; labels: two
    with a common label. Some of the last two can be duplicates that are not marked."""
    splits: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Shares of train, valid and test. All issues of a cluster are in one split, also when more is read later."""
    min_characters: int = 20
    """Skip issues with a shorter text."""
    max_characters: int = 65_536
    """Cut longer texts."""
    bots: bool = False
    """Keep issues that bots opened."""
    seed: int = 42
    """Seed of the negatives."""

    def __post_init__(self) -> None:
        wrong = [repo for repo in self.repos if not re.fullmatch(r"[A-Za-z0-9][\w-]*/(?!\.{1,2}$)[\w.-]+", repo)]
        if wrong or not self.repos:
            raise SettingsError(f"expected a repository as OWNER/REPO, got {', '.join(wrong) or 'none'}.")
        if not re.fullmatch(r"https?://(\w[\w.-]*|\[[\da-f:]+\])(:\d{1,5})?(/[\w/.-]*)?", self.api):
            raise SettingsError("--api: expected an address without password and query, as https://api.github.com.")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.since):
            raise SettingsError(f"--since: expected a date such as 2024-01-31, got {self.since}.")
        for name, value in asdict(self).items():
            numbers = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            if not all(0 <= number < float("inf") for number in numbers if isinstance(number, int | float)):
                raise SettingsError(f"--{name.replace('_', '-')}: expected 0 or more, got {value}.")
        if not sum(self.splits):
            raise SettingsError("--splits: expected at least one share above 0.")


def main(settings: IssueSettings) -> None:
    """Read repositories and write files of pairs."""
    out = settings.out.expanduser()
    if not (out / "cache").is_dir() and (present := [path.name for path in out.glob("*")]):
        raise SettingsError(f"--out: {out} has files of another program ({present[0]}, …). Choose a new folder.")
    with GitHub(settings.api, out / "cache", read_token(settings.api), offline=settings.offline) as github:
        marked = mark if settings.comments == "marked" else None
        found = read_repositories(github, settings.repos, settings.since, settings.max_issues, marked)
        claims, unclear = find_claims(found, settings.closing_days, github.has_event)
        missing = read_targets(github, found, {claim.target for claim in claims})
    claims = [claim._replace(target=found.moved.get(claim.target, claim.target)) for claim in claims]
    texts, skipped = clean_texts(found, settings)
    pairs = Pairs(found, texts, claims, settings)
    account = pairs.add_positives(claims, missing | skipped) | pairs.add_negatives()
    rows = {split: pairs.rows_of(split) for split in SPLITS}
    report = {
        "issues": len(found.issues),
        "pull requests": len(found.pull_requests),
        "issues skipped": dict(Counter(skipped.values())),
        "duplicates": dict(Counter(claim.reason for claim in claims)),
        "duplicates unclear": unclear,
        **account,
        "pairs": {split: dict(Counter(row["kind"] for row in rows[split])) for split in SPLITS},
        "requests": github.sent,
    }
    for name, value in report.items():
        print(f"{name}: {value or 'none'}")
    if not any(rows.values()):
        raise DataError("no pair of duplicates was found; no file was written. Read more issues or another repository")
    used = {name: value for name, value in asdict(settings).items() if name not in ("out", "api", "offline")}
    write_pairs(rows, report | {"settings": used}, out)
    print(f"Pairs are in {settings.out}. The texts belong to their authors: check the licences before you share them.")


def clean_texts(found: Found, settings: IssueSettings) -> tuple[dict[Key, str], dict[Key, str]]:
    """Return the texts of the issues, and why issues are skipped."""
    entries = [*found.issues.values(), *itertools.chain(*found.comments.values())]
    people = {entry.author.login.lower() for entry in entries}
    texts, skipped = dict[Key, str](), dict[Key, str]()
    for key, issue in found.issues.items():
        text = issue_text(issue.title or "", issue.body or "", people, settings.max_characters)
        if issue.author.is_bot and not settings.bots:
            skipped[key] = "opened by a bot"
        elif len(text) < settings.min_characters:
            skipped[key] = "too short"
        else:
            texts[key] = text
    return texts, skipped


# ------------------------------------------------------------------------------------------------- pairs


def _age(key: Key) -> tuple[int, str]:
    return key[1], key[0]


def find_clusters(links: Sequence[tuple[Key, Key]]) -> dict[Key, Key]:
    """Return linked issues → the oldest issue of their connected component, which later issues do not change."""
    keys = sorted({key for pair in links for key in pair}, key=_age)
    place = {key: number for number, key in enumerate(keys)}
    one, other = ([place[pair[side]] for pair in links] for side in (0, 1))
    linked = csr_array((np.ones(len(links)), (one, other)), (len(keys), len(keys)))
    labels: list[int] = connected_components(linked)[1].tolist() if keys else []
    oldest = dict[int, Key]()
    return {key: oldest.setdefault(label, key) for key, label in zip(keys, labels, strict=True)}


def _hash(text: str) -> float:
    """Return a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def split_of(cluster: Key, shares: Sequence[float]) -> str:
    """Return the split of a cluster, a function of its oldest member."""
    place, ends = _hash(f"{cluster[0]}#{cluster[1]}") * sum(shares), itertools.accumulate(shares)
    return next(name for name, end in zip(SPLITS, ends, strict=True) if place < end)


class Pairs:
    """Rows of each split. Issues linked by claims or by the same text are one cluster, and in one split."""

    def __init__(
        self, found: Found, texts: Mapping[Key, str], claims: Sequence[Claim], settings: IssueSettings
    ) -> None:
        self._found, self._texts, self._settings = found, texts, settings
        self._words, first = {key: near(text) for key, text in texts.items()}, dict[str, Key]()
        same_text = [(key, first.setdefault(text, key)) for key, text in self._words.items()]
        self._clusters = find_clusters([*((claim.duplicate, claim.target) for claim in claims), *same_text])
        self._place = {key: (split_of(self._clusters[key], settings.splits), found.issues[key].repo) for key in texts}
        self._rows, self._seen = defaultdict[str, list[Row]](list), set[frozenset[str]]()
        self._anchors = list[Key]()

    def rows_of(self, split: str) -> list[Row]:
        """Return the rows of a split, in an order that depends on nothing but each row."""
        return sorted(self._rows[split], key=lambda row: _hash(f"{row['id1']} {row['id2']}"))

    def _add(self, one: Key, other: Key, label: int, kind: str, why: str) -> None:
        split, repo = self._place[one]
        self._seen.add(frozenset((self._words[one], self._words[other])))
        names = {"repo": repo, "id1": self._found.issues[one].name, "id2": self._found.issues[other].name}
        row = {
            "text1": self._texts[one],
            "text2": self._texts[other],
            "label": label,
            **names,
            "kind": kind,
            "why": why,
        }
        self._rows[split].append(row)

    def add_positives(self, claims: Sequence[Claim], absent: Mapping[Key, str]) -> Row:
        """Add the claims; returns the account: claims = positives + skipped, but for positives of the same cluster.

        `absent`: why issues have no text.
        """
        positives, skipped = Counter[str](), Counter[str]()
        for claim in [*claims, *cluster_claims(claims, self._clusters, self._settings.cluster_pairs)]:
            without = next((key for key in claim[:2] if key not in self._texts), None)
            both = frozenset(self._words.get(key, "") for key in claim[:2])
            if without is None and len(both) == 2 and both not in self._seen:
                positives[claim.reason] += 1
                self._anchors.append(claim.duplicate)
                self._add(*claim[:2], 1, "duplicate", claim.reason)
            elif claim.reason != SAME_CLUSTER:
                repeated = "same text" if len(both) == 1 else "repeated"
                skipped[absent.get(without, "issue not read") if without else repeated] += 1
        return {"positives": dict(positives), "duplicates skipped": dict(skipped)}

    def add_negatives(self) -> Row:
        """Add negatives for the first issue of the positives, in turn; returns how many were not found."""
        missing = 0
        for here in sorted({self._place[key] for key in self._anchors}):
            anchors = sorted((key for key in self._anchors if self._place[key] == here), key=str)
            issues = [self._found.issues[key] for key in sorted(self._texts) if self._place[key] == here]
            pool = NegativePool(issues, self._words, f"{self._settings.seed} {here}")
            for kind, share in self._settings.negatives.items():
                for anchor in itertools.islice(itertools.cycle(anchors), round(share * len(anchors))):
                    candidates = pool.candidates(kind, anchor)
                    chosen = next((each for each in candidates if self._is_negative(anchor, *each)), None)
                    if chosen is None:
                        missing += 1
                    else:
                        self._add(anchor, chosen[0], 0, kind, f"similarity of words {chosen[1]:.2f}")
        return {"negatives not found": missing}

    def _is_negative(self, one: Key, other: Key, cosine: float) -> bool:
        """Return whether a new pair is of two clusters without mutual mentions, and its words are not too similar."""
        clusters = frozenset((self._clusters[one], self._clusters[other]))
        new = frozenset((self._words[one], self._words[other])) not in self._seen
        return len(clusters) == 2 and clusters not in self._mentioned and new and cosine <= SIMILAR

    @cached_property
    def _mentioned(self) -> set[frozenset[Key]]:
        """Pairs of clusters of which one mentions the other."""
        moved, clusters = self._found.moved, self._clusters
        pairs = [[moved.get(key, key) for key in pair] for pair in mentioned_pairs(self._found)]
        return {frozenset(clusters.get(key, key) for key in pair) for pair in pairs}


def cluster_claims(claims: Sequence[Claim], clusters: Mapping[Key, Key], most: int) -> Iterator[Claim]:
    """Yield further pairs of each cluster, at most `most`, the younger issue first."""
    members = defaultdict[Key, set[Key]](set)
    for claim in claims:
        members[clusters[claim.target]].update(claim[:2])
    claimed = {frozenset(claim[:2]) for claim in claims}
    for keys in members.values():
        pairs = itertools.combinations(sorted(keys, key=_age, reverse=True), 2)
        others = (Claim(*pair, SAME_CLUSTER) for pair in pairs if frozenset(pair) not in claimed)
        yield from itertools.islice(others, most)


class NegativePool:
    """Issues of one repository and split, with TF-IDF vectors of their words."""

    def __init__(self, issues: Sequence[Issue], words: Mapping[Key, str], seed: str) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._keys, self._chance = [issue.key for issue in issues], random.Random(seed)
        self._labels = [{label.name for label in issue.labels} for issue in issues]
        self._place = {key: n for n, key in enumerate(self._keys)}
        vectorizer = TfidfVectorizer(token_pattern=r"\S+", sublinear_tf=True)
        self._rows_NV = vectorizer.fit_transform(words[key][:20_000] for key in self._keys)

    def candidates(self, kind: str, anchor: Key) -> list[tuple[Key, float]]:
        """Return issues and their similarity to the anchor: random, with a common label, or most similar."""
        here = self._place[anchor]
        cosine_N = (self._rows_NV @ self._rows_NV[here].T).toarray().ravel()
        if kind == "overlap":
            places = (-cosine_N).argsort(kind="stable")[: CANDIDATES + 1].tolist()  # the anchor itself is first
        else:
            places = [n for n, labels in enumerate(self._labels) if kind == "random" or labels & self._labels[here]]
            places = self._chance.choices(places, k=CANDIDATES) if places else []
        return [(self._keys[place], float(cosine_N[place])) for place in places]


def write_pairs(rows: Mapping[str, Sequence[Row]], report: Row, out: Path) -> None:
    """Write each file whole or not at all, and the report last."""
    (out / "report.json").unlink(missing_ok=True)
    for split in SPLITS:
        lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows[split]]
        path, packed = out / f"{split}.jsonl.gz", io.BytesIO(gzip.compress(b"".join(lines), mtime=0))
        path.unlink(missing_ok=True)
        if lines:
            write_file(path, partial(shutil.copyfileobj, packed), writer="")
    write_json(out / "report.json", report, writer="")


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(IssueSettings, description=__doc__)))
