"""`eval/duplicate_issues.py` against a server on 127.0.0.1 that implements GitHub's API."""

import gzip
import json
import random
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duplicate_issues
import pytest
from duplicate_issues import IssueSettings, find_clusters, main, split_of
from fake_server import FakeServer, Reply, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from issues.github import Comment, Found, Issue, Label
from issues.texts import (
    DUPLICATE_PHRASE,
    find_claims,
    issue_text,
    mentioned_pairs,
    named_duplicates,
    references,
)
from programs import run, start

from angle_llm.data import DataError, ScoredPair
from angle_llm.data.examples import load_examples
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource

for name in ("github", "sklearn"):
    pytest.importorskip(name)
RECIPE = Path(__file__).parents[2] / "eval/duplicate_issues.py"

TOKEN = "ghp_a_secret_that_is_never_printed"
WORDS = "panel crash window save export unicode slow memory thread login menu cursor font colour".split()  # noqa: SIM905
Rows = list[dict[str, Any]]


def stamp(hour: float) -> str:
    return (datetime(2024, 1, 1) + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeGitHub(FakeServer):
    """Repositories by name in lower case. `faults`: (part of a path, reply) sent once."""

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.names: dict[str, str] = {}
        self.issues: dict[tuple[str, int], dict[str, Any]] = {}
        self.comments: Rows = []
        self.events: dict[int, list[str]] = {}
        self.faults: list[tuple[str, Reply]] = []
        self.delay = 0.0

    def issue(self, repo: str, number: int, title: str = "", body: str | None = "", **named: Any) -> None:
        """An issue opened at hour `number`; `closed`: hour of the closing."""
        self.names[repo.lower()] = repo
        closed = named.pop("closed", None)
        texts = {"number": number, "title": title or f"Issue {number}", "body": body}
        texts |= {"id": 1000 * len(self.names) + number}
        state = {"state": "open" if closed is None else "closed", "closed_at": closed and stamp(closed), "labels": []}
        state |= {"created_at": stamp(number)}
        user = {"user": {"login": "real-name", "type": "User"}, "repository_url": f"{self.url}/repos/{repo}"}
        self.issues[repo.lower(), number] = texts | state | user | {"updated_at": stamp(closed or number)} | named

    def comment(self, repo: str, number: int, text: str, hour: float, who: str = "MEMBER") -> None:
        user = {"user": {"login": "a-maintainer", "type": "User"}, "author_association": who}
        place = {"id": len(self.comments), "issue_url": f"{self.url}/repos/{repo}/issues/{number}"}
        self.comments.append(place | user | {"body": text, "created_at": stamp(hour), "updated_at": stamp(hour)})

    def duplicate(self, repo: str, number: int, of: object, hour: float = 400) -> None:
        """Close an issue as a duplicate, in a comment of a maintainer."""
        state = {"state": "closed", "closed_at": stamp(hour), "updated_at": stamp(hour)}
        self.issues[repo.lower(), number] |= state
        self.comment(repo, number, f"Duplicate of {f'#{of}' if isinstance(of, int) else of}", hour)

    def reply(self, request: Request) -> Reply:
        time.sleep(self.delay)
        for place, (word, fault) in enumerate(self.faults):
            if word in request.path:
                del self.faults[place]
                return fault
        content = self.content(request)
        return Reply({"message": "Not Found"}, 404) if content is None else Reply(content)

    def content(self, request: Request) -> Any:
        _, _, owner, name, *rest = request.path.split("/")
        repo = f"{owner}/{name}".lower()
        match rest:
            case []:
                return {"full_name": self.names[repo]} if repo in self.names else None
            case ["issues"]:
                return page([issue for key, issue in self.issues.items() if key[0] == repo], request.query)
            case ["issues", "comments"]:
                return page([each for each in self.comments if f"/{repo}/" in each["issue_url"].lower()], request.query)
            case ["issues", number]:
                return self.issues.get((repo, int(number)))
            case ["issues", number, "comments"]:
                return [each for each in self.comments if each["issue_url"].endswith(f"/{name}/issues/{number}")]
            case ["issues", number, "events"]:
                return [{"event": event} for event in self.events.get(int(number), [])]
        return None


def page(rows: Rows, query: dict[str, str]) -> Rows:
    assert (query["sort"], query["direction"], query["state"]) == ("updated", "asc", "all")
    rows = sorted((row for row in rows if row["updated_at"] >= query["since"]), key=lambda row: row["updated_at"])
    size, number = int(query["per_page"]), int(query["page"])
    return rows[(number - 1) * size : number * size]


def fill(server: FakeGitHub, repo: str = "a/b", count: int = 250, seed: int = 0) -> None:
    """Issues of which a fifth are duplicates of earlier ones, and a tenth pull requests."""
    chance, subjects = random.Random(seed), dict[int, list[str]]()
    for number in range(1, count + 1):
        words = subjects[number] = chance.choices(WORDS, k=12)
        body = "<!-- Describe the bug -->\n@a-maintainer please look.\n" + "\n".join(
            f"The {word} stops." for word in words
        )
        pull = {"pull_request": {"url": "…"}} if number % 10 == 7 else {}
        server.issue(repo, number, f"The {words[0]} and the {words[1]} fail ({number})", body, **pull)
        earlier = [n for n in subjects if n < number and n % 10 != 7]
        if number % 5 == 3 and earlier:
            target = chance.choice(earlier)
            server.issues[repo.lower(), number]["body"] = " ".join(subjects[target]) + f"\n\nOr duplicate of #{target}?"
            server.duplicate(repo, number, target, hour=number + 3)


@pytest.fixture
def github(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGitHub]:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    monkeypatch.setenv("no_proxy", "")  # the program sets it
    with FakeGitHub() as server:
        yield server


def build(github: FakeGitHub, out: Path, *repos: str, **named: Any) -> Rows:
    main(IssueSettings(repos=repos or ("a/b",), out=out, api=github.url, **named))
    return rows_of(out)


def rows_of(out: Path) -> Rows:
    lines = {path.name: gzip.decompress(path.read_bytes()).splitlines() for path in sorted(out.glob("*.gz"))}
    return [json.loads(line) | {"split": name} for name, each in lines.items() for line in each]


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def splits_of(rows: Rows) -> dict[str, set[str]]:
    splits: dict[str, set[str]] = {}
    for row in rows:
        for name in (row["id1"], row["id2"]):
            splits.setdefault(name, set()).add(row["split"])
    return splits


def positives(rows: Rows) -> set[tuple[str, str]]:
    return {(row["id1"], row["id2"]) for row in rows if row["label"] == 1}


def test_pairs_train_and_pass_the_data_check(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, "Some/Thing")
    rows, out, report = build(github, tmp_path / "out", "Some/Thing"), tmp_path / "out", report_of(tmp_path / "out")
    assert (report["issues"], report["pull requests"], len(positives(rows))) == (225, 25, 50)
    assert {row["kind"] for row in rows} == {"duplicate", "overlap", "random"}
    assert 0.4 < len(positives(rows)) / len(rows) < 0.6
    assert {len(splits) for splits in splits_of(rows).values()} == {1}
    text = json.dumps(rows)
    assert not re.search("uplicate of|Describe the bug|a-maintainer|real-name", text)
    assert "@someone" in text
    for path in out.glob("*.gz"):
        assert all(isinstance(each, ScoredPair) for each in load_examples(DataSource(path=str(path))).examples)
    assert run("angle-llm", "data", "check", "--model", "none", *sorted(out.glob("*.gz"))).returncode == 0


def test_a_later_run_reads_only_changes_and_keeps_splits(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=150)
    before = splits_of(build(github, tmp_path / "out"))
    files, sent = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.gz")}, len(github.requests)
    build(github, tmp_path / "out")
    assert len(github.requests) <= sent + 3, "the name, and one page of each listing"
    assert {path: path.read_bytes() for path in (tmp_path / "out").glob("*.gz")} == files
    for number in (200, 201):
        github.issue("a/b", number, body=f"A later report {number} of the window")
    github.duplicate("a/b", 200, 3, hour=500)
    github.duplicate("a/b", 201, 200, hour=500)
    after = splits_of(build(github, tmp_path / "out"))
    assert after["a/b#200"] == after["a/b#201"] == after["a/b#3"]
    assert all(after[name] == splits for name, splits in before.items() if name in after)


def test_a_killed_run_resumes_without_repeating_requests(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=600)
    github.delay = 0.2
    command = ["python", RECIPE, "a/b", "--api", github.url, "--out", tmp_path / "killed"]
    running = start(*command)
    while len(github.requests) < 5:
        assert running.process.is_alive()
        time.sleep(0.01)
    running.process.kill()
    running.wait()
    github.delay = 0
    assert run(*command).returncode == 0
    sent = [(each.path, *each.query.values()) for each in github.requests if "issues" in each.path]
    assert len(sent) - len(set(sent)) <= 2, "what was under way, and the page that is not full"
    build(github, tmp_path / "whole")
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


def test_duplicates_across_repositories_renamed_and_unlisted_targets(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, "One/a", 60)
    fill(github, "Other/b", 60, seed=1)
    github.issue("Third/c", 5, "Zoom", "Nothing moves in a zoomed window", user={"login": "x", "avatar_url": "…"})
    github.issue("Third/c", 6, "A pull request", "with a long text", pull_request={"url": "…"})
    targets = ("other/B#1", "https://github.com/Other/b/issues/2#issuecomment-1", "Third/c#5", "Third/c#6", "#999")
    for number, target in enumerate(targets, 300):
        github.issue("One/a", number, body=f"The cursor stops in dialog {WORDS[number - 300]}")
        github.duplicate("One/a", number, target)
    rows = build(github, tmp_path / "out", "one/A", "Other/b")
    assert "avatar_url" not in (tmp_path / "out/cache/objects.jsonl").read_text(), "only declared fields are kept"
    found = {pair for pair in positives(rows) if pair[0].startswith("One/a#30")}
    assert found == {("One/a#300", "Other/b#1"), ("One/a#301", "Other/b#2"), ("One/a#302", "Third/c#5")}
    skipped = report_of(tmp_path / "out")["duplicates skipped"]
    assert skipped == {"target is a pull request": 1, "target deleted or not visible": 1}
    assert all(row["id1"].split("#")[0] == row["id2"].split("#")[0] for row in rows if row["label"] == 0)


def test_events_confirm_other_users_until_undone(github: FakeGitHub, tmp_path: Path) -> None:
    for number in range(1, 9):
        github.issue("a/b", number, body=f"The {WORDS[number]} fails in its own way", closed=50 if number > 4 else None)
    for number, events in ((5, ["marked"]), (6, ["marked", "unmarked"]), (7, [])):
        github.comment("a/b", number, f"Duplicate of #{number - 4}", 50, who="NONE")
        github.events[number] = ["closed", *(f"{each}_as_duplicate" for each in events)]
    rows = build(github, tmp_path / "out")
    assert {(row["id1"], row["id2"], row["why"]) for row in rows if row["label"]} == {("a/b#5", "a/b#1", "event")}
    assert report_of(tmp_path / "out")["duplicates unclear"] == {"named by others only": 2}


def test_the_report_accounts_for_every_duplicate(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=60)
    for number in (61, 62, 63):
        github.issue("a/b", number, "The same", "The very same words of a window that fails")
    github.issue("a/b", 64, "A bot: weekly updates", "of many packages", user={"login": "renovate[bot]", "type": "Bot"})
    github.issue("a/b", 65, "x", None, user=None)
    github.issue("a/b", 66, "🙂 and a NUL\0", "half a character: \ud800 " + "x" * 1_000_000)
    for number, target in ((62, 61), (63, "#5 and #6"), (61, 5), (64, 63), (65, 63), (66, 4)):
        github.duplicate("a/b", number, target)
    rows = build(github, tmp_path / "out", negatives={"overlap": 0.5, "random": 50})
    report = report_of(tmp_path / "out")
    assert report["issues skipped"] == {"opened by a bot": 1, "too short": 1}
    assert report["duplicates skipped"] == {"same text": 1, "repeated": 1, "opened by a bot": 1, "too short": 1}
    assert sum(report["duplicates"].values()) == sum(report["positives"].values()) + sum(
        report["duplicates skipped"].values()
    )
    assert sum(row["label"] for row in rows) == sum(report["positives"].values())
    assert report["negatives not found"] + len(rows) == sum(round(n / 2) + 51 * n for n in per_split(rows))
    (long,) = [row["text1"] for row in rows if row["id1"] == "a/b#66" and row["label"]]
    assert (long[:32], len(long)) == ("🙂 and a NUL\n\nhalf a character: ?", 65_536)


def per_split(rows: Rows) -> list[int]:
    return [sum(row["label"] for row in rows if row["split"] == split) for split in {row["split"] for row in rows}]


@pytest.fixture
def one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicate_issues, "SPLITS", {"train": 1.0})


