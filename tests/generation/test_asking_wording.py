"""A wording puts size and sentence in literally, and a file that cannot be meant is refused."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.config import SettingsError
from angle_llm.generation.wording import SIDES, Wording, bundled_wordings, load_wording

GIVEN = {"name": "mine", "synonym": "{size} like {text}", "antonym": "{size} unlike {text}"}


@pytest.mark.parametrize("name", bundled_wordings())
def test_bundled_wordings_ask_both_sides_apart(name: str) -> None:
    wording = load_wording(name)
    asked = [wording.ask(side, "A cat sleeps.", 3) for side in SIDES]
    assert all("A cat sleeps" in one and "3" in one and "{" not in one for one in asked)
    assert asked[0] != asked[1]


def test_the_papers_wording_is_the_papers() -> None:
    assert load_wording("paper").ask("synonym", "A cat sleeps.", 5) == (
        "You are a highly smart same-meaning sentence-generating system. Your job is to generate 5 synonymous sentences of a "
        "given input sentence. Input sentence: A cat sleeps. Output:"
    )


@given(st.text())
def test_any_sentence_is_put_in_literally(text: str) -> None:
    assert Wording(**GIVEN).ask("antonym", text, 2) == f"2 unlike {text}"


def test_blanks_inside_a_sentence_stay() -> None:
    assert Wording(**GIVEN).ask("synonym", "{text} {size} {} {0}", 2) == "2 like {text} {size} {} {0}"


def test_the_fingerprint_is_that_of_what_is_asked() -> None:
    same = Wording(**GIVEN | {"name": "other", "source": "elsewhere"})
    assert same.fingerprint() == Wording(**GIVEN).fingerprint()
    assert Wording(**GIVEN | {"antonym": "{size} not {text}"}).fingerprint() != same.fingerprint()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (GIVEN | {"synonym": "like {text}"}, "exactly one {size}, this one has 0"),
        (GIVEN | {"antonym": "{size} {text} {text}"}, "exactly one {text}, this one has 2"),
        ({"name": "mine", "synonym": GIVEN["synonym"]}, "needs `antonym`"),
        (GIVEN | {"synonyms": "x"}, "unknown key 'synonyms'. Did you mean 'synonym'"),
        (GIVEN | {"name": 3}, "mapping of texts"),
        (["a list"], "mapping of texts"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, values: object, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(SettingsError, match=words.replace("{", r"\{").replace("(", r"\(")):
        load_wording(str(path))


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'paper'"):
        load_wording("papr")
