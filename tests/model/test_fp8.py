"""A base in FP8: products of numbers in e4m3, merged and saved like other quantized bases. `torch._scaled_mm` has a CPU
kernel, so the products of a GPU are compared here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import run
from tiny import PeftLora, add_adapter, save_tiny_adapter, save_tiny_base, tiny_backbone, tiny_encoder, train_a_little
from torch import Tensor, nn

from angle_llm import SentenceEncoder
from angle_llm.export.merge import merge
from angle_llm.model.layers import fp8
from angle_llm.model.layers.fp8 import FP8, Fp8Linear, to_fp8
from angle_llm.model.layers.fused_lora import lora_linear
from angle_llm.model.layers.quantization import QuantizationError, bits_of, dequantize, quantize
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", 'Someone eats something, and it seems to be "bread".', "A man is asleep.", "Birds!"]
ROUNDING = 2.0**-4
"""Largest relative error of a number in e4m3, which has 3 bits after the first one."""


def has_scales_of_rows() -> bool:
    """Whether the CPU kernel of torch takes a scale for each row; that of torch 2.9 takes one for a tensor."""
    q, scale_T1 = torch.ones(16, 16).to(FP8), torch.ones(16, 1)
    try:
        torch._scaled_mm(q, q.T, scale_T1, scale_T1.T, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        return "scale_a.numel() == 1" not in str(error)
    return True


needs_scales_of_rows = pytest.mark.skipif(not has_scales_of_rows(), reason="needs a later version of torch")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(outputs: int = 48, inputs: int = 32, dtype: torch.dtype = torch.float32) -> tuple[Fp8Linear, nn.Linear]:
    """A layer in FP8, and a plain one with the same rounded weight; rows of very different size."""
    plain = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
    plain.weight.data = draw(outputs, inputs, dtype=dtype) * torch.logspace(-4, 2, outputs)[:, None].to(dtype)
    layer = Fp8Linear(plain, torch.device("cpu"))
    plain.weight.data = layer.dequantized(dtype)
    return layer, plain


def values_and_gradient(layer: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = draw(24, 32, dtype=dtype, seed=1).requires_grad_()
    y = layer(x)
    y.backward(draw(*y.shape, dtype=dtype, seed=2))
    assert x.grad is not None
    return y.detach(), x.grad


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_to_their_largest_number(dtype: torch.dtype) -> None:
    x = draw(5, 64, dtype=dtype) * torch.tensor([1e-3, 1, 0, 100, 3])[:, None].to(dtype)
    number, scale = to_fp8(x)
    assert (number.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (5, 1))
    back = number.float() * scale
    normal = number.float().abs() >= 2.0**-6  # smaller numbers have fewer bits
    assert float(((back - x.float()).abs() / x.float().abs())[normal].max()) <= ROUNDING
    assert torch.equal(number[2].float(), torch.zeros(64))
    assert float(number[3].float().abs().max()) == fp8.LARGEST


def _twice(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A backend of torch.compile whose results are twice as large."""
    return lambda *inputs: [2 * result.float() for result in graph(*inputs)]


