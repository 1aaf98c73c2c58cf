"""`recipes/embed_ray.py` on a local Ray cluster of two workers, one of which is killed."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from embed_ray import INDEX, VECTOR, RaySettings, Worker, check_empty, columns_of, count_nulls
from pyarrow import parquet, table
from tiny import save_tiny_base

from angle_llm.data import DataError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.parsing import SettingsError

RECIPE = Path(__file__).parents[2] / "recipes" / "embed_ray.py"
ROWS = 600


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = [f"A man eats {n} of {n % 7} things." for n in range(ROWS)]
    parquet.write_table(table({"id": list(range(ROWS)), "text": texts}), tmp_path / "documents.parquet")
    return tmp_path / "documents.parquet"


def test_the_settings_of_the_program_reach_the_workers() -> None:
    """Ray pickles a class of the program itself with its functions."""
    cloudpickle = pytest.importorskip("cloudpickle", reason="optional: pip install 'angle_llm[ray]'")
    program = runpy.run_path(str(RECIPE), run_name="program")
    settings = program["RaySettings"]("m", "in", "out", workers=3)
    assert cloudpickle.loads(cloudpickle.dumps(settings)).workers == 3


def test_missing_columns_and_used_outputs_are_refused(documents: Path, tmp_path: Path) -> None:
    settings = partial(RaySettings, model="m", input=str(documents), output=str(tmp_path / "out"))

    assert columns_of(settings()) is None
    assert columns_of(settings(keep=("id",))) == ["id", "text"]
    with pytest.raises(DataError, match="body"):
        columns_of(settings(column="body"))
    (tmp_path / "README.md").write_text("A folder with other files, as of a hub dataset.")
    assert columns_of(settings(input=str(tmp_path), keep=("id",))) == ["id", "text"]
    check_empty(str(tmp_path / "out"))
    with pytest.raises(SettingsError, match=str(tmp_path)):
        check_empty(str(tmp_path))


@pytest.mark.parametrize("keep", [(), ("id",), ("id", "text")])
def test_a_worker_embeds_a_side_and_keeps_bad_rows_without_a_vector(keep: tuple[str, ...], tmp_path: Path) -> None:
    base = str(save_tiny_base("llama", tmp_path / "model"))
    encoder = SentenceEncoder.from_pretrained(base, prompt={"query": "query", "document": "passage"}, max_length=24)
    encoder.save_pretrained(tmp_path / "two")
    settings = RaySettings(
        str(tmp_path / "two"), "in", "out", side="query", keep=keep, on_bad_row="null", max_length=24
    )
    rows = table({"id": [1, 2, 3, 4], "text": ["A cat.", None, "A dog runs. " * 9, " "]})
    made = Worker(settings)(rows)
    assert made.column_names == [*(keep or ("id", "text")), VECTOR]
    assert [value is None for value in made[VECTOR].to_pylist()] == [False, True, False, True]
    expected = encoder.encode_query(["A cat.", "A dog runs. " * 9])
    np.testing.assert_array_equal(np.stack([made[VECTOR][row].as_py() for row in (0, 2)]), expected)
    assert count_nulls(made)["bad"].to_pylist() == [2]
    assert Worker(settings)(rows.slice(1, 1))[VECTOR].to_pylist() == [None]
    with pytest.raises(DataError, match=r"'id': 2.*--on-bad-row"):
        Worker(replace(settings, on_bad_row="error"))(rows)
    with pytest.raises(SettingsError, match="--as"):
        Worker(replace(settings, side=None))
    worker = Worker(settings)
    worker._encoder.model.register_forward_hook(lambda _, __, vectors_UD: vectors_UD * np.nan)
    with pytest.raises(DataError, match=r"'A (cat|dog).*not finite"):
        worker(rows)


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_every_row_is_embedded_once_though_a_worker_is_killed(documents: Path, tmp_path: Path) -> None:
    base, out = save_tiny_base("llama", tmp_path / "model"), tmp_path / "out"
    options = ("--workers", "2", "--block-rows", "5", "--on-bad-row", "null")
    command = [sys.executable, str(RECIPE), "--model", str(base), "--input", str(documents), "--output", str(out)]
    started = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = None
    while killed is None and started.poll() is None:
        for process in psutil.Process(started.pid).children(recursive=True):
            if " ".join(process.cmdline()).startswith("ray::MapWorker(MapBatches(Worker))"):
                killed = process.pid
                os.kill(killed, signal.SIGKILL)
                break
        time.sleep(0.05)
    shown, _ = started.communicate()
    assert killed is not None
    assert started.returncode == 0, shown
    assert f"{ROWS} rows in {out}" in shown

    found = parquet.read_table(out)
    places = np.argsort(found["id"].to_numpy())
    assert found["id"].to_numpy()[places].tolist() == list(range(ROWS))
    texts = parquet.read_table(documents)["text"].to_pylist()
    assert found["text"].take(places).to_pylist() == texts
    expected = SentenceEncoder.from_pretrained(base).encode(texts)
    rows = np.stack(found[VECTOR].to_numpy())[places]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-6 * np.abs(expected).max())  # other micro-batches
    index = json.loads((out / INDEX).read_text())
    assert (index["rows"], index["bad_rows"], index["model"]["pooling"]) == (ROWS, 0, "last")
