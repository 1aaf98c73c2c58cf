"""`eval/retrieval_peer.py`: a run repeated with sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_lines import write_rows
from programs import run
from tiny import save_tiny_base

from angle_llm.data.formats import Group, ScoredPair
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.parsing import SettingsError, save_settings, settings_from_dict
from angle_llm.settings.train import TrainSettings

pytest.importorskip("sentence_transformers")
import retrieval_peer


def settings(folder: Path) -> TrainSettings:
    rows = [{"query": f"Who is {n}?", "positive": f"{n} is a number."} for n in range(8)]
    write_rows(folder / "pairs.jsonl", rows)
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
    trained, base = (
        SentenceEncoder.from_pretrained(path, pooling="mean", max_length=32, device="cpu").encode(["Who is 3?"])
        for path in (tmp_path / "peer/model", tmp_path / "base")
    )
    assert 1e-6 < np.abs(trained - base).max() / np.abs(base).max() < 0.1, "two steps at a rate of 1e-4"


def test_a_group_becomes_a_row_per_positive_and_other_numbers_of_negatives_another_dataset() -> None:
    groups = [Group("a", ("b", "c"), ("d",)), Group("e", ("f",)), Group("g", ("h",), ("i",))]
    assert retrieval_peer.rows_of(groups) == {
        1: [
            {"anchor": "a", "positive": "b", "negative_1": "d"},
            {"anchor": "a", "positive": "c", "negative_1": "d"},
            {"anchor": "g", "positive": "h", "negative_1": "i"},
        ],
        0: [{"anchor": "e", "positive": "f"}],
    }
    with pytest.raises(SettingsError, match="scored pair"):
        retrieval_peer.rows_of([ScoredPair("a", "b", 0.5)])
