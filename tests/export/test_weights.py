"""`verify` finds bad merges in every dtype, and accepts good ones of any program."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import PeftLora, save_tiny_adapter, save_tiny_base
from torch import Tensor

from angle_llm import SentenceEncoder
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.export.weights import count_wrong
from angle_llm.model.layers.lora import LoraUpdate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return save_tiny_adapter(save_tiny_base("llama", folder / "base"), folder / "adapter", max_length=100)


def merged_by_peft(run: Path, out: Path, dtype: torch.dtype, *, first: bool) -> Path:
    """A plain folder of peft: converted to `dtype` first and then merged, or merged in float32 and then rounded."""
    encoder = SentenceEncoder.from_pretrained(run, device="cpu")
    backbone: Any = encoder.model.backbone
    merged = backbone.to(dtype).merge_and_unload() if first else backbone.merge_and_unload().to(dtype)
    merged.save_pretrained(out)
    encoder.tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("llama", {"dora": True}), ("gpt2", {"rslora": True}), ("bert", {"dora": True})],
)
def test_a_merge_of_peft_is_good_in_float32_and_bad_in_bfloat16(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """peft adds in another order, and still no weight is counted as wrong."""
    lora = PeftLora(rank=3, alpha=7, **options)
    run = save_tiny_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter", lora)
    for name, dtype in DTYPES.items():
        out = merged_by_peft(run, tmp_path / name, dtype, first=False)
        count = count_wrong(run, out, name)
        assert count.numbers == sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values())
        assert (count.wrong, count.worst_tensor) == (0, "")
    count = count_wrong(run, merged_by_peft(run, tmp_path / "bad", torch.bfloat16, first=True), "bfloat16")
    assert count.wrong > 100


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("layers.1.mlp.up_proj.weight", "bfloat16"), ("layers.1.input_layernorm.weight", "float16")],
)
def test_one_weight_off_by_one_ulp_is_detected(name: str, dtype: str, adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "out", dtype=dtype, check=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[name].view(torch.int16).reshape(-1)[5] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    count = count_wrong(adapter, tmp_path / "out", dtype)
    assert (count.wrong, count.worst_tensor) == (1, name)


def test_the_rounding_bound_separates_float32_from_bfloat16(tmp_path: Path) -> None:
    """float32 sums in two orders are within the bound; most bfloat16 results exceed it."""
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((64, 48), (16, 48), (64, 16)))
    for magnitude in (None, torch.rand(64, generator=generator) + 0.5):
        update = LoraUpdate(a, b, 0.5, magnitude)
        exact, reach = update.exactly(weight)
        other = weight.clone()
        for r in range(16):
            other += 0.5 * torch.outer(b[:, r], a[r])
        if magnitude is not None:
            other *= (magnitude / other.pow(2).sum(1).sqrt())[:, None]
        for merged in (update.merged(weight), other):
            assert ((merged - exact).abs() <= reach).all()
        assert (reach <= 5e-6 * (exact.abs() + 20)).all()
        assert ((exact.bfloat16() - exact).abs() > reach).double().mean() > 0.9


def all_in_bfloat16(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """`model.bfloat16()`, then the merge."""
    return (weight.bfloat16() + (update.b_OR.bfloat16() @ update.a_RI.bfloat16()) * update.scaling).float()


def added_in_bfloat16(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """The update in float32, then rounded and added to a base in bfloat16."""
    return (weight.bfloat16() + (update.b_OR @ update.a_RI * update.scaling).bfloat16()).float()


def nothing(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    return weight.float()


@pytest.mark.parametrize(
    ("arithmetic", "message"),
    [
        (all_in_bfloat16, "stored weights"),
        (added_in_bfloat16, "stored weights"),
        (nothing, "times smaller"),
    ],
)
def test_bad_arithmetic_is_found_in_both_orders(
    arithmetic: Any, message: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LoraUpdate, "merged", arithmetic)
        merge(adapter, tmp_path / "out", dtype="bfloat16", check=False)
    found = verify([adapter, tmp_path / "out"], VerifyOptions(device="cpu"))
    assert not found.holds
    assert message in "\n".join(found.problems)
    if arithmetic is all_in_bfloat16:
        found = verify([tmp_path / "out", adapter], VerifyOptions(texts=["A man eats.", "hello"], device="cpu"))
        assert message in "\n".join(found.problems)


def test_wrong_weights_are_counted_even_if_vectors_agree(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tolerance, only vectors decide; wrong weights are still counted."""
    with monkeypatch.context() as patched:
        patched.setattr(LoraUpdate, "merged", added_in_bfloat16)
        merge(adapter, tmp_path / "bad", dtype="bfloat16", check=False)
    merge(adapter, tmp_path / "good", dtype="bfloat16", check=False)
    found = verify([adapter, tmp_path / "good", tmp_path / "bad"], VerifyOptions(tolerance=1e-3, device="cpu"))
    assert found.holds, found.problems
    good, bad = found.comparisons
    # Both are within the tolerance of half precision; factors up to 4.1 were measured.
    assert bad.largest_difference < 10 * good.largest_difference
    assert bad.weights.wrong > 100 > good.weights.wrong == 0
    assert found.to_dict()["comparisons"][0]["weights"]["wrong"] == 0
    assert verify([adapter, tmp_path / "good"], VerifyOptions(device="cpu")).holds
