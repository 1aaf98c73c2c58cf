"""Every row of a grid against its reference row: on the same pairs, seed by seed, and over the seeds.

Two things vary, and neither interval covers the other. *Over pairs*: which pairs the test set happens to hold, for one
trained model each (`evaluation.comparison`). *Over seeds*: which triples were drawn, the adapter's start and the order; a
t interval over the differences of equal seeds, where there are two or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from angle_llm.evaluation import PairScores, compare
from angle_llm.experiments.grid import Experiment

SCORES = "scores.npz"


def save_scores(scores: dict[str, PairScores], folder: Path) -> None:
    """Cosines and gold scores of every pair, beside the model."""
    arrays = {f"{task}/{kind}": values for task, of in scores.items() for kind, values in of._asdict().items()}
    np.savez_compressed(folder / SCORES, **arrays)


def load_scores(folder: Path) -> dict[str, PairScores] | None:
    """What `save_scores` wrote, None where nothing is."""
    if not (folder / SCORES).is_file():
        return None
    with np.load(folder / SCORES, allow_pickle=False) as arrays:
        tasks = dict.fromkeys(key.rsplit("/", 1)[0] for key in arrays.files)
        return {task: PairScores(arrays[f"{task}/cosine"], arrays[f"{task}/gold"]) for task in tasks}


def comparisons(
    reference: str, chosen: Sequence[Experiment], runs: Path, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Differences from the reference row, × 100: `{"reference", "rows": {row: {"figure", "per_seed", …}}}`.

    A row whose scores are not on this machine keeps what is `known` of it, from the same reference.

    A row is compared with the reference of the same seed; a row or reference without training, with any. The figure is the
    average of the published tasks both were measured on, or the only task they share.
    """
    scores = {(e.row, e.seed if e.trains else None): load_scores(runs / e.grid / e.name) for e in chosen}
    rows: dict[str, Any] = {}
    for experiment in chosen:
        key = (experiment.row, experiment.seed if experiment.trains else None)
        for reference_key in _references(reference, key, scores):
            ours, theirs = scores[key], scores[reference_key]
            if ours is None or theirs is None:
                continue
            found = compare(ours, theirs)
            figure = "average" if found.average is not None else next(iter(found.tasks))
            difference = found.average or found.tasks[figure]
            row = rows.setdefault(experiment.row, {"figure": figure, "per_seed": {}})
            seed = key[1] if key[1] is not None else reference_key[1]
            row["per_seed"]["none" if seed is None else str(seed)] = {
                "difference": difference.difference,
                "interval": list(vars(difference.interval).values()),
                "p_value": difference.p_value,
                "tasks": {name: task.difference for name, task in found.tasks.items()},
            }
    for row in rows.values():
        row |= _over_seeds([seed["difference"] for seed in row["per_seed"].values()])
    planned = {experiment.row for experiment in chosen}
    before = known["rows"] if known is not None and known["reference"] == reference else {}
    return {"reference": reference, "rows": {name: row for name, row in before.items() if name in planned} | rows}


def _references(
    reference: str, key: tuple[str, int | None], scores: dict[tuple[str, int | None], Any]
) -> list[tuple[str, int | None]]:
    row, seed = key
    if row == reference:
        return []
    same = [other for other in scores if other[0] == reference]
    return [other for other in same if seed is None or other[1] in (seed, None)]


def _over_seeds(differences: list[float]) -> dict[str, Any]:
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return {"seeds": 1, "mean_difference": mean, "interval": None}
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    return {"seeds": len(differences), "mean_difference": mean, "interval": [mean - half, mean + half]}
