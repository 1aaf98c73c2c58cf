"""STS evaluation: Spearman and Pearson correlation of cosine similarity with gold scores.

    distinct sentences of all tasks ──► encode ──► E (N, D) ──► cosine of each pair ──► correlations of each task

Contents, in order: published scores, result types, `evaluate`, the command, its report, saved scores.

Correlations are × 100. An undefined correlation is NaN with a reason; vectors that are not finite raise an error.

A task with sub-tasks has three scores, and papers differ in which they report: `all` (one correlation over all pairs:
SimCSE, PromptEOL, AnglE), the mean over sub-tasks, and the mean weighted by pairs (SemEval 2012 to 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.evaluate.bootstrap import (
    Floats,
    Interval,
    PairedDifferences,
    PairScores,
    UndefinedCorrelationError,
    compare,
    pearson,
    percentile_interval,
    spearman_of,
)
from angle_llm.evaluate.encoding import (
    RESAMPLES,
    Encode,
    EncodedTexts,
    EncoderFacts,
    check_names,
    encode_functions,
    encode_sides,
    evaluate_model,
    write_results,
)
from angle_llm.evaluate.results import (
    PublishedRow,
    Results,
    TaskResult,
    difference_cells,
    published_table,
    read_results,
    report,
    table,
)
from angle_llm.evaluate.sts_tasks import (
    PUBLISHED_TASKS,
    TABLE,
    StsTask,
    read_pairs,
    select_tasks,
    texts_of_pairs,
    with_published_edits,
)
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.settings.commands import StsEvalSettings

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

METRIC = "Spearman and Pearson correlation × 100 of cosine similarity; sub-tasks of a year concatenated"

PUBLISHED = tuple(
    PublishedRow(model, dict(zip(PUBLISHED_TASKS, scores, strict=False)), average)
    for model, (*scores, average) in TABLE["published"].items()
)
"""Published scores of models on STS tasks: Spearman × 100 over all pairs, on SentEval's text."""


# --------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """Spearman and Pearson correlation × 100 of cosine similarity with gold scores, and the 95 % interval of Spearman.

    `pairs` is the number of sentence pairs. Undefined correlations are NaN, and `undefined` is the reason. The interval
    is None if no bootstrap resamples were computed.
    """

    pairs: int
    spearman: float
    pearson: float
    undefined: str | None = None
    interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class StsTaskResult(Correlations, TaskResult):
    """Correlations of an STS task: over all sentence pairs, of its sub-tasks by name, and means over the sub-tasks.

    `text` is the text variant in tables, such as `senteval` or `senteval, edited`. The weighted mean is weighted by
    numbers of pairs. Both means are None without sub-tasks, and NaN if the correlation of a sub-task is NaN. `scores`
    has the cosine and gold score of each pair; comparisons of results and the JSON content of the task exclude
    `scores`.
    """

    metric = "spearman"

    variant: str
    edits: str
    digest: str
    text: str
    official_pairs: int | None
    subtasks: dict[str, Correlations]
    mean_over_subtasks: Correlations | None
    weighted_mean_over_subtasks: Correlations | None
    scores: PairScores = field(compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `scores` (the scores of sentence pairs) as a dictionary, for the JSON file."""
        return {name: value for name, value in super().to_dict().items() if name != "scores"}


