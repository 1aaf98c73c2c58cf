"""`eval/data_scale.py` on small files: it reports its figures, and processes read the same order."""

from pathlib import Path

import pytest
from data_scale import ScaleSettings
from data_scale import main as measure


@pytest.mark.parametrize(
    ("rows", "worlds"),
    [(3_000, (2,)), pytest.param(400_000, (1, 2, 3), marks=pytest.mark.slow)],
    ids=["memory", "disk"],
)
def test_every_process_reads_each_row_once_in_the_same_order(
    rows: int, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    figures = measure(ScaleSettings(rows=rows, processes=worlds, folder=tmp_path))
    assert {f"epoch_seconds_{world}" for world in worlds} <= figures.keys()
    assert figures["warm_examples_per_second"] > 1_000
    if rows > 100_000:
        assert (tmp_path / "cache" / "examples").is_dir()
        assert figures["warm_first_batch_seconds"] < 10
        assert figures["resume_seconds"] < 1
        assert figures["warm_memory_grown_mb"] < 500
