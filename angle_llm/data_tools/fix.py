"""A cleaned copy of files, and what was taken out of them, with the reasons: rows in = kept + quarantined."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from angle_llm.config import DataSource
from angle_llm.data.formats import RowError
from angle_llm.data.keys import sound
from angle_llm.data.reading import label_word, open_source
from angle_llm.model.artifact import write_directory


class ToFix(NamedTuple):
    """A file that could be read, and why rows are taken out of it, by line."""

    source: DataSource
    quarantined: Mapping[int, str]


class Fixed(NamedTuple):
    """What was written for a file."""

    path: str
    cleaned: Path
    rows_in: int
    kept: int
    quarantined: int


def write_fixed(files: Sequence[ToFix], out: Path) -> list[Fixed]:
    """Writes NAME.jsonl and NAME.quarantine.jsonl for each file into the new or empty folder `out`, whole or not at all.

    Kept rows have all their columns, and dropped ones (neutral labels) stay: the next reader drops them again. A quarantined
    row stands with its place and the reason; one that could not be read as a row has `null` for it.

    Raises `ArtifactError` for a folder that holds something.
    """
    fixed: list[Fixed] = []

    def fill(folder: Path) -> None:
        for name, file in zip(_names(files), files, strict=True):
            fixed.append(_write(file, folder, out, name))

    write_directory(out, fill)
    return fixed


def _names(files: Sequence[ToFix]) -> Iterator[str]:
    """The names without their extensions; where a name would write over another's file, the later one gets a number."""
    taken: set[str] = set()
    for file in files:
        whole = Path(file.source.path.removeprefix("starter:")).name.removesuffix(".gz")
        stem = whole.rpartition(".")[0] or whole
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if not {name, f"{name}.quarantine"} & taken)
        taken |= {name, f"{name}.quarantine"}
        yield name


def _write(file: ToFix, folder: Path, out: Path, name: str) -> Fixed:
    rows_in = kept = 0
    reading = open_source(file.source)
    with (
        (folder / f"{name}.jsonl").open("w", encoding="utf-8") as cleaned,
        (folder / f"{name}.quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for number, row, result in reading.outcomes():
            rows_in += 1
            reason = result.reason if isinstance(result, RowError) else file.quarantined.get(number)
            if reason is None:
                kept += 1
                cleaned.write(_line(_in_words(row, reading.table.label_names)))
            else:
                whole = None if isinstance(row, RowError) else row
                quarantine.write(_line({"file": file.source.path, "line": number, "reason": reason, "row": whole}))
    return Fixed(file.source.path, out / f"{name}.jsonl", rows_in, kept, rows_in - kept)


def _in_words(row: object, label_names: Mapping[str, list[str]]) -> object:
    """A data set numbers its labels in an order of its own; a plain file has to name them."""
    if not isinstance(row, Mapping):
        return row
    named = {column: label_word(row[column], names) for column, names in label_names.items() if column in row}
    return {**row, **named}


def _line(row: object) -> str:
    # Half a character cannot be written in UTF-8; `\ud800` in ASCII can, and is read back as it was.
    line = json.dumps(row, ensure_ascii=False, default=repr)
    return (line if line == sound(line) else json.dumps(row, default=repr)) + "\n"
