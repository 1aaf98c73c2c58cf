"""Measurements of an encoder as rows of the results file, and paired differences between two rows of a grid.

A measurement is a dict with some of these columns; the runner adds grid, row and seed:

    kind, task, text       sts, saturation, transfer, retrieval, nested or training; the set; its text variant
    metric, value          × 100, except losses, counts and cosines
    low, high              95 % interval over the pairs or queries; quartiles where the metric is a cosine
    n                      pairs, queries or test rows
    reference, p           of a paired difference (kind `difference`): the row subtracted, and its two-sided p-value
    note                   why a value does not exist

The scores of all pairs go to a local cache, runs/GRID/NAME/scores.npz. Two rows whose scores are both cached are compared
pair by pair on common bootstrap resamples. Without the cache a difference has no interval, or keeps the known one.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from ablation_grid import Experiment, Measures, NestedMeasure, below
from filelock import FileLock

from angle_llm.config import DataSource, settings_to_dict
from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import DataError, ScoredPair
from angle_llm.evaluate import (
    PUBLISHED_TASKS,
    Interval,
    PairScores,
    StsPair,
    StsTask,
    compare,
    evaluate,
    evaluate_retrieval,
    evaluate_transfer,
    read_flickr30k,
    read_groups,
    read_transfer_task,
    select_tasks,
)
from angle_llm.evaluate.nested import quality_curve
from angle_llm.evaluate.saturation import saturation
from angle_llm.io import write_file, write_text
from angle_llm.model.encoder import SentenceEncoder

Measurement = dict[str, Any]
KEY = ("grid", "row", "seed")
MEASUREMENTS = (*KEY, "kind", "task", "text", "metric", "value", "low", "high", "n", "reference", "p", "note")
RUNS_COLUMNS = (*KEY, "label", "date", "commit", "machine", "versions", "command", "settings", "measures")
Line = dict[str, str]
Key = tuple[str, ...]
BY_SCORE = ("stsb", "stsb-dev", "mrpc", "issues")
"""Tasks whose cosines are also summarised by gold score."""
SCORE_BINS = 5
SAME = 1e-2
"""Two values (× 100) of one measurement differ by less, those of two trainings by more."""


def measurement(
    kind: str, task: str, metric: str, value: float | None, interval: Interval | None = None, **more: Any
) -> Measurement:
    """One row; a value that does not exist is None."""
    ends = {} if interval is None else {"low": interval.low, "high": interval.high}
    return {"kind": kind, "task": task, "metric": metric, "value": value, **ends, **more}


def asked(measures: Measures) -> dict[str, dict[str, Any]]:
    """Kind → what the grid asks for; recorded with the result, to recognise measurements on other data."""
    given = {name: _stated(value) for name, value in vars(measures).items()}
    keys = {
        "sts": ("sts", "pairs", "variant"),
        "saturation": ("saturation",),
        "transfer": ("transfer", "transfer_limit", "transfer_drop_repeated"),
        "retrieval": ("retrieval",),
        "nested": ("nested", "variant"),
    }
    wanted = {kind: {key: given[key] for key in keys[kind] if given[key]} for kind in keys}
    return {kind: what for kind, what in wanted.items() if {*what} - {"variant"}}


def _stated(value: Any) -> Any:
    """Plain values; of a data source those that differ from its defaults."""
    if isinstance(value, DataSource):
        return {key: it for key, it in settings_to_dict(value).items() if it != settings_to_dict(DataSource())[key]}
    if isinstance(value, NestedMeasure):
        return settings_to_dict(value)
    if isinstance(value, dict):
        return {key: _stated(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def measure(encoder: SentenceEncoder, measures: Measures, kind: str, data_dir: Path, scores: Path) -> list[Measurement]:
    """Measurements of one kind; `scores` is the cache file for the pairs of the kind `sts`."""
    return list(KINDS[kind](encoder, measures, data_dir, scores))


def _sts(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    tasks = select_tasks(measures.sts, data_dir, measures.variant) if measures.sts else []
    tasks = [*tasks, *(_pairs_task(name, source, data_dir) for name, source in measures.pairs.items())]
    results = evaluate(_encode(encoder), tasks, resamples=1000)
    save_scores(results.scores, scores)
    for name, task in results.tasks.items():
        common: dict[str, Any] = {"text": task.text, "n": task.pairs}
        yield measurement("sts", name, "spearman", task.spearman, task.interval, note=task.undefined, **common)
        yield measurement("sts", name, "pearson", task.pearson, **common)
        for metric, mean in (
            ("spearman, mean of subtasks", task.mean_over_subtasks),
            ("spearman, weighted mean of subtasks", task.weighted_mean_over_subtasks),
        ):
            if mean is not None:
                yield measurement("sts", name, metric, mean.spearman, **common)
        if name in BY_SCORE:
            yield from _by_score(name, task.scores)
    over = len(results.averaged)
    if over > 1:
        yield measurement("sts", "average", "spearman", results.average, results.average_interval, n=over)


def _pairs_task(name: str, source: DataSource, data_dir: Path) -> StsTask:
    examples = load_examples(replace(source, path=below(source.path, data_dir))).examples
    pairs = tuple(StsPair(e.left, e.right, e.score) for e in examples if isinstance(e, ScoredPair))
    if not pairs:
        raise DataError(f"{source.path} holds no scored pairs. Set `format: scored_pair`.")
    return StsTask(name=name, label=name, variant="file", source=source.path, pairs=pairs)


def _by_score(task: str, scores: PairScores) -> Iterator[Measurement]:
    """Mean and quartiles of the cosine in five equal ranges of the gold score."""
    edges = np.linspace(scores.gold.min(), scores.gold.max(), SCORE_BINS + 1)
    bins_P = np.clip(np.searchsorted(edges, scores.gold, side="right") - 1, 0, SCORE_BINS - 1)
    for index in range(SCORE_BINS):
        cosine = scores.cosine[bins_P == index]
        if len(cosine):
            low, high = np.quantile(cosine, [0.25, 0.75])
            metric = f"cosine at score {edges[index]:g} to {edges[index + 1]:g}"
            yield {**measurement("sts", task, metric, cosine.mean()), "low": low, "high": high, "n": len(cosine)}


def _saturation(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    assert measures.saturation is not None
    source = replace(measures.saturation, path=below(measures.saturation.path, data_dir))
    examples = load_examples(source).examples
    texts = TextBatch.from_examples(examples).texts
    rows_ND = torch.from_numpy(_encode(encoder)(texts))
    found = saturation(dict(zip(texts, rows_ND, strict=True)), examples)
    edges = found["edges"]
    for name, shares in {"pairs": found["pairs"], **found["terms"]}.items():
        for low, high, share in zip(edges, edges[1:], shares, strict=False):
            yield measurement("saturation", name, f"% at cosine {low:g} to {high:g}", 100 * share)
        yield measurement("saturation", name, "% at |cosine| >= 0.9", 100 * found["saturated"][name])


def _transfer(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    results = evaluate_transfer(
        _encode(encoder),
        [read_transfer_task(data_dir, name) for name in measures.transfer],
        limit_train=measures.transfer_limit,
        drop_repeated=measures.transfer_drop_repeated,
    )
    for name, task in results.tasks.items():
        n = task.rows.get("test", task.rows.get("all"))
        yield measurement("transfer", name, "accuracy", task.accuracy, task.interval, n=n)
        for metric in ("f1", "majority", "repeated", "dropped", "unconverged"):
            if getattr(task, metric) is not None:
                yield measurement("transfer", name, metric, getattr(task, metric))
        for split, rows in task.rows.items():
            yield measurement("transfer", name, f"rows {split}", rows)
    yield measurement("transfer", "average", "accuracy", results.average, n=len(results.tasks))


def _retrieval(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    name = measures.retrieval
    assert name is not None
    task = read_flickr30k(data_dir) if name == "flickr30k" else read_groups(below(name, data_dir))
    for task_name, found in evaluate_retrieval(_encode(encoder), [task]).tasks.items():
        for metric, figure in found.figures.items():
            yield measurement("retrieval", task_name, metric, figure.value, figure.interval, n=found.queries)
        yield measurement("retrieval", task_name, "candidates", found.candidates)


def _nested(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    nested = measures.nested
    assert nested is not None
    tasks = select_tasks(nested.tasks, data_dir, measures.variant)
    for point in quality_curve(encoder, tasks, layers=nested.layers, dimensions=nested.dimensions):
        metric = f"spearman, {point.layers} layers, {point.dimensions} dimensions"
        yield measurement("nested", "+".join(nested.tasks), metric, point.mean)


KINDS = {"sts": _sts, "saturation": _saturation, "transfer": _transfer, "retrieval": _retrieval, "nested": _nested}


def _encode(encoder: SentenceEncoder) -> Callable[[Sequence[str]], Any]:
    return lambda texts: encoder.encode(texts, show_progress=True)


def save_scores(scores: Mapping[str, PairScores], path: Path) -> None:
    """Write the cosines and gold scores of all pairs, by task."""
    arrays = {f"{task}/{name}": array for task, of in scores.items() for name, array in of._asdict().items()}
    write_file(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def load_scores(path: Path) -> dict[str, PairScores]:
    """Cached scores by task; empty if there is no cache or it is damaged."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tasks = dict.fromkeys(key.split("/")[0] for key in arrays.files)
            return {task: PairScores(arrays[f"{task}/cosine"], arrays[f"{task}/gold"]) for task in tasks}
    except Exception as error:  # damaged bytes raise whatever zlib, zipfile or numpy meet first
        print(f"no paired intervals: {path} cannot be read ({error!r}). Remove it, or measure its row with --again.")
        return {}


