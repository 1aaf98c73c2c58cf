"""Files as SentEval's download script leaves them (facebookresearch/SentEval, `get_transfer_data.bash`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from angle_llm.data.formats import DataError, Row, RowError
from angle_llm.data.table import Again, Table, lines, refuse_bad_bytes

_STS_BENCHMARK = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")
"""What the lines of `sts-test.csv` begin with, which has tabs and no header; what follows tells where a pair is from."""


def beside(path: Path) -> list[Path]:
    """The files that are read along with one."""
    return [path.with_name(path.name.replace("STS.input.", "STS.gs.", 1))] if path.name.startswith("STS.input.") else []


def open_sts_part(path: Path, gold: Path) -> Table:
    """Two sentences a line; a line whose score is blank was scored by nobody and is no row."""
    if not gold.is_file():
        raise DataError(f"{path}: its scores, {gold.name}, are not beside it")
    counts = [sum(1 for _ in lines(each)) for each in (path, gold)]
    if counts[0] != counts[1]:
        raise DataError(
            f"{path} has {counts[0]} lines and {gold.name} {counts[1]}; each line needs a score or a blank line"
        )

    def rows() -> Iterator[tuple[int, Row | RowError]]:
        for (number, line), (_, score) in zip(lines(path), lines(gold), strict=True):
            if score.strip():
                cells = line.rstrip("\r\n").split("\t")
                yield number, _checked_row(("sentence1", "sentence2", "score"), [*cells[:2], score.strip()])

    return Table(str(path), ["sentence1", "sentence2", "score"], Again(rows))


def open_sts_benchmark(path: Path) -> Table:
    """STS-B of the download."""

    def rows() -> Iterator[tuple[int, Row | RowError]]:
        for number, line in lines(path):
            if line.strip():
                cells = line.rstrip("\r\n").split("\t")
                yield number, _checked_row(_STS_BENCHMARK, cells[: len(_STS_BENCHMARK)])

    return Table(str(path), list(_STS_BENCHMARK), Again(rows))


def is_sts_benchmark(path: Path) -> bool:
    """Whether a .csv file is that of STS-B, with tabs and without a header."""
    cells = next((text for _, text in lines(path)), "").split("\t")
    return len(cells) >= len(_STS_BENCHMARK) and re.fullmatch(r"\d(\.\d+)?", cells[4].strip()) is not None


def _checked_row(columns: Sequence[str], cells: list[str]) -> Row | RowError:
    try:
        refuse_bad_bytes("".join(cells))
    except RowError as error:
        return error
    if len(cells) != len(columns):
        return RowError(f"{len(cells)} fields with tabs between them; needed {len(columns)}")
    return dict(zip(columns, cells, strict=True))
