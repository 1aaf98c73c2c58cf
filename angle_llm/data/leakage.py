"""Rows that repeat another row, contradict another row, or occur in an evaluation set.

Texts are compared by 8-byte hashes (`data.keys`): an exact key of the text, and a near key of the text without case,
spacing and punctuation. A row takes about 60 bytes and a distinct text about 170, so a million triples take about 0.6
GB.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from angle_llm.data.columns import USUAL_NAMES
from angle_llm.data.files.beir import QRELS, splits_of
from angle_llm.data.formats import (
    NUMBERED_NEGATIVE,
    DataError,
    Example,
    Group,
    ScoredPair,
    Triple,
    pairs_of,
    texts_of,
)
from angle_llm.data.keys import is_distinctive, key, normalized, pair_key, printable
from angle_llm.data.sources import BadRow, Source, find_path, is_data_name, resolve_source

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
            if isinstance(identifier := values.get(column), str | int):
                self.ids.extend((line, key(str(identifier))))
        bare_of = {text: normalized(text) for text in texts_of(example)}
        exact_key = _row_key(example, {text: text for text in bare_of})
        near_key = _row_key(example, bare_of)
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
    identity: str
    """Identity of the evaluation file (`FileReader.identity`); a data file is not compared with itself."""
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

        # A set in memory is no file, so its name is its identity.
        return cls(
            name=name,
            identity=name,
            pairs=_array(
                {pair_key(normalized(printable(left)), normalized(printable(right))) for left, right in pairs}
            ),
            sentences=_array({key(text) for text in bare(texts) if is_distinctive(text)}),
            queries=_array({key(text) for text in bare(queries)}),
            documents=_array({key(text) for text in bare(documents)}),
        )


def count_shared(examples: Sequence[Example], sets: Sequence[EvaluationSet]) -> list[dict[str, tuple[int, int]]]:
    """Count the pairs, queries and texts of each evaluation set that also occur in training examples.

    Single texts count only with 4 words or more. At most `_COMPARED` examples are compared, evenly spaced. A triple of
    sentences takes about 30 µs, and a pair with a text of 150 words 100 µs, for all sets together.

    Returns:
        For each evaluation set, kind → (number that also occurs in the examples, number in the evaluation set). Kinds
            are `pairs`, `queries` and `texts of 4 words or more`; kinds without a common text are missing.
    """
    kinds = {"pairs": "pairs", "queries": "queries", "sentences": "texts of 4 words or more"}
    keys_of = [{name: set(getattr(tested, name).tolist()) for name in kinds} for tested in sets]
    wanted = {name: set().union(*(keys[name] for keys in keys_of)) for name in kinds}
    shared_of: dict[str, set[int]] = {name: set() for name in kinds}
    for at in range(0, len(examples), len(examples) // _COMPARED + 1):
        pairs = pairs_of(examples[at])
        bare = {text: normalized(text) for text in texts_of(examples[at])}
        shared_of["sentences"] |= wanted["sentences"] & set(map(key, bare.values()))
        shared_of["queries"] |= wanted["queries"] & {key(bare[left]) for left, _, _ in pairs}
        shared_of["pairs"] |= wanted["pairs"] & {pair_key(bare[left], bare[right]) for left, right, _ in pairs}
    return [
        {kinds[name]: (shared, len(keys)) for name, keys in by_kind.items() if (shared := len(keys & shared_of[name]))}
        for by_kind in keys_of
    ]


class _Report:
    """Collects the findings of each file, and the rows that `data check --fix` removes.

    Args:
        names: Names of the files, for the locations of rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.findings: list[list[Finding]] = [[] for _ in names]
        self.removed: list[dict[int, str]] = [{} for _ in names]
        """Line → reason of each row to remove, for each file."""

    def add(
        self, kind: str, frame: pd.DataFrame, text: str, matching: Callable[[int], Any] | None = None, reason: str = ""
    ) -> None:
        """Add a finding (a problem) to each file that has rows in the table `frame`.

        `matching` maps an index of `frame` to the row that matches this row. If `reason` is empty, `kind` is the reason.
        """
        for file, part in frame.drop_duplicates(["file", "line"]).sort_values("line").groupby("file"):
            places = [
                f"{line} and {self._place(matching(index), file)}" if matching else f"{line}"
                for index, line in part.line.head(SHOWN_PLACES).items()
            ]
            sentence = f"rows that {text}: {len(part):,}"
            self.findings[file].append(Finding(kind, kind in _TROUBLE, len(part), sentence, places))
            for line in part.line if kind in _REMOVED else ():
                self.removed[file].setdefault(int(line), reason or kind)

    def _place(self, row: Any, file: int) -> str:
        """Return the line number of a row; with file name, if the row is not in file number `file`."""
        return f"{int(row.line)}" if row.file == file else f"{self._names[int(row.file)]}:{int(row.line)}"


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
    rows = _table([keys.rows for keys in files], ["line", "exact", "near", "query"])
    ids = _table([keys.ids for keys in files], ["line", "key"])
    pairs = _table([keys.pairs for keys in files], ["line", "key", "used", "same"])
    pairs["score"] = np.concatenate([np.zeros(0), *(np.asarray(keys.scores) for keys in files)])

    report = _Report(names)
    _add_labels(report, pairs)
    for file, (keys, sets_of_file) in enumerate(zip(files, sets, strict=True)):
        for tested in sets_of_file:
            _add_tested_rows(report, tested, *(table[table.file == file] for table in (rows, pairs, ids)))
        _add_tested_texts(report.findings[file], keys, sets_of_file)
    _add_repeats(report, rows)
    return list(zip(report.findings, report.removed, strict=True))


