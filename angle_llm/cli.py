"""The command `angle-llm`, and how every program of the project ends: exit codes and messages."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Annotated, Any

from angle_llm import __version__
from angle_llm.io import discard_closed_pipes
from angle_llm.settings.parsing import (
    SettingsError,
    config_defaults,
    describe,
    parse_flags,
    parse_settings,
    unknown_name,
)
from angle_llm.settings.train import PretrainSettings, TrainSettings

DEBUG_VARIABLE = "ANGLE_LLM_DEBUG"
NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""Environment variables that disable the progress bars of transformers, datasets and tqdm.

These libraries read the variables when they are first imported."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's GPU memory allocator, read when torch is imported.

`set_allocator` sets both: torch 2.9 reads the settings from PYTORCH_CUDA_ALLOC_CONF, but warns that this name is
deprecated unless PYTORCH_ALLOC_CONF is set too. Later versions read either variable.
"""

_USAGE = """
The encoder is saved in {model}. To use it:

    from angle_llm import SentenceEncoder
    encoder = SentenceEncoder.from_pretrained("{model}")
    {code}

    angle-llm embed --model {quoted} --input texts.txt --output rows.npy{side}

Now measure it on held-out data:

    {command}
"""
_PRETRAINED = """
The pretrained model is saved in {model}. Its vectors are not trained for similarity yet. To train it on pairs:

    angle-llm train --model.path {quoted} --data.path pairs.jsonl --run-dir NEW_FOLDER
"""
_NOT_BETTER = (
    "warning: {name} is {after:.2f} after training and was {before:.2f} before: this model is not better. Usual causes: a "
    "learning rate that is too high or too low (--optimizer.learning-rate, {rate:g} in this run), too many or too few steps, "
    "few or wrong data (`angle-llm data check`), evaluation data that the base solves already."
)
_CODE = 'rows = encoder.encode(["A man is eating.", "Someone eats."])'
_CODE_OF_SIDES = """queries = encoder.encode_query(["Who eats?"])
    documents = encoder.encode_document(["A man is eating.", "Someone eats."])"""


def train(settings: TrainSettings) -> None:
    """Fine-tune a language model into a text-embedding model."""
    from angle_llm.evaluate.held_out import eval_command
    from angle_llm.io import read_object
    from angle_llm.model.source.encoder_card import EncoderCard
    from angle_llm.run import fine_tune
    from angle_llm.train.run_folder import RESULT

    model = fine_tune(settings)
    if os.environ.get("RANK", "0") == "0":
        two = EncoderCard.read(model).prompt.differ
        how = {"code": _CODE_OF_SIDES if two else _CODE, "side": " --as document" if two else ""}
        quoted, command = shlex.quote(str(model)), eval_command(settings.evaluation, model)
        is_mntp = settings.pretraining.task == "mntp"
        print((_PRETRAINED if is_mntp else _USAGE).format(model=model, quoted=quoted, command=command, **how))
        result = read_object(model.with_name(RESULT))
        if result is not None and result["higher"] is False and not is_mntp:
            name, best = next(iter(result["metrics"]["best"].items()))
            rate = settings.optimizer.learning_rate
            print(_NOT_BETTER.format(name=name, after=best, before=result["metrics"]["start"][name], rate=rate))


