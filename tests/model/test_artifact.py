"""The saved folder: read back bit for bit, written whole or not at all, and refused if damaged."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from cases import one_in
from kills import contents
from safetensors import SafetensorError
from tiny import KINDS, LIKE_ANOTHER, PeftLora, add_adapter, save_tiny_base, tiny_encoder, train_a_little
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    ModernBertConfig,
    PretrainedConfig,
    StableLmConfig,
)

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.export.merge import check_paths
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.source.artifact import check_writable, write_earlier_names
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.source.resolve import resolve_model
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", 'Someone says "no", then eats something that takes a long time.', "Where is it?"]
LORA = LoraSettings(rank=2)
PICKLES = {".bin", ".pkl", ".pt"}
DORA = PeftLora(rank=2, dora=True, rslora=True, dropout=0.2)


def load(path: Path | str, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(path, device="cpu", **options)


def adapted(base: Path | str, lora: LoraSettings = LORA, **options: Any) -> SentenceEncoder:
    encoder = load(base, **options)
    add_adapter(encoder, lora)
    train_a_little(encoder.model)
    return encoder


def card_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / CARD_NAME).read_text(encoding="utf-8"))
    return values


def change_card(folder: Path, **changes: Any) -> None:
    (folder / CARD_NAME).write_text(json.dumps(card_values(folder) | changes), encoding="utf-8")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder as published."""
    return save_tiny_base("llama", tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A saved adapter on `base`."""
    adapted(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved whole model."""
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@one_in(2, "kind, dtype", KINDS, [torch.float32, torch.bfloat16, torch.float16])
def test_a_whole_model_is_read_back_exactly(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    encoder = tiny_encoder(kind, dtype)
    encoder.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert {parameter.dtype for parameter in again.model.parameters()} == {dtype}
    assert again.tokenize(TEXTS) == encoder.tokenize(TEXTS)


@pytest.mark.parametrize(
    ("kind", "lora", "dtype"),
    [
        *(pytest.param(kind, LORA, "float32", marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER)) for kind in KINDS),
        ("llama", DORA, "bfloat16"),
        ("gpt2", DORA, "float32"),
        *(pytest.param(kind, LORA, "bfloat16", marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, DORA, "bfloat16", marks=pytest.mark.slow) for kind in ("gpt2", "bert")),
    ],
)
def test_an_adapter_is_read_back_exactly(kind: str, dtype: str, lora: LoraSettings, tmp_path: Path) -> None:
    encoder = adapted(save_tiny_base(kind, tmp_path / "base"), lora, dtype=dtype)
    encoder.save_pretrained(tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    rows = again.encode(TEXTS)
    assert np.array_equal(rows, encoder.encode(TEXTS))
    assert not np.allclose(rows, load(tmp_path / "base", dtype=dtype).encode(TEXTS), atol=1e-2)
    expected = {name: parameter.dtype for name, parameter in encoder.model.named_parameters()}
    assert {name: parameter.dtype for name, parameter in again.model.named_parameters()} == expected
    assert not any(parameter.requires_grad for parameter in again.model.parameters())
    assert not any(module.training for module in again.model.modules())


@pytest.mark.parametrize("kind", ["adapter", "saved"])
def test_a_saved_encoder_is_found_with_a_revision_and_in_a_package(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = request.getfixturevalue(kind)
    (folder / "modules.json").unlink(missing_ok=True)  # otherwise the model of sentence-transformers would be found
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    expected = resolve_model(str(folder))
    assert expected.card is not None
    for name in (f"{tmp_path.name}/{folder.name}", f"{tmp_path.name}/{folder.name}@main", f"package:{folder.name}/"):
        found = resolve_model(name)
        assert found.card == expected.card
        assert found.revision is None
        assert Path(found.location.name).samefile(folder)
        with pytest.raises(ValueError, match="adapter: expected a backbone"):
            load(name, adapter=folder, prompt="plain")
    assert np.array_equal(load(f"package:{folder.name}/").encode(TEXTS), load(folder).encode(TEXTS))


def test_prompt_pooling_and_length_are_saved_and_can_be_replaced(tmp_path: Path) -> None:
    prompt = PromptTemplate(
        name="mine",
        template='Über "{text}" ist zu sagen: "',
        description="Umlaute → JSON",
        edits=("double_quotes_to_single", "append_full_stop"),
        tokenization="segments",
    )
    encoder = tiny_encoder("qwen2", prompt=prompt, pooling="cls-last-avg", max_length=77)
    encoder.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    assert (again.prompt, again.pooling, again.max_length) == (prompt, "cls-last-avg", 77)
    assert again.tokenize(TEXTS) == encoder.tokenize(TEXTS)
    other = load(tmp_path / "model", prompt="plain", pooling="last", max_length=50, dtype="bfloat16")
    assert (other.prompt, other.pooling, other.max_length) == (load_prompt("plain"), "last", 50)
    assert next(other.model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="max_length: expected 1 or more, got 0"):
        load(tmp_path / "model", max_length=0)


def test_the_files_and_the_card(adapter: Path, base: Path, tmp_path: Path) -> None:
    assert card_values(adapter) == {
        "format_version": 1,
        "prompt": load_prompt("summarize_one_word").to_dict(),
        "pooling": "last",
        "max_length": 128,
        "dtype": "float32",
        "base": str(base),
        "base_revision": None,
        "base_fingerprint": weights_fingerprint(load(base).model.backbone),
        "bits": None,
        "dimensions": None,
        "normalize": False,
        "layers": None,
        "attention": None,
        "dense": 0,
    }
    names = set(contents(adapter))
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", CARD_NAME} <= names
    assert not names & {"model.safetensors", "config.json", "README.md"}
    assert not {Path(name).suffix for name in names} & PICKLES

    tiny_encoder("bert", torch.bfloat16, base="somebody/bert", base_revision="main").save_pretrained(tmp_path / "model")
    values = card_values(tmp_path / "model")
    assert (values["dtype"], values["base"], values["base_revision"]) == ("bfloat16", None, None)
    names = set(contents(tmp_path / "model"))
    assert {"model.safetensors", "config.json"} <= names
    assert not {Path(name).suffix for name in names} & PICKLES
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16", "the name of transformers 4"


def test_files_have_the_mode_of_ordinary_files(adapter: Path, saved: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for folder in (adapter, saved):
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize(
    ("trained_in", "used_in"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")]
)
def test_the_same_base_in_another_dtype_is_accepted(trained_in: str, used_in: str, base: Path, tmp_path: Path) -> None:
    encoder = adapted(base, dtype=trained_in)
    encoder.save_pretrained(tmp_path / "adapter")
    rows, expected = load(tmp_path / "adapter", dtype=used_in).encode(TEXTS), encoder.encode(TEXTS)
    cosine = (rows * expected).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.9  # random weights amplify the rounding of bfloat16


def test_a_moved_base_is_named_with_the_card_to_correct(adapter: Path, base: Path) -> None:
    moved = base.rename(base.with_name("moved"))
    with pytest.raises(FileNotFoundError, match=rf"{base}\..*{adapter / CARD_NAME}"):
        load(adapter)
    with pytest.raises(FileNotFoundError, match=rf"{base}\..*{adapter / CARD_NAME}"):
        check_paths(adapter, base.with_name("exported"))
    change_card(adapter, base=str(moved))
    assert load(adapter).encode(TEXTS).shape == (3, 32)


def test_a_relative_base_is_found_from_another_working_directory(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = adapted("base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    encoder.save_pretrained("adapter")
    assert card_values(tmp_path / "elsewhere" / "adapter")["base"] == str(base)
    monkeypatch.chdir("/")
    assert np.array_equal(load(tmp_path / "elsewhere" / "adapter").encode(TEXTS), encoder.encode(TEXTS))


def test_a_base_on_the_hub_keeps_its_name_and_revision_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: pytest.fail("a request"))
    encoder = tiny_encoder("llama", base="NousResearch/Llama-2-7b-hf", base_revision="abc")
    encoder.model.backbone.name_or_path = "NousResearch/Llama-2-7b-hf"
    encoder.add_lora(LORA)
    monkeypatch.chdir(tmp_path)
    encoder.save_pretrained("out")
    assert (card_values(tmp_path / "out")["base"], card_values(tmp_path / "out")["base_revision"]) == (
        "NousResearch/Llama-2-7b-hf",
        "abc",
    )


def test_an_adapter_on_an_unnamed_base_is_not_saved(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LORA)
    with pytest.raises(ValueError, match=r"base.*no name.*base="):
        encoder.save_pretrained(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["model", "model/../model"])
def test_an_adapter_never_overwrites_its_base(where: str, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=rf"overwrite the base.*{tmp_path / 'model'}"):
        adapted(tmp_path / "model").save_pretrained(tmp_path / where)
    assert contents(tmp_path) == before
    adapted(tmp_path / "model").save_pretrained(tmp_path / "model" / "adapter")  # below it is fine
    assert is_saved_encoder(tmp_path / "model" / "adapter")


def test_a_full_disk_is_an_error_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SafetensorError("Error while serializing: I/O error: No space left on device")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"model could not be written: .*No space left"):
        tiny_encoder("llama").save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_below_that_of_a_gguf_base_is_accepted(tmp_path: Path) -> None:
    base = tmp_path / "models" / "base.gguf"
    base.parent.mkdir()
    base.touch()
    check_writable(tmp_path / "models" / "out", base=base)
    (tmp_path / "models" / CARD_NAME).touch()
    for target in (tmp_path / "models", tmp_path / "models" / ".." / "models"):
        with pytest.raises(ArtifactError, match="overwrite the base"):
            check_writable(target, base=base)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", ""),
        ({"format_version": 2}, "format_version"),
        ({"pooling": ...}, "pooling"),
        ({"bits": 3}, "bits"),
        ({"poolng": "last"}, "poolng.*pooling"),
    ],
    ids=repr,
)
def test_a_damaged_card_is_refused_by_name(content: str | dict[str, Any], named: str, saved: Path) -> None:
    if isinstance(content, dict):
        content = json.dumps({k: v for k, v in (card_values(saved) | content).items() if v is not ...})
    (saved / CARD_NAME).write_text(content, encoding="latin-1")
    with pytest.raises(ArtifactError, match=rf"{saved / CARD_NAME}.*{named}"):
        load(saved)


def test_saving_replaces_a_saved_encoder_also_through_a_link(saved: Path, base: Path) -> None:
    link = saved.with_name("latest")
    link.symlink_to(saved.name)
    encoder = adapted(base)
    encoder.save_pretrained(link)
    assert link.is_symlink()
    assert "model.safetensors" not in contents(saved)
    assert np.array_equal(load(saved).encode(TEXTS), encoder.encode(TEXTS))
    assert sorted(path.name for path in saved.parent.iterdir()) == ["base", "latest", "model"]


def test_a_model_can_be_saved_where_it_was_loaded_from(saved: Path) -> None:
    encoder = load(saved)
    with torch.no_grad():
        for parameter in encoder.model.parameters():
            parameter.mul_(1.5)
    encoder.save_pretrained(saved)
    assert np.array_equal(load(saved).encode(TEXTS), encoder.encode(TEXTS))


def test_an_empty_folder_and_missing_parents_are_accepted_and_other_content_is_not(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        encoder.save_pretrained(str(target))
        assert is_saved_encoder(target)
    (tmp_path / "mine").mkdir()
    for name in ("mine/.hidden", "a file"):
        (tmp_path / name).write_text("years of work")
        target = tmp_path / Path(name).parts[0]
        with pytest.raises(ArtifactError, match=f"{target} exists and is not a saved encoder"):
            encoder.save_pretrained(target)
        assert (tmp_path / name).read_text() == "years of work"


TWO_THETAS = {
    "full_attention": {"rope_theta": 400_000.0, "rope_type": "linear", "factor": 2.0},
    "sliding_attention": {"rope_theta": 3_000.0, "rope_type": "default"},
}
SLIDING, FULL = "sliding_attention", "full_attention"
EARLIER_KEYS: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "scaling": (
        LlamaConfig(rope_parameters={"rope_theta": 7e5, "rope_type": "linear", "factor": 4.0}),
        {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "a part of a head": (
        StableLmConfig(
            partial_rotary_factor=0.5,  # transformers 5.6 has its default otherwise
            rope_parameters={"rope_theta": 7e5, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        {"rope_theta": 7e5, "partial_rotary_factor": 0.5, "rotary_pct": 0.5},
    ),
    "gpt_neox": (
        GPTNeoXConfig(rope_parameters={"rope_theta": 7e5, "rope_type": "default", "partial_rotary_factor": 0.5}),
        {"rotary_emb_base": 7e5, "partial_rotary_factor": 0.5, "rotary_pct": 0.5},
    ),
    "gemma3": (
        Gemma3TextConfig(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, rope_parameters=TWO_THETAS),
        {
            "rope_theta": 4e5, "rope_local_base_freq": 3e3, "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "modernbert": (
        ModernBertConfig(
            num_hidden_layers=4, layer_types=[FULL, SLIDING, SLIDING, FULL], rope_parameters=TWO_THETAS,
        ),
        {
            "global_rope_theta": 4e5, "local_rope_theta": 3e3, "global_attn_every_n_layers": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EARLIER_KEYS)
def test_config_json_has_the_keys_of_transformers_4_too(name: str, tmp_path: Path) -> None:
    """transformers 5 reads the same values with and without them."""
    config, expected = EARLIER_KEYS[name]
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    before, read = json.loads(path.read_text()), AutoConfig.from_pretrained(tmp_path).to_dict()
    write_earlier_names(tmp_path)
    assert json.loads(path.read_text()) == before | expected | {"torch_dtype": "bfloat16"}
    assert AutoConfig.from_pretrained(tmp_path).to_dict().items() >= read.items()


@pytest.mark.parametrize("name", ["Gemma4TextConfig", "Lfm3Config"])
def test_types_without_a_form_in_transformers_4_are_read_as_before(name: str, tmp_path: Path) -> None:
    """`rope_scaling` would replace all rope parameters in transformers 5."""
    make = getattr(transformers, name, None) or pytest.skip("this version of transformers does not have the type")
    config = make()
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    write_earlier_names(tmp_path)
    assert "torch_dtype" in json.loads((tmp_path / "config.json").read_text())
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict().items() >= read.items()
    again.standardize_rope_params()  # vLLM calls it again: `partial_rotary_factor` would change layers with sliding windows
    assert again.to_dict().items() >= read.items()


def test_a_card_of_an_earlier_release_opens_with_the_same_vectors(adapter: Path) -> None:
    """Fields that were added later are missing."""
    expected, values = load(adapter).encode(TEXTS), card_values(adapter)
    first = {name: values[name] for name in ("format_version", "pooling", "max_length", "dtype", "base")}
    prompt = {name: values["prompt"][name] for name in ("name", "template")}
    (adapter / CARD_NAME).write_text(json.dumps(first | {"prompt": prompt}))
    assert np.array_equal(load(adapter).encode(TEXTS), expected)
