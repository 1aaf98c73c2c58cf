"""The doors of the project, `angle-llm train | embed | search | eval | merge | verify`, and what the recipes do between
settings and result.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from angle_llm import __version__
from angle_llm.config import DataSource, TrainSettings, parse_settings
from angle_llm.errors import raised_here, unknown

DEBUG_VARIABLE = "ANGLE_LLM_DEBUG"
NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""What transformers, datasets and tqdm read when they are first imported."""

_USE = """
The encoder lies in {model}. To use it:

    from angle_llm import SentenceEncoder
    encoder = SentenceEncoder.from_pretrained("{model}")
    rows = encoder.encode(["A man is eating.", "Someone eats."])

    python eval/sts.py --model {model} --tasks {pairs}
"""
STARTER_PAIRS = "starter:graded_pairs.tsv"


def train(arguments: Sequence[str]) -> None:
    """Fine-tunes a language model into a sentence encoder."""
    launch(TrainSettings(), arguments, description=train.__doc__ or "")


def embed(arguments: Sequence[str]) -> None:
    """Turns a corpus of any size into vectors: text, JSONL, CSV, TSV or Parquet into shards, or one .npy file."""
    import tyro

    from angle_llm.corpus import EmbedSettings, embed_main

    embed_main(tyro.cli(EmbedSettings, args=arguments, description=embed.__doc__))


def search(arguments: Sequence[str]) -> None:
    """Shows the nearest rows of an embedded corpus: a first look, exact."""
    import tyro

    from angle_llm.corpus import SearchSettings, search_main

    search_main(tyro.cli(SearchSettings, args=arguments, description=search.__doc__))


def evaluate(arguments: Sequence[str]) -> None:
    """Correlation with human judgement on the STS tasks, beside the published figures."""
    import tyro

    from angle_llm.evaluate import StsEvalSettings, sts_main
    from angle_llm.model.encoder import SentenceEncoder

    settings = tyro.cli(StsEvalSettings, args=arguments, description=evaluate.__doc__)
    sts_main(settings, SentenceEncoder.from_pretrained)


def merge(arguments: Sequence[str]) -> None:
    """Puts an adapter into its base's weights, and shows that it is the same encoder."""
    import tyro

    from angle_llm.export import MergeSettings, merge_main

    merge_main(tyro.cli(MergeSettings, args=arguments, description=merge.__doc__))


def export(arguments: Sequence[str]) -> None:
    """Makes a folder for another library that gives the same vectors, and shows that it does."""
    import tyro

    from angle_llm.export import ExportSettings, export_main

    export_main(tyro.cli(ExportSettings, args=arguments, description=export.__doc__))


def push(arguments: Sequence[str]) -> None:
    """Puts a saved encoder, in any of its forms, on the hub, with a card; nothing else here sends anything."""
    import tyro

    from angle_llm.export.push import PushSettings, push_main

    push_main(tyro.cli(PushSettings, args=arguments, description=push.__doc__))


def verify(arguments: Sequence[str]) -> None:
    """Tells whether directories hold the same encoder: exit code 0 if so, 1 if not."""
    import tyro

    from angle_llm.evaluate import sts_score
    from angle_llm.export import VerifySettings, verify_main

    verify_main(tyro.cli(VerifySettings, args=arguments, description=verify.__doc__), sts_score)


def plan(arguments: Sequence[str]) -> None:
    """Tells what a training run will need, memory by memory, before anything is loaded."""
    from angle_llm.forecast.plan import PlanSettings, forecast, shown, write_forecast

    settings = parse_settings(PlanSettings(), arguments, description=plan.__doc__ or "")
    found = forecast(settings)
    print(shown(settings, found))
    if settings.json is not None:
        write_forecast(settings, found, Path(settings.json).expanduser())


def data(arguments: Sequence[str]) -> None:
    """Looks at data before a model learns from it: `angle-llm data check FILES`."""
    from angle_llm.data_tools.command import data_main

    data_main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "data": data,
    "plan": plan,
    "train": train,
    "embed": embed,
    "search": search,
    "eval": evaluate,
    "merge": merge,
    "export": export,
    "verify": verify,
    "push": push,
}


