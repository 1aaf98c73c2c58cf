"""Run commands of the checkout under test (see conftest.py); helpers of the contract tests."""

import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import programs

TREE = Path(os.environ.get("ANGLE_LLM_TREE") or Path(__file__).parents[2]).resolve()
SMALL = ["--model.dtype", "float32", "--model.max-length", "100", "--lora.rank", "4", "--lora.alpha", "8"]
QUICK = [*SMALL, "--batch-size", "4", "--optimizer.learning-rate", "0.01"]


@dataclass(frozen=True)
class Files:
    """Model folders and data files that all contract tests share; read-only."""

    folder: Path
    llama: str
    mistral: str
    bert: str
    triples: str
    pairs: str


def training(files: Files, run: Path) -> list[str]:
    """Flags of a small training run."""
    return ["--run-dir", str(run), "--model.path", files.llama, "--data.path", files.triples, *QUICK]


def command(
    *words: str | Path, code: int = 0, cwd: Path | None = None, stdin: str | bytes = b"", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `angle-llm …` or `python FILE …`, FILE below the tree, and asserts the exit code and that no traceback is shown."""
    words = tuple(TREE / word if words[0] == "python" and place == 1 else word for place, word in enumerate(words))
    done = programs.run(*words, cwd=cwd, stdin=stdin, environment={**os.environ, **variables}, seconds=300)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr
    return done


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def names(text: str, *patterns: str) -> None:
    """Asserts that every pattern is found in the text, ignoring case and line breaks."""
    flat = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    for pattern in patterns:
        assert re.search(pattern, flat, re.IGNORECASE), f"{pattern!r} not found in: {text}"
