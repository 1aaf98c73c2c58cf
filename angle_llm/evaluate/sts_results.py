"""Results of an STS evaluation.

Correlations are × 100; an undefined one is NaN with a reason. A task with sub-tasks has three scores, and papers differ
in which they report: `all` (one correlation over all pairs: SimCSE, PromptEOL, AnglE), the mean over sub-tasks, and the
mean weighted by pairs (SemEval 2012 to 2014).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.bootstrap import Interval, percentile_interval
from angle_llm.evaluate.correlation import PairScores
from angle_llm.evaluate.results import Results, TaskResult
from angle_llm.evaluate.sts_tasks import StsPair


class Means(NamedTuple):
    """Means over sub-tasks of their correlations × 100."""

    spearman: float
    pearson: float


@dataclass(frozen=True, kw_only=True)
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

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON, without the resamples."""
        return {key: getattr(self, key) for key in ("pairs", "spearman", "pearson", "undefined", "interval")}


@dataclass(frozen=True, kw_only=True)
class StsTaskResult(Correlations, TaskResult):
    """Correlations of a task over all pairs, and of each sub-task by name.

    `text` is the variant in tables: `senteval`, or `senteval, edited`.
    """

    metric = "spearman"

    variant: str
    edits: str
    text: str
    official_pairs: int | None
    subtasks: dict[str, Correlations]
    scores: PairScores = field(compare=False, repr=False)
    sentences: tuple[StsPair, ...] = field(compare=False, repr=False)

    @property
    def mean_over_subtasks(self) -> Means | None:
        """Unweighted mean. None without sub-tasks, NaN if one of them is NaN."""
        return self._mean([1] * len(self.subtasks))

    @property
    def weighted_mean_over_subtasks(self) -> Means | None:
        """Mean weighted by the number of pairs."""
        return self._mean([subtask.pairs for subtask in self.subtasks.values()])

    def _mean(self, weights: list[int]) -> Means | None:
        if not self.subtasks:
            return None
        both = [(subtask.spearman, subtask.pearson) for subtask in self.subtasks.values()]
        return Means(*(float(mean) for mean in np.average(both, axis=0, weights=weights)))

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON, without those of single pairs."""
        means = {name: getattr(self, name) for name in ("mean_over_subtasks", "weighted_mean_over_subtasks")}
        return {
            **{key: getattr(self, key) for key in ("name", "label", "variant", "edits", "source", "official_pairs")},
            **Correlations.to_dict(self),
            **{name: mean and mean._asdict() for name, mean in means.items()},
            "subtasks": {name: subtask.to_dict() for name, subtask in self.subtasks.items()},
        }


class StsResults(Results[StsTaskResult]):
    """Results of `evaluate`."""

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

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON; `pairs` has cosine and gold score of each pair, for `read_scores`."""
        return {
            "variant": " + ".join(dict.fromkeys(task.variant for task in self.tasks.values())),
            **super().to_dict(),
            "pairs": {
                name: {"cosine": scores.cosine.tolist(), "gold": scores.gold.tolist()}
                for name, scores in self.scores.items()
            },
        }
