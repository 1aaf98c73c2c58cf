"""SentEval's protocols: logistic regression on frozen vectors, with a search for the regularisation C.

From `senteval/tools/validation.py` of facebookresearch/SentEval, with scikit-learn:

| protocol | values of C | search by accuracy on | final fit on | result |
|---|---|---|---|---|
| cross_validation | 2^-2 … 2^3 | folds within the training folds | the training folds | mean accuracy of the folds |
| train_test | 2^-1 … 2^5 | folds of train | train | accuracy on test |
| train_dev_test | 2^-2 … 2^3 | dev | train | accuracy on test |

As in SentEval, folds are stratified and shuffled with seed 1111, examples are first sorted by number of words, then
class, accuracies are compared at two decimals of a percent, and the smallest C wins a tie. Features are neither centred
nor scaled.

Differences: the intercept is not regularised (SentEval's liblinear does), and fits converge, so that the solver does
not change accuracies: Newton's method for two classes, lbfgs with tolerance 1e-6 if its Hessian is large (many columns,
or several classes). Along a path of C each fit starts from the previous one. Published tables used SentEval's PyTorch
classifier, trained by Adam with early stopping.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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

Features: TypeAlias = NDArray[np.floating[Any]]
Labels: TypeAlias = NDArray[np.str_]
Part: TypeAlias = "tuple[Features, Labels]"


@dataclass(frozen=True)
class Outcome:
    """Result of a protocol: a prediction for every test example, the chosen C, accuracies in [0, 1].

    `accuracy` is the mean over the test folds; or that on the test split. `dev_accuracy` is the best accuracy of the
    search. `unconverged` of the `fits` stopped at 1,000 iterations before convergence.
    """

    gold_N: Labels
    predicted_N: Labels
    accuracy: float
    dev_accuracy: float
    chosen: tuple[float, ...]
    fits: int
    unconverged: int


class _Fitter:
    """Logistic regressions along a path of C, counting those that did not converge."""

    def __init__(self) -> None:
        self.fits = self.unconverged = 0

    def path(self, train: Part, grid: Sequence[float], score: Callable[[Any], float]) -> list[float]:
        """Score of the classifier for each C; each fit starts from the previous one."""
        classifier = self._new(train)
        return [score(self._fit(classifier, train, strength)) for strength in grid]

    def fit(self, train: Part, strength: float) -> Any:
        """One classifier, from a cold start."""
        return self._fit(self._new(train), train, strength)

    @staticmethod
    def _new(train: Part) -> Any:
        from sklearn.linear_model import LogisticRegression

        newton = len(np.unique(train[1])) == 2 and train[0].shape[1] <= _NEWTON_COLUMNS
        how = {"solver": "newton-cholesky", "tol": 1e-4} if newton else {"solver": "lbfgs", "tol": 1e-6}
        return LogisticRegression(max_iter=_ITERATIONS, warm_start=True, **how)

    def _fit(self, classifier: Any, train: Part, strength: float) -> Any:
        from scipy.linalg import LinAlgWarning
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():  # counted instead
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", LinAlgWarning)  # Newton's method falls back on lbfgs by itself
            classifier.set_params(C=strength).fit(*train)
        self.fits += 1
        self.unconverged += int(np.max(classifier.n_iter_) >= _ITERATIONS)
        return classifier


def cross_validated(parts: dict[Split, Part], folds: int, seed: int) -> Outcome:
    """Every example is tested once, by a classifier whose search and fit exclude its fold."""
    features_ND, labels_N = parts["all"]
    fitter = _Fitter()
    predicted_N = labels_N.copy()
    accuracies, found, chosen = [], [], []
    for train, test in _folds(labels_N, folds, seed):
        part = features_ND[train], labels_N[train]
        strength, dev_accuracy = _searched(fitter, part, _powers_of_two(-2, 3), folds, seed)
        predicted_N[test] = fitter.fit(part, strength).predict(features_ND[test])
        accuracies.append(_accuracy(predicted_N[test], labels_N[test]))
        chosen.append(strength)
        found.append(dev_accuracy)
    return Outcome(
        labels_N, predicted_N, float(np.mean(accuracies)), float(np.mean(found)), tuple(chosen), fitter.fits,
        fitter.unconverged,
    )  # fmt: skip


def tested_after_folds(parts: dict[Split, Part], folds: int, seed: int) -> Outcome:
    """C by cross-validation on train, one fit on train, accuracy on test."""
    fitter = _Fitter()
    strength, dev_accuracy = _searched(fitter, parts["train"], _powers_of_two(-1, 5), folds, seed)
    return _tested(fitter, parts, strength, dev_accuracy)


def tested_after_dev(parts: dict[Split, Part], folds: int, seed: int) -> Outcome:
    """C by accuracy on dev, one fit on train, accuracy on test. `folds` and `seed` are not used."""
    fitter, grid = _Fitter(), _powers_of_two(-2, 3)
    features_ND, labels_N = parts["dev"]
    scores = fitter.path(parts["train"], grid, lambda classifier: _accuracy(classifier.predict(features_ND), labels_N))
    best = _first_best(scores)
    return _tested(fitter, parts, grid[best], scores[best])


PROTOCOLS: dict[Protocol, Callable[[dict[Split, Part], int, int], Outcome]] = {
    "cross_validation": cross_validated,
    "train_test": tested_after_folds,
    "train_dev_test": tested_after_dev,
}


def f1(gold_N: Labels, predicted_N: Labels, positive: str) -> float:
    """F1 of one class, in [0, 1]; 0 if it neither occurs nor is predicted."""
    both = int(((gold_N == positive) & (predicted_N == positive)).sum())
    either = int((gold_N == positive).sum() + (predicted_N == positive).sum())
    return 2 * both / either if either else 0.0


def _searched(fitter: _Fitter, part: Part, grid: Sequence[float], folds: int, seed: int) -> tuple[float, float]:
    """The C of the best mean accuracy over the folds of `part`, and that accuracy."""
    features_ND, labels_N = part
    scores = []
    for train, test in _folds(labels_N, folds, seed):
        held_out, gold = features_ND[test], labels_N[test]

        def score(classifier: Any, held_out: Features = held_out, gold: Labels = gold) -> float:
            return _accuracy(classifier.predict(held_out), gold)

        scores.append(fitter.path((features_ND[train], labels_N[train]), grid, score))
    means = np.mean(scores, axis=0)
    best = _first_best(means)
    return grid[best], float(means[best])


def _tested(fitter: _Fitter, parts: dict[Split, Part], strength: float, dev_accuracy: float) -> Outcome:
    features_ND, labels_N = parts["test"]
    predicted_N = fitter.fit(parts["train"], strength).predict(features_ND)
    accuracy = _accuracy(predicted_N, labels_N)
    return Outcome(labels_N, predicted_N, accuracy, dev_accuracy, (strength,), fitter.fits, fitter.unconverged)


def _folds(labels_N: Labels, folds: int, seed: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    from sklearn.model_selection import StratifiedKFold

    classes, counts = np.unique(labels_N, return_counts=True)
    if len(classes) < 2 or counts.min() < folds:
        raise ValueError(
            f"--folds {folds}: expected at least two classes of {folds} examples each, got "
            f"{', '.join(f'{count} of {name}' for name, count in zip(classes, counts, strict=True))}."
        )
    return list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels_N, labels_N))


def _powers_of_two(low: int, high: int) -> list[float]:
    return [2.0**power for power in range(low, high + 1)]


def _first_best(accuracies: Any) -> int:
    return int(np.argmax(np.round(100 * np.asarray(accuracies), 2)))


def _accuracy(predicted_N: Labels, gold_N: Labels) -> float:
    return float((predicted_N == gold_N).mean())