@pytest.mark.parametrize(
    ("backend", "is_compiled"),
    [pytest.param("inductor", True, marks=pytest.mark.slow), ("aot_eager", True), (_twice, False)],
)
def test_rounding_is_compiled_if_it_is_equal(
    backend: Any, is_compiled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rounding = fp8.rounding(torch.bfloat16, torch.device("cpu"), backend)
    assert (rounding is not to_fp8) is is_compiled
    assert ("rounding to FP8 is not compiled" in capsys.readouterr().out) is not is_compiled
    factor = torch.linspace(0.1, 1, 64)[None]
    x = draw(33, 64, dtype=torch.bfloat16)
    for one, other in zip(rounding(x, factor), to_fp8(x, factor), strict=True):
        assert difference(one.float(), other.float()) < 1e-2


@needs_scales_of_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_a_gpu_equal_the_plain_ones_in_value_and_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel rounds its result to bfloat16; bfloat16 products are rounded once more."""
    layer, _ = layer_of(dtype=dtype)
    found = []
    scaled = Counted(torch._scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    for multiplies in (False, True):
        monkeypatch.setattr(fp8, "multiplies_fp8", lambda _, multiplies=multiplies: multiplies)
        found.append(values_and_gradient(layer, dtype))
    assert scaled.calls == 2
    for plain, fast in zip(*found, strict=True):
        assert fast.dtype == dtype
        assert difference(fast, plain) < (4e-3 if dtype == torch.bfloat16 else 2e-3)


class Counted:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Tensor, **named: Any) -> Any:
        self.calls += 1
        assert arguments[0].is_contiguous(), "rows by"
        assert arguments[1].T.is_contiguous(), "rows"
        assert all(named[name].is_contiguous() for name in ("scale_a", "scale_b"))
        return self.function(*arguments, **named)


def test_value_and_gradient_are_of_the_rounded_numbers() -> None:
    """In float64, with the weight that a merge uses; the gradient uses the same weight, rounded no second time."""
    layer, plain = layer_of()
    value, gradient = values_and_gradient(layer, torch.float32)
    weight = plain.weight.double()
    number, scale = to_fp8(draw(24, 32, seed=1))
    torch.testing.assert_close(value.double(), number.double() * scale @ weight.T, rtol=1e-5, atol=1e-5)
    number, scale = to_fp8(draw(24, 48, seed=2) * layer.scale_O1.T)
    expected = number.double() * scale @ layer.weight.view(FP8).double()
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    for rounded, exact in zip((value, gradient), values_and_gradient(plain, torch.float32), strict=True):
        assert 0 < difference(rounded, exact) < ROUNDING


def test_a_token_does_not_depend_on_other_tokens() -> None:
    layer, _ = layer_of()
    x = draw(24, 32)
    alone = layer(x[:1])
    x[1] *= 1000
    torch.testing.assert_close(layer(x)[:1], alone, rtol=1e-6, atol=1e-6)


def test_the_adapter_computes_what_separate_layers_compute() -> None:
    layer, _ = layer_of()
    lora_a, lora_b = (draw(*shape, seed=seed).requires_grad_() for seed, shape in ((3, (4, 32)), (4, (48, 4))))
    found = []
    for fused in (False, True):
        x = draw(24, 32, seed=1).requires_grad_()
        y = lora_linear(x, layer, lora_a, lora_b, 0.5, 0.0) if fused else layer(x) + 0.5 * (x @ lora_a.T) @ lora_b.T
        found.append([y, *torch.autograd.grad(y, [x, lora_a, lora_b], draw(24, 48, seed=2))])
    for one, other in zip(*found, strict=True):
        assert difference(one.detach(), other.detach()) < 1e-6


def test_the_weights_are_not_cast_with_the_model() -> None:
    backbone = tiny_backbone("llama")
    quantize(backbone, "fp8")
    assert bits_of(backbone) == "fp8"
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items() if tensor.dtype == torch.uint8}
    backbone.bfloat16()
    assert before
    assert all(torch.equal(backbone.state_dict()[name], tensor) for name, tensor in before.items())


def test_vectors_are_close_and_an_adapter_is_read_back_exactly(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    plain = SentenceEncoder.from_pretrained(base, device="cpu").encode(TEXTS)
    run_folder = save_tiny_adapter(base, tmp_path / "adapter", bits="fp8", dtype="bfloat16")
    card = json.loads((run_folder / CARD_NAME).read_text())
    assert (card["bits"], card["dtype"]) == ("fp8", "bfloat16")
    again = SentenceEncoder.from_pretrained(run_folder, device="cpu")
    assert "8 bits (FP8)" in repr(again)
    other = SentenceEncoder.from_pretrained(run_folder, device="cpu")
    assert np.array_equal(again.encode(TEXTS), other.encode(TEXTS))
    rows = SentenceEncoder.from_pretrained(base, device="cpu", bits="fp8").encode(TEXTS)
    cosines = (rows * plain).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(plain, axis=1)
    assert 0.9 < cosines.min() < 0.9999999  # three layers of random weights


def test_an_adapter_is_merged_into_the_dequantized_base(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    adapter = save_tiny_adapter(base, tmp_path / "adapter", LoraSettings(rank=2, alpha=1), bits="fp8")
    verification = merge(adapter, tmp_path / "merged", device="cpu")
    assert verification is not None
    assert verification.first.dtype == "float32 in 8 bits (FP8)"
    (comparison,) = verification.comparisons
    assert comparison.largest_difference < 1e-8
    assert not comparison.problems
    merged = SentenceEncoder.from_pretrained(tmp_path / "merged", device="cpu")
    encoder = SentenceEncoder.from_pretrained(adapter, device="cpu", dtype="float32")
    dequantize(encoder.model.backbone, torch.float32)
    np.testing.assert_allclose(merged.encode(TEXTS), encoder.encode(TEXTS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # two programs
def test_a_run_trains_on_it_and_its_vectors_are_stored(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    train = ["train", "--model.path", base, "--model.bits", "fp8", "--model.max-length", "60", "--lora.rank", "4"]
    train += ["--data.limit", "16", "--batch-size", "8", "--run-dir", tmp_path / "run"]
    done = run("angle-llm", *train)
    assert done.returncode == 0, done.stderr
    assert "FusedLora" in done.stdout
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    model = tmp_path / "run" / "model"
    embed = run(
        "angle-llm", "embed", "--model", model, "--input", tmp_path / "texts.txt", "--output", tmp_path / "rows"
    )
    assert embed.returncode == 0, embed.stderr
    search = run("angle-llm", "search", tmp_path / "rows", TEXTS[0])
    assert search.returncode == 0, search.stderr
    assert TEXTS[0] in search.stdout


@needs_scales_of_rows
@pytest.mark.parametrize(
    ("part", "problem"), [("", "None"), ("error", "no such operator"), ("value", "differ from the")]
)
def test_the_product_in_fp8_is_tried(part: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._scaled_mm

    def changed(*arguments: Tensor, **named: Any) -> Any:
        if part == "error":
            raise RuntimeError("no such operator")
        return original(*arguments, **named) * (1.02 if part == "value" else 1.0)

    scaled = Counted(changed)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda _: True)
    assert problem in str(fp8.product_problem.__wrapped__(torch.device("cpu")))
    assert scaled.calls == 1


def test_devices_and_adapters_without_fp8_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(QuantizationError, match=r"NVIDIA A100 has no FP8 .*Use bits 8 or 4"):
        quantize(tiny_backbone("llama"), "fp8", "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fp8, "product_problem", lambda _: "no kernel")
    with pytest.raises(QuantizationError, match="cannot compute FP8 products on NVIDIA A100: no kernel"):
        quantize(tiny_backbone("llama"), "fp8", "cuda:0")
    with pytest.raises(QuantizationError, match="mps has no FP8"):
        quantize(tiny_backbone("llama"), "fp8", "mps")
    encoder = tiny_encoder("llama", base=str(save_tiny_base("llama", tmp_path / "base")))
    add_adapter(encoder, PeftLora(rank=2, alpha=2, dora=True))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "dora")
    with pytest.raises(ArtifactError, match="expected a LoRA adapter, got DoRA"):
        SentenceEncoder.from_pretrained(tmp_path / "dora", device="cpu", bits="fp8")
