"""Check data files before training (format, columns, scores, bad rows, lengths), and write cleaned copies.

`check_files` returns a `FileReport` for each file; `write_fixed` writes the copies. A finding is a problem in a file. A
finding that is trouble must be resolved before training; the exit code of the command is then 1.

| finding | trouble | meaning |
|---|---|---|
| unreadable | yes | the file or its columns cannot be read, or no example remains |
| encoding | yes | all characters outside of ASCII are invalid bytes; `--fix` skips the file |
| rejected | yes | rows that cannot be used; training stops at the first |
| classes | yes | a score column with the values 0, 1 and 2, which are probably NLI classes |
| contradiction | yes | a pair of texts whose labels, in any row of any file, differ by more than half the scale |
| unlike itself | yes | two equal texts with a low score |
| contamination | yes | rows whose pair is in an evaluation set, or whose query is in a BEIR folder |
| no pairs | yes | every row pairs a text with itself; training stops |
| untokenisable | yes | texts that have no token; training stops at such a text |
| label not read | no | positive pairs, and an unused column of numbers that may be a label |
| scale | no | scores outside of 0..1, and the scale on which they were read |
| one label | no | all scores are equal: ranking terms have no gradient |
| duplicate, near duplicate, across files | no | rows that repeat an earlier row |
| other label | no | a pair whose labels differ by half the scale or less |
| same texts | no | two equal texts with a high score |
| sentences, documents | no | texts of 4 words or more that are in an evaluation set, or are its judged documents |
| placeholders | no | texts that stand for a missing text, such as None, N/A and [deleted] |
| short | no | other texts of at most 3 characters, such as ? |
| lists | no | texts that are lists, such as ['a', 'b'], in a file that can contain lists |
| ids | no | rows with the id of a query or document of a BEIR folder |
| truncated | no | texts that are cut at max_length |

A negative of a group that differs from a positive only in case, spacing and punctuation is a contradiction.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from angle_llm.data.examples import ExampleReader, open_examples
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, Group, command_for, is_list_text, texts_of
from angle_llm.data.keys import key, normalized, printable
from angle_llm.data.leakage import NEUTRAL_SCORE, SHOWN_PLACES, EvaluationSet, FileKeys, Finding, compare_rows
from angle_llm.data.sources import STARTER, BadRow, Row
from angle_llm.io import plain
from angle_llm.settings.train import DataSource

_SCALES: list[tuple[float, float]] = [(0, 1), (-1, 1), (0, 5), (0, 10), (0, 100)]
"""Possible scales (lowest, highest score); the first scale that contains 90 % of the scores of a file is used."""
_MAX_LABELS = 12
"""Maximum number of distinct scores that the report counts by value; more distinct scores are counted in five bins."""
_GROUP_COUNTS = ("positives", "negatives", "queries without negatives", "queries with scores")
"""Keys of `FileReport.groups`, the counts for files of format `group`."""
NOTHING_LEFT = ("unreadable", "no pairs")
"""Kinds of findings (problems) that make a whole data file unusable for training."""
_SHORT = 3
"""Maximum number of characters of a text that is probably a placeholder."""
_PLACEHOLDER = re.compile(
    r"[\[(<#]?(none|null|nil|nan|na|n[/\\]a|n\.a\.|empty|missing|deleted|removed|unknown|undefined|tbd|todo)[\])>]?|-+",
    re.IGNORECASE,
)
"""Pattern of texts that stand for a missing text."""
_SUSPICIOUS = {
    "placeholders": "texts that usually stand for a missing text (remove their rows)",
    "short": f"texts of at most {_SHORT} characters (remove placeholders)",
    "lists": "texts that are lists written as text (write them as lists)",
}
"""Name of a finding about single texts → description of the texts."""
_SAMPLE_ROWS = 1000
"""Number of rows that are read to detect unused label columns."""
_SAMPLE_TEXTS = 5
"""Number of texts whose tokens the report prints."""


class Tokens(Protocol):
    """Interface to the tokenizer of an encoder: numbers of tokens, and tokens as text."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text; longer texts are cut."""

    @property
    def two_prompts(self) -> bool:
        """Whether queries and documents have different prompts, so that a text has two embeddings."""

    def lengths(self, texts: list[str]) -> list[int | str]:
        """Return the number of tokens of each text before truncation; for a text without tokens an error message."""

    def render(self, text: str) -> str:
        """Return the tokens of a text as a string, separated by |, for the report."""


