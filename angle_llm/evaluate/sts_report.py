"""STS results as Markdown and CSV; cosines of all pairs; published scores."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from angle_llm.evaluate.bootstrap import Interval, PairedDifferences
from angle_llm.evaluate.correlation import PairScores
from angle_llm.evaluate.encoding import Used
from angle_llm.evaluate.results import PublishedRow, published_table, report, table
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS
from angle_llm.io import write_text

if TYPE_CHECKING:
    from angle_llm.evaluate.sts import Correlations, StsResults

METRIC = "Spearman and Pearson correlation × 100 of cosine similarity; sub-tasks of a year concatenated"

_PUBLISHED: dict[str, tuple[float, ...]] = {
    "AnglE-LLaMA2-13B": (79.33, 90.65, 86.89, 90.45, 87.32, 89.69, 81.32, 86.52),
    "AnglE-LLaMA2-7B v2": (79.00, 90.56, 85.79, 89.43, 87.00, 88.97, 80.94, 85.96),
    "AnglE-LLaMA2-7B v1": (78.68, 90.58, 85.49, 89.56, 86.91, 88.92, 81.18, 85.90),
    "PromptEOL LLaMA-7B": (85.70,),
    "PromptEOL OPT-2.7B": (85.62,),
    "SimCSE-LLaMA2-7B": (85.24,),
    "PromptEOL OPT-1.3B": (84.79,),
    "AnglE-BERT-base": (75.09, 85.56, 80.66, 86.44, 82.47, 85.16, 81.23, 82.37),
    "sup-SimCSE-BERT-base": (81.57,),
    "LLaMA2-7B untuned, prompted": (50.66, 73.32, 62.76, 67.00, 70.98, 63.28, 67.40, 65.06),
}
PUBLISHED = tuple(
    PublishedRow(model, dict(zip(PUBLISHED_TASKS, scores, strict=False)), average)
    for model, (*scores, average) in _PUBLISHED.items()
)
"""Published Spearman × 100 over all pairs, on SentEval's text; SICK-R is the test split.