def launch(defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str) -> None:
    """What every recipe does: settings from its defaults and the command line, one run, and how to use the result."""
    from angle_llm.run import fine_tune

    settings = parse_settings(defaults, arguments, description=description)
    model = fine_tune(settings)
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(_USE.format(model=model, pairs=_shown(settings.evaluation.pairs)))


def _shown(pairs: str | None) -> str:
    """Pairs as `eval/sts.py --tasks` takes them in a shell: a name that has neither slash nor .tsv is a task's."""
    name = pairs or STARTER_PAIRS
    return shlex.quote(name if "/" in name or name.endswith(".tsv") else f"./{name}")


def train_and_test(defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str) -> None:
    """A run, and the correlation with the scores of its `test` pairs before and after. `defaults` has that further field."""
    settings: Any = parse_settings(defaults, arguments, description=description)
    _train_and_test(settings.test, {"after": _plain(settings)})


def train_on_each_and_test(
    defaults: TrainSettings, arguments: Sequence[str] | None = None, *, description: str, others: Sequence[str]
) -> None:
    """A run on `data` and one on each of the fields of `defaults` that `others` names, sets of examples: on as many of each, as
    many as the smallest has. Then the correlation with the scores of the `test` pairs before and after each. Each run has a
    folder of its own in `run_dir`; the first one's is `data`.
    """
    from angle_llm.data import load_examples

    settings: Any = parse_settings(defaults, arguments, description=description)
    run = _plain(settings)
    sources = {"data": run.data} | {
        name: replace(
            run.data, **{item.name: getattr(getattr(settings, name), item.name) for item in fields(DataSource)}
        )
        for name in others
    }
    sources = {name: replace(source, shuffle_seed=run.data.shuffle_seed) for name, source in sources.items()}
    count = min(len(load_examples(source).examples) for source in sources.values())
    each = {name: replace(source, limit=count) for name, source in sources.items()}
    print(f"{count:,} examples of each of {', '.join(each)}")
    _train_and_test(
        settings.test,
        {name: replace(run, run_dir=str(Path(run.run_dir) / name), data=data) for name, data in each.items()},
    )


def _plain(settings: Any) -> TrainSettings:
    """A training run without the further fields of a recipe's."""
    return TrainSettings(**{item.name: getattr(settings, item.name) for item in fields(TrainSettings)})


def _train_and_test(test: DataSource, runs: Mapping[str, TrainSettings]) -> None:
    """Runs, and the correlation with the scores of test pairs before them and after each."""
    from angle_llm.experiments.measure import pairs_task
    from angle_llm.run import fine_tune

    task = pairs_task("test", test)  # a mistake shows before hours of training
    models = {name: str(fine_tune(run)) for name, run in runs.items()}
    if os.environ.get("RANK", "0") != "0":
        return

    from angle_llm.evaluate import evaluate as measured
    from angle_llm.model.encoder import SentenceEncoder

    base = next(iter(runs.values())).model
    as_it_was: dict[str, Any] = {
        "prompt": base.prompt,
        "pooling": base.pooling,
        "max_length": base.max_length,
        "dtype": base.dtype,
        "revision": base.revision,
        "bits": base.bits,
    }
    print(f"\n{task.source}, {len(task.pairs):,} pairs; Spearman correlation x 100 of cosine and score:")
    width = max(7, *map(len, runs))
    for when, path, how in (
        ("before", base.path, as_it_was),
        *((name, model, dict[str, Any]()) for name, model in models.items()),
    ):  # one model at a time
        figures = measured(SentenceEncoder.from_pretrained(path, **how).encode, [task]).tasks["test"]
        print(f"  {when:{width}} {figures.spearman:6.2f}" + (f" ({figures.undefined})" if figures.undefined else ""))
    print(_USE.format(model=next(iter(models.values())), pairs=STARTER_PAIRS))


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
    except BrokenPipeError:  # whoever reads, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        sys.exit(141)  # as a shell tells it
    except (ValueError, OSError, TypeError, RuntimeError, ImportError) as error:
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
    return raised_here(error)


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
        sys.argv[0] = f"angle-llm {name}"  # what usage and help call it
        guarded(COMMANDS[name], rest)
    else:
        print(f"error: {unknown('command', name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
