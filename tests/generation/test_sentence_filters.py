"""Each filter leaves out what it is named for, which no other does, and leaves good sentences alone."""

import pytest

from angle_llm.config import SettingsError
from angle_llm.generation.filters import FILTERS, Candidate, Limits, why_left_out
from angle_llm.generation.wording import SIDES, load_wording

SOURCE = "A man is slowly eating a large piece of bread."
ASKED = load_wording("paper").own_words("synonym")

LEFT_OUT = {
    "no_words": "-" * 30,
    "refusal": "I'm sorry, but as an AI I do not eat a piece of bread.",
    "prompt_words": "You are a highly smart man with a piece of bread.",
    "talk": "Both sentences say that bread is eaten.",
    "copy": "a man is slowly eating a large piece of bread",
    "too_short": "A man eats.",
    "too_long": "A man is slowly eating a large piece of bread " * 3,
    "other_script": "Мужчина медленно ест большой кусок хлеба.",
}


def why(sentence: str, source: str = SOURCE, **limits: float) -> str | None:
    return why_left_out(Candidate(sentence, source, ASKED, Limits(**limits)))


def test_every_filter_has_its_example() -> None:
    assert LEFT_OUT.keys() == FILTERS.keys()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_leaves_out_what_no_other_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why(LEFT_OUT[name]) == name
    monkeypatch.delitem(FILTERS, name)
    assert why(LEFT_OUT[name]) is None


@pytest.mark.parametrize(
    ("sentence", "source"),
    [
        ("Somebody eats a big slice of bread without haste.", SOURCE),
        ("Nobody is eating bread.", SOURCE),
        ("I am sorry that I was late today.", "I'm sorry for being late today."),
        ("The language model is not large.", "The language model is large."),
        ("The judge gave a short sentence.", "The judge gave a long sentence."),
        ("Your job is to generate power of a given size.", "Your job is to generate power of a given input."),
        ("Москва не столица России.", "Москва — столица России."),
        ("東京は日本の首都ではない。", "東京は日本の首都である。"),
        ("1 + 1 = 3 ! ! !", "1 + 1 = 2 ! ! !"),
        ("The café in Αθήνα is closed today.", "The café in Αθήνα is open today."),
    ],
)
def test_a_good_sentence_is_left_alone(sentence: str, source: str) -> None:
    assert why(sentence, source) is None


@pytest.mark.parametrize(("sentence", "source"), [("\u200b" * 30, SOURCE), ("? ! " * 9, SOURCE), (SOURCE, "…" * 20)])
def test_what_cannot_be_read_is_no_sentence(sentence: str, source: str) -> None:
    assert why(sentence, source) == "no_words", "a judge's tokenizer would leave nothing of it, and stop the command"


def test_lengths_are_those_of_the_limits() -> None:
    assert why("Somebody eats.", least_ratio=0.2) is None
    assert why("Somebody eats.", least_ratio=0.2, shortest=15) == "too_short"
    assert why(LEFT_OUT["too_long"], most_ratio=4) is None
    assert why(LEFT_OUT["too_long"], most_ratio=4, longest=100) == "too_long"


def test_limits_that_nothing_meets_are_refused() -> None:
    with pytest.raises(SettingsError, match="shortest 10 must be between 0 and longest 5"):
        Limits(shortest=10, longest=5)
    with pytest.raises(SettingsError, match="least_ratio"):
        Limits(least_ratio=3.0)


@pytest.mark.parametrize("side", SIDES)
def test_the_examples_of_a_prompt_are_its_own_words(side: str) -> None:
    asked = load_wording("examples").own_words(side)  # type: ignore[arg-type]
    copied = "The boy is not eating anything." if side == "antonym" else "The kid eats an apple that is red."
    assert why_left_out(Candidate(copied, "A girl is reading a book.", asked, Limits())) == "prompt_words"
