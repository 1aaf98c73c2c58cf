"""A backbone's tensors one at a time are those it has when it is loaded whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, save_tiny_base, tiny_backbone, tiny_causal_lm

from angle_llm.model.backbone import BackboneLocation, load_backbone, locate, weights_fingerprint
from angle_llm.model.checks import ArtifactError
from angle_llm.model.quantization import dequantize
from angle_llm.model.weights import BaseWeights, open_base

DTYPES = ["float32", "bfloat16", "float16"]


def assert_same(weights: BaseWeights, location: BackboneLocation, dtype: str) -> None:
    loaded = load_backbone(location, dtype=dtype)
    state = loaded.state_dict()
    assert list(weights.skeleton.state_dict()) == list(state)
    for name, tensor in state.items():
        assert weights.read(name).dtype == tensor.dtype
        assert torch.equal(weights.read(name), tensor), name
        assert torch.equal(weights.values(name), tensor), name
    assert weights.fingerprint() == weights_fingerprint(loaded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_tensor_by_tensor(kind: str, dtype: str, tmp_path: Path) -> None:
    location = locate(str(save_tiny_base(kind, tmp_path / "base")))
    weights = open_base(location, dtype=dtype)
    assert weights.streamed
    assert {tensor.device.type for tensor in weights.skeleton.parameters()} == {"meta"}
    assert_same(weights, location, dtype)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gpt2", "opt", "bert"])
def test_a_model_with_a_head_in_shards(kind: str, tmp_path: Path) -> None:
    """As models are published: tensors under a prefix, a head that is not needed, several files."""
    tiny_causal_lm(kind).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights = open_base(locate(str(tmp_path)), dtype="bfloat16")
    assert weights.streamed
    assert_same(weights, locate(str(tmp_path)), "bfloat16")


def test_what_has_other_names_in_the_file_is_loaded_whole(tmp_path: Path) -> None:
    """BERT as Google published it: LayerNorm.gamma and beta, which transformers renames."""
    save_tiny_base("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = open_base(locate(str(tmp_path)), dtype="float32")
    assert not weights.streamed
    assert_same(weights, locate(str(tmp_path)), "float32")


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lacks 1 of the backbone's tensors, layers\.1\.mlp\.up_proj\.weight"):
        open_base(locate(str(tmp_path)), dtype="float32")


def test_a_folder_of_another_shape_is_an_error(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ArtifactError, match="mismatch"):
        open_base(locate(str(tmp_path)), dtype="float32")


def test_the_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    one = open_base(locate(str(save_tiny_base("llama", tmp_path / "one"))), dtype="float32")
    two = open_base(locate(str(save_tiny_base("llama", tmp_path / "two", seed=1))), dtype="float32")
    assert one.fingerprint() != two.fingerprint()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_quantised_layers_have_the_values_they_compute_with(kind: str, bits: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    location = locate(str(save_tiny_base(kind, tmp_path)))
    weights = open_base(location, dtype=dtype, bits=bits)
    loaded = load_backbone(location, dtype=dtype, bits=bits)
    assert weights.fingerprint() == weights_fingerprint(loaded)
    dequantize(loaded, torch.float32)
    changed = 0
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(weights.values(name).float(), tensor.float()), name
        changed += not torch.equal(weights.values(name).float(), weights.read(name).float())
    assert changed == sum(type(layer) is torch.nn.Linear for layer in tiny_backbone(kind).modules())
