"""SentEval's protocols: logistic regression on frozen vectors, with a search for the regularisation C.

From `senteval/tools/validation.py` of facebookresearch/SentEval, with scikit-learn:

| protocol | values of C | search by accuracy on | final fit on | result |
|---|---|---|---|---|
| cross_validation | 2^-2 … 2^3 | folds within the training folds | the training folds | mean accuracy of the folds |
| train_test | 2^-1 … 2^5 | folds of train | train | accuracy on test |
| train_dev_test | 2^-2 … 2^3 | dev | train | accuracy on test |

As in SentEval, folds are stratified and shuffled with seed 1111, examples are first sorted by number of words, then
class, accuracies are compared at two decimals of a percent, and of equal accuracies the smallest C is chosen. Features
are neither centred nor scaled.

Differences: the intercept is not regularised (SentEval's liblinear does), and fits converge, so that the solver does
not change accuracies: Newton's method for two classes, lbfgs with tolerance 1e-6 if its Hessian is large (many columns,
or several classes). Along a path of C each fit starts from the previous one. Published tables used SentEval's PyTorch
classifier, trained by Adam with early stopping.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.transfer_tasks import Protocol, Split

FOLDS = 10
"""Folds of the published tables; SentEval's own default is 5."""

FOLD_SEED = 1111
"""SentEval's seed."""

_ITERATIONS = 1000
_NEWTON_COLUMNS = 1024  # up to about here, a few Newton steps take less time than many of lbfgs

Labels: TypeAlias = NDArray[np.str_]
Part: TypeAlias = "tuple[NDArray[np.floating[Any]], Labels]"
"""Features (N, D) and classes (N,)."""


@dataclass(frozen=True)
class ProtocolResult:
    """A prediction for every test example, the chosen C, accuracies in [0, 1].

    `accuracy` is the mean over the test folds, or that on the test split. `dev_accuracy` is the best accuracy of the
    search. `unconverged` of the `fits` stopped at 1,000 iterations before convergence.
    """

    gold_N: Labels
    predicted_N: Labels
    accuracy: float
    dev_accuracy: float
    chosen: tuple[float, ...]
    fits: int
    unconverged: int

    def f1(self, positive: str) -> float:
        """Return F1 of one class; 0 if it neither occurs nor is predicted."""
        from sklearn.metrics import f1_score

        return float(f1_score(self.gold_N == positive, self.predicted_N == positive, zero_division=0))


def run_protocol(protocol: Protocol, parts: dict[Split, Part], folds: int, seed: int) -> ProtocolResult:
    """Search C, fit and predict. In cross-validation every example is tested once,
    by a classifier whose search and fit exclude its fold.

    Raises:
        ValueError: for too few examples of a class for the folds.
    """
    fitter = Fitter()
    grid = [2.0**power for power in (range(-1, 6) if protocol == "train_test" else range(-2, 4))]
    gold, predicted, accuracies, found, chosen = [], [], [], [], []
    crossed = protocol == "cross_validation"
    for train, test in _folds(parts["all"], folds, seed) if crossed else [(parts["train"], parts["test"])]:
        inner = [(train, parts["dev"])] if "dev" in parts else _folds(train, folds, seed)
        accuracies_C = np.mean([fitter.path(fit_on, grid, dev) for fit_on, dev in inner], axis=0)
        best = int(np.argmax(np.round(100 * accuracies_C, 2)))
        predictions = fitter.fit(fitter.new(train), train, grid[best]).predict(test[0])
        gold.append(test[1])
        predicted.append(predictions)
        accuracies.append(_accuracy(predictions, test[1]))
        found.append(accuracies_C[best])
        chosen.append(grid[best])
    return ProtocolResult(
        gold_N=np.concatenate(gold),
        predicted_N=np.concatenate(predicted),
        accuracy=float(np.mean(accuracies)),
        dev_accuracy=float(np.mean(found)),
        chosen=tuple(chosen),
        fits=fitter.fits,
        unconverged=fitter.unconverged,
    )


class Fitter:
    """Logistic regressions; counts those that did not converge."""

    def __init__(self) -> None:
        self.fits = self.unconverged = 0

    def new(self, train: Part) -> Any:
        """Return a classifier with the solver for these features and classes."""
        from sklearn.linear_model import LogisticRegression

        newton = len(np.unique(train[1])) == 2 and train[0].shape[1] <= _NEWTON_COLUMNS
        how = {"solver": "newton-cholesky", "tol": 1e-4} if newton else {"solver": "lbfgs", "tol": 1e-6}
        return LogisticRegression(max_iter=_ITERATIONS, warm_start=True, **how)

    def fit(self, classifier: Any, train: Part, strength: float) -> Any:
        """Return the classifier, fitted with this C from its current coefficients."""
        from scipy.linalg import LinAlgWarning
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():  # counted instead
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", LinAlgWarning)  # scikit-learn then uses lbfgs instead of Newton's method
            classifier.set_params(C=strength).fit(*train)
        self.fits += 1
        self.unconverged += int(np.max(classifier.n_iter_) >= _ITERATIONS)
        return classifier

    def path(self, train: Part, grid: Sequence[float], test: Part) -> list[float]:
        """Return the accuracy on `test` for each C; each fit starts from the previous one."""
        classifier = self.new(train)
        return [_accuracy(self.fit(classifier, train, strength).predict(test[0]), test[1]) for strength in grid]


def _folds(part: Part, folds: int, seed: int) -> Iterator[tuple[Part, Part]]:
    """Yield the training and test part of each fold."""
    from sklearn.model_selection import StratifiedKFold

    features_ND, labels_N = part
    classes, counts = np.unique(labels_N, return_counts=True)
    if len(classes) < 2 or counts.min() < folds:
        raise ValueError(
            f"--folds {folds}: expected at least two classes of {folds} examples each, got "
            f"{', '.join(f'{count} of {name}' for name, count in zip(classes, counts, strict=True))}."
        )
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels_N, labels_N):
        yield (features_ND[train], labels_N[train]), (features_ND[test], labels_N[test])


def _accuracy(predicted_N: Labels, gold_N: Labels) -> float:
    return float((predicted_N == gold_N).mean())
