"""From an `encode` callable to accuracies on transfer tasks: how much does a linear classifier find in frozen vectors?

    distinct texts of all tasks ──► encode ──► vectors ──► features ──► logistic regression ──► accuracy per task

The features of one text are its vector; those of a pair (u, v) are |u - v| and u * v, side by side (Conneau et al. 2017).
Nothing here knows a model. Figures are × 100.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from angle_llm.evaluate.encoding import Encode, EncodedTexts, encode_distinct
from angle_llm.evaluate.opening import check_library
from angle_llm.evaluate.resampling import CONFIDENCE, Interval
from angle_llm.evaluate.transfer_classifiers import FOLD_SEED, FOLDS, PROTOCOLS, Part, f1
from angle_llm.evaluate.transfer_tasks import TRANSFER_TASKS, LabelledText, Split, TransferTask, texts_of


@dataclass(frozen=True)
class TransferResult:
    """The figures of a task, × 100.

    `interval` is Wilson's for the share of test examples that were right, taken as independent: it covers the choice of
    test examples, not of training examples. `f1` is of the positive class where the task has one. `majority` is the accuracy
    of always saying the commonest class of the test examples. `repeated` test examples have the same text as a training
    example (or did, before they were dropped). `sampled` says whether training examples were left out at random.
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
    """What `evaluate_transfer` measured, by task name in the order asked."""

    tasks: dict[str, TransferResult]
    texts: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float

    @property
    def averaged(self) -> tuple[str, ...]:
        """The tasks the average is over: those of the published seven that are here."""
        return tuple(name for name in TRANSFER_TASKS if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean accuracy × 100 over `averaged`; None when that is empty."""
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
    """Accuracy of logistic regression on the vectors, task by task, by SentEval's protocols.

    `encode` is called exactly once, with the distinct texts that are used. `limit_train` takes at most so many training
    examples of a task at random (of all of them under cross-validation), `drop_repeated` leaves out training examples
    whose text is tested elsewhere. `seed` is that of the folds and of the sample.

    Raises `ValueError` when there is nothing to evaluate, two tasks share a name, a task has too few examples for its
    folds, or what `encode` returned is not one finite row per text; `MissingLibraryError` without scikit-learn.
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


def repeated_examples(task: TransferTask) -> int:
    """How many test examples have the text (the pair of texts, in any order) of a training or dev example.

    Under cross-validation every example is tested, so all that share their text count, wherever the folds put them.
    """
    if task.protocol == "cross_validation":
        counts = Counter(map(_key, task.splits["all"]))
        return sum(count for count in counts.values() if count > 1)
    seen = {_key(row) for split, rows in task.splits.items() if split != "test" for row in rows}
    return sum(_key(row) in seen for row in task.splits["test"])


def without_repeated(task: TransferTask) -> TransferTask:
    """The task with no test text in training: the first example of each text under cross-validation, else train without the
    texts of dev and test, and dev without those of test."""
    if task.protocol == "cross_validation":
        first: dict[tuple[str, ...], LabelledText] = {}
        for row in task.splits["all"]:
            first.setdefault(_key(row), row)
        return replace(task, splits={"all": tuple(first.values())})
    seen: set[tuple[str, ...]] = set()
    splits = dict(task.splits)
    for split in ("test", "dev", "train"):
        if split in splits:
            splits[split] = tuple(row for row in task.splits[split] if split == "test" or _key(row) not in seen)
            seen |= {_key(row) for row in task.splits[split]}
    return replace(task, splits=splits)


@dataclass(frozen=True)
class _Prepared:
    """A task as it is measured, and what was done to it."""

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
        interval=_wilson(int((gold_N == predicted_N).sum()), len(gold_N)),
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
    """Features and classes, the examples in SentEval's order, which decides the folds: by number of words, then class."""
    ordered = sorted(rows, key=lambda row: (len(row.text.split()), len(row.second.split()), row.label))
    features_ND = encoded.rows(row.text for row in ordered).astype(np.float64)
    if ordered[0].second:
        second_ND = encoded.rows(row.second for row in ordered).astype(np.float64)
        features_ND = np.hstack([np.abs(features_ND - second_ND), features_ND * second_ND])
    return features_ND, np.array([row.label for row in ordered])


def _wilson(right: int, tested: int) -> Interval:
    from scipy.stats import binomtest

    ends = binomtest(right, tested).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(100 * float(ends.low), 100 * float(ends.high))


def _key(row: LabelledText) -> tuple[str, ...]:
    return tuple(sorted((row.text, row.second)))


def _check(tasks: Sequence[TransferTask], limit_train: int | None, folds: int) -> None:
    if not tasks:
        raise ValueError("no tasks to evaluate: at least one is needed.")
    repeated = sorted(name for name, count in Counter(task.name for task in tasks).items() if count > 1)
    if repeated:
        raise ValueError(f"each task needs its own name; given more than once: {', '.join(repeated)}.")
    if folds < 2 or (limit_train is not None and limit_train < 1):
        raise ValueError(f"at least 2 folds and 1 training example are needed, found {folds} and {limit_train}.")
    check_library("sklearn", "transfer tasks", "transfer")
