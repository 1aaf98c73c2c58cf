"""Rows that repeat, contradict each other, or occur in an evaluation set.

Texts are compared by 8-byte keys (`data.keys`), exactly, and without case, spacing and punctuation ("near"). A row
takes about 60 bytes and a distinct text about 170, so a million triples take about 0.6 GB.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from angle_llm.data.beir import JudgedQueries, is_judged, splits_of
from angle_llm.data.columns import USUAL_NAMES, fields_of, resolve_format
from angle_llm.data.formats import DataError, Example, Group, ScoredPair, Triple, pairs_of, texts_of
from angle_llm.data.keys import is_telling, key, near, pair_key, sound
from angle_llm.data.readers import STARTER, BadRow, RowSource, find_path, is_data_name, open_rows

if TYPE_CHECKING:
    import pandas as pd

SHOWN_PLACES = 5
NEUTRAL_SCORE = 0.5
"""Score of a dropped neutral row when it is compared with other rows."""
CONTRADICTION = 0.5
"""Labels of one pair that differ by more than this contradict each other (scale 0..1)."""
_TROUBLE = ("contradiction", "unlike itself", "contamination")
_REMOVED = (*_TROUBLE, "duplicate", "near duplicate", "across files")
"""Findings whose rows `--fix` removes."""
_COMPARED = 1_000_000
"""Most training examples that are compared with the tasks of a run."""
_ID_COLUMNS = ("query_id", "query-id", "_id", "id", "positive_id", "corpus-id")
_EVALUATION_WORDS = {"test", "dev", "valid", "validation", "val", "trial", "eval", "held", "heldout"}
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
    """Keys of the rows of one file; the texts themselves are not kept."""

    rows: array[int] = field(default_factory=lambda: array("Q"))
    """Line, exact key, near key, and near key of the first text (the query) of each used row, one after the other."""
    pairs: array[int] = field(default_factory=lambda: array("Q"))
    """Line, near key, used (0 for neutral), and equal texts (0 or 1), of each pair of texts; a triple has two."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    """Of each pair."""
    texts: set[int] = field(default_factory=set)
    """Exact keys of all texts."""
    sentences: set[int] = field(default_factory=set)
    """Near keys of the texts for which `keys.is_telling`."""
    ids: array[int] = field(default_factory=lambda: array("Q"))
    """Line and key of each id of a row."""
    ROW_VALUES: ClassVar[int] = 4

    def add(self, line: int, example: Example, values: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
        """Add a row, `values` by column; yield its texts that are new."""
        for column in _ID_COLUMNS:
            if isinstance(found := values.get(column), str | int):
                self.ids.extend((line, key(str(found))))
        bare_of = {text: near(text) for text in texts_of(example)}
        exact_key, near_key = _row_key(example, {text: text for text in bare_of}), _row_key(example, bare_of)
        self.rows.extend((line, exact_key, near_key, key(next(iter(bare_of.values())))))
        for left, right, score in pairs_of(example):
            self.add_pair(line, bare_of[left], bare_of[right], score)
        for text, bare_text in bare_of.items():
            if (exact := key(text)) not in self.texts:
                self.texts.add(exact)
                if is_telling(bare_text):
                    self.sentences.add(key(bare_text))
                yield text

    def add_pair(self, line: int, left: str, right: str, score: float, *, used: bool = True) -> None:
        """Add a pair of near texts."""
        self.pairs.extend((line, pair_key(left, right), used, left == right))
        self.scores.append(score)


def _row_key(example: Example, form: Mapping[str, str]) -> int:
    """Return a key of the example with its texts in some form: equal for a pair in both orders, for a group with its
    positives or negatives in another order, and for a triple and the same group."""
    if isinstance(example, Triple):
        example = Group(example.anchor, (example.positive,), (example.negative,))
    if isinstance(example, Group):
        lists = [sorted(form[text] for text in texts) for texts in (example.positives, example.negatives)]
        return key(form[example.query], *lists[0], "", *lists[1])
    texts = [form[text] for text in texts_of(example)]
    return key(*sorted(texts), repr(example.score) if isinstance(example, ScoredPair) else "")


@dataclass(frozen=True)
class EvaluationSet:
    """Near keys of the pairs (in any order) of one evaluation file,
    and of its sentences for which `keys.is_telling`."""

    name: str
    path: Path
    pairs: NDArray[np.uint64]
    sentences: NDArray[np.uint64]
    queries: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Near keys of the queries of a BEIR folder."""
    documents: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Near keys of its judged documents."""
    ids: NDArray[np.uint64] = field(default_factory=lambda: _array(()))
    """Keys of the ids of both."""

    @classmethod
    def of(
        cls, name: str, pairs: Iterable[tuple[str, str]], texts: Iterable[str], queries: Iterable[str] = ()
    ) -> EvaluationSet:
        """Return the keys of texts in memory."""

        def bare(some: Iterable[str]) -> set[str]:
            return {near(sound(text)) for text in some}

        found = (
            {pair_key(near(sound(left)), near(sound(right))) for left, right in pairs},
            {key(text) for text in bare(texts) if is_telling(text)},
            {key(text) for text in bare(queries)},
        )
        return cls(name, Path(name), *map(_array, found))


def count_shared(examples: Sequence[Example], sets: Sequence[EvaluationSet]) -> list[dict[str, tuple[int, int]]]:
    """Count the pairs, queries and texts of each evaluation set that training examples contain.

    Texts have 4 words or more. Returns for each set: kind → number that is shared, and number in the set; without kinds
    that share nothing.

    A triple of sentences takes about 30 µs, a pair with a text of 150 words 100 µs, for all sets together. At most
    `_COMPARED` examples are compared, evenly spaced. Memory is needed for the sets only.
    """
    kinds = {"pairs": "pairs", "queries": "queries", "sentences": "texts of 4 words or more"}
    own = [{name: set(getattr(each, name).tolist()) for name in kinds} for each in sets]
    wanted = {name: set().union(*(each[name] for each in own)) for name in kinds}
    found: dict[str, set[int]] = {name: set() for name in kinds}
    for at in range(0, len(examples), len(examples) // _COMPARED + 1):
        pairs = pairs_of(examples[at])
        bare = {text: near(text) for text in texts_of(examples[at])}
        found["sentences"] |= wanted["sentences"] & set(map(key, bare.values()))
        found["queries"] |= wanted["queries"] & {key(bare[left]) for left, _, _ in pairs}
        found["pairs"] |= wanted["pairs"] & {pair_key(bare[left], bare[right]) for left, right, _ in pairs}
    return [
        {kinds[name]: (shared, len(keys)) for name, keys in each.items() if (shared := len(keys & found[name]))}
        for each in own
    ]


def compare_rows(
    names: Sequence[str], files: Sequence[FileKeys], sets: Sequence[Sequence[EvaluationSet]]
) -> list[tuple[list[Finding], dict[int, str]]]:
    """Compare the rows of all files with one another, and those of each file with its evaluation sets.

    Returns:
        For each file its findings, and line → reason of the rows that `--fix` removes.
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
        return f"{int(row.line)}" if row.file == file else f"{names[int(row.file)]}:{int(row.line)}"

    def add(kind: str, frame: pd.DataFrame, text: str, other: Any = None, reason: str = "") -> None:
        """Add a finding to each file with rows in the frame; `other` returns the row that belongs to one."""
        for file, part in frame.drop_duplicates(["file", "line"]).sort_values("line").groupby("file"):
            places = [
                f"{line} and {place(other(at), file)}" if other else f"{line}"
                for at, line in part.line.head(SHOWN_PLACES).items()
            ]
            found[file].append(Finding(kind, kind in _TROUBLE, len(part), f"rows that {text}: {len(part):,}", places))
            for line in part.line if kind in _REMOVED else ():
                removed[file].setdefault(int(line), reason or kind)

    def opposite(at: int) -> Any:
        group = pairs[pairs.key == pairs.key[at]]
        return pairs.loc[(group.score - pairs.score[at]).abs().idxmax()]

    used = pairs[pairs.used == 1]
    opposed = used.distance > CONTRADICTION + 1e-9
    add("contradiction", used[opposed], "contain pairs that have the opposite label elsewhere", opposite)
    add("other label", used[(used.distance > 0) & ~opposed], "hold a pair with a different label in another row")
    same, unlike = used.same == 1, used.score < CONTRADICTION
    text = "label two equal texts as dissimilar (case, spacing and punctuation ignored)"
    add("unlike itself", used[same & unlike], text)
    add("same texts", used[same & ~unlike], "pair a text with itself")
    for file, own_sets in enumerate(sets):
        for each in own_sets:
            shared = used[(used.file == file) & used.key.isin(each.pairs)]
            add("contamination", shared, f"hold a pair of {each.name}", reason=f"its pair is in {each.name}")
            asked = rows[(rows.file == file) & rows["query"].isin(each.queries) & ~rows.line.isin(shared.line)]
            add("contamination", asked, f"hold a query of {each.name}", reason=f"its query is in {each.name}")
            named = ids[(ids.file == file) & ids.key.isin(each.ids)]
            add("ids", named, f"have the id of a query or judged document of {each.name}, perhaps another text")
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
    """Return the values of all files as columns, and the number of the file."""
    import pandas as pd

    values = [np.asarray(part, dtype=np.uint64).reshape(-1, len(columns)) for part in parts]
    frame = pd.DataFrame(np.concatenate([np.zeros((0, len(columns)), np.uint64), *values]), columns=columns)
    return frame.assign(file=np.repeat(np.arange(len(values)), [len(each) for each in values]))


