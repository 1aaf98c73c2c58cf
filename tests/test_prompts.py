"""Prompts: the bundled ones, literal insertion, the published edits, and invalid files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from angle_llm.prompts import PromptTemplate, load_prompt
from angle_llm.settings.parsing import SettingsError, bundled_files

REPOSITORY = Path(__file__).parents[1]
FILES = sorted((REPOSITORY / "prompts").glob("*.yaml"))
PAPER = 'Summarize sentence "{text}" in one word:"'

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bundled_prompt_has_its_name_purpose_and_source(path: Path) -> None:
    assert bundled_files("prompts") == {path.stem: path for path in FILES}
    prompt = load_prompt(path)
    assert prompt.name == path.stem
    assert prompt.description
    assert prompt.source
    assert load_prompt(path.stem) == load_prompt(str(path)) == prompt


HARD_TEXTS = [
    "{text}", "{}", "{0.__class__}", "{0} {name!r:>10} {{text}}", 'a "quoted" word', "100 %s of %(text)s %d %",
    "$text ${text}", "</s>", "<|im_end|>", "[CLS]", r"\1 \g<0> \n", "two\nlines\r\n\tand a tab", "naïve 😀 日本語 \u200b",
]  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(HARD_TEXTS) | st.text(max_size=30), st.text('ab {}"%', max_size=6), st.text('ab {}"%', max_size=6)
)
def test_text_is_inserted_literally(text: str, head: str, tail: str) -> None:
    prompt = PromptTemplate("x", head + "{text}" + tail)
    assert (prompt.head, prompt.tail) == (head, tail)
    assert prompt.format(text) == head + text + tail


def published_edits(text: str) -> str:
    """The lines of the reference STS script (PromptEOL, AnglE), written independently."""
    if len(text) > 0 and text[-1] not in ".?\"'":
        text += "."
    text = text.replace('"', "'")
    if len(text) > 0 and text[-1] == "?":
        text = text[:-1] + "."
    return text


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text("ab .?!\"'", min_size=1, max_size=8).filter(str.strip))
@example('"')
def test_edited_prompt_equals_the_published_evaluation(text: str) -> None:
    edited = load_prompt("summarize_one_word_edited").edit(text)
    assert edited == published_edits(text)
    assert edited.strip()


def test_fingerprint_depends_on_what_changes_the_ids() -> None:
    prompt = PromptTemplate("x", PAPER, edits=("append_full_stop", "double_quotes_to_single"))
    assert replace(prompt, name="y", description="d", source="s").fingerprint == prompt.fingerprint
    others = [
        replace(prompt, template=PAPER + " "),
        replace(prompt, edits=()),
        replace(prompt, edits=prompt.edits[::-1]),
        replace(prompt, tokenization="segments"),
        replace(prompt, append="eos"),
    ]
    assert len({each.fingerprint for each in (prompt, *others)}) == 6
    # As stored in saved encoders:
    stored = "641370193fee239e4ae6309a65330e45b3ba81e50adf1a26a4f31f1deed49fc2"
    assert load_prompt("summarize_one_word").fingerprint == stored
    assert load_prompt("summarize_one_word_edited").template == load_prompt("summarize_one_word").template == PAPER


def test_prompt_is_unchanged_by_json_and_yaml(write: Write) -> None:
    prompt = PromptTemplate("x", 'é "{text}"\n: # {', "d", "s", ("append_full_stop",), "segments")
    assert json.loads(json.dumps(prompt.to_dict())) == prompt.to_dict()
    assert PromptTemplate.from_dict(prompt.to_dict(), "here") == prompt
    assert load_prompt(write(yaml.safe_dump(prompt.to_dict(), allow_unicode=True))) == prompt
    ended = replace(prompt, append="eos")
    assert PromptTemplate.from_dict(ended.to_dict(), "here") == ended != prompt
    listed = PromptTemplate("x", "{text}", edits=["append_full_stop"])
    assert len({listed, PromptTemplate("x", "{text}", edits=("append_full_stop",))}) == 1


@pytest.mark.parametrize("template", ["", "{Text} { text }", "{text}" * 3])
def test_template_needs_exactly_one_placeholder(template: str) -> None:
    with pytest.raises(SettingsError, match="'mine'"):
        PromptTemplate(name="mine", template=template)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name: a\ntemplate: '{text}'\nedit: []\n", ["'edit'", "'edits'"]),
        ("template: '{text}'\n", ["name", "required"]),
        ("name: a\ntemplate: {text}\n", ["template"]),
        ("name: no\ntemplate: '{text}'\n", ["name", "got False"]),
        ("name: a\ntemplate: '{text}'\ndescription:\n", ["description", "got None"]),
        ("name: a\ntemplate: '{text}'\nedits: append_full_stop\n", ["edits", "'append_full_stop'"]),
        ("name: a\ntemplate: '{text}'\nedits: [append_fullstop]\n", ["'append_full_stop'"]),
        ("name: a\ntemplate: '{text}'\ntokenization: joint\n", ["tokenization", "'joined'"]),
        ("name: a\ntemplate: no place\n", ["{text}"]),
        *((content, ["mine.yaml"]) for content in ("name: [\n", "- a\n", "", "name: a\n---\nname: b\n")),
        ("name: a\ntemplate: 'é{text}'\n".encode("latin-1"), ["UTF-8"]),
    ],
)
def test_unusable_file_is_refused_with_the_reason(content: str | bytes, named: list[str], write: Write) -> None:
    with pytest.raises(SettingsError) as caught:
        load_prompt(write(content))
    assert [part for part in named if part not in str(caught.value)] == []


def test_file_runs_no_code(write: Write, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = f"name: a\ntemplate: '{{text}}'\ndescription: !!python/object/apply:os.mkdir ['{trace}']"
    with pytest.raises(SettingsError):
        load_prompt(write(content))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "named"), [("", "prompteol"), ("summarise_one_word", "prompteol"), ("none.yaml", r"none\.yaml")]
)
def test_unknown_prompt_is_refused_with_the_known_ones(name: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_prompt(name)
