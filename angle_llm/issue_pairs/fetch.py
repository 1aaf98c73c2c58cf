"""What is read of a repository: its issues, what was said under them, and single issues that are pointed at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from angle_llm.issue_pairs.duplicates import is_labelled
from angle_llm.issue_pairs.github import PER_PAGE, GitHub
from angle_llm.issue_pairs.records import Comment, Issue, Key, read_comment, read_issue


@dataclass
class Found:
    """Issues and comments of all repositories read so far."""

    issues: dict[Key, Issue] = field(default_factory=dict)
    pull_requests: set[Key] = field(default_factory=set)
    comments: dict[Key, list[Comment]] = field(default_factory=dict)
    """Those under issues that are here, in the order they were made."""


@dataclass(frozen=True)
class Wanted:
    """Which issues, and which comments, of a repository. `since`: an instant as the API writes it."""

    since: str | None = None
    max_issues: int | None = None
    comments: str = "all"


def requests_needed(hub: GitHub, repo: str, wanted: Wanted) -> tuple[int, str]:
    """How many pages a repository has, at most, and a sentence on it. Asks for two pages, which are kept."""
    newest = hub.page(f"/repos/{repo}/issues", state="all", sort="created", direction="desc", per_page=1).body
    number = read_issue(newest[0]).number if isinstance(newest, list) and newest else 0
    issues = math.ceil(min(number, wanted.max_issues or number) / PER_PAGE)
    if wanted.comments != "all":
        return issues, f"{repo}: {issues:,} pages of issues or fewer, and one request for each marked as a duplicate"
    first = hub.page(f"/repos/{repo}/issues/comments", per_page=PER_PAGE, **_comment_order(wanted))
    last = parse_qs(urlsplit(first.last or "").query).get("page", [""])[-1]
    comments = int(last) if last.isdecimal() and len(last) < 10 else 1
    more = " or more" if first.next and not last else ""
    return issues + comments, f"{repo}: {issues:,} pages of issues or fewer, {comments:,}{more} of comments"


def read_repository(hub: GitHub, repo: str, wanted: Wanted, found: Found) -> None:
    """Adds a repository's issues, oldest first, and the comments under them."""
    own = dict[Key, Issue]()
    for issue in _issues(hub, repo, wanted):
        if issue.is_pull_request:
            found.pull_requests.add(issue.key)
            continue
        own[issue.key] = issue
        if wanted.max_issues is not None and len(own) >= wanted.max_issues:
            break
    found.issues.update(own)
    comments = dict[Key, list[Comment]]()
    for comment in COMMENTS[wanted.comments](hub, repo, wanted, own.values()):
        if comment.issue in own:
            comments.setdefault(comment.issue, []).append(comment)
    found.comments.update(comments)


def _issues(hub: GitHub, repo: str, wanted: Wanted) -> Iterator[Issue]:
    # Oldest first: pages that are full stay as they are, whatever is opened later.
    since = {"since": wanted.since} if wanted.since else {}
    for page in hub.pages(f"/repos/{repo}/issues", state="all", sort="created", direction="asc", **since):
        yield from map(read_issue, page.body)


def _comment_order(wanted: Wanted) -> dict[str, str]:
    since = {"since": wanted.since} if wanted.since else {}
    return {"sort": "created", "direction": "asc", **since}


def _all_comments(hub: GitHub, repo: str, wanted: Wanted, issues: Iterable[Issue]) -> Iterator[Comment]:
    """A hundred a request, those under pull requests among them."""
    for page in hub.pages(f"/repos/{repo}/issues/comments", **_comment_order(wanted)):
        yield from map(read_comment, page.body)


def _marked_comments(hub: GitHub, repo: str, wanted: Wanted, issues: Iterable[Issue]) -> Iterator[Comment]:
    """One request for each issue that is marked; those that were closed with words alone are not found."""
    for issue in issues:
        if issue.closed and (issue.state_reason == "duplicate" or is_labelled(issue)):
            for page in hub.pages_if_there(f"/repos/{repo}/issues/{issue.number}/comments"):
                yield from map(read_comment, page.body)


COMMENTS: dict[str, Callable[[GitHub, str, Wanted, Iterable[Issue]], Iterator[Comment]]] = {
    "all": _all_comments,
    "marked": _marked_comments,
}


def read_single(hub: GitHub, key: Key) -> Issue | None:
    """An issue by its key, wherever it was moved to; None if nobody may see it."""
    row = hub.one(f"/repos/{key[0]}/issues/{key[1]}")
    return None if row is None else read_issue(row)


def is_marked(hub: GitHub, issue: Issue) -> bool:
    """Whether somebody with write access marked an issue as a duplicate, and nobody took it back; not if its events are gone.

    The event does not say of what: of all kinds of the REST API it has the common properties alone.
    """
    marked = False
    for page in hub.pages_if_there(f"/repos/{issue.repo}/issues/{issue.number}/events"):
        for row in page.body:
            event = row.get("event") if isinstance(row, dict) else None
            if event in ("marked_as_duplicate", "unmarked_as_duplicate"):
                marked = event == "marked_as_duplicate"
    return marked
