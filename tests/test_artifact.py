"""The saved directory: what is written is what is read, to the bit; nothing else is touched, and damage is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import KINDS, save_tiny_base, tiny_encoder, train_a_little

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.config import LoraSettings
from angle_llm.model.artifact import EncoderCard, write_directory
from angle_llm.model.backbone import weights_fingerprint
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.prompts import PromptError

TEXTS = ["A man is eating.", 'Someone says "no", then eats something that takes a long time.', "Where is it?"]
LORA = LoraSettings(rank=2)
every_kind = pytest.mark.parametrize("kind", KINDS)


def load(path: Path | str, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(path, device="cpu", **options)


def adapted(base: Path | str, lora: LoraSettings = LORA, **options: Any) -> SentenceEncoder:
    encoder = load(base, **options)
    encoder.add_lora(lora)
    train_a_little(encoder.model)
    return encoder


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# --- what is written is what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_kind
def test_a_whole_model_comes_back_to_the_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    encoder = tiny_encoder(kind, dtype)
    encoder.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert {parameter.dtype for parameter in again.model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_kind
def test_an_adapter_comes_back_to_the_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    encoder = adapted(save_tiny_base(kind, tmp_path / "base"), dtype=dtype)
    encoder.save_pretrained(tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    rows = again.encode(TEXTS)
    assert np.array_equal(rows, encoder.encode(TEXTS))
    assert not np.allclose(rows, load(tmp_path / "base", dtype=dtype).encode(TEXTS), atol=1e-2)
    expected = {name: parameter.dtype for name, parameter in encoder.model.named_parameters()}
    assert {name: parameter.dtype for name, parameter in again.model.named_parameters()} == expected
    assert not any(parameter.requires_grad for parameter in again.model.parameters())
    assert not any(module.training for module in again.model.modules())


@pytest.mark.parametrize(
    "lora",
    [
        LoraSettings(rank=2, dora=True),
        LoraSettings(rank=2, dora=True, rslora=True, dropout=0.2),
        LoraSettings(rank=3, alpha=7.5, rslora=True),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_every_sort_of_adapter_comes_back_to_the_bit(kind: str, dtype: str, lora: LoraSettings, tmp_path: Path) -> None:
    encoder = adapted(save_tiny_base(kind, tmp_path / "base"), lora, dtype=dtype)
    encoder.save_pretrained(tmp_path / "adapter")
    assert np.array_equal(load(tmp_path / "adapter").encode(TEXTS), encoder.encode(TEXTS))


def test_what_was_read_is_written_again_alike(adapter: Path, tmp_path: Path) -> None:
    load(adapter).save_pretrained(tmp_path / "again")
    before, after = files_below(adapter), files_below(tmp_path / "again")
    config, again = json.loads(before.pop("adapter_config.json")), json.loads(after.pop("adapter_config.json"))
    assert set(config.pop("target_modules")) == set(again.pop("target_modules"))  # a set: peft writes it in any order
    assert again == config | {"inference_mode": True}
    assert after == before
    assert np.array_equal(load(tmp_path / "again").encode(TEXTS), load(adapter).encode(TEXTS))


def test_an_adapter_on_a_saved_whole_model(tmp_path: Path) -> None:
    """A first training of all weights, then an adapter: the base is our own directory."""
    tiny_encoder("llama", pooling="mean").save_pretrained(tmp_path / "model")
    encoder = adapted(tmp_path / "model")
    encoder.save_pretrained(tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    assert again.pooling == "mean"
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_the_way_of_use_comes_back(tmp_path: Path) -> None:
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


def test_the_tokenizer_comes_back_with_its_special_tokens(tmp_path: Path) -> None:
    for kind in KINDS:
        encoder = tiny_encoder(kind)
        encoder.save_pretrained(tmp_path / kind)
        again = load(tmp_path / kind)
        assert again.tokenize(TEXTS) == encoder.tokenize(TEXTS), kind
        assert again.pad_id == encoder.pad_id, kind


def test_the_card_of_an_adapter(adapter: Path, base: Path) -> None:
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
        "layers": None,
    }
    names = set(files_below(adapter))
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", CARD_NAME} <= names
    assert not names & {"model.safetensors", "config.json", "README.md"}


def test_the_card_of_a_whole_model(tmp_path: Path) -> None:
    tiny_encoder("bert", torch.bfloat16, base="somebody/bert", base_revision="main").save_pretrained(tmp_path / "model")
    values = card_values(tmp_path / "model")
    assert (values["dtype"], values["pooling"], values["prompt"]["name"]) == ("bfloat16", "mean", "plain")
    assert (values["base"], values["base_revision"], values["base_fingerprint"]) == (None, None, None)
    assert {"model.safetensors", "config.json"} <= set(files_below(tmp_path / "model"))


# --- the base of an adapter -----------------------------------------------------------------------------------------


def test_other_weights_in_the_bases_place_are_refused(adapter: Path, base: Path) -> None:
    trained_on = card_values(adapter)["base_fingerprint"]
    save_tiny_base("llama", base, seed=1)
    found = weights_fingerprint(load(base).model.backbone)
    with pytest.raises(ArtifactError, match=rf"adapter was trained on .*{trained_on}, but {base} has {found}"):
        load(adapter)


@pytest.mark.parametrize("trained_in", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("used_in", ["float32", "bfloat16", "float16"])
def test_the_same_base_in_another_dtype_is_welcome(trained_in: str, used_in: str, base: Path, tmp_path: Path) -> None:
    encoder = adapted(base, dtype=trained_in)
    encoder.save_pretrained(tmp_path / "adapter")
    rows, expected = load(tmp_path / "adapter", dtype=used_in).encode(TEXTS), encoder.encode(TEXTS)
    cosine = (rows * expected).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.9  # random weights amplify bfloat16's rounding; other weights are refused, not just far


def test_a_base_that_moved_is_told_with_the_place_to_mend(adapter: Path, base: Path) -> None:
    moved = base.rename(base.with_name("moved"))
    with pytest.raises(FileNotFoundError, match=rf"no model at {base}\..*{adapter / CARD_NAME} names it as the base"):
        load(adapter)
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


def test_a_base_in_a_python_package_keeps_its_name(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "carries_a_base"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    base.rename(package / "small")
    monkeypatch.syspath_prepend(tmp_path / "site")
    encoder = adapted("package:carries_a_base/small")
    encoder.save_pretrained(tmp_path / "adapter")
    assert card_values(tmp_path / "adapter")["base"] == "package:carries_a_base/small"
    assert np.array_equal(load(tmp_path / "adapter").encode(TEXTS), encoder.encode(TEXTS))


def test_a_base_on_the_hub_keeps_its_name_and_revision_and_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: pytest.fail("asked the hub"))
    encoder = tiny_encoder("llama", base="NousResearch/Llama-2-7b-hf", base_revision="abc")
    encoder.model.backbone.name_or_path = "NousResearch/Llama-2-7b-hf"
    encoder.add_lora(LORA)
    monkeypatch.chdir(tmp_path)
    encoder.save_pretrained(".")  # a hub id is no path below the folder
    values = card_values(tmp_path)
    assert (values["base"], values["base_revision"]) == ("NousResearch/Llama-2-7b-hf", "abc")


def test_an_adapter_on_a_nameless_base_cannot_be_saved(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LORA)
    with pytest.raises(ValueError, match=r"base has no name\. Construct the encoder with base="):
        encoder.save_pretrained(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["model", "model/../model"])
def test_an_adapter_never_overwrites_its_base(where: str, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match="holds the base of this adapter"):
        adapted(tmp_path / "model").save_pretrained(tmp_path / where)
    assert files_below(tmp_path) == before


# --- damaged directories --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved whole model."""
    tiny_encoder("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_only_a_card_makes_a_saved_encoder(saved: Path, base: Path) -> None:
    assert is_saved_encoder(saved)
    assert not is_saved_encoder(base)
    assert not is_saved_encoder("NousResearch/Llama-2-7b-hf")
    with pytest.raises(ArtifactError, match=f"{base} has no {CARD_NAME}"):
        EncoderCard.read(base)


@pytest.mark.parametrize("content", ["{", "", "\xff\xfe", '{"format_version": 1,}'])
def test_a_card_that_is_no_json(content: str, saved: Path) -> None:
    (saved / CARD_NAME).write_text(content, encoding="latin-1")
    with pytest.raises(ArtifactError, match=f"{CARD_NAME} is not valid JSON .* Fetch or save it again"):
        load(saved)


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_a_card_of_another_version(version: object, saved: Path) -> None:
    change_card(saved, format_version=version)
    with pytest.raises(ArtifactError, match=r"reads format_version 1\. Upgrade angle_llm"):
        load(saved)


def test_a_card_that_is_no_object(saved: Path) -> None:
    (saved / CARD_NAME).write_text("[1]")
    with pytest.raises(ArtifactError, match="is not a JSON object"):
        load(saved)


def test_an_unknown_key_tells_the_nearest(saved: Path) -> None:
    change_card(saved, poling="last")
    with pytest.raises(ArtifactError, match=rf"{CARD_NAME}: unknown key 'poling'. Did you mean 'pooling'\?"):
        load(saved)


@pytest.mark.parametrize("key", ["prompt", "pooling", "max_length", "dtype", "base", "base_revision"])
def test_a_missing_key_is_named(key: str, saved: Path) -> None:
    values = card_values(saved)
    del values[key]
    (saved / CARD_NAME).write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=f"`{key}` is missing"):
        load(saved)


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("prompt", "plain", "dict"),
        ("pooling", None, "str"),
        ("max_length", "128", "int"),
        ("max_length", True, "int"),
        ("dtype", 16, "str"),
        ("base", 3, "str or NoneType"),
        ("base_fingerprint", {}, "str or NoneType"),
        ("bits", "4", "int or NoneType"),
        ("bits", True, "int or NoneType"),
    ],
)
def test_a_wrong_type_is_told(key: str, value: object, needs: str, saved: Path) -> None:
    change_card(saved, **{key: value})
    with pytest.raises(ArtifactError, match=f"`{key}` must be {needs}, got"):
        load(saved)


