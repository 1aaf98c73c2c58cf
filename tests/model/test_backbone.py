"""The backbone: where it is looked for, what of it is loaded, which kind it is, how it is told from another."""

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny import BIDIRECTIONAL, CAUSAL, KINDS, POSITIONS, save_tiny_base, tiny_backbone, tiny_causal_lm
from transformers import AutoModelForMaskedLM, BertModel, Gemma3TextConfig, Gemma3TextModel, T5Config, T5Model

from angle_llm.model.backbone import (
    BackboneLocation,
    absolute_name,
    count_positions,
    is_causal,
    load_backbone,
    load_tokenizer,
    locate,
    torch_dtype,
    weights_fingerprint,
)

HALF = [torch.bfloat16, torch.float16]
GGUF_AB = 300

# --- locate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is enough of a model to be found."""
    model = tmp_path / "model.v1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.gguf").write_bytes(b"GGUF")
    return model


def test_a_folder_is_found(folder: Path) -> None:
    assert locate(str(folder)) == BackboneLocation(str(folder))


def test_a_relative_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert locate("model.v1") == BackboneLocation("model.v1")


def test_a_gguf_file_is_its_folder_and_its_name(folder: Path) -> None:
    location = locate(str(folder / "weights.gguf"))
    assert location == BackboneLocation(str(folder), "weights.gguf")
    assert location.arguments == {"gguf_file": "weights.gguf"}


def test_the_home_folder_is_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/model.v1") == BackboneLocation(str(folder))


def test_a_path_inside_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_a_model"
    (package / "small").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('finding a file needs no import')")
    (package / "small" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:carries_a_model/small") == BackboneLocation(str(package / "small"))
    with pytest.raises(FileNotFoundError, match=r"no model at .*carries_a_model.large"):
        locate("package:carries_a_model/large")


@pytest.mark.parametrize("name", ["package:is_not_installed/model", "package:not-a-name/model", "package:"])
def test_a_missing_package_says_how_to_get_it(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="Install it with pip"):
        locate(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "NousResearch/Llama-2-7b-hf", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "a_b/c.d-e_f"]
)
def test_what_is_no_path_but_reads_like_a_hub_id_is_one(name: str) -> None:
    assert locate(name) == BackboneLocation(name)


def test_a_run_directory_is_told_where_its_model_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        locate(str(tmp_path))
    assert "Did you mean" not in str(error.value)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    with pytest.raises(FileNotFoundError, match=f"no config.json.* Did you mean {tmp_path}/model"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["./model", "/no/such/model", "../model", "~/no-such-model", "runs/nli/model", "model.gguf", "a/model.gguf"]
)
def test_a_missing_path_is_told_and_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no model at .* Give a folder with a config.json, a .gguf file, a hub"
    ):
        locate(name)


def test_a_folder_without_config_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        locate(str(tmp_path))


def test_a_lasting_name_holds_in_another_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert absolute_name("model.v1") == str(folder)
    assert absolute_name("./model.v1/weights.gguf") == str(folder / "weights.gguf")
    for name in ("package:some/model", "NousResearch/Llama-2-7b-hf", str(folder)):
        assert absolute_name(name) == name


# --- what is loaded -------------------------------------------------------------------------------------------------


def assert_same_weights(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_language_model_head_is_never_loaded(kind: str, tmp_path: Path) -> None:
    """As models are published: with a head, tied to the embedding or its own."""
    published = tiny_causal_lm(kind)
    published.save_pretrained(tmp_path)
    loaded = load_backbone(locate(str(tmp_path)))
    assert not any("lm_head" in name for name, _ in loaded.named_parameters())
    assert_same_weights(loaded, published.base_model)
    assert not loaded.training


def test_there_are_heads_of_both_sorts() -> None:
    """Else the test above shows less than it says."""
    assert tiny_causal_lm("llama").lm_head.weight is not tiny_causal_lm("llama").get_input_embeddings().weight
    tied = tiny_causal_lm("llama-tied")
    assert tied.lm_head.weight is tied.get_input_embeddings().weight


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_masked_language_models_lose_their_head(kind: str, tmp_path: Path) -> None:
    published = AutoModelForMaskedLM.from_config(KINDS[kind].config())
    published.save_pretrained(tmp_path)
    assert_same_weights(load_backbone(locate(str(tmp_path))), published.base_model)


def test_berts_pooler_is_gone(tmp_path: Path) -> None:
    published = BertModel(KINDS["bert"].config())
    assert published.pooler is not None
    published.save_pretrained(tmp_path)
    loaded = load_backbone(locate(str(tmp_path)))
    assert loaded.pooler is None
    assert not any("pooler" in name for name, _ in loaded.named_parameters())


@pytest.mark.parametrize("stored", [torch.float32, *HALF])
def test_auto_keeps_the_stored_dtype_and_a_name_overrides_it(stored: torch.dtype, tmp_path: Path) -> None:
    location = locate(str(save_tiny_base("qwen2", tmp_path, stored)))
    assert {parameter.dtype for parameter in load_backbone(location).parameters()} == {stored}
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        assert {parameter.dtype for parameter in load_backbone(location, dtype=name).parameters()} == {dtype}


def test_an_unknown_dtype_tells_the_nearest(tmp_path: Path) -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match=r"unknown dtype 'bfloat'. Did you mean 'bfloat16'\?"):
        load_backbone(locate(str(save_tiny_base("llama", tmp_path))), dtype="bfloat")


