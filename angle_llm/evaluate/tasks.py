"""STS tasks by name: where their files lie, in this project's layout, in SentEval's, and on the hub.

A task is a list of `(sentence1, sentence2, score)`. A year of SemEval is one task whose pairs remember their sub-task,
so that the "all" protocol (concatenate the sub-tasks, one correlation) and the figures of each sub-task come from one
list.

The text comes in two variants, and a number means nothing without naming one:

* `raw`: the sentences as released. MTEB and sentence-transformers report on it.
* `senteval`: the same pairs after SentEval's preprocessing (Moses tokenizer; lower-cased, SICK excepted). The published
  tables of SimCSE, PromptEOL and AnglE are on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from angle_llm.config import unknown_name
from angle_llm.evaluate.pairs import StsPair, StsTask, gold_score, tsv_pairs
from angle_llm.evaluate.senteval_layout import senteval_files, senteval_pairs

TextVariant = Literal["raw", "senteval"]

PUBLISHED_TASKS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
"""The seven tasks of the published tables, in their column order."""

_SENTEVAL_SUFFIX = "_senteval_tok"


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
    """Names of the tasks whose files are all below `data_dir`, in either layout; without a directory, those on the hub.

    Raises `FileNotFoundError` when the directory does not exist.
    """
    if data_dir is None:
        return [name for name, spec in _SPECS.items() if spec.hub is not None] if variant == "raw" else []
    root = _existing_directory(data_dir)
    return [name for name in _SPECS if any(map(_all_there, _layouts(root, name, variant)))]


def variant_of(data_dir: str | Path | None) -> TextVariant:
    """The text to take where none is asked for: `senteval` for a directory with nothing else, `raw` for any other."""
    only_senteval = data_dir is not None and not available_tasks(data_dir) and available_tasks(data_dir, "senteval")
    return "senteval" if only_senteval else "raw"


def read_task(data_dir: str | Path | None, task: str, variant: TextVariant = "raw") -> StsTask:
    """One named task, from the files below `data_dir` (this project's layout before SentEval's) or, without a
    directory, from the hub.

    Raises `ValueError` for an unknown name or a malformed file, `FileNotFoundError` naming every file that was looked
    for, and `ConnectionError` when the hub does not answer.
    """
    if task not in _SPECS:
        raise ValueError(
            f"{unknown_name('STS task', task, TASKS)} Or give the path of a TSV file with columns "
            "sentence1, sentence2, score."
        )
    spec = _SPECS[task]
    if data_dir is None:
        return _read_hub(task, spec, variant)
    root = _existing_directory(data_dir)
    layouts = _layouts(root, task, variant)
    paths = next(filter(_all_there, layouts), None)
    if paths is None:
        present = ", ".join(available_tasks(root, variant)) or "none"
        raise FileNotFoundError(
            f"task {task!r} on {variant} text needs {' or '.join(map(_missing, layouts))}. Tasks found in this directory "
            f"on {variant} text: {present}. Add the files or choose among those."
        )
    ours = paths == layouts[0]
    pairs = tuple(pair for path in paths for pair in tsv_pairs(path)) if ours else senteval_pairs(root, task)
    source = ", ".join(map(str, paths if ours else dict.fromkeys(path.parent for path in paths)))
    return StsTask(task, spec.label, variant, source, pairs, spec.official_pairs)


def _existing_directory(data_dir: str | Path) -> Path:
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"no data directory at {root}. Give the directory that holds sts/, stsb/ and sick/ (or SentEval's STS/ and "
            "SICK/), or none to use the hub."
        )
    return root


def _layouts(root: Path, task: str, variant: TextVariant) -> list[list[Path]]:
    """The files of a task in each layout that can hold this text; this project's first."""
    spec = _SPECS[task]
    if variant == "raw":
        return [[root / spec.folder / file for file in spec.files]]
    return [[root / (spec.folder + _SENTEVAL_SUFFIX) / file for file in spec.files], senteval_files(root, task)]


def _all_there(paths: Sequence[Path]) -> bool:
    return all(path.is_file() for path in paths)


def _missing(paths: Sequence[Path]) -> str:
    missing = ", ".join(str(path) for path in paths if not path.is_file())
    return f"{', '.join(map(str, paths))} (not there: {missing})"


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
        StsPair(row["sentence1"], row["sentence2"], gold_score(row["score"], f"{dataset}, row {number}"))
        for number, row in enumerate(rows)
    )
    return StsTask(task, spec.label, variant, f"hub: {dataset} [{split}]", pairs, spec.official_pairs)
