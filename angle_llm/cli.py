"""The command `angle-llm`, and how every program of the project ends: exit codes and messages."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from angle_llm import __version__
from angle_llm.io import discard_closed_pipes, is_closed, set_allocator
from angle_llm.settings.commands import (
    CheckSettings,
    EmbedSettings,
    GetSettings,
    InitSettings,
    MineSettings,
    MtebSettings,
    QuestionSettings,
    RetrievalSettings,
    ScoreSettings,
    SearchSettings,
    SplitSettings,
    StsEvalSettings,
)
from angle_llm.settings.export import ExportSettings, MergeSettings, PushSettings, VerifySettings
from angle_llm.settings.parsing import SettingsError, flags_of, parse_settings, unknown_name
from angle_llm.settings.serve import ServeSettings
from angle_llm.settings.train import DataSettings, PlanSettings, PretrainingSettings, TrainSettings

DEBUG_VARIABLE = "ANGLE_LLM_DEBUG"
NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""Environment variables that disable the progress bars of transformers, datasets and tqdm.

These libraries read the variables when they are first imported."""
CLOSED_PIPE = 128 + 13
"""Exit code when the reader of the output closed the pipe: 128 + SIGPIPE, a signal that Windows does not have."""

_USAGE = """
The encoder is saved in {model}. To use it:

    from angle_llm import SentenceEncoder
    encoder = SentenceEncoder.from_pretrained("{model}")
    {code}

    angle-llm embed --model {quoted} --input texts.txt --output rows.npy{side}

Now measure it on held-out data, on pairs with scores or on questions with answers:

    angle-llm eval sts --model {quoted} --tasks HELD_OUT.tsv{columns}
    angle-llm eval retrieval --model {quoted} --pairs HELD_OUT.jsonl{columns}
"""
_PRETRAINED = """
The pretrained model is saved in {model}. Its vectors are not trained for similarity yet. To train it on pairs:

    angle-llm train --model.path {quoted} --data.path pairs.jsonl --run-dir NEW_FOLDER
"""
_CODE = 'rows = encoder.encode(["A man is eating.", "Someone eats."])'
_CODE_OF_SIDES = """queries = encoder.encode_query(["Who eats?"])
    documents = encoder.encode_document(["A man is eating.", "Someone eats."])"""
_NOT_BETTER = (
    "warning: this model is not better than before training (table above). Usual causes: a learning rate that is too high or "
    "too low (--optimizer.learning-rate), too many or too few steps, few or wrong data (`angle-llm data check`), evaluation "
    "data that the base solves already."
)


def train(settings: TrainSettings) -> None:
    """Fine-tune a language model into a text-embedding model."""
    from angle_llm.model.source.encoder_card import EncoderCard
    from angle_llm.run import run_training

    result = run_training(settings)
    model = result.folder
    if os.environ.get("RANK", "0") == "0":
        two = EncoderCard.read(model).prompt.differ
        how = {"code": _CODE_OF_SIDES if two else _CODE, "side": " --as document" if two else ""}
        columns = flags_of({"columns": settings.evaluation.columns})
        how["columns"] = "".join(f" {word}" for word in map(shlex.quote, columns))
        quoted = shlex.quote(str(model))
        usage = _PRETRAINED if settings.pretraining.task == "mntp" else _USAGE
        print(usage.format(model=model, quoted=quoted, **how))
        if result.higher is False and settings.pretraining.task is None:
            print(_NOT_BETTER)


def verify(settings: VerifySettings) -> None:
    """Compare saved encoders, also by the Spearman correlation on the pairs of `--pairs`."""
    from angle_llm.evaluate import sts_score
    from angle_llm.export.commands import verify_main

    verify_main(settings, partial(sts_score, instructions=False))  # other programs take none


_PRETRAINING = TrainSettings(
    data=DataSettings(path="texts.txt", format="text"), pretraining=PretrainingSettings(task="mntp")
)


class Command(NamedTuple):
    """A command: its settings (a class, or default values), its function as MODULE:NAME below `angle_llm`, and its help text.

    The module of the function is imported when the command runs, because it can load heavy libraries.
    """

    settings: Any
    function: str
    help: str

    def run(self, settings: Any) -> None:
        """Call the function with the settings."""
        module, _, name = self.function.partition(":")
        getattr(import_module(f"angle_llm.{module}"), name)(settings)


