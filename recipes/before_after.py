"""Train, and report the Spearman correlation on test pairs before and after. Shared by several recipes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from angle_llm.config import DataSource, ModelSettings, TrainSettings
from angle_llm.data import DataError, ScoredPair
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import StsPair, StsTask, evaluate
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.run import fine_tune
from angle_llm.settings_io import parse_settings


def train_and_test(defaults: TrainSettings, *, description: str) -> None:
    """Train on `data` and evaluate on `test`, a further field of the settings."""
    settings: Any = parse_settings(defaults, description=description)
    _train_and_test(settings.test, {"after": _train_settings(settings)})


def train_on_each_and_test(defaults: TrainSettings, *, description: str, others: Sequence[str]) -> None:
    """Train on `data` and on each further field in `others`, on equally many examples; evaluate each on `test`.

    Each run has its own folder in `run_dir`, named after the field.
    """
    settings: Any = parse_settings(defaults, description=description)
    run = _train_settings(settings)
    sources = {"data": run.data}
    for name in others:
        values = {item.name: getattr(getattr(settings, name), item.name) for item in fields(DataSource)}
        sources[name] = replace(run.data, **{**values, "shuffle_seed": run.data.shuffle_seed})
    count = min(len(load_examples(source).examples) for source in sources.values())
    print(f"{count:,} examples of each of {', '.join(sources)}")
    runs = {
        name: replace(run, run_dir=str(Path(run.run_dir) / name), data=replace(source, limit=count))
        for name, source in sources.items()
    }
    _train_and_test(settings.test, runs)


def _train_settings(settings: Any) -> TrainSettings:
    return TrainSettings(**{item.name: getattr(settings, item.name) for item in fields(TrainSettings)})


def pairs_task(name: str, source: DataSource) -> StsTask:
    """Return an evaluation task from scored pairs of any format.

    Raises:
        DataError: if the data has other examples only.
    """
    examples = load_examples(source).examples
    pairs = tuple(StsPair(each.left, each.right, each.score) for each in examples if isinstance(each, ScoredPair))
    if not pairs:
        raise DataError(f"{source.path} has no scored pairs. Set its format: scored_pair.")
    return StsTask(name=name, label=name, variant="file", source=source.path, pairs=pairs)


def encoder_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `SentenceEncoder.from_pretrained` that open a backbone as training does."""
    return {name: getattr(model, name) for name in ("prompt", "pooling", "max_length", "dtype", "revision", "bits")}


def _train_and_test(test: DataSource, runs: Mapping[str, TrainSettings]) -> None:
    task = pairs_task("test", test)  # before hours of training
    models = {name: str(fine_tune(run)) for name, run in runs.items()}
    if os.environ.get("RANK", "0") != "0":
        return
    model = next(iter(runs.values())).model
    print(f"\n{task.source}, {len(task.pairs):,} pairs; Spearman correlation x 100 of cosine and score:")
    width = max(7, *map(len, runs))
    rows = [
        ("before", model.path, encoder_options(model)),
        *((name, path, dict[str, Any]()) for name, path in models.items()),
    ]
    for name, path, arguments in rows:  # one model in memory at a time
        figures = evaluate(SentenceEncoder.from_pretrained(path, **arguments).encode, [task]).tasks["test"]
        print(f"  {name:{width}} {figures.spearman:6.2f}" + (f" ({figures.undefined})" if figures.undefined else ""))
    print(f'To load the model: SentenceEncoder.from_pretrained("{rows[-1][1]}")')
