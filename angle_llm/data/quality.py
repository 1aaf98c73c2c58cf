"""Check a data file before training: format, columns, scores, bad rows, lengths; write a cleaned copy.

| finding | trouble | meaning |
|---|---|---|
| unreadable | yes | the file or its columns cannot be understood, or no example remains |
| encoding | yes | all characters beyond ASCII are invalid bytes; `--fix` skips the file |
| rejected | yes | rows that cannot be used; training stops at the first, unless --data.on-bad-row skip |
| classes | yes | a score column with the values 0, 1 and 2, which are probably NLI classes |
| contradiction | yes | a pair of texts whose labels, in any row of any file, differ by more than half the scale |
| unlike itself | yes | two equal texts with a low score |
| contamination | yes | rows whose pair is in an evaluation set, or whose query is one of a BEIR folder |
| no pairs | yes | every row has one text only, paired with itself; training stops |
| untokenisable | yes | texts without any token; training stops at them |
| label not read | no | positive pairs beside a column of numbers that may be their label |
| scale | no | scores outside 0..1, and the scale they were read on |
| one label | no | all scores are equal: ranking terms have no gradient |
| duplicate, near duplicate, across files | no | rows that repeat an earlier row |
| other label | no | a pair whose labels differ by half the scale or less |
| same texts | no | two equal texts with a high score |
| sentences, documents | no | texts of 4 words or more that are in an evaluation set, or judged documents of one |
| short | no | texts of at most 3 characters, such as ? and N/A |
| ids | no | rows with the id of a query or document of a BEIR folder |
| truncated | no | texts that are cut at max_length |

A negative of a group that equals a positive but for case, spacing and punctuation is a contradiction.
"""

from __future__ import annotations

import heapq
import itertools
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from angle_llm.config import DataSource
from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.formats import FORMATS, DataError, Dropped, Group, texts_of
from angle_llm.data.keys import key, near, sound
from angle_llm.data.leakage import NEUTRAL_SCORE, SHOWN_PLACES, EvaluationSet, FileKeys, Finding, compare_rows
from angle_llm.data.readers import BadRow, Row

_SCALES: list[tuple[float, float]] = [(0, 1), (-1, 1), (0, 5), (0, 10), (0, 100)]
"""The first scale that holds nine tenths of the scores is used."""
_MAX_LABELS = 12
"""Distinct scores that are listed one by one; more are counted in five bins."""
_GROUP_COUNTS = ("positives", "negatives", "queries without negatives", "queries with scores")
NOTHING_LEFT = ("unreadable", "no pairs")
"""Findings of files that no training can use."""
_SHORT = 3
"""Characters of texts that are probably placeholders."""
_SAMPLE_ROWS = 1000
_SAMPLE_TEXTS = 5


class Tokens(Protocol):
    """Token counts of texts for some model."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a text."""

    @property
    def two_prompts(self) -> bool:
        """Whether queries and documents have different prompts, so that a text has two embeddings."""

    def lengths(self, texts: list[str]) -> list[int | str]:
        """Return the number of tokens of each text without a limit, or the error message of a text without tokens."""

    def render(self, text: str) -> str:
        """Return the tokens of a text, one by one."""


