"""Prompts: the bundled ones, literal insertion of the text, and invalid files."""

from pathlib import Path

import pytest
import yaml
from commands import TREE

from angle_llm import PromptTemplate, load_prompt

PUBLISHED = 'Summarize sentence "{text}" in one word:"'


@pytest.mark.parametrize(
    "name", ["summarize_one_word", "summarize_one_word_edited", "prompteol", "representative_word", "plain"]
)
def test_a_bundled_prompt_equals_its_file(name: str) -> None:
    path = TREE / "prompts" / f"{name}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for prompt in (load_prompt(name), load_prompt(path)):
        assert (prompt.name, prompt.template) == (name, content["template"])
        assert prompt.template.count("{text}") == 1
        assert list(prompt.edits) == content.get("edits", [])


def test_the_published_prompt_and_edits_are_exact() -> None:
    assert load_prompt("summarize_one_word").template == PUBLISHED
    assert load_prompt("summarize_one_word_edited").template == PUBLISHED
    assert list(load_prompt("summarize_one_word").edits) == []
    assert len(load_prompt("summarize_one_word_edited").edits) == 3


def test_a_prompt_file_outside_the_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntemplate: 'query: {text}'\nedits: [append_full_stop]\ntokenization: segments\n")
    prompt = load_prompt(str(path))
    assert (prompt.name, prompt.template) == ("mine", "query: {text}")
    assert (list(prompt.edits), prompt.tokenization) == (["append_full_stop"], "segments")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name: x\ntemplate: no place\n", "text"),
        ("name: x\ntemplate: '{text} {text}'\n", "text"),
        ("name: x\ntemplat: '{text}'\n", "template"),
        ("name: x\ntemplate: '{text}'\nedits: [append_fullstop]\n", "append_full_stop"),
        ("name: x\ntemplate: '{text}'\ntokenization: joint\n", "joined"),
        ("name: x\ntemplate: 7\n", "template"),
        ("name: [\n", "mine.yaml"),
        ("- a\n", "mine.yaml"),
        ("", "mine.yaml"),
    ],
)
def test_an_invalid_prompt_file_is_refused(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        load_prompt(path)


@pytest.mark.parametrize(("name", "named"), [("sumarize_one_word", "summarize_one_word"), ("none.yaml", "none.yaml")])
def test_an_unknown_prompt_name_is_refused(name: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_prompt(name)


def test_a_template_is_checked_when_it_is_made() -> None:
    assert PromptTemplate(name="x", template="{{text}} {0} %s").template == "{{text}} {0} %s"
    with pytest.raises(ValueError, match="text"):
        PromptTemplate(name="x", template="nothing")
