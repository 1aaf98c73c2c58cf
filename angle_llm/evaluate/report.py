"""STS results for people: Markdown tables that also read well in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from angle_llm.evaluate.comparison import Comparison, Difference
from angle_llm.evaluate.published import PUBLISHED
from angle_llm.evaluate.resampling import Interval
from angle_llm.evaluate.results import markdown_table, number, span
from angle_llm.evaluate.sts import Figures, Means, StsResults, TaskResult

VARIANT_MEANING = {
    "raw": "the sentences as released",
    "senteval": "SentEval's text, Moses-tokenised and lower-cased (SICK: tokenised only)",
    "file": "the sentences as in the file",
}
EDITS_MEANING = {
    "published": "with the edits PromptEOL and AnglE do on each sentence they evaluate with a prompt (a full stop added "
    "where there is no .?\"', a double quote made single, a final ? made a full stop)",
}
INTERVAL = "95 % interval"
_NAME_WIDTH = 26


def markdown_report(
    results: StsResults,
    model: str,
    remarks: Sequence[str] = (),
    *,
    comparison: Comparison | None = None,
    other: str = "the other",
) -> str:
    """Tables and notes: beside the published rows, Spearman and Pearson of every task, sub-tasks, and the difference to
    `other` where there is a `comparison`. `remarks` come first among the notes."""
    subtasks = [task for task in results.tasks.values() if task.subtasks]
    tables = [_beside_published(results, model), _spearman(results), _pearson(results)]
    tables += [_subtasks(subtasks)] if subtasks else []
    tables += [_differences(comparison, results)] if comparison else []
    notes = [
        f"Model: {model}.",
        *remarks,
        *_notes(results),
        *(_comparison_notes(comparison, other) if comparison else []),
    ]
    return "\n\n".join([*tables, "\n".join(f"- {note}" for note in notes)]) + "\n"


def _beside_published(results: StsResults, model: str) -> str:
    averaged = results.averaged
    header = ["model", "text", *(task.label for task in results.tasks.values())]
    texts = " + ".join(dict.fromkeys(task.text for task in results.tasks.values()))
    own = [f"**{_short(model)}**", texts, *(number(task.spearman) for task in results.tasks.values())]
    if averaged:
        header.append("average")
        own.append(number(results.average))
    rows = [own]
    for row in PUBLISHED:
        average = row.average_over(averaged)
        if average is not None:
            figures = (row.spearman.get(name) for name in results.tasks)
            rows.append([row.model, "senteval", *map(number, figures), number(average)])
    return markdown_table(header, rows, words=2)


def _spearman(results: StsResults) -> str:
    def row(task: TaskResult) -> list[str]:
        means = [_of(task.mean_over_subtasks, "spearman"), _of(task.weighted_mean_over_subtasks, "spearman")]
        return [task.label, task.text, f"{task.pairs:,}", number(task.spearman), _interval(task.interval), *means]

    rows = [row(task) for task in results.tasks.values()]
    if results.averaged:
        rows.append(["average", "", "", number(results.average), _interval(results.average_interval), "", ""])
    return markdown_table(["Spearman", "text", "pairs", "all", INTERVAL, "mean", "weighted mean"], rows, words=2)


def _pearson(results: StsResults) -> str:
    def row(task: TaskResult) -> list[str]:
        means = [_of(task.mean_over_subtasks, "pearson"), _of(task.weighted_mean_over_subtasks, "pearson")]
        return [task.label, task.text, f"{task.pairs:,}", number(task.pearson), *means]

    header = ["Pearson", "text", "pairs", "all", "mean", "weighted mean"]
    return markdown_table(header, [row(task) for task in results.tasks.values()], words=2)


def _subtasks(tasks: Sequence[TaskResult]) -> str:
    def row(label: str, figures: Figures) -> list[str]:
        interval = _interval(figures.interval)
        return [label, f"{figures.pairs:,}", number(figures.spearman), interval, number(figures.pearson)]

    rows = [row(f"{task.label} · {name}", figures) for task in tasks for name, figures in task.subtasks.items()]
    return markdown_table(["sub-task", "pairs", "Spearman", INTERVAL, "Pearson"], rows, words=1)


def _differences(comparison: Comparison, results: StsResults) -> str:
    def row(label: str, one: Difference) -> list[str]:
        figures = [number(one.spearman), number(one.other), f"{one.difference:+.2f}"]
        interval = f"{one.interval.low:+.2f} … {one.interval.high:+.2f}"
        return [label, f"{one.pairs:,}", *figures, interval, f"{one.p_value:.3g}"]

    rows = [row(results.tasks[name].label, one) for name, one in comparison.tasks.items()]
    if comparison.average:
        rows.append(row("average", comparison.average))
    header = ["compared", "pairs", "this model", "the other", "difference", INTERVAL, "p"]
    return markdown_table(header, rows, words=1)


def _notes(results: StsResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Correlation × 100 of cosine similarity with the gold scores. The first table is Spearman over whole tasks."
    ]
    if any(task.subtasks for task in tasks):
        notes.append(
            "`all`: the pairs of all sub-tasks together, one correlation, as in the published rows. `mean`, `weighted "
            "mean`: of the sub-tasks' correlations, weighted by their pairs. Papers differ in which they print."
        )
    if any(task.resampled is not None for task in tasks):
        notes.append(
            "Intervals: percentile bootstrap over pairs. They tell what other pairs of the same kind might have given, "
            "not what another training seed would."
        )
    for variant, edits in dict.fromkeys((task.variant, task.edits) for task in tasks):
        also = f", {EDITS_MEANING.get(edits, edits)}" if edits else ""
        notes.append(f"Text `{variant}{', edited' if edits else ''}`: {VARIANT_MEANING.get(variant, variant)}{also}.")
    if results.averaged:
        labels = ", ".join(results.tasks[name].label for name in results.averaged)
        notes.append(f"`average` is over {labels}, for this model and for the published rows alike.")
        notes.append("Published rows are on SentEval's text (`senteval`); those of prompted models with the edits.")
        other = [results.tasks[name].label for name in results.averaged if results.tasks[name].variant != "senteval"]
        if other:
            notes.append(f"Not the same text as the published rows: {', '.join(other)}. Compare with that in mind.")
    for task in tasks:
        if task.official_pairs not in (None, task.pairs):
            notes.append(f"{task.label}: {task.pairs:,} pairs here, {task.official_pairs:,} in the published task.")
        named = {task.label: task, **{f"{task.label}, {name}": figures for name, figures in task.subtasks.items()}}
        notes += [f"{label}: no correlation: {f.undefined}." for label, f in named.items() if f.undefined]
        gaps = [label for label, f in named.items() if not f.undefined and f.interval and math.isnan(f.interval.low)]
        notes += [f"{label}: no interval: some resamples drew pairs that are all alike." for label in gaps]
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors:,} of {results.sentences:,} sentences have the zero vector (cosine 0).")
    return notes


def _comparison_notes(comparison: Comparison, other: str) -> list[str]:
    notes = [
        f"The other: {other}. Difference: this model minus the other, both on the same {comparison.resamples:,} bootstrap "
        "resamples; p: two-sided, from the same resamples, each row by itself."
    ]
    if comparison.left_out:
        notes.append(f"Not compared, measured for one of the two only: {', '.join(comparison.left_out)}.")
    return notes


def _short(model: str) -> str:
    """The end of a long name: a table has to fit a terminal, and the notes hold the whole."""
    return model if len(model) <= _NAME_WIDTH else "…" + model[1 - _NAME_WIDTH :]


def _interval(interval: Interval | None) -> str:
    return number(None) if interval is None else span(interval.low, interval.high)


def _of(means: Means | None, figure: str) -> str:
    return number(None if means is None else getattr(means, figure))
