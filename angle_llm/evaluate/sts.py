"""From an `encode` callable to STS figures: encode every distinct sentence once, compare, correlate.

    unique sentences of all tasks ──► encode ──► E (N, D) ──► cosine of each pair ──► Spearman and Pearson per task

Nothing here knows a model. Figures are × 100, as the literature writes them. A correlation that does not exist is NaN
and carries its reason; vectors that are not finite are an error.

A task with sub-tasks has three figures, and papers mix them: `all` (its pairs concatenated, one correlation: the tables
of SimCSE, PromptEOL and AnglE), the mean of its sub-tasks' correlations, and that mean weighted by their numbers of
pairs (SemEval's own tables of 2012 to 2014).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.correlation import UndefinedCorrelationError, pair_cosines, pearson, spearman
from angle_llm.evaluate.encoding import Encode, EncodedTexts, Encoder, encode_distinct
from angle_llm.evaluate.pairs import StsTask, read_pairs
from angle_llm.evaluate.resampling import Interval, percentile_interval, resampled_spearman
from angle_llm.evaluate.tasks import PUBLISHED_TASKS


class Means(NamedTuple):
    """Means of the correlations × 100 of a task's sub-tasks."""

    spearman: float
    pearson: float


class PairScores(NamedTuple):
    """What a task's figures are computed from: the cosine (P,) and the gold score (P,) of each pair, in their order."""

    cosine: NDArray[np.float64]
    gold: NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """Correlations × 100 over `pairs` pairs; NaN where they do not exist, and then `undefined` is the reason.

    `resampled` is the Spearman figure in each bootstrap resample of these pairs, None where none was asked for.
    """

    pairs: int
    spearman: float
    pearson: float
    undefined: str | None
    resampled: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    @property
    def interval(self) -> Interval | None:
        """95 % interval of `spearman`: of the choice of pairs, not of seeds (see `resampling`)."""
        return None if self.resampled is None else percentile_interval(self.resampled)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Figures):
    """The figures of a whole task (`all`: sub-tasks concatenated), and of each sub-task by name."""

    name: str
    label: str
    variant: str
    edits: str
    text: str
    source: str
    official_pairs: int | None
    subtasks: dict[str, Figures]
    scores: PairScores = field(compare=False, repr=False)

    @property
    def mean_over_subtasks(self) -> Means | None:
        """Each sub-task counts the same. None without sub-tasks, NaN where one of them is NaN."""
        return self._mean([1] * len(self.subtasks))

    @property
    def weighted_mean_over_subtasks(self) -> Means | None:
        """Each sub-task counts by its number of pairs."""
        return self._mean([figures.pairs for figures in self.subtasks.values()])

    def _mean(self, weights: Sequence[int]) -> Means | None:
        if not self.subtasks:
            return None
        figures = [(one.spearman, one.pearson) for one in self.subtasks.values()]
        return Means(*(float(mean) for mean in np.average(figures, axis=0, weights=weights)))


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
        """Mean Spearman × 100 (`all`) over `averaged`; None when that is empty, NaN when one of them is NaN."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].spearman for name in self.averaged) / len(self.averaged)

    @property
    def average_interval(self) -> Interval | None:
        """95 % interval of `average`, every task resampled by itself; None when there is no average or no resample."""
        resampled = [self.tasks[name].resampled for name in self.averaged]
        known = [figures for figures in resampled if figures is not None]
        return percentile_interval(np.mean(known, axis=0)) if known and len(known) == len(resampled) else None

    @property
    def scores(self) -> dict[str, PairScores]:
        """Cosines and gold scores by task name: what `compare` takes."""
        return {name: task.scores for name, task in self.tasks.items()}


def evaluate(encode: Encode, tasks: Sequence[StsTask], *, resamples: int = 0, seed: int = 0) -> StsResults:
    """Correlation of cosine similarity with the gold scores, for every task.

    `encode` is called exactly once, with the distinct sentences of all tasks in order of first appearance. `resamples`
    bootstrap resamples of the pairs, drawn from `seed`, give each Spearman figure its interval; 0: no intervals.

    Raises `ValueError` when there is nothing to evaluate, two tasks share a name, or what `encode` returned is not one
    finite row per sentence.
    """
    _check_tasks(tasks)
    pairs = (pair for task in tasks for pair in task.pairs)
    encoded = encode_distinct(encode, (sentence for pair in pairs for sentence in pair[:2]))
    return StsResults(
        tasks={task.name: _evaluate_task(encoded, task, resamples, seed) for task in tasks},
        sentences=len(encoded.row_of),
        dimensions=encoded.dimensions,
        zero_vectors=encoded.zero_vectors,
        encode_seconds=encoded.seconds,
    )


def sts_score(pairs: str | Path, *, micro_batch_tokens: int | None = None) -> Callable[[Encoder], float]:
    """A function from an encoder to its Spearman × 100 on a pair file; what a training run watches.

    The file is read at once, so that a mistake in its name shows before a model is loaded. The function raises
    `UndefinedCorrelationError` with the reason where `evaluate` would give NaN, for one float cannot carry a reason.
    """
    task = read_pairs(pairs)
    main = os.environ.get("RANK", "0") == "0"  # of several processes, which all measure, one tells how far it is

    def score(encoder: Encoder) -> float:

        def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
            return encoder.encode(texts, micro_batch_tokens=micro_batch_tokens, show_progress=main)

        results = evaluate(encode, [task])
        figures = results.tasks[task.name]
        if figures.undefined:
            raise UndefinedCorrelationError(f"{pairs}: no Spearman correlation: {figures.undefined}.")
        return figures.spearman

    return score


def _evaluate_task(encoded: EncodedTexts, task: StsTask, resamples: int, seed: int) -> TaskResult:
    left_P = np.array([encoded.row_of[pair.sentence1] for pair in task.pairs], dtype=np.intp)
    right_P = np.array([encoded.row_of[pair.sentence2] for pair in task.pairs], dtype=np.intp)
    gold_P = np.array([pair.score for pair in task.pairs], dtype=np.float64)
    scores = PairScores(pair_cosines(encoded.embeddings_ND, left_P, right_P), gold_P)
    names = list(dict.fromkeys(pair.subtask for pair in task.pairs))
    subtask_P = np.array([names.index(pair.subtask) for pair in task.pairs])
    parts = {name: PairScores(*(side[subtask_P == index] for side in scores)) for index, name in enumerate(names)}
    whole = _figures(scores, resamples, seed, task.name)
    return TaskResult(
        pairs=whole.pairs,
        spearman=whole.spearman,
        pearson=whole.pearson,
        undefined=whole.undefined,
        resampled=whole.resampled,
        name=task.name,
        label=task.label,
        variant=task.variant,
        edits=task.edits,
        text=task.text,
        source=task.source,
        official_pairs=task.official_pairs,
        subtasks={
            name: _figures(part, resamples, seed, f"{task.name}/{name}")
            for name, part in parts.items()
            if names != [""]
        },
        scores=scores,
    )


def _figures(scores: PairScores, resamples: int, seed: int, stream: str) -> Figures:
    cosines_P, gold_P = scores
    try:
        figures = Figures(len(gold_P), 100 * spearman(cosines_P, gold_P), 100 * pearson(cosines_P, gold_P), None)
    except UndefinedCorrelationError as reason:
        because = f"of similarities and gold scores, {reason}"
        no_number = np.full(resamples, math.nan) if resamples else None
        return Figures(len(gold_P), math.nan, math.nan, because, no_number)
    if not resamples:
        return figures
    resampled = resampled_spearman([cosines_P], gold_P, resamples=resamples, seed=seed, stream=stream)
    return replace(figures, resampled=100 * resampled[0])


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
