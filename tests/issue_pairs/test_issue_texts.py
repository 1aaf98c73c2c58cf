"""The text of an issue does not hold its answer, nor anybody's name."""

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


def test_names_become_someone() -> None:
    assert text("Crash", "@bob, @al-ice: hi.") == "Crash\n\n@someone, @someone: hi."
    assert text("Crash", "https://github.com/bob says") == "Crash\n\nhttps://github.com/someone says"
    assert text("Crash", "```\n@property @Bob\n```", "bob") == "Crash\n\n```\n@property @someone\n```"
    for kept in (
        "mail a@b.org",
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
