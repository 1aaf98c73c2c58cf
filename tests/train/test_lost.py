"""A process that is killed, stopped or fails ends the whole run within half a minute, and is named."""

import json
from pathlib import Path

import pytest
from test_spread import program


@pytest.mark.parametrize(
    "cases",
    [["kill0", "stop1", "raise1", "both0"], pytest.param(["kill1", "stop0", "raise0"], marks=pytest.mark.slow)],
    ids=["one half", "other half"],
)
def test_all_leave_when_one_is_lost(cases: list[str], tmp_path: Path) -> None:
    lines = [json.loads(line) for line in program("lost.py", str(tmp_path), *cases).splitlines() if line[:1] == "{"]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        lost = line["case"][-1]
        assert line["seconds"] < 30
        assert 0 not in line["codes"].values()
        if line["case"].startswith("both"):
            assert "interrupted" in line["left"], "the main process saved its weights before it left"
            continue
        (said,) = line["said"]
        assert f"process {lost}" in said
        if line["case"].startswith("raise"):
            assert "something only this process has met" in said
