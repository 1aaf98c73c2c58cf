"""The backbone: locating, loading, kind, fingerprint, and weights tensor by tensor."""

import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import one_in
from safetensors.torch import load_file, save_file
from tiny import (
    BIDIRECTIONAL,
    CAUSAL,
    KINDS,
    POSITIONS,
    save_tiny_base,
    tiny_backbone,
    tiny_causal_lm,
    tiny_encoder,
)
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    MptConfig,
    PretrainedConfig,
    T5Config,
    T5EncoderModel,
    T5Model,
    XLNetConfig,
)

from angle_llm.io import ALLOCATOR
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.layers.quantization import dequantize
from angle_llm.model.source import backbone
from angle_llm.model.source.backbone import (
    BackboneLocation,
    absolute_name,
    load_backbone,
    probes_as_causal,
    torch_dtype,
)
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import is_hub_id, locate
from angle_llm.model.source.tokenizer import DEFAULT_MAX_LENGTH, checked_length, count_positions
from angle_llm.model.source.weights import BaseWeights, open_base

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A minimal model folder that can be located."""
    model = tmp_path / "model.v1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.gguf").write_bytes(b"GGUF")
    return model


def test_a_folder_a_gguf_file_and_a_path_in_a_package_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate(str(folder)) == BackboneLocation(str(folder))
    location = locate(str(folder / "weights.gguf"))
    assert location == BackboneLocation(str(folder), "weights.gguf")
    assert location.arguments == {"gguf_file": "weights.gguf"}
    monkeypatch.chdir(folder.parent)
    assert locate("model.v1") == BackboneLocation("model.v1")
    assert absolute_name("model.v1") == str(folder)
    for name in ("package:some/model", "NousResearch/Llama-2-7b-hf", str(folder)):
        assert absolute_name(name) == name
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/model.v1") == BackboneLocation(str(folder))

    (tmp_path / "contains_a_model" / "small").mkdir(parents=True)
    (tmp_path / "contains_a_model" / "__init__.py").write_text("raise RuntimeError('finding a file needs no import')")
    (tmp_path / "contains_a_model" / "small" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    inside = tmp_path / "contains_a_model" / "small"
    assert locate("package:contains_a_model/small") == BackboneLocation(str(inside))


@pytest.mark.parametrize("name", ["gpt2", "NousResearch/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B", "a_b/c.d-e_f"])
def test_a_hub_id_is_a_name_that_is_not_a_path(name: str) -> None:
    assert locate(name) == BackboneLocation(name)
    assert is_hub_id(name)


def test_an_existing_path_a_package_and_none_are_no_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (None, "", "gpt2", "./model", "~/model", "/a/b", "a/b/c", "package:a/b", "a/b@main"):
        assert not is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        *("./model", "/no/such/model", "../no-such-model", "~/no-such-model", "runs/nli/model", "model.gguf"),
        *("package:is_not_installed/model", "package:not-a-name/model", "package:"),
    ],
)
def test_a_missing_path_is_refused_and_not_taken_for_a_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = "Install it with pip" if name.startswith("package:") else "no model at .*config.json"
    with pytest.raises(FileNotFoundError, match=advice):
        locate(name)


def test_a_file_in_a_model_folder_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=rf"is a file, not a model\. Give its folder, {tmp_path}"):
        locate(str(tmp_path / "model.safetensors"))
    (tmp_path / "distilgpt2").touch()
    monkeypatch.chdir(tmp_path)
    assert locate("distilgpt2").name == "distilgpt2", "the model of the hub"


def test_the_model_of_an_unfinished_run_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").touch()
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path} is the directory of a run that is not finished.*--resume auto"
    ):
        locate(str(tmp_path / "model"))


def test_a_hub_id_beside_a_folder_of_its_first_part_needs_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model at Qwen/Qwen3-4B\..* write Qwen/Qwen3-4B@main"):
        locate("Qwen/Qwen3-4B")
    assert locate("Qwen/Qwen3-4B", "main").name == "Qwen/Qwen3-4B"


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_is_loaded_without_its_head(kind: str, tmp_path: Path) -> None:
    published = (
        tiny_causal_lm(kind) if kind in CAUSAL else AutoModelForMaskedLM.from_config(KINDS[kind].config()).eval()
    )
    published.save_pretrained(tmp_path)
    loaded = load_backbone(locate(str(tmp_path)))
    assert not any("head" in name for name, _ in loaded.named_parameters())
    torch.testing.assert_close(loaded.state_dict(), published.base_model.state_dict(), rtol=0, atol=0)
    assert not loaded.training


@pytest.mark.parametrize("kind", [*BIDIRECTIONAL, "llama"])
def test_loading_reports_no_weights_that_are_not_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved BERT has no pooler, a published one has a pooler and a head; missing weights are refused."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (BertModel(KINDS["bert"].config()) if kind == "bert" else tiny_causal_lm(kind)).save_pretrained(tmp_path / "full")
    tiny_encoder(kind).save_pretrained(tmp_path / "saved")
    for name in ("full", "saved"):
        loaded: Any = load_backbone(locate(str(tmp_path / name)))
        assert not any("pooler" in name for name, _ in loaded.named_parameters())
    assert "LOAD REPORT" not in caplog.text

    weights = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(weights)
    dropped = next(name for name in tensors if "layer" in name)
    save_file({name: tensors[name] for name in tensors if name != dropped}, weights, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=f"lacks 1 tensors of the model, {dropped}"):
        load_backbone(locate(str(tmp_path / "saved")))
    save_file(tensors | {dropped: torch.ones(3, 3)}, weights, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="saved cannot be opened"):
        load_backbone(locate(str(tmp_path / "saved")))
    assert "LOAD REPORT" in caplog.text, "shown, as the error refers to it"


@pytest.mark.parametrize("stored", [torch.float32, *HALF])
def test_auto_keeps_the_stored_dtype_and_a_name_overrides_it(stored: torch.dtype, tmp_path: Path) -> None:
    location = locate(str(save_tiny_base("qwen2", tmp_path, stored)))
    assert {parameter.dtype for parameter in load_backbone(location).parameters()} == {stored}
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        assert torch_dtype(name) is dtype
        assert {parameter.dtype for parameter in load_backbone(location, dtype=name).parameters()} == {dtype}
    with pytest.raises(ValueError, match=r"unknown dtype 'bfloat'. Did you mean 'bfloat16'\?"):
        load_backbone(location, dtype="bfloat")


@pytest.mark.parametrize("model", [T5Model, T5EncoderModel])  # the second saves `is_encoder_decoder: false`
def test_an_encoder_decoder_is_refused(model: Any, tmp_path: Path) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*encoder-decoder \(t5\)"):
        load_backbone(locate(str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (MptConfig(vocab_size=40, d_model=8, n_heads=2, n_layers=1, max_seq_len=20), 20),  # another key than all others
        (XLNetConfig(vocab_size=40, d_model=8, n_head=2, n_layer=1, d_inner=8), None),  # its key is -1: no limit
    ],
)
def test_positions_under_another_name(config: PretrainedConfig, positions: int | None) -> None:
    backbone = AutoModel.from_config(config)
    assert count_positions(backbone) == positions
    assert checked_length(None, backbone) == (positions or DEFAULT_MAX_LENGTH)
    if positions is not None:
        with pytest.raises(ValueError, match=f"max_length: expected at most {positions}"):
            checked_length(positions + 1, backbone)


@pytest.mark.parametrize("kind", KINDS)
def test_causality_positions_and_fingerprint_of_every_kind(kind: str) -> None:
    for dtype in (torch.float32, *HALF):
        assert probes_as_causal(tiny_backbone(kind, dtype)) is KINDS[kind].causal
    assert count_positions(tiny_backbone(kind)) == POSITIONS, "RoBERTa has two more rows than positions"
    fingerprint = weights_fingerprint(tiny_backbone(kind))
    assert fingerprint == weights_fingerprint(tiny_backbone(kind, torch.bfloat16))
    assert fingerprint != weights_fingerprint(tiny_backbone(kind, seed=1))


@pytest.mark.parametrize("training", [True, False])
def test_causality_is_probed_without_dropout_in_any_mode(training: bool) -> None:
    backbone = tiny_backbone("opt").train(training)
    assert probes_as_causal(backbone)
    assert all(module.training is training for module in backbone.modules())


def test_causality_depends_on_the_model_not_on_its_family() -> None:
    """EmbeddingGemma has the layers of Gemma, but is bidirectional."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    options = {**sizes, **heads, "initializer_range": 0.3}
    assert probes_as_causal(Gemma3TextModel(Gemma3TextConfig(**options)))
    assert not probes_as_causal(Gemma3TextModel(Gemma3TextConfig(**options, use_bidirectional_attention=True)))


