"""Transfer evaluation: accuracy of a linear classifier on frozen embeddings, on SentEval's classification tasks.

    python eval/transfer.py --model DIR --data-dir DATA --download
    python eval/transfer.py --model DIR --data-dir DATA --tasks cr mrpc --json transfer.json

`pip install 'angle_llm[transfer]'` installs scikit-learn, which it needs.

    distinct texts of all tasks ──► encode ──► embeddings ──► features ──► logistic regression ──► accuracy per task

Contents, in order: settings, result types, `evaluate_transfer`, the classifiers, the command, its report.
`transfer_tasks` reads the tasks.

The features of a text are its embedding. The features of a pair with embeddings u and v are |u - v| and u * v, side by
side (Conneau et al. 2017). Accuracies are × 100.

The protocols follow `senteval/tools/validation.py` of facebookresearch/SentEval, with scikit-learn:

| protocol | values of C | search by accuracy on | final fit on | result |
|---|---|---|---|---|
| cross_validation | 2^-2 … 2^3 | folds within the training folds | the training folds | mean accuracy of the folds |
| train_test | 2^-1 … 2^5 | folds of train | train | accuracy on test |
| train_dev_test | 2^-2 … 2^3 | dev | train | accuracy on test |

As in SentEval: folds are stratified and shuffled with seed 1111; examples are first sorted by number of words, then
class; accuracies are compared at two decimals of a percent; of equal accuracies the smallest C is chosen; features are
neither centred nor scaled.

Unlike in SentEval: the intercept is not regularised (SentEval's liblinear does), and fits converge, so that the solver
does not change accuracies. The solver is Newton's method, or lbfgs with tolerance 1e-6 for more than 4,096 coefficients;
fits of lbfgs that stop before they converge are counted. The fit for each C starts from the coefficients of the previous
C. Published tables used SentEval's PyTorch classifier, trained by Adam with early stopping.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from senteval import LabelledText, Split, download
from transfer_tasks import (
    PUBLISHED_TRANSFER,
    TRANSFER_TASKS,
    Protocol,
    TransferTask,
    available_transfer_tasks,
    prepare_task,
    read_transfer_task,
)

from angle_llm.cli import run_cli
from angle_llm.evaluate.bootstrap import CONFIDENCE, Interval
from angle_llm.evaluate.encoding import (
    Encode,
    EncodedTexts,
    EncoderFacts,
    check_names,
    encode_distinct,
    encode_functions,
    open_encoder,
    write_results,
)
from angle_llm.evaluate.results import Results, TaskResult, published_table, report, table
from angle_llm.io import progress_bar
from angle_llm.model.vectors import with_one_prompt
from angle_llm.settings.commands import EvalSettings
from angle_llm.settings.parsing import Positive, need_library, parse_settings, settings_class

if TYPE_CHECKING:
    from tqdm import tqdm

METRIC = "accuracy × 100 of logistic regression on frozen vectors, SentEval's protocols"

FOLDS = 10
"""Number of cross-validation folds in the published transfer tables. SentEval's default is 5."""

FOLD_SEED = 1111
"""Seed that SentEval uses to shuffle examples into cross-validation folds."""

_ITERATIONS = 1000
# Up to this number of coefficients Newton's method is used. With 1,152 features and two classes it took a fifth of the
# time of 1,000 steps of lbfgs, with 576 features and six classes the same time, and lbfgs had not converged in either.
_NEWTON_COEFFICIENTS = 4096

Labels: TypeAlias = NDArray[np.str_]
FeaturesAndLabels: TypeAlias = "tuple[NDArray[np.floating[Any]], Labels]"
"""Features (N, D) and classes (N,) of N examples."""


@settings_class
class TransferSettings(EvalSettings):
    """Accuracy of a linear classifier on frozen embeddings, on SentEval's transfer tasks, with published scores."""

    data_dir: Path
    """Directory with transfer/ and mrpc/, or SentEval's download (data/downstream, with MR/, CR/, …)."""

    tasks: tuple[str, ...] = ()
    """mr, cr, subj, mpqa, sst2, trec, mrpc. Empty: all tasks in the directory."""

    download: bool = False
    """Download SentEval's files (89.8 MB) from the Hugging Face hub into DATA/senteval first."""

    limit_train: Positive | None = None
    """Use a random sample of at most this many training examples per task (in cross-validation: of all examples).
    Faster, but scores are not comparable; the report notes the sample."""


