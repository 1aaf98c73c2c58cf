"""LoRA: on every linear layer of every kind, in float32, alone in training, neutral until trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import KINDS, tiny_backbone, tiny_encoder, train_a_little
from torch import nn

from angle_llm.config import LoraSettings
from angle_llm.model.lora import add_lora, count_parameters, is_adapted, load_lora

TEXTS = ["A man is eating.", 'Someone eats something, and it seems to be "bread".', "Birds!"]
EVERY_LINEAR_LAYER = {
    "llama": 3 * 7,  # q, k, v, o, gate, up, down
    "llama-tied": 3 * 7,
    "mistral": 3 * 7,
    "qwen2": 3 * 7,
    "qwen3": 3 * 7,
    "gemma2": 3 * 7,
    "opt": 2 * 6 + 2,  # q, k, v, out, fc1, fc2, and the projections of the embedding in and out
    "gpt2": 2 * 4,  # qkv in one, out, up, down: Conv1D, a linear layer with its weight transposed
    "bert": 2 * 6,
    "roberta": 2 * 6,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapted_layers(model: nn.Module) -> set[str]:
    return {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in trained(model)}


@every_kind
def test_all_linear_covers_every_linear_layer(kind: str) -> None:
    backbone = tiny_backbone(kind)
    linear = {name for name, layer in backbone.named_modules() if type(layer).__name__ in {"Linear", "Conv1D"}}
    assert len(linear) == EVERY_LINEAR_LAYER[kind]
    assert adapted_layers(add_lora(backbone, LoraSettings(rank=2))) == linear


@every_kind
def test_only_the_adapter_trains_and_in_float32_on_any_base(kind: str) -> None:
    base = tiny_backbone(kind, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = add_lora(base, LoraSettings(rank=2))
    assert all("lora_" in name for name in trained(adapted))
    for name, parameter in adapted.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    for name, tensor in adapted.state_dict().items():
        if "lora_" not in name:
            original = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(tensor, before.pop(original)), name
    assert not before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_kind
def test_a_fresh_adapter_leaves_vectors_as_they_are_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    encoder = tiny_encoder(kind, dtype)
    plain = encoder.encode(TEXTS)
    encoder.add_lora(LoraSettings(rank=2))
    assert np.array_equal(encoder.encode(TEXTS), plain)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
@every_kind
def test_a_trained_adapter_changes_every_vector(kind: str, dora: bool, rslora: bool) -> None:
    encoder = tiny_encoder(kind)
    plain = encoder.encode(TEXTS)
    encoder.add_lora(LoraSettings(rank=2, dora=dora, rslora=rslora))
    np.testing.assert_allclose(encoder.encode(TEXTS), plain, rtol=0, atol=1e-6)  # DoRA divides a norm by itself
    train_a_little(encoder.model)
    assert (np.abs(encoder.encode(TEXTS) - plain).max(axis=1) > 1e-2).all()


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_update_is_scaled_by_alpha_over_rank_or_its_root(kind: str, rslora: bool, scale: float) -> None:
    """W x + s·B A x, read off one layer."""
    adapted: Any = add_lora(tiny_backbone(kind), LoraSettings(rank=4, alpha=6, rslora=rslora))
    train_a_little(adapted)
    name, layer = next((name, module) for name, module in adapted.named_modules() if hasattr(module, "lora_A"))
    base = dict(tiny_backbone(kind).named_modules())[name.removeprefix("base_model.model.")]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    update = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(layer(x), base(x) + scale * update, rtol=1e-5, atol=1e-5)


def test_dora_adds_a_magnitude_and_dropout_is_where_it_is_asked_for() -> None:
    adapted = add_lora(tiny_backbone("llama"), LoraSettings(rank=2, dora=True, dropout=0.25))
    assert sum("lora_magnitude_vector" in name for name in trained(adapted)) == EVERY_LINEAR_LAYER["llama"]
    dropouts = [module.p for module in adapted.modules() if isinstance(module, nn.Dropout)]
    assert dropouts == [0.25] * EVERY_LINEAR_LAYER["llama"]


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj", "v_proj"], {f"layers.{i}.self_attn.{p}" for i in range(3) for p in ("q_proj", "v_proj")}),
        (["mlp.up_proj"], {f"layers.{i}.mlp.up_proj" for i in range(3)}),
        (["layers.1.self_attn.o_proj"], {"layers.1.self_attn.o_proj"}),
    ],
)
def test_named_targets_are_adapted_and_nothing_else(targets: list[str], layers: set[str]) -> None:
    assert adapted_layers(add_lora(tiny_backbone("llama"), LoraSettings(rank=2, targets=targets))) == layers


@pytest.mark.parametrize("targets", [["q_prj"], ["q_proj", "q_prj"], ["proj"]])
def test_an_unknown_target_is_refused_even_beside_a_known_one(targets: list[str]) -> None:
    backbone = tiny_backbone("llama")
    with pytest.raises(ValueError, match=rf"unknown LoRA target '{targets[-1]}'.*Known: down_proj, gate_proj, k_proj"):
        add_lora(backbone, LoraSettings(targets=targets))
    assert not any("lora" in name for name, _ in backbone.named_modules())


def test_all_layers_may_be_named_in_a_tuple() -> None:
    settings = LoraSettings(rank=2, targets=("all-linear",))
    assert adapted_layers(add_lora(tiny_backbone("llama"), settings)) == {
        name for name, layer in tiny_backbone("llama").named_modules() if isinstance(layer, nn.Linear)
    }


def test_an_unknown_target_of_gpt2_tells_its_layers_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'c_attn'\? Known: c_attn, c_fc, c_proj\. .*all-linear"):
        add_lora(tiny_backbone("gpt2"), LoraSettings(targets=["attn_c"]))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_left_as_found(training: bool) -> None:
    adapted = add_lora(tiny_backbone("bert").train(training), LoraSettings(rank=2, dropout=0.1))
    assert all(module.training is training for module in adapted.modules())


def test_is_adapted_and_count_parameters() -> None:
    backbone = tiny_backbone("llama")
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    assert not is_adapted(backbone)
    assert count_parameters(backbone) == (weights, weights)
    adapted = add_lora(backbone, LoraSettings(rank=2, targets=["q_proj"]))
    assert is_adapted(adapted)
    assert count_parameters(adapted) == (3 * 2 * (32 + 32), weights + 3 * 2 * (32 + 32))


def test_a_second_adapter_is_refused() -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LoraSettings(rank=2))
    with pytest.raises(ValueError, match="has an adapter already"):
        encoder.add_lora(LoraSettings(rank=2))


def test_a_saved_adapter_comes_back_to_be_used(tmp_path: Path) -> None:
    adapted: Any = add_lora(tiny_backbone("llama", torch.bfloat16), LoraSettings(rank=2))
    train_a_little(adapted)
    adapted.save_pretrained(tmp_path)
    again = load_lora(tiny_backbone("llama", torch.bfloat16), tmp_path)
    assert trained(again) == set()
    assert not any(module.training for module in again.modules())
    ours, theirs = adapted.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_told_before_the_hub_is_asked(missing: str, tmp_path: Path) -> None:
    adapted: Any = add_lora(tiny_backbone("llama"), LoraSettings(rank=2))
    adapted.save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds no {missing}"):
        load_lora(tiny_backbone("llama"), tmp_path)