@dataclass
class FileReport:
    """Result of the check of one file."""

    path: str
    format: str | None = None
    """None: not understood."""
    guessed: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    """Field → column."""
    unused_columns: list[str] = field(default_factory=list)
    unit: str = "line"
    """What row numbers count: lines, or rows of Parquet and JSON files and datasets."""
    score_range: tuple[float, float] | None = None
    rows_in: int = 0
    rows_used: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    scores: dict[str, int] = field(default_factory=dict)
    """Score, or range of scores → number of pairs, after rescaling to 0..1."""
    groups: dict[str, int] = field(default_factory=dict)
    """Of format group: number of positives and negatives, of queries without negatives, and with scores."""
    distinct_texts: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Quantiles of the lengths of the distinct texts; empty without a model."""
    max_length: int | None = None
    truncated: int = 0
    examples: list[str] = field(default_factory=list)
    """Some texts, token by token, with the pooled token marked."""
    train: str = ""
    """Flags of the recommended training run; set by `angle-llm data check`."""
    findings: list[Finding] = field(default_factory=list)
    removed: dict[int, str] = field(default_factory=dict)
    """Line → reason of the rows that `--fix` removes, rejected rows aside."""

    @property
    def trouble(self) -> bool:
        """Whether a finding must be resolved before training."""
        return any(finding.trouble for finding in self.findings)

    @property
    def fixable(self) -> bool:
        """Whether `--fix` writes a copy."""
        return self.rows_in > 0 and all(finding.kind != "encoding" for finding in self.findings)

    def add(self, kind: str, count: int, text: str, *, trouble: bool = False) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, trouble, count, text))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Label and text of each line of the printed report."""
        if self.format is not None:
            fields = (name if name == column else f"{name} = {column}" for name, column in self.columns.items())
            yield "format", f"{self.format}{', detected' if self.guessed else ''}: {', '.join(fields)}"
            yield "not used", ", ".join(name or "''" for name in self.unused_columns) or "every column is used"
            dropped = "".join(f" + {count:,} dropped ({reason})" for reason, count in self.dropped.items())
            rejected = f" + {self.rejected:,} rejected" if self.rejected else ""
            yield "rows", f"{self.rows_in:,} = {self.rows_used:,} used{dropped}{rejected}"
        if self.scores:
            yield "scores", f"{_counts(self.scores)}   (pairs; 1 is the same meaning)"
        if self.groups:
            yield "groups", _counts(self.groups)
        if self.rows_used:
            yield "texts", f"{self.distinct_texts:,} distinct"
        if self.tokens:
            quantiles = ", ".join(f"{name} {count:,}" for name, count in self.tokens.items())
            yield "tokens", f"{quantiles}; {self.truncated:,} texts are longer than max_length {self.max_length}"
        if self.train:
            yield "to train", f"angle-llm train {self.train}"
        for finding in sorted(self.findings, key=lambda finding: not finding.trouble):
            more = ", …" if finding.count > len(finding.places) else ""
            listed = ", ".join(finding.places) + more
            places = f" ({self.unit}{'s' * (not listed.isdecimal())} {listed})" if finding.places else ""
            yield "TROUBLE" if finding.trouble else "note", f"{finding.kind}: {finding.text}{places}"
        if self.examples:
            pooled = "; the pooled token is in ⟦ ⟧" if "⟦" in self.examples[0] else ""
            yield "examples", f"texts as tokens, separated by |{pooled}"
        yield from ((f"text {number}", example) for number, example in enumerate(self.examples, 1))


def _texts(count: int) -> str:
    return "1 text has" if count == 1 else f"{count:,} texts have"


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in values.items())


CheckedFile = tuple[DataSource, FileReport]
"""A source with the scale that its scores were read on, and its report."""


def check_files(
    sources: Sequence[DataSource], tokens: Tokens | None, sets: Sequence[EvaluationSet]
) -> list[CheckedFile]:
    """Check each file alone, their rows against one another, and against evaluation sets in other files."""
    checked: list[CheckedFile] = []
    understood: list[tuple[FileReport, FileKeys, set[Path]]] = []
    for source in sources:
        report, keys = FileReport(source.path), FileKeys()
        try:
            source = _with_scale(source, report)
            paths = _read_file(source, tokens, report, keys)
            understood.append((report, keys, paths))
        except DataError as error:
            report.rows_in = 0
            report.add("unreadable", 1, str(error), trouble=True)
        checked.append((source, report))
    own_sets = [[each for each in sets if each.path not in paths] for *_, paths in understood]
    compared = compare_rows([report.path for report, *_ in understood], [keys for _, keys, _ in understood], own_sets)
    for (report, *_), (findings, removed) in zip(understood, compared, strict=True):
        report.findings += findings
        report.removed = removed
    return checked


