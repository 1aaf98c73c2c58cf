"""Rows that repeat another row, contradict another row, or occur in an evaluation set.

Texts are compared by 8-byte hashes (`data.keys`): an exact key of the text, and a near key of the text without case,
spacing and punctuation. A row takes about 60 bytes and a distinct text about 170, so a million triples take about 0.6
GB.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from angle_llm.data.columns import USUAL_NAMES, fields_of, resolve_format
from angle_llm.data.formats import DataError, Example, Group, ScoredPair, Triple, pairs_of, texts_of
from angle_llm.data.keys import is_distinctive, key, normalized, pair_key, printable
from angle_llm.data.readers import (
    STARTER,
    BadRow,
    JudgedQueries,
    RowSource,
    find_path,
    is_data_name,
    is_judged,
    open_rows,
    splits_of,
)

if TYPE_CHECKING:
    import pandas as pd

SHOWN_PLACES = 5
"""Maximum number of row locations that the report of a problem lists."""
NEUTRAL_SCORE = 0.5
"""Score of a neutral NLI pair when it is compared with other pairs; neutral rows are not used for training."""
CONTRADICTION = 0.5
"""Two scores of the same pair contradict each other if they differ by more than this (scale 0 to 1)."""
_TROUBLE = ("contradiction", "unlike itself", "contamination")
"""Kinds of findings (problems in a data file) that must be resolved before training."""
_REMOVED = (*_TROUBLE, "duplicate", "near duplicate", "across files")
"""Kinds of findings (problems in a data file) whose rows `data check --fix` removes."""
_COMPARED = 1_000_000
"""Maximum number of training examples that are compared with the evaluation sets of a training run."""
_ID_COLUMNS = ("query_id", "query-id", "_id", "id", "positive_id", "corpus-id")
_EVALUATION_WORDS = {"test", "dev", "valid", "validation", "val", "trial", "eval", "held", "heldout"}
_TRAINING_WORDS = {"train", "training"}


@dataclass(frozen=True)
class Finding:
    """A problem in a data file: its kind, the number of rows or texts, and a sentence for the report."""

    kind: str
    trouble: bool
    """Whether the problem must be resolved before training; the exit code is then 1."""
    count: int
    text: str
    places: list[str] = field(default_factory=list)
    """Line numbers of the first affected rows; for repeats and contradictions also the line of the matching row."""


@dataclass
class FileKeys:
    """Hashes of the rows, pairs and texts of a data file, to find repeats without keeping the texts.

    An exact key is the hash of a text; a near key is the hash of a text without case, spacing and punctuation.
    """

    rows: array[int] = field(default_factory=lambda: array("Q"))
    """Four numbers per used row: line, exact key of its texts, near key of its texts, near key of its query."""
    pairs: array[int] = field(default_factory=lambda: array("Q"))
    """Four numbers per pair: line, near key of the two texts, whether the row is used, whether their near keys are equal.

    A neutral NLI row is not used.
    """
    scores: array[float] = field(default_factory=lambda: array("d"))
    """Score of each pair, from 0 to 1, in the order of `pairs`."""
    texts: set[int] = field(default_factory=set)
    """Exact keys of all texts of the file."""
    sentences: set[int] = field(default_factory=set)
    """Near keys of the texts of 4 words or more (`is_distinctive`)."""
    ids: array[int] = field(default_factory=lambda: array("Q"))
    """Two numbers per value of an id column: line, and hash of the id."""
    ROW_VALUES: ClassVar[int] = 4
    """Count of numbers per row in `rows`."""

    def add(self, line: int, example: Example, values: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
        """Store the hashes of a row and its training example; yield the texts that no earlier row contains.

        `values` is column → value of the row; the ids in its id columns are stored too.
        """
        for column in _ID_COLUMNS:
            if isinstance(found := values.get(column), str | int):
                self.ids.extend((line, key(str(found))))
        bare_of = {text: normalized(text) for text in texts_of(example)}
        exact_key, near_key = _row_key(example, {text: text for text in bare_of}), _row_key(example, bare_of)
        self.rows.extend((line, exact_key, near_key, key(next(iter(bare_of.values())))))
        for left, right, score in pairs_of(example):
            self.add_pair(line, bare_of[left], bare_of[right], score)
        for text, bare_text in bare_of.items():
            if (exact := key(text)) not in self.texts:
                self.texts.add(exact)
                if is_distinctive(bare_text):
                    self.sentences.add(key(bare_text))
                yield text

    def add_pair(self, line: int, left: str, right: str, score: float, *, used: bool = True) -> None:
        """Store the hash and the score of a pair of texts, given without case, spacing and punctuation (`normalized`).

        `used` is false for a neutral NLI pair, which is only compared with other pairs.
        """
        self.pairs.extend((line, pair_key(left, right), used, left == right))
        self.scores.append(score)


def _row_key(example: Example, form: Mapping[str, str]) -> int:
    """Return a hash of a training example, with every text replaced by `form[text]` (such as the normalized text).

    The hash does not depend on the order of the texts of a pair, or on the order of the positives or negatives of a
    group. A triple and a group with the same texts have equal hashes.
    """
    if isinstance(example, Triple):
        example = Group(example.anchor, (example.positive,), (example.negative,))
    if isinstance(example, Group):
        lists = [sorted(form[text] for text in texts) for texts in (example.positives, example.negatives)]
        return key(form[example.query], *lists[0], "", *lists[1])
    texts = [form[text] for text in texts_of(example)]
    return key(*sorted(texts), repr(example.score) if isinstance(example, ScoredPair) else "")


@dataclass(frozen=True)
class EvaluationSet:
    """Hashes of the pairs and texts of an evaluation set (a file or a split of a BEIR folder), to find leaks.

    Texts are hashed without case, spacing and punctuation (`normalized`).
    """

    name: str
    path: Path
    """Absolute path of the evaluation file; a data file is not compared with itself."""
    pairs: NDArray[np.uint64]
    """Hashes of the text pairs without case, spacing and punctuation; the order of the two texts has no effect."""
    sentences: NDArray[np.uint64]
    """Hashes of the texts of 4 words or more (`is_distinctive`), without case, spacing and punctuation."""
    queries: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Hashes of the queries without case, spacing and punctuation; only for BEIR folders and retrieval tasks."""
    documents: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Hashes of the judged documents without case, spacing and punctuation; only for BEIR folders."""
    ids: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Hashes of the ids of queries and judged documents; only for BEIR folders."""

    @classmethod
    def of(
        cls,
        name: str,
        pairs: Iterable[tuple[str, str]],
        texts: Iterable[str],
        queries: Iterable[str] = (),
        documents: Iterable[str] = (),
    ) -> EvaluationSet:
        """Create an evaluation set from pairs, single texts, queries and judged documents in memory."""

        def bare(some: Iterable[str]) -> set[str]:
            return {normalized(printable(text)) for text in some}

        found = (
            {pair_key(normalized(printable(left)), normalized(printable(right))) for left, right in pairs},
            {key(text) for text in bare(texts) if is_distinctive(text)},
            {key(text) for text in bare(queries)},
            {key(text) for text in bare(documents)},
        )
        return cls(name, Path(name), *map(_array, found))