def test_the_fingerprint_depends_on_every_tensor() -> None:
    backbone = tiny_backbone("llama")
    fingerprints = {weights_fingerprint(backbone)}
    for parameter in backbone.parameters():
        parameter.data += 1
        fingerprints.add(weights_fingerprint(backbone))
    assert len(fingerprints) == 1 + len(list(backbone.parameters()))


def assert_same_tensors(weights: BaseWeights, location: BackboneLocation, dtype: str) -> None:
    loaded = load_backbone(location, dtype=dtype)
    state = loaded.state_dict()
    assert list(weights.skeleton.state_dict()) == list(state)
    for name, tensor in state.items():
        assert weights.read(name).dtype == tensor.dtype
        assert torch.equal(weights.read(name), tensor), name
        assert torch.equal(weights.values(name), tensor), name
    assert weights.fingerprint() == weights_fingerprint(loaded)


@one_in(2, "kind, dtype", KINDS, ["float32", "bfloat16", "float16"])
def test_weights_are_read_tensor_by_tensor(kind: str, dtype: str, tmp_path: Path) -> None:
    location = locate(str(save_tiny_base(kind, tmp_path / "base")))
    weights = open_base(location, dtype=dtype)
    assert next(weights.skeleton.parameters()).is_meta
    assert {tensor.device.type for tensor in weights.skeleton.parameters()} == {"meta"}
    assert_same_tensors(weights, location, dtype)
    if dtype == "bfloat16" and kind in CAUSAL:  # as published: a prefix, a head that is not needed, several files
        tiny_causal_lm(kind).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
        assert_same_tensors(
            open_base(locate(str(tmp_path / "shards")), dtype=dtype), locate(str(tmp_path / "shards")), dtype
        )


