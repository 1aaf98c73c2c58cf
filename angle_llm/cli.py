"""The doors of the project: `angle-llm train | embed | eval | merge | verify`, and what the recipes do between settings and
result.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angle_llm import __version__
from angle_llm.errors import unknown
from angle_llm.settings import SettingsError, TrainSettings, parse_settings

DEBUG_VARIABLE = "ANGLE_LLM_DEBUG"
NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""What transformers, datasets and tqdm read when they are first imported."""

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
    import tyro

    settings = tyro.cli(EmbedSettings, args=arguments, description=embed.__doc__)
    _check_output(settings.output)
    texts = _read_lines(settings.input)

    import numpy as np

    from angle_llm.modeling.encoder import SentenceEncoder

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


def _check_output(path: Path) -> None:
    """Refuses a place that could not be written; asked before the model loads, not after."""
    if path.suffix != ".npy":
        raise SettingsError(f"--output must end in .npy, got {path}.")
    if path.is_dir():
        raise SettingsError(f"--output names the file to write, and {path} is a folder. Name a file in it.")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise SettingsError(f"--output {path} needs a folder to lie in, and {nearest} is a file. Choose another place.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingsError(f"--output {path} needs a folder you may write in; {nearest} is not. Choose another place.")


def _read_lines(path: Path) -> list[str]:
    """The texts of a file or of standard input, one a line."""
    name = "standard input" if str(path) == "-" else str(path)
    needed = "--input needs a UTF-8 text file with one text a line, or - for standard input"
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(f"{needed}; there is no file {path}. Check the path.") from None
    except IsADirectoryError:
        raise SettingsError(f"{needed}; {path} is a folder. Name a file in it.") from None
    except OSError as error:
        raise SettingsError(f"{needed}; {path} cannot be read: {error.strerror}.") from None
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        number, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise SettingsError(
            f"{needed}; {name}:{number}: byte 0x{byte:02x} is not UTF-8. Convert it, as in `iconv -f latin1 -t utf-8`."
        ) from None
    texts = text.removesuffix("\n").split("\n") if text else []
    if not texts:
        raise SettingsError(f"{needed}; {name} is empty: there is no text to embed.")
    for number, line in enumerate(texts, 1):
        if not line.strip():
            raise SettingsError(f"{name}:{number}: the line is empty. Each line is one text; remove it.")
    return texts


def evaluate(arguments: Sequence[str]) -> None:
    """Correlation with human judgement on the STS tasks, beside the published figures."""
    import tyro

    from angle_llm.evaluation import StsEvalSettings, sts_main
    from angle_llm.modeling.encoder import SentenceEncoder

    settings = tyro.cli(StsEvalSettings, args=arguments, description=evaluate.__doc__)
    sts_main(settings, SentenceEncoder.from_pretrained)


def merge(arguments: Sequence[str]) -> None:
    """Puts an adapter into its base's weights, and shows that it is the same encoder."""
    import tyro

    from angle_llm.export import MergeSettings, merge_main

    merge_main(tyro.cli(MergeSettings, args=arguments, description=merge.__doc__))


def verify(arguments: Sequence[str]) -> None:
    """Tells whether directories hold the same encoder: exit code 0 if so, 1 if not."""
    import tyro

    from angle_llm.evaluation import sts_score
    from angle_llm.export import VerifySettings, verify_main

    verify_main(tyro.cli(VerifySettings, args=arguments, description=verify.__doc__), sts_score)


def plan(arguments: Sequence[str]) -> None:
    """Tells what a training run will need, memory by memory, before anything is loaded."""
    from angle_llm.forecast.plan import PlanSettings, forecast, shown, write_json

    settings = parse_settings(PlanSettings(), arguments, description=plan.__doc__ or "")
    found = forecast(settings)
    print(shown(settings, found))
    if settings.json is not None:
        write_json(settings, found, Path(settings.json).expanduser())


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "plan": plan,
    "train": train,
    "embed": embed,
    "eval": evaluate,
    "merge": merge,
    "verify": verify,
}


def launch(defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str) -> None:
    """What every recipe does: settings from its defaults and the command line, one run, and how to use the result."""
    from angle_llm.run import fine_tune

    settings = parse_settings(defaults, arguments, description=description)
    model = fine_tune(settings)
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(_USE.format(model=model))


def guarded(body: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Runs a command; a mistake of input ends in its message and exit code 2, without a traceback.

    SIGINT ends in exit code 130. A training run that SIGINT or SIGTERM asked to stop ends in 130 or 143 (128 and the
    signal's number), after its checkpoint is written.
    When standard error is no terminal, libraries that load models and data are told to draw no progress bars.
    """
    if not sys.stderr.isatty():
        for variable in NO_BARS:
            os.environ.setdefault(variable, "1")
    try:
        body(*arguments, **named)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, TypeError, RuntimeError) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        hint = "" if _is_complete(error) else f"\n({DEBUG_VARIABLE}=1 shows where it came from.)"
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)


def _is_complete(error: Exception) -> bool:
    """Whether a message was written here, for whoever made the mistake, and says what to do.

    So are this package's own kinds of error, and others than `RuntimeError` that it raises itself; an `errno` is the
    operating system's.
    """
    if type(error).__module__.startswith("angle_llm."):
        return True
    if isinstance(error, RuntimeError) or getattr(error, "errno", None) is not None:
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")


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
