"""Stored vectors, against formulas in plain numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from angle_llm.model.unit_vectors import unit_rows
from angle_llm.model.vectors import VectorForm, join_arrays
from angle_llm.settings.parsing import SettingsError

ROWS = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32) * 3
ROWS[3] = 0


def unit(rows: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length, length, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unit_rows_have_the_requested_dtype(dtype: type[np.floating[Any]]) -> None:
    rows = unit_rows(ROWS, dtype)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, unit(ROWS.astype(dtype)))
    assert not rows[3].any(), "a zero row stays zero"


def test_float32_keeps_values_and_input() -> None:
    given = ROWS.copy()
    stored = VectorForm(10).stored(given)
    assert list(stored) == ["embedding"]
    np.testing.assert_array_equal(stored["embedding"], ROWS)
    VectorForm(10, normalize=True).stored(given)
    np.testing.assert_array_equal(given, ROWS)


def test_rows_are_cut_before_they_are_scaled() -> None:
    stored = VectorForm(10, dim=4, normalize=True).stored(ROWS)
    np.testing.assert_allclose(stored["embedding"], unit(ROWS[:, :4]), atol=1e-7)
    assert not stored["embedding"][3].any(), "a zero row stays zero"


def test_float16_is_rounded_and_refuses_values_that_are_too_large() -> None:
    form = VectorForm(10, precision="float16")
    stored = form.stored(ROWS)
    assert stored["embedding"].dtype == np.float16
    np.testing.assert_allclose(form.restored(stored), ROWS, rtol=2**-10)
    with pytest.raises(SettingsError, match=r"float16: .*7e\+04"):
        form.stored(np.full((1, 10), 7e4, dtype=np.float32))


def test_int8_errs_by_half_a_step_of_its_row() -> None:
    form = VectorForm(10, precision="int8")
    rows = ROWS * 10.0 ** np.arange(-3, 4)[:, None]
    stored = form.stored(rows)
    assert stored["embedding"].dtype == np.int8
    np.testing.assert_allclose(stored["scale"], np.abs(rows).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(form.restored(stored) - rows) <= stored["scale"][:, None] * 0.5001).all()
    assert np.abs(stored["embedding"]).max(axis=1).tolist() == [127, 127, 127, 0, 127, 127, 127]


def test_binary_packs_signs_and_pads_the_last_byte() -> None:
    form = VectorForm(10, precision="binary")
    stored = form.stored(ROWS)["embedding"]
    bits = [[int(value > 0) for value in row] + [0] * 6 for row in ROWS]
    assert [[int("".join(map(str, row[:8])), 2), int("".join(map(str, row[8:])), 2)] for row in bits] == stored.tolist()
    np.testing.assert_array_equal(form.restored({"embedding": stored}), np.where(ROWS > 0, 1, -1))


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "binary"])
def test_no_rows_stay_no_rows(precision: Any) -> None:
    form = VectorForm(10, precision=precision)
    assert form.restored(form.stored(ROWS[:0])).shape == (0, 10)


def test_arrays_are_joined_with_one_open_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows")
    paths = [tmp_path / f"{number}.npy" for number in range(80)]
    for number, path in enumerate(paths):
        np.save(path, np.full((number % 3, 2), number, dtype=np.float32))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 20, limits[1]))
    try:
        with (tmp_path / "all.npy").open("wb") as file:
            join_arrays(paths, file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert np.array_equal(np.load(tmp_path / "all.npy"), np.concatenate([np.load(path) for path in paths]))