class StsResults(Results[StsTaskResult]):
    """Results of an STS evaluation by task name. For the interval of the average, tasks are resampled independently."""

    @property
    def scores(self) -> dict[str, PairScores]:
        """Cosine similarities and gold scores of the sentence pairs by task name, as `compare` takes them."""
        return {name: task.scores for name, task in self.tasks.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return all results as a dictionary for the JSON file.

        The entry `pairs` has the cosine similarities and gold scores that `read_scores` reads.
        """
        return {
            **super().to_dict(),
            "pairs": {
                name: {"cosine": scores.cosine.tolist(), "gold": scores.gold.tolist()}
                for name, scores in self.scores.items()
            },
        }


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluate(
    encode: Encode, tasks: Sequence[StsTask], *, encode_document: Encode | None = None, resamples: int = 0
) -> StsResults:
    """Evaluate an encoder on STS tasks: the correlation of cosine similarity with gold scores.

    `encode` is called once, with the distinct sentences of all tasks. With `encode_document`, first sentences are queries
    and second sentences are documents, as in training. Each Spearman correlation has a 95 % interval from `resamples`
    bootstrap resamples of the pairs; 0: no intervals.

    Raises:
        ValueError: for no tasks, equal task names, or if a function does not return one finite row per sentence.
    """
    check_names([task.name for task in tasks])
    pairs = [pair for task in tasks for pair in task.pairs]
    encoded = encode_sides(encode, encode_document, *texts_of_pairs(pairs, one_prompt=encode_document is None))
    results: dict[str, StsTaskResult] = {}
    resampled: dict[str, Floats] = {}
    for task in tasks:
        results[task.name], resampled[task.name] = _evaluate_task(encoded, task, resamples)
    averaged = [resampled[name] for name in PUBLISHED_TASKS if name in resampled]
    interval = percentile_interval(np.mean(averaged, axis=0)) if resamples and averaged else None
    return StsResults(results, PUBLISHED_TASKS, **encoded.facts(), average_interval=interval)


def evaluate_defined(encode: Encode, encode_document: Encode | None, task: StsTask) -> StsTaskResult:
    """Evaluate an encoder on one STS task, without confidence intervals; an undefined correlation is an error.

    `encode` and `encode_document` are the functions for queries and documents; None: `encode` for both.

    Raises:
        UndefinedCorrelationError: with the reason, instead of a result of NaN.
    """
    result = evaluate(encode, [task], encode_document=encode_document).tasks[task.name]
    if result.undefined:
        raise UndefinedCorrelationError(f"{task.source}: undefined Spearman correlation: {result.undefined}.")
    return result


def sts_score(pairs: str | Path | StsTask, *, instructions: bool = True) -> Callable[[SentenceEncoder], float]:
    """Return a function from an encoder to its Spearman × 100 on a file of scored sentence pairs, or on an STS task.

    The file is read before the function is returned. With `instructions` False, instructions of the pairs are not used. The
    function raises `UndefinedCorrelationError` with the reason instead of returning NaN.
    """
    task = pairs if isinstance(pairs, StsTask) else read_pairs(pairs)
    if not instructions:
        task = replace(task, pairs=tuple(pair._replace(instruction="") for pair in task.pairs))
    return lambda encoder: evaluate_defined(*encode_functions(encoder), task).spearman


def _evaluate_task(encoded: EncodedTexts, task: StsTask, resamples: int) -> tuple[StsTaskResult, Floats]:
    """Return the result of an STS task, and its Spearman × 100 in each of B bootstrap resamples (B,).

    The resampled correlations are over all pairs of the task. `encoded` has the embeddings of the sentences.
    """
    one_prompt = encoded.row_of["query"] is encoded.row_of["document"]  # of `encode_sides` without `encode_document`
    firsts, seconds = texts_of_pairs(task.pairs, one_prompt=one_prompt)
    left_PD, right_PD = unit_rows(encoded.rows(firsts)), unit_rows(encoded.rows(seconds, "document"))
    subtask_P = np.array([pair.subtask for pair in task.pairs])
    scores = PairScores(
        cosine=np.einsum("pd,pd->p", left_PD, right_PD),
        gold=np.array([pair.score for pair in task.pairs], dtype=np.float64),
        subtask=subtask_P if any(subtask_P) else None,
    )
    whole, resampled_B = _correlations(scores, resamples, task.name)
    subtasks = {}
    for name, part in scores.by_subtask().items():
        subtasks[name], _ = _correlations(part, resamples, f"{task.name}/{name}")
    result = StsTaskResult(
        **vars(whole),
        **{key: value for key, value in vars(task).items() if key != "pairs"},  # `pairs` of a result is a number
        digest=task.digest,
        text=task.text,
        subtasks=subtasks,
        mean_over_subtasks=_mean(subtasks, weighted=False),
        weighted_mean_over_subtasks=_mean(subtasks, weighted=True),
        scores=scores,
    )
    return result, resampled_B


def _correlations(scores: PairScores, resamples: int, stream: str) -> tuple[Correlations, Floats]:
    """Return the correlations of scored pairs, and Spearman × 100 in each of B bootstrap resamples (B,)."""
    spearman, resampled_B, undefined = spearman_of(scores, resamples, stream)
    correlations = Correlations(
        pairs=len(scores.gold),
        spearman=spearman,
        pearson=math.nan if undefined else 100 * pearson(scores.cosine, scores.gold),
        undefined=undefined and f"cosines (first) and gold scores (second): {undefined}",
        interval=percentile_interval(resampled_B) if resamples else None,
    )
    return correlations, resampled_B


def _mean(subtasks: dict[str, Correlations], weighted: bool) -> Correlations | None:
    """Return the mean correlations over the sub-tasks of an STS task, weighted by their numbers of pairs if `weighted`.

    The result is None without sub-tasks.
    """
    if not subtasks:
        return None
    pairs = [part.pairs for part in subtasks.values()]
    correlations = [(part.spearman, part.pearson) for part in subtasks.values()]
    spearman, pearson = np.average(correlations, axis=0, weights=pairs if weighted else None).tolist()
    return Correlations(pairs=sum(pairs), spearman=spearman, pearson=pearson)


# --------------------------------------------------------------------------------------------------------- command


def sts_main(settings: StsEvalSettings) -> StsResults:
    """Run `angle-llm eval sts`: evaluate the model, compare it with the `--against` model, print and write the results.

    Data and output paths are checked before a model is opened. With `--against`, one model is in memory at a time. If the
    comparison fails, the results of the model are printed and written before the error.
    """
    # Tasks, and stored scores to compare with.
    tasks = select_tasks(settings.tasks, settings.data_dir, settings.variant, settings.columns, settings.score_range)
    if settings.edits == "published":
        tasks = [with_published_edits(task) for task in tasks]
    against = settings.against
    other_name = ""  # of the second model, in the report
    theirs = None
    remarks: list[str] = []
    if against is not None and against.endswith(".json"):
        their_model, theirs, their_digests = read_scores(against)
        other_name = f"{their_model}, {against}"
        if differ := [task.name for task in tasks if their_digests.get(task.name, task.digest) != task.digest]:
            remarks.append(
                f"Not comparable, because {against} has other sentences (files, columns, --variant, --edits): "
                f"{', '.join(differ)}."
            )

    # Evaluate, compare, report.
    results, facts = evaluate_model(settings, settings.model, evaluate, tasks, resamples=RESAMPLES)
    comparison = None

    def write() -> None:
        text = sts_report(results, settings.model, [str(facts), *remarks], comparison=comparison, other=other_name)
        write_results(settings, METRIC, text, results.to_dict() | {"comparison": comparison}, facts)

    try:
        if against is not None:
            if theirs is None:
                their_results, their_facts = evaluate_model(settings, against, evaluate, tasks)
                other_name = f"{against} ({their_facts})"
                theirs = their_results.scores
            comparison = compare(results.scores, theirs)
    except Exception:  # not on Ctrl-C: a program that resumes must not take incomplete results for complete ones
        write()
        raise
    write()
    return results


# ---------------------------------------------------------------------------------------------------------- report

_INTERVAL = "95 % interval"


def sts_report(
    results: StsResults,
    model: str,
    remarks: Sequence[str] = (),
    *,
    comparison: PairedDifferences | None = None,
    other: str = "",
) -> str:
    """Return the Markdown report of an STS evaluation: tables, then notes that start with `remarks`.

    The tables are published scores, the correlations of tasks, sub-tasks and means over sub-tasks, and differences from
    the second model, if `comparison` is given. `model` and `other` are the names of the two models.
    """
    # Published scores, and all correlations.
    rows: list[list[object]] = [
        [label, task.text, part.pairs, part.spearman, part.interval, part.pearson]
        for task in results.tasks.values()
        for label, part in _parts(task).items()
    ]
    if results.averaged:
        rows.append(["average", "", "", results.average, results.average_interval, ""])
    tables = [
        published_table(results, model, PUBLISHED),
        table(["task", "text", "pairs", "Spearman", _INTERVAL, "Pearson"], rows, words=2),
    ]
    notes = [*remarks, *_notes(results)]
    # Differences from the compared model.
    if comparison:
        compared = {results.tasks[name].label: difference for name, difference in comparison.tasks.items()}
        compared |= {f"{results.tasks[name].label}, mean": difference for name, difference in comparison.means.items()}
        if comparison.average:
            compared["average"] = comparison.average
        rows = [
            [label, difference.items, difference.value, *difference_cells(difference)]
            for label, difference in compared.items()
        ]
        header = ["compared", "pairs", "this model", "other model", "difference", _INTERVAL, "p"]
        tables.append(table(header, rows, words=1))
        notes.append(
            f"Other model: {other}. Difference: this model minus the other model, on the same bootstrap resamples. p: "
            "two-sided, from these resamples, not corrected for the number of rows."
        )
        if comparison.left_out:
            notes.append(f"Not compared, because only one model has scores: {', '.join(comparison.left_out)}.")
    return report(model, tables, notes, results)


def _parts(task: StsTaskResult) -> dict[str, Correlations]:
    """Return the correlations of a task, of its sub-tasks, and means over its sub-tasks, by their label in the report."""
    parts = {task.label: task, **{f"{task.label} · {name}": part for name, part in task.subtasks.items()}}
    if task.mean_over_subtasks and task.weighted_mean_over_subtasks:
        parts[f"{task.label}, mean"] = task.mean_over_subtasks
        parts[f"{task.label}, weighted mean"] = task.weighted_mean_over_subtasks
    return parts


def _notes(results: StsResults) -> list[str]:
    """Return the notes of an STS report: meaning of the scores, text variants, differences from the published tasks."""
    # How to read the tables.
    tasks = results.tasks.values()
    notes = [
        "Correlation × 100 of cosine similarity with the gold scores, over all pairs of a task as in the published rows. "
        "Mean and weighted mean (by pairs) are over the sub-tasks; some papers report a mean. Intervals: percentile "
        "bootstrap over pairs; they do not cover another training seed."
    ]
    # Texts of the tasks.
    if results.averaged:
        notes.append(
            "Published rows: SentEval's text (--variant senteval), with --edits published for prompted models. Scores on "
            "other texts are not directly comparable."
        )
    # Numbers of pairs, and correlations that are undefined.
    for task in tasks:
        if task.official_pairs not in (None, task.pairs):
            notes.append(f"{task.label}: {task.pairs:,} pairs here, {task.official_pairs:,} in the published task.")
        for label, part in _parts(task).items():
            if part.undefined:
                notes.append(f"{label}: undefined correlation: {part.undefined}.")
            elif part.interval and math.isnan(part.interval.low):
                notes.append(f"{label}: no interval: the correlation is undefined in some resamples.")
    return notes


# ---------------------------------------------------------------------------------------------------- saved scores


def read_scores(path: str | Path) -> tuple[str, dict[str, PairScores], dict[str, str]]:
    """Read a file of `eval sts --json`: return the model, and by task the scores and the digest of the sentences.

    The model is its name with prompt and pooling.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged or has other content.
    """

    def parse(content: Any) -> tuple[str, dict[str, PairScores], dict[str, str]]:
        scores = {
            name: PairScores(np.array(pairs["cosine"], np.float64), np.array(pairs["gold"], np.float64))
            for name, pairs in content["pairs"].items()
        }
        for name, (cosine, gold, _) in scores.items():
            if cosine.ndim != 1 or cosine.shape != gold.shape or not np.isfinite([cosine, gold]).all():
                raise ValueError(f"task {name!r}: expected a finite cosine and gold score of each pair")
        digests = {name: task["digest"] for name, task in content["tasks"].items()}
        return f"{content['model']} ({EncoderFacts(**content['encoder'])})", scores, digests

    return read_results(str(path), parse)
