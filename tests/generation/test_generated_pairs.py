"""What the lines of all answers become together: repeats, contradictions, agreement, judge, surplus, and the account."""

from collections.abc import Sequence

import pytest

from angle_llm.data.formats import FORMATS
from angle_llm.generation.filters import Limits
from angle_llm.generation.generators import Answer, Request
from angle_llm.generation.pairs import Ensemble, Judge, Line, account, as_row, choose, read_lines
from angle_llm.generation.wording import Side, load_wording

PAPER = load_wording("paper")
SOURCE = "A man is eating bread."


def request(side: Side = "synonym", generator: str = "one", row: int = 0, text: str = SOURCE) -> Request:
    return Request(row, text, side, generator, PAPER.ask(side, text, 3), 7, f"{row} {side} {generator}")


def lines_of(
    *answered: tuple[Request, Sequence[str]], size: int = 9, ensemble: Ensemble = "all", judge: Judge | None = None
) -> list[Line]:
    answers = {
        one.key: Answer("\n".join(f"{n}. {text}" for n, text in enumerate(said, 1)), True, 1, 1)
        for one, said in answered
    }
    lines = read_lines([one for one, _ in answered], answers, PAPER, Limits())
    choose(lines, size=size, generators=len({one.generator for one, _ in answered}), ensemble=ensemble, judge=judge)
    return lines


def fates(lines: Sequence[Line]) -> list[str | None]:
    return [line.left_out for line in lines]


def test_a_sentence_counts_once_for_a_side() -> None:
    lines = lines_of((request(), ["Someone eats bread.", "someone eats bread", "Bread is eaten."]))
    assert fates(lines) == [None, "repeat", None]


def test_a_pair_in_the_other_order_is_the_same_pair() -> None:
    lines = lines_of(
        (request(), ["Someone eats bread."]), (request(row=1, text="Someone eats bread."), [SOURCE, "Some eat bread."])
    )
    assert fates(lines) == [None, "repeat", None]


def test_a_pair_that_is_synonym_and_antonym_is_neither() -> None:
    lines = lines_of(
        (request(), ["Someone eats bread.", "Bread is eaten."]),
        (request("antonym"), ["SOMEONE eats bread", "Nobody eats."]),
    )
    assert fates(lines) == ["contradiction", None, "contradiction", None]


def test_generators_contradict_each_other_too() -> None:
    lines = lines_of((request(), ["Someone eats bread."]), (request("antonym", "two"), ["Someone eats bread."]))
    assert fates(lines) == ["contradiction", "contradiction"]


def test_a_pair_of_two_generators_is_kept_once_and_names_both() -> None:
    lines = lines_of((request(), ["Someone eats bread."]), (request(generator="two"), ["Someone eats bread!"]))
    assert fates(lines) == [None, "repeat"]
    assert as_row(lines[0], PAPER)["generator"] == "one + two"


def test_agreement_keeps_what_two_wrote() -> None:
    said = ["Someone eats bread.", "Bread is eaten."]
    lines = lines_of((request(), said), (request(generator="two"), said[:1]), ensemble="agree")
    assert fates(lines) == [None, "alone", "repeat"]


def test_one_generator_saying_it_twice_is_no_agreement() -> None:
    lines = lines_of(
        (request(), ["Someone eats bread."] * 2), (request(generator="two"), ["Bread is eaten."]), ensemble="agree"
    )
    assert fates(lines) == ["alone", "repeat", "alone"]


def test_the_judge_has_bounds_for_each_side() -> None:
    cosines = {
        "Someone eats bread.": 0.9,
        "Trains are late today.": 0.1,
        "Nobody eats bread.": 0.95,
        "Bread is toxic.": 0.4,
    }
    judge = Judge(lambda pairs: [cosines[right] for _, right in pairs], {"synonym": 0.5}, {"antonym": 0.9})
    lines = lines_of(
        (request(), ["Someone eats bread.", "Trains are late today."]),
        (request("antonym"), ["Nobody eats bread.", "Bread is toxic."]),
        judge=judge,
    )
    assert fates(lines) == [None, "judge", "judge", None]
    assert as_row(lines[0], PAPER)["cosine"] == 0.9


def test_more_than_was_asked_for_is_surplus_and_what_was_left_out_does_not_count() -> None:
    lines = lines_of((request(), [SOURCE, "Someone eats bread.", "Bread is eaten.", "He eats his bread."]), size=2)
    assert fates(lines) == ["copy", None, None, "surplus"]


def test_a_row_is_a_scored_pair_with_its_origin() -> None:
    (line,) = lines_of((request("antonym", row=4), ["Nobody eats bread."]))
    row = as_row(line, PAPER)
    read = FORMATS["scored_pair"].read(row)
    assert (read.left, read.right, read.score) == (SOURCE, "Nobody eats bread.", 0.0)  # type: ignore[union-attr]
    assert {name: row[name] for name in ("side", "generator", "prompt", "prompt_hash", "seed", "row")} == {
        "side": "antonym",
        "generator": "one",
        "prompt": "paper",
        "prompt_hash": PAPER.fingerprint(),
        "seed": 7,
        "row": 4,
    }


def test_the_account_adds_up() -> None:
    asked = [request(), request("antonym"), request(generator="two")]
    answers = {
        asked[0].key: Answer(f"Sure!\n1. {SOURCE}\n2. Someone eats bread.\n3. x\n\n4. Someone ea", False, 1, 1),
        asked[1].key: Answer("I'm sorry, I cannot help with bread.", True, 1, 1),
    }
    lines = read_lines(asked, answers, PAPER, Limits())
    choose(lines, size=3, generators=2, ensemble="all", judge=None)
    told = account(asked, answers, lines)
    assert [(one["generator"], one["side"], one["requests"], one["answered"]) for one in told] == [
        ("one", "synonym", 1, 1),
        ("one", "antonym", 1, 1),
        ("two", "synonym", 1, 0),
    ]
    assert told[0]["left_out"] == {"remark": 1, "copy": 1, "too_short": 1, "blank": 1, "cut": 1}
    assert told[1]["left_out"] == {"refusal": 1}
    for one in told:
        assert one["lines"] == one["kept"] + sum(one["left_out"].values())
    assert sum(one["lines"] for one in told) == len(lines) == 7


@pytest.mark.parametrize("ensemble", ["all", "agree"])
def test_no_answers_make_no_pairs(ensemble: Ensemble) -> None:
    assert lines_of((request(), [""]), ensemble=ensemble)[0].left_out == "blank"
