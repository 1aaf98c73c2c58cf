"""`angle-llm data issues` as its users run it, against a server on this machine that speaks GitHub's API."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_github import TOKEN, FakeGitHub, Rows, all_rows, read_pairs, report_of, some_issues, stamp
from web_server import Reply

from angle_llm.data import DataSource, ScoredPair, load_examples
from angle_llm.issue_pairs.records import IssueError
from angle_llm.web import WebError

Build = Callable[..., Rows]


def test_a_repository_becomes_pairs_that_training_reads(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    repo = some_issues(github.repo("Some/Thing"))
    rows = build("Some/Thing")
    assert [len(rows[split]) > 0 for split in rows] == [True] * 3
    pull_requests = {number for number, issue in repo.issues.items() if "pull_request" in issue}
    report = report_of(tmp_path / "out")
    assert report["issues"] == 250 - len(pull_requests)
    assert report["pull_requests_left_out"] == len(pull_requests)
    positives = [row for row in all_rows(rows) if row["label"] == 1]
    assert report["duplicates"] == {"comment": len(positives)} == {"comment": 50}
    assert 0.4 < len(positives) / len(all_rows(rows)) < 0.6
    assert {row["kind"] for row in all_rows(rows)} == {"duplicate", "random", "overlap", "labels"}
    for split in rows:
        examples = load_examples(DataSource(path=str(tmp_path / "out" / f"{split}.jsonl.gz"))).examples
        assert all(isinstance(example, ScoredPair) for example in examples)
        assert [(example.left, example.score) for example in examples] == [  # type: ignore[union-attr]
            (row["text1"], row["label"]) for row in rows[split]
        ]


def test_the_files_pass_the_data_check(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    some_issues(github.repo("a/b"))
    build("a/b")
    files = [str(path) for path in sorted((tmp_path / "out").glob("*.gz"))]
    checked = subprocess.run(
        [sys.executable, "-m", "angle_llm.cli", "data", "check", *files, "--model", "none"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "no trouble" in checked.stdout


def test_the_answer_names_and_templates_are_not_in_the_texts(github: FakeGitHub, build: Build) -> None:
    some_issues(github.repo("a/b"))
    for row in all_rows(build("a/b")):
        for text in (row["text1"], row["text2"]):
            assert "uplicate of" not in str(text)
            assert "Tell us all" not in str(text)
            assert "a-maintainer" not in str(row)
            assert "someone-real" not in str(row)
    assert any("@someone" in str(row["text1"]) for row in all_rows(build("a/b")))


def test_no_issue_stands_in_two_splits_and_it_stays_when_more_is_fetched(github: FakeGitHub, build: Build) -> None:
    repo = some_issues(github.repo("a/b"), 150)
    before = places_of(build("a/b"))
    for number in range(151, 251):
        repo.issue(number, f"A later thing {number}", "of its own")
    repo.duplicate(200, 3)
    repo.duplicate(201, 200)
    after = places_of(build("a/b", refresh=True))
    assert all(len(splits) == 1 for splits in after.values())
    assert after["a/b#200"] == after["a/b#201"] == after["a/b#3"]
    assert all(after[name] == splits for name, splits in before.items() if name in after)


def places_of(rows: Rows) -> dict[str, set[str]]:
    """Issue → the splits it is in."""
    places: dict[str, set[str]] = {}
    for split, found in rows.items():
        for row in found:
            for name in (row["id1"], row["id2"]):
                places.setdefault(name, set()).add(split)
    return places


def test_the_same_command_asks_for_nothing_and_writes_the_same_bytes(
    github: FakeGitHub, build: Build, tmp_path: Path
) -> None:
    some_issues(github.repo("a/b"))
    build("a/b")
    content = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.gz")}
    asked = len(github.asked)
    build("a/b")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.gz")} == content
    assert len(github.asked) == asked


def test_refresh_sends_etags_and_takes_what_is_new(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    repo = some_issues(github.repo("a/b"), 250)
    build("a/b")
    github.asked.clear()
    build("a/b", refresh=True)
    assert all("if-none-match" in asked.headers for asked in github.asked)
    assert report_of(tmp_path / "out")["requests"] == {
        "made": len(github.asked), "unchanged": len(github.asked), "from_disk": 1,  # the first comments were counted before
    }  # fmt: skip
    repo.issue(251, body="A window that is new, " * 5)
    repo.duplicate(251, 4, hour=300)
    rows = build("a/b", refresh=True)
    assert [row["id2"] for row in all_rows(rows) if row["id1"] == "a/b#251" and row["label"] == 1] == ["a/b#4"]


def test_a_full_last_page_is_asked_for_whole(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    """Its content is the same when a next page appears, and 304 might be the answer."""
    repo = some_issues(github.repo("a/b"), 100)
    build("a/b")
    repo.issue(101, body="A window that is new, " * 5)
    build("a/b", refresh=True)
    assert report_of(tmp_path / "out")["issues"] == 91


def test_two_repositories_and_duplicates_across_them(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    one, other = some_issues(github.repo("One/a")), some_issues(github.repo("Other/b"), seed=1)
    one.issue(300, body="The cursor stops in the theme dialog")
    one.duplicate(300, "other/B#1")
    one.issue(301, body="The cursor stops in the scroll dialog")
    one.duplicate(301, "https://github.com/Other/b/issues/2#issuecomment-1")
    other.issue(302, body="Nothing moves at all in the zoom window")
    other.duplicate(302, "Third/c#5")
    github.repo("Third/c").issue(5, "Zoom", "Nothing moves in a zoomed window")
    rows = all_rows(build("One/a", "Other/b"))
    across = {
        (row["id1"], row["id2"])
        for row in rows
        if row["label"] and str(row["id1"]).split("#")[1] in ("300", "301", "302")
    }
    assert across == {("One/a#300", "Other/b#1"), ("One/a#301", "Other/b#2"), ("Other/b#302", "Third/c#5")}
    assert {row["repo"] for row in rows} == {"One/a", "Other/b"}
    assert all(str(row["id1"]).split("#")[0] == str(row["id2"]).split("#")[0] for row in rows if row["label"] == 0)


def test_targets_outside_what_is_read_are_asked_for_one_by_one(
    github: FakeGitHub, build: Build, tmp_path: Path
) -> None:
    repo = some_issues(github.repo("a/b"), 40)
    for number, target in ((41, 43), (42, 44), (45, 999)):
        repo.issue(number, body=f"A printer of sort {number} does nothing")
        repo.duplicate(number, target)
    repo.issue(43, body="A printer that does nothing")
    repo.issue(44, body="A pull request", pull_request={"url": "…"})
    build("a/b", max_issues=30, fetch_targets=False)
    assert "/repos/a/b/issues/43" not in [asked.path for asked in github.asked]
    rows = build("a/b")
    report = report_of(tmp_path / "out")
    assert report["duplicates_left_out"] == {
        "the target is a pull request": 1, "the target is not there, or not to be seen": 1,
    }  # fmt: skip
    assert ("a/b#41", "a/b#43") in {(row["id1"], row["id2"]) for row in all_rows(rows)}


@pytest.mark.parametrize("status", [404, 410, 451])
def test_a_target_that_is_gone_is_counted_and_not_asked_for_again(
    github: FakeGitHub, build: Build, tmp_path: Path, status: int
) -> None:
    repo = some_issues(github.repo("a/b"), 30)
    repo.issue(31, body="Gone is what this is about, gone")
    repo.duplicate(31, 777)
    github.faults.append(("/777", Reply({"message": "This issue was deleted"}, status)))
    build("a/b")
    assert report_of(tmp_path / "out")["duplicates_left_out"] == {"the target is not there, or not to be seen": 1}
    asked = len(github.asked)
    build("a/b")
    assert len(github.asked) == asked


def test_a_moved_repository_is_followed_under_its_new_name(github: FakeGitHub, build: Build) -> None:
    some_issues(github.repo("new/name")).duplicate(200, "old/name#1")
    github.moved["old/name"] = "new/name"
    rows = all_rows(build("old/name"))
    assert {row["repo"] for row in rows} == {"new/name"}
    assert ("new/name#200", "new/name#1") in {(row["id1"], row["id2"]) for row in rows}


def test_all_pairs_of_a_cluster(github: FakeGitHub, build: Build) -> None:
    repo = github.repo("a/b")
    for number in range(1, 6):
        repo.issue(number, body=f"The {number}. way in which the window fails")
    repo.duplicate(2, 1)
    repo.duplicate(3, 2)
    repo.duplicate(4, 3)
    found = {(row["id1"][-1], row["id2"][-1]) for row in all_rows(build("a/b", pairs="all")) if row["label"]}  # type: ignore[index]
    assert found == {("2", "1"), ("3", "1"), ("4", "1"), ("3", "2"), ("4", "2"), ("4", "3")}
    assert len([row for row in all_rows(build("a/b", pairs="all", cluster_pairs=4)) if row["label"]]) == 4


def test_marked_comments_ask_only_where_an_issue_is_marked(github: FakeGitHub, build: Build) -> None:
    repo = github.repo("a/b")
    for number in range(1, 9):
        repo.issue(number, body=f"The {number}. way in which the window fails")
    repo.duplicate(5, 1, labels=[{"name": "R: duplicate"}])
    repo.duplicate(6, 2, state_reason="duplicate")
    repo.duplicate(7, 3)
    rows = all_rows(build("a/b", comments="marked"))
    assert {row["id1"] for row in rows if row["label"]} == {"a/b#5", "a/b#6"}
    assert sum("/comments" in asked.path for asked in github.asked) == 2


def test_the_events_confirm_what_others_say_until_it_is_taken_back(
    github: FakeGitHub, build: Build, tmp_path: Path
) -> None:
    repo = github.repo("a/b")
    for number in range(1, 9):
        repo.issue(number, body=f"The {number}. way in which the window fails", closed=50 if number > 4 else None)
    for number, events in ((5, ["marked"]), (6, ["marked", "unmarked"]), (7, [])):
        repo.say(number, f"Duplicate of #{number - 4}", 50, who="NONE")
        repo.events[number] = [{"event": "closed"}, *({"event": f"{each}_as_duplicate"} for each in events)]
    rows = all_rows(build("a/b"))
    assert {(row["id1"], row["id2"], row["why"]) for row in rows if row["label"]} == {("a/b#5", "a/b#1", "event")}
    assert report_of(tmp_path / "out")["duplicates_unclear"] == {"said by others alone": 2}
    with pytest.raises(IssueError, match="no pair"):
        build("a/b", events=False)


def test_odd_issues_do_no_harm(github: FakeGitHub, build: Build, tmp_path: Path) -> None:
    repo = some_issues(github.repo("a/b"), 60)
    repo.issue(61, "Nothing but a title, yet a long one", None, user=None)
    repo.duplicate(61, 1)
    repo.issue(62, "🙂 emoji 🎉 and a NUL\0 in a title", "half a character: \ud800 " + "x" * 1_000_000)
    repo.duplicate(62, 2)
    repo.issue(63, "", None)
    repo.duplicate(63, 4)
    repo.issue(64, "By a bot: dependencies of the week", "many", user={"login": "renovate[bot]", "type": "Bot"})
    repo.duplicate(64, 5)
    repo.say(61, "deleted", 99, user=None, author_association="NONE")
    rows = all_rows(build("a/b"))
    texts = {row["id1"]: str(row["text1"]) for row in rows if row["label"]}
    assert texts["a/b#61"] == "Nothing but a title, yet a long one"
    assert texts["a/b#62"].startswith("🙂 emoji 🎉 and a NUL in a title\n\nhalf a character: ? xxx")
    assert len(texts["a/b#62"]) == 65_536
    assert not {"a/b#63", "a/b#64"} & {row[which] for row in rows for which in ("id1", "id2")}
    report = report_of(tmp_path / "out")
    assert report["issues_left_out"] == report["duplicates_left_out"] == {"opened by a bot": 1, "too short": 1}
    assert "a/b#64" in {row["id1"] for row in all_rows(build("a/b", bots=True))}


@pytest.mark.parametrize(
    "fault",
    [
        Reply({"message": "oops"}, 500),
        Reply(b"<html>Bad gateway</html>", 502),
        Reply([1] * 1000, cut=99),
        Reply(b'[{"number": 1'),
        Reply({"message": "slow down"}, 429, {"Retry-After": "0"}),
        Reply({"message": "You have exceeded a secondary rate limit."}, 403, {"Retry-After": "1"}),
    ],
    ids=["500", "502", "cut", "malformed", "429", "403 secondary"],
)
def test_what_passes_is_asked_again(github: FakeGitHub, build: Build, fault: Reply) -> None:
    some_issues(github.repo("a/b"))
    github.faults.append(("/comments", fault))
    assert len(all_rows(build("a/b"))) == 100


def test_the_hourly_limit_is_waited_for(github: FakeGitHub, build: Build) -> None:
    some_issues(github.repo("a/b"))
    until = int(time.time()) + 2
    spent = {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(until)}
    github.faults.append(("/comments", Reply({"message": "API rate limit exceeded for 1.2.3.4."}, 403, spent)))
    build("a/b")
    assert time.time() >= until


def test_nothing_is_asked_when_the_hour_is_spent(
    github: FakeGitHub, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    some_issues(github.repo("a/b"))
    github.spent_after = 2
    started = time.monotonic()
    build("a/b")
    assert time.monotonic() - started > 1
    assert "the hour's requests are spent; waiting " in capsys.readouterr().out
    assert len(github.asked) == 5  # none was refused


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "status 401.*environment variable"),
        (403, "status 403.*no business here"),
        (404, "repos/a/b/issues: status 404.*check the name"),
        (410, "status 410.*gone"),
        (451, "status 451.*legal"),
    ],
)
def test_what_is_refused_is_told(github: FakeGitHub, build: Build, status: int, told: str) -> None:
    github.faults.append(("a/b", Reply({"message": "no business here"}, status)))
    with pytest.raises(WebError, match=told):
        build("a/b")


def test_a_server_that_is_not_github_is_told(github: FakeGitHub, build: Build) -> None:
    some_issues(github.repo("a/b"))
    github.faults += [("a/b", Reply([{"id": 1}]))]
    with pytest.raises(IssueError, match=r"needed an issue with a number.*--api"):
        build("a/b")
    github.faults += [("comments", Reply([], headers={"Link": '<https://elsewhere.example/x>; rel="next"'}))]
    with pytest.raises(IssueError, match=r"elsewhere.example, another server"):
        build("a/b", out="second")
    github.faults += [("comments", Reply([], headers={"Link": '<http://[bad>; rel="next"'}))]
    with pytest.raises(IssueError, match="which is no address"):
        build("a/b", out="third")


def test_the_token_is_sent_and_stands_in_no_file_and_no_output(
    github: FakeGitHub, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    some_issues(github.repo("a/b"))
    build("a/b")
    asked = github.asked[0].headers
    assert asked["authorization"] == f"Bearer {TOKEN}"
    assert asked["accept"] == "application/vnd.github+json"
    assert asked["x-github-api-version"] == "2022-11-28"
    assert asked["user-agent"].startswith("angle-llm/")
    github.faults.append(("a/b", Reply({"message": f"Bad credentials {TOKEN}"}, 401)))
    with pytest.raises(WebError) as caught:
        build("a/b", refresh=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert all(TOKEN.encode() not in path.read_bytes() for path in files)
    assert TOKEN not in str(caught.value) + "".join(capfd.readouterr())


def test_needs_are_told_before_the_reading_begins(
    github: FakeGitHub, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    some_issues(github.repo("a/b"))
    build("a/b", since="2024-01-01")
    told = capsys.readouterr().out
    assert "a/b: 3 pages of issues or fewer, 1 of comments\n4 requests for all of them" in told
    assert "without a token (in GITHUB_TOKEN)" in told
    assert told.index("requests for all") < told.index("a/b: read")
    assert github.asked[1].query["since"] == stamp(0)


def test_killed_it_goes_on_and_asks_for_nothing_twice(github: FakeGitHub, tmp_path: Path) -> None:
    some_issues(github.repo("a/b"), 600)
    command = [
        sys.executable, "-m", "angle_llm.cli", "data", "issues", "a/b", "--out", str(tmp_path / "killed"), "--api", github.url,
        "--requests-per-minute",
    ]  # fmt: skip
    running = subprocess.Popen([*command, "300"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(github.asked) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    kept = len(list((tmp_path / "killed" / "cache").glob("*.json")))
    assert kept >= 4
    subprocess.run([*command, "60000"], check=True, stdout=subprocess.DEVNULL)
    addresses = [(asked.path, tuple(sorted(asked.query.items()))) for asked in github.asked]
    assert len(addresses) - len(set(addresses)) <= 1  # the one that was under way
    subprocess.run(
        [*command[:6], "--out", str(tmp_path / "whole"), *command[8:], "60000"], check=True, stdout=subprocess.DEVNULL
    )
    assert read_pairs(tmp_path / "killed") == read_pairs(tmp_path / "whole")
    for split in ("train", "valid", "test"):
        name = f"{split}.jsonl.gz"
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
