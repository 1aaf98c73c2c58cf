"""Transfer tasks: accuracy of a linear classifier on frozen embeddings (SentEval).

    distinct texts of all tasks ──► encode ──► vectors ──► features ──► logistic regression ──► accuracy per task

The features of one text are its vector; those of a pair (u, v) are |u - v| and u * v, side by side (Conneau et al.
2017). Accuracies are × 100. This module does not import a model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.evaluate.bootstrap import Interval, accuracy_interval
from angle_llm.evaluate.encoding import (
    Encode,
    EncodedTexts,
    Encoder,
    EncoderSettings,
    OpenEncoder,
    check_library,
    encode_distinct,
    encode_with,
    evaluation_main,
)  # fmt: skip
from angle_llm.evaluate.results import markdown_table, mean_over, notes_list, number, span
from angle_llm.evaluate.transfer_classifiers import FOLD_SEED, FOLDS, PROTOCOLS, Part, f1
from angle_llm.evaluate.transfer_tasks import (
    PUBLISHED_TRANSFER,
    TRANSFER_TASKS,
    LabelledText,
    Split,
    TransferTask,
    available_transfer_tasks,
    read_transfer_task,
    repeated_examples,
    texts_of,
    without_repeated,
)  # fmt: skip

METRIC = "accuracy × 100 of logistic regression on frozen vectors, SentEval's protocols"


@dataclass(frozen=True, kw_only=True)
class TransferSettings(EncoderSettings):
    """Accuracy of a linear classifier on frozen embeddings, on SentEval's transfer tasks, beside published scores."""

    data_dir: Path
    """Directory with transfer/ and mrpc/, or SentEval's own download (data/downstream, with MR/, CR/, …)."""

    tasks: tuple[str, ...] = ()
    """mr, cr, subj, mpqa, sst2, trec, mrpc. Empty: all that are found."""

    limit_train: int | None = None
    """Use a random sample of at most this many training examples of a task (of all examples in cross-validation).
    Faster, but not comparable; the table reports it."""

    drop_repeated: bool = False
    """Drop training examples whose text is tested too. SentEval keeps them; they are counted in any case."""

    folds: int = FOLDS
    """Folds of cross-validation; published tables use 10."""

    seed: int = FOLD_SEED
    """Seed of the folds and of the sample; SentEval uses 1111."""


@dataclass(frozen=True)
class TransferResult:
    """Results of a task, × 100.

    `interval` is Wilson's interval of the accuracy: it covers the choice of test examples, not of training examples.
    `f1` is that of the positive class, if the task has one. `majority` is the accuracy of the most frequent class.
    `repeated` test examples have the text of a training example. `sampled`: a random sample of the training examples
    was used.
    """

    name: str
    label: str
    protocol: str
    source: str
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


