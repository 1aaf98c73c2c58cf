"""Rows that repeat another row, contradict another row, or occur in an evaluation set.

Texts are compared by 8-byte hashes (`data.keys`): an exact key of the text, and a near key of the text without case,
spacing and punctuation. The keys of a million triples take about 1 GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.data.columns import resolve_format
from angle_llm.data.files.beir import QRELS, splits_of
from angle_llm.data.files.file_types import BESIDE
from angle_llm.data.formats import DataError, Example, LabelledText, pairs_of, texts_of
from angle_llm.data.keys import is_distinctive, key, normalized, pair_key
from angle_llm.data.sources import BadRow, Source, find_path, is_data_name, resolve_source
from angle_llm.io import log

SHOWN_PLACES = 5
"""Maximum number of row locations that the report of a problem lists."""
CONTRADICTION = 0.5
"""Two scores of the same pair contradict each other if they differ by more than this (scale 0 to 1)."""
_TROUBLE = ("contradiction", "unlike itself", "contamination")
"""Kinds of findings (problems in a data file) about rows that must be resolved before training."""
_CLASS = "\0"
"""Second text of the pair that stands for a labelled text; its score is a hash of the label."""
_SENTENCES = "texts of 4 words or more"
_CHARACTERS = 1_000_000_000
"""Number of characters of training texts that are compared with held-out tasks, about a minute."""
_COMPARED = 1_000_000
"""Maximum number of training examples that are compared with the evaluation sets of a training run."""
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


class RowKeys(NamedTuple):
    """Hashes of the texts of a row."""

    line: int
    exact: int
    """Hash of all texts, and of scores except scores of a teacher; the order of the positives, the negatives or two paired
    texts has no effect."""
    near: int
    """Hash like `exact`, of the texts without case, spacing and punctuation."""
    instructions: int
    """Hash of the instructions; rows with different instructions do not repeat or contradict each other."""
    query: int
    """Near key of the first text."""
    pairs: list[tuple[int, float]]
    """Near key and score of each pair."""
    is_unlike_itself: bool
    """Whether a pair with a low score has two texts with equal near keys."""


class RowPlace(NamedTuple):
    """The location of a row in one of several files."""

    file: int
    """Index of the file."""
    line: int


@dataclass
class FileKeys:
    """Hashes of the rows and texts of a data file, and the problems that `compare_rows` finds with them."""

    name: str
    """Name of the file in messages."""
    sets: Sequence[EvaluationSet]
    """Evaluation sets that the file is compared with."""
    rows: list[RowKeys] = field(default_factory=list)
    texts: set[int] = field(default_factory=set)
    """Exact keys of all texts of the file."""
    sentences: set[int] = field(default_factory=set)
    """Near keys of the texts of 4 words or more (`is_distinctive`)."""
    removed: dict[int, str] = field(default_factory=dict)
    """Line → reason of the rows that `data check --fix` removes."""
    _places: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    """Kind and sentence of a problem → line of each row with the problem → location for the report."""

    def add(self, line: int, example: Example) -> list[str]:
        """Store the hashes of a row and its training example; return the texts that no earlier row contains."""
        pairs = pairs_of(example)
        if isinstance(example, LabelledText):  # evaluation sets may have the text with any class, or with this label
            pairs = [(example.text, _CLASS, float(key(example.label))), (example.text, example.label, 1.0)]
        normalized_of = {text: normalized(text) for left, right, _ in pairs for text in (left, right)}
        near_pairs = [(pair_key(normalized_of[left], normalized_of[right]), score) for left, right, score in pairs]
        self.rows.append(
            RowKeys(
                line=line,
                exact=_row_key([(pair_key(left, right), score) for left, right, score in pairs]),
                near=_row_key(near_pairs),
                instructions=key(example.instruction or "", example.document_instruction or ""),
                query=key(normalized_of[pairs[0][0]]),
                pairs=near_pairs,
                is_unlike_itself=any(
                    normalized_of[left] == normalized_of[right] and score < CONTRADICTION
                    for left, right, score in pairs
                ),
            )
        )
        new = {key(text): text for text in texts_of(example) if key(text) not in self.texts}
        self.texts.update(new)
        self.sentences.update(key(normalized_of[text]) for text in new.values() if is_distinctive(normalized_of[text]))
        return list(new.values())

    def report(self, kind: str, line: int, text: str, matching: str = "", reason: str = "") -> None:
        """Record a problem of a row, which `--fix` removes for `reason` (default: `kind`).

        `text` completes the sentence "rows that …"; `matching` is the location of the other row of a repeat or
        contradiction, for messages.
        """
        location = f"{line} and {matching}" if matching else f"{line}"
        self._places.setdefault((kind, text), {}).setdefault(line, location)
        self.removed.setdefault(line, reason or kind)

    def findings(self) -> Iterator[Finding]:
        """Yield the recorded problems, and the number of texts that are also in evaluation sets."""
        for (problem, text), place_of in self._places.items():
            count = len(place_of)
            places = list(place_of.values())[:SHOWN_PLACES]
            yield Finding(problem, problem in _TROUBLE, count, f"rows that {text}: {count:,}", places)
        counts = [(tested.name, len(self.sentences & tested.keys[_SENTENCES])) for tested in self.sets]
        if listed := ", ".join(f"{count:,} in {name}" for name, count in counts if count):
            text = f"{_SENTENCES} that are also in evaluation sets: {listed}"
            yield Finding("sentences", False, sum(count for _, count in counts), text)


def _row_key(pairs: Iterable[tuple[int, float]]) -> int:
    """Return a hash of the pairs of a row, given as (hash, score), that does not depend on their order."""
    return key(*sorted(f"{pair} {score}" for pair, score in pairs))


@dataclass(frozen=True)
class EvaluationSet:
    """Hashes of the pairs and texts of an evaluation set (a file or a split of a BEIR folder), to find leaks.

    Texts are hashed without case, spacing and punctuation (`normalized`).
    """

    name: str
    identity: str
    """Identity of the evaluation file (`FileReader.identity`); a data file is not compared with itself."""
    keys: dict[str, set[int]]
    """Unit → hashes of `pairs` (in any order), `queries` (of retrieval tasks only) and `_SENTENCES` (`is_distinctive`)."""

    @classmethod
    def of(
        cls,
        name: str,
        pairs: Iterable[tuple[str, str]],
        texts: Iterable[str],
        queries: Iterable[str] = (),
        identity: str = "",
    ) -> EvaluationSet:
        """Create an evaluation set from pairs, single texts and queries."""
        normalize = cache(normalized)
        keys = {
            "pairs": {pair_key(normalize(left), normalize(right)) for left, right in pairs},
            "queries": {key(normalize(text)) for text in queries},
            _SENTENCES: {key(normalize(text)) for text in texts if is_distinctive(normalize(text))},
        }
        return cls(name, identity, keys)


def count_shared(examples: Sequence[Example], sets: Sequence[EvaluationSet]) -> list[dict[str, tuple[int, int]]]:
    """Count the pairs, queries and texts of each evaluation set that also occur in training examples.

    Single texts count only with 4 words or more. At most `_COMPARED` examples and about `_CHARACTERS` characters are
    compared, evenly spaced.

    Returns:
        For each evaluation set, unit → (number that also occurs in the examples, number in the evaluation set). Units
            are `pairs`, `queries` and `texts of 4 words or more`; units without a common text are missing.
    """
    shared_of_set: list[dict[str, set[int]]] = [{unit: set() for unit in tested.keys} for tested in sets]
    lengths = [sum(map(len, texts_of(examples[at]))) for at in range(0, len(examples), len(examples) // 100 + 1)]
    characters = len(examples) * sum(lengths) // max(1, len(lengths))
    step = max(len(examples) // _COMPARED, characters // _CHARACTERS) + 1
    if step > 1:
        log(
            f"held-out texts are compared with one of {step} training examples, so numbers of shared texts are lower bounds"
        )
    for at in range(0, len(examples), step):
        normalized_of = {text: normalized(text) for text in texts_of(examples[at])}
        pairs = pairs_of(examples[at])
        example_keys = {
            "pairs": {pair_key(normalized_of[left], normalized_of[right]) for left, right, _ in pairs},
            "queries": {key(normalized_of[pairs[0][0]])},
            _SENTENCES: set(map(key, normalized_of.values())),
        }
        for tested, shared in zip(sets, shared_of_set, strict=True):
            for unit in shared:
                shared[unit] |= tested.keys[unit] & example_keys[unit]
    return [
        {unit: (len(keys), len(tested.keys[unit])) for unit, keys in shared.items() if keys}
        for tested, shared in zip(sets, shared_of_set, strict=True)
    ]


def compare_rows(files: Sequence[FileKeys]) -> None:
    """Find rows that repeat or contradict rows of any file, and rows that also occur in evaluation sets.

    The problems are recorded in `files`.
    """
    # Pair and instructions → lowest and highest score, with their rows.
    extremes: dict[tuple[int, int], tuple[tuple[float, RowPlace], tuple[float, RowPlace]]] = {}
    for index, file in enumerate(files):
        for row in file.rows:
            for pair, score in row.pairs:
                labelled = (score, RowPlace(index, row.line))
                key = (pair, row.instructions)
                lowest, highest = extremes.setdefault(key, (labelled, labelled))
                if score < lowest[0]:
                    extremes[key] = (labelled, highest)
                elif score > highest[0]:
                    extremes[key] = (lowest, labelled)
    # Problems of each row, as messages that complete "rows that …". A repeat is compared with the first equal row.
    first_exact: dict[tuple[int, int], RowPlace] = {}
    first_near: dict[tuple[int, int], RowPlace] = {}
    for index, file in enumerate(files):
        for row in file.rows:
            for pair, score in row.pairs:
                opposite_score, opposite = max(
                    extremes[pair, row.instructions], key=lambda labelled: abs(labelled[0] - score)
                )
                if abs(opposite_score - score) > CONTRADICTION + 1e-9:  # rounding
                    text = "contain a pair with the opposite label, or a text with another class, elsewhere"
                    file.report("contradiction", row.line, text, _location(opposite, index, files))
            if row.is_unlike_itself:
                text = "label two equal texts as dissimilar (case, spacing and punctuation ignored)"
                file.report("unlike itself", row.line, text)
            _compare_with_sets(file, row)
            place = RowPlace(index, row.line)
            exact = first_exact.setdefault((row.exact, row.instructions), place)
            near = first_near.setdefault((row.near, row.instructions), place)
            if near.file != index:
                text = "repeat a row of an earlier file (case, spacing and punctuation ignored)"
                file.report("across files", row.line, text, _location(near, index, files))
            elif exact != place:
                text = "repeat an earlier row exactly (pairs in any order)"
                file.report("duplicate", row.line, text, _location(exact, index, files))
            elif near != place:
                text = "repeat an earlier row (case, spacing and punctuation ignored)"
                file.report("near duplicate", row.line, text, _location(near, index, files))


def _location(place: RowPlace, index: int, files: Sequence[FileKeys]) -> str:
    """Return the location of a row for the report of the file with an index; the name of the same file is omitted."""
    return f"{place.line}" if place.file == index else f"{files[place.file].name}:{place.line}"


def _compare_with_sets(file: FileKeys, row: RowKeys) -> None:
    """Record if a row contains a pair or a query of an evaluation set."""
    for tested in file.sets:
        if any(pair in tested.keys["pairs"] for pair, _ in row.pairs):
            text = f"contain a pair of {tested.name}"
            file.report("contamination", row.line, text, reason=f"its pair is in {tested.name}")
        elif row.query in tested.keys["queries"]:
            text = f"contain a query of {tested.name}"
            file.report("contamination", row.line, text, reason=f"its query is in {tested.name}")


# ------------------------------------------------------------------------------------------------ evaluation sets


def read_evaluation_sets(
    paths: Iterable[str | Path], columns: Mapping[str, str] = {}
) -> tuple[list[EvaluationSet], list[str]]:
    """Read evaluation sets from files, from splits of BEIR folders (FOLDER@SPLIT), and from folders with such files.

    In a folder, files and splits whose name contains `train` are skipped. If the names of some files contain a word
    such as `test`, `dev` or `validation`, files without such a word are skipped too. `columns` is field → column, for texts
    with a class.

    Returns:
        The evaluation sets, and the names of skipped files, splits and rows with the reason.

    Raises:
        DataError: for a path that does not exist, a named file that cannot be read, or if there is no evaluation set.
    """
    sets: list[EvaluationSet] = []
    skipped: list[str] = []
    for path in paths:
        location = find_path(str(path))
        named_paths = _sources_in(location, skipped) if location.is_dir() else [(location.name, str(path))]
        for name, text in named_paths:
            try:
                sets.append(_read_set(resolve_source(text, tables=True), name, skipped, columns))
            except DataError as error:
                if not location.is_dir():
                    raise DataError(f"--against: {error}") from error
                skipped.append(f"{name} ({error})")
    if not sets:
        raise DataError(
            f"--against: no evaluation set found; skipped: {', '.join(skipped) or 'nothing'}. Name the files."
        )
    return sets, skipped


def _sources_in(folder: Path, skipped: list[str]) -> list[tuple[str, str]]:
    """Return the name for reports and the path of each evaluation set in a folder and its subfolders.

    The names of skipped files and splits are appended to `skipped`. BEIR folders come first.
    """
    beir_folders = sorted(qrels.parent for qrels in folder.rglob(QRELS) if qrels.is_dir())
    name_of = {beir: folder.name if beir == folder else str(beir.relative_to(folder)) for beir in beir_folders}
    splits = {f"{name_of[beir]}@{split}": (beir, split) for beir in beir_folders for split in splits_of(beir)}
    chosen = {name: f"{beir}@{split}" for name, (beir, split) in splits.items() if not _words(split) & _TRAINING_WORDS}
    files = {
        str(file.relative_to(folder)): str(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and is_data_name(file.name) and not file.name.endswith(BESIDE)
        if not file.name.startswith("STS.gs.")  # scores, read with STS.input.*
        if not {*beir_folders} & {*file.parents}
    }
    not_training = {name: file for name, file in files.items() if not _words(name) & _TRAINING_WORDS}
    tested_files = {name: file for name, file in not_training.items() if _words(name) & _EVALUATION_WORDS}
    chosen |= tested_files or not_training
    skipped += [f"{name} (because of its name)" for name in (*splits, *files) if name not in chosen]
    return list(chosen.items())


def _words(name: str) -> set[str]:
    """Return the words and numbers in a file name, in lower case."""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _read_set(source: Source, name: str, skipped: list[str], columns: Mapping[str, str]) -> EvaluationSet:
    """Read an evaluation file or a split of a BEIR folder, and return the hashes of its pairs and texts.

    All texts of a row in different columns are pairs, except the texts of two lists of several texts. A message with the
    number of unreadable rows is appended to `skipped`.

    Raises:
        DataError: if the source cannot be read or has no rows.
    """
    identity = source.files[0].identity  # a source is one file here, or all files of a split: the first identifies it
    if source.kind == "beir":
        judged = [row.values for row in source.good_rows()]
        queries = [row["query"] for row in judged]
        pairs = [(row["query"], passage["text"]) for row in judged for passage in row["positive_passages"]]
        return EvaluationSet.of(name, pairs, texts=queries, queries=queries, identity=identity)
    rows = list(source.rows())
    good = [row.values for row in rows if not isinstance(row, BadRow)]
    cells_of_row = [list(map(_texts_in, values.values())) for values in good]
    if not cells_of_row:
        raise DataError(f"{source.name}: no usable row")
    if bad := len(rows) - len(cells_of_row):
        skipped.append(f"{bad:,} unreadable rows of {name}")
    paired = chain.from_iterable(map(_pairs_of_row, cells_of_row))
    texts = (text for cells in cells_of_row for cell in cells for text in cell)
    column = _labelled_column(list(dict.fromkeys(chain.from_iterable(good))), columns)
    labelled = [(text, _CLASS) for values in good for text in _texts_in(values.get(column))] if column else []
    return EvaluationSet.of(name, chain(paired, labelled), texts, identity=identity)


def _labelled_column(names: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """Return the column of texts with a class; None for a table of another format. `columns` is field → column."""
    known = {field: column for field, column in columns.items() if column in names}
    try:
        format, column_of = resolve_format("auto", known, names)
    except DataError:
        return None
    return column_of["text"] if format == "labelled_text" else None


def _pairs_of_row(cells: Iterable[list[str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts in different cells of a row, except of two cells with several texts each."""
    for left, right in combinations(cells, 2):
        if len(left) == 1 or len(right) == 1:
            yield from product(left, right)


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