# ------------------------------------------------------------------------------------------------ evaluation sets


def read_evaluation_sets(
    paths: Iterable[str | Path], columns: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[EvaluationSet], list[str]]:
    """Read evaluation files, and all those in folders; return them and what was skipped.

    `columns` maps fields to columns, for the files that have them. In a folder, files and splits of BEIR folders named
    after training are skipped, and files not named after a test, dev or validation set if others are. FOLDER@SPLIT is
    one split of a BEIR folder.

    Raises:
        DataError: for a path that does not exist, and for a named file that has no texts or cannot be read.
    """
    found: list[EvaluationSet] = []
    skipped: list[str] = []
    for given in paths:
        path = find_path(str(given))
        name, _, split = str(given).rpartition("@")
        if not path.exists() and name and is_judged(folder := find_path(name)):
            found.append(_read_judged(folder, split))
            continue
        if (
            path.is_file()
            or str(given).startswith(STARTER)
            or (name and not path.exists() and find_path(name).is_dir())
        ):
            found.append(_read_set(given, path.name, skipped, columns))
            continue
        if not path.is_dir():
            raise DataError(f"--against: no file or folder {path}.")
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and is_data_name(file.name)]
        files = [file for file in files if not file.name.startswith("STS.gs.")]  # scores of the files beside them
        for judged in sorted(each.parent for each in path.rglob("qrels") if each.is_dir()):
            files = [file for file in files if judged not in file.parents]
            splits = splits_of(judged)
            if not splits:
                skipped.append(f"{judged.name} (no qrels/*.tsv)")
            for split in splits:
                if set(re.split(r"[^a-z0-9]+", split.lower())) & _TRAINING_WORDS:
                    skipped.append(f"{judged.name}@{split}")
                    continue
                try:
                    found.append(_read_judged(judged, split))
                except DataError as error:
                    skipped.append(f"{judged.name}@{split} ({error})")
        names = {file: str(file.relative_to(path)) for file in files}
        words = {file: set(re.split(r"[^a-z0-9]+", name.lower())) for file, name in names.items()}
        not_training = [file for file in files if not words[file] & _TRAINING_WORDS]
        chosen = [file for file in not_training if words[file] & _EVALUATION_WORDS] or not_training
        skipped += [f"{name} (because of its name)" for file, name in names.items() if file not in chosen]
        for file in chosen:
            try:
                found.append(_read_set(file, names[file], skipped, columns))
            except DataError as error:
                skipped.append(f"{names[file]} ({error})")
    if not found:
        raise DataError(
            f"--against: no evaluation set found; skipped: {', '.join(skipped) or 'nothing'}. Name the files."
        )
    return found, skipped


