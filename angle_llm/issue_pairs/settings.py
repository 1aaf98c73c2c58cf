"""The settings of `angle-llm data issues`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import tyro

from angle_llm.config import SettingsError
from angle_llm.errors import unknown

DESCRIPTION = """Makes pairs of long texts from issues that were closed as duplicates, read from GitHub.

Asks GitHub's REST API, and nothing else, for the issues of the repositories you name. The texts are their authors' and so are
their licences; what you may do with them is said by those and by GitHub's terms. The files are for your own use. User names
are taken out of the pairs; the pages kept in the cache hold them as the server gave them.
"""

SPLITS = ("train", "valid", "test")
KINDS = ("random", "overlap", "labels")
"""Ways to find a negative; `pairs` has them."""


@dataclass(frozen=True)
class IssueSettings:
    """What `angle-llm data issues` reads, and what it makes of it."""

    repos: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/REPO [OWNER/REPO …]")]
    """Repositories on GitHub."""
    out: Path
    """Folder for train.jsonl.gz, valid.jsonl.gz, test.jsonl.gz, report.json, and the pages read, in cache/. Files of these names
    that this command did not write are left alone, and another folder is asked for."""
    token_variable: str = "GITHUB_TOKEN"
    """Environment variable that holds a token: 5,000 requests an hour in place of 60. It is written nowhere."""
    api: str = "https://api.github.com"
    """Address of the REST API; of an Enterprise server, https://HOST/api/v3."""
    cache: Path | None = None
    """Folder for the pages read, names and texts as people wrote them. None: cache/ in the output folder."""
    refresh: bool = False
    """Ask the server whether kept pages changed (a page that did not costs none of the hourly requests), and for what is
    new. Without it what is kept is not asked for again."""
    since: str | None = None
    """Only issues and comments touched since this date, as 2024-01-31."""
    max_issues: int | None = None
    """At most so many issues of a repository, the oldest first."""
    comments: Literal["all", "marked"] = "all"
    """all: every comment, a hundred a request; finds duplicates that were closed with words alone. marked: only under issues
    that are labelled or closed as duplicates, a request for each."""
    events: bool = True
    """Where somebody without rights in the repository says "duplicate of", ask for the issue's events (a request each)
    whether somebody with rights marked it."""
    fetch_targets: bool = True
    """Ask for targets that are not among the issues read (a request each), in other repositories too."""
    closing_days: float = 7.0
    """Days before and after its closing in which comments say why an issue was closed."""
    pairs: Literal["chain", "all"] = "chain"
    """chain: each duplicate with its target. all: any two that are duplicates of one another, through any chain."""
    cluster_pairs: int = 50
    """With `all`: at most so many pairs of one cluster."""
    negatives: dict[str, float] = field(default_factory=lambda: {"random": 0.5, "overlap": 0.35, "labels": 0.15})
    """Negatives for each positive, by kind. random: any two issues; overlap: two that share many words; labels: two with a
    label in common. None are two of which one names the other, or with nearly the same words. Some of the hard ones may be
    duplicates that nobody marked."""
    splits: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Shares of train, valid, test. Duplicates of one another stand in one split, and stay there when more is fetched."""
    min_characters: int = 20
    """Issues with a shorter text are left out."""
    max_characters: int = 65_536
    """Longer texts lose their end. GitHub's own limit of a body."""
    bots: bool = False
    """Keep issues that bots opened."""
    seed: int = 42
    """For the choice of negatives."""
    requests_per_minute: float = 600.0
    """At most. They go one at a time."""

    def __post_init__(self) -> None:
        if not self.repos:
            raise SettingsError("data issues needs a repository, as OWNER/REPO.")
        for repo in self.repos:
            if not re.fullmatch(r"[A-Za-z0-9][\w-]*/[\w.-]+", repo) or repo.endswith(("/.", "/..")):
                raise SettingsError(f"needed a repository as OWNER/REPO; came {repo!r}.")
        for kind in self.negatives:
            if kind not in KINDS:
                raise SettingsError(unknown("kind of negatives", kind, KINDS))
        amounts = (*self.negatives.values(), *self.splits, self.closing_days)
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts) or sum(self.splits) <= 0:
            raise SettingsError(
                "--negatives, --splits and --closing-days take numbers of 0 and more, --splits one above 0."
            )
        for name in ("max_issues", "cluster_pairs", "min_characters", "max_characters", "requests_per_minute"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise SettingsError(f"--{name.replace('_', '-')} must be above 0, got {value}.")
        if not _is_plain_address(self.api):
            raise SettingsError("--api needs the plain address of a server, as https://api.github.com.")
        _ = self.since_instant

    @property
    def since_instant(self) -> str | None:
        """`since` as the API takes it."""
        if self.since is None:
            return None
        try:
            when = datetime.fromisoformat(self.since.replace("Z", "+00:00"))
        except ValueError:
            raise SettingsError(f"--since needs a date, as 2024-01-31; got {self.since!r}.") from None
        return (
            (when if when.tzinfo else when.replace(tzinfo=timezone.utc))
            .astimezone(timezone.utc)
            .strftime("%Y-%m-%dT%H:%M:%SZ")
        )

    def token(self, environment: Mapping[str, str]) -> str | None:
        """The token, if there is one. Raises `SettingsError` where it would travel for all to read, or cannot be one."""
        token = environment.get(self.token_variable, "").strip() or None
        if token and not (token.isprintable() and token.isascii()):
            raise SettingsError(f"{self.token_variable} holds characters that no token has.")
        parts = urlsplit(self.api)
        if token and parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise SettingsError(
                f"a token is not sent over http; name https://{parts.netloc}, or unset {self.token_variable}."
            )
        return token

    @property
    def cache_folder(self) -> Path:
        return (self.cache or self.out / "cache").expanduser()


def _is_plain_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:  # a bracket without its other, a port that is none
        return False
    return bool(parts.scheme in ("http", "https") and parts.hostname and not parts.username and not parts.query)