def _add_labels(report: _Report, pairs: pd.DataFrame) -> None:
    """Report pairs of texts with different labels, and pairs of a text with itself."""
    scores = pairs.groupby("key").score
    # Of 1, 0.5 and 0.2, only 1 and 0.2 contradict each other.
    distance = np.maximum(scores.transform("max") - pairs.score, pairs.score - scores.transform("min"))

    def opposite(index: int) -> Any:
        """Return the row of `pairs` with the same pair of texts and the most different score."""
        group = pairs[pairs.key == pairs.key[index]]
        return pairs.loc[(group.score - pairs.score[index]).abs().idxmax()]

    used = pairs.used == 1
    opposed = distance > CONTRADICTION + 1e-9
    text = "contain pairs that have the opposite label elsewhere"
    report.add("contradiction", pairs[used & opposed], text, opposite)
    text = "contain a pair that has a different label in another row"
    report.add("other label", pairs[used & (distance > 0) & ~opposed], text)
    same, unlike = pairs.same == 1, pairs.score < CONTRADICTION
    text = "label two equal texts as dissimilar (case, spacing and punctuation ignored)"
    report.add("unlike itself", pairs[used & same & unlike], text)
    report.add("same texts", pairs[used & same & ~unlike], "pair a text with itself")


def _add_tested_rows(
    report: _Report, tested: EvaluationSet, rows: pd.DataFrame, pairs: pd.DataFrame, ids: pd.DataFrame
) -> None:
    """Report the rows of a file that contain a pair, a query or an id of an evaluation set (`tested`)."""
    name = tested.name
    shared = pairs[(pairs.used == 1) & pairs.key.isin(tested.pairs)]
    report.add("contamination", shared, f"contain a pair of {name}", reason=f"its pair is in {name}")
    asked = rows[rows["query"].isin(tested.queries) & ~rows.line.isin(shared.line)]
    report.add("contamination", asked, f"contain a query of {name}", reason=f"its query is in {name}")
    named = ids[ids.key.isin(tested.ids)]
    report.add("ids", named, f"have the id of a query or judged document of {name}; the texts may differ")