@dataclass
class FileReport:
    """Result of `angle-llm data check` for a data file: format, counts and problems."""

    path: str
    format: str | None = None
    """Name of the data format; None if the file or its columns cannot be read."""
    guessed: bool = False
    """Whether the data format was detected from the column names."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of the format, such as `text1` → column of the file."""
    unused_columns: list[str] = field(default_factory=list)
    unit: str = "line"
    """Unit of row numbers in the report: `line`, or `row` for Parquet files, .json files and datasets."""
    score_range: tuple[float, float] | None = None
    """Lowest and highest score of the scale on which the scores were read; None: 0 to 1."""
    rows_in: int = 0
    """Number of rows in the file."""
    rows_used: int = 0
    """Number of rows that become training examples."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason, such as "neutral" → number of valid rows that are not used."""
    rejected: int = 0
    """Number of bad rows: rows that cannot be read or converted to an example."""
    scores: dict[str, int] = field(default_factory=dict)
    """Score, or range of scores → number of pairs. Scores are rescaled to 0..1."""
    groups: dict[str, int] = field(default_factory=dict)
    """Counts for format `group`: positives, negatives, queries without negatives, queries with scores; else empty."""
    distinct_texts: int = 0
    """Number of distinct texts in the file."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Quantile, such as "90%" → number of tokens per distinct text; empty if no model was given."""
    max_length: int | None = None
    """Maximum number of tokens of a text, from the model; None if no model was given."""
    truncated: int = 0
    """Number of distinct texts that are cut at `max_length`."""
    examples: list[str] = field(default_factory=list)
    """Tokens of a few sampled texts as strings, with the pooled token in ⟦ ⟧."""
    train: str = ""
    """Flags of the recommended training run; set by `angle-llm data check`."""
    findings: list[Finding] = field(default_factory=list)
    removed: dict[int, str] = field(default_factory=dict)
    """Line → reason for the rows that `data check --fix` removes. Bad rows are removed too, but not listed here."""

    @property
    def trouble(self) -> bool:
        """Whether the file has a problem that must be resolved before training."""
        return any(finding.trouble for finding in self.findings)

    @property
    def fixable(self) -> bool:
        """Whether `data check --fix` writes a cleaned copy of the file."""
        return self.rows_in > 0 and all(finding.kind != "encoding" for finding in self.findings)

    def add(self, kind: str, count: int, text: str, *, trouble: bool = False) -> None:
        """Add a finding (a problem in the file) without line numbers.

        `trouble` is whether the problem must be resolved before training.
        """
        self.findings.append(Finding(kind, trouble, count, text))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield (label, text) for each line of the printed report."""
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
            yield "to train", f"angle-llm {command_for(self.format)} {self.train}"
        for finding in sorted(self.findings, key=lambda finding: not finding.trouble):
            more = ", …" if finding.count > len(finding.places) else ""
            listed = ", ".join(finding.places) + more
            places = f" ({self.unit}{'s' * (not listed.isdecimal())} {listed})" if finding.places else ""
            yield "TROUBLE" if finding.trouble else "note", f"{finding.kind}: {finding.text}{places}"
        if self.examples:
            pooled = "; the pooled token is in ⟦ ⟧" if "⟦" in self.examples[0] else ""
            yield "examples", f"texts as tokens, separated by |{pooled}"
        yield from ((f"text {number}", example) for number, example in enumerate(self.examples, 1))


def _counts(values: Mapping[str, int]) -> str:
    """Format names with counts as text: `positives: 2,000, negatives: 1`."""
    return ", ".join(f"{name}: {count:,}" for name, count in values.items())


CheckedFile = tuple[DataSource, FileReport]
"""A data file (with the score range on which its scores were read), and the report of its check."""


def check_files(
    sources: Sequence[DataSource], tokens: Tokens | None, sets: Sequence[EvaluationSet]
) -> list[CheckedFile]:
    """Check data files: format, columns, scores, bad rows, repeats, contradictions, and rows of evaluation sets.

    Repeats and contradictions are also searched between files. A file is not compared with an evaluation set that was
    read from the same file. If `tokens` is None, numbers of tokens are not checked.
    """
    checked: list[CheckedFile] = []
    surveys: list[tuple[FileReport, _Survey]] = []
    for settings in sources:
        report = FileReport(settings.path)
        try:
            reading = open_examples(settings)
            settings = _with_scale(reading, report)
            survey = _Survey(replace(reading, settings=settings), tokens)
            survey.read()
            survey.fill(report)
            surveys.append((report, survey))
        except DataError as error:
            report.rows_in = 0
            report.add("unreadable", 1, str(error), trouble=True)
        checked.append((settings, report))
    other_sets = [[tested for tested in sets if tested.identity not in survey.identities] for _, survey in surveys]
    compared = compare_rows([report.path for report, _ in surveys], [survey.keys for _, survey in surveys], other_sets)
    for (report, _), (findings, removed) in zip(surveys, compared, strict=True):
        report.findings += findings
        report.removed = removed
    return checked


def _numbered(reading: ExampleReader) -> Iterator[tuple[int, Row | BadRow, Example | Dropped | BadRow]]:
    """Yield (number, row, result) for every row: the line or row of a file, or the number in several files together."""
    several = len(reading.source.files) > 1
    for number, (row, result) in enumerate(reading.outcomes(), 1):
        yield number if several else row.line, row, result


class _Survey:
    """Hashes and counts of the rows and texts of a data file; `read` makes them in one pass.

    Args:
        reading: Reader of the file.
        tokens: Tokenizer; None: numbers of tokens are not counted.
    """

    def __init__(self, reading: ExampleReader, tokens: Tokens | None) -> None:
        self.reading = reading
        self.keys = FileKeys()
        self._format = FORMATS[reading.format]
        self._account = reading.report()
        self._tokens = tokens
        self._first_rows: list[Mapping[str, Any]] = []
        self._examples: list[Example] = []
        self._groups = Counter[str]()
        self._suspicious = defaultdict[str, Counter[str]](Counter)
        self._has_only_equal_texts = True
        self._samples: list[str] = []
        self._lengths: list[int] = []
        self._problems: list[str] = []

    @property
    def identities(self) -> set[str]:
        """Identities of the files that are read (`FileReader.identity`)."""
        return {file.identity for file in self.reading.source.files}

    def read(self) -> None:
        """Read the file, count rows and tokens, and keep the texts with the smallest hashes as a sample."""
        texts = self._new_texts()
        while batch := list(itertools.islice(texts, 1024)):
            self._samples = heapq.nsmallest(_SAMPLE_TEXTS, [*self._samples, *batch], key=key)
            for length in self._tokens.lengths(batch) if self._tokens is not None else ():
                if isinstance(length, int):
                    self._lengths.append(length)
                else:
                    self._problems.append(length)

    def _new_texts(self) -> Iterator[str]:
        """Read all rows, store their hashes, count them, and yield every distinct text once."""
        for number, row, result in _numbered(self.reading):
            self._account.count(result)
            values = row.values if isinstance(row, Row) else {}
            if isinstance(result, Dropped) and result.reason == "neutral":
                pair = [values.get(self.reading.columns[name]) for name in ("premise", "hypothesis")]
                texts = [normalized(printable(text)) for text in pair if isinstance(text, str)]
                if len(texts) == 2:
                    self.keys.add_pair(number, texts[0], texts[1], NEUTRAL_SCORE, used=False)
            elif not isinstance(result, Dropped | BadRow):
                if len(self._first_rows) < _SAMPLE_ROWS:
                    self._first_rows.append(values)
                if self._format.combine is not None:
                    self._examples.append(result)
                self._count(result)
                yield from self.keys.add(number, result, values)

    def _count(self, example: Example) -> None:
        """Add a training example to the counts of positives, negatives and suspicious texts."""
        if isinstance(example, Group):
            positives, negatives = len(example.positives), len(example.negatives)
            counts = (positives, negatives, not negatives, example.scores is not None)
            self._groups.update(dict(zip(_GROUP_COUNTS, counts, strict=True)))
        self._has_only_equal_texts = self._has_only_equal_texts and len(set(texts_of(example))) == 1
        for text in map(str.strip, texts_of(example)):
            name = "placeholders" if _PLACEHOLDER.fullmatch(text) else "short" if len(text) <= _SHORT else "lists"
            if name != "lists" or is_list_text(text):
                self._suspicious[name][text] += 1

    def fill(self, report: FileReport) -> None:
        """Write the counts and the findings to the report of the file."""
        # Format, columns and rows.
        reading = self.reading
        account = self._account
        files = reading.source.files
        report.format = reading.format
        report.guessed = reading.settings.format == "auto"
        report.unit = "row" if len(files) > 1 else files[0].unit
        report.columns = reading.columns
        report.unused_columns = account.unused_columns
        used = len(self.keys.rows) // FileKeys.ROW_VALUES
        if self._format.combine is not None:
            rows_of_examples = len(self._format.combine(self._examples)) * self._format.rows_per_example
            account.drop("unpaired", used - rows_of_examples)
            used = rows_of_examples
        report.rows_in = account.rows_in
        report.rows_used = used
        report.dropped = account.dropped
        report.rejected = len(account.rejected)
        report.groups = dict(self._groups)
        report.distinct_texts = len(self.keys.texts)

        # Rows that cannot be used.
        if account.rejected:
            for problem in filter(None, (file.wrong_encoding() for file in files)):
                report.add("encoding", 1, problem, trouble=True)
            report.add("rejected", report.rejected, _causes(account.rejected), trouble=True)
        if not used:
            report.add("unreadable", 1, "no example is left", trouble=True)
            return

        # Texts, scores and tokens.
        self._add_texts(report)
        if "score" in reading.columns or "label" in reading.columns:
            pairs = np.asarray(self.keys.pairs).reshape(-1, 4)
            _describe_scores(np.asarray(self.keys.scores)[pairs[:, 2] == 1], report)
        if report.guessed and reading.format == "positive_pair":
            _add_labels(self._first_rows, report)
        self._add_tokens(report)

    def _add_texts(self, report: FileReport) -> None:
        """Report files whose pairs all contain a text twice, and texts that are probably placeholders."""
        has_two_prompts = self._tokens is not None and self._tokens.two_prompts
        if self._has_only_equal_texts and not has_two_prompts and report.format != "text":
            text = "every row pairs a text with itself: nothing can be learned. Use texts that belong together, such as a title"
            report.add(
                "no pairs", report.rows_used, f"{text} with its body or a question with its answer", trouble=True
            )
        for name, texts in sorted(self._suspicious.items()):
            shown = ", ".join(f"{text!r:.60}: {count:,} ×" for text, count in texts.most_common(SHOWN_PLACES))
            more = ", …" if len(texts) > SHOWN_PLACES else ""
            report.add(name, texts.total(), f"{_SUSPICIOUS[name]}: {texts.total():,}; {shown}{more}")

    def _add_tokens(self, report: FileReport) -> None:
        """Report quantiles of token counts, sampled texts, truncated texts, and texts without tokens."""
        lengths, tokens = self._lengths, self._tokens
        if tokens is not None and lengths:
            report.max_length = tokens.max_length
            report.truncated = sum(length > tokens.max_length for length in lengths)
            shares = {"shortest": 0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1}
            report.tokens = {name: int(np.quantile(lengths, share, method="lower")) for name, share in shares.items()}
            report.examples = [
                tokens.render(text) for text in self._samples if isinstance(tokens.lengths([text])[0], int)
            ]
        if report.truncated:
            text = f"{report.truncated:,} of {len(lengths):,} texts are cut at max_length {report.max_length}"
            report.add("truncated", report.truncated, text)
        if self._problems:
            text = f"texts without a token: {len(self._problems):,}. The first: {self._problems[0]}"
            report.add("untokenisable", len(self._problems), text, trouble=True)


def _causes(rejected: Sequence[BadRow]) -> str:
    """Return a sentence with the most frequent reasons of bad rows, with the number of rows and the first row."""
    of_cause: defaultdict[str, list[BadRow]] = defaultdict(list)
    for bad in rejected:
        of_cause[re.sub(r"'.*?'|`.*`|\d[\d.]*", "", bad.reason)].append(bad)
    most = sorted(of_cause.values(), key=len, reverse=True)
    shown = [f"{len(rows):,} × {rows[0].reason} (first: {rows[0].place})" for rows in most[:SHOWN_PLACES]]
    more = "; …" if len(most) > SHOWN_PLACES else ""
    return f"{len(rejected):,} row{'s' * (len(rejected) > 1)} cannot be used: {'; '.join(shown)}{more}"


def _with_scale(reading: ExampleReader, report: FileReport) -> DataSource:
    """Detect the scale of the scores, such as 0 to 5; return the settings with this `score_range`, and report the scale.

    The settings are returned unchanged if they have a score range, the scores are in 0..1, or the format has no scores.
    """
    settings = reading.settings
    report.score_range = settings.score_range
    if reading.format != "scored_pair" or settings.score_range is not None:
        return settings

    # The first scale that contains 90 % of the scores.
    rows = (row.values for row in reading.source.rows() if isinstance(row, Row) and reading.is_wanted(row.values))
    numbers = (_number(row.get(reading.columns["score"])) for row in rows)
    values = np.array([number for number in numbers if number is not None])
    scales = [scale for scale in _SCALES if ((values >= scale[0]) & (values <= scale[1])).sum() >= 0.9 * len(values)]
    low, high = scales[0] if scales else (0, 1)
    if set(np.unique(values).tolist()) == {0.0, 1.0, 2.0}:
        text = (
            f"the score column {reading.columns['score']!r} contains only 0, 1 and 2. If these are NLI classes (0 entailment, "
            "2 contradiction), set --format nli_pairs; if they are a scale, --score-range 0 2"
        )
        report.add("classes", len(values), text, trouble=True)
        low, high = 0, 2
    if (low, high) == (0, 1):
        return settings
    inside = values[(values >= low) & (values <= high)]
    if (low, high) == (0, 5) and inside.min() >= 1:
        low = 1
    text = f"scores from {inside.min():g} to {inside.max():g}, read on the scale {low} to {high}"
    report.add("scale", len(values), f"{text}. To train, set --data.score-range {low} {high}")
    report.score_range = (low, high)
    return replace(settings, score_range=(low, high))


def _number(value: object) -> float | None:
    """Convert a finite number or numeric text to float; return None for other values."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and isfinite(number) else None