def differences(
    rows: Iterable[Experiment], measured: Iterable[Measurement], scores: Mapping[Any, Mapping[str, PairScores]]
) -> list[Measurement]:
    """Spearman of each row minus that of its reference with the same seed, by task and on average over the published tasks.

    A row without training is compared with each seed of its reference, and the other way round. `measured` are the lines of the
    results file about the grid, the differences known so far among them; `scores` the cached scores by key.
    """
    values: dict[Any, dict[str, Measurement]] = {}
    known: dict[Any, Measurement] = {}
    for line in measured:
        if line["kind"] == "difference":
            known[line["row"], line["seed"], line["reference"], line["task"]] = line
        elif line["kind"] == "sts" and line["metric"] == "spearman" and line["value"] and line["task"] != "average":
            values.setdefault((line["row"], line["seed"]), {})[line["task"]] = line
    found = []
    for ours, theirs in itertools.permutations(rows, 2):
        (_, row, seed), (_, other, other_seed) = ours.key, theirs.key
        if other != ours.reference or other == row or (seed and other_seed and seed != other_seed):
            continue
        one, two = values.get((row, seed), {}), values.get((other, other_seed), {})
        by_task = {
            task: float(one[task]["value"]) - float(two[task]["value"])
            for task in one
            if task in two and all(one[task][same] == two[task][same] for same in ("text", "n"))
        }
        averaged = [task for task in PUBLISHED_TASKS if task in by_task]
        if len(averaged) > 1:
            by_task["average"] = float(np.mean([by_task[task] for task in averaged]))
        paired = _paired(scores[ours.key], scores[theirs.key])
        key = {"row": row, "seed": seed or other_seed, "reference": other}
        for task, value in by_task.items():
            plain = measurement("difference", task, "spearman", value, n=len(averaged) if task == "average" else None)
            # Cached scores and known lines may belong to another training; then their value differs.
            candidates = (paired.get(task), known.get((row, key["seed"], other, task)), plain)
            best = next(c for c in candidates if c and math.isclose(float(c["value"]), value, rel_tol=0, abs_tol=SAME))
            found.append(key | best | {"n": plain["n"]})
    return found


