"""STS tasks: where their files lie, and how a file becomes scored pairs.

A task is a list of `(sentence1, sentence2, score)`. A year of SemEval is one task whose pairs remember their sub-task,
so that the "all" protocol (concatenate the sub-tasks, one correlation) and the figures of each sub-task come from one
list.

The text comes in two variants, and a number means nothing without naming one:

* `raw`: the sentences as released. MTEB and sentence-transformers report on it.
* `senteval`: the same pairs after SentEval's preprocessing (Moses tokenizer; lower-cased, SICK excepted). The published
  tables of SimCSE, PromptEOL and AnglE are on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

from angle_llm.errors import unknown

TextVariant = Literal["raw", "senteval"]

PUBLISHED_TASKS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
"""The seven tasks of the published tables, in their column order."""

STARTER = "starter:"
"""Prefix of a file that comes with the package: `starter:graded_pairs.tsv` gives a first number without a download."""

_SENTEVAL_SUFFIX = "_senteval_tok"
_SUBTASK_COLUMNS = ("subtask", "genre")


class StsPair(NamedTuple):
    """Two sentences, how similar people found them, and the sub-task (or genre) they belong to, "" for none."""

    sentence1: str
    sentence2: str
    score: float
    subtask: str = ""


@dataclass(frozen=True)
class StsTask:
    """Scored pairs under a name.

    `variant` is the text the sentences are in: "raw", "senteval", or "file" for a plain pair file. `source` says where
    they were read. `official_pairs` is the size of the published task, None where there is none; a report compares.
    """

    name: str
    label: str
    variant: str
    source: str
    pairs: tuple[StsPair, ...]
    official_pairs: int | None = None


@dataclass(frozen=True)
class _Spec:
    """Where a named task lies: files below the data directory, and data set and split on the hub."""

    label: str
    folder: str
    files: tuple[str, ...]
    official_pairs: int
    hub: tuple[str, str] | None


_SPECS: dict[str, _Spec] = {
    **{
        f"sts{year}": _Spec(f"STS{year}", "sts", (f"sts{year}.test.tsv",), pairs, (f"mteb/sts{year}-sts", "test"))
        for year, pairs in {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}.items()
    },
    "stsb": _Spec("STS-B", "stsb", ("test.tsv",), 1379, ("mteb/stsbenchmark-sts", "test")),
    "stsb-dev": _Spec("STS-B dev", "stsb", ("dev.tsv",), 1500, ("mteb/stsbenchmark-sts", "validation")),
    "sickr": _Spec("SICK-R", "sick", ("test.tsv",), 4927, None),
    # The hub's copy holds all splits of SICK under the name "test".
    "sickr-all": _Spec("SICK-R all", "sick", ("train.tsv", "trial.tsv", "test.tsv"), 9927, ("mteb/sickr-sts", "test")),
}

TASKS = tuple(_SPECS)
"""Every task name `read_task` knows."""


def available_tasks(data_dir: str | Path | None, variant: TextVariant = "raw") -> list[str]:
    """Names of the tasks whose files are all below `data_dir`; without a directory, those the hub has.

    Raises `FileNotFoundError` when the directory does not exist.
    """
    if data_dir is None:
        return [name for name, spec in _SPECS.items() if spec.hub is not None] if variant == "raw" else []
    root = _existing_directory(data_dir)
    return [name for name, spec in _SPECS.items() if all(path.is_file() for path in _paths(root, spec, variant))]


def read_task(data_dir: str | Path | None, task: str, variant: TextVariant = "raw") -> StsTask:
    """One named task, from the files below `data_dir` or, without a directory, from the hub.

    Raises `ValueError` for an unknown name or a malformed file, `FileNotFoundError` naming every file that was looked
    for, and `ConnectionError` when the hub does not answer.
    """
    if task not in _SPECS:
        raise ValueError(
            f"{unknown('STS task', task, TASKS)} Or give the path of a TSV file with columns "
            "sentence1, sentence2, score."
        )
    spec = _SPECS[task]
    if data_dir is None:
        return _read_hub(task, spec, variant)
    paths = _paths(_existing_directory(data_dir), spec, variant)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        present = ", ".join(available_tasks(data_dir, variant)) or "none"
        raise FileNotFoundError(
            f"task {task!r} on {variant} text needs {', '.join(map(str, paths))}; not there: "
            f"{', '.join(map(str, missing))}. Tasks found in this directory on {variant} text: {present}. "
            "Add the files or choose among those."
        )
    pairs = tuple(pair for path in paths for pair in _rows(path))
    return StsTask(task, spec.label, variant, ", ".join(map(str, paths)), pairs, spec.official_pairs)


def read_pairs(path: str | Path) -> StsTask:
    """A plain pair file as a task: a TSV with a header line that has columns sentence1, sentence2 and score.

    `starter:NAME` is a file that comes with the package. Other columns are ignored, but for `subtask` or `genre`, which
    split the file into sub-tasks. The task is called after the file. No quoting: a `"` is a character of the sentence.

    Raises `FileNotFoundError`, or `ValueError` naming file and line of what is malformed.
    """
    source = str(path)
    if source.startswith(STARTER):
        place = resources.files("angle_llm") / "data" / "starter" / source.removeprefix(STARTER)
    else:
        place = Path(path).expanduser()
    if not place.is_file():
        raise FileNotFoundError(
            f"no pair file at {source}. Needed: a TSV file with a header line and columns sentence1, sentence2, score."
        )
    with resources.as_file(place) as file:
        return StsTask(file.stem, file.stem, "file", source, tuple(_rows(file)))


def _existing_directory(data_dir: str | Path) -> Path:
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"no data directory at {root}. Give the directory that holds sts/, stsb/ and sick/, or none to use the hub."
        )
    return root


def _paths(root: Path, spec: _Spec, variant: TextVariant) -> list[Path]:
    folder = spec.folder + (_SENTEVAL_SUFFIX if variant == "senteval" else "")
    return [root / folder / file for file in spec.files]


def _rows(path: Path) -> Iterator[StsPair]:
    """The pairs of one TSV file, blank lines skipped; `ValueError` with file and line for anything malformed."""
    # newline="\n" and not the default: other line separators may be part of a sentence.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        header = file.readline().rstrip("\r\n").split("\t")
        missing = [column for column in ("sentence1", "sentence2", "score") if column not in header]
        if missing:
            raise ValueError(
                f"{path}: the header line needs tab-separated columns sentence1, sentence2, score; missing "
                f"{', '.join(missing)}, found {', '.join(header)}."
            )
        first, second, gold = (header.index(column) for column in ("sentence1", "sentence2", "score"))
        group = next((header.index(column) for column in _SUBTASK_COLUMNS if column in header), None)
        empty = True
        for number, line in enumerate(file, start=2):
            cells = line.rstrip("\r\n").split("\t")
            if cells == [""]:
                continue
            if not line.isascii() and any("\udc80" <= character <= "\udcff" for character in line):
                raise ValueError(
                    f"{path}, line {number}: not UTF-8. Convert the file, as in `iconv -f latin1 -t utf-8`."
                )
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, line {number}: {len(header)} columns needed, as in the header; {len(cells)} found."
                )
            if not (cells[first].strip() and cells[second].strip()):
                raise ValueError(f"{path}, line {number}: a sentence is empty. Put one in, or remove the line.")
            score = _score(cells[gold], f"{path}, line {number}")
            yield StsPair(cells[first], cells[second], score, "" if group is None else cells[group])
            empty = False
        if empty:
            raise ValueError(f"{path}: a header line but no pairs below it.")


def _score(value: object, where: str) -> float:
    try:
        score = float(str(value))
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{where}: the score must be a finite number, found {value!r}.")
    return score


def _read_hub(task: str, spec: _Spec, variant: TextVariant) -> StsTask:
    if variant != "raw":
        raise ValueError(
            f"the hub holds raw text only, and task {task!r} was asked for on {variant} text: give a data directory."
        )
    if spec.hub is None:
        raise ValueError(
            f"task {task!r} is not on the hub by itself. Take 'sickr-all' (all 9,927 pairs, as MTEB reports), or "
            "give a data directory with sick/test.tsv."
        )
    from datasets import load_dataset

    dataset, split = spec.hub
    try:
        rows = load_dataset(dataset, split=split)
    except Exception as error:
        raise ConnectionError(
            f"could not load {dataset} (split {split}) from the hub for task {task!r}: {error}. Without a connection, "
            "give a data directory with the task's files."
        ) from error
    pairs = tuple(
        StsPair(row["sentence1"], row["sentence2"], _score(row["score"], f"{dataset}, row {number}"))
        for number, row in enumerate(rows)
    )
    return StsTask(task, spec.label, variant, f"hub: {dataset} [{split}]", pairs, spec.official_pairs)