def test_bits_that_are_not_known_are_told(saved: Path) -> None:
    change_card(saved, bits=3)
    with pytest.raises(ArtifactError, match="`bits` must be 4, 8 or null, got 3"):
        load(saved)


def test_a_card_from_before_bases_were_quantised(adapter: Path) -> None:
    expected = load(adapter).encode(TEXTS)
    values = card_values(adapter)
    del values["bits"]
    (adapter / CARD_NAME).write_text(json.dumps(values))
    again = load(adapter)
    assert again.bits is None
    assert np.array_equal(again.encode(TEXTS), expected)


def test_a_prompt_in_the_card_that_cannot_be_used(saved: Path) -> None:
    change_card(saved, prompt={"name": "mine", "template": "no place for it"})
    with pytest.raises(PromptError, match="exactly one"):
        load(saved)


def test_an_adapter_without_its_weights_is_told(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors"):
        load(adapter)


# --- what is on the disk already ------------------------------------------------------------------------------------


def test_saving_over_a_saved_encoder_leaves_nothing_of_the_old(saved: Path, base: Path) -> None:
    encoder = adapted(base)
    encoder.save_pretrained(saved)
    assert "model.safetensors" not in files_below(saved)
    assert np.array_equal(load(saved).encode(TEXTS), encoder.encode(TEXTS))
    assert sorted(path.name for path in saved.parent.iterdir()) == ["base", "model"]


def test_a_model_can_be_saved_where_it_was_loaded_from(saved: Path) -> None:
    encoder = load(saved)
    with torch.no_grad():
        for parameter in encoder.model.parameters():
            parameter.mul_(1.5)
    encoder.save_pretrained(saved)
    assert np.array_equal(load(saved).encode(TEXTS), encoder.encode(TEXTS))


def test_an_empty_directory_and_missing_parents_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        tiny_encoder("llama").save_pretrained(str(target))
        assert is_saved_encoder(target)


def test_others_may_read_it(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["notes.txt", "config.json", ".hidden"])
def test_a_directory_with_other_things_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("years of work")
    with pytest.raises(ArtifactError, match=r"is not a saved encoder, so it is left alone\. Choose another"):
        tiny_encoder("llama").save_pretrained(tmp_path / "mine")
    assert files_below(tmp_path) == {f"mine/{name}": b"years of work"}


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    with pytest.raises(ArtifactError, match="left alone"):
        tiny_encoder("llama").save_pretrained(tmp_path / "mine")
    assert files_below(tmp_path) == {"mine": b"years of work"}


def test_a_link_goes_on_pointing_to_what_is_saved(saved: Path, base: Path) -> None:
    link = saved.with_name("latest")
    link.symlink_to(saved.name)
    encoder = adapted(base)
    encoder.save_pretrained(link)
    assert link.is_symlink()
    assert np.array_equal(load(saved).encode(TEXTS), encoder.encode(TEXTS))
    assert sorted(path.name for path in saved.parent.iterdir()) == ["base", "latest", "model"]


def fails(*_: Any, **__: Any) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("there", [True, False])
def test_a_save_that_fails_midway_changes_nothing(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("llama")
    if there:
        encoder.save_pretrained(tmp_path / "model")
    before = files_below(tmp_path)
    monkeypatch.setattr(EncoderCard, "write", fails)  # weights and tokenizer are written by then
    with pytest.raises(OSError, match="disk full"):
        encoder.save_pretrained(tmp_path / "model")
    assert files_below(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"] * there


def test_a_swap_that_fails_puts_the_old_directory_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_below(saved.parent)
    real: Callable[[Path, Path], Path] = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if Path(target) == saved and not self.name.endswith(".old"):
            fails()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        write_directory(saved, lambda folder: (folder / "new").touch())
    assert files_below(saved.parent) == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]
