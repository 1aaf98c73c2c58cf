"""The recorder's comparison reports every kind of difference between two trees."""

import numpy as np
import pytest
from recorder.compare import report

VALUES = {
    "ids": np.array([1, 2, 3]),
    "loss": np.array([0.5, 2.0]),
    "rows": np.array([[0.1, 0.2]], dtype=np.float32),
    "texts": np.array(["a", "bc"]),
}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("ids", np.array([1, 2, 3]), 0),
        ("ids", np.array([1, 2, 4]), 1),
        ("ids", np.array([1, 2]), 1),
        ("ids", np.array([1.0, 2.0, 3.0]), 1),
        ("loss", np.array([0.5, 2 + 1e-12]), 0),
        ("loss", np.array([0.5, 2 + 1e-11]), 1),
        ("loss", np.array([0.5, np.nan]), 1),
        ("rows", np.array([[0.1, 0.200001]], dtype=np.float32), 0),
        ("rows", np.array([[0.1, 0.2001]], dtype=np.float32), 1),
        ("texts", np.array(["a", "bd"]), 1),
        ("new", np.array([1]), 1),
    ],
)
def test_reports_a_difference(name: str, value: np.ndarray, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(VALUES, {**VALUES, name: value}) == code
    different = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("  DIFFERENT")]
    assert different == [name] * code


def test_reports_a_missing_value() -> None:
    assert report(VALUES, {name: value for name, value in VALUES.items() if name != "loss"}) == 1
    assert report({}, {}) == 1
