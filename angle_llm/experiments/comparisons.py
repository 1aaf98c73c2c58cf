"""Every row of a grid against its reference row: on the same pairs, seed by seed, and over the seeds.

Two things vary, and neither interval covers the other. *Over pairs*: which pairs the test set happens to hold, for one
trained model each (`evaluation.comparison`). *Over seeds*: which triples were drawn, the adapter's start and the order; a
t interval over the differences of equal seeds, where there are two or more.

The scores of the pairs lie beside the models. Where those are gone, what was found of them before is kept; what never was
compared pair by pair has its difference from the result files, without an interval over pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from angle_llm.evaluation import PairScores, compare
from angle_llm.evaluation.tasks import PUBLISHED_TASKS
from angle_llm.experiments.grid import Experiment
from angle_llm.experiments.results import Result

SCORES = "scores.npz"

Found = tuple[str, dict[str, Any]]
"""Which figure differs, and by how much."""


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
    reference: str,
    chosen: Sequence[Experiment],
    runs: Path,
    known: Mapping[str, Any] | None = None,
    results: Iterable[Result] = (),
) -> dict[str, Any]:
    """Differences from the reference row, × 100: `{"reference", "rows": {row: {"figure", "per_seed", …}}}`.

    A seed whose scores are not on this machine keeps what is `known` of it, from the same reference, or is taken from
    `results`.

    A row is compared with the reference of the same seed; a row or reference without training, with any. The figure is the
    average of the published tasks both were measured on, or the only task they share.
    """
    scores = {(e.row, e.seed if e.trains else None): load_scores(runs / e.grid / e.name) for e in chosen}
    figures = {(result.row, result.seed if result.train is not None else None): _figures(result) for result in results}
    before = known["rows"] if known is not None and known["reference"] == reference else {}
    rows: dict[str, Any] = {}
    for key in scores:
        for reference_key in _references(reference, key, scores):
            number = key[1] if key[1] is not None else reference_key[1]
            seed = "none" if number is None else str(number)
            ours, theirs = scores[key], scores[reference_key]
            found: Found | None
            if ours is not None and theirs is not None:
                found = _paired(ours, theirs)
            elif (kept := before.get(key[0], {}).get("per_seed", {}).get(seed)) is not None:
                found = before[key[0]]["figure"], kept
            else:
                found = _of_figures(figures.get(key, {}), figures.get(reference_key, {}))
            if found is not None:
                row = rows.setdefault(key[0], {"figure": found[0], "per_seed": {}})
                row["per_seed"][seed] = found[1]
    for row in rows.values():
        row |= _over_seeds([seed["difference"] for seed in row["per_seed"].values()])
    return {"reference": reference, "rows": rows}


def _paired(ours: dict[str, PairScores], theirs: dict[str, PairScores]) -> Found:
    found = compare(ours, theirs)
    figure = "average" if found.average is not None else next(iter(found.tasks))
    difference = found.average or found.tasks[figure]
    return figure, {
        "difference": difference.difference,
        "interval": list(vars(difference.interval).values()),
        "p_value": difference.p_value,
        "tasks": {name: task.difference for name, task in found.tasks.items()},
    }


def _of_figures(ours: dict[str, float], theirs: dict[str, float]) -> Found | None:
    """The same figure as pair by pair, without what takes pairs."""
    tasks = {name: ours[name] - theirs[name] for name in ours if name in theirs}
    if not tasks:
        return None
    averaged = [name for name in PUBLISHED_TASKS if name in tasks]
    figure = "average" if averaged else next(iter(tasks))
    difference = float(np.mean([tasks[name] for name in averaged or [figure]]))
    return figure, {"difference": difference, "interval": None, "p_value": None, "tasks": tasks}


def _figures(result: Result) -> dict[str, float]:
    """Spearman × 100 by task, of those that have one."""
    tasks = result.measures.get("sts", {}).get("tasks", {})
    return {name: task["spearman"] for name, task in tasks.items() if task["spearman"] is not None}


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
