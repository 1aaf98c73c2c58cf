"""Check data files before training (format, columns, scores, bad rows, lengths), and write cleaned copies.

`check_files` returns a `FileReport` for each file; `write_fixed` writes the copies. A finding is a problem in a file. A
finding that is trouble must be resolved before training; the exit code of the command is then 1.

| finding | trouble | meaning |
|---|---|---|
| unreadable | yes | the file or its columns cannot be read, or no example remains |
| rejected | yes | rows that cannot be used; training stops at the first |
| contradiction | yes | a pair whose labels in all files differ by more than half the scale, or a text with two classes |
| unlike itself | yes | two equal texts with a low score |
| contamination | yes | rows whose pair or labelled text is in an evaluation set, or whose query is in a BEIR folder |
| no pairs | yes | every row pairs a text with itself, or all texts have one class or different classes; training stops |
| untokenisable | yes | texts that have no token; training stops at such a text |
| duplicate, near duplicate, across files | no | rows that repeat an earlier row |
| sentences | no | texts of 4 words or more that are in an evaluation set |
| short | no | texts that may stand for a missing text: at most 3 characters, or a word such as [deleted] |
| lists | no | texts that are lists, such as ['a', 'b'], in a file that can contain lists |

A negative of a group that differs from a positive only in case, spacing and punctuation is a contradiction.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.data.examples import ExampleReader, open_examples
from angle_llm.data.formats import FORMATS, DataError, Dropped, Example, LabelledText, is_list_text, pairs_of, texts_of
from angle_llm.data.keys import SCRIPTS_WITHOUT_SPACES, printable
from angle_llm.data.leakage import SHOWN_PLACES, EvaluationSet, FileKeys, Finding, compare_rows
from angle_llm.data.sources import STARTER, BadRow, Row, without_extension
from angle_llm.io import plain
from angle_llm.objective import POSITIVE_ABOVE
from angle_llm.settings.train import DataSource, ModelSettings

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.source.resolve import ModelSource
    from angle_llm.model.source.tokenizer import SideTokenizers

_MAX_LABELS = 12
"""Maximum number of distinct scores that the report counts by value; more distinct scores are counted in five bins."""
_MOST_GRADES = 1000
"""Maximum number of distinct numbers in a column of grades; a column with more is an id, a time or the like."""
_SHORT = re.compile(
    rf"(?:(?![{SCRIPTS_WITHOUT_SPACES}]).){{1,3}}|-+|"
    r"[\[(<#]?(none|null|empty|n/a|na|missing|deleted|removed|unknown|undefined|todo)[\])>]?",
    re.IGNORECASE | re.DOTALL,
)
"""Pattern of texts that may stand for a missing text."""
_SUSPICIOUS = {
    "short": "texts that may stand for a missing text (remove their rows)",
    "lists": "texts that are lists written as text (write them as lists)",
}
"""Name of a finding about single texts → description of the texts."""
_SAMPLE_TEXTS = 5
"""Number of texts whose tokens the report prints."""
_BATCH = 1024
"""Number of texts that are tokenized at a time."""
_HEAD, _TAIL = 48, 16
"""Number of printed tokens at the start and end of a long text."""
_NO_LIMIT = 1 << 30
"""Maximum length in tokens that no text exceeds."""


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
    classes: dict[str, int] = field(default_factory=dict)
    """Class → number of labelled texts, the most frequent first."""
    distinct_texts: int = 0
    """Number of distinct texts in the file."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Quantile, such as "90%" → number of tokens per distinct text; empty if no model was given."""
    max_length: int | None = None
    """Maximum number of tokens of a text, from the model; None if no model was given."""
    truncated: int = 0
    """Number of distinct texts that are cut at `max_length`."""
    examples: list[str] = field(default_factory=list)
    """Tokens of the first texts as strings, with the pooled token in ⟦ ⟧."""
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
    def can_train(self) -> bool:
        """Whether a training run is possible with the rows that are left if bad rows are removed."""
        return self.rows_used > 0 and all(finding.kind != "no pairs" for finding in self.findings)

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
            counts = ", ".join(f"{name}: {count:,}" for name, count in self.scores.items())
            yield "scores", f"{counts}   (pairs; 1 is the same meaning)"
        if self.classes:
            most = [f"{name!r:.40}: {count:,}" for name, count in list(self.classes.items())[:_MAX_LABELS]]
            most += ["…"] if len(self.classes) > _MAX_LABELS else []
            yield "classes", f"{len(self.classes):,}: {', '.join(most)}"
        if self.rows_used:
            yield "texts", f"{self.distinct_texts:,} distinct"
        if self.tokens:
            quantiles = ", ".join(f"{name} {count:,}" for name, count in self.tokens.items())
            yield "tokens", f"{quantiles}; {self.truncated:,} texts are longer than max_length {self.max_length}"
        if self.train:
            yield "to train", f"angle-llm train {self.train}"
        for finding in sorted(self.findings, key=lambda finding: not finding.trouble):
            listed = ", ".join([*finding.places, *(["…"] if finding.count > len(finding.places) else [])])
            unit = self.unit if listed.isdecimal() else f"{self.unit}s"
            places = f" ({unit} {listed})" if finding.places else ""
            yield "TROUBLE" if finding.trouble else "note", f"{finding.kind}: {finding.text}{places}"
        if self.examples:
            pooled = "; the pooled token is in ⟦ ⟧" if "⟦" in self.examples[0] else ""
            yield "examples", f"texts as tokens, separated by |{pooled}"
        yield from ((f"text {number}", example) for number, example in enumerate(self.examples, 1))


