"""Merge: the merged folder gives the vectors of its adapter, or it is not written."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import contents
from safetensors.torch import load_file
from tiny import PeftLora, save_tiny_adapter, save_tiny_base, tiny_encoder
from transformers import AutoModel, BitsAndBytesConfig

from angle_llm import PromptTemplate, SentenceEncoder, __version__, cli
from angle_llm.export.card import REPORT_NAME
from angle_llm.export.comparison import Verification
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerificationError
from angle_llm.model.layers.lora import LoraUpdate
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.weights import open_base
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", 'Someone says "no", then eats something that takes a long time.', "Where is it?"]
PROMPT = PromptTemplate(name="mine", template='This sentence: "{text}" means in one word: "')
RSLORA, DORA = PeftLora(rank=3, alpha=1, rslora=True), PeftLora(rank=2, alpha=1, dora=True)


def merged(run: Path, out: Path, **options: Any) -> Verification:
    found = merge(run, out, device="cpu", **options)
    assert found.holds
    return found


def encode(folder: Path) -> np.ndarray:
    return SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)


def one_minus_cos(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).max())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = save_tiny_base("llama", tmp_path / "base")
    return save_tiny_adapter(base, tmp_path / "adapter", prompt=PROMPT, max_length=99)


@pytest.mark.parametrize(
    ("kind", "lora", "dtype"),
    [
        ("llama", DORA, "float32"),
        ("gemma2", LoraSettings(rank=2, alpha=6), "float32"),
        ("llama-tied", RSLORA, "bfloat16"),
        ("llama-tied", DORA, "bfloat16"),
        ("qwen2", LoraSettings(rank=2, alpha=1, targets=["q_proj", "v_proj"]), "bfloat16"),
        ("gpt2", DORA, "bfloat16"),
        ("bert", RSLORA, "bfloat16"),
    ],
)
def test_merged_vectors_equal_those_of_the_adapter_for_every_kind(
    kind: str, lora: LoraSettings, dtype: str, tmp_path: Path
) -> None:
    run = save_tiny_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter", lora, dtype=dtype)
    assert merged(run, tmp_path / "out").comparisons[0].largest_difference < 1e-8
    if dtype == "float32":
        assert one_minus_cos(encode(tmp_path / "out"), encode(run)) < 1e-8


def test_the_base_has_the_values_of_training(tmp_path: Path) -> None:
    """A float32 base that was trained on in bfloat16: the adapter was trained on rounded weights."""
    base = save_tiny_base("llama", tmp_path / "base")
    lora = LoraSettings(rank=2, alpha=1, targets=["q_proj"])
    run = save_tiny_adapter(base, tmp_path / "adapter", lora, dtype="bfloat16")
    stored = load_file(base / "model.safetensors")
    merged(run, tmp_path / "merged")
    rounded = load_file(tmp_path / "merged" / "model.safetensors")
    assert not torch.equal(stored["norm.weight"], stored["norm.weight"].bfloat16().float())
    for name, tensor in stored.items():
        if "q_proj" not in name:
            assert torch.equal(rounded[name], tensor.bfloat16().float()), name
        else:
            assert (rounded[name] - tensor.bfloat16().float()).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("bits", "lora"),
    [
        (4, DORA),
        (8, LoraSettings(rank=2, alpha=1)),
        pytest.param(4, LoraSettings(rank=2, alpha=1), marks=pytest.mark.slow),
        pytest.param(8, DORA, marks=pytest.mark.slow),
    ],
)
@pytest.mark.needs("bitsandbytes")
def test_an_adapter_on_a_quantised_base_is_merged(bits: int, lora: LoraSettings, tmp_path: Path) -> None:
    run = save_tiny_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter", lora, bits=bits)
    found = merged(run, tmp_path / "trained")
    assert found.first.dtype == f"float32 in {bits} bits"
    assert found.comparisons[0].largest_difference < 1e-8


@pytest.mark.needs("bitsandbytes")
def test_a_base_stored_quantised_is_merged_to_a_plain_model(tmp_path: Path) -> None:
    """`…-bnb-4bit` on the hub: there are no original weights; the merged weights are plain."""
    save_tiny_base("llama", tmp_path / "plain")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    stored = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=options)
    stored.save_pretrained(tmp_path / "base")
    tiny_encoder("llama").tokenizer.save_pretrained(tmp_path / "base")
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "adapter")
    assert EncoderCard.read(run).bits == 4
    assert merged(run, tmp_path / "out").comparisons[0].largest_difference < 1e-8
    assert SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").bits is None


def test_a_sharded_base_is_merged_to_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("qwen2")
    encoder.model.backbone.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    encoder.tokenizer.save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 2
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "adapter")
    merged(run, tmp_path / "one")
    monkeypatch.setattr(sys.modules["angle_llm.export.merge"], "SHARD_BYTES", 20_000)
    merged(run, tmp_path / "many")
    shards = {path.name: load_file(path) for path in (tmp_path / "many").glob("model-*.safetensors")}
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in shards.items()}
    assert all(size <= 20_000 or len(shards[file]) == 1 for file, size in sizes.items())
    assert np.array_equal(encode(tmp_path / "many"), encode(tmp_path / "one"))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_merged_files_equal_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    run = save_tiny_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter")
    merged(run, tmp_path / "out")
    SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").save_pretrained(tmp_path / "again")
    written, again = contents(tmp_path / "out"), contents(tmp_path / "again")
    assert written.keys() - again.keys() == {"README.md", "merge.json", REPORT_NAME}
    weights = again.pop("model.safetensors")
    assert {name: written[name] for name in again} == again
    (tmp_path / "again.safetensors").write_bytes(weights)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "again.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_cards_and_provenance(adapter: Path, tmp_path: Path) -> None:
    found = merged(adapter, tmp_path / "out", dtype="bfloat16")
    card, origin = EncoderCard.read(tmp_path / "out"), EncoderCard.read(adapter)
    assert (card.prompt.query, card.pooling, card.max_length) == (PROMPT, "last", 99)
    assert (card.dtype, card.base, card.bits) == ("bfloat16", None, None)
    record = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert record["base_fingerprint"] == origin.base_fingerprint
    assert record["adapter_sha256"] == hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert record["adapter"] == {"r": 2, "lora_alpha": 6, "use_rslora": False, "use_dora": False}
    assert (record["base"], record["dtype"], record["angle_llm"]) == (str(tmp_path / "base"), "bfloat16", __version__)
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"\n    {PROMPT.template}\n" in readme
    assert f"{found.comparisons[0].largest_difference:.1e}" in readme
    assert str(tmp_path) not in readme, "the card is published, without local paths"
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert report["holds"] is True
    assert report["texts"] == found.texts > 40
    assert report["comparisons"][0]["form"]["name"] == str(tmp_path / "out")


def test_check_false_skips_the_comparison(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["merge", str(adapter), str(tmp_path / "out"), "--no-verify"])
    assert "--no-verify" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text()) == {"holds": None}
    assert one_minus_cos(encode(tmp_path / "out"), encode(adapter)) < 1e-8


def without_scaling(update: LoraUpdate, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    delta = update.b_OR @ update.a_RI
    return weight + (delta.T if transposed else delta)


@pytest.mark.parametrize("before", [False, True])
def test_a_merge_with_bad_arithmetic_changes_no_file(
    before: bool, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if before:
        merged(adapter, tmp_path / "out")
    kept = contents(tmp_path)
    monkeypatch.setattr(LoraUpdate, "merged", without_scaling)
    with pytest.raises(SystemExit, match="1"):
        cli.run(["merge", str(adapter), str(tmp_path / "out")])
    shown = capsys.readouterr().err
    assert "was not written" in shown
    assert "exceeds 1e-05" in shown
    assert contents(tmp_path) == kept


def test_an_untrained_adapter_is_refused(tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))  # its B is zero
    encoder.save_pretrained(tmp_path / "adapter")
    with pytest.raises(VerificationError, match="was not trained"):
        merge(tmp_path / "adapter", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its fingerprint before the work; without one, by the comparison."""
    base = (tmp_path / "base").rename(tmp_path / "kept")
    other = save_tiny_base("llama", tmp_path / "base", seed=1)
    with pytest.raises(ArtifactError, match="fingerprint"):
        merge(adapter, tmp_path / "out")
    other = locate(str(other.rename(tmp_path / "other")))
    base.rename(tmp_path / "base")
    card = json.loads((adapter / CARD_NAME).read_text())
    (adapter / CARD_NAME).write_text(json.dumps(card | {"base_fingerprint": None}))
    monkeypatch.setattr(
        sys.modules["angle_llm.export.merge"],
        "open_adapters_base",
        lambda source, card: open_base(other, dtype=card.dtype),
    )
    with pytest.raises(VerificationError, match="exceeds"):
        merge(adapter, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["around/adapter", "base", "around/adapter/inside", "base/inside", "link", "around"])
def test_inputs_are_never_overwritten(target: str, tmp_path: Path) -> None:
    for name in ("base", "around"):  # saved encoders, which a target may replace
        tiny_encoder("llama").save_pretrained(tmp_path / name)
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "around" / "adapter")
    (tmp_path / "link").symlink_to(run)
    kept = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"the (adapter|base), "):
        merge(run, tmp_path / target)
    assert contents(tmp_path) == kept
    assert is_saved_encoder(run)