COMMANDS = {
    "init": Command(InitSettings, "init:init_main", "Write recipes, configurations and guides into a new folder."),
    "train": Command(TrainSettings, "cli:train", "Fine-tune a language model into a text-embedding model."),
    "pretrain": Command(
        _PRETRAINING,
        "cli:train",
        "Train on texts without labels: unsupervised SimCSE, or MNTP (with --model.attention bidirectional).",
    ),
    "plan": Command(
        PlanSettings, "memory.plan:plan_main", "Forecast memory and work of a training run without loading weights."
    ),
    "embed": Command(EmbedSettings, "tools.embed:embed_main", "Embed a corpus."),
    "search": Command(SearchSettings, "tools.search:search_main", "Find the most similar rows of an embedded corpus."),
    "eval sts": Command(StsEvalSettings, "evaluate.sts:sts_main", "Spearman correlation on STS tasks or scored pairs."),
    "eval retrieval": Command(
        RetrievalSettings, "evaluate.retrieval:retrieval_main", "Search: nDCG, recall, MRR, MAP."
    ),
    "eval mteb": Command(MtebSettings, "evaluate.mteb_tasks:mteb_main", "Tasks of MTEB, run by mteb."),
    "data get": Command(
        GetSettings, "tools.public_data.get:get_main", "Download public evaluation sets and training data."
    ),
    "data check": Command(CheckSettings, "tools.check:check_main", "Check a dataset before training."),
    "data split": Command(SplitSettings, "tools.split:split_main", "Split a dataset into parts that share no text."),
    "data mine": Command(MineSettings, "tools.mine:mine_main", "Mine hard negatives for positive pairs."),
    "data questions": Command(
        QuestionSettings, "tools.questions:questions_main", "Write questions for documents with a language model."
    ),
    "data score": Command(
        ScoreSettings, "tools.mine:score_main", "Score pairs by an encoder or a reranker, as a teacher."
    ),
    "merge": Command(
        MergeSettings,
        "export.commands:merge_main",
        "Merge a LoRA adapter into its base model, or combine several encoders.",
    ),
    "verify": Command(
        VerifySettings, "cli:verify", "Compare the vectors of saved encoders: exit code 0 if equal, 1 if not."
    ),
    "export": Command(ExportSettings, "export.commands:export_main", "Export an encoder for another library."),
    "serve": Command(ServeSettings, "serve.listen:serve_main", "Serve an encoder over HTTP, as OpenAI and TEI do."),
    "push": Command(PushSettings, "export.commands:push_main", "Upload a saved encoder to the Hugging Face hub."),
}


def run(arguments: Sequence[str]) -> None:
    """Run the command of a command line, such as ["eval", "sts", "--model", …].

    `--config FILE` reads settings from a YAML file; flags override these settings.

    Raises:
        SettingsError: for an unknown command.
    """
    name = next((known for known in COMMANDS if list(arguments[: len(known.split())]) == known.split()), None)
    if name is None:
        list_commands(arguments)
        return
    command = COMMANDS[name]
    settings = parse_settings(
        command.settings, arguments[len(name.split()) :], description=command.help, prog=f"angle-llm {name}"
    )
    command.run(settings)


def list_commands(arguments: Sequence[str]) -> None:
    """Print the commands, or the commands of the group that `arguments` begins with.

    Raises:
        SettingsError: for an unknown command.
    """
    group = arguments[0] if any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else ""
    rest = list(arguments[1:] if group else arguments)
    if rest not in ([], ["-h"], ["--help"]):
        raise SettingsError(unknown_name("command", " ".join(arguments[: len(group.split()) + 1]), COMMANDS))
    print(f"usage: angle-llm {group or 'COMMAND'} …\n\nTurn large language models into text-embedding models.\n")
    for name, command in COMMANDS.items():
        if name.startswith(group):
            print(f"    angle-llm {name:<16} {command.help}")
    print("\n`angle-llm COMMAND --help` lists the flags of a command.")


def main() -> None:
    """Run the program `angle-llm` with the command line of the process."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
    else:
        run_cli(run, sys.argv[1:] or ["--help"])


def launch(defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str) -> None:
    """Train with the default settings of a recipe, overridden by `--config FILE` and flags in `arguments`.

    Without `arguments`, the command line of the process is read. `description` is the help text of the recipe.
    """
    train(parse_settings(defaults, arguments, description=description))


def run_cli(body: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call `body` as the main function of a command line program: convert exceptions to messages and exit codes.

    Exit code 2 for an error, with a message and no traceback for invalid input; 130 after SIGINT, 141 when the reader of
    the output closed the pipe. A training run that SIGINT, SIGTERM or SIGHUP stopped exits with 130, 143 or 129 after its
    checkpoint is written. Progress bars of libraries are disabled when standard error is not a terminal.
    """
    set_allocator()
    if sys.stderr is None or not sys.stderr.isatty():
        for variable in NO_BARS:
            os.environ.setdefault(variable, "1")
    try:
        try:
            body(*arguments, **named)
        except SystemExit:
            try:
                _flush_output()
            except OSError as error:
                if not is_closed(error):
                    raise
            raise
        _flush_output()
    except KeyboardInterrupt:
        with suppress(OSError):  # the same Ctrl-C may have ended the reader of stderr
            print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        sys.exit(CLOSED_PIPE)
    except Exception as error:
        is_known = isinstance(error, ValueError | OSError | TypeError | RuntimeError | ImportError | FloatingPointError)
        if is_known and not os.environ.get(DEBUG_VARIABLE):
            is_ours = type(error).__module__.startswith("angle_llm.")
            hint = "" if is_ours else f"\n({DEBUG_VARIABLE}=1 shows the traceback.)"
            with suppress(OSError):  # a closed terminal
                print(f"error: {error}{hint}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.exit(2)  # exit code 1 is a result, such as of `verify`
    finally:
        discard_closed_pipes(at_exit=True)


def _flush_output() -> None:
    """Flush stdout, which raises an error if the disk is full; stdout is None if it was closed before the start."""
    if sys.stdout is not None:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
