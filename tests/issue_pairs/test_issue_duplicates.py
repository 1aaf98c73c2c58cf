"""What people say when they close a duplicate, and whom to believe."""

import time
from datetime import datetime, timedelta, timezone

import pytest

from angle_llm.issue_pairs.duplicates import find_claims, find_named, references, said_duplicates, says_duplicate
from angle_llm.issue_pairs.records import Comment, Issue, Key

HERE = "me/it"
CLOSED = datetime(2024, 5, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Duplicate of #12", [12]),
        ("duplicate of #12.", [12]),
        ("DUPLICATE OF #12!", [12]),
        ("Dup of #12", [12]),
        ("dupe of #12, closing", [12]),
        ("Closing as a **duplicate** of **#12**", [12]),
        ("This is a duplicate of the existing issue #12.", [12]),
        ("Duplicate: see #12", [12]),
        ("Duplicate, closing in favour of GH-12", [12]),
        ("Duplicate of issue#12", [12]),
        ("Duplicate of `#12`", [12]),
        ("Duplicate of [#12](https://github.com/me/it/issues/12)", [12]),
        ("Duplicates #1, #2 and #3", [1, 2, 3]),
        ("If so it is fine. Duplicate of #12", [12]),
        ("It's not what we do.\nDuplicate of #12", [12]),
        ("Duplicate of [Crash on start, see #7](https://github.com/me/it/issues/12)", [12]),
        ("Duplicate of [[Bug] Crash](https://github.com/me/it/issues/12)", [12]),
        ("Duplicate of issue 12", [12]),
        ('Duplicate of "#12"', [12]),
        ("Duplicate – #12", [12]),
        ("This is a duplication of #12", [12]),
        ("No, duplicate of #12", [12]),
        ("Something is wrong here. Duplicate of #12", [12]),
        ("Less code duplication in #12", []),
        ("Is this a duplicate of https://github.com/me/it/issues/12?", []),
        ("Is this a duplicate of #12 or #13?", []),
        ("Duplicate of **#12**?", []),
        ("No longer a duplicate of #12", []),
        ("This is no duplicate of #12", []),
        ("This was wrongly closed as duplicate of #12", []),
        ("Unlikely a duplicate of #12", []),
        ("Not a duplicate of #12", []),
        ("This isn't a duplicate of #12", []),
        ("I do not think that this is a duplicate of #12", []),
        ("Possible duplicate of #12", []),
        ("Might be a dup of #12", []),
        ("Is it a duplicate of #12?", []),
        ("> Duplicate of #12\n\nNo!", []),
        ("```\nDuplicate of #12\n```", []),
        ("Fixed duplicate keys, see #12", []),
        ("Fixed by #12", []),
        ("&#39;duplicate&#39;", []),
        ("duplicate of #0", []),
        ("deduplicate #12", []),
    ],
)
def test_a_saying_is_read(text: str, numbers: list[int]) -> None:
    assert dict.fromkeys(said_duplicates(text, HERE)) == dict.fromkeys((HERE, number) for number in numbers)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Duplicate of Other/Thing.js#5", ("other/thing.js", 5)),
        ("Duplicate of https://github.com/Other/Thing.js/issues/5#issuecomment-99", ("other/thing.js", 5)),
        ("Duplicate of <https://www.github.com/Other/Thing/issues/5?x=1>", ("other/thing", 5)),
        ("Duplicate of https://github.com/other/thing/pull/5.", ("other/thing", 5)),
    ],
)
def test_other_repositories_are_named(text: str, key: Key) -> None:
    assert said_duplicates(text, HERE) == [key]


def test_no_address_outside_repositories_can_be_named() -> None:
    for text in ("Duplicate of ../..#5", "Duplicate of a/..#5", "Duplicate of https://github.com/a/../issues/5"):
        assert [key for key in said_duplicates(text, HERE) if key[0] != HERE] == []