def _read_file(source: DataSource, tokens: Tokens | None, report: FileReport, keys: FileKeys) -> set[Path]:
    """Read a file as training would, into the report and the keys of its rows; return the files that were read.
    Raises `DataError`."""
    reading = open_examples(source)
    account = reading.report()
    report.format, report.guessed, report.unit = reading.format, source.format == "auto", reading.rows.files[0].unit
    report.columns, report.unused_columns = reading.columns, account.unused_columns

    groups: Counter[str] = Counter()
    short: Counter[str] = Counter()
    single = True

    def new_texts() -> Iterator[str]:
        nonlocal single
        for row, result in reading.outcomes():
            account.count(result)
            if isinstance(row, Row) and isinstance(result, Dropped) and result.reason == "neutral":
                pair = [row.values.get(reading.columns[name]) for name in ("premise", "hypothesis")]
                texts = [near(sound(text)) for text in pair if isinstance(text, str)]
                if len(texts) == 2:
                    keys.add_pair(row.line, texts[0], texts[1], NEUTRAL_SCORE, used=False)
            elif not isinstance(result, Dropped | BadRow):
                if isinstance(result, Group):
                    positives, negatives = len(result.positives), len(result.negatives)
                    counts = (positives, negatives, not negatives, result.scores is not None)
                    groups.update(dict(zip(_GROUP_COUNTS, counts, strict=True)))
                single = single and len(set(texts_of(result))) == 1
                short.update(text for text in map(str.strip, texts_of(result)) if len(text) <= _SHORT)
                yield from keys.add(row.line, result, row.values if isinstance(row, Row) else {})

    samples: list[str] = []
    lengths: list[int] = []
    without_tokens: list[str] = []
    texts = new_texts()
    while batch := list(itertools.islice(texts, 1024)):
        samples = heapq.nsmallest(_SAMPLE_TEXTS, [*samples, *batch], key=key)  # a random sample that is always the same
        for length in tokens.lengths(batch) if tokens is not None else ():
            if isinstance(length, int):
                lengths.append(length)
            else:
                without_tokens.append(length)

    paths = {file.path.resolve() for file in reading.rows.files}
    used, report.groups = len(keys.rows) // FileKeys.ROW_VALUES, dict(groups)
    report.rows_in, report.rejected, report.distinct_texts = account.rows_in, len(account.rejected), len(keys.texts)
    if FORMATS[reading.format].combine is not None and used:
        account = load_examples(source).report
        used = account.rows_used
    report.rows_used, report.dropped = used, account.dropped
    if account.rejected:
        for problem in filter(None, (file.wrong_encoding() for file in reading.rows.files)):
            report.add("encoding", 1, problem, trouble=True)
        report.add("rejected", report.rejected, _causes(account.rejected), trouble=True)
    if not used:
        report.add("unreadable", 1, "no example is left", trouble=True)
        return paths
    if single and not (tokens and tokens.two_prompts):
        text = "every row pairs a text with itself: nothing can be learned. Use texts that belong together, such as a title"
        report.add("no pairs", used, f"{text} with its body or a question with its answer", trouble=True)
    if short:
        shown = ", ".join(f"{text!r}: {count:,} ×" for text, count in short.most_common(SHOWN_PLACES))
        more = ", …" if len(short) > SHOWN_PLACES else ""
        text = f"{_texts(short.total())} at most {_SHORT} characters ({shown}{more}). Remove placeholders such as N/A"
        report.add("short", short.total(), text)
    if "score" in reading.columns or "label" in reading.columns:
        _describe_scores(np.asarray(keys.scores)[np.asarray(keys.pairs).reshape(-1, 4)[:, 2] == 1], report)
    if report.guessed and reading.format == "positive_pair":
        _find_labels(source, report)
    if tokens is not None and lengths:
        report.max_length, report.truncated = tokens.max_length, sum(each > tokens.max_length for each in lengths)
        shares = {"shortest": 0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1}
        report.tokens = {name: int(np.quantile(lengths, share, method="lower")) for name, share in shares.items()}
        report.examples = [tokens.render(text) for text in samples if isinstance(tokens.lengths([text])[0], int)]
    if report.truncated:
        text = f"{report.truncated:,} of {len(lengths):,} texts are cut at max_length {report.max_length}"
        report.add("truncated", report.truncated, text)
    if without_tokens:
        text = f"{_texts(len(without_tokens))} no token. The first: {without_tokens[0]}"
        report.add("untokenisable", len(without_tokens), text, trouble=True)
    return paths


