"""An issue and a comment, as much of them as is used here, from what the API gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Key = tuple[str, int]
"""A repository's owner/name in lower case, and the number: GitHub does not tell case apart."""

MAINTAINERS = {"OWNER", "MEMBER", "COLLABORATOR"}
"""Associations with a repository that let somebody close other people's issues."""


class IssueError(ValueError):
    """Issues that cannot be read or paired as asked, with what is wrong."""


@dataclass(frozen=True, slots=True)
class Issue:
    """`repo` is the name the server knows it by now; `number` is shared with pull requests."""

    repo: str
    number: int
    title: str
    body: str
    closed: bool
    state_reason: str
    closed_at: datetime | None
    labels: tuple[str, ...]
    author: str
    by_bot: bool
    is_pull_request: bool

    @property
    def key(self) -> Key:
        return self.repo.lower(), self.number

    @property
    def name(self) -> str:
        return f"{self.repo}#{self.number}"


@dataclass(frozen=True, slots=True)
class Comment:
    """What somebody said under an issue; `by_maintainer` is how they stand to the repository today."""

    issue: Key
    text: str
    created_at: datetime | None
    author: str
    by_maintainer: bool


def read_issue(row: object) -> Issue:
    """An issue or pull request of the API. A deleted user, a missing body and missing labels are as if empty.

    Raises `IssueError` for a row that is none.
    """
    if not isinstance(row, Mapping) or type(row.get("number")) is not int:
        raise IssueError(f"needed an issue with a number; came {str(row)[:100]!r}. Is --api GitHub's REST API?")
    author, by_bot = _user(row)
    return Issue(
        repo=_repo(row.get("repository_url")),
        number=row["number"],
        title=_text(row, "title"),
        body=_text(row, "body"),
        closed=row.get("state") == "closed",
        state_reason=_text(row, "state_reason"),
        closed_at=_time(row, "closed_at"),
        labels=tuple(_label(label) for label in row.get("labels") or ()),
        author=author,
        by_bot=by_bot,
        is_pull_request=row.get("pull_request") is not None,
    )


def read_comment(row: object) -> Comment:
    """A comment of the API, as `read_issue` reads an issue."""
    place = re.fullmatch(r"(.*)/issues/(\d+)", str(row.get("issue_url"))) if isinstance(row, Mapping) else None
    if place is None or not isinstance(row, Mapping):
        raise IssueError(f"needed a comment with its issue_url; came {str(row)[:100]!r}. Is --api GitHub's REST API?")
    author, by_bot = _user(row)
    return Comment(
        issue=(_repo(place[1]).lower(), int(place[2])),
        text=_text(row, "body"),
        created_at=_time(row, "created_at"),
        author=author,
        by_maintainer=row.get("author_association") in MAINTAINERS and not by_bot,
    )


def _repo(url: object) -> str:
    found = re.search(r"/repos/([\w.-]+/[\w.-]+)$", str(url), re.ASCII)
    if found is None:
        raise IssueError(f"needed the address of a repository; came {str(url)[:100]!r}. Is --api GitHub's REST API?")
    return found[1]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _time(row: Mapping[str, Any], name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(_text(row, name).replace("Z", "+00:00"))
    except ValueError:
        return None


def _label(label: object) -> str:
    return _text(label, "name") if isinstance(label, Mapping) else str(label)


def _user(row: Mapping[str, Any]) -> tuple[str, bool]:
    user = row.get("user")
    if not isinstance(user, Mapping):
        return "", False
    login = _text(user, "login")
    return login, user.get("type") == "Bot" or login.endswith("[bot]")