def _read_set(source: str | Path, name: str, skipped: list[str], mapping: Mapping[str, str]) -> EvaluationSet:
    rows = open_rows(source, tables=True)
    columns = _text_columns(rows.columns, mapping)
    if not columns:
        raise DataError(
            f"{source}: no known text column among {rows.columns}. Name them, such as --columns text1 question text2 answer."
        )
    pairs: set[int] = set()
    sentences: set[int] = set()
    bad = 0
    for row in rows:
        if isinstance(row, BadRow):
            bad += 1
            continue
        for names in columns:
            sides = [[near(sound(text)) for text in _texts_in(row.values.get(each))] for each in names]
            sentences.update(key(text) for texts in sides for text in texts if is_telling(text))
            if len(sides) == 2:
                pairs.update(pair_key(left, right) for left in sides[0] for right in sides[1])
    if bad:
        skipped.append(f"{bad:,} unreadable rows of {name}")
    return EvaluationSet(name, (rows.path or Path(source)).resolve(), _array(pairs), _array(sentences))


def _texts_in(value: Any) -> list[str]:
    """Return the texts of a cell: a text, a passage with `text` and perhaps `title`, or a list of these; else none."""
    if isinstance(value, list):
        return [text for item in value for text in _texts_in(item)]
    if isinstance(value, Mapping):
        return [" ".join(text for part in ("title", "text") for text in _texts_in(value.get(part)))]
    return [value] if isinstance(value, str) and value.strip() else []