def _describe_scores(scores: Any, report: FileReport) -> None:
    """Fill `report.scores`: count the scores by value, or in five bins if many. Report if all scores are equal."""
    values, counts = np.unique(scores.round(4), return_counts=True)
    if len(values) <= _MAX_LABELS:
        report.scores = {f"{value:g}": count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}
    else:
        bins, edges = np.histogram(scores, bins=5, range=(0, 1))
        report.scores = {f"{edges[at]:.1f}–{edges[at + 1]:.1f}": int(count) for at, count in enumerate(bins)}
    if len(values) == 1:
        text = f"every pair has the score {values[0]:g}: ranking terms (cosine, angle) learn nothing"
        report.add("one label", len(scores), text)


def _add_labels(rows: Sequence[Mapping[str, Any]], report: FileReport) -> None:
    """Report unused columns that contain numbers and may be labels; `rows` are the first used rows of the file."""
    for column in report.unused_columns:
        numbers = [_number(row[column]) for row in rows if row.get(column) not in (None, "")]
        if None not in numbers and 1 < len(set(numbers)) <= 101 and len(set(numbers)) < len(rows):
            text = (
                f"column {column!r} contains numbers and is not used: every pair is read as positive. If these are labels, set "
                f"--format scored_pair --columns score {shlex.quote(column)}"
            )
            report.add("label not read", len(rows), text)


