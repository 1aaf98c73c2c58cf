"""The recipe trains on what was generated and on as many human-scored pairs, and measures both on the same pairs."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from programs import run
from tiny import save_tiny_base

from angle_llm import SentenceEncoder
from angle_llm.evaluate import spearman

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "llm_supervision.py"


def write(path: Path, count: int, top: float) -> Path:
    who, what = ("man", "woman", "dog", "child"), ("eats", "runs", "sleeps", "sings", "talks")
    rows = [
        {
            "text1": f"A {who[n % 4]} {what[n % 5]}.",
            "text2": f"The {who[n % 3]} {what[n % 4]}.",
            "score": n % 3 / 2 * top,
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_generated_and_human_pairs_of_one_number_are_measured_on_the_same_test_pairs(tmp_path: Path) -> None:
    save_tiny_base("bert", tmp_path / "tiny")
    write(tmp_path / "generated.jsonl", 7, 1)
    write(tmp_path / "human.jsonl", 20, 5)
    write(tmp_path / "test.jsonl", 12, 5)
    options = (
        "--model.path tiny --data.path generated.jsonl --human.path human.jsonl --test.path test.jsonl --run-dir out "
        "--batch-size 4 --epochs 1 --optimizer.learning-rate 0.01"
    )
    done = run("python", RECIPE, *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 examples of each of data, human" in done.stdout
    figures = dict(re.findall(r"^  (before|data|human) +(-?\d+\.\d\d)", done.stdout, re.MULTILINE))
    assert list(figures) == ["before", "data", "human"]
    weights = {path.read_bytes() for path in tmp_path.glob("**/model.safetensors")}
    assert len(weights) == 3, "one of them was not trained, or both on the same"
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    for name, place in [("before", "tiny"), ("data", "out/data/model"), ("human", "out/human/model")]:
        encode = SentenceEncoder.from_pretrained(tmp_path / place, prompt="plain", pooling="mean", device="cpu").encode
        left, right = (torch.from_numpy(encode([row[side] for row in rows])) for side in ("text1", "text2"))
        cosines = torch.cosine_similarity(left.double(), right.double())
        assert float(figures[name]) == pytest.approx(
            100 * spearman(cosines.numpy(), [row["score"] for row in rows]), abs=0.005
        )
    for name, path in [("data", "generated.jsonl"), ("human", "human.jsonl")]:
        told = yaml.safe_load((tmp_path / "out" / name / "settings.yaml").read_text())
        assert (told["data"]["path"], told["data"]["limit"]) == (path, 7)