def _read_judged(folder: Path, split: str) -> EvaluationSet:
    """Return the queries and judged documents of a BEIR folder; pairs are queries with their positives."""
    pairs: set[int] = set()
    sentences: set[int] = set()
    queries: set[int] = set()
    documents: set[int] = set()
    ids: set[int] = set()
    judged = JudgedQueries(folder, split)
    for row in RowSource(str(folder), [judged]).good_rows():
        query = near(sound(str(row.values["query"])))
        queries.add(key(query))
        ids.add(key(row.values["query_id"]))
        if is_telling(query):
            sentences.add(key(query))
        for column in ("positive_passages", "negative_passages"):
            for passage in row.values[column]:
                text = near(sound(passage["text"]))
                documents.add(key(text))
                ids.add(key(passage["docid"]))
                if column == "positive_passages":
                    pairs.add(pair_key(query, text))
    arrays = map(_array, (pairs, sentences, queries, documents, ids))
    return EvaluationSet(f"{folder.name}@{split}", judged.path.resolve(), *arrays)


def _array(keys: Collection[int]) -> NDArray[np.uint64]:
    return np.fromiter(keys, dtype=np.uint64)


def _text_columns(columns: Sequence[str], mapping: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the columns of pairs, else of single texts or lists of texts."""
    mapping = {name: column for name, column in mapping.items() if column in columns}
    formats = {
        format: {name: column for name, column in mapping.items() if name in fields_of(format, mapping, columns)}
        for format in ("triple", "group", "positive_pair")
    }
    for format in sorted(formats, key=lambda format: -len(formats[format])):  # named columns first
        own = formats[format]
        try:
            _, fields = resolve_format(format, own, columns)
        except DataError:
            continue
        first, *others = (column for field, column in fields.items() if "scores" not in field)
        return [(first, other) for other in others]
    premise, hypothesis = (mapping.get(name, name) for name in ("premise", "hypothesis"))
    if {premise, hypothesis} <= set(columns):
        return [(premise, hypothesis)]
    named: list[tuple[str, ...]] = [
        (column,) for name, column in mapping.items() if name in USUAL_NAMES and "score" not in name
    ]
    return named or [(name,) for name in ("text", "sentence", "captions") if name in columns]