def data_settings(source: DataSource, report: FileReport) -> dict[str, Any]:
    """Return the `data` section of training settings that reads a file exactly as this check did."""
    named = {name: column for name, column in report.columns.items() if source.columns.get(name) == column}
    return {
        "path": source.path,
        "format": None if source.format == DataSource.format else source.format,
        "columns": named,
        "score_range": source.score_range,
        "where": source.where,
    }


def write_fixed(files: Sequence[CheckedFile], folder: Path, out: Path) -> list[dict[str, Any]]:
    """Write two files per checked file: NAME.jsonl with the kept rows, NAME.quarantine.jsonl with the removed rows.

    Kept rows have all their columns. Dropped rows, such as neutral labels, are kept, because training drops them again.
    A line of the quarantine file has `file`, `line`, `reason` and `row`; `row` is null if the row cannot be parsed.

    Args:
        files: The checked files with their reports.
        folder: Folder in which the copies are written.
        out: Final path of this folder after it is renamed, for the paths in the result.

    Returns:
        For each file, the paths of both copies and the numbers `rows_in` = `kept` + `quarantined`.
    """
    fixed: list[dict[str, Any]] = []
    for source, report in files:
        whole = Path(source.path.removeprefix(STARTER)).name.removesuffix(".gz")
        stem = whole.rpartition(".")[0] or whole
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        taken = {path.name for path in folder.iterdir()}
        name = next(name for name in names if not {f"{name}.jsonl", f"{name}.quarantine.jsonl"} & taken)
        kept, quarantined = _write_fixed(source, report.removed, folder, name)
        counts = {"rows_in": kept + quarantined, "kept": kept, "quarantined": quarantined}
        written = {"cleaned": str(out / f"{name}.jsonl"), "quarantine": str(out / f"{name}.quarantine.jsonl")}
        fixed.append({"path": source.path, **written, **counts})
    return fixed