# --------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    """Accuracies × 100 of an evaluation protocol on one transfer task, and its classifier fits.

    `accuracy` is the accuracy on the test split, or the mean over the test folds. `dev_accuracy` is the best accuracy
    in the search for C, the inverse regularisation strength. `chosen` has the selected C of each fold, or one value
    without cross-validation. `unconverged` is how many of the `fits` classifier fits stopped at 1,000 iterations before
    convergence.
    """

    accuracy: float
    dev_accuracy: float
    chosen: tuple[float, ...]
    fits: int
    unconverged: int


@dataclass(frozen=True, kw_only=True)
class TransferResult(ProtocolResult, TaskResult):
    """Result of a transfer task (classification on frozen embeddings); accuracies and F1 are × 100.

    Fields that are not described here are described at `ProtocolResult` and `TransferTask`.

    `interval` is Wilson's 95 % interval of the accuracy. It covers the choice of test examples, not of training
    examples. `f1` is the F1 score of the positive class, or None if the task has no positive class. `majority` is the
    accuracy of always predicting the most frequent class. `rows` is the number of used examples by split. `seconds` is
    the time for features, fits and predictions.
    """

    metric = "accuracy"

    protocol: str
    interval: Interval
    f1: float | None
    majority: float
    rows: dict[Split, int]
    official: int | None
    repeated: int
    dropped: int
    sampled: bool
    seconds: float


TransferResults: TypeAlias = Results[TransferResult]


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluate_transfer(
    encode: Encode,
    tasks: Sequence[TransferTask],
    *,
    limit_train: int | None = None,
    drop_repeated: bool = False,
    folds: int = FOLDS,
    seed: int = FOLD_SEED,
) -> TransferResults:
    """Evaluate an encoder on transfer tasks: the accuracy of logistic regression on its embeddings.

    `encode` is called once with the distinct texts of all tasks.

    Args:
        encode: function from texts to embeddings.
        tasks: tasks with unique names.
        limit_train: use a random sample of at most this many training examples per task.
        drop_repeated: drop training examples whose text is also a test text.
        folds: number of folds in cross-validation.
        seed: seed of the folds and of the sample.

    Raises:
        ValueError: for no tasks, equal task names, too few examples for the folds, or embeddings that are not finite.
        MissingLibraryError: if scikit-learn is not installed.
    """
    check_names([task.name for task in tasks])
    if folds < 2 or (limit_train is not None and limit_train < 1):
        raise ValueError(f"expected at least 2 folds and --limit-train of at least 1, got {folds} and {limit_train}.")
    need_library("sklearn", "transfer tasks", "transfer")
    used = [prepare_task(task, limit_train, drop_repeated, seed) for task in tasks]
    for task in used:
        _check_folds(task, folds, seed)
    encoded = encode_distinct(encode, (text for task in used for text in task.texts()))
    results = {task.name: _evaluate(encoded, task, folds, seed) for task in used}
    return Results(results, TRANSFER_TASKS, **encoded.facts())


def _evaluate(encoded: EncodedTexts, task: TransferTask, folds: int, seed: int) -> TransferResult:
    """Return the result of a transfer task: fit and test classifiers on the embeddings of its texts.

    `folds` and `seed` are the number and seed of the cross-validation folds.
    """
    from sklearn.metrics import f1_score

    started = time.perf_counter()
    parts = {split: _features(encoded, rows) for split, rows in task.splits.items()}
    outcome, gold_N, predicted_N = run_protocol(task.protocol, parts, folds, seed)
    f1 = None
    if task.positive is not None:
        f1 = 100 * float(f1_score(gold_N == task.positive, predicted_N == task.positive, zero_division=0))
    names = ("name", "label", "protocol", "source", "official", "repeated", "dropped", "sampled")
    return TransferResult(
        **{name: getattr(task, name) for name in names},
        **vars(outcome),
        interval=accuracy_interval(int((gold_N == predicted_N).sum()), len(gold_N)),
        f1=f1,
        majority=100 * float(np.unique(gold_N, return_counts=True)[1].max()) / len(gold_N),
        rows={split: len(rows) for split, rows in task.splits.items()},
        seconds=time.perf_counter() - started,
    )


def _features(encoded: EncodedTexts, rows: Sequence[LabelledText]) -> FeaturesAndLabels:
    """Return the features (N, D) and classes (N,) of N examples, sorted by number of words, then class.

    The features are the embedding of a text. For two texts with embeddings u and v, they are |u - v| and u * v. The
    order is SentEval's; it determines the cross-validation folds.
    """
    ordered = sorted(rows, key=lambda row: (len(row.text.split()), len(row.second.split()), row.label))
    features_ND = encoded.rows(row.text for row in ordered).astype(np.float64)
    if ordered[0].second:
        second_ND = encoded.rows(row.second for row in ordered).astype(np.float64)
        features_ND = np.hstack([np.abs(features_ND - second_ND), features_ND * second_ND])
    return features_ND, np.array([row.label for row in ordered])


def accuracy_interval(right: int, tested: int) -> Interval:
    """Return Wilson's 95 % interval of an accuracy × 100, for `right` correct predictions among `tested` test items."""
    from scipy.stats import binomtest

    ends = binomtest(right, tested).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(100 * float(ends.low), 100 * float(ends.high))


