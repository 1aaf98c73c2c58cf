"""Prompts: the bundled ones, literal wording, the published edits, and files that cannot be used."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import angle_llm
from angle_llm.prompts import TEXT_EDITS, PromptError, PromptTemplate, bundled_prompts, load_prompt

REPOSITORY = Path(__file__).parents[1]
FILES = sorted((REPOSITORY / "prompts").glob("*.yaml"))
PAPER = 'Summarize sentence "{text}" in one word:"'
HARD_TEXTS = [
    "plain",
    "{text}",
    "{}",
    "{0.__class__}",
    "{0} {name!r:>10} {{text}}",
    'a "quoted" word',
    "it's",
    "100 %s of %(text)s %d %",
    "$text ${text}",
    "</s>",
    "<|im_end|>",
    "[CLS]",
    r"\1 \g<0> \n",
    "two\nlines\r\n\tand a tab",
    "naïve 😀 日本語 \u200b",
]

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a prompt file and gives its path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


# The bundled prompts


def test_the_repository_holds_prompts_and_all_of_them_are_bundled() -> None:
    assert len(FILES) >= 5
    assert bundled_prompts() == {path.stem: path for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_prompt_file_is_called_after_its_name_and_tells_its_purpose_and_source(path: Path) -> None:
    prompt = load_prompt(path)
    assert prompt.name == path.stem
    assert prompt.template.count("{text}") == 1
    assert prompt.description
    assert prompt.source
    assert load_prompt(path.stem) == load_prompt(str(path)) == prompt


def test_the_papers_prompt_is_letter_for_letter_the_published_one() -> None:
    assert load_prompt("summarize_one_word").template == PAPER
    assert load_prompt("summarize_one_word").edits == ()
    assert load_prompt("summarize_one_word_edited").template == PAPER
    assert load_prompt("prompteol").template == 'This sentence : "{text}" means in one word:"'
    assert load_prompt("plain").word("A man.") == "A man."


@pytest.fixture
def project() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("reading pyproject.toml needs tomllib, Python 3.11")
    import tomllib

    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def prompts_seen_by(site: Path, tmp_path: Path) -> dict[str, Any]:
    """What a program elsewhere sees that has only this copy of the package."""
    program = (
        "import json, angle_llm.prompts as p;"
        "print(json.dumps({'file': p.__file__, 'templates': {n: p.load_prompt(n).template for n in p.bundled_prompts()}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    assert Path(seen["file"]).is_relative_to(site)
    return seen


def test_an_installed_copy_finds_the_prompts_where_the_build_settings_put_them(
    project: dict[str, Any], tmp_path: Path
) -> None:
    """Lays the files out as `pyproject.toml` tells hatchling to; the test below asks hatchling itself."""
    site = tmp_path / "site"
    shutil.copytree(Path(angle_llm.__file__).parent, site / "angle_llm", ignore=shutil.ignore_patterns("starter"))
    for source, target in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        shutil.copytree(REPOSITORY / source, site / target)
    seen = prompts_seen_by(site, tmp_path)
    assert seen["templates"] == {path.stem: load_prompt(path).template for path in FILES}
    assert "prompts" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="building a wheel needs hatchling")
def test_the_wheel_holds_the_prompts(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    seen = prompts_seen_by(site, tmp_path)
    assert seen["templates"] == {path.stem: load_prompt(path).template for path in FILES}


# Wording


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_text_is_put_in_literally(text: str) -> None:
    prompt = PromptTemplate(name="x", template=PAPER)
    assert prompt.word(text) == 'Summarize sentence "' + text + '" in one word:"'
    assert prompt.head + text + prompt.tail == prompt.word(text)


@pytest.mark.parametrize(
    ("template", "worded"),
    [
        ("{text}", "A man."),
        ("query: {text}", "query: A man."),
        ("{text} means", "A man. means"),
        ("{{text}}", "{A man.}"),
        ("100 % of {0} %s {name} {text}", "100 % of {0} %s {name} A man."),
    ],
)
def test_nothing_but_the_one_placeholder_is_replaced(template: str, worded: str) -> None:
    assert PromptTemplate(name="x", template=template).word("A man.") == worded


@settings(derandomize=True, deadline=None, max_examples=60)
@given(text=st.text(max_size=30), head=st.text('ab {}"%', max_size=6), tail=st.text('ab {}"%', max_size=6))
def test_wording_is_head_text_tail_for_any_text(text: str, head: str, tail: str) -> None:
    assert PromptTemplate(name="x", template=head + "{text}" + tail).word(text) == head + text + tail


# Edits of the published evaluation


@pytest.mark.parametrize(
    ("edits", "text", "edited"),
    [
        (["append_full_stop"], "A man sings", "A man sings."),
        (["append_full_stop"], "A man sings.", "A man sings."),
        (["append_full_stop"], "Who sings?", "Who sings?"),
        (["append_full_stop"], 'He said "no"', 'He said "no"'),
        (["append_full_stop"], "the boys'", "the boys'"),
        (["append_full_stop"], "Stop!", "Stop!."),
        (["append_full_stop"], "A man sings. ", "A man sings. ."),
        (["double_quotes_to_single"], 'He said "no" and "yes".', "He said 'no' and 'yes'."),
        (["double_quotes_to_single"], "it's “typographic”", "it's “typographic”"),
        (["final_question_mark_to_full_stop"], "Who sings?", "Who sings."),
        (["final_question_mark_to_full_stop"], "Who? A man", "Who? A man"),
        (["final_question_mark_to_full_stop"], "Who??", "Who?."),
        (["final_question_mark_to_full_stop"], "?", "."),
        ([], 'Who said "no"?', 'Who said "no"?'),
    ],
)
def test_edits_equal_hand_written_examples(edits: list[str], text: str, edited: str) -> None:
    assert PromptTemplate(name="x", template="{text}", edits=tuple(edits)).edit(text) == edited


@pytest.mark.parametrize(
    ("text", "worded"),
    [
        ("A man sings", 'Summarize sentence "A man sings." in one word:"'),
        ('Who said "no"?', 'Summarize sentence "Who said \'no\'." in one word:"'),
        ('He said "no"', 'Summarize sentence "He said \'no\'" in one word:"'),
    ],
)
def test_the_edited_prompt_words_as_the_published_evaluation_does(text: str, worded: str) -> None:
    assert load_prompt("summarize_one_word_edited").word(text) == worded


def published_edits(text: str) -> str:
    """The lines of the reference STS script (PromptEOL, AnglE), written again."""
    if len(text) > 0 and text[-1] not in ".?\"'":
        text += "."
    text = text.replace('"', "'")
    if len(text) > 0 and text[-1] == "?":
        text = text[:-1] + "."
    return text


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text("ab .?!\"'", min_size=1, max_size=8))
@example('"')
def test_the_edited_prompt_equals_the_published_lines(text: str) -> None:
    assert load_prompt("summarize_one_word_edited").edit(text) == published_edits(text)


def test_edits_apply_in_the_order_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the published edits every order gives the same; of others it need not."""
    monkeypatch.setitem(TEXT_EDITS, "add_z", lambda text: text + "z")
    monkeypatch.setitem(TEXT_EDITS, "add_a", lambda text: text + "a")
    assert PromptTemplate("x", "{text}", edits=("add_z", "add_a", "append_full_stop")).edit("b") == "bza."
    assert PromptTemplate("x", "{text}", edits=("append_full_stop", "add_a", "add_z")).edit("b") == "b.az"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(min_size=1, max_size=10).filter(str.strip))
