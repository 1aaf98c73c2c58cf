"""Results of an STS evaluation.

Correlations are × 100; an undefined one is NaN with a reason. A task with sub-tasks has three scores, and papers differ
in which they report: `all` (one correlation over all pairs: SimCSE, PromptEOL, AnglE), the mean over sub-tasks, and the
mean weighted by pairs (SemEval 2012 to 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.bootstrap import Interval, percentile_interval
from angle_llm.evaluate.correlation import PairScores
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS


class Means(NamedTuple):
    """Means over sub-tasks of their correlations × 100."""

    spearman: float
    pearson: float


@dataclass(frozen=True)
class Correlations:
    """Correlations × 100 over `pairs` pairs. If they are undefined, they are NaN and `undefined` is the reason.

    `resampled` is Spearman × 100 in each bootstrap resample, None without resamples.
    """

    pairs: int
    spearman: float
    pearson: float
    undefined: str | None
    resampled: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    @property
    def interval(self) -> Interval | None:
        """95 % interval of `spearman` over pairs (see `bootstrap`)."""
        return None if self.resampled is None else percentile_interval(self.resampled)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Correlations):
    """Correlations of a task over all pairs, and of each sub-task by name."""

    name: str
    label: str
    variant: str
    edits: str
    text: str
    source: str
    official_pairs: int | None
    subtasks: dict[str, Correlations]
    scores: PairScores = field(compare=False, repr=False)

    @property
    def mean_over_subtasks(self) -> Means | None:
        """Unweighted mean. None without sub-tasks, NaN if one of them is NaN."""
        return self._mean([1] * len(self.subtasks))

    @property
    def weighted_mean_over_subtasks(self) -> Means | None:
        """Mean weighted by the number of pairs."""
        return self._mean([subtask.pairs for subtask in self.subtasks.values()])

    def _mean(self, weights: Sequence[int]) -> Means | None:
        if not self.subtasks:
            return None
        both = [(subtask.spearman, subtask.pearson) for subtask in self.subtasks.values()]
        return Means(*(float(mean) for mean in np.average(both, axis=0, weights=weights)))


@dataclass(frozen=True)
class StsResults:
    """Results of `evaluate` by task name, in the given order; the number of distinct sentences and of zero vectors."""

    tasks: dict[str, TaskResult]
    sentences: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float

    @property
    def averaged(self) -> tuple[str, ...]:
        """Tasks of the average: the published ones that were evaluated."""
        return tuple(name for name in PUBLISHED_TASKS if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean Spearman × 100 over `averaged`. None without any, NaN if one is NaN."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].spearman for name in self.averaged) / len(self.averaged)

    @property
    def average_interval(self) -> Interval | None:
        """95 % interval of `average`, tasks resampled independently. None without average or resamples."""
        resampled = [self.tasks[name].resampled for name in self.averaged]
        known = [values for values in resampled if values is not None]
        return percentile_interval(np.mean(known, axis=0)) if known and len(known) == len(resampled) else None

    @property
    def scores(self) -> dict[str, PairScores]:
        """Cosines and gold scores by task name, for `compare`."""
        return {name: task.scores for name, task in self.tasks.items()}
