"""Make training pairs from GitHub issues that were closed as duplicates (pip install 'angle_llm[issues]').

    python eval/duplicate_issues.py OWNER/REPO [OWNER/REPO …] --out FOLDER
    angle-llm train --data.path FOLDER/train.jsonl.gz …

Reads issues and comments through GitHub's REST API. Writes train, valid and test.jsonl.gz with the columns text1, text2
and label, and report.json, which counts every duplicate as a pair or by the reason why it is skipped. Set a token in the
environment variable GITHUB_TOKEN for 5,000 requests an hour instead of 60. FOLDER/cache keeps everything that was read: a
killed command resumes, and a later command reads only what changed. The texts belong to their authors. User names are
removed from the pairs, but not from the cache.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import tyro
from issues.github import Found, GitHub, Issue, Key, read_repositories, read_targets, read_token
from issues.texts import Claim, find_claims, is_duplicate_label, issue_text, mark, mentioned_pairs

from angle_llm.cli import run_cli
from angle_llm.data import DataError
from angle_llm.data.keys import normalized
from angle_llm.data.positives import components
from angle_llm.io import write_json, write_json_lines
from angle_llm.settings.parsing import NonNegativeFloat, Positive, SettingsError, settings_class
from angle_llm.tools.language_models import Row

NegativeKind = Literal["random", "overlap", "labels"]
SPLITS = {"train": 0.8, "valid": 0.1, "test": 0.1}
"""Name of each split → its fraction of the clusters of issues."""
MIN_CHARACTERS, MAX_CHARACTERS = 20, 65_536
"""Minimum and maximum length of an issue text. An issue with a shorter text is skipped; a longer text is cut."""
MAX_SIMILARITY = 0.85
"""Largest TF-IDF cosine of a negative pair; issues above it may be duplicates without a mark."""
CANDIDATES = 20
"""Number of candidate issues from which a negative is chosen."""
SEED = 42
"""Seed of the random negatives."""


@settings_class
class IssueSettings:
    """Which issues to read, and which negatives to add to the duplicates."""

    repos: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/REPO [OWNER/REPO …]")]
    """Repositories on GitHub."""
    out: Path
    """Folder for the pairs, report.json and the cache; a new folder, or the folder of an earlier run."""
    api: str = "https://api.github.com"
    """Address of the REST API. For an Enterprise server: https://HOST/api/v3."""
    max_issues: Positive | None = None
    """Maximum number of issues and pull requests to read from a repository, least recently updated first. A later command with
    the same --out reads no changes of these issues. None: all."""
    comments: Literal["all", "marked"] = "all"
    """all: read every comment, a hundred per request; this finds duplicates that only a comment names. marked: read only
    comments of issues that are labelled or closed as duplicates, with a request for each issue."""
    negatives: dict[NegativeKind, NonNegativeFloat] = field(
        default_factory=lambda: {"random": 0.5, "overlap": 0.35, "labels": 0.15}
    )
    """Number of negatives per positive, by kind. random: any two issues. overlap: two issues with many common words.
    labels: two issues with a common label. Negatives of the last two kinds can be unmarked duplicates."""

    def __post_init__(self) -> None:
        wrong = [repo for repo in self.repos if not re.fullmatch(r"[A-Za-z0-9][\w-]*/(?!\.{1,2}$)[\w.-]+", repo)]
        if wrong or not self.repos:
            raise SettingsError(f"expected a repository as OWNER/REPO, got {', '.join(wrong) or 'none'}.")
        if not re.fullmatch(r"https?://(\w[\w.-]*|\[[\da-f:]+\])(:\d{1,5})?(/[\w/.-]*)?", self.api):
            raise SettingsError("--api: expected an address without password and query, as https://api.github.com.")


