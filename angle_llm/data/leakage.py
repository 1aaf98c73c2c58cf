"""Rows that repeat, contradict each other, or occur in an evaluation set.

Texts are compared by 8-byte keys (`data.keys`), to the letter and without case, spacing and punctuation ("near"). A row takes
about 60 bytes and a distinct text about 170, so a million triples take about 0.6 GB.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from angle_llm.data.columns import resolve_format
from angle_llm.data.examples import ExampleReader, Outcome
from angle_llm.data.formats import DataError, Dropped, PositivePair, ScoredPair, Triple
from angle_llm.data.keys import is_telling, key, near, pair_key, sound
from angle_llm.data.readers import EXTENSIONS, BadRow, Row, open_rows

if TYPE_CHECKING:
    import pandas as pd

SHOWN_PLACES = 5
NEUTRAL_SCORE = 0.5
"""Score of a dropped neutral row when it is compared with other rows."""
CONTRADICTION = 0.5
"""Labels of one pair that differ by more than this, on the scale 0..1, contradict each other."""
_EVALUATION_WORDS = {"test", "dev", "valid", "validation", "val", "trial", "eval"}
_TRAINING_WORDS = {"train", "training"}


@dataclass(frozen=True)
class Finding:
    """One kind of finding in a file; with `trouble` the exit code is 1."""

    kind: str
    trouble: bool
    count: int
    text: str
    places: list[str] = field(default_factory=list)
    """The first lines, with the other row if there is one."""


@dataclass
class FileKeys:
    """Counts and keys of the rows of one file; the texts themselves are not kept."""

    rows_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rejected: list[BadRow] = field(default_factory=list)
    rows: tuple[array[int], ...] = field(default_factory=lambda: tuple(array("Q") for _ in range(3)))
    """Line, exact key and near key of each used row."""
    pairs: tuple[array[Any], ...] = field(default_factory=lambda: tuple(array(kind) for kind in "QQdbb"))
    """Line, near key, score, used (0 for neutral), and equal texts, of each pair of texts; a triple has two."""
    texts: set[int] = field(default_factory=set)
    """Exact keys of all texts."""
    sentences: set[int] = field(default_factory=set)
    """Near keys of texts that are long enough to be telling."""

    def add(self, reading: ExampleReader, outcome: Outcome) -> Iterator[str]:
        """Add one row; yield its texts that are new."""
        self.rows_in += 1
        row, result = outcome
        if isinstance(result, BadRow):
            self.rejected.append(result)
        elif isinstance(result, Dropped):
            self.dropped[result.reason] += 1
            if result.reason == "neutral" and isinstance(row, Row):
                both = [row.values.get(reading.columns[name]) for name in ("premise", "hypothesis")]
                texts = [near(sound(text)) for text in both if isinstance(text, str)]
                if len(texts) == 2:
                    self._add_pairs(row.line, texts, [(0, 1, NEUTRAL_SCORE)], used=False)
        else:
            if isinstance(result, Triple):
                texts, pairs = [result.anchor, result.positive, result.negative], [(0, 1, 1.0), (0, 2, 0.0)]
            else:
                score = 1.0 if isinstance(result, PositivePair) else result.score
                texts, pairs = [result.left, result.right], [(0, 1, score)]
            bare = [near(text) for text in texts]
            in_order = list if isinstance(result, Triple) else sorted  # a pair is the same in both orders
            label = repr(result.score) if isinstance(result, ScoredPair) else ""
            values = row.line, key(*in_order(texts), label), key(*in_order(bare), label)
            for column, value in zip(self.rows, values, strict=True):
                column.append(value)
            self._add_pairs(row.line, bare, pairs, used=True)
            for text, bare_text in zip(texts, bare, strict=True):
                if (exact := key(text)) not in self.texts:
                    self.texts.add(exact)
                    if is_telling(bare_text):
                        self.sentences.add(key(bare_text))
                    yield text

    def _add_pairs(self, line: int, bare: list[str], pairs: list[tuple[int, int, float]], used: bool) -> None:
        for left, right, score in pairs:
            values = line, pair_key(bare[left], bare[right]), score, used, bare[left] == bare[right]
            for column, value in zip(self.pairs, values, strict=True):
                column.append(value)


@dataclass(frozen=True)
class EvaluationSet:
    """Near keys of the pairs (in any order) and of the telling sentences of one evaluation file."""

    name: str
    path: Path
    pairs: NDArray[np.uint64]
    sentences: NDArray[np.uint64]


def compare_rows(
    names: Sequence[str], files: Sequence[FileKeys], sets: Sequence[Sequence[EvaluationSet]]
) -> list[tuple[list[Finding], dict[int, str]]]:
    """Compare the rows of all files with one another, and those of each file with its evaluation sets.

    Returns:
        For each file its findings, and line → reason of the rows that `--fix` removes.
    """
    import pandas as pd

    def table(which: str, columns: list[str]) -> pd.DataFrame:
        frames = [pd.DataFrame({"file": pd.Series(dtype="int64"), **{name: [] for name in columns}})]
        for number, each in enumerate(files):
            values = {name: np.asarray(column) for name, column in zip(columns, getattr(each, which), strict=True)}
            if len(values["line"]):
                frames.append(pd.DataFrame({"file": number, **values}))
        return pd.concat(frames[1:] or frames, ignore_index=True)

    rows = table("rows", ["line", "exact", "near"])
    pairs = table("pairs", ["line", "key", "score", "used", "same"])
    by_key = pairs.groupby("key").score
    # Of 1, 0.5 and 0.2, only 1 and 0.2 contradict each other.
    pairs["distance"] = np.maximum(by_key.transform("max") - pairs.score, pairs.score - by_key.transform("min"))
    first_exact, first_near = (
        rows.index.to_series().groupby(rows[name]).transform("min") for name in ("exact", "near")
    )

    def place(frame: pd.DataFrame, at: int, file: int) -> str:
        other = frame.loc[at]
        return f"{int(other.line)}" if other.file == file else f"{names[int(other.file)]}:{int(other.line)}"

    def opposite(at: int) -> int:
        group = pairs[pairs.key == pairs.key[at]]
        return int((group.score - pairs.score[at]).abs().idxmax())

    def one_file(number: int, own_sets: Sequence[EvaluationSet]) -> tuple[list[Finding], dict[int, str]]:
        findings: list[Finding] = []
        removed: dict[int, str] = {}

        def add(kind: str, trouble: bool, frame: pd.DataFrame, text: str, reason: str = "", other: Any = None) -> None:
            distinct = frame.drop_duplicates("line").sort_values("line")
            if len(distinct):
                source = rows if "near" in frame else pairs
                shown = [
                    f"{line}" + (f" and {place(source, other(at), number)}" if other else "")
                    for at, line in distinct.line.head(SHOWN_PLACES).items()
                ]
                findings.append(Finding(kind, trouble, len(distinct), f"{len(distinct):,} {text}", shown))
                for line in distinct.line if reason else ():
                    removed.setdefault(int(line), reason)

        mine = pairs[(pairs.file == number) & (pairs.used == 1)]
        opposed = mine.distance > CONTRADICTION + 1e-9
        text = "rows hold a pair with the opposite label in another row"
        add("contradiction", True, mine[opposed], text, "contradiction", opposite)
        text = "rows hold a pair with a different label in another row"
        add("other label", False, mine[(mine.distance > 0) & ~opposed], text)
        same, unlike = mine.same == 1, mine.score < CONTRADICTION
        text = "rows label two equal texts as dissimilar (case, spacing and punctuation ignored)"
        add("unlike itself", True, mine[same & unlike], text, "unlike itself")
        add("same texts", False, mine[same & ~unlike], "rows pair a text with itself")
        counts = {}
        sentences = np.fromiter(files[number].sentences, dtype=np.uint64, count=len(files[number].sentences))
        for each in own_sets:
            text, reason = f"rows hold a pair of {each.name}", f"its pair is in {each.name}"
            add("contamination", True, mine[mine.key.isin(each.pairs)], text, reason)
            counts[each.name] = int(np.isin(sentences, each.sentences).sum())
        if listed := ", ".join(f"{name} {count:,}" for name, count in counts.items() if count):
            text = f"texts of 4 words or more that occur in {listed}"
            findings.append(Finding("sentences", False, sum(counts.values()), text))
        own = rows[rows.file == number]
        within = rows.file[first_near[own.index]].to_numpy() == number
        exact, nearly = first_exact[own.index] != own.index, first_near[own.index] != own.index
        text = "rows repeat an earlier row exactly, pairs in any order"
        add("duplicate", False, own[exact & within], text, "duplicate", first_exact.__getitem__)
        text = "rows repeat an earlier row but for case, spacing, punctuation"
        add("near duplicate", False, own[nearly & ~exact & within], text, "near duplicate", first_near.__getitem__)
        text = "rows repeat a row of an earlier file (case, spacing, punctuation ignored)"
        add("across files", False, own[~within], text, "across files", first_near.__getitem__)
        return findings, removed

    return [one_file(number, own_sets) for number, own_sets in enumerate(sets)]


def read_evaluation_sets(paths: Iterable[str | Path]) -> tuple[list[EvaluationSet], list[str]]:
    """Read evaluation files, and all those in folders; return them and what was skipped.

    In a folder, files named after training are skipped, and files not named after a test, dev or validation set if others are.

    Raises:
        DataError: for a path that does not exist, and for a named file that has no texts or cannot be read.
    """
    found: list[EvaluationSet] = []
    skipped: list[str] = []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name.endswith(EXTENSIONS)]
            files = [file for file in files if not file.name.startswith("STS.gs.")]  # scores of the files beside them
            words = {file: set(re.split(r"[^a-z0-9]+", str(file.relative_to(path)).lower())) for file in files}
            not_training = [file for file in files if not words[file] & _TRAINING_WORDS]
            chosen = [file for file in not_training if words[file] & _EVALUATION_WORDS] or not_training
            skipped += [str(file.relative_to(path)) for file in files if file not in chosen]
            for file in chosen:
                try:
                    found.append(_read_set(file, str(file.relative_to(path)), skipped))
                except DataError as error:
                    skipped.append(f"{file.relative_to(path)} ({error})")
        elif path.is_file():
            found.append(_read_set(path, path.name, skipped))
        else:
            raise DataError(f"--against: no file or folder {path}.")
    if not found:
        raise DataError(
            f"--against: no evaluation set found; skipped: {', '.join(skipped) or 'nothing'}. Name the files."
        )
    return found, skipped


def _read_set(path: Path, name: str, skipped: list[str]) -> EvaluationSet:
    rows = open_rows(path, tables=True)
    columns = _text_columns(rows.columns)
    if not columns:
        raise DataError(f"{path}: no known text column among {rows.columns}.")
    pairs: set[int] = set()
    sentences: set[int] = set()
    bad = 0
    for row in rows:
        if isinstance(row, BadRow):
            bad += 1
            continue
        for names in columns:
            values = [row.values.get(each) for each in names]
            lists = [value if isinstance(value, list) else [value] for value in values]
            bare = [near(sound(text)) for texts in lists for text in texts if isinstance(text, str)]
            sentences.update(key(text) for text in bare if is_telling(text))
            if len(names) == len(bare) == 2:
                pairs.add(pair_key(*bare))
    if bad:
        skipped.append(f"{bad:,} unreadable rows of {name}")
    arrays = [np.sort(np.fromiter(keys, dtype=np.uint64, count=len(keys))) for keys in (pairs, sentences)]
    return EvaluationSet(name, path.resolve(), arrays[0], arrays[1])


def _text_columns(columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Columns of pairs, else of single texts or lists of texts."""
    for format, pairs in (
        ("triple", [("anchor", "positive"), ("anchor", "negative")]),
        ("positive_pair", [("text1", "text2")]),
    ):
        try:
            _, fields = resolve_format(format, {}, columns)
        except DataError:
            continue
        return [(fields[left], fields[right]) for left, right in pairs]
    if {"premise", "hypothesis"} <= set(columns):
        return [("premise", "hypothesis")]
    return [(name,) for name in ("text", "sentence", "captions") if name in columns]