def _causes(rejected: Sequence[BadRow]) -> str:
    """Return the number of bad rows by cause, each with its first row."""
    of_cause: defaultdict[str, list[BadRow]] = defaultdict(list)
    for bad in rejected:
        of_cause[re.sub(r"'.*?'|`.*`|\d[\d.]*", "", bad.reason)].append(bad)
    most = sorted(of_cause.values(), key=len, reverse=True)
    shown = [f"{len(rows):,} × {rows[0].reason} (first: {rows[0].place})" for rows in most[:SHOWN_PLACES]]
    more = "; …" if len(most) > SHOWN_PLACES else ""
    return f"{len(rejected):,} row{'s' * (len(rejected) > 1)} cannot be used: {'; '.join(shown)}{more}"


def _with_scale(source: DataSource, report: FileReport) -> DataSource:
    """Return the source with the scale that its scores fit, if none is set and it is not 0..1."""
    reading = open_examples(source)
    report.score_range = source.score_range
    if reading.format != "scored_pair" or source.score_range is not None:
        return source
    numbers = (_number(row.values.get(reading.columns["score"])) for row in reading.rows if isinstance(row, Row))
    values = np.array([number for number in numbers if number is not None])
    scales = [scale for scale in _SCALES if ((values >= scale[0]) & (values <= scale[1])).sum() >= 0.9 * len(values)]
    low, high = scales[0] if scales else (0, 1)
    if set(np.unique(values).tolist()) == {0.0, 1.0, 2.0}:
        text = (
            f"the score column {reading.columns['score']!r} holds only 0, 1 and 2. If these are NLI classes (0 entailment, "
            "2 contradiction), set --format nli_pairs; if they are a scale, --score-range 0 2"
        )
        report.add("classes", len(values), text, trouble=True)
        low, high = 0, 2
    if (low, high) == (0, 1):
        return source
    inside = values[(values >= low) & (values <= high)]
    if (low, high) == (0, 5) and inside.min() >= 1:
        low = 1
    text = f"scores from {inside.min():g} to {inside.max():g}, read on the scale {low} to {high}"
    report.add("scale", len(values), f"{text}. To train, set --data.score-range {low} {high}")
    report.score_range = (low, high)
    return replace(source, score_range=(low, high))


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and isfinite(number) else None


def _describe_scores(scores: Any, report: FileReport) -> None:
    values, counts = np.unique(scores.round(4), return_counts=True)
    if len(values) <= _MAX_LABELS:
        report.scores = {f"{value:g}": count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}
    else:
        bins, edges = np.histogram(scores, bins=5, range=(0, 1))
        report.scores = {f"{edges[at]:.1f}–{edges[at + 1]:.1f}": int(count) for at, count in enumerate(bins)}
    if len(values) == 1:
        text = f"every pair has the score {values[0]:g}: ranking terms (cosine, angle) learn nothing"
        report.add("one label", len(scores), text)


def _find_labels(source: DataSource, report: FileReport) -> None:
    """Report unused numeric columns: a label column with an unknown name would be ignored silently."""
    first = itertools.islice(open_examples(source).rows, _SAMPLE_ROWS)
    rows = [row.values for row in first if isinstance(row, Row)]
    for column in report.unused_columns:
        numbers = [_number(row[column]) for row in rows if row.get(column) not in (None, "")]
        if None not in numbers and 1 < len(set(numbers)) <= 101 and len(set(numbers)) < len(rows):
            text = (
                f"column {column!r} holds numbers and is not used: every pair is read as positive. If these are labels, set "
                f"--format scored_pair --columns score {shlex.quote(column)}"
            )
            report.add("label not read", len(rows), text)


def data_settings(source: DataSource, report: FileReport) -> dict[str, Any]:
    """Return the settings under `data` with which a training run reads a source as the report says."""
    named = {name: column for name, column in report.columns.items() if source.columns.get(name) == column}
    return {
        "path": source.path,
        "format": None if source.format == DataSource.format else source.format,
        "delimiter": source.delimiter,
        "encoding": None if source.encoding == DataSource.encoding else source.encoding,
        "columns": named,
        "score_range": source.score_range,
        "where": source.where,
    }
