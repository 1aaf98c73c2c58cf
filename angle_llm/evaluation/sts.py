"""From an `encode` callable to STS figures: encode every distinct sentence once, compare, correlate.

    unique sentences of all tasks ──► encode ──► E (N, D) ──► cosine of each pair ──► Spearman and Pearson per task

Nothing here knows a model. Figures are × 100, as the literature writes them. A correlation that does not exist is NaN
and carries its reason; vectors that are not finite are an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from angle_llm.evaluation.tasks import PUBLISHED_TASKS, StsTask, read_pairs

Encode: TypeAlias = Callable[[list[str]], NDArray[np.floating[Any]]]
"""Sentences (N,) to rows (N, D), in the order given."""


class Encoder(Protocol):
    """What has an `encode` that can be told how much to compute at once, such as `SentenceEncoder`."""

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> NDArray[np.floating[Any]]:
        """One row per text, in the order given."""
        ...


_PAIRS_AT_ONCE = 4096
_CONSTANT = 1e-13


class UndefinedCorrelationError(ValueError):
    """The correlation of these numbers does not exist; the message is the reason."""


@dataclass(frozen=True)
class Figures:
    """Correlations × 100 over `pairs` pairs; NaN where they do not exist, and then `undefined` is the reason."""

    pairs: int
    spearman: float
    pearson: float
    undefined: str | None


@dataclass(frozen=True)
class TaskResult(Figures):
    """The figures of a whole task (sub-tasks concatenated), and of each sub-task by name."""

    name: str
    label: str
    variant: str
    source: str
    official_pairs: int | None
    subtasks: dict[str, Figures]


@dataclass(frozen=True)
class StsResults:
    """What `evaluate` measured: results by task name, in the order asked.

    `sentences` distinct sentences were encoded into `dimensions` numbers each, in `encode_seconds`; `zero_vectors` of
    them became the zero vector.
    """

    tasks: dict[str, TaskResult]
    sentences: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float

    @property
    def averaged(self) -> tuple[str, ...]:
        """The tasks the average is over: those of the published seven that are here."""
        return tuple(name for name in PUBLISHED_TASKS if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean Spearman × 100 over `averaged`; None when that is empty, NaN when one of them is NaN."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].spearman for name in self.averaged) / len(self.averaged)


def evaluate(encode: Encode, tasks: Sequence[StsTask]) -> StsResults:
    """Correlation of cosine similarity with the gold scores, for every task.

    `encode` is called exactly once, with the distinct sentences of all tasks in order of first appearance.

    Raises `ValueError` when there is nothing to evaluate, two tasks share a name, or what `encode` returned is not one
    finite row per sentence.
    """
    _check_tasks(tasks)
    row_of: dict[str, int] = {}
    for task in tasks:
        for pair in task.pairs:
            row_of.setdefault(pair.sentence1, len(row_of))
            row_of.setdefault(pair.sentence2, len(row_of))
    sentences = list(row_of)
    started = time.perf_counter()
    embeddings_ND = np.asarray(encode(list(sentences)))
    seconds = time.perf_counter() - started
    _check_embeddings(embeddings_ND, sentences)
    return StsResults(
        tasks={task.name: _evaluate_task(embeddings_ND, row_of, task) for task in tasks},
        sentences=len(sentences),
        dimensions=embeddings_ND.shape[1],
        zero_vectors=int((~embeddings_ND.any(axis=1)).sum()),
        encode_seconds=seconds,
    )


def sts_score(pairs: str | Path, *, micro_batch_tokens: int | None = None) -> Callable[[Encoder], float]:
    """A function from an encoder to its Spearman × 100 on a pair file; what a training run watches.

    The file is read at once, so that a mistake in its name shows before a model is loaded. The function raises
    `UndefinedCorrelationError` with the reason where `evaluate` would give NaN, for one float cannot carry a reason.
    """
    task = read_pairs(pairs)

    def score(encoder: Encoder) -> float:

        def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
            return encoder.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=True)

        results = evaluate(encode, [task])
        figures = results.tasks[task.name]
        if figures.undefined:
            raise UndefinedCorrelationError(f"{pairs}: no Spearman correlation: {figures.undefined}.")
        return figures.spearman

    return score


def pair_cosines(
    embeddings_ND: NDArray[np.floating[Any]], left_P: NDArray[np.intp], right_P: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Cosine (P,) of rows `left_P` with rows `right_P`, in float64. A zero vector has cosine 0 with everything."""
    cosines_P = np.empty(len(left_P), dtype=np.float64)
    for start in range(0, len(left_P), _PAIRS_AT_ONCE):  # a float64 copy of a 7B model's matrix would be gigabytes
        chunk = slice(start, start + _PAIRS_AT_ONCE)
        left_CD, right_CD = _unit_rows(embeddings_ND[left_P[chunk]]), _unit_rows(embeddings_ND[right_P[chunk]])
        cosines_P[chunk] = np.einsum("cd,cd->c", left_CD, right_CD)
    return cosines_P