def check_files(
    sources: Sequence[DataSource], token_counter: TokenCounter | None, sets: Sequence[EvaluationSet]
) -> list[FileReport]:
    """Check data files: format, columns, scores, bad rows, repeats, contradictions, and rows of evaluation sets.

    Repeats and contradictions are also searched between files. A file is not compared with an evaluation set that was
    read from the same file. If `token_counter` is None, numbers of tokens are not checked.
    """
    reports: list[FileReport] = []
    checked: list[tuple[FileReport, FileKeys]] = []
    for settings in sources:
        try:
            report, keys = _check_file(settings, token_counter, sets)
            checked.append((report, keys))
        except DataError as error:
            report = FileReport(settings.path)
            report.add("unreadable", 1, str(error), trouble=True)
        reports.append(report)
    compare_rows([keys for _, keys in checked])
    for report, keys in checked:
        report.findings += keys.findings()
        report.removed = keys.removed
    return reports


def _check_file(
    settings: DataSource, token_counter: TokenCounter | None, sets: Sequence[EvaluationSet]
) -> tuple[FileReport, FileKeys]:
    """Read a data file once; return its report, and the hashes of its rows to compare them with other rows."""
    reading = open_examples(settings)
    files = reading.source.files
    format = FORMATS[reading.format]
    identities = {file.identity for file in files}
    keys = FileKeys(settings.path, [tested for tested in sets if tested.identity not in identities])

    # Read all rows.
    row_counts = reading.report()
    contents = _Contents(token_counter, row_counts.unused_columns)
    examples: list[Example] = []
    for number, row, result in _numbered(reading):
        row_counts.count(result)
        if isinstance(result, Dropped | BadRow) or isinstance(row, BadRow):
            continue
        if format.combine is not None:
            examples.append(result)
        contents.add(result, keys.add(number, result), row.values)
    contents.count_tokens()
    # Numbers of rows; a row without a partner for a triple is not used.
    used = len(keys.rows)
    if format.combine is not None:
        rows_of_examples = len(format.combine(examples)) * format.rows_per_example
        row_counts.drop("unpaired", used - rows_of_examples)
        used = rows_of_examples
    report = FileReport(
        path=settings.path,
        format=reading.format,
        guessed=settings.format == "auto",
        columns=reading.columns,
        unused_columns=row_counts.unused_columns,
        unit="row" if len(files) > 1 else files[0].unit,
        rows_in=row_counts.rows_in,
        rows_used=used,
        dropped=row_counts.dropped,
        rejected=len(row_counts.rejected),
        scores=_score_table(contents.scores) if {"score", "hypothesis"} & reading.columns.keys() else {},
        classes=dict(contents.classes.most_common()),
        distinct_texts=len(keys.texts),
    )
    if row_counts.rejected:
        report.add("rejected", report.rejected, _causes(row_counts.rejected), trouble=True)
    contents.add_findings(report)
    return report, keys