Sources: Li & Li, AnglE (arXiv 2309.12871) and the cards of its LLaMA adapters; Jiang et al. (2023), PromptEOL; Gao et
al. (2021), SimCSE. The evaluation code of AnglE and PromptEOL edits sentences only with a prompt (`--edits
published`)."""

VARIANT_MEANING = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}
EDITS_MEANING = {
    "published": "with the edits of PromptEOL and AnglE in evaluation with a prompt (a full stop is added if there is no "
    ".?\"', double quotes become single, a final ? becomes a full stop)",
}
INTERVAL = "95 % interval"


def sts_report(
    results: StsResults,
    model: str,
    remarks: Sequence[str] = (),
    *,
    comparison: PairedDifferences | None = None,
    other: str = "the other",
) -> str:
    """Return tables (published rows, Spearman, Pearson, sub-tasks, differences to `other`) and notes with `remarks`."""
    tasks = results.tasks.values()
    texts = " + ".join(dict.fromkeys(task.text for task in tasks))
    spearman, pearson, subtasks = [], [], list[list[object]]()
    for task in tasks:
        label, mean, weighted = (
            (task.label, task.text, task.pairs),
            task.mean_over_subtasks,
            task.weighted_mean_over_subtasks,
        )
        spearman.append([*label, task.spearman, task.interval, mean and mean.spearman, weighted and weighted.spearman])
        pearson.append([*label, task.pearson, mean and mean.pearson, weighted and weighted.pearson])
        for name, one in task.subtasks.items():
            subtasks.append([f"{task.label} · {name}", one.pairs, one.spearman, one.interval, one.pearson])
    if results.averaged:
        spearman.append(["average", "", "", results.average, results.average_interval, "", ""])
    tables = [
        published_table(results, model, PUBLISHED, texts),
        table(["Spearman", "text", "pairs", "all", INTERVAL, "mean", "weighted mean"], spearman, words=2),
        table(["Pearson", "text", "pairs", "all", "mean", "weighted mean"], pearson, words=2),
    ]
    if subtasks:
        tables.append(table(["sub-task", "pairs", "Spearman", INTERVAL, "Pearson"], subtasks, words=1))
    notes = [*remarks, *_notes(results)]
    if comparison:
        tables.append(_differences(comparison, results))
        notes.append(
            f"The other: {other}. Difference: this model minus the other, both on the same {comparison.resamples:,} "
            "bootstrap resamples; p: two-sided, from these resamples, not corrected for the number of rows."
        )
        if comparison.left_out:
            notes.append(f"Not compared, evaluated for only one of the models: {', '.join(comparison.left_out)}.")
    return report(model, tables, notes, results)


def _differences(comparison: PairedDifferences, results: StsResults) -> str:
    compared = {results.tasks[name].label: one for name, one in comparison.tasks.items()}
    if comparison.average:
        compared["average"] = comparison.average
    rows = []
    for label, one in compared.items():
        interval = f"{one.interval.low:+.2f} … {one.interval.high:+.2f}"
        rows.append(
            [label, one.pairs, one.spearman, one.other, f"{one.difference:+.2f}", interval, f"{one.p_value:.3g}"]
        )
    return table(["compared", "pairs", "this model", "the other", "difference", INTERVAL, "p"], rows, words=1)


def _notes(results: StsResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Correlation × 100 of cosine similarity with the gold scores. The first table has Spearman over all pairs."
    ]
    if any(task.subtasks for task in tasks):
        notes.append(
            "`all`: one correlation over the pairs of all sub-tasks, as in the published rows. `mean`: mean of "
            "the correlations of the sub-tasks; `weighted mean`: weighted by pairs. Some papers report a mean instead of `all`."
        )
    if any(task.resampled is not None for task in tasks):
        notes.append("Intervals: percentile bootstrap over pairs; they do not cover another training seed.")
    for variant, edits in dict.fromkeys((task.variant, task.edits) for task in tasks):
        also = f", {EDITS_MEANING.get(edits, edits)}" if edits else ""
        notes.append(f"Text `{variant}{', edited' if edits else ''}`: {VARIANT_MEANING.get(variant, variant)}{also}.")
    if results.averaged:
        notes.append("Published rows: SentEval's text (`senteval`), with the edits for prompted models.")
        other = [results.tasks[name].label for name in results.averaged if results.tasks[name].variant != "senteval"]
        if other:
            notes.append(f"Different text than the published rows, so not directly comparable: {', '.join(other)}.")
    for task in tasks:
        if task.official_pairs not in (None, task.pairs):
            notes.append(f"{task.label}: {task.pairs:,} pairs here, {task.official_pairs:,} in the published task.")
        parts = {task.label: task, **{f"{task.label}, {name}": one for name, one in task.subtasks.items()}}
        for label, one in parts.items():
            if one.undefined:
                notes.append(f"{label}: undefined correlation: {one.undefined}.")
            elif one.interval and math.isnan(one.interval.low):
                notes.append(f"{label}: no interval: the correlation is undefined in some resamples.")
    return notes


def read_scores(path: str | Path) -> tuple[str, dict[str, PairScores]]:
    """Return the name of the model with its settings, and cosines and gold scores by task, of a file of `--json`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: for other or damaged files.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--against: no results file at {path}; expected a model, or a file written by --json.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores = {
            name: PairScores(*(np.asarray(pairs[side], dtype=np.float64) for side in ("cosine", "gold")))
            for name, pairs in content["pairs"].items()
        }
        for name, (cosine, gold) in scores.items():
            if cosine.ndim != 1 or cosine.shape != gold.shape or not np.isfinite([cosine, gold]).all():
                raise ValueError(f"task {name!r}: expected a finite cosine and gold score of each pair")
        used = f" ({Used(**content['encoder'])})" if "encoder" in content else ""
        return f"{content['model']}{used}", scores
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--against: {path}: expected a file written by --json, with `model` and `pairs` ({type(error).__name__}: "
            f"{error}). Evaluate that model again."
        ) from error


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Write a .jsonl file, or a CSV file with the columns of the first line."""
    text = io.StringIO()
    if path.suffix == ".jsonl":
        text.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    else:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    write_text(path, text.getvalue())


def score_lines(results: StsResults, model: str) -> Iterator[dict[str, object]]:
    """Yield a line per score: `all`, `mean` and `weighted mean` of each task, each `subtask`, and the `average`."""
    columns = ("task", "subtask", "kind", "text", "pairs", "spearman", "spearman_low", "spearman_high", "pearson")
    empty = {"model": model} | dict.fromkeys((*columns, "undefined"))

    def ends(interval: Interval | None) -> dict[str, object]:
        return {} if interval is None else {"spearman_low": interval.low, "spearman_high": interval.high}

    def cells(one: Correlations) -> dict[str, object]:
        values = {key: getattr(one, key) for key in ("pairs", "spearman", "pearson", "undefined")}
        return values | ends(one.interval)

    for task in results.tasks.values():
        of_task = empty | {"task": task.name, "text": task.text}
        means = {"mean": task.mean_over_subtasks, "weighted mean": task.weighted_mean_over_subtasks}
        for kind, one in {"all": task, **means}.items():
            if one is not None:
                yield of_task | {"kind": kind} | cells(one)
        for name, one in task.subtasks.items():
            yield of_task | {"kind": "subtask", "subtask": name} | cells(one)
    if results.average is not None:
        average = {"task": " ".join(results.averaged), "kind": "average", "spearman": results.average}
        yield empty | average | ends(results.average_interval)


def pair_lines(results: StsResults, with_text: bool) -> Iterator[dict[str, object]]:
    """Yield task, sub-task, index in the task (from 0), cosine and gold score of each pair,
    and with `with_text` its sentences."""
    for task in results.tasks.values():
        for index, (pair, cosine) in enumerate(zip(task.sentences, task.scores.cosine.tolist(), strict=True)):
            line = {"task": task.name, "subtask": pair.subtask, "index": index, "cosine": cosine, "gold": pair.score}
            yield line | {"sentence1": pair.sentence1, "sentence2": pair.sentence2} if with_text else line
