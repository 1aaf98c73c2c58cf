"""STS tasks: scored pairs by name or from a file.

A year of SemEval is one task; each pair has its sub-task. Text has two variants, which change scores by up to 2 points
before training:

* `raw`: sentences as released. MTEB and sentence-transformers evaluate on it.
* `senteval`: the same pairs after SentEval's preprocessing (Moses tokenizer; lower-cased except SICK). The tables of
  SimCSE, PromptEOL and AnglE are on it.

Files below a data directory, in this project's layout or as SentEval's download script writes them:

| task | this project (raw; folders end in `_senteval_tok` for senteval) | SentEval (senteval) |
|---|---|---|
| sts12 … sts16 | sts/sts12.test.tsv | STS/STS12-en-test/STS.input.MSRpar.txt, STS.gs.MSRpar.txt, … |
| stsb, stsb-dev | stsb/test.tsv, stsb/dev.tsv | STS/STSBenchmark/sts-test.csv, sts-dev.csv |
| sickr, sickr-all | sick/test.tsv, … | SICK/SICK_test_annotated.txt, … |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from angle_llm.config import unknown_name
from angle_llm.data.formats import DataError
from angle_llm.data.readers import EXTENSIONS, Row, RowSource, find_path, open_rows

TextVariant = Literal["raw", "senteval"]

STARTER = "starter:"
"""Prefix of files in the package, such as `starter:graded_pairs.tsv`."""

COLUMNS = ("sentence1", "sentence2", "score")
_SICK_COLUMNS = ("sentence_A", "sentence_B", "relatedness_score")
_SUBTASK_COLUMNS = ("subtask", "genre")

PUBLISHED_TASKS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
"""The seven tasks of published tables, in the order of their columns."""


class StsPair(NamedTuple):
    """Two sentences, their gold score, and their sub-task or genre ("": none)."""

    sentence1: str
    sentence2: str
    score: float
    subtask: str = ""


@dataclass(frozen=True)
class StsTask:
    """Scored pairs with a name.

    `variant` is "raw", "senteval", or "file" for a pair file. `official_pairs` is the number of pairs of the published
    task. `edits` names the edits of the sentences, "" for none.
    """

    name: str
    label: str
    variant: str
    source: str
    pairs: tuple[StsPair, ...]
    official_pairs: int | None = None
    edits: str = ""

    @property
    def text(self) -> str:
        """Text variant in tables: `senteval`, or `senteval, edited`."""
        return f"{self.variant}, edited" if self.edits else self.variant


@dataclass(frozen=True)
class _Spec:
    """Files of a task in both layouts, and its hub dataset and split. SentEval's tables of SICK have other columns."""

    label: str
    official_pairs: int
    own: tuple[str, ...]
    senteval: tuple[str, ...]
    hub: tuple[str, str] | None
    senteval_columns: tuple[str, str, str] = COLUMNS