def _commands() -> dict[str, tuple[type, Callable[[Any], None], str]]:
    """Return command name → (settings class, function, help text). The functions import heavy libraries when called."""
    from angle_llm.evaluate import StsEvalSettings, sts_main
    from angle_llm.evaluate.mteb_tasks import MtebSettings, mteb_main
    from angle_llm.evaluate.retrieval import RetrievalSettings, retrieval_main
    from angle_llm.export import commands as forms
    from angle_llm.init import InitSettings, init_main
    from angle_llm.memory.plan import plan_main
    from angle_llm.serve.listen import serve_main
    from angle_llm.settings.export import ExportSettings, MergeSettings, PushSettings, VerifySettings
    from angle_llm.settings.plan import PlanSettings
    from angle_llm.settings.serve import ServeSettings
    from angle_llm.tools.check import CheckSettings, check_main
    from angle_llm.tools.embed import EmbedSettings, embed_main
    from angle_llm.tools.mine import MineSettings, mine_main
    from angle_llm.tools.public_data.get import GetSettings, get_main
    from angle_llm.tools.questions import QuestionSettings, questions_main
    from angle_llm.tools.score import ScoreSettings, score_main
    from angle_llm.tools.search import SearchSettings, search_main
    from angle_llm.tools.split import SplitSettings, split_main

    def pretrain(settings: PretrainSettings) -> None:
        # A run compares its settings, with their class, with the stored settings.
        train(TrainSettings(**vars(settings)))

    def with_encoder(main: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
        """Return a function that calls `main` with the settings and `SentenceEncoder.from_pretrained`."""

        def command(settings: Any) -> None:
            from angle_llm.model.encoder import SentenceEncoder

            main(settings, SentenceEncoder.from_pretrained)

        return command

    def merge(settings: MergeSettings) -> None:
        from angle_llm.evaluate import select_tasks, sts_score

        tasks = select_tasks(settings.evaluate, settings.data_dir, "auto") if settings.evaluate else []
        forms.merge_main(settings, {task.label: sts_score(task) for task in tasks})

    def verify(settings: VerifySettings) -> None:
        from angle_llm.evaluate import sts_score

        forms.verify_main(settings, sts_score)

    return {
        "init": (InitSettings, init_main, "Write recipes, configurations and guides into a new folder."),
        "train": (TrainSettings, train, "Fine-tune a language model into a text-embedding model."),
        "pretrain": (PretrainSettings, pretrain, "Train on texts without labels: MNTP or unsupervised SimCSE."),
        "plan": (PlanSettings, plan_main, "Forecast memory and work of a training run without loading weights."),
        "embed": (EmbedSettings, embed_main, "Embed a corpus."),
        "search": (SearchSettings, search_main, "Find the most similar rows of an embedded corpus."),
        "eval sts": (StsEvalSettings, with_encoder(sts_main), "Spearman correlation on STS tasks or scored pairs."),
        "eval retrieval": (RetrievalSettings, with_encoder(retrieval_main), "Search: nDCG, recall, MRR, MAP."),
        "eval mteb": (MtebSettings, with_encoder(mteb_main), "Tasks of MTEB, run by mteb."),
        "data get": (GetSettings, get_main, "Download public evaluation sets and training data."),
        "data check": (CheckSettings, check_main, "Check a dataset before training."),
        "data split": (SplitSettings, split_main, "Split a dataset into parts that share no text."),
        "data mine": (MineSettings, mine_main, "Mine hard negatives for positive pairs."),
        "data questions": (QuestionSettings, questions_main, "Write questions for documents with a language model."),
        "data score": (ScoreSettings, score_main, "Score pairs by an encoder, as a teacher."),
        "merge": (MergeSettings, merge, "Merge a LoRA adapter into its base model, or combine several encoders."),
        "verify": (
            VerifySettings,
            verify,
            "Compare the vectors of saved encoders: exit code 0 if equal, 1 if not.",
        ),
        "export": (ExportSettings, forms.export_main, "Export an encoder for another library."),
        "serve": (ServeSettings, serve_main, "Serve an encoder over HTTP, as OpenAI and TEI do."),
        "push": (PushSettings, forms.push_main, "Upload a saved encoder to the Hugging Face hub."),
    }


_GROUPS = {"eval": "Evaluate an encoder.", "data": "Get, check and prepare data."}


def _tree(commands: dict[str, tuple[type, Callable[[Any], None], str]], chosen: str, defaults: dict[str, Any]) -> Any:
    """Return the commands as a nested union of settings classes, which tyro parses as sub-commands.

    Args:
        commands: Command name → (settings class, function, help text).
        chosen: Name of the command that is run, or an empty string.
        defaults: Command name → settings that replace the defaults of its flags.
    """
    from tyro.conf import subcommand

    entries: dict[str, Any] = {}
    for name, (kind, _, summary) in commands.items():
        about = describe(kind, summary) if name == chosen else summary  # the list of commands has the summary only
        given = {"default": defaults[name]} if name in defaults else {}
        entries[name] = Annotated[kind, subcommand(name.rpartition(" ")[2], description=about, **given)]
    top: list[Any] = []
    for group, names in groupby(entries, lambda name: name.rpartition(" ")[0]):
        members = [entries[name] for name in names]
        if group:
            members = [Annotated[reduce(or_, members), subcommand(group, description=_GROUPS[group])]]
        top += members
    return reduce(or_, top)


def run(arguments: Sequence[str]) -> None:
    """Run the command of a command line, such as ["eval", "sts", "--model", …].

    `--config FILE` reads settings from a YAML file; flags override these settings.
    """
    commands = _commands()
    name = next((known for known in commands if list(arguments[: len(known.split())]) == known.split()), "")
    first = " ".join(arguments[:2]) if arguments[:1] and arguments[0] in _GROUPS else "".join(arguments[:1])
    if not name and first not in _GROUPS and not first.rpartition(" ")[2].startswith("-"):
        raise SettingsError(unknown_name("command", first, [*commands, *_GROUPS]))
    rest = list(arguments)
    defaults: dict[str, Any] = {}
    if name:
        # Keys that the file does not set have the defaults of the command, also inside a group.
        default, rest = config_defaults(commands[name][0], rest, PretrainSettings() if name == "pretrain" else None)
        if default is not None:
            defaults[name] = default
    about = "Turn large language models into text-embedding models."
    settings = parse_flags(
        _tree(commands, name, defaults),
        rest,
        root=commands[name][0] if name else None,
        prog="angle-llm",
        description=about,
    )
    commands[name][1](settings)


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

    Exit code 2 and a message without traceback for invalid input, 130 after SIGINT, 141 when the reader of the output
    closed the pipe. A training run that SIGINT or SIGTERM stopped exits with 130 or 143 after its checkpoint is
    written. Progress bars of libraries are disabled when standard error is not a terminal.
    """
    set_allocator()
    if not sys.stderr.isatty():
        for variable in NO_BARS:
            os.environ.setdefault(variable, "1")
    try:
        body(*arguments, **named)
        sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(OSError):  # the same Ctrl-C may have ended the reader of stderr
            print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError, TypeError, RuntimeError, ImportError) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        hint = "" if _is_explained(error) else f"\n({DEBUG_VARIABLE}=1 shows the traceback.)"
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    finally:
        discard_closed_pipes()


def set_allocator() -> None:
    """Set environment variables that make torch's GPU allocator use expandable segments, unless a variable is set.

    Micro-batches have many shapes, which fragment segments of a fixed size. Must be called before torch is imported.
    """
    if not any(variable in os.environ for variable in ALLOCATOR):
        os.environ |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")


def _is_explained(error: Exception) -> bool:
    """Return whether code of this package raised the error, so that the message is clear without a traceback."""
    if type(error).__module__.startswith("angle_llm."):
        return True
    if isinstance(error, RuntimeError) or getattr(error, "errno", None) is not None:
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("angle_llm.")


if __name__ == "__main__":
    main()