def _write_fixed(source: DataSource, removed: Mapping[int, str], folder: Path, name: str) -> tuple[int, int]:
    """Write NAME.jsonl (kept rows) and NAME.quarantine.jsonl (removed rows); return the numbers of their rows.

    `removed` is line → reason of the rows to remove; bad rows are removed too.
    """
    kept = quarantined = 0
    reading = open_examples(source)
    with (
        (folder / f"{name}.jsonl").open("w", encoding="utf-8") as cleaned,
        (folder / f"{name}.quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for number, row, result in _numbered(reading):
            values = row.values if isinstance(row, Row) else None
            reason = result.reason if isinstance(result, BadRow) else removed.get(number)
            if reason is None and isinstance(row, Row):
                kept += 1
                cleaned.write(json_row(reading.named_values(row)))
            else:
                quarantined += 1
                content = {"file": source.path, "line": number, "reason": reason, "row": values}
                quarantine.write(json_row(content))
    return kept, quarantined


def json_row(row: Mapping[str, Any]) -> str:
    """Return a row (column → value) as a line of JSON, with lone surrogates escaped."""
    # A lone surrogate cannot be encoded in UTF-8; its ASCII escape can, and is read back unchanged.
    text = json.dumps(plain(row), ensure_ascii=False, default=str)
    return (text if text == printable(text) else json.dumps(plain(row), default=str)) + "\n"
