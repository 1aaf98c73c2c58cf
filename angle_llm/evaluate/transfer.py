"""Transfer tasks: accuracy of a linear classifier on frozen embeddings (SentEval).

    distinct texts of all tasks ──► encode ──► vectors ──► features ──► logistic regression ──► accuracy per task

The features of one text are its vector; those of a pair (u, v) are |u - v| and u * v, side by side (Conneau et al.
2017). Accuracies are × 100.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
from annotated_types import Ge

from angle_llm.evaluate.bootstrap import Interval, accuracy_interval
from angle_llm.evaluate.encoding import (
    Encode,
    EncodedTexts,
    EvalSettings,
    OpenEncoder,
    check_names,
    encode_distinct,
    evaluated,
    finish,
)
from angle_llm.evaluate.results import Results, TaskResult, published_table, report, table
from angle_llm.evaluate.transfer_classifiers import FOLD_SEED, FOLDS, Part, run_protocol
from angle_llm.evaluate.transfer_tasks import (
    PUBLISHED_TRANSFER,
    TRANSFER_TASKS,
    LabelledText,
    Split,
    TransferTask,
    available_transfer_tasks,
    prepared,
    read_transfer_task,
)
from angle_llm.settings_io import NonNegative, Positive, need_library, settings_class

METRIC = "accuracy × 100 of logistic regression on frozen vectors, SentEval's protocols"


@settings_class
class TransferSettings(EvalSettings):
    """Accuracy of a linear classifier on frozen embeddings, on SentEval's transfer tasks, beside published scores."""

    data_dir: Path
    """Directory with transfer/ and mrpc/, or SentEval's own download (data/downstream, with MR/, CR/, …)."""

    tasks: tuple[str, ...] = ()
    """mr, cr, subj, mpqa, sst2, trec, mrpc. Empty: all that are found."""

    limit_train: Positive | None = None
    """Use a random sample of at most this many training examples of a task (of all examples in cross-validation).
    Faster, but not comparable; the table reports it."""

    drop_repeated: bool = False
    """Drop training examples whose text is tested too. SentEval keeps them; they are counted in any case."""

    folds: Annotated[int, Ge(2)] = FOLDS
    """Folds of cross-validation; published tables use 10."""

    seed: NonNegative = FOLD_SEED
    """Seed of the folds and of the sample; SentEval uses 1111."""


@dataclass(frozen=True, kw_only=True)
class TransferResult(TaskResult):
    """Results of a task, × 100.

    `interval` is Wilson's interval of the accuracy: it covers the choice of test examples, not of training examples.
    `f1` is that of the positive class, if the task has one. `majority` is the accuracy of the most frequent class.
    `repeated` test examples have the text of a training example. `sampled`: a random sample of the training examples
    was used.
    """

    metric = "accuracy"

    protocol: str
    accuracy: float
    interval: Interval
    f1: float | None
    dev_accuracy: float
    majority: float
    rows: dict[Split, int]
    official: int | None
    repeated: int
    dropped: int
    sampled: bool
    chosen: tuple[float, ...]
    fits: int
    unconverged: int
    seconds: float


TransferResults: TypeAlias = Results[TransferResult]


def evaluate_transfer(
    encode: Encode,
    tasks: Sequence[TransferTask],
    *,
    limit_train: int | None = None,
    drop_repeated: bool = False,
    folds: int = FOLDS,
    seed: int = FOLD_SEED,
) -> TransferResults:
    """Return the accuracy of logistic regression on the vectors by SentEval's protocols.

    `encode` is called once with the distinct texts. `limit_train` samples training examples, `drop_repeated` drops
    those whose text is tested too, `seed` is that of folds and sample.

    Raises:
        ValueError: for no tasks, equal task names, too few examples for the folds, or rows that are not finite.
        MissingLibraryError: without scikit-learn.
    """
    check_names([task.name for task in tasks])
    if folds < 2 or (limit_train is not None and limit_train < 1):
        raise ValueError(
            f"--folds, --limit-train: expected at least 2 folds and 1 training example, got {folds} and {limit_train}."
        )
    need_library("sklearn", "transfer tasks", "transfer")
    used = [prepared(task, limit_train, drop_repeated, seed) for task in tasks]
    encoded = encode_distinct(encode, (text for task in used for text in task.texts()))
    found = {task.name: _evaluate(encoded, task, folds, seed) for task in used}
    return Results(found, TRANSFER_TASKS, **encoded.facts())


