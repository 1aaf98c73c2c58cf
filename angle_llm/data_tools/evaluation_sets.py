"""The pairs and sentences of evaluation sets: what must not be trained on if they are to measure anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from angle_llm.config import DataSource
from angle_llm.data.columns import resolve_format
from angle_llm.data.files import open_table
from angle_llm.data.formats import DataError
from angle_llm.data.keys import is_telling, key, near, pair_key, sound
from angle_llm.data.places import EXTENSIONS

_TO_EVALUATE = {"test", "dev", "valid", "validation", "val", "trial", "eval"}
_TO_TRAIN = {"train", "training"}
_SINGLE = ("text", "sentence", "captions")
"""Columns of single texts, or of lists of them."""


@dataclass(frozen=True)
class EvaluationSet:
    """What one file evaluates on, as keys without case, spacing and punctuation."""

    name: str
    path: Path
    pairs: NDArray[np.uint64]
    """Keys of its pairs in any order; for a triple, of anchor with positive and of anchor with negative."""
    sentences: NDArray[np.uint64]
    """Keys of its texts of 4 words and more."""


@dataclass(frozen=True)
class EvaluationSets:
    """Evaluation sets, and what is not in them: files beside them that are none, and rows that cannot be read."""

    sets: list[EvaluationSet]
    left_out: list[str]


def read_evaluation_sets(paths: Iterable[str | Path]) -> EvaluationSets:
    """Reads files, and folders with all that is in them.

    In a folder, files named after training are left out, and so are those not named after a test, dev or validation set
    if there are any that are. A file that is named is read in any case.

    Raises `DataError` for a path that does not exist, and for a named file without texts or that cannot be read.
    """
    found, left_out = [], []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            chosen, others = _chosen(path)
            left_out += [str(other.relative_to(path)) for other in others]
            for file in chosen:
                try:
                    found.append(_read(file, str(file.relative_to(path)), left_out))
                except DataError as error:
                    left_out.append(f"{file.relative_to(path)} ({error})")
        elif path.is_file():
            found.append(_read(path, path.name, left_out))
        else:
            raise DataError(f"--against: there is no file or folder {path}")
    if not found:
        raise DataError(
            f"--against: no evaluation set found; left out: {', '.join(left_out) or 'nothing'}. Name the files themselves"
        )
    return EvaluationSets(found, left_out)


def _chosen(folder: Path) -> tuple[list[Path], list[Path]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name.endswith(EXTENSIONS)]
    files = [file for file in files if not file.name.startswith("STS.gs.")]  # scores of the sentences beside them
    words = {file: set(re.split(r"[^a-z0-9]+", str(file.relative_to(folder)).lower())) for file in files}
    for wanted in (
        [file for file in files if words[file] & _TO_EVALUATE and not words[file] & _TO_TRAIN],
        [file for file in files if not words[file] & _TO_TRAIN],
    ):
        if wanted:
            return wanted, [file for file in files if file not in wanted]
    return [], files


def _read(path: Path, name: str, left_out: list[str]) -> EvaluationSet:
    table = open_table(DataSource(path=str(path)))
    columns = _text_columns(table.columns)
    if not columns:
        raise DataError(f"{path}: no column of texts is known among {table.columns}")
    pairs: set[int] = set()
    sentences: set[int] = set()
    unreadable = 0
    for _, row in table.rows:
        if not isinstance(row, Mapping):
            unreadable += 1
            continue
        for names in columns:
            bare = [near(sound(text)) for name in names for text in _texts(row.get(name))]
            sentences.update(key(text) for text in bare if is_telling(text))
            if len(names) == len(bare) == 2:
                pairs.add(pair_key(*bare))
    if unreadable:
        left_out.append(f"{unreadable:,} rows of {name} that cannot be read")
    return EvaluationSet(name, path.resolve(), _as_array(pairs), _as_array(sentences))


def _text_columns(columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Which columns hold pairs, or else single texts; scores and labels are of no interest."""
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
    return [(name,) for name in _SINGLE if name in columns]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))


def _as_array(keys: set[int]) -> NDArray[np.uint64]:
    return np.sort(np.fromiter(keys, dtype=np.uint64, count=len(keys)))
