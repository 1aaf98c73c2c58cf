"""Reads files as training would, and says what was understood."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path

import numpy as np

from angle_llm.config import DataSource
from angle_llm.data.formats import FORMATS, DataError, ScoreRange
from angle_llm.data.reading import Reading, open_source
from angle_llm.data.sources import load_examples
from angle_llm.data_tools.evaluation_sets import EvaluationSet
from angle_llm.data_tools.findings import PLACES, Finding, compare
from angle_llm.data_tools.fix import ToFix
from angle_llm.data_tools.ledger import Ledger, keep
from angle_llm.data_tools.report import FileReport
from angle_llm.data_tools.wording import Wording, measure

_SCALES: list[ScoreRange] = [(0, 1), (-1, 1), (0, 5), (0, 10), (0, 100)]
"""The usual ones; the first that holds nine tenths of the scores is taken."""
_MOST_LABELS = 12
"""Distinct scores that are listed one by one; more are counted in five bins."""
_LOOKED_AT = 1000
"""Rows in which a column of numbers is looked for."""


@dataclass(frozen=True)
class Checked:
    """What was found in each file, and what would be taken out of those that could be read."""

    reports: list[FileReport]
    to_fix: list[ToFix]


def check_files(
    sources: Sequence[DataSource], wording: Wording | None, sets: Sequence[EvaluationSet], examples: int = 5
) -> Checked:
    """Checks each source alone, and their rows against one another and against evaluation sets of other files."""
    reports: list[FileReport] = []
    read: list[tuple[FileReport, Ledger, DataSource]] = []
    for source in sources:
        report, ledger = FileReport(source.path), Ledger()
        reports.append(report)
        try:
            source = _with_scale(source, report)
            _read(source, wording, examples, report, ledger)
        except DataError as error:
            report.findings.append(Finding("unreadable", True, 1, str(error)))
            continue
        read.append((report, ledger, source))
    own_sets = [
        [each for each in sets if each.path != Path(source.path).expanduser().resolve()] for _, _, source in read
    ]
    marks = compare([report.path for report, _, _ in read], [ledger for _, ledger, _ in read], own_sets)
    for (report, _, _), mark in zip(read, marks, strict=True):
        report.findings += mark.findings
    return Checked(reports, [ToFix(source, mark.quarantined) for (_, _, source), mark in zip(read, marks, strict=True)])


def _read(source: DataSource, wording: Wording | None, examples: int, report: FileReport, ledger: Ledger) -> None:
    reading = open_source(source)
    report.format, report.guessed = reading.format, source.format == "auto"
    report.columns, report.unused_columns = reading.columns, reading.unused_columns
    lengths, samples = measure(keep(reading, ledger), wording, examples)

    report.rows_in, report.rows_used = ledger.rows_in, ledger.used
    report.dropped, report.rejected = dict(ledger.dropped), len(ledger.rejected)
    if FORMATS[reading.format].gather is not None and ledger.used:
        account = load_examples(replace(source, on_bad_row="skip", max_bad_ratio=1)).report
        report.rows_used, report.dropped = account.rows_used, account.dropped
    report.distinct_texts = len(ledger.texts)
    report.train = _flags(source, reading)
    if report.rejected:
        first = "; ".join(f"{reading.table.place(bad.line)}: {bad.reason}" for bad in ledger.rejected[:PLACES])
        text = f"{report.rejected:,} rows cannot be used. The first: {first}"
        report.findings.append(Finding("rejected", True, report.rejected, text))
    if not ledger.used:
        report.findings.append(Finding("unreadable", True, 1, "no example is left"))
        return
    if "score" in reading.columns or "label" in reading.columns:
        _describe_scores(np.asarray(ledger.relation_score)[np.asarray(ledger.relation_used) == 1], report)
    if report.guessed and reading.format == "positive_pair":
        _look_for_labels(source, report)
    if wording is not None:
        report.max_length = wording.max_length
        if lengths.tokens:
            report.tokens, report.truncated = lengths.quantiles(), lengths.longer_than(wording.max_length)
            report.examples = [wording.shown(text) for text in samples if not _fails(wording, text)]
        if report.truncated:
            text = f"{report.truncated:,} of {len(lengths.tokens):,} texts lose their end at max_length {wording.max_length}"
            report.findings.append(Finding("truncated", False, report.truncated, text))
        if count := len(lengths.unreadable):
            text = f"of {count:,} texts the tokenizer leaves nothing. The first: {lengths.unreadable[0]}"
            report.findings.append(Finding("untokenisable", True, count, text))


def _fails(wording: Wording, text: str) -> bool:
    try:
        wording.sentences([text])
    except ValueError:
        return True
    return False


def _with_scale(source: DataSource, report: FileReport) -> DataSource:
    """The source with the scale its scores seem to be on, if it is not told and not 0 to 1."""
    reading = open_source(source)
    if reading.format != "scored_pair" or source.score_range is not None:
        report.score_range = source.score_range
        return source
    values = np.array([value for _, row in reading.table.rows if (value := _number(row, reading)) is not None])
    low, high = (
        next((scale for scale in _SCALES if ((values >= scale[0]) & (values <= scale[1])).mean() >= 0.9), (0, 1))
        if len(values)
        else (0, 1)
    )
    if set(np.unique(values).tolist()) == {0.0, 1.0, 2.0}:
        text = (
            f"the score column {reading.columns['score']!r} holds 0, 1 and 2 alone. If these are the classes of NLI (0 "
            "entailment, 2 contradiction), set --format nli_pairs; if they are a scale, --score-range 0 2"
        )
        report.findings.append(Finding("classes", True, len(values), text))
        low, high = 0, 2
    if (low, high) == (0, 1):
        return source
    inside = values[(values >= low) & (values <= high)]
    if (low, high) == (0, 5) and inside.min() >= 1:
        low = 1
    text = (
        f"scores go from {inside.min():g} to {inside.max():g}; read here on the scale {low} to {high}. A run needs it told: "
        f"--data.score-range {low} {high}"
    )
    report.findings.append(Finding("scale", False, len(values), text))
    report.score_range = (low, high)
    return replace(source, score_range=(low, high))


def _number(row: object, reading: Reading) -> float | None:
    value = row.get(reading.columns["score"]) if isinstance(row, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _describe_scores(scores: np.ndarray[tuple[int], np.dtype[np.float64]], report: FileReport) -> None:
    values, counts = np.unique(scores.round(4), return_counts=True)
    if len(values) <= _MOST_LABELS:
        report.scores = {f"{value:g}": count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}
    else:
        bins, edges = np.histogram(scores, bins=5, range=(0, 1))
        report.scores = {f"{edges[at]:.1f}–{edges[at + 1]:.1f}": int(count) for at, count in enumerate(bins)}
    if len(values) == 1:
        text = f"every pair has the score {values[0]:g}: terms that compare scores (cosine, angle) teach nothing"
        report.findings.append(Finding("one label", False, len(scores), text))


def _look_for_labels(source: DataSource, report: FileReport) -> None:
    """A score column of an unknown name is left out without a word, and the rows become plain positives."""
    rows = [row for _, row in islice(open_source(source).table.rows, _LOOKED_AT) if isinstance(row, Mapping)]
    for column in report.unused_columns:
        try:
            values = {float(row[column]) for row in rows if row.get(column) not in (None, "")}  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            continue
        if 1 < len(values) <= 101 and len(values) < len(rows):
            text = (
                f"column {column!r} holds numbers and is not read: every pair counts as positive. If it is their label, set "
                f"--format scored_pair --columns score {shlex.quote(column)}"
            )
            report.findings.append(Finding("label not read", False, len(rows), text))


def _flags(source: DataSource, reading: Reading) -> str:
    flags = ["--data.path", source.path, "--data.format", reading.format]
    named = {name: column for name, column in reading.columns.items() if source.columns.get(name) == column}
    for name, values in (
        ("columns", [part for pair in named.items() for part in pair]),
        ("score-range", [f"{end:g}" for end in source.score_range or ()]),
        ("where", [str(part) for pair in source.where.items() for part in pair]),
    ):
        flags += [f"--data.{name}", *values] if values else []
    return shlex.join(flags)