@pytest.mark.usefixtures("one_split")
def test_issues_that_mention_each_other_are_not_negatives(github: FakeGitHub, tmp_path: Path) -> None:
    for number in range(1, 9):
        github.issue("a/b", number, body=f"The {number}. {WORDS[number]} fails like {WORDS[number + 2]}")
    github.duplicate("a/b", 2, 1)
    github.comment("a/b", 3, "Possible duplicate of #1", 40, who="NONE")
    github.issues["a/b", 4]["body"] += " (is it #2?)"
    for number in (5, 6, 7):
        github.comment("a/b", 1, f"See #{number}", 4000, who="NONE")
    rows = build(github, tmp_path / "out", negatives={"random": 9})
    assert {row["id2"] for row in rows if row["label"] == 0} == {"a/b#8"}


@pytest.mark.usefixtures("one_split")
def test_negatives_with_a_common_label(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=60)
    for number in range(1, 61):
        github.issues["a/b", number]["labels"] = [{"name": f"area {number % 3}"}, {"name": "duplicate"}]
    rows = build(github, tmp_path / "out", negatives={"labels": 1})
    pairs = [[int(row[name].split("#")[1]) for name in ("id1", "id2")] for row in rows if row["kind"] == "labels"]
    assert len(pairs) == 12
    assert all(one % 3 == other % 3 for one, other in pairs)


