"""A server that speaks the part of GitHub's REST API that is used: listings with Link headers, ETags, moved repositories, and
whatever goes wrong when a test says so.
"""

import gzip
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from web_server import Asked, Reply, Server

from angle_llm.issue_pairs.settings import SPLITS

Rows = dict[str, list[dict[str, Any]]]

TOKEN = "ghp_a_secret_that_is_never_told"
OPENED = datetime(2024, 1, 1)


def stamp(hours: float) -> str:
    return (OPENED + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_pairs(out: Path) -> Rows:
    """The rows of each split."""
    found: Rows = {}
    for split in SPLITS:
        path = out / f"{split}.jsonl.gz"
        lines = gzip.decompress(path.read_bytes()).decode().splitlines() if path.exists() else []
        found[split] = [json.loads(line) for line in lines]
    return found


def all_rows(rows: Rows) -> list[dict[str, object]]:
    return [row for split in rows.values() for row in split]


def report_of(out: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((out / "report.json").read_text())
    return content


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


@dataclass
class Repo:
    """Issues by their number, comments, and events by the number of their issue; as the API gives them."""

    name: str
    issues: dict[int, dict[str, Any]] = field(default_factory=dict)
    comments: list[dict[str, Any]] = field(default_factory=list)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def issue(self, number: int, title: str = "", body: str | None = "", **named: Any) -> int:
        """Opened at hour `number`; `closed` at the hour given."""
        closed = named.pop("closed", None)
        self.issues[number] = {
            "number": number,
            "title": title or f"Issue {number} of the set",
            "body": body,
            "state": "open" if closed is None else "closed",
            "state_reason": None if closed is None else "completed",
            "created_at": stamp(number),
            "closed_at": None if closed is None else stamp(closed),
            "labels": [],
            "user": {"login": "someone-real", "type": "User", "url": "kept by nobody"},
            **named,
        }
        return number

    def say(self, number: int, text: str, hour: float, who: str = "MEMBER", **named: Any) -> None:
        self.comments.append(
            {
                "number_": number,
                "body": text,
                "created_at": stamp(hour),
                "author_association": who,
                "user": {"login": "a-maintainer", "type": "User"},
                **named,
            }
        )

    def duplicate(
        self, number: int, of: object, text: str = "Duplicate of {}", hour: float = 100, **named: Any
    ) -> None:
        """Closes an issue, with a comment a minute before."""
        self.issues[number] |= {"state": "closed", "state_reason": "completed", "closed_at": stamp(hour), **named}
        self.say(number, text.format(f"#{of}" if isinstance(of, int) else of), hour - 1 / 60)


class FakeGitHub:
    """`moved`: old name → new. `faults`: replies sent before anything else, for paths that hold the word. `spent_after`: so many
    requests, then the hour is over in a second.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.faults: list[tuple[str, Reply]] = []
        self.spent_after: int | None = None
        self.server = Server(self._reply)

    def repo(self, name: str) -> Repo:
        return self.repos.setdefault(name.lower(), Repo(name))

    def __enter__(self) -> "FakeGitHub":
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def asked(self) -> list[Asked]:
        return self.server.asked

    def _reply(self, asked: Asked) -> Reply:
        for at, (word, fault) in enumerate(self.faults):
            if word in asked.path:
                del self.faults[at]
                return fault
        _, _, owner, name, *rest = asked.path.split("/")
        repo_name = f"{owner}/{name}".lower()
        if repo_name in self.moved:
            path = asked.path.replace(f"/{owner}/{name}", "/" + self.moved[repo_name])
            query = "&".join(f"{key}={value}" for key, value in asked.query.items())
            return Reply({"message": "Moved Permanently"}, 301, {"Location": f"{self.url}{path}?{query}"})
        repo = self.repos.get(repo_name)
        content = None if repo is None else self._content(repo, rest, asked.query)
        if content is None:
            return Reply({"message": "Not Found", "documentation_url": "https://docs.github.com/rest"}, 404)
        return self._paged(asked, content)

    def _content(self, repo: Repo, rest: list[str], query: dict[str, str]) -> Any:
        full = {number: self._issue(repo, issue) for number, issue in repo.issues.items()}
        match rest:
            case ["issues"]:
                down = query.get("direction", "desc") == "desc"
                return [full[number] for number in sorted(full, reverse=down)]
            case ["issues", "comments"]:
                return [self._comment(repo, comment) for comment in repo.comments]
            case ["issues", number]:
                return full.get(int(number))
            case ["issues", number, "comments"]:
                return [self._comment(repo, each) for each in repo.comments if each["number_"] == int(number)]
            case ["issues", number, "events"]:
                return repo.events.get(int(number), [])
        return None

    def _issue(self, repo: Repo, issue: dict[str, Any]) -> dict[str, Any]:
        home = f"{self.url}/repos/{repo.name}"
        return {"repository_url": home, "url": f"{home}/issues/{issue['number']}", **issue}

    def _comment(self, repo: Repo, comment: dict[str, Any]) -> dict[str, Any]:
        return {"issue_url": f"{self.url}/repos/{repo.name}/issues/{comment['number_']}", **comment}

    def _paged(self, asked: Asked, content: Any) -> Reply:
        left = "0" if len(self.asked) == self.spent_after else "4999"
        headers = {
            "X-RateLimit-Limit": "5000",
            "X-RateLimit-Remaining": left,
            "X-RateLimit-Reset": f"{time.time() + 1:.0f}",
        }
        if isinstance(content, list):
            size, page = int(asked.query.get("per_page", 30)), int(asked.query.get("page", 1))
            last = max(1, -(-len(content) // size))
            content = content[(page - 1) * size : page * size]
            if page < last:
                query = "&".join(f"{key}={value}" for key, value in asked.query.items() if key != "page")
                headers["Link"] = ", ".join(
                    f'<{self.url}{asked.path}?{query}&page={number}>; rel="{name}"'
                    for name, number in (("next", page + 1), ("last", last))
                )
        body = json.dumps(content).encode(errors="surrogatepass")
        headers["ETag"] = f'W/"{hashlib.sha256(body).hexdigest()}"'
        if asked.headers.get("if-none-match") == headers["ETag"]:
            return Reply(status=304, headers={name: value for name, value in headers.items() if name != "Link"})
        return Reply(body, headers=headers)


WORDS = [
    "panel", "crash", "window", "save", "export", "unicode", "slow", "memory", "thread", "login", "menu", "cursor", "font",
    "colour", "timeout", "socket", "parser", "index", "cache", "upgrade", "install", "driver", "printer", "network",
]  # fmt: skip


def some_issues(repo: Repo, count: int = 250, seed: int = 0) -> Repo:
    """Issues on random subjects; of each ten, two are closed as duplicates of earlier ones, one is a pull request."""
    chance = random.Random(seed)
    subjects: dict[int, list[str]] = {}
    for number in range(1, count + 1):
        words = subjects[number] = chance.choices(WORDS, k=12)
        labels = [{"name": chance.choice(["bug", "ui", "question"])}]
        repo.issue(number, f"The {words[0]} and the {words[1]} fail ({number})", _body(words, chance), labels=labels)
        earlier = [n for n in subjects if n < number and "pull_request" not in repo.issues[n]]
        if number % 10 == 7:
            repo.issues[number]["pull_request"] = {"url": "…"}
        elif number % 5 == 3 and earlier:
            target = chance.choice(earlier)
            text = _body(subjects[target], chance) + f"\n\nSee also, or duplicate of #{target}?"
            repo.issues[number] |= {"title": f"{subjects[target][0].title()} broken in {number}", "body": text}
            repo.duplicate(number, target, hour=number + 3)
    return repo


def _body(words: list[str], chance: random.Random) -> str:
    lines: Iterator[str] = (f"Then the {word} stops, {chance.choice(WORDS)} too." for word in words)
    return "<!-- Tell us all -->\n@a-maintainer please look.\n" + "\n".join(lines)
