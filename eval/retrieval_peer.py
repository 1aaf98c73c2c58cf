"""Train on the examples of an angle_llm run with sentence-transformers, to compare quality and time.

    python eval/retrieval_peer.py --config runs/retrieval/in-batch-seed42/settings.yaml --out runs/retrieval/library-seed42/model

Model, examples, batch size, epochs, learning rate, schedule, dtype and seed are those of the run. A run with settings that
the library does not support is refused. Differences between the libraries:

* The loss is `MultipleNegativesRankingLoss`, which equals the in-batch term with `contrastive_form: forward` for one
  positive per query. For batches above 64 rows it is the cached variant, which needs less memory.
* A row has one positive. A group becomes a row for each positive, and a batch has `batch_size` rows, not groups.
* Groups with the same number of negatives form a dataset, and a batch comes from one dataset.
* A batch contains no text twice (`NO_DUPLICATES`); a row that fits in no batch is skipped.
* The library chooses the order of the examples.
* The library trains on the CPU, also beside a run on a GPU.

Needs pip install 'sentence-transformers[train]'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median

import tyro

from angle_llm.cli import run_cli
from angle_llm.data.formats import Example, ScoredPair, pairs_of
from angle_llm.data.mixture import load_mixture
from angle_llm.io import differences, write_json
from angle_llm.model.source.resolve import locate
from angle_llm.settings.parsing import SettingsError, load_settings, settings_to_dict
from angle_llm.settings.train import LoraSettings, ObjectiveSettings, TrainSettings

CACHED_ROWS = 64
"""Batch size above which the loss with gradient caching is used, and its number of rows per forward pass."""


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The run to repeat with sentence-transformers, and the output."""

    config: Path
    """Settings of the run: a YAML file, as for `angle-llm train --config`."""
    out: Path
    """Folder of the trained model. peer.json in its parent folder has the time of each step."""
    max_steps: int = -1
    """Maximum number of training steps. -1: train all epochs."""


def main(settings: PeerSettings) -> None:
    """Train with sentence-transformers, save the model, and write the time of each step."""
    from datasets import Dataset, DatasetDict
    from sentence_transformers.sentence_transformer.training_args import BatchSamplers
    from speed_peers.worker_sentence_transformers import losses, st, timed_training

    run = load_settings(TrainSettings, settings.config)
    objective = run.objective
    shared = replace(
        TrainSettings(lora=LoraSettings(rank=0)),
        model=replace(run.model, prompt="plain", pooling="mean", bits=None),
        objective=ObjectiveSettings(contrastive_form="forward", in_batch_temperature=objective.in_batch_temperature),
        data=replace(run.data, sets=[]),
        optimizer=run.optimizer,
        **{name: getattr(run, name) for name in ("batch_size", "epochs", "seed")},
    )
    if other := differences(settings_to_dict(shared.identity), settings_to_dict(run.identity)):
        raise SettingsError(
            f"{settings.config}: expected the settings {', '.join(other)} of a run that the library can repeat: all weights, "
            "prompt plain, pooling mean, one dataset, the in-batch term alone in the form forward."
        )
    data = {str(count): Dataset.from_list(rows) for count, rows in sorted(rows_of(load_mixture(run.data)).items())}
    steps = run.epochs * sum(ceil(len(rows) / run.batch_size) for rows in data.values())
    model = st.SentenceTransformer(locate(run.model.path).name, device="cpu", model_kwargs={"dtype": "float32"})
    model.max_seq_length = run.model.max_length or model.max_seq_length
    optimizer, scale = run.optimizer, 1 / objective.in_batch_temperature
    if run.batch_size > CACHED_ROWS:
        loss = losses.CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=CACHED_ROWS)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, scale=scale)
    seconds = timed_training(
        model,
        DatasetDict(data),
        loss,
        seed=run.seed,
        per_device_train_batch_size=run.batch_size,
        num_train_epochs=run.epochs,
        max_steps=settings.max_steps,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps(steps),
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_gradient_norm,
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        bf16=run.model.dtype == "bfloat16",
    )["step_seconds"]
    model.save_pretrained(str(settings.out))
    write_json(settings.out.parent / "peer.json", {"steps": len(seconds), "seconds": seconds})
    print(f"{len(seconds)} steps, median {median(seconds):.2f} s; saved in {settings.out}")


def rows_of(examples: Iterable[Example]) -> dict[int, list[dict[str, str]]]:
    """Return number of negatives → training rows, with a row for each positive of each example."""
    rows: dict[int, list[dict[str, str]]] = {}
    for example in examples:
        if isinstance(example, ScoredPair):
            raise SettingsError("--config: expected positive pairs, triples or groups, got a scored pair.")
        pairs = pairs_of(example)
        negatives = [text for _, text, score in pairs if not score]
        named = {f"negative_{number}": text for number, text in enumerate(negatives, 1)}
        rows.setdefault(len(negatives), []).extend(
            {"anchor": query, "positive": text, **named} for query, text, score in pairs if score
        )
    return rows


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(PeerSettings)))