class _Contents:
    """Scores, classes, suspicious texts and numbers of tokens in the rows of a file, and numbers in unused columns."""

    def __init__(self, token_counter: TokenCounter | None, unused_columns: Sequence[str]) -> None:
        self.scores = Counter[float]()
        self.classes = Counter[str]()
        self._counter = token_counter
        self._suspicious = {problem: Counter[str]() for problem in _SUSPICIOUS}
        # A text with two prompts is two inputs.
        self._has_different_texts = token_counter is not None and token_counter.tokenizers.prompts.differ
        self._numbers: dict[str, set[float]] = {column: set() for column in unused_columns}
        self._uncounted: list[str] = []
        self._samples: list[str] = []
        self._tokens: list[int | str] = []
        self._unknown: list[str] = []

    def add(self, example: Example, new_texts: Sequence[str], values: Mapping[str, Any]) -> None:
        """Add an example, and the values of its row; `new_texts` are its texts that are in no earlier example."""
        for column, numbers in list(self._numbers.items()):
            try:
                if len(numbers) <= _MOST_GRADES:
                    numbers.add(float(values[column] if type(values[column]) is not bool else "none"))
            except (KeyError, TypeError, ValueError, OverflowError):  # a text, or no value
                del self._numbers[column]
        if isinstance(example, LabelledText):
            self.classes[example.label] += 1
        self.scores.update(round(score, 4) for _, _, score in pairs_of(example))
        texts = [text.strip() for text in texts_of(example)]
        self._has_different_texts = self._has_different_texts or len(set(texts)) > 1
        self._suspicious["short"].update(filter(_SHORT.fullmatch, texts))
        self._suspicious["lists"].update(filter(is_list_text, texts))
        if self._counter is not None:
            self._uncounted += new_texts
        if len(self._uncounted) >= _BATCH:
            self.count_tokens()

    def count_tokens(self) -> None:
        """Count the tokens of the texts that were added since the last call."""
        if self._counter is not None and self._uncounted:
            self._tokens += self._counter.lengths(self._uncounted)
            self._unknown += self._counter.unknown(self._uncounted)
            self._samples = self._samples or self._uncounted[:_SAMPLE_TEXTS]
            self._uncounted = []

    def add_findings(self, report: FileReport) -> None:
        """Add findings to the report: unusable data, suspicious texts, a column that may be grades, and numbers of tokens."""
        used = report.rows_used
        if not used:
            report.add("unreadable", 1, "no example is left", trouble=True)
        elif self.classes and len(self.classes) in (1, used):  # one class, or another class for each text
            text = f"{used:,} texts in {len(self.classes):,} classes; expected two classes, and a class with two texts"
            report.add("no pairs", used, text, trouble=True)
        elif len(self.scores) == 1 and max(self.scores) <= POSITIVE_ABOVE:
            text = (
                "all pairs have one low score, so no pair is positive. Check --score-range (a reversed range: 1 0), or add "
                "pairs that belong together"
            )
            report.add("no pairs", used, text, trouble=True)
        elif not self._has_different_texts and report.format not in ("text", "labelled_text"):
            text = (
                "every row pairs a text with itself: nothing can be learned. Use texts that belong together, such as a title "
                "with its body or a question with its answer"
            )
            report.add("no pairs", used, text, trouble=True)
        for problem, meaning in _SUSPICIOUS.items():
            if total := self._suspicious[problem].total():
                most_common = self._suspicious[problem].most_common(SHOWN_PLACES)
                shown = ", ".join(f"{text!r:.60}: {count:,} ×" for text, count in most_common)
                report.add(problem, total, f"{meaning}: {total:,}; most often {shown}")
        for column, numbers in self._numbers.items() if report.guessed and report.format == "positive_pair" else ():
            if 1 < len(numbers) <= min(_MOST_GRADES, used / 2):
                flags = f"--columns score {shlex.quote(column)} --score-range {min(numbers):g} {max(numbers):g}"
                text = f"{column!r} has few numbers. If they are grades of the pairs, add --format scored_pair {flags}"
                report.add("not used", used, text)
        if self._unknown:
            shown = f"{len(self._unknown):,}; the first: {self._unknown[0]!r:.60}"
            text = f"texts of unknown tokens only, so that texts of equal length have one vector: {shown}"
            report.add("unknown tokens", len(self._unknown), f"{text}. Choose a model with tokens for them")
        if self._counter is not None:
            _add_tokens(report, self._counter, self._tokens, self._samples)


