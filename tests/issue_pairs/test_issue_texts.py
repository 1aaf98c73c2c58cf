"""The text of an issue does not hold its answer, nor anybody's name."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.data.formats import read_text
from angle_llm.issue_pairs.clean import issue_text
from angle_llm.issue_pairs.duplicates import SAYING


def text(title: str, body: str = "", *people: str, longest: int = 65_536) -> str:
    return issue_text(title, body, set(people), longest)


def test_title_blank_line_body() -> None:
    assert text("Crash ", " on start\r\n\r\n\r\n\r\nalways  \n") == "Crash\n\n on start\n\nalways"
    assert text("Crash") == text("Crash", " \n") == "Crash"


@pytest.mark.parametrize(
    "line",
    [
        "Duplicate of #12",
        "> duplicate of #12",
        "Possible duplicate of o/n#12.",
        "Edit: it is a dup of #3 and #4",
        "`dup of #5`",
        "Duplicate of [Crash on start](https://github.com/o/n/issues/12)",
        "Duplicate of [[Bug] Crash on start](https://github.com/o/n/issues/12)",
        "Duplicate of issue 12",
        'Duplicate of "#12"',
        "Duplicate – #12",
        "duplication of #12",
    ],
)
def test_the_answer_is_taken_out_with_its_line(line: str) -> None:
    assert text("Crash", f"One.\n{line}\nTwo.") == "Crash\n\nOne.\n\nTwo."


def test_of_a_long_line_the_answer_alone_is_taken_out() -> None:
    assert text("Crash", "word " * 100 + "duplicate of #12 " + "word " * 100).count("word") == 200


def test_a_mark_in_the_title_is_taken_out_and_a_title_about_duplicates_stays() -> None:
    assert text("[Duplicate] Crash") == text("Crash (duplicate of #4)").strip() == "Crash"
    assert text("Duplicate key error in #5 rows of the table") == "Duplicate key error in #5 rows of the table"


def test_templates_are_taken_out_and_code_stays() -> None:
    assert text("Crash", "a<!-- x\ny -->b\n```html\n<!-- mine -->\n```") == "Crash\n\nab\n```html\n<!-- mine -->\n```"
    assert text("Crash", "a <!-- never closed") == "Crash\n\na <!-- never closed"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g(a @ b)\nValueError: no'
    assert text("Crash", trace) == f"Crash\n\n{trace}"


def test_what_opens_first_wins_of_hidden_comments_and_code() -> None:
    assert text("Crash", "a<!-- run `x` and\n```\ny\n``` -->b") == "Crash\n\nab"
    assert text("Crash", "a<!-- one ` tick -->b `<!-- shown -->`") == "Crash\n\nab `<!-- shown -->`"


def test_empty_lines_do_not_keep_an_answer_apart() -> None:
    assert text("Crash", "One.\nClosed as duplicate of" + "\n \n" * 25 + "#12\nTwo.") == "Crash\n\nOne.\n\nTwo."


@pytest.mark.parametrize(
    "unit",
    [
        " ",
        " \n",
        "\n",
        "dup ",
        "dup\n",
        "`",
        "<!--",
        "-->",
        "```\n",
        "[x[y]",
        "@a_",
        "https://github.com/a",
        "dup of - ",
    ],
)
def test_a_body_of_any_size_takes_a_moment(unit: str) -> None:
    started = time.monotonic()
    text("Crash", "x" + unit * (262_144 // len(unit)) + "x")
    assert time.monotonic() - started < 10  # linear: under a second; quadratic would be minutes


@pytest.mark.parametrize("join", ["", "\n"])
def test_sayings_within_sayings_take_a_moment_and_none_is_left(join: str) -> None:
    nested = f"dup {join}" * 7_000 + f".#1{join}" * 7_000  # as long as a body may be
    started = time.monotonic()
    made = text("Crash", nested)
    assert time.monotonic() - started < 10  # a pass for each would be minutes
    assert SAYING.search(made) is None


def test_names_become_someone() -> None:
    assert text("Crash", "@bob, @al-ice: hi.") == "Crash\n\n@someone, @someone: hi."
    assert text("Crash", "https://github.com/bob says") == "Crash\n\nhttps://github.com/someone says"
    for named, told in (
        ("https://github.com/octocat.", "https://github.com/someone."),
        ("https://github.com/octocat/.", "https://github.com/someone."),
        ("_https://github.com/octocat_", "_https://github.com/someone_"),
        ("_@octocat_", "_@someone_"),
        ("@octocat/", "@someone/"),
        ("@octo_corp", "@someone"),
    ):
        assert text("Crash", named) == f"Crash\n\n{told}"
    assert text("Crash", "```\n@property @Bob\n```", "bob") == "Crash\n\n```\n@property @someone\n```"
    for kept in (
        "mail a@b.org",
        "mail a_@b.org",
        "https://github.com/bob/.github",
        "@angular/core 1.2",
        "https://github.com/bob/tool/issues/3",
        "a @ b",
        "git@github.com:x",
    ):
        assert text("Crash", kept, "bob") == f"Crash\n\n{kept}"


def test_a_text_has_a_longest_length() -> None:
    assert len(text("Crash", "y" * 1_000_000, longest=100)) == 100


pieces = st.sampled_from(
    [
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
        ".",
        "🙂",
        "\0",
        "\ud800",
        "o/n#4",
    ]
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=30).map("".join), st.lists(pieces, max_size=30).map("".join))
def test_whatever_the_pieces_no_answer_is_left_and_the_loader_reads_it(title: str, body: str) -> None:
    made = text(title, body, "bob")
    assert SAYING.search(made) is None
    assert "@bob" not in made
    if made:
        assert read_text({"text1": made}, "text1") == made