def main(settings: IssueSettings) -> None:
    """Read GitHub repositories, and write pairs of duplicate issues, negative pairs and a report to --out."""
    out = settings.out.expanduser()
    if not (out / "cache").is_dir() and (present := [path.name for path in out.glob("*")]):
        raise SettingsError(f"--out: {out} has files of another program ({present[0]}, …). Choose a new folder.")

    # 1. Issues, comments, and which issue is a duplicate of which.
    with GitHub(settings.api, out / "cache", read_token(settings.api)) as github:
        marked = mark if settings.comments == "marked" else None
        found = read_repositories(github, settings.repos, settings.max_issues, marked)
        claims, unclear = find_claims(found, github.has_event)
        missing = read_targets(github, found, {claim.target for claim in claims})
    claims = [claim._replace(target=found.moved.get(claim.target, claim.target)) for claim in claims]

    # 2. Texts without user names and without phrases that name the duplicate.
    texts, skipped = clean_texts(found)

    # 3. Pairs of duplicates, and negatives.
    pairs = Pairs(found, texts, claims)
    counts = pairs.add_positives(claims, missing | skipped) | pairs.add_negatives(settings.negatives)
    rows = {split: pairs.rows_of(split) for split in SPLITS}

    # 4. Report and files.
    report = {
        "issues": len(found.issues),
        "pull requests": len(found.pull_requests),
        "issues skipped": dict(Counter(skipped.values())),
        "duplicates": dict(Counter(claim.reason for claim in claims)),
        "duplicates unclear": unclear,
        **counts,
        "pairs": {split: dict(Counter(row["kind"] for row in rows[split])) for split in SPLITS},
        "requests": github.sent,
    }
    for name, value in report.items():
        print(f"{name}: {value or 'none'}")
    if not any(rows.values()):
        raise DataError("no pair of duplicates was found; no file was written. Read more issues or another repository")
    used = {name: value for name, value in asdict(settings).items() if name not in ("out", "api")}
    write_pairs(rows, report | {"settings": used}, out)
    print(f"Pairs are in {settings.out}. The texts belong to their authors: check the licences before you share them.")


def clean_texts(found: Found) -> tuple[dict[Key, str], dict[Key, str]]:
    """Return issue → cleaned text for usable issues, and issue → reason for skipped issues."""
    entries = [*found.issues.values(), *itertools.chain(*found.comments.values())]
    people = {entry.author.login.lower() for entry in entries}
    texts, skipped = dict[Key, str](), dict[Key, str]()
    for key, issue in found.issues.items():
        text = issue_text(issue.title or "", issue.body or "", people, MAX_CHARACTERS)
        if issue.author.is_bot:
            skipped[key] = "opened by a bot"
        elif len(text) < MIN_CHARACTERS:
            skipped[key] = "too short"
        else:
            texts[key] = text
    return texts, skipped


# --- pairs ------------------------------------------------------------------------------------------------------------


def find_clusters(links: Sequence[tuple[Key, Key]]) -> dict[Key, Key]:
    """Return a dictionary from each linked issue to the oldest issue of its connected component.

    Issues that are read later are younger, so they do not change the oldest issue.
    """
    keys = sorted({key for pair in links for key in pair}, key=lambda key: (key[1], key[0]))
    index_of = {key: index for index, key in enumerate(keys)}
    edges = [(index_of[left], index_of[right]) for left, right in links]
    labels: list[int] = components(len(keys), edges).tolist() if edges else []
    oldest = dict[int, Key]()
    return {key: oldest.setdefault(label, key) for key, label in zip(keys, labels, strict=True)}