@pytest.mark.parametrize(
    "unit", ["a", "duplicate ", "#1 ", "a/", "`", "duplicate of #1 ", "- ", "https://github", "[dup ", "duplicate of\n"]
)
def test_a_text_of_any_size_takes_a_moment(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    started = time.monotonic()
    said_duplicates(text, HERE)
    assert time.monotonic() - started < 10  # linear: under a second; quadratic would be minutes


def test_labels_that_call_an_issue_a_duplicate() -> None:
    assert all(map(says_duplicate, ["duplicate", "Resolution: Duplicate", "*duplicate", "r/dupe", "status_duplicate"]))
    assert not any(
        map(
            says_duplicate,
            ["possible duplicate", "not-a-duplicate", "no duplicate", "duplicate?", "deduplication", "bug"],
        )
    )


def issue(number: int = 10, *, closed: bool = True, state_reason: str = "", labels: tuple[str, ...] = ()) -> Issue:
    return Issue(
        repo=HERE, number=number, title="A title", body="A body", closed=closed, state_reason=state_reason,
        closed_at=CLOSED if closed else None, labels=labels, author="a", by_bot=False, is_pull_request=False,
    )  # fmt: skip


def said(text: str, maintainer: bool = False, days: float = 0) -> Comment:
    return Comment((HERE, 10), text, CLOSED + timedelta(days=days), "b", maintainer)


def claims(here: Issue, *comments: Comment, marked: bool = False) -> tuple[list[tuple[int, str]], dict[str, int]]:
    found, unclear = find_claims({here.key: here}, {here.key: list(comments)}, 7, lambda issue: marked)
    return [(claim.target[1], claim.why) for claim in found], dict(unclear)


def test_a_maintainer_is_believed_and_others_are_not() -> None:
    assert claims(issue(), said("Duplicate of #3", maintainer=True)) == ([(3, "comment")], {})
    assert claims(issue(), said("Duplicate of #3")) == ([], {"said by others alone": 1})


def test_others_are_believed_where_github_or_a_label_agrees() -> None:
    assert claims(issue(state_reason="duplicate"), said("Duplicate of #3"))[0] == [(3, "state_reason")]
    assert claims(issue(labels=("duplicate",)), said("Duplicate of #3"))[0] == [(3, "label")]
    assert claims(issue(), said("Duplicate of #3"), marked=True)[0] == [(3, "event")]


def test_a_marked_issue_needs_one_reference() -> None:
    marked = issue(labels=("duplicate",))
    assert claims(marked, said("Please follow #3.", maintainer=True)) == ([(3, "label")], {})
    assert claims(marked, said("See #3 and #4.")) == ([], {"several references (label)": 1})
    assert claims(marked, said("Thanks!")) == ([], {"no reference (label)": 1})
    assert claims(issue(state_reason="duplicate")) == ([], {"no reference (state_reason)": 1})


def test_only_closed_issues_and_only_the_comments_near_the_closing_count() -> None:
    assert claims(issue(closed=False), said("Duplicate of #3", maintainer=True)) == ([], {})
    assert claims(issue(), said("Duplicate of #3", maintainer=True, days=-8)) == ([], {})
    assert claims(issue(), said("Duplicate of #3", maintainer=True, days=6))[0] == [(3, "comment")]


def test_an_issue_is_no_duplicate_of_itself() -> None:
    assert claims(issue(), said("Duplicate of #10", maintainer=True)) == ([], {})


def test_all_that_anybody_names_is_known_however_it_is_said() -> None:
    here = issue(closed=False)
    comments = [said("Possible duplicate of #3"), said("Not a dup of #4", days=99), said("> see o/n#5\n`#6` #10")]
    assert find_named({here.key: here}, {here.key: comments}) == {
        frozenset((here.key, key)) for key in ((HERE, 3), (HERE, 4), ("o/n", 5), (HERE, 6))
    }


def test_references_without_saying_so() -> None:
    assert references("See #3, o/n#4 `#5` but not &#6; or\n> #7", HERE) == [(HERE, 3), ("o/n", 4), (HERE, 5)]
