"""Files of evaluation tasks below a data directory, and the texts and scores in their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from angle_llm.data.formats import DataError
from angle_llm.data.readers import EXTENSIONS, STARTER, Row, open_rows

Layout = Sequence[Path]
"""All files of a task, in one of the folder layouts that are read."""


def data_folder(data_dir: str | Path, expected: str) -> Path:
    """Return the data directory. Raises `FileNotFoundError` with the `expected` content if it does not exist."""
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"--data-dir: no directory at {root}. Expected a directory with {expected}.")
    return root


def senteval_folder(root: Path) -> Path:
    """Return the folder with SentEval's tasks: the directory, or its folder `downstream`."""
    return root / "downstream" if (root / "downstream").is_dir() else root


def data_file(path: Path) -> Path:
    """Return the file, or the same table in another format or packed; if there is none, the path itself."""
    others = (path.with_name(path.name.removesuffix(path.suffix) + ending) for ending in EXTENSIONS)
    return next((each for each in (path, *others) if each.is_file()), path)


def is_complete(files: Layout) -> bool:
    """Return whether all files exist."""
    return all(path.is_file() for path in files)


def first_complete(task: str, layouts: Sequence[Layout], present: Sequence[str]) -> Layout:
    """Return the first layout with all its files.

    Raises:
        FileNotFoundError: with the missing files, and the tasks that are available (`present`).
    """
    complete = next(filter(is_complete, layouts), None)
    if complete is None:
        expected = " or ".join(
            f"{', '.join(map(str, files))} (missing: {', '.join(str(path) for path in files if not path.is_file())})"
            for files in layouts
        )
        raise FileNotFoundError(
            f"task {task}: expected {expected}. Tasks in this directory: {', '.join(present) or 'none'}."
        )
    return complete


def unique_names(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return the names of tasks, with as many folders before equal names as differ: stsb/test, sick/test.

    Names that are equal in equal folders are not changed.
    """
    found = list(names)
    for name in set(names):
        equal = [at for at, other in enumerate(names) if other == name]
        parts = [folders[at].parts for at in equal]
        for count in range(max(map(len, parts)) + 1):
            last = [folder[len(folder) - count :] for folder in parts]
            if len(set(last)) == len(equal):
                for at, folder in zip(equal, last, strict=True):
                    found[at] = Path(*folder, name).as_posix()
                break
    return found


def file_folder(source: str) -> Path:
    """Return the folder of a data file, `starter` for a file of the package."""
    path = None if source.startswith(STARTER) else open_rows(source, tables=True).path
    return Path(STARTER.removesuffix(":")) if path is None else path.resolve().parent


def text_of(row: Row, column: str) -> str:
    """Return the text in a column. Raises `DataError` with file and line for an empty one, which has no embedding."""
    text = row.values.get(column)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{row.place}: column {column}: expected a text, got {text!r}.")
    return text


def score_of(row: Row, column: str) -> float:
    """Return the number in a column. Raises `DataError` with file and line if it is not finite."""
    try:
        score = float(str(row.values.get(column)))
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{row.place}: column {column}: expected a finite number, got {row.values.get(column)!r}.")
    return score