def test_an_encoder_decoder_is_refused_with_advice(tmp_path: Path) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5Model(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder-decoder \(t5\).*decoder-only model .* or an encoder"):
        load_backbone(locate(str(tmp_path)))


def test_a_gguf_file_gives_the_same_weights_plain_and_a_tokenizer(tmp_path: Path) -> None:
    published = tiny_backbone("llama-tied")
    location = locate(str(write_gguf(published, tmp_path / "tiny.gguf")))
    loaded = load_backbone(location)
    assert_same_weights(loaded, published)
    assert {parameter.dtype for parameter in load_backbone(location, dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert load_tokenizer(location)("abba", add_special_tokens=False)["input_ids"] == [GGUF_AB, ord("b"), ord("a")]
    # A model marked as quantized cannot be saved; transformers 5.23 takes the mark off itself, earlier ones left it on.
    loaded.save_pretrained(tmp_path / "plain")
    assert_same_weights(load_backbone(locate(str(tmp_path / "plain"))), published)


def write_gguf(model: Any, path: Path) -> Path:
    """Writes a tiny LLaMA as llama.cpp does, in float32, with one token per ASCII character and one for `ab`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(code) if 32 < code < 127 else f"<{code}>" for code in range(config.vocab_size)]
    tokens[GGUF_AB] = "ab"
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for projection, heads in {"q": config.num_attention_heads, "k": config.num_key_value_heads}.items():
            if f"{projection}_proj" in name:  # llama.cpp interleaves the two halves that rotate together
                tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(f"model.{name}", try_suffixes=(".weight",))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_nothing_here_may_reach_the_network() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(OSError, match=r"offline|couldn't connect|cached"):
        load_tokenizer(locate("nobody/has-this-model"))


# --- which kind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("kind", KINDS)
def test_is_causal_asks_the_model(kind: str, dtype: torch.dtype) -> None:
    assert is_causal(tiny_backbone(kind, dtype)) is KINDS[kind].causal


def test_is_causal_believes_the_model_not_its_family() -> None:
    """EmbeddingGemma has Gemma's layers and looks both ways."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    options = {**sizes, **heads, "initializer_range": 0.3}
    assert is_causal(Gemma3TextModel(Gemma3TextConfig(**options)))
    assert not is_causal(Gemma3TextModel(Gemma3TextConfig(**options, use_bidirectional_attention=True)))


@pytest.mark.parametrize("training", [True, False])
def test_is_causal_sees_through_dropout_and_leaves_the_mode(training: bool) -> None:
    backbone = tiny_backbone("opt").train(training)
    assert is_causal(backbone)
    assert all(module.training is training for module in backbone.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_count_positions(kind: str) -> None:
    """RoBERTa's table has two rows more than it has positions."""
    assert count_positions(tiny_backbone(kind)) == POSITIONS


# --- fingerprint ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_is_of_the_weights_not_of_their_dtype(kind: str) -> None:
    fingerprint = weights_fingerprint(tiny_backbone(kind))
    assert fingerprint == weights_fingerprint(tiny_backbone(kind))
    assert fingerprint == weights_fingerprint(tiny_backbone(kind, torch.bfloat16))
    assert fingerprint != weights_fingerprint(tiny_backbone(kind, seed=1))


def test_fingerprint_sees_every_tensor() -> None:
    backbone = tiny_backbone("llama")
    fingerprints = {weights_fingerprint(backbone)}
    for parameter in backbone.parameters():
        parameter.data += 1
        fingerprints.add(weights_fingerprint(backbone))
    assert len(fingerprints) == 1 + len(list(backbone.parameters()))
