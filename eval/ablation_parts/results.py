"""Write the results file, cache scores of pairs and queries, and compute paired differences between rows of a grid.

The scores of all pairs are cached in runs/GRID/NAME/scores.npz, and the scores of all queries of a retrieval task in
queries.npz. If the scores of two rows are cached, the rows are compared pair by pair or query by query on the same
bootstrap resamples; with several seeds, also by the mean of each query over the seeds. Without cached scores, a difference
keeps the interval in the results file, or has none.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from filelock import FileLock

from ablation_parts.grid import Experiment
from angle_llm.evaluate import PUBLISHED_TASKS, Interval, PairScores, compare
from angle_llm.evaluate.bootstrap import mean_difference
from angle_llm.io import write_file, write_text

Measurement = dict[str, Any]
Line = dict[str, str]
Key = tuple[str, ...]
KEY = ("grid", "row", "seed")
WHAT = ("kind", "task", "text", "metric")
MEASUREMENTS = (*KEY, *WHAT, "value", "low", "high", "n", "reference", "p", "note")
RUNS = (*KEY, "label", "date", "commit", "machine", "versions", "command", "settings", "measures")
SCORES, QUERIES = "scores.npz", "queries.npz"
DIFFERED = "nDCG@10"
"""Retrieval metric for which differences are recorded."""
FILES = "average of files"
"""Value of the column `task` for the mean Spearman correlation over several files of scored pairs."""
MEAN = "mean"
"""Value of the column `seed` in lines that hold a mean over the seeds."""
SAME = 1e-2
"""Largest difference (× 100) between a cached and a recorded value of one model. A retrained model differs more."""


def measurement(
    kind: str, task: str, metric: str, value: float | None, interval: Interval | None = None, **more: Any
) -> Measurement:
    """Return a measurement as a dictionary of columns of the results file. `value` is None if it is missing."""
    ends = {} if interval is None else {"low": interval.low, "high": interval.high}
    return {"kind": kind, "task": task, "metric": metric, "value": value, **ends, **more}


class Results:
    """The results file, with a line per measurement, and `runs_path`, a file with a line per run.

    A run is a grid, row and seed. Every change rewrites both files atomically under a lock, so that several programs can
    share the files.
    """

    def __init__(self, path: Path) -> None:
        self.paths = {path: MEASUREMENTS, runs_path(path): RUNS}
        self.lock = FileLock(f"{path}.lock")

    def read(self) -> tuple[list[Line], list[Line]]:
        """Return all lines of the results file (measurements) and of the file of runs."""
        texts = [path.read_text(encoding="utf-8") if path.is_file() else "" for path in self.paths]
        measurements, runs = (list(csv.DictReader(io.StringIO(text))) for text in texts)
        return measurements, runs

    def of(self, key: Key) -> tuple[list[Line], Line | None]:
        """Return the measurements of a run (grid, row, seed), and its line of runs, None without measurements."""
        measurements, runs = self.read()
        of_run = [m for m in measurements if key_of(m) == key]
        return of_run, next((run for run in runs if of_run and key_of(run) == key), None)

    def record(self, key: Key, run: Line, found: Iterable[Measurement]) -> None:
        """Add measurements of a run to the results file, and replace its earlier measurements of the same kinds.

        Measurements of kinds that `run` does not list as measured are removed.
        """
        named = dict(zip(KEY, key, strict=True))
        new = [line_of(named | one) for one in found]
        keep = {*yaml.safe_load(run["measures"]), "difference"} - {one["kind"] for one in new}
        values = {tuple(one.get(name, "") for name in WHAT): one["value"] for one in new}

        def is_replaced(line: Line) -> bool:
            return key_of(line) == key and line["kind"] not in keep

        with self.lock:
            measurements, runs = self.read()
            before = [line for line in measurements if is_replaced(line)]
            if any(values.get(tuple(line[name] for name in WHAT)) not in (None, line["value"]) for line in before):
                # Differences of the earlier values are wrong now.
                measurements = [line for line in measurements if not _is_difference_of(key, line)]
            measurements = [line for line in measurements if not is_replaced(line)]
            self._write([*measurements, *new], [*(r for r in runs if key_of(r) != key), named | run])

    def replace_differences(self, grid: str, keys: Collection[Key], found: Iterable[Measurement]) -> None:
        """Replace the recorded differences between runs of a grid by `found`; `keys` are the compared runs."""
        new = [line_of({"grid": grid} | one) for one in found]
        columns = (*KEY, "reference", "task", "metric")
        identities = {tuple(line.get(name, "") for name in columns) for line in new}

        def is_compared(row: str, seed: str) -> bool:
            return not {(grid, row, seed), (grid, row, "")}.isdisjoint(keys)

        def is_replaced(line: Line) -> bool:
            if line["grid"] != grid or line["kind"] != "difference":
                return False
            both = all(is_compared(line[name], line["seed"]) for name in ("row", "reference"))
            return both or tuple(line[name] for name in columns) in identities

        with self.lock:
            measurements, runs = self.read()
            self._write([*(line for line in measurements if not is_replaced(line)), *new], runs)

    def _write(self, *tables: list[Line]) -> None:
        """Write the results file and the file of runs, sorted by grid, row and seed."""
        for (path, columns), lines in zip(self.paths.items(), tables, strict=True):
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines, key=lambda line: (*key_of(line), line.get("kind", ""))))
            write_text(path, text.getvalue())


def runs_path(results: Path) -> Path:
    """Return the path of runs.csv beside a results file; NAME.runs.csv if the results file has another name."""
    return results.with_name("runs.csv" if results.name == "results.csv" else f"{results.stem}.runs.csv")


def key_of(line: Mapping[str, str]) -> Key:
    """Return grid, row and seed of a line of the results file or of runs.csv."""
    return tuple(line[name] for name in KEY)


def _is_difference_of(key: Key, line: Line) -> bool:
    """Return whether a line is a difference of the run `key` from another run, or of another run from it."""
    grid, row, seed = key
    is_seed = not seed or line["seed"] in (seed, MEAN)
    return line["kind"] == "difference" and line["grid"] == grid and row in (line["row"], line["reference"]) and is_seed


def line_of(values: Measurement) -> Line:
    """Convert a measurement to a line of the results file: floats with seven digits, None as an empty string."""
    return {
        name: "" if value is None or value != value else f"{value:.7g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


# --- paired differences -----------------------------------------------------------------------------------------------


def save_scores(scores: Mapping[str, PairScores], path: Path) -> None:
    """Write the cosines and gold scores of all pairs of each task to a .npz file."""
    arrays: dict[str, Any] = {
        f"{task}/{name}": getattr(of, name) for task, of in scores.items() for name in ("cosine", "gold")
    }
    write_file(path, lambda file: np.savez_compressed(file, **arrays))


def save_queries(values: Mapping[str, Sequence[float]], path: Path) -> None:
    """Write nDCG@10 × 100 of all queries of each task to a .npz file."""
    arrays: dict[str, Any] = {name: np.array(of) for name, of in values.items()}
    write_file(path, lambda file: np.savez_compressed(file, **arrays))


class Cached(NamedTuple):
    """Cached scores of a run by task: cosines and gold scores of pairs, and nDCG@10 × 100 of queries."""

    pairs: dict[str, PairScores]
    queries: dict[str, np.ndarray[Any, Any]]


def load_cached(folder: Path) -> Cached:
    """Read the cached scores of a run directory. They are empty if a cache file is missing or damaged."""
    pairs, queries = _arrays(folder / SCORES), _arrays(folder / QUERIES)
    tasks = dict.fromkeys(key.rpartition("/")[0] for key in pairs)
    scores = {task: PairScores(pairs[f"{task}/cosine"], pairs[f"{task}/gold"]) for task in tasks}
    return Cached(scores, queries)


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of a .npz file. They are empty if the file is missing or damaged."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except Exception as error:  # damaged files raise errors of zlib, zipfile and numpy
        print(f"no paired intervals: {path} cannot be read ({error!r}). Remove it, or measure its row with --again.")
        return {}


def differences(
    rows: Iterable[Experiment], measured: Iterable[Line], cached: Mapping[Any, Cached]
) -> list[Measurement]:
    """Return the differences in Spearman and nDCG@10 between each row and its reference with the same seed, by task.

    Further differences are in the average of Spearman over the published tasks and over files of scored pairs, and in
    the mean of nDCG@10 over several seeds, with an interval over queries. A row without a seed is compared with every
    seed of its reference, and a row with seeds with a reference without a seed.

    `measured` are the lines of the results file of the grid, including known differences. `cached` maps the key of a run
    to its cached scores.
    """
    values: dict[Any, dict[tuple[str, str], Line]] = {}
    known: dict[Any, Line] = {}
    for line in measured:
        kind, task, metric = line["kind"], line["task"], line["metric"]
        if kind == "difference":
            known[line["row"], line["reference"], line["seed"], task, metric] = line
        elif (
            (kind, metric) in (("sts", "spearman"), ("retrieval", DIFFERED))
            and line["value"]
            and task not in ("average", FILES)
        ):
            values.setdefault((line["row"], line["seed"]), {})[task, metric] = line
    found: list[Measurement] = []
    pairs: dict[tuple[str, str], list[tuple[dict[tuple[str, str], float], Cached, Cached]]] = {}
    for ours, theirs in itertools.permutations(rows, 2):
        (_, row, seed), (_, other, other_seed) = ours.key, theirs.key
        if other != ours.reference or other == row or (seed and other_seed and seed != other_seed):
            continue
        one, two = values.get((row, seed), {}), values.get((other, other_seed), {})
        by_task = {
            key: float(one[key]["value"]) - float(two[key]["value"])
            for key in one
            if key in two and all(one[key][same] == two[key][same] for same in ("text", "n"))
        }
        couple = cached[ours.key], cached[theirs.key]
        averages = {
            "average": [task for task in PUBLISHED_TASKS if (task, "spearman") in by_task],
            FILES: [task for task, metric in by_task if one[task, metric]["text"] == "file"],
        }
        averages = {name: tasks for name, tasks in averages.items() if len(tasks) > 1}
        for name, tasks in averages.items():
            by_task[name, "spearman"] = float(np.mean([by_task[task, "spearman"] for task in tasks]))
        found += _with_intervals((row, other, seed or other_seed), by_task, averages, *couple, known)
        if seed:
            pairs.setdefault((row, other), []).append((by_task, *couple))
    for (row, other), seeds in pairs.items():
        of_seeds, ours_of, theirs_of = zip(*seeds, strict=True)
        common = [key for key in of_seeds[0] if key[1] == DIFFERED and all(key in one for one in of_seeds)]
        if common and len(seeds) > 1:
            means = {key: float(np.mean([one[key] for one in of_seeds])) for key in common}
            both = _mean_queries(ours_of), _mean_queries(theirs_of)
            found += _with_intervals((row, other, MEAN), means, {}, *both, known)
    return found


def _with_intervals(
    key: tuple[str, str, str],
    by_task: Mapping[tuple[str, str], float],
    averages: Mapping[str, Sequence[str]],
    ours: Cached,
    theirs: Cached,
    known: Mapping[Any, Line],
) -> list[Measurement]:
    """Return the differences of a row from its reference as measurements, with intervals where they are known.

    The intervals are computed from the cached scores of both rows, or read from lines of the results file (`known`).
    `key` is row, reference and seed. `by_task` are the differences by task and metric, `averages` the tasks of each
    average.
    """
    found, paired = [], _paired(ours, theirs, averages)
    for (task, metric), value in by_task.items():
        plain = measurement("difference", task, metric, value, n=len(averages.get(task, ())) or None)
        # Cached scores and known lines of a model that was trained again have another value, and are not used.
        candidates = (paired.get((task, metric)), known.get((*key, task, metric)), plain)
        best = next(c for c in candidates if c and math.isclose(float(c["value"]), value, rel_tol=0, abs_tol=SAME))
        found.append(dict(zip(("row", "reference", "seed"), key, strict=True)) | best | {"n": plain["n"]})
    return found


def _mean_queries(seeds: Sequence[Cached]) -> Cached:
    """Average the cached score of each query over seeds; skip tasks whose number of queries differs between seeds."""
    values = {task: [one.queries[task] for one in seeds if task in one.queries] for task in seeds[0].queries}
    same = {task: of for task, of in values.items() if len(of) == len(seeds) and len({*map(len, of)}) == 1}
    return Cached({}, {task: np.mean(of, axis=0) for task, of in same.items()})


def _paired(ours: Cached, theirs: Cached, averages: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], Measurement]:
    """Return (task, metric) → paired difference of two runs with interval, for tasks with the same pairs or queries."""
    common = [task for task in ours.pairs if task in theirs.pairs]
    alone = [task for task in common if not any(task in tasks for tasks in averages.values())]
    found: dict[str, Any] = {}
    for name, tasks in {**averages, "": alone}.items():
        pairs = [{task: of.pairs[task] for task in tasks if task in common} for of in (ours, theirs)]
        try:
            compared = compare(*pairs, averaged=tasks) if pairs[0] else None
        except ValueError as error:
            print(f"no paired intervals: {error}")
            compared = None
        if compared is not None:
            found |= compared.tasks | ({name: compared.average} if name else {})
    queries = {
        task: mean_difference(ours.queries[task], theirs.queries[task], stream=task)
        for task in ours.queries
        if task in theirs.queries and len(ours.queries[task]) == len(theirs.queries[task])
    }
    return {
        (task, metric): measurement("difference", task, metric, of.difference, of.interval, p=of.p_value)
        for metric, tasks in (("spearman", found), (DIFFERED, queries))
        for task, of in tasks.items()
    }