def test_no_edit_empties_a_text(text: str) -> None:
    for edit in TEXT_EDITS.values():
        assert edit(text).strip()


# Fingerprint


def test_the_fingerprint_changes_with_what_changes_the_ids_and_with_nothing_else() -> None:
    prompt = PromptTemplate("x", PAPER, edits=("append_full_stop", "double_quotes_to_single"))
    assert replace(prompt, name="y", description="d", source="s").fingerprint == prompt.fingerprint
    others = [
        replace(prompt, template=PAPER + " "),
        replace(prompt, template="{text}"),
        replace(prompt, edits=()),
        replace(prompt, edits=("append_full_stop",)),
        replace(prompt, edits=prompt.edits[::-1]),
        replace(prompt, tokenization="segments"),
    ]
    prints = [prompt.fingerprint, *(other.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_of_the_papers_prompt_is_the_one_that_saved_encoders_carry() -> None:
    assert (
        load_prompt("summarize_one_word").fingerprint
        == "641370193fee239e4ae6309a65330e45b3ba81e50adf1a26a4f31f1deed49fc2"
    )


def test_a_prompt_survives_json_and_yaml(write: Write) -> None:
    prompt = PromptTemplate("x", 'é "{text}"\n: # {', "d", "s", ("append_full_stop",), "segments")
    assert json.loads(json.dumps(prompt.to_dict())) == prompt.to_dict()
    assert PromptTemplate.from_dict(prompt.to_dict(), "here") == prompt
    loaded = load_prompt(write(yaml.safe_dump(prompt.to_dict(), allow_unicode=True)))
    assert loaded == prompt
    assert loaded.fingerprint == prompt.fingerprint


def test_edits_given_as_a_list_make_the_same_hashable_prompt() -> None:
    listed = PromptTemplate("x", "{text}", edits=["append_full_stop"])  # type: ignore[arg-type]
    assert listed == PromptTemplate("x", "{text}", edits=("append_full_stop",))
    assert len({listed, replace(listed)}) == 1


# Prompts that cannot be used


@pytest.mark.parametrize(
    ("template", "found"),
    [("no placeholder", 0), ("", 0), ("{Text} { text }", 0), ("{text} {text}", 2), ("{text}" * 3, 3)],
)
def test_a_template_needs_exactly_one_placeholder(template: str, found: int) -> None:
    with pytest.raises(PromptError, match=rf"'mine'.*exactly one \{{text\}}, this one has {found}"):
        PromptTemplate(name="mine", template=template)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name: a\ntemplat: '{text}'\n", ["unknown key 'templat'", "Did you mean 'template'?", "tokenization"]),
        ("name: a\ntemplate: '{text}'\nedit: []\n", ["unknown key 'edit'", "Did you mean 'edits'?"]),
        ("name: a\ntemplate: '{text}'\n3: x\n", ["unknown key '3'"]),
        (
            "name: a\ntemplate: '{text}'\nedits: [append_fullstop]\n",
            ["unknown text edit 'append_fullstop'", "Did you mean 'append_full_stop'?"],
        ),
        (
            "name: a\ntemplate: '{text}'\ntokenization: segment\n",
            ["unknown tokenization 'segment'", "Did you mean 'segments'?"],
        ),
        ("template: '{text}'\n", ["needs `name`", "found template"]),
        ("name: a\n", ["needs `template`", "found name"]),
        ("{}", ["needs `name`", "nothing"]),
        ("", ["a mapping", "NoneType"]),
        ("- a\n- b\n", ["a mapping", "list"]),
        ("Summarize {text}", ["a mapping", "str"]),
        ("name: a\ntemplate: {text}\n", ["`template` must be text", "quotes"]),
        ("name: 3\ntemplate: '{text}'\n", ["`name` must be text, got 3", "quotes"]),
        ("name: no\ntemplate: '{text}'\n", ["`name` must be text, got False"]),
        ("name: 2023-10-27\ntemplate: '{text}'\n", ["`name` must be text"]),
        ("name: a\ntemplate: '{text}'\ndescription:\n", ["`description` must be text, got None"]),
        ("name: a\ntemplate: '{text}'\nedits: append_full_stop\n", ["`edits` must be a list", "'append_full_stop'"]),
        ("name: a\ntemplate: '{text}'\nedits:\n", ["`edits` must be a list", "None"]),
        ("name: a\ntemplate: '{text}'\nedits: [1]\n", ["`edits` must be a list", "[1]"]),
        ("name: a\ntemplate: 'twice {text} {text}'\n", ["exactly one {text}", "has 2"]),
        ("name: a\ntemplate: 'never'\n", ["exactly one {text}", "has 0"]),
        ("name: 'a\n", ["mine.yaml", "not valid YAML"]),
        ("name: a\n\ttemplate: b\n", ["mine.yaml", "not valid YAML"]),
        ("name: a\n---\nname: b\n", ["mine.yaml", "not valid YAML"]),
        ("name: a\ntemplate: '\x01{text}'\n", ["mine.yaml", "not valid YAML"]),
        ("name: a\ntemplate: 'é{text}'\n".encode("latin-1"), ["mine.yaml", "UTF-8"]),
        ("name: a\ntemplate: 'é{text}'\n".encode("utf-16"), ["mine.yaml", "UTF-8"]),
        ('name: a\ntemplate: "\\ud800{text}"\n', ["'a'", "not valid Unicode"]),
    ],
)
def test_a_file_that_cannot_be_used_says_why(content: str | bytes, says: list[str], write: Write) -> None:
    with pytest.raises(PromptError) as caught:
        load_prompt(write(content))
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("wrap", ["{}", "name: a\ntemplate: '{{text}}'\ndescription: {}"])
def test_a_file_runs_no_code(wrap: str, write: Write, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = wrap.format(f"!!python/object/apply:os.mkdir ['{trace}']")
    with pytest.raises(PromptError, match="not valid YAML"):
        load_prompt(write(content))
    assert not trace.exists()
    yaml.unsafe_load(content)  # the file is a working attack: a reader that is not safe runs it
    assert trace.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("summarise_one_word", ["unknown prompt", "Did you mean 'summarize_one_word'?", "prompteol", "YAML file"]),
        ("", ["unknown prompt ''", "prompteol"]),
        ("prompts", ["unknown prompt 'prompts'"]),
        (PAPER, ["unknown prompt", "YAML file"]),
        (PAPER * 20, ["unknown prompt", "YAML file"]),
        ("a\0b", ["unknown prompt"]),
        ("nowhere/mine.yaml", ["no prompt file at nowhere/mine.yaml", "prompteol"]),
        (Path("nowhere/mine.yml"), ["no prompt file at nowhere/mine.yml"]),
    ],
)
def test_an_unknown_prompt_says_what_there_is(name: str | Path, says: list[str]) -> None:
    with pytest.raises(PromptError) as caught:
        load_prompt(name)
    for part in says:
        assert part in str(caught.value)


def test_a_file_of_ones_own_is_read_from_its_path(write: Write) -> None:
    path = write("\ufeffname: other\r\ntemplate: 'é {text}'\r\nedits: [append_full_stop]\r\n")
    assert load_prompt(path).word("no") == "é no."
    assert load_prompt(str(path)).name == "other"
