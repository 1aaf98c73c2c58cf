"""An adapter's update in float32: the same as peft's, and nothing that is not understood is merged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_backbone, train_a_little

from angle_llm.config import LoraSettings
from angle_llm.model.checks import ArtifactError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import CONFIG_NAME, WEIGHTS_NAME, LoraUpdate, is_transposed, read_adapter

LORAS = {
    "lora": LoraSettings(rank=3, alpha=7),
    "rslora": LoraSettings(rank=3, alpha=7, rslora=True),
    "dora": LoraSettings(rank=3, alpha=7, dora=True),
    "rsdora": LoraSettings(rank=3, alpha=7, dora=True, rslora=True),
}


def save_adapter(kind: str, folder: Path, lora: LoraSettings) -> SentenceEncoder:
    """Writes an adapter that does something; returns its encoder."""
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, folder / "base"), device="cpu")
    encoder.add_lora(lora)
    train_a_little(encoder.model)
    for name, parameter in encoder.model.named_parameters():
        if "magnitude" in name:  # training moves it away from the length it starts at
            parameter.data *= torch.linspace(0.8, 1.2, len(parameter))
    encoder.save_pretrained(folder / "adapter")
    return encoder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_adapter("llama", tmp_path, LORAS["dora"])
    return tmp_path / "adapter"


@pytest.mark.parametrize("sort", LORAS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "opt"])
def test_the_update_is_pefts(kind: str, sort: str, tmp_path: Path) -> None:
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
        assert torch.equal(layer.weight, before), "the base's own tensor is left alone"
        assert merged.is_contiguous()
        torch.testing.assert_close(merged, expected.get_submodule(path).weight.data, atol=1e-6, rtol=1e-6)
        assert (merged - before).abs().max() > 1e-2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("magnitude", [None, torch.tensor([2.0, 3.0])])
def test_the_formula(magnitude: torch.Tensor | None, transposed: bool) -> None:
    """Number by number, from a bfloat16 weight: nothing is computed in bfloat16."""
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


LAYER = "base_model.model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_config(peft_type="IA3"), "only LoRA and DoRA adapters are merged, this one is 'IA3'"),
        (change_config(rank_pattern={"q_proj": 8}), "`rank_pattern` is"),
        (change_config(alpha_pattern={"q_proj": 8}), "`alpha_pattern` is"),
        (change_config(bias="all"), "`bias` is 'all'"),
        (change_config(lora_bias=True), "`lora_bias` is True"),
        (change_config(modules_to_save=["embed_tokens"]), "`modules_to_save` is"),
        (change_config(a_key_of_tomorrow=3), "`a_key_of_tomorrow` is 3"),
        (change_config(init_lora_weights="pissa"), "'pissa' changes the base's weights too"),
        (change_config(r=None), "needs a rank"),
        (change_config(r=4), "needs A .4, I. and B .O, 4."),
        (change_config(use_dora=False), "a part of the update"),
        (change_tensors(lambda t: t.pop(f"{LAYER}.lora_B.weight")), "a part of the update of layers.0.mlp.up_proj"),
        (change_tensors(lambda t: t.pop(f"{LAYER}.lora_magnitude_vector")), "a part of the update"),
        (change_tensors(lambda t: t.pop(f"{LAYER}.lora_A.weight")), "holds base_model.*which is no update"),
        (
            change_tensors(lambda t: t.update({"base_model.model.embed_tokens.weight": torch.ones(2, 2)})),
            "embed_tokens",
        ),
        (change_tensors(lambda t: t.clear()), "holds nothing"),
        (lambda folder: (folder / CONFIG_NAME).write_text("{"), "cannot be read"),
        (lambda folder: (folder / CONFIG_NAME).write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / WEIGHTS_NAME).write_bytes(b"short"), "cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused(damage: Callable[[Path], object], message: str, adapter: Path) -> None:
    read_adapter(adapter)
    damage(adapter)
    with pytest.raises(ArtifactError, match=message):
        read_adapter(adapter)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_named(name: str, adapter: Path) -> None:
    (adapter / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (torch.nn.Linear(32, 49), r"up_proj is \(48, 32\).*\(49, 32\)"),
        (torch.nn.Embedding(48, 32), "of type Embedding"),
    ],
)
def test_another_layer_is_refused(layer: torch.nn.Module, message: str, adapter: Path) -> None:
    changed = tiny_backbone("llama")
    changed.layers[0].mlp.up_proj = layer
    with pytest.raises(ArtifactError, match=message):
        read_adapter(adapter).check_fits(changed)


def test_another_model_is_refused(adapter: Path) -> None:
    with pytest.raises(ArtifactError, match="the base has no such layer"):
        read_adapter(adapter).check_fits(tiny_backbone("bert"))
