"""Scored pairs, and the plain file they come in: a TSV with a header line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

STARTER = "starter:"
"""Prefix of a file that comes with the package: `starter:graded_pairs.tsv` gives a first number without a download."""

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
    `edits` names what was done to the sentences after reading, "" for nothing.
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
        """The text a figure is on, for a table: `senteval`, or `senteval, edited`."""
        return f"{self.variant}, edited" if self.edits else self.variant


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
        return StsTask(file.stem, file.stem, "file", source, tuple(tsv_pairs(file)))


def edited(task: StsTask, name: str, edit: Callable[[str], str]) -> StsTask:
    """The task with `edit` done to every sentence, and remembered as `name`: `load_prompt(…).edit`, for instance."""
    pairs = tuple(pair._replace(sentence1=edit(pair.sentence1), sentence2=edit(pair.sentence2)) for pair in task.pairs)
    return replace(task, pairs=pairs, edits=name)


def tsv_pairs(path: Path) -> Iterator[StsPair]:
    """The pairs of one TSV file, blank lines skipped; `ValueError` with file and line for anything malformed."""
    lines = utf8_lines(path)
    _, first_line = next(lines, (1, ""))
    header = first_line.split("\t")
    missing = [column for column in ("sentence1", "sentence2", "score") if column not in header]
    if missing:
        raise ValueError(
            f"{path}: the header line needs tab-separated columns sentence1, sentence2, score; missing "
            f"{', '.join(missing)}, found {', '.join(header)[:200]}. (Pairs to measure on are read from TSV alone.)"
        )
    first, second, gold = (header.index(column) for column in ("sentence1", "sentence2", "score"))
    group = next((header.index(column) for column in _SUBTASK_COLUMNS if column in header), None)
    empty = True
    for number, line in lines:
        if not line:
            continue
        where, cells = f"{path}, line {number}", line.split("\t")
        if len(cells) != len(header):
            raise ValueError(f"{where}: {len(header)} columns needed, as in the header; {len(cells)} found.")
        subtask = "" if group is None else cells[group]
        yield scored_pair(cells[first], cells[second], cells[gold], subtask, where)
        empty = False
    if empty:
        raise ValueError(f"{path}: a header line but no pairs below it.")


def utf8_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with their numbers, from 1, without their ends; `ValueError` for a line that is not UTF-8."""
    # newline="\n" and not the default: other line separators may be part of a sentence.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.isascii() and any("\udc80" <= character <= "\udcff" for character in line):
                raise ValueError(
                    f"{path}, line {number}: not UTF-8. Convert the file, as in `iconv -f latin1 -t utf-8`."
                )
            yield number, line.rstrip("\r\n")


def scored_pair(sentence1: str, sentence2: str, score: str, subtask: str, where: str) -> StsPair:
    """A pair of two sentences that are there, and a finite score; else `ValueError` that begins with `where`."""
    if not (sentence1.strip() and sentence2.strip()):
        raise ValueError(f"{where}: a sentence is empty. Put one in, or remove the line.")
    return StsPair(sentence1, sentence2, gold_score(score, where), subtask)


def gold_score(value: object, where: str) -> float:
    """A gold score as a finite number, or `ValueError` that says `where` it stands."""
    try:
        score = float(str(value))
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{where}: the score must be a finite number, found {value!r}.")
    return score
