"""LoRA: on every linear layer of every kind, in float32, neutral until trained; a saved adapter is complete or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import one_in
from safetensors.torch import load_file, save_file
from tiny import KINDS, PeftLora, add_adapter, save_tiny_base, tiny_backbone, tiny_encoder, train_a_little
from torch import nn
from transformers import AutoModel, Qwen3MoeConfig

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.lora import LoraUpdate, add_lora, count_parameters, is_adapted, is_transposed
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.saved_adapter import CONFIG_NAME, WEIGHTS_NAME, read_adapter
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", 'Someone eats something, and it seems to be "bread".', "Birds!"]
LINEAR_LAYERS = dict.fromkeys(KINDS, 3 * 7) | {  # q, k, v, o, gate, up, down
    "opt": 2 * 6 + 2,  # q, k, v, out, fc1, fc2, and the projections of the embedding in and out
    "gpt2": 2 * 4,  # qkv in one, out, up, down: Conv1D, a linear layer with its weight transposed
    "bert": 2 * 6,
    "roberta": 2 * 6,
}
LORAS = {
    "lora": LoraSettings(rank=3, alpha=7),
    "rslora": PeftLora(rank=3, alpha=7, rslora=True),
    "dora": PeftLora(rank=3, alpha=7, dora=True),
    "rsdora": PeftLora(rank=3, alpha=7, dora=True, rslora=True),
}
LAYER = "base_model.model.layers.0.mlp.up_proj"
every_kind = pytest.mark.parametrize("kind", KINDS)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapted_layers(model: nn.Module) -> set[str]:
    return {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in trained(model)}


@every_kind
def test_only_the_adapter_of_every_linear_layer_trains_and_in_float32(kind: str) -> None:
    base = tiny_backbone(kind, torch.bfloat16)
    linear = {name for name, layer in base.named_modules() if type(layer).__name__ in {"Linear", "Conv1D"}}
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = add_lora(base, LoraSettings(rank=2))
    assert adapted_layers(adapted) == linear
    assert len(linear) == LINEAR_LAYERS[kind]
    assert all("lora_" in name for name in trained(adapted))
    for name, parameter in adapted.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    for name, tensor in adapted.state_dict().items():
        if "lora_" not in name:
            original = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(tensor, before.pop(original)), name
    assert not before


@one_in(7, "kind, sort, dtype", KINDS, LORAS, [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_adapter_is_neutral_and_a_trained_one_changes_every_vector(
    kind: str, sort: str, dtype: torch.dtype
) -> None:
    encoder = tiny_encoder(kind, dtype)
    plain = encoder.encode(TEXTS)
    add_adapter(encoder, LORAS[sort])
    if "dora" not in sort:  # DoRA divides a norm by itself
        assert np.array_equal(encoder.encode(TEXTS), plain)
    elif dtype == torch.float32:
        np.testing.assert_allclose(encoder.encode(TEXTS), plain, rtol=0, atol=1e-6)
    train_a_little(encoder.model)
    assert (np.abs(encoder.encode(TEXTS) - plain).max(axis=1) > 1e-2).all()


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


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("llama", ["q_proj", "q_prj"], "'q_prj'.*'q_proj'"),
        ("llama", ["proj"], "'proj'"),
        ("gpt2", ["attn_c"], "'attn_c'.*'c_attn'"),
        ("llama", ["q_proj", "embed_tokens"], "'embed_tokens'"),  # a saved adapter of an embedding cannot be opened
    ],
)
def test_an_unknown_target_is_refused_with_the_nearest(kind: str, targets: list[str], named: str) -> None:
    backbone = tiny_backbone(kind)
    with pytest.raises(ValueError, match=named):
        add_lora(backbone, LoraSettings(targets=targets))
    assert not any("lora" in name for name, _ in backbone.named_modules())


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")  # of peft
def test_experts_are_refused_before_training() -> None:
    """peft adapts the weights of all experts with parameters that `read_adapter` does not support."""
    pytest.importorskip("peft", "0.21", reason="earlier versions leave the experts out")
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"expert weights .*gate_up_proj.* is not supported\. Name other"):
        add_lora(AutoModel.from_config(config), LoraSettings(rank=2))
    adapted = add_lora(AutoModel.from_config(config), LoraSettings(rank=2, targets=("q_proj", "v_proj")))
    assert adapted_layers(adapted) == {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"}


def test_parameters_are_counted_and_a_second_adapter_is_refused() -> None:
    encoder = tiny_encoder("llama")
    weights = sum(parameter.numel() for parameter in encoder.model.parameters())
    assert not is_adapted(encoder.model.backbone)
    assert count_parameters(encoder.model) == (weights, weights)
    encoder.add_lora(LoraSettings(rank=2, targets=["q_proj"]))
    assert is_adapted(encoder.model.backbone)
    assert count_parameters(encoder.model) == (3 * 2 * (32 + 32), weights + 3 * 2 * (32 + 32))
    with pytest.raises(ValueError, match="already has an adapter"):
        encoder.add_lora(LoraSettings(rank=2))


def save_adapter(kind: str, folder: Path, lora: LoraSettings) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, folder / "base"), device="cpu")
    add_adapter(encoder, lora)
    train_a_little(encoder.model)
    for name, parameter in encoder.model.named_parameters():
        if "magnitude" in name:  # different from its start, the norm
            parameter.data *= torch.linspace(0.8, 1.2, len(parameter))
    encoder.save_pretrained(folder / "adapter")
    return encoder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_adapter("llama", tmp_path, LORAS["dora"])
    return tmp_path / "adapter"


@pytest.mark.parametrize("sort", LORAS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "opt"])
def test_the_update_equals_that_of_peft(kind: str, sort: str, tmp_path: Path) -> None:
    encoder = save_adapter(kind, tmp_path, LORAS[sort])
    read = read_adapter(tmp_path / "adapter")
    base = tiny_backbone(kind)
    read.check_fits(base)
    backbone: Any = encoder.model.backbone
    expected = backbone.merge_and_unload()
    assert {path for path, layer in base.named_modules() if path in read.updates} == set(read.updates)
    for path, update in read.updates.items():
        layer = base.get_submodule(path)
        before = layer.weight.clone()
        merged = update.merged(layer.weight, transposed=is_transposed(layer))
        assert torch.equal(layer.weight, before), "the base is not changed"
        assert merged.is_contiguous()
        torch.testing.assert_close(merged, expected.get_submodule(path).weight.data, atol=1e-6, rtol=1e-6)
        assert (merged - before).abs().max() > 1e-2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("magnitude", [None, torch.tensor([2.0, 3.0])])
def test_the_update_equals_its_formula(magnitude: torch.Tensor | None, transposed: bool) -> None:
    """Element by element, from a bfloat16 weight: nothing is computed in bfloat16."""
    weight = torch.tensor([[0.1, 0.2, 0.3], [1.0, -1.0, 0.5]]).bfloat16()
    a, b, s = torch.tensor([[0.001, 0.002, 0.003]]), torch.tensor([[0.5], [-0.25]]), 2.0
    merged = LoraUpdate(a, b, s, magnitude).merged(weight.T if transposed else weight, transposed=transposed)
    merged = merged.T if transposed else merged
    for o in range(2):
        row = [float(weight[o, i]) + s * float(b[o, 0]) * float(a[0, i]) for i in range(3)]
        factor = 1.0 if magnitude is None else float(magnitude[o]) / sum(value**2 for value in row) ** 0.5
        assert merged[o].tolist() == pytest.approx([factor * value for value in row], rel=1e-6)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG_NAME).read_text())
        (folder / CONFIG_NAME).write_text(json.dumps(config | changes))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)

    return changed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (change_config(bias="all"), "bias"),
        (change_config(a_new_key=3), "a_new_key"),
        (change_config(init_lora_weights="pissa"), "init_lora_weights"),
        (change_config(r=None), rf"{CONFIG_NAME} cannot be opened: TypeError"),
        (change_config(r=4), "rank 4"),
        (change_config(use_dora=False), "incomplete"),
        (change_tensors(lambda t: t.pop(f"{LAYER}.lora_B.weight")), r"layers\.0\.mlp\.up_proj"),
        (change_tensors(lambda t: t.pop(f"{LAYER}.lora_A.weight")), r"layers\.0\.mlp\.up_proj"),
        (change_tensors(lambda t: t.update({f"{LAYER}.lora_C.weight": torch.ones(2, 2)})), "lora_C"),
        (change_tensors(lambda t: t.clear()), WEIGHTS_NAME),
    ],
)
def test_damaged_or_unsupported_adapters_are_refused(
    damage: Callable[[Path], object], message: str, adapter: Path
) -> None:
    read_adapter(adapter)
    damage(adapter)
    with pytest.raises(ArtifactError, match=message):
        read_adapter(adapter)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_named(name: str, adapter: Path) -> None:
    (adapter / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.Linear(32, 49), r"\(48, 32\).*\(49, 32\)"), (nn.Embedding(48, 32), "Embedding"), (None, "no such layer")],
)
def test_another_layer_is_refused(layer: nn.Module | None, message: str, adapter: Path) -> None:
    changed = tiny_backbone("llama")
    changed.layers[0].mlp.up_proj = layer
    with pytest.raises(ArtifactError, match=rf"layers\.0\.mlp\.up_proj.*{message}"):
        read_adapter(adapter).check_fits(changed)
