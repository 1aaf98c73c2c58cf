"""What `angle-llm data issues` writes, replaces, keeps and counts."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_github import WORDS, FakeGitHub, Rows, all_rows, contents, report_of, some_issues
from web_server import Reply

import angle_llm.issue_pairs.github
from angle_llm.issue_pairs.records import IssueError

Build = Callable[..., Rows]


def test_no_duplicates_is_an_error_after_the_counts_and_earlier_files_stay(
    github: FakeGitHub, build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_issues(github.repo("c/d"))
    build("c/d")
    content = contents(tmp_path / "out")
    github.repo("a/b").issue(1, body="An issue alone in the world")
    capsys.readouterr()
    with pytest.raises(IssueError, match="no pair of duplicates"):
        build("a/b")
    assert "issues: 1\n" in capsys.readouterr().out
    assert contents(tmp_path / "out") == content


@pytest.mark.parametrize("name", ["train.jsonl.gz", "report.json"])
def test_files_of_others_are_left_alone(github: FakeGitHub, build: Build, tmp_path: Path, name: str) -> None:
    some_issues(github.repo("a/b"), 60)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text('{"mine": 1}')
    with pytest.raises(IssueError, match=rf"holds {name}, .*Choose another --out"):
        build("a/b")
    assert contents(tmp_path / "out") == {name: b'{"mine": 1}'}
    assert github.asked == []


def test_the_report_adds_up(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    repo = some_issues(github.repo("a/b"), 60)
    same = "The very same words of a window that fails"
    for number in (61, 62, 63):
        repo.issue(number, "The same", same)
    repo.duplicate(62, 61)
    repo.duplicate(63, "#5 and #6")
    repo.duplicate(61, 5)
    repo.issue(64, "By a bot: dependencies of the week", "many", user={"login": "renovate[bot]", "type": "Bot"})
    repo.duplicate(64, 63)
    repo.issue(65, "x", "")
    repo.duplicate(65, 63)
    repo.issue(66, body="The menu and the target that is gone")
    repo.duplicate(66, 999)
    rows = all_rows(build("a/b", negatives={"random": 50.0}))
    report: dict[str, Any] = report_of(tmp_path / "out")
    assert report["duplicates_left_out"] == {
        "opened by a bot": 1, "the same text": 1, "the target is not there, or not to be seen": 1,
        "the texts of another pair": 1, "too short": 1,
    }  # fmt: skip
    positives = [row for row in rows if row["label"] == 1]
    assert sum(report["duplicates"].values()) == len(positives) + sum(report["duplicates_left_out"].values())
    assert sum(report["positives"].values()) == len(positives)
    assert report["negatives_not_found"] > 0
    assert len(rows) - len(positives) + report["negatives_not_found"] == 50 * len(positives)
    assert sum(sum(kinds.values()) for kinds in report["pairs"].values()) == len(rows)


def test_suspected_duplicates_are_no_negatives(github: FakeGitHub, build: Build) -> None:
    repo = github.repo("a/b")
    for number in range(1, 9):
        repo.issue(number, body=f"The {number}. way in which the {WORDS[number]} fails")
    repo.duplicate(2, 1)
    repo.say(3, "Possible duplicate of #1", 40, who="NONE")  # an open issue
    repo.issues[4]["body"] += " (is it #2?)"
    for number in (5, 6, 7):
        repo.say(1, f"See #{number}", 4000, who="NONE")
    rows = all_rows(build("a/b", negatives={"random": 9.0}))
    assert {row["id2"] for row in rows if row["label"] == 0} == {"a/b#8"}


@pytest.mark.parametrize("status", [404, 410])
def test_one_issue_whose_events_or_comments_are_gone_does_not_end_the_run(
    github: FakeGitHub, build: Build, tmp_path: Path, status: int
) -> None:
    repo = some_issues(github.repo("a/b"), 60)
    repo.issue(61, body="The menu of which others say much", closed=50)
    repo.say(61, "Duplicate of #1", 50, who="NONE")
    github.faults.append(("/61/events", Reply({"message": "This issue was deleted"}, status)))
    before = all_rows(build("a/b"))
    assert report_of(tmp_path / "out")["listings_not_there"] == 1
    assert all_rows(build("a/b")) == before  # kept as gone
    repo.issues[61]["state_reason"] = "duplicate"
    repo.duplicate(60, 2, state_reason="duplicate")
    github.faults.append(("/61/comments", Reply({"message": "This issue was deleted"}, status)))
    rows = all_rows(build("a/b", out="second", comments="marked"))
    assert {row["id1"] for row in rows if row["label"]} == {"a/b#60"}
    assert report_of(tmp_path / "second")["listings_not_there"] == 1


def test_what_killed_runs_left_behind_is_removed(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    some_issues(github.repo("a/b"), 60)
    build("a/b")
    old, new = tmp_path / "out" / ".issues.old", tmp_path / "out" / ".issues.new"
    page = tmp_path / "out" / "cache" / ".page.old"
    for folder in (old, new):
        folder.mkdir()
        (folder / "train.jsonl.gz").touch()
    page.touch()
    for path in (old, page):
        os.utime(path, (0, 0))
    build("a/b")
    assert not old.exists()
    assert not page.exists()
    assert new.exists()  # of a run that may be under way


def test_pages_kept_with_other_fields_are_asked_for_anew(
    github: FakeGitHub, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_issues(github.repo("a/b"), 60)
    monkeypatch.setattr(angle_llm.issue_pairs.github, "_FIELDS", "those of an earlier version")
    build("a/b")
    monkeypatch.undo()
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    before = len(github.asked)
    build("a/b")
    assert len(github.asked) == 2 * before
    assert not any("if-none-match" in asked.headers for asked in github.asked)


def test_a_limit_that_ends_in_a_month_is_told_and_not_waited_for(github: FakeGitHub, build: Build) -> None:
    some_issues(github.repo("a/b"))
    spent = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()) + 30 * 86_400)}
    github.faults.append(("/comments", Reply([], headers=spent)))
    with pytest.raises(IssueError, match=r"new ones in 7\d\d\.\d hours\. Run the same command again then"):
        build("a/b")