def test_comments_of_marked_issues_and_issues_of_bots(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=120)
    for number in (13, 23):
        github.issues["a/b", number]["state_reason"] = "duplicate"
    github.issues["a/b", 23]["user"] = {"login": "tool", "type": "Bot"}
    rows = build(github, tmp_path / "out", comments="marked")
    assert {pair[0] for pair in positives(rows)} == {"a/b#13"}
    listed = [each.path for each in github.requests if each.path.endswith("comments")]
    assert sorted(listed) == ["/repos/a/b/issues/13/comments", "/repos/a/b/issues/23/comments"]


# ------------------------------------------------------------------------------------------------- faults and refusals

FAULTS = {
    "500": Reply({"message": "oops"}, 500),
    "502": Reply(b"<html>Bad gateway</html>", 502),
    "cut": Reply([1] * 1000, cut=99),
    "malformed": Reply(b'[{"number": 1'),
    "429": Reply({"message": "slow down"}, 429, {"Retry-After": "1"}),
    "secondary limit": Reply({"message": "You have exceeded a secondary rate limit."}, 403, {"Retry-After": "1"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_transient_errors_are_retried(github: FakeGitHub, tmp_path: Path, fault: str) -> None:
    fill(github, count=60)
    github.faults.append(("/comments", FAULTS[fault]))
    assert len(positives(build(github, tmp_path / "out"))) == 12


def test_the_program_waits_for_the_hourly_limit(github: FakeGitHub, tmp_path: Path) -> None:
    fill(github, count=60)
    until = int(time.time()) + 2
    limit = {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(until)}
    github.faults.append(("/comments", Reply({"message": "API rate limit exceeded for 1.2.3.4."}, 403, limit)))
    build(github, tmp_path / "out")
    assert time.time() >= until


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_names_the_repository_and_hides_the_token(
    github: FakeGitHub, tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    fill(github, count=60)
    build(github, tmp_path / "out")
    assert {each.headers["authorization"] for each in github.requests} == {f"token {TOKEN}"}
    assert github.requests[0].headers["user-agent"].startswith("angle-llm/")
    github.faults.append(("a/b", Reply({"message": f"No access with {TOKEN}"}, status)))
    with pytest.raises(DataError, match=f"a/b.*{status}") as refused:
        build(github, tmp_path / "out")
    assert TOKEN not in str(refused.value) + "".join(capfd.readouterr())
    assert all(TOKEN.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_files_of_others_and_of_an_earlier_run_are_kept(github: FakeGitHub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.jsonl.gz").write_text("mine")
    with pytest.raises(SettingsError, match="--out"):
        build(github, tmp_path / "mine")
    assert not github.requests
    fill(github, count=60)
    github.issue("c/d", 1, body="The only issue of a repository")
    rows = build(github, tmp_path / "out")
    with pytest.raises(DataError, match="no pair"):
        build(github, tmp_path / "out", "c/d")
    assert rows_of(tmp_path / "out") == rows


@pytest.mark.parametrize(
    ("named", "flag"),
    [
        ({"repos": ()}, "OWNER/REPO"),
        ({"repos": ("a/..",)}, "OWNER/REPO"),
        ({"max_issues": 0}, "--max-issues"),
        ({"negatives": {"random": float("nan")}}, "--negatives"),
        ({"api": "https://me:secret@host"}, "--api"),
    ],
)
def test_a_refused_setting_is_named(named: dict[str, Any], flag: str) -> None:
    with pytest.raises(SettingsError, match=flag) as refused:
        IssueSettings(**{"repos": ("a/b",), "out": Path("out"), **named})
    assert "secret" not in str(refused.value)


NAMED = """DUPLICATE OF #12!
dupe of #12, closing
Closing as a **duplicate** of **#12**
This is a duplicate of the existing issue #12.
Duplicate, closing in favour of GH-12
Duplicate of `#12`
It's not what we do. Duplicate of issue 12
Duplicate of [[Bug] Crash on start, see #7](https://github.com/me/it/issues/12)
This is a duplication of #12"""
NOT_NAMED = """Less code duplication in #12
Is this a duplicate of #12 or #13?
Duplicate of **#12**?
No longer a duplicate of #12
I do not think that this is a duplicate of #12
Possible duplicate of #12
> Duplicate of #12
```Duplicate of #12```
Fixed duplicate keys, see #12
&#39;duplicate&#39; deduplicate #12
duplicate of #0"""


def test_phrases_that_name_a_duplicate() -> None:
    assert [line for line in NAMED.splitlines() if named_duplicates(line, "me/it") != [("me/it", 12)]] == []
    assert [line for line in NOT_NAMED.splitlines() if named_duplicates(line, "me/it")] == []
    assert named_duplicates("Duplicates #1, #2 and #3", "me/it") == [("me/it", number) for number in (1, 2, 3)]


def test_references_to_other_repositories() -> None:
    assert named_duplicates("Duplicate of Other/Thing.js#5", "me/it") == [("other/thing.js", 5)]
    assert named_duplicates("Duplicate of <https://www.github.com/Other/it/issues/5?x=1>", "me/it") == [("other/it", 5)]
    assert references("See #3, o/n#4 `#5` but not &#6; or\n> #7", "me/it") == [("me/it", 3), ("o/n", 4), ("me/it", 5)]
    for text in ("Duplicate of ../..#5", "Duplicate of a/..#5", "Duplicate of https://github.com/a/../issues/5"):
        assert {key[0] for key in named_duplicates(text, "me/it")} <= {"me/it"}


CLOSED = datetime(2024, 5, 1, tzinfo=timezone.utc)
ISSUE = Issue(
    id=1, number=10, repository_url="x/repos/me/it", closed_at=CLOSED, created_at=CLOSED, updated_at=CLOSED
)  # fmt: skip
LABELLED = ISSUE.model_copy(update={"labels": [Label(name="duplicate")]})


@pytest.mark.parametrize(
    ("issue", "text", "maintainer", "days", "expected"),
    [
        (ISSUE, "Duplicate of #3", True, 0, (3, "comment")),
        (ISSUE, "Duplicate of #3", False, 0, "named by others only"),
        (ISSUE.model_copy(update={"state_reason": "duplicate"}), "Duplicate of #3", False, 0, (3, "state_reason")),
        (LABELLED, "Duplicate of #3", False, 0, (3, "label")),
        (LABELLED, "Please follow #3.", True, 0, (3, "label")),
        (LABELLED, "See #3 and #4.", True, 0, "several references (label)"),
        (LABELLED, "Thanks!", True, 0, "no reference (label)"),
        (ISSUE.model_copy(update={"closed_at": None}), "Duplicate of #3", True, 0, None),
        (ISSUE, "Duplicate of #3", True, 6, (3, "comment")),
        (ISSUE, "Duplicate of #3", True, -8, None),
        (ISSUE, "Duplicate of #10", True, 0, None),
    ],
)
def test_comments_that_confirm_a_duplicate(
    issue: Issue, text: str, maintainer: bool, days: float, expected: object
) -> None:
    when, who = CLOSED + timedelta(days=days), "MEMBER" if maintainer else "NONE"
    comment = Comment(
        id=1, body=text, issue_url="x/repos/me/it/issues/10", author_association=who, created_at=when, updated_at=when
    )
    found = Found({issue.key: issue}, comments={issue.key: [comment]})
    claims, unclear = find_claims(found, lambda issue: False)
    assert [(claim.target[1], claim.reason) for claim in claims] == ([expected] if isinstance(expected, tuple) else [])
    assert unclear == ({expected: 1} if isinstance(expected, str) else {})
    assert mentioned_pairs(found) == {frozenset((issue.key, ("me/it", int(n)))) for n in re.findall(r"#(\d)\b", text)}


def text(body: str, title: str = "Crash", *people: str) -> str:
    return issue_text(title, body, set(people), 65_536)


TEXTS = {
    " on start\r\n\r\n\r\n\r\nalways  \n": " on start\n\nalways",
    "One.\n> Possible duplicate of o/n#12.\nTwo.": "One.\n\nTwo.",
    "One.\nClosed as duplicate of" + "\n \n" * 25 + "#12\nTwo.": "One.\n\nTwo.",
    "a<!-- x\ny -->b\n```html\n<!-- mine -->\n```": "ab\n```html\n<!-- mine -->\n```",
    "a<!-- one ` tick -->b `<!-- shown -->` <!-- open": "ab `<!-- shown -->` <!-- open",
    "@bob, @al-ice: _@octocat_ @octo_corp": "@someone, @someone: _@someone_ @someone",
    "https://github.com/octocat/. said": "https://github.com/someone. said",
    "```\n@property @Bob\n```": "```\n@property @someone\n```",
    "mail a@b.org or @angular/core 1.2, a @ b": "mail a@b.org or @angular/core 1.2, a @ b",
    "https://github.com/bob/tool/issues/3": "https://github.com/bob/tool/issues/3",
}


def test_texts_without_the_answer_and_names() -> None:
    assert {body: text(body, "Crash", "bob") for body in TEXTS} == {k: f"Crash\n\n{v}" for k, v in TEXTS.items()}


PIECES = [
    "Duplicate of ",
    "dup",
    "#12",
    "\n",
    "> ",
    "```",
    "`",
    "<!--",
    "-->",
    " @bob ",
    "[duplicate]",
    " ",
    "�",
    "o/n#4",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.lists(st.sampled_from(PIECES)).map("".join))
def test_texts_never_contain_the_answer(title: str, body: str) -> None:
    made = text(body, title, "bob")
    assert DUPLICATE_PHRASE.search(made) is None
    assert "@bob" not in made
    made.encode()


KEYS = st.tuples(st.sampled_from(["a/b", "c/d"]), st.integers(1, 25))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(KEYS, KEYS)), st.lists(st.tuples(KEYS, KEYS)))
def test_clusters_are_components_and_later_issues_do_not_move_them(links: Any, later: Any) -> None:
    clusters = find_clusters(links)
    component = {key: {key} for link in links for key in link}
    for one, other in links:
        for key in (joined := component[one] | component[other]):
            component[key] = joined
    assert all(
        (clusters[one] == clusters[other]) == (other in component[one]) for one in component for other in component
    )
    new = [((one[0], 100 + place), other) for place, (one, other) in enumerate(later)]
    after = find_clusters([*new, *links])
    assert all(split_of(after[key]) == split_of(clusters[key]) for key in component)


def test_splits_have_their_shares() -> None:
    splits = [split_of(("a/b", number)) for number in range(5000)]
    assert splits.count("train") / 5000 == pytest.approx(0.8, abs=0.02)  # three standard deviations are 0.017


def test_without_pygithub_the_command_to_install_it_is_named(tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.modules['github'] = None; sys.path.insert(0, {str(RECIPE.parent)!r})"
    (tmp_path / "without.py").write_text(f"{code}\nrunpy.run_path({str(RECIPE)!r}, run_name='__main__')")
    done = run("python", tmp_path / "without.py", "a/b", "--out", tmp_path / "out")
    assert (done.returncode, "pip install 'angle_llm[issues]'" in done.stderr) == (2, True)