@dataclass(frozen=True)
class TokenCounter:
    """Counts and prints the tokens of texts with a model's tokenizers, prompts and pooling, without its weights."""

    source: ModelSource
    encoder: SentenceEncoder
    """Encoder with the prompts, pooling and maximum length of the model, and a small random backbone."""
    config: Any
    """Configuration of the model."""
    tokenizers: SideTokenizers
    """Tokenizers that do not cut texts."""

    def lengths(self, texts: list[str]) -> list[int | str]:
        """Return the number of tokens of each text, before truncation, or the error message if a text has no tokens.

        If queries and documents have different prompts, the larger number of tokens is returned.
        """
        try:
            sides = [[len(ids) for ids in tokenize(texts)] for tokenize in self.tokenizers.distinct]
        except ValueError as error:
            if len(texts) > 1:
                return [self.lengths([text])[0] for text in texts]
            return [str(error).replace(str(_NO_LIMIT), str(self.encoder.max_length))]
        return [max(lengths) for lengths in zip(*sides, strict=True)]

    def unknown(self, texts: Sequence[str]) -> list[str]:
        """Return the texts whose tokens are all the unknown token of the tokenizer."""
        from angle_llm.model.source.tokenizer import plain_ids

        tokenizer = self.encoder.tokenizer
        others = [text for text in texts if not text.isascii()]
        if tokenizer.unk_token_id is None or not others:
            return []
        unknown = tokenizer.unk_token_id
        empty = {unknown, tokenizer.convert_tokens_to_ids("▁")}  # Unigram: a space before the first word
        ids = plain_ids(tokenizer, others)
        return [text for text, row in zip(others, ids, strict=True) if unknown in row and empty.issuperset(row)]

    def render(self, text: str) -> str:
        """Return the tokens of a text with its prompt as one line, separated by bars, with the pooled token in ⟦ ⟧.

        If queries and documents have different prompts, the line contains the tokens with both prompts. The middle of a
        long text is omitted.
        """
        from angle_llm.model.pooling import pooling_named

        shown: list[str] = []
        for tokenize in self.tokenizers.distinct:
            (ids,) = tokenize([text])
            tokens = [tokenize.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in ids]
            tokens = [printable(token).replace("\n", "\\n").replace("\r", "\\r") for token in tokens]
            if (pooled := pooling_named(self.encoder.pooling).token) is not None:
                tokens[pooled] = f"⟦{tokens[pooled]}⟧"
            if len(tokens) > _HEAD + _TAIL:
                tokens[_HEAD:-_TAIL] = [f" … {len(tokens) - _HEAD - _TAIL:,} tokens … "]
            shown.append("|".join(tokens))
        return shown[0] if len(shown) == 1 else f"query: {shown[0]}  document: {shown[1]}"


def open_tokens(settings: ModelSettings) -> TokenCounter:
    """Open the tokenizer of a saved encoder or base model as a token counter. Raises the errors of opening the model."""
    from angle_llm.model.meta_model import tiny_encoder_copy
    from angle_llm.model.source.resolve import resolve_model
    from angle_llm.model.source.tokenizer import SideTokenizers

    source = resolve_model(settings.path)
    encoder, config = tiny_encoder_copy(source, settings)
    tokenizers = SideTokenizers.of(encoder.tokenizer, encoder.prompts, _NO_LIMIT)
    return TokenCounter(source, encoder, config, tokenizers)