# ----------------------------------------------------------------------------------------------------- classifiers


def run_protocol(
    protocol: Protocol, parts: dict[Split, FeaturesAndLabels], folds: int, seed: int
) -> tuple[ProtocolResult, Labels, Labels]:
    """Run the evaluation protocol of a transfer task: search C, fit logistic regression, and predict the test examples.

    Return the accuracies, and the true and predicted classes (N,) of N test examples.

    C is the inverse regularisation strength. `parts` has the features and classes by split. In cross-validation, each
    example is tested once, by a classifier whose search and fit exclude its fold.

    Raises:
        ValueError: if a class has fewer examples than there are folds.
    """
    grid = [2.0**power for power in (range(-1, 6) if protocol == "train_test" else range(-2, 4))]
    gold, predicted, accuracies, dev_accuracies, chosen = [], [], [], [], []
    crossed = protocol == "cross_validation"
    fits = (1 + len(grid) * (1 if "dev" in parts else folds)) * (folds if crossed else 1)
    with progress_bar("classifiers", fits, "fit", transient=True) as bar:
        fitter = Fitter(bar)
        for train, test in _folds(parts["all"], folds, seed) if crossed else [(parts["train"], parts["test"])]:
            # The search: the mean accuracy of each C on dev, or on the inner folds
            searched = [(train, parts["dev"])] if "dev" in parts else _folds(train, folds, seed)
            accuracies_C = np.mean([fitter.path(fitted, grid, dev) for fitted, dev in searched], axis=0)
            best = int(np.argmax(np.round(100 * accuracies_C, 2)))
            dev_accuracies.append(accuracies_C[best])
            chosen.append(grid[best])

            # The final fit, and its predictions
            classifier = fitter.fit(fitter.new(train), train, grid[best])
            gold.append(test[1])
            predicted.append(classifier.predict(test[0]))
            accuracies.append(classifier.score(*test))
    result = ProtocolResult(
        accuracy=100 * float(np.mean(accuracies)),
        dev_accuracy=100 * float(np.mean(dev_accuracies)),
        chosen=tuple(chosen),
        fits=fitter.fits,
        unconverged=fitter.unconverged,
    )
    return result, np.concatenate(gold), np.concatenate(predicted)


