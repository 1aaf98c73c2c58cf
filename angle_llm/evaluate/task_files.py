"""Find the files of evaluation tasks in a data directory, make task names unique, and check values of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from angle_llm.data.formats import DataError, ListCell, list_problem
from angle_llm.data.keys import printable
from angle_llm.data.sources import EXTENSIONS, Row, Source
from angle_llm.settings.parsing import SettingsError

Layout = Sequence[Path]
"""Paths of all files of an evaluation task, in one folder structure that a data directory can have."""


def senteval_folder(root: Path) -> Path:
    """Return the folder of SentEval's tasks in a data directory: `root/downstream` if it exists, else `root`."""
    return root / "downstream" if (root / "downstream").is_dir() else root


def data_file(path: Path) -> Path:
    """Return the existing file for a table path, which can have another format or compression suffix.

    Example: stsb/test.jsonl.gz for stsb/test.tsv. Without such a file, return the path unchanged.
    """
    others = (path.with_name(path.name.removesuffix(path.suffix) + ending) for ending in EXTENSIONS)
    return next((file for file in (path, *others) if file.is_file()), path)


def is_complete(files: Layout) -> bool:
    """Return whether all files in a list of paths exist."""
    return all(path.is_file() for path in files)


def first_complete(task: str, layouts: Sequence[Layout], present: Sequence[str]) -> Layout:
    """Return the first layout (list of the files of a task) whose files all exist.

    Raises:
        FileNotFoundError: if there is none. The message lists the missing files of `task` and the available tasks
            (`present`).
    """
    complete = next(filter(is_complete, layouts), None)
    if complete is None:
        missing = [str(path) for files in layouts for path in files if not path.is_file()]
        raise FileNotFoundError(
            f"task {task}: missing files: {', '.join(missing)}. Tasks in this directory: {', '.join(present) or 'none'}."
        )
    return complete


def unique_names(names: Sequence[str], sources: Sequence[Source | None], reserved: Sequence[str] = ()) -> list[str]:
    """Make task names unique: equal names get their folders as prefixes, such as stsb/test and sick/test.

    `sources` has the source of each task; None: a task without a file of its own. A file with a name in `reserved` gets
    its folder too. Lone surrogates, of file names that
    are not UTF-8, are escaped, because results with them cannot be stored.

    Raises:
        SettingsError: if two tasks have equal names in folders with equal names.
    """
    unique = [
        name if source is None or [*names, *reserved].count(name) == 1 else f"{source.folder.name}/{name}"
        for name, source in zip(names, sources, strict=True)
    ]
    if repeated := {name for name in unique if unique.count(name) > 1}:
        raise SettingsError(
            f"expected tasks with unique names, got {', '.join(sorted(repeated))} more than once. Rename a file or folder."
        )
    return list(map(printable, unique))


def text_of(row: Row, column: str) -> str:
    """Return the text in a column of a row; a missing or blank text is an error.

    Raises:
        DataError: with file and line if the text is missing or blank, because a blank text has no embedding, or is a list.
    """
    text = row.values.get(column)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{row.place}: column {column}: expected a text, got {text!r}.")
    if isinstance(text, ListCell):
        raise DataError(f"{row.place}: {list_problem(column, text)}.")
    return text


def score_of(row: Row, column: str) -> float:
    """Return the number in a column of a row as a float; a value that is not a finite number is an error.

    Raises:
        DataError: with file and line if the value is not a finite number.
    """
    try:
        score = float(str(row.values.get(column)))
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{row.place}: column {column}: expected a finite number, got {row.values.get(column)!r}.")
    return score