def _add_tested_texts(findings: list[Finding], keys: FileKeys, sets: Sequence[EvaluationSet]) -> None:
    """Add findings with the numbers of texts of a file that are also in evaluation sets, or are judged documents."""
    sentences = _array(keys.sentences)
    for attribute, text in (
        ("sentences", "texts of 4 words or more that are also in evaluation sets"),
        ("documents", "texts of 4 words or more that are judged documents"),
    ):
        counts = {tested.name: int(np.isin(sentences, getattr(tested, attribute)).sum()) for tested in sets}
        if listed := ", ".join(f"{count:,} in {name}" for name, count in counts.items() if count):
            findings.append(Finding(attribute, False, sum(counts.values()), f"{text}: {listed}"))


def _add_repeats(report: _Report, rows: pd.DataFrame) -> None:
    """Report rows that repeat an earlier row of the same file or of an earlier file."""
    numbers = rows.index.to_series()
    first_exact, first_near = (numbers.groupby(rows[name]).transform("min") for name in ("exact", "near"))
    is_exact, is_near = first_exact != rows.index, first_near != rows.index
    within = rows.file[first_near].to_numpy() == rows.file

    def first(index: int) -> Any:
        return rows.loc[first_near[index]]

    text = "repeat an earlier row exactly (pairs in any order)"
    report.add("duplicate", rows[is_exact & within], text, lambda index: rows.loc[first_exact[index]])
    text = "repeat an earlier row (case, spacing and punctuation ignored)"
    report.add("near duplicate", rows[is_near & ~is_exact & within], text, first)
    text = "repeat a row of an earlier file (case, spacing and punctuation ignored)"
    report.add("across files", rows[~within], text, first)


def _table(parts: Sequence[array[int]], columns: list[str]) -> pd.DataFrame:
    """Combine flat arrays, one per file, to a table with the given columns and a column `file` (file number).

    An array contains the values of its first row, then of its second row, and so on.
    """
    import pandas as pd

    values = [np.asarray(part, dtype=np.uint64).reshape(-1, len(columns)) for part in parts]
    frame = pd.DataFrame(np.concatenate([np.zeros((0, len(columns)), np.uint64), *values]), columns=columns)
    return frame.assign(file=np.repeat(np.arange(len(values)), [len(part) for part in values]))


# ------------------------------------------------------------------------------------------------ evaluation sets


def read_evaluation_sets(
    paths: Iterable[str | Path], columns: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[EvaluationSet], list[str]]:
    """Read evaluation sets from files, from splits of BEIR folders (FOLDER@SPLIT), and from folders with such files.

    In a folder, files and splits whose name contains `train` are skipped. If the names of some files contain a word
    such as `test`, `dev` or `validation`, files without such a word are skipped too.

    Args:
        columns: Field of a data format → column; used for the files that have the column.

    Returns:
        The evaluation sets, and the names of skipped files, splits and rows with the reason.

    Raises:
        DataError: for a path that does not exist, a named file that has no texts or cannot be read, or if there is no
            evaluation set.
    """
    sets: list[EvaluationSet] = []
    skipped: list[str] = []
    for text in map(str, paths):
        path = find_path(text)
        if path.is_dir():
            sets += _read_folder(path, skipped, columns)
            continue
        try:
            source = resolve_source(text, tables=True)
        except DataError as error:
            raise DataError(f"--against: {error}") from error
        sets.append(_read_set(source, path.name, skipped, columns))
    if not sets:
        raise DataError(
            f"--against: no evaluation set found; skipped: {', '.join(skipped) or 'nothing'}. Name the files."
        )
    return sets, skipped


