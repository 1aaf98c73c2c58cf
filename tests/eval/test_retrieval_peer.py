"""`eval/retrieval_peer.py`: a run repeated with sentence-transformers."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run
from tiny import save_tiny_base

from angle_llm.config import DataSettings, TrainSettings
from angle_llm.data.formats import Group, ScoredPair
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings_io import SettingsError, save_settings, settings_from_dict

if any(importlib.util.find_spec(name) is None for name in ("sentence_transformers", "datasets")):
    pytest.skip("pip install 'sentence-transformers[train]==6.2.0'", allow_module_level=True)
import retrieval_peer


def settings(folder: Path) -> TrainSettings:
    rows = [{"query": f"Who is {n}?", "positive": f"{n} is a number."} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {
            "path": str(save_tiny_base("bert", folder / "base")),
            "dtype": "float32",
            "prompt": "plain",
            "pooling": "mean",
            "max_length": 32,
        },
        "lora": {"rank": 0},
        "data": {"path": str(folder / "pairs.jsonl"), "format": "positive_pair"},
        "objective": {"contrastive_form": "forward"},
        "batch_size": 4,
    }
    return settings_from_dict(TrainSettings, values, where="test")


def test_the_run_is_repeated(tmp_path: Path) -> None:
    mine = settings(tmp_path)
    save_settings(mine, tmp_path / "config.yaml")
    program = Path(__file__).parents[2] / "eval" / "retrieval_peer.py"
    done = run("python", program, "--config", tmp_path / "config.yaml", "--out", tmp_path / "peer/model")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peer/peer.json").read_text())
    assert found["steps"] == len(found["seconds"]) == 2
    assert "2 steps, median" in done.stdout
    trained, base = (
        SentenceEncoder.from_pretrained(path, pooling="mean", max_length=32, device="cpu").encode(["Who is 3?"])
        for path in (tmp_path / "peer/model", tmp_path / "base")
    )
    assert 1e-6 < np.abs(trained - base).max() / np.abs(base).max() < 0.1, "two steps at a rate of 1e-4"


def test_a_group_becomes_a_row_per_positive_and_other_numbers_of_negatives_another_dataset(tmp_path: Path) -> None:
    groups = [Group("a", ("b", "c"), ("d",)), Group("e", ("f",)), Group("g", ("h",), ("i",))]
    assert retrieval_peer.rows_of(groups) == {
        1: [
            {"anchor": "a", "positive": "b", "negative_1": "d"},
            {"anchor": "a", "positive": "c", "negative_1": "d"},
            {"anchor": "g", "positive": "h", "negative_1": "i"},
        ],
        0: [{"anchor": "e", "positive": "f"}],
    }
    with pytest.raises(SettingsError, match="got a scored pair"):
        retrieval_peer.rows_of([ScoredPair("a", "b", 0.5)])

    rows = [{"query": f"q{n}", "positives": [f"p{n}"], "negatives": [f"n{n}"] * (n > 1)} for n in range(6)]
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(path=str(tmp_path / "groups.jsonl"), format="group")
    save_settings(replace(settings(tmp_path), data=data, batch_size=2), tmp_path / "config.yaml")
    retrieval_peer.main(retrieval_peer.PeerSettings(config=tmp_path / "config.yaml", out=tmp_path / "peer/model"))
    assert json.loads((tmp_path / "peer/peer.json").read_text())["steps"] == 3, (
        "one of two pairs, two of four with negatives"
    )


@pytest.mark.parametrize("name", ["accumulation", "max_steps"])
def test_a_run_that_the_library_cannot_repeat_is_refused(name: str, tmp_path: Path) -> None:
    save_settings(replace(settings(tmp_path), **{name: 2}), tmp_path / "config.yaml")
    with pytest.raises(SettingsError, match=rf"expected the settings {name} of a run"):
        retrieval_peer.main(retrieval_peer.PeerSettings(config=tmp_path / "config.yaml", out=tmp_path / "out"))