_SUBTASKS = {  # of each year's test; SMT of 2013 is not freely available
    12: ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    13: ("FNWN", "headlines", "OnWN"),
    14: ("deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"),
    15: ("answers-forums", "answers-students", "belief", "headlines", "images"),
    16: ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
_PAIRS = {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}
_SICK = ("SICK/SICK_train.txt", "SICK/SICK_trial.txt", "SICK/SICK_test_annotated.txt")


def _year(year: int) -> _Spec:
    files = (f"STS/STS{year}-en-test/STS.input.{subtask}.txt" for subtask in _SUBTASKS[year])
    hub = (f"mteb/sts{year}-sts", "test")
    return _Spec(f"STS{year}", _PAIRS[year], (f"sts/sts{year}.test.tsv",), tuple(files), hub)


_SPECS: dict[str, _Spec] = {
    **{f"sts{year}": _year(year) for year in _SUBTASKS},
    "stsb": _Spec(
        "STS-B", 1379, ("stsb/test.tsv",), ("STS/STSBenchmark/sts-test.csv",), ("mteb/stsbenchmark-sts", "test")
    ),
    "stsb-dev": _Spec(
        "STS-B dev", 1500, ("stsb/dev.tsv",), ("STS/STSBenchmark/sts-dev.csv",), ("mteb/stsbenchmark-sts", "validation")
    ),
    "sickr": _Spec("SICK-R", 4927, ("sick/test.tsv",), _SICK[2:], None, _SICK_COLUMNS),
    "sickr-all": _Spec(
        "SICK-R all", 9927, ("sick/train.tsv", "sick/trial.tsv", "sick/test.tsv"), _SICK,
        ("mteb/sickr-sts", "test"),  # this split of the hub dataset has all splits of SICK
        _SICK_COLUMNS,
    ),
}  # fmt: skip

TASKS = tuple(_SPECS)
"""Names for `read_task`."""


def select_tasks(names: Sequence[str], data_dir: Path | None, variant: TextVariant) -> list[StsTask]:
    """Tasks by name or path of a pair file; without names all published tasks that are available.

    On the hub only all splits of SICK together are available, so that `sickr-all` replaces `sickr`.
    """
    if not names:
        present = available_tasks(data_dir, variant)
        names = [name for name in PUBLISHED_TASKS if name in present]
        if data_dir is None:
            names = [*names, "sickr-all"]
        if not names:
            raise FileNotFoundError(
                f"--data-dir: no STS task with {variant} text below {data_dir}. Expected sts/stsNN.test.tsv, "
                "stsb/test.tsv or sick/test.tsv (folders end in _senteval_tok for senteval text), or SentEval's STS/ and "
                "SICK/ (senteval text). Or set --tasks to task names or files."
            )
    return [read_pairs(name) if _is_path(name) else read_task(data_dir, name, variant) for name in names]


def _is_path(name: str) -> bool:
    return name.startswith(STARTER) or "/" in name or name.endswith(EXTENSIONS)


def available_tasks(data_dir: str | Path | None, variant: TextVariant = "raw") -> list[str]:
    """Names of the tasks with all files below `data_dir`; without a directory, those of the hub.

    Raises `FileNotFoundError` if the directory does not exist.
    """
    if data_dir is None:
        return [name for name, spec in _SPECS.items() if spec.hub is not None] if variant == "raw" else []
    root = _existing_directory(data_dir)
    return [name for name, spec in _SPECS.items() if any(map(_all_exist, _layouts(root, spec, variant)))]


def variant_of(data_dir: str | Path | None) -> TextVariant:
    """The default variant: `senteval` for a directory that has no other text, else `raw`."""
    only_senteval = data_dir is not None and not available_tasks(data_dir) and available_tasks(data_dir, "senteval")
    return "senteval" if only_senteval else "raw"


def read_task(data_dir: str | Path | None, task: str, variant: TextVariant = "raw") -> StsTask:
    """A named task, from files below `data_dir` (this project's layout first), or from the hub without a directory.

    Raises `ValueError` for an unknown name or a malformed file, `FileNotFoundError` with the expected files, and
    `ConnectionError` if the hub dataset cannot be loaded.
    """
    if task not in _SPECS:
        raise ValueError(
            f"{unknown_name('STS task', task, TASKS)} Or give the path of a file with {', '.join(COLUMNS)}."
        )
    spec = _SPECS[task]
    if data_dir is None:
        return _read_hub(task, spec, variant)
    root = _existing_directory(data_dir)
    layouts = _layouts(root, spec, variant)
    paths = next(filter(_all_exist, layouts), None)
    if paths is None:
        present = ", ".join(available_tasks(root, variant)) or "none"
        raise FileNotFoundError(
            f"task {task!r} with {variant} text: expected {' or '.join(map(_missing, layouts))}. Tasks in this directory with "
            f"{variant} text: {present}."
        )
    if paths == layouts[0]:
        pairs = tuple(pair for path in paths for pair in _pairs(open_rows(path, tables=True)))
        return StsTask(task, spec.label, variant, ", ".join(map(str, paths)), pairs, spec.official_pairs)
    tables = [path for path in paths if not path.name.startswith("STS.gs.")]
    pairs = tuple(pair for path in tables for pair in _senteval_pairs(path, spec))
    source = ", ".join(map(str, dict.fromkeys(path.parent for path in paths)))
    return StsTask(task, spec.label, variant, source, pairs, spec.official_pairs)


def read_pairs(path: str | Path) -> StsTask:
    """A task named after a file with columns sentence1, sentence2, score, and optionally subtask or genre.

    `path` is a TSV, CSV, JSONL or Parquet file, or `starter:NAME`. Raises `FileNotFoundError`, or `ValueError` with
    file and line of a malformed row.
    """
    source = str(path)
    if not source.startswith(STARTER) and not find_path(source).is_file():
        raise FileNotFoundError(f"no pair file at {source}; expected a table with columns {', '.join(COLUMNS)}.")
    name = Path(source.removeprefix(STARTER).removesuffix(".gz")).stem
    return StsTask(name, name, "file", source, tuple(_pairs(open_rows(source, tables=True))))


def edited(task: StsTask, name: str, edit: Callable[[str], str]) -> StsTask:
    """The task with all sentences edited by the function called `name`."""
    pairs = tuple(pair._replace(sentence1=edit(pair.sentence1), sentence2=edit(pair.sentence2)) for pair in task.pairs)
    return replace(task, pairs=pairs, edits=name)


def text_of(row: Row, column: str) -> str:
    """The text in a column. Raises `DataError` with file and line for an empty one, which has no embedding."""
    text = row.values.get(column)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{row.place}: column {column}: expected a text, got {text!r}.")
    return text


def score_of(row: Row, column: str) -> float:
    """The number in a column. Raises `DataError` with file and line if it is not finite."""
    try:
        score = float(str(row.values.get(column)))
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{row.place}: column {column}: expected a finite number, got {row.values.get(column)!r}.")
    return score


def _pairs(rows: RowSource, columns: Sequence[str] = COLUMNS) -> Iterator[StsPair]:
    """Pairs of a source; at least one is expected."""
    first, second, gold = columns
    rows.require(columns)
    group = next((column for column in _SUBTASK_COLUMNS if column in rows.columns), None)
    empty = True
    for row in rows.good_rows():
        subtask = "" if group is None else str(row.values.get(group) or "")
        yield StsPair(text_of(row, first), text_of(row, second), score_of(row, gold), subtask)
        empty = False
    if empty:
        raise DataError(f"{rows.name}: no scored pairs.")


def _senteval_pairs(path: Path, spec: _Spec) -> Iterator[StsPair]:
    """Pairs of one of SentEval's files, words joined by single spaces as in SentEval's evaluation.

    Raises `DataError` for capital letters in STS: the text was not prepared by SentEval's script.
    """
    is_year = path.name.startswith("STS.input.")
    for pair in _pairs(open_rows(path, tables=True), spec.senteval_columns):
        first, second = (" ".join(sentence.split()) for sentence in pair[:2])
        if path.parent.name != "SICK" and (first + second) != (first + second).lower():
            raise DataError(
                f"{path}: expected SentEval's lower-cased text, got {first!r}, {second!r}. Run SentEval's script, or put the "
                "sentences into this project's layout (sts/sts12.test.tsv, …) as raw text."
            )
        subtask = path.stem.removeprefix("STS.input.") if is_year else " ".join(pair.subtask.split())
        yield StsPair(first, second, pair.score, subtask)


def _existing_directory(data_dir: str | Path) -> Path:
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"--data-dir: no directory at {root}. Expected a directory with sts/, stsb/ and sick/, or SentEval's STS/ and "
            "SICK/; unset it to use the hub."
        )
    return root