def unit_hash(text: str) -> float:
    """Return a hash of a text as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def split_of(cluster: Key) -> str:
    """Return train, valid or test for a cluster of linked issues, by a hash of its oldest issue."""
    position = unit_hash(f"{cluster[0]}#{cluster[1]}") * sum(SPLITS.values())
    ends = itertools.accumulate(SPLITS.values())
    return next(name for name, end in zip(SPLITS, ends, strict=True) if position < end)


class Pairs:
    """Pairs of issues by split. Duplicate issues and issues with equal texts form a cluster, which is in one split."""

    def __init__(self, found: Found, texts: Mapping[Key, str], claims: Sequence[Claim]) -> None:
        self._found, self._texts = found, texts
        self._words, first = {key: normalized(text) for key, text in texts.items()}, dict[str, Key]()
        same_text = [(key, first.setdefault(text, key)) for key, text in self._words.items()]
        self._clusters = find_clusters([*((claim.duplicate, claim.target) for claim in claims), *same_text])
        self._group_of = {key: (split_of(self._clusters[key]), found.issues[key].repo) for key in texts}
        """Split and repository of each issue."""
        self._rows, self._seen = defaultdict[str, list[Row]](list), set[frozenset[str]]()
        self._anchors = list[Key]()

    def rows_of(self, split: str) -> list[Row]:
        """Return the pairs of a split as rows, ordered by a hash of the row."""
        return sorted(self._rows[split], key=lambda row: unit_hash(f"{row['id1']} {row['id2']}"))

    def _add(self, left: Key, right: Key, label: int, kind: str, why: str) -> None:
        """Add a pair of issues to the rows of the split of `left`."""
        split, repo = self._group_of[left]
        self._seen.add(frozenset((self._words[left], self._words[right])))
        row = {
            "text1": self._texts[left],
            "text2": self._texts[right],
            "label": label,
            "repo": repo,
            "id1": self._found.issues[left].name,
            "id2": self._found.issues[right].name,
            "kind": kind,
            "why": why,
        }
        self._rows[split].append(row)

    def add_positives(self, claims: Sequence[Claim], absent: Mapping[Key, str]) -> Row:
        """Add a positive pair for each claim that an issue is a duplicate; count pairs, and skipped claims by reason.

        `absent` gives the reason why an issue has no text.
        """
        positives, skipped = Counter[str](), Counter[str]()
        for claim in claims:
            without = next((key for key in claim[:2] if key not in self._texts), None)
            texts = frozenset(self._words.get(key, "") for key in claim[:2])
            if without is not None:
                skipped[absent.get(without, "issue not read")] += 1
            elif len(texts) == 1 or texts in self._seen:
                skipped["same text" if len(texts) == 1 else "repeated"] += 1
            else:
                positives[claim.reason] += 1
                self._anchors.append(claim.duplicate)
                self._add(*claim[:2], 1, "duplicate", claim.reason)
        return {"positives": dict(positives), "duplicates skipped": dict(skipped)}

    def add_negatives(self, negatives: Mapping[NegativeKind, float]) -> Row:
        """Add negative pairs for the duplicates of each split and repository; return the number of missing negatives.

        `negatives` gives the number of negatives per positive by kind.
        """
        missing = 0
        for group in sorted({self._group_of[key] for key in self._anchors}):
            anchors = sorted((key for key in self._anchors if self._group_of[key] == group), key=str)
            issues = [self._found.issues[key] for key in sorted(self._texts) if self._group_of[key] == group]
            pool = NegativePool(issues, self._words, f"{SEED} {group}")
            for kind, share in negatives.items():
                for anchor in itertools.islice(itertools.cycle(anchors), round(share * len(anchors))):
                    candidates = pool.candidates(kind, anchor)
                    chosen = next((found for found in candidates if self._is_negative(anchor, *found)), None)
                    if chosen is None:
                        missing += 1
                    else:
                        self._add(anchor, chosen[0], 0, kind, f"similarity of words {chosen[1]:.2f}")
        return {"negatives not found": missing}

    def _is_negative(self, left: Key, right: Key, cosine: float) -> bool:
        """Return whether two issues can be a negative pair: new, of unrelated clusters, and with different words."""
        clusters = frozenset((self._clusters[left], self._clusters[right]))
        is_new = frozenset((self._words[left], self._words[right])) not in self._seen
        return len(clusters) == 2 and clusters not in self._mentioned and is_new and cosine <= MAX_SIMILARITY

    @cached_property
    def _mentioned(self) -> set[frozenset[Key]]:
        """Pairs of clusters in which an issue of one cluster mentions an issue of the other cluster."""
        moved, clusters = self._found.moved, self._clusters
        pairs = [[moved.get(key, key) for key in pair] for pair in mentioned_pairs(self._found)]
        return {frozenset(clusters.get(key, key) for key in pair) for pair in pairs}


class NegativePool:
    """Issues of one repository and split, with TF-IDF vectors of their words."""

    def __init__(self, issues: Sequence[Issue], words: Mapping[Key, str], seed: str) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._keys, self._random = [issue.key for issue in issues], random.Random(seed)
        self._labels = [
            {label.name for label in issue.labels if not is_duplicate_label(label.name)} for issue in issues
        ]
        self._index_of = {key: index for index, key in enumerate(self._keys)}
        vectorizer = TfidfVectorizer(token_pattern=r"\S+", sublinear_tf=True)
        self._rows_NV = vectorizer.fit_transform(words[key][:20_000] for key in self._keys)

    def candidates(self, kind: str, anchor: Key) -> list[tuple[Key, float]]:
        """Return candidates for the negative of an issue, with their TF-IDF cosines.

        `kind` is overlap (the most similar issues first), random, or labels (random issues with a common label).
        """
        row = self._index_of[anchor]
        cosine_N = (self._rows_NV @ self._rows_NV[row].T).toarray().ravel()
        if kind == "overlap":
            chosen = (-cosine_N).argsort(kind="stable")[: CANDIDATES + 1].tolist()  # the anchor itself is first
        else:
            pool = [n for n, labels in enumerate(self._labels) if kind == "random" or labels & self._labels[row]]
            chosen = self._random.choices(pool, k=CANDIDATES) if pool else []
        return [(self._keys[index], float(cosine_N[index])) for index in chosen]


def write_pairs(rows: Mapping[str, Sequence[Row]], report: Row, out: Path) -> None:
    """Write the rows of each split to a file atomically, then the report."""
    (out / "report.json").unlink(missing_ok=True)
    for split in SPLITS:
        path = out / f"{split}.jsonl.gz"
        path.unlink(missing_ok=True)
        if rows[split]:
            write_json_lines(path, rows[split], writer="")
    write_json(out / "report.json", report, writer="")


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(IssueSettings, description=__doc__)))