def _paired(ours: Mapping[str, PairScores], theirs: Mapping[str, PairScores]) -> dict[str, Measurement]:
    """Paired differences by task from cached scores; empty if they are of different pairs."""
    if not ours.keys() & theirs.keys():
        return {}
    try:
        compared = compare(ours, theirs)
    except ValueError as error:
        print(f"no paired intervals: {error}")
        return {}
    found = compared.tasks | ({"average": compared.average} if compared.average else {})
    return {
        task: measurement("difference", task, "spearman", of.difference, of.interval, p=of.p_value)
        for task, of in found.items()
    }


class Results:
    """The results file (one line per measurement) and runs.csv beside it (one line per run: grid, row, seed).

    Every change rewrites both files atomically and under a lock, so several runners may share them.
    """

    def __init__(self, path: Path) -> None:
        self.paths = {path: MEASUREMENTS, path.with_name("runs.csv"): RUNS_COLUMNS}
        self.lock = FileLock(f"{path}.lock")

    def read(self) -> tuple[list[Line], list[Line]]:
        """All measurements, all runs."""
        lines = [
            list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))) if path.is_file() else []
            for path in self.paths
        ]
        return lines[0], lines[1]

    def of(self, key: Key) -> tuple[list[Line], Line | None]:
        """Measurements of one run, and the run itself."""
        measurements, runs = self.read()
        return [m for m in measurements if key_of(m) == key], next((run for run in runs if key_of(run) == key), None)

    def record(self, key: Key, run: Line, found: Iterable[Measurement]) -> None:
        """Add measurements of a run. Its earlier ones of the same kinds, or of kinds `run` does not list, are removed."""
        new = [line_of(dict(zip(KEY, key, strict=True)) | one) for one in found]
        keep = {*yaml.safe_load(run["measures"]), "difference"} - {one["kind"] for one in new}
        with self.lock:
            measurements, runs = self.read()
            measurements = [m for m in measurements if key_of(m) != key or m["kind"] in keep]
            runs = [r for r in runs if key_of(r) != key]
            self._write([*measurements, *new], [*runs, dict(zip(KEY, key, strict=True)) | run])

    def replace_differences(self, grid: str, found: Iterable[Measurement]) -> None:
        """Replace the differences of a grid."""
        with self.lock:
            measurements, runs = self.read()
            rest = [m for m in measurements if m["grid"] != grid or m["kind"] != "difference"]
            self._write([*rest, *(line_of({"grid": grid} | one) for one in found)], runs)

    def _write(self, *tables: list[Line]) -> None:
        for (path, columns), lines in zip(self.paths.items(), tables, strict=True):
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines, key=lambda line: (*key_of(line), line.get("kind", ""))))
            write_text(path, text.getvalue())


def key_of(line: Mapping[str, str]) -> Key:
    return tuple(line[name] for name in KEY)


def flow(values: dict[str, Any]) -> str:
    """Plain values as YAML in one line."""
    text: str = yaml.safe_dump(values, default_flow_style=True, width=1 << 20, sort_keys=False)
    return text.strip()


def line_of(values: Measurement) -> Line:
    """A measurement as text; seven digits, and nothing for a value that does not exist."""
    return {
        name: "" if value is None or value != value else f"{value:.7g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }
