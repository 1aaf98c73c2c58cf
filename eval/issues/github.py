"""Read issues and comments of GitHub repositories through PyGithub, and cache them on disk."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from pydantic import BaseModel, Field, ValidationError

from angle_llm import __version__
from angle_llm.data import DataError
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.tools.language_models import Journal

PER_PAGE = 100
SINCE = "2000-01-01"
"""Start date of the first request for updated issues and comments; earlier than the first issue on GitHub."""
LONGEST_WAIT = 2 * 3600
"""Longest wait in seconds for the rate limit of GitHub."""
TOKEN = "GITHUB_TOKEN"
Key = tuple[str, int]
"""An issue: its repository in lower case, and its number."""


class User(BaseModel):
    """A GitHub account."""

    login: str = ""
    type: str = ""

    @property
    def is_bot(self) -> bool:
        """Whether the account is a bot."""
        return self.type == "Bot" or self.login.endswith("[bot]")


class Label(BaseModel):
    """A label of an issue."""

    name: str


class Entry(BaseModel):
    """Common fields of issues and comments of GitHub's API. Other fields of the API are discarded."""

    id: int
    body: str | None = ""
    user: User | None = None
    created_at: datetime
    updated_at: datetime

    @property
    def author(self) -> User:
        """The account that wrote the text; an empty account if it was deleted."""
        return self.user or User()


class Issue(Entry):
    """An issue or pull request of GitHub's API, which lists both as issues."""

    number: int
    repository_url: str
    title: str | None = ""
    closed_at: datetime | None = None
    state_reason: str | None = None
    labels: list[Label] = []
    pull_request: dict[str, Any] | None = None

    @property
    def repo(self) -> str:
        """The repository of the issue, as OWNER/REPO."""
        return "/".join(self.repository_url.split("/")[-2:])

    @property
    def key(self) -> Key:
        """The repository in lower case, and the number of the issue."""
        return self.repo.lower(), self.number

    @property
    def name(self) -> str:
        """The issue as GitHub displays it, such as OWNER/REPO#12."""
        return f"{self.repo}#{self.number}"


class Comment(Entry):
    """A comment on an issue."""

    issue_url: str = Field(pattern=r"/[^/]+/[^/]+/issues/\d+$")
    author_association: str = ""

    @property
    def issue(self) -> Key:
        """The issue that the comment belongs to."""
        owner, repo, _, number = self.issue_url.split("/")[-4:]
        return f"{owner}/{repo}".lower(), int(number)

    @property
    def by_maintainer(self) -> bool:
        """Whether an owner, member or collaborator of the repository wrote the comment."""
        return self.author_association in ("OWNER", "MEMBER", "COLLABORATOR") and not self.author.is_bot


class Event(BaseModel):
    """An event in the history of an issue, such as `marked_as_duplicate`."""

    event: str = ""


Kind = TypeVar("Kind", bound=BaseModel)
EntryKind = TypeVar("EntryKind", bound=Entry)


def parsed(kind: type[Kind], row: Any) -> Kind:
    """Parse a JSON object of the API into a model. Raises `DataError` if fields are missing or have another type."""
    try:
        return kind.model_validate(row)
    except ValidationError:
        problem = f"expected {kind.__name__.lower()} of GitHub's REST API, got {str(row)[:100]!r}"
        raise DataError(f"--api: {problem}") from None


def read_token(api: str) -> str | None:
    """Return the GitHub token of the environment, None if there is none.

    Raises:
        SettingsError: if the token is malformed, or would be sent to another machine without encryption.
    """
    token = os.environ.get(TOKEN, "").strip() or None
    parts = urlsplit(api)
    if token is None:
        print(f"No token in {TOKEN}: GitHub allows 60 requests an hour; with a token, 5,000.")
    elif not (token.isprintable() and token.isascii()):
        raise SettingsError(f"{TOKEN}: expected a token of printable ASCII characters.")
    elif parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise SettingsError(
            f"--api: {TOKEN} would be sent unencrypted. Set --api https://{parts.netloc}, or unset {TOKEN}."
        )
    if parts.scheme == "http":
        os.environ["no_proxy"] = str(parts.hostname)  # a proxy could read the token
    return token


class GitHub:
    """Client of GitHub's REST API with a cache on disk.

    PyGithub waits for rate limits and repeats requests after server errors. Methods raise `DataError` if GitHub refuses
    a request.
    """

    def __init__(self, api: str, folder: Path, token: str | None) -> None:
        need_library("github", "PyGithub", "issues")
        import github
        from github.GithubRetry import GithubRetry

        statuses = [429, *range(500, 600)]
        self._requester = github.Github(
            auth=github.Auth.Token(token) if token else None, base_url=api.rstrip("/"), timeout=60,
            seconds_between_requests=0.1, user_agent=f"angle-llm/{__version__}", api_version="2022-11-28",
            retry=GithubRetry(total=5, backoff_factor=1, status_forcelist=statuses, max_rate_limit_wait=LONGEST_WAIT),
        ).requester  # fmt: skip
        self._refusal, self._token, self._folder = github.GithubException, token, folder
        self._journal = Journal(folder / "objects.jsonl")
        self._objects = {row["key"]: row["content"] for row in self._journal.rows}
        self.sent = 0
        """Number of requests of this process."""

    def __enter__(self) -> GitHub:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    def name(self, repo: str) -> str:
        """Return the current name of a repository that may have been renamed.

        PyGithub drops the query parameters when it follows a redirect, so later requests must use the current name.
        """
        return str(self._request(f"/repos/{repo}", required=True)[1].get("full_name", repo))

    def listing(self, path: str, kind: type[EntryKind], most: int | None = None) -> list[EntryKind]:
        """Return all issues or comments of a repository, at most `most`; request only changes since the last call.

        Each request asks for rows updated since the newest known row. Page numbers alone would miss rows, because an
        update during the listing moves a row to another page.
        """
        with Journal(self._folder / f"{path.strip('/').replace('/', '-')}-{SINCE}.jsonl") as journal:
            rows, page = {row["id"]: parsed(kind, row) for row in journal.rows}, 1
            since = max([f"{SINCE}T00:00:00Z", *(_second_before(row) for row in rows.values())])
            while most is None or len(rows) < most:
                query = {"state": "all", "sort": "updated", "direction": "asc", "since": since}
                query |= {"per_page": str(PER_PAGE), "page": str(page)}
                headers, content = self._request(f"{path}?{urlencode(query)}", required=True)
                if not isinstance(content, list):
                    raise DataError(f"--api: {path}: expected a list of GitHub's REST API, got {str(content)[:100]}")
                found = [parsed(kind, row) for row in content]
                journal.append(*(row.model_dump(mode="json") for row in found if rows.get(row.id) != row))
                rows |= {row.id: row for row in found}
                left = re.search(r'[?&]page=(\d+)[^>]*>; rel="last"', headers.get("link", ""))
                estimate = f", about {int(left[1]) - page:,} more" if left else ""
                print(f"{path}: {len(rows):,} rows after {self.sent:,} requests{estimate}", flush=True)
                if len(found) < PER_PAGE:
                    break
                # Rows that were updated in the same second can be on two pages.
                newest = _second_before(found[-1])
                since, page = (newest, 1) if newest > since else (since, page + 1)
        return sorted(list(rows.values())[:most], key=lambda row: row.id)

    def one(self, path: str, kind: type[BaseModel], version: str = "") -> Any:
        """Return the fields of `kind` in the JSON answer of an API path; None if it is deleted or not visible.

        An answer is kept in the journal: a later call with the same `version` sends no request.
        """
        key = f"{path} {version}"
        if key not in self._objects:
            content = self._request(path, required=False)[1]
            rows = content if isinstance(content, list) else [] if content is None else [content]
            kept = [parsed(kind, row).model_dump(mode="json") for row in rows]
            self._objects[key] = kept if isinstance(content, list) else next(iter(kept), None)
            self._journal.append({"key": key, "content": self._objects[key]})
        return self._objects.get(key)

    def under(self, issue: Issue, what: str, kind: type[Kind]) -> list[Kind]:
        """Return the events or comments of an issue; `what` is `events` or `comments`."""
        path, rows = f"/repos/{issue.repo}/issues/{issue.number}/{what}?per_page={PER_PAGE}", list[Kind]()
        for page in itertools.count(1):
            found = self.one(f"{path}&page={page}", kind, issue.updated_at.isoformat()) or []
            rows += [parsed(kind, row) for row in found]
            if len(found) < PER_PAGE:
                break
        return rows

    def has_event(self, issue: Issue) -> bool:
        """Return whether a maintainer marked an issue as a duplicate and has not removed the mark."""
        events = [each.event for each in self.under(issue, "events", Event)]
        return [each for each in events if each.endswith("marked_as_duplicate")][-1:] == ["marked_as_duplicate"]

    def _request(self, path: str, *, required: bool) -> tuple[dict[str, Any], Any]:
        """Request an API path; return headers and JSON content, None if the path is missing and not `required`."""
        import requests

        remaining, pause = self._requester.rate_limiting[0], self._requester.rate_limiting_resettime + 1 - time.time()
        if remaining == 0 and pause > LONGEST_WAIT:
            raise DataError(f"no requests are left for {pause / 3600:.1f} hours. Run the same command again then")
        if remaining == 0 and pause > 0:
            print(f"No requests are left; waiting {pause:.0f} s.", flush=True)
            time.sleep(pause)
        for attempt in range(3):
            self.sent += 1
            try:
                return self._requester.requestJsonAndCheck("GET", path)
            except self._refusal as error:
                if error.status in (404, 410, 451) and not required:
                    return {}, None
                message = str(error.message or error.data)[:300].replace(self._token or "\0", "***")
                hint = "Check the name of the repository, and the token in the environment"
                raise DataError(f"{path}: GitHub answered with status {error.status}: {message}. {hint}") from None
            except (requests.RequestException, ValueError, RuntimeError) as error:
                if attempt == 2:  # the message of the library is omitted: it can contain the token
                    problem = f"no complete answer ({type(error).__name__})"
                    raise DataError(f"{path}: {problem}. Run the same command again to resume") from None
        raise AssertionError


def _second_before(row: Entry) -> str:
    """Return the time one second before the last update of an issue or comment, in the format of the API."""
    return (row.updated_at - timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Found:
    """Issues, pull requests and comments read from GitHub. `moved` maps former keys of moved issues to current keys."""

    issues: dict[Key, Issue] = field(default_factory=dict)
    pull_requests: set[Key] = field(default_factory=set)
    comments: dict[Key, list[Comment]] = field(default_factory=lambda: defaultdict(list))
    moved: dict[Key, Key] = field(default_factory=dict)


def read_repositories(
    github: GitHub, repos: Sequence[str], max_issues: int | None, marked: Callable[[Issue], object] | None
) -> Found:
    """Return the issues of repositories and their comments: all comments, or only comments of issues that are `marked`."""
    found = Found()
    for name in dict.fromkeys(map(github.name, repos)):
        listed = github.listing(f"/repos/{name}/issues", Issue, max_issues)
        issues = {issue.key: issue for issue in listed if issue.pull_request is None}
        found.issues |= issues
        found.pull_requests |= {issue.key for issue in listed} - set(issues)
        if marked is None:
            comments = github.listing(f"/repos/{name}/issues/comments", Comment)
        else:
            below = (github.under(issue, "comments", Comment) for issue in issues.values() if marked(issue))
            comments = [comment for each in below for comment in each]
        for comment in comments:
            if comment.issue in issues:
                found.comments[comment.issue].append(comment)
    return found


def read_targets(github: GitHub, found: Found, targets: set[Key]) -> dict[Key, str]:
    """Read issues that other issues refer to and add them to `found`; return the reason for each missing issue."""
    missing = dict[Key, str]()
    for target in sorted(targets - set(found.issues)):
        row = None if target in found.pull_requests else github.one(f"/repos/{target[0]}/issues/{target[1]}", Issue)
        issue = None if row is None else parsed(Issue, row)
        if target in found.pull_requests or (issue and issue.pull_request is not None):
            missing[target] = "target is a pull request"
        elif issue is None:
            missing[target] = "target deleted or not visible"
        else:
            found.issues.setdefault(issue.key, issue)
            found.moved[target] = issue.key
    return missing
