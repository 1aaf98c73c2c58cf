"""Sentences are found in whatever shape an answer has, and every line is accounted for."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from angle_llm.generation.parsing import Line, read_answer

MEN = ["A man eats.", "Someone is eating bread.", "It's Tom's meal"]


def sentences(answer: str, *, finished: bool = True) -> list[str]:
    return [line.text for line in read_answer(answer, finished=finished) if line.left_out is None]


SHAPES = {
    "numbers": "\n".join(f"{n}. {text}" for n, text in enumerate(MEN, 1)),
    "brackets": "\n".join(f"({n}) {text}" for n, text in enumerate(MEN, 1)),
    "half brackets": "\n".join(f"{n}) {text}" for n, text in enumerate(MEN, 1)),
    "square brackets": "\n".join(f"[{n}] {text}" for n, text in enumerate(MEN, 1)),
    "letters": "\n".join(f"{n}) {text}" for n, text in zip("abc", MEN, strict=True)),
    "bullets": "\n".join(f"- {text}" for text in MEN),
    "round bullets": "\n\n".join(f"  • {text}" for text in MEN),
    "quoted": "\n".join(f'{n}. "{text}"' for n, text in enumerate(MEN, 1)),
    "curly quotes": "\n".join(f"* “{text}”," for text in MEN),
    "bold": "\n".join(f"{n}. **{text}**" for n, text in enumerate(MEN, 1)),
    "labels": "\n".join(f"Sentence {n}: {text}" for n, text in enumerate(MEN, 1)),
    "bold labels": "\n".join(f"**Synonym {n}:** {text}" for n, text in enumerate(MEN, 1)),
    "plain lines": "\n".join(MEN),
    "one line": " ".join(f"{n}. {text}" for n, text in enumerate(MEN, 1)),
    "talk around": "Sure! Here are three sentences:\n\n1. {}\n2. {}\n3. {}\n\nI hope this helps!".format(*MEN),
    "talk before plain lines": "Certainly, here they are:\n{}\n{}\n{}".format(*MEN),
    "talk before one line": "Here are three: 1. {} 2. {} 3. {}".format(*MEN),
    "json": json.dumps(MEN),
    "json object": json.dumps({"sentences": MEN}, indent=1),
    "fenced json": f"```json\n{json.dumps(MEN)}\n```",
    "fenced lines": "```\n1. {}\n2. {}\n3. {}\n```".format(*MEN),
    "carriage returns": "\r\n".join(f"{n}. {text}" for n, text in enumerate(MEN, 1)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_sentences(shape: str) -> None:
    assert sentences(SHAPES[shape]) == MEN


@pytest.mark.parametrize(
    "text",
    [
        "3 men eat.",
        "3.5 million people left.",
        "10:30 is too late.",
        '"Yes" and "no" were said.',
        "A dog - a large one - barks.",
        "'Tis the season",
        "U.S. stocks fell 2.5 percent.",
        "The answer is no.",
        "Note the time.",
        "1990 was good",
        "He ran (1) and won (2) twice.",
    ],
)
def test_what_looks_like_marks_inside_a_sentence_stays(text: str) -> None:
    assert sentences(text) == [text]
    assert sentences(f"1. {text}\n2. Other words.") == [text, "Other words."]


def test_the_last_line_of_a_cut_answer_is_left_out() -> None:
    answer = "1. A man eats.\n2. Someone is ea\n\n"
    assert sentences(answer, finished=False) == ["A man eats."]
    assert sentences(answer) == ["A man eats.", "Someone is ea"]
    assert [line.left_out for line in read_answer(answer, finished=False)] == [None, "cut", "blank"]


def test_a_cut_json_list_is_no_list_of_sentences_but_lines() -> None:
    assert sentences('["A man eats.", "Someone is ea', finished=False) == []


def test_a_json_text_is_one_line_that_a_file_can_hold() -> None:
    assert sentences('["A man\\n eats \\ud83d."]') == ["A man eats ?."]


@pytest.mark.parametrize("finished", [True, False])
def test_thoughts_are_no_sentences(finished: bool) -> None:
    answer = (
        "<think>\nThe user wants sentences.\n1. A draft of one.\n</think>\n\n1. A man eats.\n2. Someone eats.\n\nDone."
    )
    assert sentences(answer, finished=finished) == ["A man eats.", "Someone eats."]
    thinking = read_answer("<think>\nThe user wants\nsentences.", finished=finished)
    assert [line.left_out for line in thinking] == ["thought"] * 3


def test_the_opening_of_a_cut_json_object_is_no_sentence() -> None:
    assert sentences('{"the many sentences": [\n "A man eats.",\n "Someone is ea', finished=False) == ["A man eats."]


@pytest.mark.parametrize(
    "answer",
    [
        "Output" + " " * 50_000 + "x",
        "```\n" + "\n" * 100_000 + "x",
        "```\n" + "``` \n" * 30_000 + "x",
        "1." + " " * 100_000 + "x",
        "**" * 50_000 + "x",
        "<think>" * 30_000,
        '"' * 100_000,
        "“'" * 50_000 + "’”" * 50_000,
    ],
    ids=lambda answer: repr(answer[:12]),
)
def test_a_hostile_answer_takes_no_longer_than_its_length(answer: str) -> None:
    started = time.perf_counter()
    read_answer(answer)
    assert time.perf_counter() - started < 5, "milliseconds; a quadratic pattern takes minutes"


def test_every_line_has_its_kind() -> None:
    answer = "Sure:\n```\n1. A man eats.\n\n2.\n```\nThat is all."
    assert [line.left_out for line in read_answer(answer)] == [
        "remark",
        "fence",
        None,
        "blank",
        "blank",
        "fence",
        "remark",
    ]


MARKS = st.sampled_from(
    ["1.", "2)", "- ", "```", '"', "**", "\n", "\r", ":", "Sure", "[", "]", "{", ",", " ", "'", "\u2028", "a"]
)


@given(st.one_of(st.text(), st.lists(MARKS).map("".join)), st.booleans())
@example("[" * 5000, True)
@example('{"a": ["b", "\\ud800"]}', True)
@example("1." * 3000, False)
@example("*" * 3000, True)
def test_no_answer_breaks_it_and_every_line_is_accounted_for(answer: str, finished: bool) -> None:
    read = read_answer(answer, finished=finished)
    assert all(isinstance(line, Line) for line in read)
    assert all(line.text.strip() and line.text == line.text.strip() for line in read if line.left_out is None)
    if answer.strip() and not answer.strip().startswith(("[", "{", "`", "~")):
        assert len(read) >= len(answer.splitlines())
        # Nothing is lost: lines without their marks are in the answer, in its order.
        place = 0
        for line in read:
            place = answer.index(line.text, place) + len(line.text)


WORDS = st.lists(
    st.sampled_from(["the", "man's", "dog", "eats", "quickly,", "no", "(old)", "bread;", "7", "cats", "—", "sleep"]),
    min_size=2,
    max_size=9,
)


@given(st.lists(WORDS.map(lambda words: "A " + " ".join(words) + "."), min_size=1, max_size=5))
def test_a_numbered_list_gives_back_what_was_put_in(texts: list[str]) -> None:
    assert sentences("\n".join(f"{n}. {text}" for n, text in enumerate(texts, 1))) == texts
    assert sentences(json.dumps(texts)) == texts
