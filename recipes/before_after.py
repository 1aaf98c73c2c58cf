"""Train, and print the Spearman correlation on test pairs before and after training. Shared by several recipes."""

import os
from dataclasses import fields
from typing import Any

from angle_llm.data import DataError, ScoredPair
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import StsPair, StsTask, evaluate
from angle_llm.evaluate.encoding import encode_functions
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.run import fine_tune
from angle_llm.settings.parsing import parse_settings
from angle_llm.settings.train import DataSource, ModelSettings, TrainSettings


def train_and_test(defaults: TrainSettings, *, description: str) -> None:
    """Train an encoder, and print the Spearman correlation on test pairs before and after training.

    `defaults` are training settings with a further field `test`, a `DataSource` of scored pairs.
    """
    settings: Any = parse_settings(defaults, description=description)
    run = TrainSettings(**{item.name: getattr(settings, item.name) for item in fields(TrainSettings)})
    task = pairs_task("test", settings.test)  # read before training, so that an error is reported at once
    model = str(fine_tune(run))
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"\n{task.source}, {len(task.pairs):,} pairs; Spearman correlation x 100 of cosine and score:")
    for when, path, options in (("before", run.model.path, encoder_options(run.model)), ("after", model, {})):
        encode, encode_document = encode_functions(SentenceEncoder.from_pretrained(path, **options))
        result = evaluate(encode, [task], encode_document=encode_document).tasks["test"]
        print(f"  {when:7} {result.spearman:6.2f}" + (f" ({result.undefined})" if result.undefined else ""))
    print(f'To load the model: SentenceEncoder.from_pretrained("{model}")')


def pairs_task(name: str, source: DataSource) -> StsTask:
    """Return an STS task with the scored pairs of a data source.

    Raises:
        DataError: if the source has no scored pairs.
    """
    examples = load_examples(source).examples
    pairs = tuple(StsPair(each.left, each.right, each.score) for each in examples if isinstance(each, ScoredPair))
    if not pairs:
        raise DataError(f"{source.path} has no scored pairs. Set its format: scored_pair.")
    return StsTask(name=name, label=name, variant="file", source=source.path, pairs=pairs)


def encoder_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `SentenceEncoder.from_pretrained` that open a base model in the same way as training."""
    return {name: getattr(model, name) for name in ("prompt", "pooling", "max_length", "dtype", "bits", "attention")}