def _read_folder(folder: Path, skipped: list[str], mapping: Mapping[str, str]) -> Iterator[EvaluationSet]:
    """Yield the evaluation sets in a folder and its subfolders.

    The names of skipped files and splits are appended to `skipped`. `mapping` is field of a data format → column.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and is_data_name(file.name)]
    files = [file for file in files if not file.name.startswith("STS.gs.")]  # scores, read with STS.input.*

    # Names in reports, and texts that name the sources. Splits of BEIR folders come first.
    sources: list[tuple[str, str]] = []
    for judged in sorted(qrels.parent for qrels in folder.rglob(QRELS) if qrels.is_dir()):
        files = [file for file in files if judged not in file.parents]
        splits = splits_of(judged)
        skipped += [] if splits else [f"{judged.name} (no qrels/*.tsv)"]
        skipped += [f"{judged.name}@{split}" for split in splits if _words(split) & _TRAINING_WORDS]
        tested = (split for split in splits if not _words(split) & _TRAINING_WORDS)
        sources += [(f"{judged.name}@{split}", f"{judged}@{split}") for split in tested]

    names = {str(file.relative_to(folder)): str(file) for file in files}
    not_training = {name: file for name, file in names.items() if not _words(name) & _TRAINING_WORDS}
    chosen = {name: file for name, file in not_training.items() if _words(name) & _EVALUATION_WORDS} or not_training
    skipped += [f"{name} (because of its name)" for name in names if name not in chosen]
    for name, text in (*sources, *chosen.items()):
        try:
            yield _read_set(resolve_source(text, tables=True), name, skipped, mapping)
        except DataError as error:
            skipped.append(f"{name} ({error})")


def _words(name: str) -> set[str]:
    """Return the words and numbers in a file name, in lower case."""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _read_set(source: Source, name: str, skipped: list[str], mapping: Mapping[str, str]) -> EvaluationSet:
    """Read an evaluation file or a split of a BEIR folder, and return the hashes of its pairs and texts.

    Two texts in different columns of a row are a pair; of two lists in a row, the texts are not paired. A message with
    the number of unreadable rows is appended to `skipped`. `mapping` is field of a data format → column.

    Raises:
        DataError: if the source cannot be read or has no text column.
    """
    if source.kind == "beir":
        return _judged_set(source, name)
    columns = _text_columns(source.columns, mapping)
    if not columns:
        raise DataError(
            f"{source.name}: no known text column among {', '.join(source.columns)}. Name the text columns, such as --columns "
            "text1 question text2 answer."
        )
    pairs: set[int] = set()
    sentences: set[int] = set()
    bad = 0
    for row in source.rows():
        if isinstance(row, BadRow):
            bad += 1
            continue
        cells = [[normalized(printable(text)) for text in _texts_in(row.values.get(column))] for column in columns]
        sentences.update(key(text) for texts in cells for text in texts if is_distinctive(text))
        for left, right in combinations(cells, 2):
            if len(left) == 1 or len(right) == 1:
                pairs.update(pair_key(one, two) for one in left for two in right)
    if bad:
        skipped.append(f"{bad:,} unreadable rows of {name}")
    return EvaluationSet(name, source.files[0].identity, _array(pairs), _array(sentences))


def _judged_set(source: Source, name: str) -> EvaluationSet:
    """Return a split of a BEIR folder as an evaluation set: queries, judged documents, and query-positive pairs."""
    rows = [row.values for row in source.good_rows()]
    queries = [str(row["query"]) for row in rows]
    pairs = [(row["query"], passage["text"]) for row in rows for passage in row["positive_passages"]]
    passages = [passage for row in rows for passage in (*row["positive_passages"], *row["negative_passages"])]
    tested = EvaluationSet.of(name, pairs, queries, queries, [passage["text"] for passage in passages])
    ids = {key(row["query_id"]) for row in rows} | {key(passage["docid"]) for passage in passages}
    return replace(tested, identity=source.files[0].identity, ids=_array(ids))


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


def _array(keys: Collection[int]) -> NDArray[np.uint64]:
    """Return hashes as an array."""
    return np.fromiter(keys, dtype=np.uint64)


def _text_columns(columns: Sequence[str], mapping: Mapping[str, str]) -> list[str]:
    """Return the columns of an evaluation file that contain texts: the mapped columns, and columns with a usual name.

    `mapping` is field of a data format → column.
    """
    names_of_field = [*USUAL_NAMES.items(), *((field, (column,)) for field, column in mapping.items())]
    texts = {name for field, names in names_of_field if "score" not in field and field != "label" for name in names}
    return [name for name in columns if name in texts | {"captions"} or NUMBERED_NEGATIVE.fullmatch(name)]