def count_shared(examples: Sequence[Example], sets: Sequence[EvaluationSet]) -> list[dict[str, tuple[int, int]]]:
    """Count the pairs, queries and texts of each evaluation set that also occur in training examples.

    Single texts count only with 4 words or more. At most `_COMPARED` examples are compared, evenly spaced. A triple of
    sentences takes about 30 µs, and a pair with a text of 150 words 100 µs, for all sets together.

    Returns:
        For each evaluation set, kind → (number that also occurs in the examples, number in the evaluation set). Kinds
            are `pairs`, `queries` and `texts of 4 words or more`; kinds without a common text are missing.
    """
    kinds = {"pairs": "pairs", "queries": "queries", "sentences": "texts of 4 words or more"}
    keys_of = [{name: set(getattr(each, name).tolist()) for name in kinds} for each in sets]
    wanted = {name: set().union(*(keys[name] for keys in keys_of)) for name in kinds}
    found: dict[str, set[int]] = {name: set() for name in kinds}
    for at in range(0, len(examples), len(examples) // _COMPARED + 1):
        pairs = pairs_of(examples[at])
        bare = {text: normalized(text) for text in texts_of(examples[at])}
        found["sentences"] |= wanted["sentences"] & set(map(key, bare.values()))
        found["queries"] |= wanted["queries"] & {key(bare[left]) for left, _, _ in pairs}
        found["pairs"] |= wanted["pairs"] & {pair_key(bare[left], bare[right]) for left, right, _ in pairs}
    return [
        {kinds[name]: (shared, len(keys)) for name, keys in by_kind.items() if (shared := len(keys & found[name]))}
        for by_kind in keys_of
    ]


def compare_rows(
    names: Sequence[str], files: Sequence[FileKeys], sets: Sequence[Sequence[EvaluationSet]]
) -> list[tuple[list[Finding], dict[int, str]]]:
    """Find rows that repeat or contradict rows of any file, and rows that also occur in evaluation sets.

    Args:
        names: Names of the files, for the report.
        files: Hashes of the rows of each file.
        sets: The evaluation sets with which each file is compared.

    Returns:
        For each file, the problems, and line → reason of the rows that `data check --fix` removes.
    """
    rows = _table([each.rows for each in files], ["line", "exact", "near", "query"])
    ids = _table([each.ids for each in files], ["line", "key"])
    pairs = _table([each.pairs for each in files], ["line", "key", "used", "same"])
    pairs["score"] = np.concatenate([np.zeros(0), *(np.asarray(each.scores) for each in files)])
    by_key = pairs.groupby("key").score
    # Of 1, 0.5 and 0.2, only 1 and 0.2 contradict each other.
    pairs["distance"] = np.maximum(by_key.transform("max") - pairs.score, pairs.score - by_key.transform("min"))
    for name in ("exact", "near"):
        rows[f"first_{name}"] = rows.index.to_series().groupby(rows[name]).transform("min")

    found = [list[Finding]() for _ in files]
    removed = [dict[int, str]() for _ in files]

    def place(row: Any, file: int) -> str:
        """Return the line number of a row; with file name, if the row is not in file number `file`."""
        return f"{int(row.line)}" if row.file == file else f"{names[int(row.file)]}:{int(row.line)}"

    def add(kind: str, frame: pd.DataFrame, text: str, other: Any = None, reason: str = "") -> None:
        """Add a finding (a problem) to each file that has rows in the table `frame`.

        `other` maps an index of `frame` to the row that matches this row. If `reason` is empty, `kind` is the reason.
        """
        for file, part in frame.drop_duplicates(["file", "line"]).sort_values("line").groupby("file"):
            places = [
                f"{line} and {place(other(at), file)}" if other else f"{line}"
                for at, line in part.line.head(SHOWN_PLACES).items()
            ]
            found[file].append(Finding(kind, kind in _TROUBLE, len(part), f"rows that {text}: {len(part):,}", places))
            for line in part.line if kind in _REMOVED else ():
                removed[file].setdefault(int(line), reason or kind)

    def opposite(at: int) -> Any:
        """Return the row of `pairs` with the same pair of texts as row `at` and the most different score."""
        group = pairs[pairs.key == pairs.key[at]]
        return pairs.loc[(group.score - pairs.score[at]).abs().idxmax()]

    used = pairs[pairs.used == 1]
    opposed = used.distance > CONTRADICTION + 1e-9
    add("contradiction", used[opposed], "contain pairs that have the opposite label elsewhere", opposite)
    add("other label", used[(used.distance > 0) & ~opposed], "contain a pair that has a different label in another row")
    same, unlike = used.same == 1, used.score < CONTRADICTION
    text = "label two equal texts as dissimilar (case, spacing and punctuation ignored)"
    add("unlike itself", used[same & unlike], text)
    add("same texts", used[same & ~unlike], "pair a text with itself")
    for file, own_sets in enumerate(sets):
        for each in own_sets:
            shared = used[(used.file == file) & used.key.isin(each.pairs)]
            add("contamination", shared, f"contain a pair of {each.name}", reason=f"its pair is in {each.name}")
            asked = rows[(rows.file == file) & rows["query"].isin(each.queries) & ~rows.line.isin(shared.line)]
            add("contamination", asked, f"contain a query of {each.name}", reason=f"its query is in {each.name}")
            named = ids[(ids.file == file) & ids.key.isin(each.ids)]
            add("ids", named, f"have the id of a query or judged document of {each.name}; the texts may differ")
        sentences = _array(files[file].sentences)
        for kind, text in (
            ("sentences", "texts of 4 words or more that are also in evaluation sets"),
            ("documents", "texts of 4 words or more that are judged documents"),
        ):
            counts = {each.name: int(np.isin(sentences, getattr(each, kind)).sum()) for each in own_sets}
            if listed := ", ".join(f"{count:,} in {name}" for name, count in counts.items() if count):
                found[file].append(Finding(kind, False, sum(counts.values()), f"{text}: {listed}"))
    exact, nearly = rows.first_exact != rows.index, rows.first_near != rows.index
    within = rows.file[rows.first_near].to_numpy() == rows.file
    text = "repeat an earlier row exactly (pairs in any order)"
    add("duplicate", rows[exact & within], text, lambda at: rows.loc[rows.first_exact[at]])
    text = "repeat an earlier row (case, spacing and punctuation ignored)"
    add("near duplicate", rows[nearly & ~exact & within], text, lambda at: rows.loc[rows.first_near[at]])
    text = "repeat a row of an earlier file (case, spacing and punctuation ignored)"
    add("across files", rows[~within], text, lambda at: rows.loc[rows.first_near[at]])
    return list(zip(found, removed, strict=True))


def _table(parts: Sequence[array[int]], columns: list[str]) -> pd.DataFrame:
    """Combine flat arrays, one per file, to a table with the given columns and a column `file` (file number).

    An array contains the values of its first row, then of its second row, and so on.
    """
    import pandas as pd

    values = [np.asarray(part, dtype=np.uint64).reshape(-1, len(columns)) for part in parts]
    frame = pd.DataFrame(np.concatenate([np.zeros((0, len(columns)), np.uint64), *values]), columns=columns)
    return frame.assign(file=np.repeat(np.arange(len(values)), [len(each) for each in values]))


# ------------------------------------------------------------------------------------------------ evaluation sets


def read_evaluation_sets(
    paths: Iterable[str | Path], columns: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[EvaluationSet], list[str]]:
    """Read evaluation sets from files, from splits of BEIR folders (FOLDER@SPLIT), and from folders with such files.

    In a folder, files and splits whose name contains `train` are skipped. If the names of some files contain a word
    such as `test`, `dev` or `validation`, the other files are skipped too.

    Args:
        columns: Field of a data format → column; used for the files that have the column.

    Returns:
        The evaluation sets, and the names of skipped files, splits and rows with the reason.

    Raises:
        DataError: for a path that does not exist, a named file that has no texts or cannot be read, or if there is no
            evaluation set.
    """
    found: list[EvaluationSet] = []
    skipped: list[str] = []
    for given in paths:
        path = find_path(str(given))
        name, _, split = str(given).rpartition("@")
        folder = find_path(name) if name and not path.exists() else None
        if folder is not None and is_judged(folder):
            found.append(_read_judged(folder, split))
        elif path.is_file() or str(given).startswith(STARTER) or (folder is not None and folder.is_dir()):
            found.append(_read_set(given, path.name, skipped, columns))
        elif path.is_dir():
            found += _read_folder(path, skipped, columns)
        else:
            raise DataError(f"--against: no file or folder {path}.")
    if not found:
        raise DataError(
            f"--against: no evaluation set found; skipped: {', '.join(skipped) or 'nothing'}. Name the files."
        )
    return found, skipped


def _read_folder(folder: Path, skipped: list[str], mapping: Mapping[str, str]) -> Iterator[EvaluationSet]:
    """Yield the evaluation sets in a folder and its subfolders.

    The names of skipped files and splits are appended to `skipped`. `mapping` is field of a data format → column.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and is_data_name(file.name)]
    files = [file for file in files if not file.name.startswith("STS.gs.")]  # scores, read with STS.input.*
    for judged in sorted(each.parent for each in folder.rglob("qrels") if each.is_dir()):
        files = [file for file in files if judged not in file.parents]
        splits = splits_of(judged)
        if not splits:
            skipped.append(f"{judged.name} (no qrels/*.tsv)")
        for split in splits:
            if _words(split) & _TRAINING_WORDS:
                skipped.append(f"{judged.name}@{split}")
                continue
            try:
                yield _read_judged(judged, split)
            except DataError as error:
                skipped.append(f"{judged.name}@{split} ({error})")
    names = {file: str(file.relative_to(folder)) for file in files}
    not_training = [file for file in files if not _words(names[file]) & _TRAINING_WORDS]
    chosen = [file for file in not_training if _words(names[file]) & _EVALUATION_WORDS] or not_training
    skipped += [f"{name} (because of its name)" for file, name in names.items() if file not in chosen]
    for file in chosen:
        try:
            yield _read_set(file, names[file], skipped, mapping)
        except DataError as error:
            skipped.append(f"{names[file]} ({error})")


def _words(name: str) -> set[str]:
    """Return the words and numbers in a file name, in lower case."""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _read_set(source: str | Path, name: str, skipped: list[str], mapping: Mapping[str, str]) -> EvaluationSet:
    """Read an evaluation file, and return the hashes of its pairs and texts.

    A message with the number of unreadable rows is appended to `skipped`. `mapping` is field of a data format → column.

    Raises:
        DataError: if the file cannot be read or has no text column.
    """
    rows = open_rows(source, tables=True)
    columns = _text_columns(rows.columns, mapping)
    if not columns:
        raise DataError(
            f"{source}: no known text column among {', '.join(rows.columns)}. Name the text columns, such as --columns text1 "
            "question text2 answer."
        )
    pairs: set[int] = set()
    sentences: set[int] = set()
    bad = 0
    for row in rows:
        if isinstance(row, BadRow):
            bad += 1
            continue
        for names in columns:
            sides = [[normalized(printable(text)) for text in _texts_in(row.values.get(each))] for each in names]
            sentences.update(key(text) for texts in sides for text in texts if is_distinctive(text))
            if len(sides) == 2:
                pairs.update(pair_key(left, right) for left in sides[0] for right in sides[1])
    if bad:
        skipped.append(f"{bad:,} unreadable rows of {name}")
    return EvaluationSet(name, (rows.path or Path(source)).resolve(), _array(pairs), _array(sentences))


def _texts_in(value: Any) -> list[str]:
    """Return the texts in the value of a table cell.

    The value is a text, an object with `text` and optionally `title`, or a list of such values. Other values have no
    texts.
    """
    if isinstance(value, list):
        return [text for item in value for text in _texts_in(item)]
    if isinstance(value, Mapping):
        return [" ".join(text for part in ("title", "text") for text in _texts_in(value.get(part)))]
    return [value] if isinstance(value, str) and value.strip() else []


def _read_judged(folder: Path, split: str) -> EvaluationSet:
    """Read a split of a BEIR folder as an evaluation set: queries, judged documents, and query-positive pairs."""
    judged = JudgedQueries(folder, split)
    rows = [row.values for row in RowSource(str(folder), [judged]).good_rows()]
    queries = [str(row["query"]) for row in rows]
    passages = [each for row in rows for name in ("positive_passages", "negative_passages") for each in row[name]]
    pairs = [
        (query, each["text"]) for query, row in zip(queries, rows, strict=True) for each in row["positive_passages"]
    ]
    found = EvaluationSet.of(
        f"{folder.name}@{split}", pairs, queries, queries, documents=[each["text"] for each in passages]
    )
    ids = {key(row["query_id"]) for row in rows} | {key(each["docid"]) for each in passages}
    return replace(found, path=judged.path.resolve(), ids=_array(ids))


def _array(keys: Collection[int]) -> NDArray[np.uint64]:
    """Return hashes as an array."""
    return np.fromiter(keys, dtype=np.uint64)


def _text_columns(columns: Sequence[str], mapping: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the text columns of an evaluation file, as tuples of two columns (text pairs) or one column (texts).

    If the columns fit no format, or a field has several columns, all recognised columns are returned, in all pairs. An
    empty list means that no column is recognised. `mapping` is field of a data format → column.
    """
    mapping = {name: column for name, column in mapping.items() if column in columns}
    formats = {
        format: {name: column for name, column in mapping.items() if name in fields_of(format, mapping, columns)}
        for format in ("triple", "group", "positive_pair")
    }
    found = []
    for format, given in formats.items():
        with suppress(DataError):
            _, fields = resolve_format(format, given, columns)
            found.append((len(given), [column for field, column in fields.items() if "scores" not in field]))
    if found:  # the format with most mapped fields, then with most columns
        _, (first, *others) = max(found, key=lambda one: (one[0], len(one[1])))
        return [(first, other) for other in others]
    premise, hypothesis = (mapping.get(name, name) for name in ("premise", "hypothesis"))
    if {premise, hypothesis} <= set(columns):
        return [(premise, hypothesis)]
    named: list[tuple[str, ...]] = [
        (column,) for name, column in mapping.items() if name in USUAL_NAMES and "score" not in name
    ]
    usual = [
        name for field, names in USUAL_NAMES.items() if field != "label" and "score" not in field for name in names
    ]
    known = [name for name in dict.fromkeys([*usual, "captions"]) if name in columns]
    return named or (list(combinations(known, 2)) if len(known) > 1 else [(name,) for name in known])