def _add_tokens(report: FileReport, counter: TokenCounter, counts: Sequence[int | str], samples: Sequence[str]) -> None:
    """Add quantiles of the numbers of tokens, sampled texts, and texts without tokens to a report.

    `counts` has the number of tokens of each distinct text, or an error message.
    """
    lengths = [length for length in counts if isinstance(length, int)]
    problems = [problem for problem in counts if isinstance(problem, str)]
    if lengths:
        shares = {"shortest": 0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1}
        report.tokens = {name: int(np.quantile(lengths, share, method="lower")) for name, share in shares.items()}
        report.max_length = counter.encoder.max_length
        report.truncated = sum(length > report.max_length for length in lengths)
        usable = (text for text, length in zip(samples, counts, strict=False) if isinstance(length, int))
        report.examples = list(map(counter.render, usable))
    if problems:
        text = f"texts without a token: {len(problems):,}. The first: {problems[0]}"
        report.add("untokenisable", len(problems), text, trouble=True)


def _numbered(reading: ExampleReader) -> Iterator[tuple[int, Row | BadRow, Example | Dropped | BadRow]]:
    """Yield (number, row, result) for every row: the line or row of a file, or the number in several files together."""
    several = len(reading.source.files) > 1
    for number, (row, result) in enumerate(reading.outcomes(), 1):
        yield number if several else row.line, row, result


def _causes(rejected: Sequence[BadRow]) -> str:
    """Return a sentence with the most frequent reasons of bad rows, with the number of rows and the first row."""
    of_cause: defaultdict[str, list[BadRow]] = defaultdict(list)
    for bad in rejected:
        of_cause[re.sub(r"'.*?'|`.*`|\d[\d.]*", "", bad.reason)].append(bad)
    causes = sorted(of_cause.values(), key=len, reverse=True)
    shown = [f"{rows[0].place} (1 of {len(rows):,}): {rows[0].reason}" for rows in causes[:SHOWN_PLACES]]
    more = "; …" if len(causes) > SHOWN_PLACES else ""
    return f"{len(rejected):,} {'rows' if len(rejected) > 1 else 'row'} cannot be used: {'; '.join(shown)}{more}"


def _score_table(counts: Counter[float]) -> dict[str, int]:
    """Return the numbers of pairs by score, or in five bins if there are many different scores."""
    if len(counts) <= _MAX_LABELS:
        return {f"{score:g}": count for score, count in sorted(counts.items())}
    bins, edges = np.histogram(list(counts), bins=5, range=(0, 1), weights=list(counts.values()))
    return {f"{edges[at]:.1f}–{edges[at + 1]:.1f}": int(count) for at, count in enumerate(bins)}


def write_fixed(files: Sequence[tuple[DataSource, FileReport]], folder: Path, out: Path) -> list[dict[str, Any]]:
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
        # The names of the copies.
        name = without_extension(Path(source.path.removeprefix(STARTER)).absolute())
        while any((folder / f"{name}{ending}").exists() for ending in (".jsonl", ".quarantine.jsonl")):
            name = f"{name}-{len(fixed) + 1}"
        cleaned = f"{name}.jsonl"
        quarantine = f"{name}.quarantine.jsonl"
        # Their rows.
        kept = quarantined = 0
        reading = open_examples(source)
        with (
            (folder / cleaned).open("x", encoding="utf-8") as kept_file,
            (folder / quarantine).open("x", encoding="utf-8") as removed_file,
        ):
            for number, row, result in _numbered(reading):
                reason = result.reason if isinstance(result, BadRow) else report.removed.get(number)
                if reason is None and isinstance(row, Row):
                    kept += 1
                    kept_file.write(json_row(reading.named_values(row)))
                else:
                    quarantined += 1
                    values = row.values if isinstance(row, Row) else None
                    content = {"file": source.path, "line": number, "reason": reason, "row": values}
                    removed_file.write(json_row(content))
        paths = {"path": source.path, "cleaned": str(out / cleaned), "quarantine": str(out / quarantine)}
        fixed.append(paths | {"rows_in": kept + quarantined, "kept": kept, "quarantined": quarantined})
    return fixed


def json_row(row: Mapping[str, Any]) -> str:
    """Return a row (column → value) as a line of JSON, with lone surrogates escaped.

    Decimals become floats, and other values that JSON cannot represent texts.
    """
    text = json.dumps(
        plain(row), ensure_ascii=False, default=lambda value: float(value) if isinstance(value, Decimal) else str(value)
    )
    return printable(text) + "\n"
