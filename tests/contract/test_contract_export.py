"""`merge`, `verify` and `push`: exit codes, and refusals offline."""

import json
from pathlib import Path

import pytest
from commands import Files, command, names
from tiny_folders import sentences

TEXTS = [*sentences(10, seed=6), 'She said "no".', "</s> <s>", "Hi " * 80]


def test_verify_ends_in_0_for_the_same_and_1_for_another_encoder(
    model: str, merged: str, files: Files, tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(text for text in TEXTS if text.strip()) + "\n")
    words = [
        "--texts",
        tmp_path / "texts.txt",
        "--json",
        tmp_path / "report.json",
        "--pairs",
        files.pairs,
    ]
    command("angle-llm", "verify", model, merged, *words)
    assert json.loads((tmp_path / "report.json").read_text())["holds"] is True
    names(command("angle-llm", "verify", model, files.llama, code=1).stdout, "verdict: NOT the same encoder")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("merge {base} out", ["{base}"]),
        ("merge nowhere out", ["nowhere"]),
        ("verify {model}", ["1|two"]),
        ("verify {model} nowhere", ["nowhere"]),
        ("verify {model} {model} --tolerance 0", ["--tolerance"]),
        ("verify {model} {model} --texts none.txt", ["--texts", "none.txt"]),
        ("push {merged} noslash", ["noslash", "/"]),
    ],
)
def test_a_mistake_is_refused(
    words: str, named: list[str], model: str, merged: str, files: Files, tmp_path: Path
) -> None:
    places = {"model": model, "merged": merged, "base": files.llama}
    done = command("angle-llm", *(word.format(**places) for word in words.split()), cwd=tmp_path, code=2)
    names(done.stdout + done.stderr, *(each.format(**places) for each in named))
    assert not (tmp_path / "out").exists()
