"""Issues and comments of GitHub repositories, read through PyGithub and kept on disk."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from journal import Journal, Row

from angle_llm import __version__
from angle_llm.config import SettingsError
from angle_llm.data import DataError

PER_PAGE = 100
LONGEST_WAIT = 2 * 3600  # seconds
TOKEN = "GITHUB_TOKEN"
MAINTAINERS = {"OWNER", "MEMBER", "COLLABORATOR"}
KEPT = {
    "id", "number", "title", "body", "state", "state_reason", "created_at", "closed_at", "updated_at", "labels", "name", "user",
    "login", "type", "repository_url", "pull_request", "issue_url", "author_association", "event", "full_name",
}  # fmt: skip
"""Fields of the API that the cache keeps."""

Read = TypeVar("Read")
Key = tuple[str, int]
"""Repository in lower case, and issue number."""


@dataclass(frozen=True)
class Issue:
    """An issue or pull request, which share their numbers."""

    id: int
    repo: str
    number: int
    title: str
    body: str
    closed_at: datetime | None
    """None: open."""
    state_reason: str
    labels: tuple[str, ...]
    updated_at: str
    is_pull_request: bool
    author: str
    by_bot: bool

    @property
    def key(self) -> Key:
        return self.repo.lower(), self.number

    @property
    def name(self) -> str:
        return f"{self.repo}#{self.number}"


@dataclass(frozen=True)
class Comment:
    """A comment under an issue."""

    issue: Key
    text: str
    created_at: datetime
    by_maintainer: bool
    author: str


def read_issue(row: Any) -> Issue:
    """The issue in a row of the API; a deleted user and missing texts are empty."""
    try:
        return Issue(
            id=int(row["id"]),
            repo="/".join(row["repository_url"].split("/")[-2:]),
            number=int(row["number"]),
            title=row.get("title") or "",
            body=row.get("body") or "",
            closed_at=_time(row["closed_at"]) if row["state"] == "closed" else None,
            state_reason=row.get("state_reason") or "",
            labels=tuple(label["name"] for label in row.get("labels") or ()),
            updated_at=_time(row["updated_at"]).isoformat(),
            is_pull_request=row.get("pull_request") is not None,
            author=_login(row),
            by_bot=_is_bot(row),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"--api: expected an issue of GitHub's REST API, got {str(row)[:100]!r}") from None


def read_comment(row: Any) -> Comment:
    """The comment in a row of the API."""
    try:
        owner, repo, _, number = row["issue_url"].split("/")[-4:]
        by_maintainer = row.get("author_association") in MAINTAINERS and not _is_bot(row)
        issue, created_at = (f"{owner}/{repo}".lower(), int(number)), _time(row["created_at"])
        _ = int(row["id"]), _time(row["updated_at"])
        return Comment(issue, row.get("body") or "", created_at, by_maintainer, _login(row))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"--api: expected a comment of GitHub's REST API, got {str(row)[:100]!r}") from None


def _login(row: Row) -> str:
    return str((row.get("user") or {}).get("login") or "")


def _is_bot(row: Row) -> bool:
    return (row.get("user") or {}).get("type") == "Bot" or _login(row).endswith("[bot]")


def _time(value: str) -> datetime:
    return datetime.fromisoformat(value.replace("Z", "+00:00"))


def _second_before(time: str) -> str:
    return (_time(time) - timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_token(api: str) -> str | None:
    """The token of the environment, if any; refused where it would be sent unencrypted to another machine."""
    token = os.environ.get(TOKEN, "").strip() or None
    parts = urlsplit(api)
    if token is None:
        print(f"No token in {TOKEN}: GitHub allows 60 requests an hour; with a token, 5,000.")
    elif not (token.isprintable() and token.isascii()):
        raise SettingsError(f"{TOKEN}: the token has characters that are not allowed in one.")
    elif parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise SettingsError(f"--api: a token needs https://{parts.netloc}; or unset {TOKEN}.")
    if parts.scheme == "http":
        os.environ["no_proxy"] = str(parts.hostname)  # a proxy could read the token
    return token


class GitHub:
    """GitHub's REST API through PyGithub, with a cache on disk.

    PyGithub waits for rate limits and repeats requests after errors of the server. Raises DataError for a refusal.
    """

    def __init__(self, api: str, folder: Path, token: str | None, *, offline: bool) -> None:
        try:
            import github
            from github.GithubRetry import GithubRetry
        except ImportError:
            raise SettingsError("PyGithub is not installed: pip install 'angle_llm[issues]'.") from None
        statuses = [429, *range(500, 600)]
        self._requester = github.Github(
            auth=github.Auth.Token(token) if token else None, base_url=api.rstrip("/"), timeout=60,
            seconds_between_requests=0.1, user_agent=f"angle-llm/{__version__}", api_version="2022-11-28",
            retry=GithubRetry(total=5, backoff_factor=1, status_forcelist=statuses, max_rate_limit_wait=LONGEST_WAIT),
        ).requester  # fmt: skip
        self._refusal, self._token, self._folder, self._offline = github.GithubException, token, folder, offline
        self._journal = Journal(folder / "objects.jsonl")
        self._objects = {row["key"]: row["content"] for row in self._journal.rows}
        self.sent = 0
        """Requests of this process."""

    def __enter__(self) -> GitHub:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def name(self, repo: str) -> str:
        """The current name of a repository. With a former one PyGithub follows the redirect, but drops the parameters."""
        return repo if self._offline else str(self._request(f"/repos/{repo}", required=True).get("full_name", repo))

    def listing(self, path: str, read: Callable[[Row], Read], since: str, most: int | None = None) -> list[Read]:
        """Issues or comments that were updated after a date, at most `most`; only new versions are requested.

        A request is for what was updated since the last row that is kept. Page numbers would miss rows, because a row that is
        updated meanwhile moves the others.
        """
        with Journal(self._folder / f"{path.strip('/').replace('/', '-')}-{since}.jsonl") as journal:
            rows, page = {row["id"]: row for row in journal.rows}, 1
            since = max([f"{since}T00:00:00Z", *(_second_before(row["updated_at"]) for row in journal.rows)])
            while not self._offline and (most is None or len(rows) < most):
                query = {
                    "state": "all",
                    "sort": "updated",
                    "direction": "asc",
                    "since": since,
                    "per_page": PER_PAGE,
                    "page": page,
                }
                content = self._request(f"{path}?{urlencode(query)}", required=True)
                if not isinstance(content, list):
                    raise DataError(f"--api: {path}: expected a list of GitHub's REST API, got {str(content)[:100]}")
                for row in content:
                    read(row)  # before it is kept
                journal.append([row for row in content if rows.get(row["id"]) != row])
                rows |= {row["id"]: row for row in content}
                print(f"{path}: {len(rows):,} rows after {self.sent:,} requests", flush=True)
                if len(content) < PER_PAGE:
                    break
                # Rows of one second can be on two pages.
                newest = _second_before(content[-1]["updated_at"])
                since, page = (newest, 1) if newest > since else (since, page + 1)
        return [read(row) for row in sorted(list(rows.values())[:most], key=lambda row: int(row["id"]))]

    def one(self, path: str, version: str = "") -> Any:
        """The object at a path, requested once for each version of it; None if it is deleted or not visible."""
        key = f"{path} {version}"
        if key not in self._objects and not self._offline:
            self._objects[key] = self._request(path, required=False)
            self._journal.append([{"key": key, "content": self._objects[key]}])
        return self._objects.get(key)

    def has_event(self, issue: Issue) -> bool:
        """Whether a maintainer marked an issue as a duplicate and did not undo it."""
        rows = self.one(f"/repos/{issue.repo}/issues/{issue.number}/events?per_page={PER_PAGE}", issue.updated_at) or []
        marks = [row["event"] for row in rows if str(row.get("event")).endswith("marked_as_duplicate")]
        return marks[-1:] == ["marked_as_duplicate"]

    def _request(self, path: str, *, required: bool) -> Any:
        """The fields in `KEPT` of the content at a path; None for what is not `required` and does not exist."""
        import requests

        remaining, pause = self._requester.rate_limiting[0], self._requester.rate_limiting_resettime + 1 - time.time()
        if remaining == 0 and pause > LONGEST_WAIT:
            raise DataError(f"no requests are left for {pause / 3600:.1f} hours; run the same command again then")
        if remaining == 0 and pause > 0:
            print(f"No requests are left; waiting {pause:.0f} s.", flush=True)
            time.sleep(pause)
        for attempt in range(3):
            self.sent += 1
            try:
                return _reduced(self._requester.requestJsonAndCheck("GET", path)[1])
            except self._refusal as error:
                if error.status in (404, 410, 451) and not required:
                    return None
                message = str(error.message or error.data)[:300].replace(self._token or "\0", "***")
                hint = "Check the name of the repository, and the token in the environment"
                raise DataError(f"{path}: GitHub answered with status {error.status}: {message}. {hint}") from None
            except (requests.RequestException, ValueError, RuntimeError) as error:
                if attempt == 2:  # without the library's message, which can have headers
                    problem = f"no complete answer ({type(error).__name__})"
                    raise DataError(f"{path}: {problem}. Run the same command again to resume") from None
        raise AssertionError


def _reduced(content: Any) -> Any:
    if isinstance(content, list):
        return [_reduced(item) for item in content]
    return {k: _reduced(v) for k, v in content.items() if k in KEPT} if isinstance(content, dict) else content


@dataclass
class Found:
    """What was read. `moved` maps former keys of issues to current ones."""

    issues: dict[Key, Issue] = field(default_factory=dict)
    pull_requests: set[Key] = field(default_factory=set)
    comments: dict[Key, list[Comment]] = field(default_factory=lambda: defaultdict(list))
    moved: dict[Key, Key] = field(default_factory=dict)


def read_repositories(github: GitHub, repos: Sequence[str], since: str, max_issues: int | None) -> Found:
    """All issues of the repositories and the comments under them."""
    found = Found()
    for name in dict.fromkeys(map(github.name, repos)):
        for issue in github.listing(f"/repos/{name}/issues", read_issue, since, max_issues):
            if issue.is_pull_request:
                found.pull_requests.add(issue.key)
            else:
                found.issues[issue.key] = issue
        for comment in github.listing(f"/repos/{name}/issues/comments", read_comment, since):
            if comment.issue in found.issues:
                found.comments[comment.issue].append(comment)
    return found


def read_targets(github: GitHub, found: Found, targets: set[Key]) -> dict[Key, str]:
    """Add issues outside the listings to `found`; returns why others are missing."""
    missing = dict[Key, str]()
    for target in sorted(targets - set(found.issues)):
        row = None if target in found.pull_requests else github.one(f"/repos/{target[0]}/issues/{target[1]}")
        issue = None if row is None else read_issue(row)
        if target in found.pull_requests or (issue and issue.is_pull_request):
            missing[target] = "target is a pull request"
        elif issue is None:
            missing[target] = "target deleted or not visible"
        else:
            found.issues.setdefault(issue.key, issue)
            found.moved[target] = issue.key
    return missing
