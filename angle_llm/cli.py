"""The doors of the project: `angle-llm train | embed | eval`, and what the recipes do between settings and result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angle_llm import __version__
from angle_llm.errors import unknown
from angle_llm.settings import SettingsError, TrainSettings, parse_settings

DEBUG_VARIABLE = "ANGLE_LLM_DEBUG"

_USE = """
The encoder lies in {model}. To use it:

    from angle_llm import SentenceEncoder
    encoder = SentenceEncoder.from_pretrained("{model}")
    rows = encoder.encode(["A man is eating.", "Someone eats."])

    python eval/sts.py --model {model} --data-dir DATA
"""


@dataclass(frozen=True)
class EmbedSettings:
    """What `angle-llm embed` reads and writes."""

    model: str
    """The encoder: a saved directory, a hub id, a .gguf file, or package:NAME/path/inside."""
    input: Path
    """A UTF-8 text file with one text a line; `-` reads standard input."""
    output: Path
    """The .npy file to write: float32, one row per line."""
    prompt: str | None = None
    """Prompt name or YAML file. None: the one saved with the model."""
    pooling: str | None = None
    """How token states become a vector. None: the one saved with the model."""
    normalize: bool = False
    """Scale every row to length 1."""


def train(arguments: Sequence[str]) -> None:
    """Fine-tunes a language model into a sentence encoder."""
    launch(TrainSettings(), arguments, description=train.__doc__ or "")


def embed(arguments: Sequence[str]) -> None:
    """Turns a file of texts into a matrix of vectors."""
    import numpy as np
    import tyro

    from angle_llm.modeling.encoder import SentenceEncoder

    settings = tyro.cli(EmbedSettings, args=arguments, description=embed.__doc__)
    if settings.output.suffix != ".npy":
        raise SettingsError(f"--output must end in .npy, got {settings.output}.")
    texts = _read_lines(settings.input)
    encoder = SentenceEncoder.from_pretrained(settings.model, prompt=settings.prompt, pooling=settings.pooling)
    rows_ND = encoder.encode(texts, show_progress=True)
    if settings.normalize:
        rows_ND /= np.maximum(np.linalg.norm(rows_ND, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = settings.output.with_name(settings.output.name + ".tmp")
    with temporary.open("wb") as file:
        np.save(file, rows_ND, allow_pickle=False)
    temporary.replace(settings.output)
    print(f"{rows_ND.shape[0]} rows of {rows_ND.shape[1]} dimensions in {settings.output}")


def _read_lines(path: Path) -> list[str]:
    content = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    texts = content.removesuffix("\n").split("\n") if content else []
    if not texts:
        raise SettingsError(f"{path} is empty: there is no text to embed.")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise SettingsError(f"{path}:{number}: the line is empty. Each line is one text; remove it.")
    return texts


def evaluate(arguments: Sequence[str]) -> None:
    """Correlation with human judgement on the STS tasks, beside the published figures."""
    import tyro

    from angle_llm.evaluation import StsEvalSettings, sts_main
    from angle_llm.modeling.encoder import SentenceEncoder

    settings = tyro.cli(StsEvalSettings, args=arguments, description=evaluate.__doc__)
    sts_main(settings, SentenceEncoder.from_pretrained)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": train, "embed": embed, "eval": evaluate}


def launch(defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str) -> None:
    """What every recipe does: settings from its defaults and the command line, one run, and how to use the result."""
    from angle_llm.run import fine_tune

    settings = parse_settings(defaults, arguments, description=description)
    print(_USE.format(model=fine_tune(settings)))


def guarded(body: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Runs a command; a mistake of input ends in its message and exit code 2, without a traceback."""
    try:
        body(*arguments, **named)
    except (ValueError, OSError, TypeError, RuntimeError) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        print(f"error: {error}\n({DEBUG_VARIABLE}=1 shows where it came from.)", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """The `angle-llm` command."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: angle-llm COMMAND [OPTIONS]      angle-llm COMMAND --help tells the options\n")
        for known, command in COMMANDS.items():
            print(f"  {known:8}{command.__doc__}")
    elif name == "--version":
        print(__version__)
    elif name in COMMANDS:
        guarded(COMMANDS[name], rest)
    else:
        print(f"error: {unknown('command', name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