def spearman(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Spearman's rank correlation in [-1, 1], ties sharing their average rank: `scipy.stats.spearmanr`.

    Raises `UndefinedCorrelationError` for fewer than two pairs, numbers that are not finite, or a side that is constant
    (up to 1e-13 of its size: ranks of rounding noise would be a number about nothing).
    """
    from scipy.stats import spearmanr

    return float(spearmanr(*_correlatable(x_P, y_P)).statistic)


def pearson(x_P: ArrayLike, y_P: ArrayLike) -> float:
    """Pearson's correlation in [-1, 1]: `scipy.stats.pearsonr`. Raises as `spearman` does."""
    from scipy.stats import pearsonr

    return float(pearsonr(*_correlatable(x_P, y_P)).statistic)


def _evaluate_task(embeddings_ND: NDArray[np.floating[Any]], row_of: dict[str, int], task: StsTask) -> TaskResult:
    left_P = np.array([row_of[pair.sentence1] for pair in task.pairs], dtype=np.intp)
    right_P = np.array([row_of[pair.sentence2] for pair in task.pairs], dtype=np.intp)
    gold_P = np.array([pair.score for pair in task.pairs], dtype=np.float64)
    cosines_P = pair_cosines(embeddings_ND, left_P, right_P)
    names = list(dict.fromkeys(pair.subtask for pair in task.pairs))
    subtask_P = np.array([names.index(pair.subtask) for pair in task.pairs])
    subtasks = {
        name: _figures(cosines_P[subtask_P == index], gold_P[subtask_P == index]) for index, name in enumerate(names)
    }
    whole = _figures(cosines_P, gold_P)
    return TaskResult(
        pairs=whole.pairs,
        spearman=whole.spearman,
        pearson=whole.pearson,
        undefined=whole.undefined,
        name=task.name,
        label=task.label,
        variant=task.variant,
        source=task.source,
        official_pairs=task.official_pairs,
        subtasks=subtasks if names != [""] else {},
    )


def _figures(cosines_P: NDArray[np.float64], gold_P: NDArray[np.float64]) -> Figures:
    try:
        return Figures(len(gold_P), 100 * spearman(cosines_P, gold_P), 100 * pearson(cosines_P, gold_P), None)
    except UndefinedCorrelationError as reason:
        return Figures(len(gold_P), math.nan, math.nan, f"of similarities and gold scores, {reason}")


def _unit_rows(rows_CD: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    rows = rows_CD.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit


def _correlatable(x_P: ArrayLike, y_P: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"two lists of equal length are needed, found shapes {x.shape} and {y.shape}.")
    if len(x) < 2:
        raise UndefinedCorrelationError(f"at least two pairs are needed, found {len(x)}")
    for side, values in (("first", x), ("second", y)):
        if not np.isfinite(values).all():
            raise UndefinedCorrelationError(f"the {side} hold {int((~np.isfinite(values)).sum())} non-finite numbers")
        if np.ptp(values) <= _CONSTANT * np.abs(values).max():
            raise UndefinedCorrelationError(f"the {side} are all equal ({values[0]:g}), so there is nothing to rank")
    return x, y


def _check_tasks(tasks: Sequence[StsTask]) -> None:
    if not tasks:
        raise ValueError("no tasks to evaluate: at least one is needed.")
    names = [task.name for task in tasks]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"each task needs its own name; given more than once: {', '.join(repeated)}.")
    empty = [task.name for task in tasks if not task.pairs]
    if empty:
        raise ValueError(f"every task needs pairs; without any: {', '.join(empty)}.")


def _check_embeddings(embeddings_ND: NDArray[Any], sentences: list[str]) -> None:
    if embeddings_ND.ndim != 2 or embeddings_ND.shape[0] != len(sentences) or embeddings_ND.shape[1] == 0:
        raise ValueError(
            f"encode must return one row per sentence, shape ({len(sentences)}, D), in the order given; it returned "
            f"shape {embeddings_ND.shape}."
        )
    if not np.issubdtype(embeddings_ND.dtype, np.floating):
        raise ValueError(f"encode must return floating-point rows; it returned {embeddings_ND.dtype}.")
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(sentences)} vectors hold NaN or infinity, the first for {sentences[bad[0]]!r}. "
            "No figure is given for such an encoder; look for an overflow (float16?), a broken adapter, or a training "
            "run that diverged."
        )