@dataclass(frozen=True)
class TransferResults:
    """Results of `evaluate_transfer` by task name."""

    tasks: dict[str, TransferResult]
    texts: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float

    @property
    def averaged(self) -> tuple[str, ...]:
        """Tasks of the average: those of the published seven that were evaluated."""
        return tuple(name for name in TRANSFER_TASKS if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean accuracy × 100 over `averaged`; None without any."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].accuracy for name in self.averaged) / len(self.averaged)


def evaluate_transfer(
    encode: Encode,
    tasks: Sequence[TransferTask],
    *,
    limit_train: int | None = None,
    drop_repeated: bool = False,
    folds: int = FOLDS,
    seed: int = FOLD_SEED,
) -> TransferResults:
    """Accuracy of logistic regression on the vectors by SentEval's protocols.

    `encode` is called once with the distinct texts. `limit_train` samples training examples, `drop_repeated` drops
    those whose text is tested too, `seed` is that of folds and sample.

    Raises `ValueError` for no tasks, equal task names, too few examples for the folds, or rows that are not finite;
    `MissingLibraryError` without scikit-learn.
    """
    _check(tasks, limit_train, folds)
    used = [_prepared(task, limit_train, drop_repeated, seed) for task in tasks]
    encoded = encode_distinct(
        encode, (text for item in used for rows in item.task.splits.values() for text in texts_of(rows))
    )
    return TransferResults(
        {item.task.name: _evaluate(encoded, item, folds, seed) for item in used},
        texts=len(encoded.row_of),
        dimensions=encoded.dimensions,
        zero_vectors=encoded.zero_vectors,
        encode_seconds=encoded.seconds,
    )


@dataclass(frozen=True)
class _Prepared:
    """A task as it is evaluated, and the counts of what was removed."""

    task: TransferTask
    repeated: int
    dropped: int
    sampled: bool


def _prepared(task: TransferTask, limit: int | None, drop: bool, seed: int) -> _Prepared:
    repeated = repeated_examples(task)
    used = without_repeated(task) if drop else task
    dropped = sum(map(len, task.splits.values())) - sum(map(len, used.splits.values()))
    split: Split = "all" if task.protocol == "cross_validation" else "train"
    rows = used.splits[split]
    if limit is None or len(rows) <= limit:
        return _Prepared(used, repeated, dropped, False)
    kept = np.sort(np.random.default_rng(seed).choice(len(rows), limit, replace=False))
    return _Prepared(
        replace(used, splits={**used.splits, split: tuple(rows[index] for index in kept)}), repeated, dropped, True
    )


def _evaluate(encoded: EncodedTexts, item: _Prepared, folds: int, seed: int) -> TransferResult:
    task = item.task
    started = time.perf_counter()
    outcome = PROTOCOLS[task.protocol](
        {split: _features(encoded, rows) for split, rows in task.splits.items()}, folds, seed
    )
    gold_N, predicted_N = outcome.gold_N, outcome.predicted_N
    return TransferResult(
        name=task.name,
        label=task.label,
        protocol=task.protocol,
        source=task.source,
        accuracy=100 * outcome.accuracy,
        interval=accuracy_interval(int((gold_N == predicted_N).sum()), len(gold_N)),
        f1=None if task.positive is None else 100 * f1(gold_N, predicted_N, task.positive),
        dev_accuracy=100 * outcome.dev_accuracy,
        majority=100 * float(np.unique(gold_N, return_counts=True)[1].max()) / len(gold_N),
        rows={split: len(rows) for split, rows in task.splits.items()},
        official=task.official,
        repeated=item.repeated,
        dropped=item.dropped,
        sampled=item.sampled,
        chosen=outcome.chosen,
        fits=outcome.fits,
        unconverged=outcome.unconverged,
        seconds=time.perf_counter() - started,
    )


def _features(encoded: EncodedTexts, rows: Sequence[LabelledText]) -> Part:
    """Features and classes in SentEval's order, which decides the folds: by number of words, then class."""
    ordered = sorted(rows, key=lambda row: (len(row.text.split()), len(row.second.split()), row.label))
    features_ND = encoded.rows(row.text for row in ordered).astype(np.float64)
    if ordered[0].second:
        second_ND = encoded.rows(row.second for row in ordered).astype(np.float64)
        features_ND = np.hstack([np.abs(features_ND - second_ND), features_ND * second_ND])
    return features_ND, np.array([row.label for row in ordered])


def _check(tasks: Sequence[TransferTask], limit_train: int | None, folds: int) -> None:
    if not tasks:
        raise ValueError("expected at least one task, got none.")
    repeated = sorted(name for name, count in Counter(task.name for task in tasks).items() if count > 1)
    if repeated:
        raise ValueError(f"task names must be unique, got twice: {', '.join(repeated)}.")
    if folds < 2 or (limit_train is not None and limit_train < 1):
        raise ValueError(f"expected at least 2 folds and 1 training example, got {folds} and {limit_train}.")
    check_library("sklearn", "transfer tasks", "transfer")


def transfer_report(results: TransferResults, model: str, remarks: Sequence[str] = ()) -> str:
    """Markdown: comparison with published scores, results of every task, and notes, `remarks` first."""
    notes = notes_list([*remarks, *_notes(results)])
    return "\n\n".join((_comparison(results, model), _details(results), notes)) + "\n"


def transfer_content(results: TransferResults) -> dict[str, Any]:
    """All results, for the JSON file."""
    return {
        "average": {"tasks": list(results.averaged), "accuracy": results.average},
        "tasks": {name: asdict(task) for name, task in results.tasks.items()},
        "texts": results.texts,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
    }


def _comparison(results: TransferResults, model: str) -> str:
    averaged = results.averaged
    header = ["model", *(task.label for task in results.tasks.values())]
    rows = [[f"**{model}**", *(number(task.accuracy) for task in results.tasks.values())]]
    if averaged:
        header.append("average")
        rows[0].append(number(results.average))
        for name, (accuracy, average) in PUBLISHED_TRANSFER.items():
            own = mean_over(accuracy, averaged, TRANSFER_TASKS, average)
            rows.append([name, *(number(accuracy.get(task)) for task in results.tasks), number(own)])
    return markdown_table(header, rows, words=1)


def _details(results: TransferResults) -> str:
    header = ["task", "train", "accuracy", "95 %", "F1", "dev", "majority", "tested", "repeated"]
    return markdown_table(header, [_detail(task) for task in results.tasks.values()], words=2)


def _detail(task: TransferResult) -> list[str]:
    rows = task.rows
    train = f"{rows['train']:,}" if "train" in rows else f"folds of {rows['all']:,}"
    return [
        task.label,
        train + (" (sample)" if task.sampled else ""),
        number(task.accuracy),
        span(task.interval.low, task.interval.high),
        number(task.f1),
        number(task.dev_accuracy),
        number(task.majority),
        f"{rows.get('test', rows.get('all', 0)):,}",
        f"{task.repeated:,}",
    ]


def _notes(results: TransferResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Accuracy × 100 of logistic regression on frozen vectors, not centred or scaled; C by SentEval's search. `dev` is "
        "the best accuracy of the search, `majority` that of the most frequent class.",
        "95 %: Wilson's interval over test examples; it does not cover other training examples.",
    ]
    if results.averaged:
        labels = ", ".join(results.tasks[name].label for name in results.averaged)
        notes.append(f"`average` is over {labels}, in all rows.")
        notes.append(
            "Published rows: SimCSE (arXiv 2104.08821), table E.1. They used a PyTorch classifier trained with "
            "Adam; here it is scikit-learn's logistic regression."
        )
    for task in tasks:
        used = sum(task.rows.values())
        if task.sampled:
            notes.append(f"{task.label}: a random sample of the training examples; not comparable.")
        if task.repeated:
            done = (
                f"{task.dropped:,} examples were dropped for it" if task.dropped else "all were kept, as SentEval does"
            )
            notes.append(f"{task.label}: {task.repeated:,} test examples have the text of a training example; {done}.")
        if task.official is not None and not task.sampled and used + task.dropped != task.official:
            notes.append(f"{task.label}: {used + task.dropped:,} examples here, {task.official:,} in SentEval.")
        if task.unconverged:
            notes.append(f"{task.label}: {task.unconverged} of {task.fits} fits stopped before they converged.")
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors} of {results.texts} texts have a zero vector.")
    fitting = sum(task.seconds for task in tasks)
    notes.append(
        f"{results.texts:,} distinct texts, {results.dimensions} dimensions, encoded in {results.encode_seconds:.1f} s; "
        f"classifiers in {fitting:.1f} s."
    )
    return notes


def transfer_main(settings: TransferSettings, open_encoder: OpenEncoder) -> TransferResults:
    """Read the tasks, open the encoder, evaluate, print the report, write the JSON file."""
    tasks = select_transfer_tasks(settings.tasks, settings.data_dir)

    def evaluate(encoder: Encoder) -> TransferResults:
        return evaluate_transfer(
            encode_with(encoder, settings.micro_batch_tokens),
            tasks,
            limit_train=settings.limit_train,
            drop_repeated=settings.drop_repeated,
            folds=settings.folds,
            seed=settings.seed,
        )

    return evaluation_main(settings, open_encoder, evaluate, transfer_report, METRIC, transfer_content)


def select_transfer_tasks(names: tuple[str, ...], data_dir: Path) -> list[TransferTask]:
    """The named tasks, or all whose files are below `data_dir`."""
    names = names or tuple(available_transfer_tasks(data_dir))
    if not names:
        raise FileNotFoundError(
            f"no transfer task below {data_dir}. Expected transfer/mr.tsv, transfer/sst2.train.tsv …, mrpc/train.tsv, or "
            "SentEval's own folders MR/, CR/, SST/binary/ …"
        )
    return [read_transfer_task(data_dir, name) for name in names]