def _evaluate(encoded: EncodedTexts, task: TransferTask, folds: int, seed: int) -> TransferResult:
    started = time.perf_counter()
    parts = {split: _features(encoded, rows) for split, rows in task.splits.items()}
    found = run_protocol(task.protocol, parts, folds, seed)
    gold_N, right_N = found.gold_N, found.gold_N == found.predicted_N
    names = ("name", "label", "protocol", "source", "official", "repeated", "dropped", "sampled")
    return TransferResult(
        **{name: getattr(task, name) for name in names},
        accuracy=100 * found.accuracy,
        interval=accuracy_interval(int(right_N.sum()), len(gold_N)),
        f1=None if task.positive is None else 100 * found.f1(task.positive),
        dev_accuracy=100 * found.dev_accuracy,
        majority=100 * float(np.unique(gold_N, return_counts=True)[1].max()) / len(gold_N),
        rows={split: len(rows) for split, rows in task.splits.items()},
        chosen=found.chosen,
        fits=found.fits,
        unconverged=found.unconverged,
        seconds=time.perf_counter() - started,
    )


def _features(encoded: EncodedTexts, rows: Sequence[LabelledText]) -> Part:
    """Return the features and classes in SentEval's order, which decides the folds: by number of words, then class."""
    ordered = sorted(rows, key=lambda row: (len(row.text.split()), len(row.second.split()), row.label))
    features_ND = encoded.rows(row.text for row in ordered).astype(np.float64)
    if ordered[0].second:
        second_ND = encoded.rows(row.second for row in ordered).astype(np.float64)
        features_ND = np.hstack([np.abs(features_ND - second_ND), features_ND * second_ND])
    return features_ND, np.array([row.label for row in ordered])


def transfer_report(results: TransferResults, model: str, remarks: Sequence[str] = ()) -> str:
    """Return Markdown: comparison with published scores, results of every task, and notes, `remarks` first."""
    details: list[list[object]] = []
    for task in results.tasks.values():
        rows = task.rows
        train = f"{rows['train']:,}" if "train" in rows else f"folds of {rows['all']:,}"
        tested = rows.get("test", rows.get("all", 0))
        train += " (sample)" if task.sampled else ""
        scores = (task.accuracy, task.interval, task.f1, task.dev_accuracy, task.majority)
        details.append([task.label, train, *scores, tested, task.repeated])
    header = ["task", "train", "accuracy", "95 %", "F1", "dev", "majority", "tested", "repeated"]
    tables = [published_table(results, model, PUBLISHED_TRANSFER), table(header, details, words=2)]
    return report(model, tables, [*remarks, *_notes(results)], results)


def _notes(results: TransferResults) -> list[str]:
    notes = [
        "Accuracy × 100 of logistic regression on frozen vectors, not centred or scaled; C by SentEval's search. `dev` is "
        "the best accuracy of the search, `majority` that of the most frequent class.",
        "95 %: Wilson's interval over test examples; it does not cover other training examples.",
    ]
    if results.averaged:
        notes.append(
            "Published rows: SimCSE (arXiv 2104.08821), table E.1. They used a PyTorch classifier trained with "
            "Adam; here it is scikit-learn's logistic regression."
        )
    for task in results.tasks.values():
        used = sum(task.rows.values()) + task.dropped
        if task.sampled:
            notes.append(f"{task.label}: a random sample of the training examples; not comparable.")
        if task.repeated:
            done = (
                f"{task.dropped:,} examples were dropped for it" if task.dropped else "all were kept, as SentEval does"
            )
            notes.append(f"{task.label}: {task.repeated:,} test examples have the text of a training example; {done}.")
        if task.official is not None and not task.sampled and used != task.official:
            notes.append(f"{task.label}: {used:,} examples here, {task.official:,} in SentEval.")
        if task.unconverged:
            notes.append(f"{task.label}: {task.unconverged} of {task.fits} fits stopped before they converged.")
    fitting = sum(task.seconds for task in results.tasks.values())
    return [*notes, f"Classifiers took {fitting:.1f} s."]


def transfer_main(settings: TransferSettings, open_encoder: OpenEncoder) -> TransferResults:
    """Read the tasks, open the encoder, evaluate, print the report, write the JSON file."""
    names = settings.tasks or tuple(available_transfer_tasks(settings.data_dir))
    if not names:
        raise FileNotFoundError(
            f"--data-dir: no transfer task below {settings.data_dir}. Expected transfer/mr.tsv, transfer/sst2.train.tsv …, "
            "mrpc/train.tsv, or SentEval's own folders MR/, CR/, SST/binary/ …"
        )
    tasks = [read_transfer_task(settings.data_dir, name) for name in names]
    results, used = evaluated(
        settings,
        open_encoder,
        lambda _, encode, __: evaluate_transfer(
            encode,
            tasks,
            limit_train=settings.limit_train,
            drop_repeated=settings.drop_repeated,
            folds=settings.folds,
            seed=settings.seed,
        ),
        single_texts=True,
    )
    finish(settings, METRIC, transfer_report(results, settings.model, [str(used)]), results.to_dict(), used)
    return results
