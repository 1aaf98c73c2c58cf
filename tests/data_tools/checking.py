"""What the tests of `angle-llm data check` share: rows, files of them, and the check as a function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from angle_llm.data import DataSource
from angle_llm.data_tools.check import Checked, check_files
from angle_llm.data_tools.command import data_main
from angle_llm.data_tools.evaluation_sets import read_evaluation_sets
from angle_llm.data_tools.report import FileReport

PAIR = {"text1": "A man eats.", "text2": "Someone eats.", "score": 1}
OTHER = {"text1": "A dog runs.", "text2": "Nobody runs.", "score": 0}


def write(path: Path, *rows: object) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def checked(*paths: str, against: Sequence[str] = (), **reading: Any) -> Checked:
    sources = [DataSource(path, on_bad_row="skip", max_bad_ratio=1, **reading) for path in paths]
    return check_files(sources, None, read_evaluation_sets(against).sets if against else [])


def found(report: FileReport) -> dict[str, int]:
    return {finding.kind: finding.count for finding in report.findings}


def data(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        data_main(["check", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code