class Fitter:
    """Fits logistic regressions, counts the fits and those that did not converge, and advances a progress bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.fits = self.unconverged = 0
        self._bar = bar

    def new(self, train: FeaturesAndLabels) -> Any:
        """Return an unfitted logistic regression with the solver for this number of features and classes."""
        from sklearn.linear_model import LogisticRegression

        classes = len(np.unique(train[1]))
        newton = train[0].shape[1] * (classes if classes > 2 else 1) <= _NEWTON_COEFFICIENTS
        how = {"solver": "newton-cholesky", "tol": 1e-4} if newton else {"solver": "lbfgs", "tol": 1e-6}
        return LogisticRegression(max_iter=_ITERATIONS, warm_start=True, **how)

    def fit(self, classifier: Any, train: FeaturesAndLabels, strength: float) -> Any:
        """Fit a logistic regression with C = `strength`, starting from its current coefficients, and return it."""
        from scipy.linalg import LinAlgWarning
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():  # fits that do not converge are counted instead
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", LinAlgWarning)  # scikit-learn then uses lbfgs instead of Newton's method
            classifier.set_params(C=strength).fit(*train)
        self.fits += 1
        self._bar.update()
        self.unconverged += int(np.max(classifier.n_iter_) >= _ITERATIONS)
        return classifier

    def path(self, train: FeaturesAndLabels, grid: Sequence[float], test: FeaturesAndLabels) -> list[float]:
        """Return the accuracy on `test` of logistic regressions fitted on `train`, for each value of C in `grid`.

        The fit for each value starts from the coefficients of the previous fit.
        """
        classifier = self.new(train)
        return [self.fit(classifier, train, strength).score(*test) for strength in grid]


def _folds(part: FeaturesAndLabels, folds: int, seed: int) -> Iterator[tuple[FeaturesAndLabels, FeaturesAndLabels]]:
    """Yield the training examples and the test examples of each stratified cross-validation fold.

    Examples are features and classes.

    Raises:
        ValueError: for fewer than two classes, or a class with fewer examples than folds.
    """
    from sklearn.model_selection import StratifiedKFold

    features_ND, labels_N = part
    classes, counts = np.unique(labels_N, return_counts=True)
    if len(classes) < 2 or counts.min() < folds:
        raise ValueError(
            f"{folds} folds: expected at least two classes with at least {folds} examples each, got "
            f"{', '.join(f'{count} of {name}' for name, count in zip(classes, counts, strict=True))}."
        )
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels_N, labels_N):
        yield (features_ND[train], labels_N[train]), (features_ND[test], labels_N[test])


def _check_folds(task: TransferTask, folds: int, seed: int) -> None:
    """Raise `ValueError` if a task has one class, or too few examples of a class for the folds of its protocol."""
    crossed = "all" in task.splits
    labels_N = np.array([row.label for row in task.splits["all" if crossed else "train"]])
    part = (labels_N, labels_N)
    try:
        if len(set(labels_N)) < 2:
            raise ValueError("expected at least two classes to train on.")
        for train, _ in _folds(part, folds, seed) if crossed else [(part, part)]:
            if "dev" not in task.splits:
                next(_folds(train, folds, seed))
    except ValueError as error:
        raise ValueError(f"{task.label}: {error} Raise or omit --limit-train, or omit the task.") from error


# --------------------------------------------------------------------------------------------------------- command


def transfer_main(settings: TransferSettings) -> TransferResults:
    """Read the tasks, evaluate the model, print the report, and write the JSON file."""
    if settings.download:
        download(settings.data_dir.expanduser())
    names = settings.tasks or tuple(available_transfer_tasks(settings.data_dir))
    if not names:
        raise FileNotFoundError(
            f"--data-dir: no transfer task in {settings.data_dir}. Expected transfer/mr.tsv, transfer/sst2.train.tsv …, "
            "mrpc/train.tsv, or SentEval's folders MR/, CR/, SST/binary/ … Set --download to get them."
        )
    try:
        tasks = [read_transfer_task(settings.data_dir, name) for name in names]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} Set --download to get them.") from None

    encoder = with_one_prompt(open_encoder(settings, settings.model), settings.side)
    encode, _ = encode_functions(encoder)
    results = evaluate_transfer(encode, tasks, limit_train=settings.limit_train)
    facts = EncoderFacts.of(encoder)
    text = transfer_report(results, settings.model, [str(facts)])
    write_results(settings, METRIC, text, results.to_dict(), facts)
    return results


# ---------------------------------------------------------------------------------------------------------- report


def transfer_report(results: TransferResults, model: str, remarks: Sequence[str] = ()) -> str:
    """Return the Markdown report of a transfer evaluation: two tables, then notes that start with `remarks`.

    The tables compare the model with published scores and show the results of each task. `model` is the model name.
    """
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
    """Return the notes of a transfer report: meaning of the columns, and differences from the published protocol."""
    notes = [
        "Accuracy × 100 of logistic regression on frozen vectors, not centred or scaled; C by SentEval's search. `dev` is "
        "the best accuracy of the search, `majority` the share of the most frequent class.",
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


if __name__ == "__main__":
    run_cli(lambda: transfer_main(parse_settings(TransferSettings, description=__doc__ or "")))
