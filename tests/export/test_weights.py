"""Bad merges are caught by `verify`, whatever they are stored in; a good one passes, whoever made it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_encoder, train_a_little
from torch import Tensor

from angle_llm import SentenceEncoder, load_prompt
from angle_llm.config import LoraSettings
from angle_llm.export.comparison import Verification
from angle_llm.export.merge import merge
from angle_llm.export.verify import verify
from angle_llm.export.weights import count_wrong
from angle_llm.model.checks import CARD_NAME
from angle_llm.model.lora import LoraUpdate

LORAS = {
    "lora": LoraSettings(rank=3, alpha=7),
    "rslora": LoraSettings(rank=3, alpha=7, rslora=True),
    "dora": LoraSettings(rank=3, alpha=7, dora=True),
}


def save_adapter(kind: str, folder: Path, lora: LoraSettings) -> Path:
    """An adapter that does something; the base beside it."""
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, folder / "base"), device="cpu", max_length=100)
    encoder.add_lora(lora)
    train_a_little(encoder.model)
    encoder.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter("llama", tmp_path_factory.mktemp("adapter"), LoraSettings(rank=2, alpha=6))


def merged_by_peft(run: Path, out: Path, dtype: torch.dtype, *, first: bool) -> Path:
    """A plain folder as peft's users write it: in `dtype` first and merged then, or merged in float32 and rounded then."""
    encoder = SentenceEncoder.from_pretrained(run, device="cpu")
    backbone: Any = encoder.model.backbone
    merged = backbone.to(dtype).merge_and_unload() if first else backbone.merge_and_unload().to(dtype)
    merged.save_pretrained(out)
    encoder.tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sort", LORAS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_pefts_merge_in_float32_is_a_good_one(kind: str, sort: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It adds up in another order, and not one number is taken for wrong."""
    run = save_adapter(kind, tmp_path, LORAS[sort])
    out = merged_by_peft(run, tmp_path / "out", dtype, first=False)
    count = count_wrong(run, out, str(dtype).removeprefix("torch."))
    assert count is not None
    assert count.numbers == sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values())
    assert (count.wrong, count.worst_tensor) == (0, "")


@pytest.mark.parametrize("sort", LORAS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_pefts_merge_in_bfloat16_is_a_bad_one(kind: str, sort: str, tmp_path: Path) -> None:
    run = save_adapter(kind, tmp_path, LORAS[sort])
    merged = merged_by_peft(run, tmp_path / "out", torch.bfloat16, first=True)
    count = count_wrong(run, merged, "bfloat16")
    assert count is not None
    assert count.wrong > 100


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_number_off_by_one_unit_in_the_last_place(name: str, dtype: str, adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "out", dtype=dtype, check=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[name].view(torch.int16).reshape(-1)[5] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    count = count_wrong(adapter, tmp_path / "out", dtype)
    assert count is not None
    assert (count.wrong, count.worst_tensor) == (1, name)


def test_the_bound_is_narrow_and_holds(tmp_path: Path) -> None:
    """float32 in two orders stays inside; bfloat16 in place of it is outside for most numbers."""
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


# --- through verify ---------------------------------------------------------------------------------------------------


def all_in_bfloat16(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """`model.bfloat16()`, then the merge."""
    return (weight.bfloat16() + (update.b_OR.bfloat16() @ update.a_RI.bfloat16()) * update.scaling).float()


def added_in_bfloat16(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """The update in float32, then rounded and added to a base in bfloat16."""
    return (weight.bfloat16() + (update.b_OR @ update.a_RI * update.scaling).bfloat16()).float()


def nothing(update: LoraUpdate, weight: Tensor, *, transposed: bool = False) -> Tensor:
    return weight.float()


def badly(arithmetic: Callable[..., Tensor]) -> Callable[[Path, Path, pytest.MonkeyPatch], None]:
    def make(run: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(LoraUpdate, "merged", arithmetic)
            merge(run, out, dtype="bfloat16", check=False)

    return make


def onto_another_base(run: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = run.parent / "other"
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", other / "base", seed=1), device="cpu")
    encoder.add_lora(LoraSettings(rank=2, alpha=6))
    encoder.save_pretrained(other / "adapter")
    save_file(load_file(run / "adapter_model.safetensors"), other / "adapter" / "adapter_model.safetensors")
    merge(other / "adapter", out, dtype="bfloat16", check=False)


def used_otherwise(**card: Any) -> Callable[[Path, Path, pytest.MonkeyPatch], None]:
    def make(run: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        merge(run, out, dtype="bfloat16", check=False)
        values = json.loads((out / CARD_NAME).read_text(encoding="utf-8"))
        (out / CARD_NAME).write_text(json.dumps(values | card), encoding="utf-8")

    return make


BAD: dict[str, tuple[Callable[[Path, Path, pytest.MonkeyPatch], None], str]] = {
    "bfloat16 arithmetic": (badly(all_in_bfloat16), "stored weights differ from a float32 merge, rounded once"),
    "added in bfloat16": (badly(added_in_bfloat16), "stored weights differ from a float32 merge, rounded once"),
    "no update at all": (badly(nothing), "times smaller than the difference from the base"),
    "another base": (onto_another_base, "times smaller than the difference from the base"),
    "another prompt": (used_otherwise(prompt=load_prompt("plain").to_dict()), "expected 'Summarize sentence"),
    "another pooling": (used_otherwise(pooling="mean"), "pooling mean, expected last"),
}


def told(found: Verification) -> str:
    return "\n".join(found.problems)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_merge_is_caught(case: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD[case]
    make(adapter, tmp_path / "out", monkeypatch)
    found = verify([adapter, tmp_path / "out"], device="cpu")
    assert not found.holds
    assert message in told(found)


def test_either_form_may_be_named_first(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD["bfloat16 arithmetic"]
    make(adapter, tmp_path / "out", monkeypatch)
    assert message in told(verify([tmp_path / "out", adapter], texts=["A man eats.", "hello"], device="cpu"))


def test_a_good_merge_passes_and_says_so(adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "out", dtype="bfloat16", check=False)
    found = verify([adapter, tmp_path / "out"], device="cpu")
    assert found.holds, told(found)
    (other,) = found.comparisons
    assert other.weights is not None
    assert other.weights.wrong == 0
    assert f"0 of {other.weights.numbers:,} stored weights differ from a float32 merge" in found.text()
    assert found.to_dict()["comparisons"][0]["weights"]["wrong"] == 0


def test_vectors_alone_do_not_show_bfloat16_arithmetic(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why weights are counted; and a tolerance that is named asks for vectors alone."""
    BAD["added in bfloat16"][0](adapter, tmp_path / "bad", monkeypatch)
    merge(adapter, tmp_path / "good", dtype="bfloat16", check=False)
    found = verify([adapter, tmp_path / "good", tmp_path / "bad"], tolerance=1e-3, device="cpu")
    assert found.holds, told(found)
    good, bad = found.comparisons
    # Both are within what is allowed to half precision; 4.1 times was seen of an adapter drawn otherwise.
    assert bad.largest_difference < 10 * good.largest_difference
    assert good.weights is not None
    assert bad.weights is not None
    assert bad.weights.wrong > 100 > good.weights.wrong == 0


def test_another_models_weights_are_not_counted(adapter: Path, tmp_path: Path) -> None:
    tiny_encoder("opt", max_length=100).save_pretrained(tmp_path / "other")
    found = verify([adapter, tmp_path / "other", adapter], device="cpu")
    assert [other.weights for other in found.comparisons] == [None, None]