def _layouts(root: Path, spec: _Spec, variant: TextVariant) -> list[list[Path]]:
    """All files of a task in each layout with this text; this project's layout first."""
    if variant == "raw":
        return [[root / file for file in spec.own]]
    base = root / "downstream" if (root / "downstream").is_dir() else root
    files = [base / file for file in spec.senteval]
    gold = [path.with_name(path.name.replace("STS.input.", "STS.gs.")) for path in files]
    own = [root / file.replace("/", "_senteval_tok/", 1) for file in spec.own]
    return [own, list(dict.fromkeys([*files, *gold]))]


def _all_exist(paths: Sequence[Path]) -> bool:
    return all(path.is_file() for path in paths)


def _missing(paths: Sequence[Path]) -> str:
    missing = ", ".join(str(path) for path in paths if not path.is_file())
    return f"{', '.join(map(str, paths))} (missing: {missing})"


def _read_hub(task: str, spec: _Spec, variant: TextVariant) -> StsTask:
    if variant != "raw":
        raise ValueError(f"--variant {variant}: task {task!r} has only raw text on the hub; set --data-dir.")
    if spec.hub is None:
        raise ValueError(
            f"task {task!r} is not on the hub. Use sickr-all (all 9,927 pairs, as in MTEB), or set --data-dir to a "
            "directory with sick/test.tsv."
        )
    dataset, split = spec.hub
    try:
        rows = open_rows(dataset, tables=True, split=split)
    except DataError as error:
        raise ConnectionError(f"task {task!r}: {error} Without a connection, set --data-dir.") from error
    return StsTask(task, spec.label, variant, f"hub: {dataset} [{split}]", tuple(_pairs(rows)), spec.official_pairs)
