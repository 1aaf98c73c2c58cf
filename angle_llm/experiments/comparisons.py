"""Every row of a grid against its reference row: on the same pairs, seed by seed, and over the seeds.

Two things vary, and neither interval covers the other. *Over pairs*: which pairs the test set happens to hold, for one
trained model each (`evaluation.comparison`). *Over seeds*: which triples were drawn, the adapter's start and the order; a
t interval over the differences of equal seeds, where there are two or more.

The cosines of the pairs lie beside the results (`scores`). Where those of a row are gone, what was found of them before is
kept; what never was compared pair by pair has the difference of its figures, without an interval over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from angle_llm.evaluate import PairScores, compare
from angle_llm.evaluate.tasks import PUBLISHED_TASKS
from angle_llm.experiments.grid import Experiment, Grid
from angle_llm.experiments.results import Result


def comparisons(
    grid: Grid,
    measured: Iterable[tuple[Experiment, Result]],
    scores: Callable[[Experiment], Mapping[str, PairScores] | None],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Differences from the reference rows, × 100: `{"reference", "rows": {row: {"reference", "figure", "per_seed", …}}}`.

    `measured` are the experiments of a grid that have a result. A difference is that of the result files; interval and
    p-value come from the `scores` of the pairs, or from what is `known` of them, where those give the same difference.

    A row is compared with the reference of the same seed; a row or reference without training, with any. The figure is the
    average of the published tasks both were measured on, or the only task they share.
    """
    by_key = {(e.row, e.seed if e.trains else None): (e, result) for e, result in measured}
    before = known["rows"] if known is not None else {}
    rows: dict[str, Any] = {}
    for key, (ours, our_result) in by_key.items():
        reference = reference_of(grid, key[0])
        for reference_key in _references(reference, key, by_key):
            theirs, their_result = by_key[reference_key]
            found = _of_figures(our_result, their_result)
            if found is None:
                continue
            number = key[1] if key[1] is not None else reference_key[1]
            seed = "none" if number is None else str(number)
            one, other = scores(ours), scores(theirs)
            of_row = before.get(key[0], {})
            same = known is not None and of_row.get("reference", known["reference"]) == reference
            known_before = of_row.get("per_seed", {}).get(seed) if same else None
            here = _paired(one, other, found.figure) if one is not None and other is not None else None
            paired = next((of for of in (here, known_before) if _agree(of, found.difference)), None)
            row = rows.setdefault(key[0], {"reference": reference, "figure": found.figure, "per_seed": {}})
            others = [one["tasks"].keys() for one in row["per_seed"].values()]
            if all(
                tasks == found.difference["tasks"].keys() for tasks in others
            ):  # of different figures there is no mean
                row["per_seed"][seed] = paired or found.difference
    for row in rows.values():
        row |= _over_seeds([_number(seed["difference"]) for seed in row["per_seed"].values()])
    return {"reference": grid.reference, "rows": rows}


def reference_of(grid: Grid, row: str) -> str | None:
    """The row that one is compared with."""
    own = grid.rows[row].reference if row in grid.rows else None
    return own or grid.reference


class _Found(NamedTuple):
    figure: str
    """What differs: the average, or a task."""
    difference: dict[str, Any]


def _of_figures(ours: Result, theirs: Result) -> _Found | None:
    """What result files tell: no interval over pairs."""
    one, other = (result.measures.get("sts", {}).get("tasks", {}) for result in (ours, theirs))
    tasks = {
        name: _number(one[name]["spearman"]) - _number(other[name]["spearman"])
        for name in one
        if name in other and all(one[name].get(what) == other[name].get(what) for what in ("variant", "pairs"))
    }
    if not tasks:
        return None
    averaged = [name for name in PUBLISHED_TASKS if name in tasks]
    figure = "average" if averaged else next(iter(tasks))
    difference = float(np.mean([tasks[name] for name in averaged or [figure]]))
    return _Found(figure, {"difference": difference, "interval": None, "p_value": None, "tasks": tasks})


def _paired(ours: Mapping[str, PairScores], theirs: Mapping[str, PairScores], figure: str) -> dict[str, Any]:
    """What the scores of the pairs tell; nothing if they are of other pairs."""
    if not ours.keys() & theirs.keys():
        return {}
    try:
        found = compare(ours, theirs)
    except ValueError as error:
        print(f"not compared pair by pair: {error}")
        return {}
    difference = found.average if figure == "average" else found.tasks.get(figure)
    return (
        {}
        if difference is None
        else {
            "difference": difference.difference,
            "interval": list(vars(difference.interval).values()),
            "p_value": difference.p_value,
            "tasks": {name: task.difference for name, task in found.tasks.items()},
        }
    )


def _agree(paired: Mapping[str, Any] | None, of_figures: Mapping[str, Any]) -> bool:
    """Whether what is known of the pairs is about these results: models may have been trained anew, elsewhere."""
    if not paired or paired["tasks"].keys() != of_figures["tasks"].keys():
        return False
    one, other = ([_number(what["tasks"][name]) for name in of_figures["tasks"]] for what in (paired, of_figures))
    # Kept cosines have four bytes, so some come to be equal (those of equal sentences are 1 but for rounding, for instance):
    # that has moved a figure × 100 by 3.4e-3 (STS12 on SentEval's text), so a difference by twice that. Two trainings
    # differ by more than this on some set.
    return np.allclose(one, other, rtol=0, atol=1e-2, equal_nan=True)


def _number(value: float | None) -> float:
    """Files hold null for what does not exist."""
    return math.nan if value is None else value


def _references(
    reference: str | None, key: tuple[str, int | None], keys: Iterable[tuple[str, int | None]]
) -> list[tuple[str, int | None]]:
    row, seed = key
    if reference is None or row == reference:
        return []
    same = [other for other in keys if other[0] == reference]
    return [other for other in same if seed is None or other[1] in (seed, None)]


def _over_seeds(differences: list[float]) -> dict[str, Any]:
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return {"seeds": 1, "mean_difference": mean, "interval": None}
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    return {"seeds": len(differences), "mean_difference": mean, "interval": [mean - half, mean + half]}