def test_tensors_with_other_names_in_the_file_are_loaded_together(tmp_path: Path) -> None:
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
    assert not next(weights.skeleton.parameters()).is_meta
    assert_same_tensors(weights, locate(str(tmp_path)), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.needs("bitsandbytes")
def test_quantized_weights_have_the_values_of_products(kind: str, bits: int, dtype: str, tmp_path: Path) -> None:
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


def test_weights_load_to_a_gpu_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: a map of devices gives the same model, without hooks, and only GPUs get one."""
    location = BackboneLocation(str(save_tiny_base("llama", tmp_path / "base")))
    plain = load_backbone(location, dtype="bfloat16")
    mapped = backbone.open_pretrained("AutoModel", location, dtype="bfloat16", device=torch.device("cpu"))
    tensors, others = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (plain, mapped))
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert tensor.equal(others[name]), name
    assert not any(hasattr(module, "_hf_hook") for module in mapped.modules())
    requested: list[torch.device | None] = []

    def opened(*_: Any, device: torch.device | None, **__: Any) -> Any:
        requested.append(device)
        raise ArtifactError("only the arguments matter")

    monkeypatch.setattr(backbone, "open_pretrained", opened)
    monkeypatch.setattr(backbone, "check_bits", lambda _: None)  # bitsandbytes may be missing
    in_gguf = BackboneLocation(location.name, gguf_file="model.gguf")
    for place, device, bits in (
        (location, "cuda:1", None), (location, "cuda:1", 4), (location, "cpu", None), (in_gguf, "cuda:1", None)
    ):  # fmt: skip
        with pytest.raises(ArtifactError):
            load_backbone(place, device=device, bits=bits)
    assert requested == [torch.device("cuda:1"), None, None, None]


def test_a_model_with_code_of_its_own_is_a_warning_or_refused(tmp_path: Path) -> None:
    """Its code, which is never executed, can make a decoder bidirectional or have further layers."""
    base = save_tiny_base("qwen2", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}}))
    with pytest.warns(UserWarning, match=r"contains Python code \(modeling.Model\).*--attention bidirectional"):
        load_backbone(locate(str(base)))
    weights = load_file(base / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"needs Python code of its repository \(modeling.Model\)"):
        load_backbone(locate(str(base)))


@pytest.mark.parametrize(
    ("system", "release", "used", "expandable"),
    [
        ("linux", "6.8.0-45-generic", False, True),
        ("linux", "6.8.0-45-generic", True, False),
        ("linux", "5.15.153.1-microsoft-standard-WSL2", False, False),
        ("win32", "11", False, False),
    ],
)
def test_expandable_segments_are_set_before_the_first_use_of_a_gpu(
    system: str, release: str, used: bool, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver of Windows, they are not used."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for variable in ALLOCATOR:
        monkeypatch.setenv(variable, "")  # restores it at the end
        monkeypatch.delenv(variable)
    backbone.torch_device("cpu")
    assert not any(variable in os.environ for variable in ALLOCATOR)
    backbone.torch_device("cuda")
    assert [os.environ.get(variable) for variable in ALLOCATOR] == [
        "expandable_segments:True" if expandable else None
    ] * 2
    monkeypatch.setenv(ALLOCATOR[0], "")
    monkeypatch.delenv(ALLOCATOR[1], raising=False)
    backbone.torch_device("cuda")
    assert ALLOCATOR[1] not in os.environ, "a value of the user is kept"
