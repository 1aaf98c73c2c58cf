"""Merge: the merged folder gives the vectors of its adapter, or it is not written."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder
from transformers import AutoModel, BitsAndBytesConfig, LlamaConfig, LlamaModel

from angle_llm import PromptTemplate, SentenceEncoder, __version__, cli
from angle_llm.config import LoraSettings
from angle_llm.export.card import REPORT_NAME
from angle_llm.export.comparison import Verification
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerificationError, verify
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import locate
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.lora import LoraUpdate, read_adapter
from angle_llm.model.weights import open_base

TEXTS = ["A man is eating.", 'Someone says "no", then eats something that takes a long time.', "Where is it?"]
PROMPT = PromptTemplate(name="mine", template='This sentence: "{text}" means in one word: "')
RSLORA, DORA = LoraSettings(rank=3, alpha=1, rslora=True), LoraSettings(rank=2, alpha=1, dora=True)


def merged(run: Path, out: Path, **options: Any) -> Verification:
    found = merge(run, out, device="cpu", **options)
    assert found is not None
    assert found.holds
    return found


def encode(folder: Path) -> np.ndarray:
    return SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)


def one_minus_cos(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).max())


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = save_tiny_base("llama", tmp_path / "base")
    return save_tiny_adapter(base, tmp_path / "adapter", prompt=PROMPT, max_length=99)


# --- equal vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lora", "dtype"),
    [
        ("llama", DORA, "float32"),
        ("opt", LoraSettings(rank=2, alpha=6), "float32"),
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
    """`test_sentence_transformers` merges all kinds."""
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
    for choice in ("dequantised", "original"):
        merged(run, tmp_path / choice, base=choice)
    rounded, original = (load_file(tmp_path / name / "model.safetensors") for name in ("dequantised", "original"))
    assert not torch.equal(stored["norm.weight"], stored["norm.weight"].bfloat16().float())
    for name, tensor in stored.items():
        if "q_proj" not in name:
            assert torch.equal(rounded[name], tensor.bfloat16().float()), name
            assert torch.equal(original[name], tensor), name
        else:
            assert (rounded[name] - tensor.bfloat16().float()).abs().max() > 1e-3
    (trained,) = verify([run, tmp_path / "original"], device="cpu").comparisons
    note = f"on the values it was trained on is 1-cos {trained.largest_difference:.1e} at most"
    assert trained.largest_difference > 1e-7
    for file in (REPORT_NAME, "README.md"):
        assert note in (tmp_path / "original" / file).read_text(encoding="utf-8")
        assert "trained on is" not in (tmp_path / "dequantised" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("bits", "lora"),
    [
        (4, DORA),
        (8, LoraSettings(rank=2, alpha=1)),
        pytest.param(4, LoraSettings(rank=2, alpha=1), marks=pytest.mark.slow),
        pytest.param(8, DORA, marks=pytest.mark.slow),
    ],
)
def test_an_adapter_on_a_quantised_base_is_merged(bits: int, lora: LoraSettings, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = save_tiny_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter", lora, bits=bits)
    found = merged(run, tmp_path / "trained")
    assert found.first.dtype == f"float32 in {bits} bits"
    assert found.comparisons[0].largest_difference < 1e-8
    merged(run, tmp_path / "original", base="original")
    assert one_minus_cos(encode(tmp_path / "original"), encode(tmp_path / "trained")) > 1e-5
    assert "not exactly the values it was trained on" in (tmp_path / "original" / "README.md").read_text(
        encoding="utf-8"
    )
    assert verify([run, tmp_path / "original"], tolerance=1.0, device="cpu").comparisons[0].largest_difference > 1e-5


def test_a_base_stored_quantised_is_merged_to_a_plain_model(tmp_path: Path) -> None:
    """`…-bnb-4bit` on the hub: there are no original weights; the merged weights are plain."""
    pytest.importorskip("bitsandbytes")
    save_tiny_base("llama", tmp_path / "plain")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    stored = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=options)
    stored.save_pretrained(tmp_path / "base")
    tiny_encoder("llama").tokenizer.save_pretrained(tmp_path / "base")
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "adapter")
    assert EncoderCard.read(run).bits == 4
    assert merged(run, tmp_path / "out").comparisons[0].largest_difference < 1e-8
    assert SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").bits is None


def test_a_sharded_base_is_merged_to_shards(tmp_path: Path) -> None:
    encoder = tiny_encoder("qwen2")
    encoder.model.backbone.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    encoder.tokenizer.save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 2
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "adapter")
    merged(run, tmp_path / "one")
    merged(run, tmp_path / "many", shard_bytes=20_000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    shards = {path.name: load_file(path) for path in (tmp_path / "many").glob("model-*.safetensors")}
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    joined = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    assert joined.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in joined.items())
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in shards.items()}
    assert all(size <= 20_000 or len(shards[file]) == 1 for file, size in sizes.items())
    assert np.array_equal(encode(tmp_path / "many"), encode(tmp_path / "one"))


# --- written files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_merged_files_equal_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    run = save_tiny_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter")
    merged(run, tmp_path / "out")
    SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").save_pretrained(tmp_path / "again")
    written, again = files_below(tmp_path / "out"), files_below(tmp_path / "again")
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
    assert json.loads((tmp_path / "out" / "merge.json").read_text()) == {
        "base": str(tmp_path / "base"),
        "base_revision": None,
        "base_fingerprint": origin.base_fingerprint,
        "base_weights": "dequantised",
        "base_dtype": "float32",
        "bits": None,
        "layers": None,
        "adapter_sha256": hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest(),
        "adapter": {"r": 2, "lora_alpha": 6, "use_rslora": False, "use_dora": False},
        "dtype": "bfloat16",
        "angle_llm": __version__,
    }
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"\n    {PROMPT.template}\n" in readme
    assert "Pooling `last`; at most 99 tokens" in readme
    assert f"{found.comparisons[0].largest_difference:.1e}" in readme
    assert "A LoRA adapter (rank 2, alpha 6.0, SHA-256" in readme
    assert str(tmp_path) not in readme, "the card is published, without local paths"
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert report["holds"] is True
    assert report["texts"] == found.texts > 40
    assert report["comparisons"][0]["form"]["name"] == str(tmp_path / "out")


def test_check_false_skips_the_comparison(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["merge", str(adapter), str(tmp_path / "out"), "--no-verify", "--shard-gigabytes", "0.00002"])
    assert "--no-verify" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("model-*"))) > 2
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text()) == {"holds": None}
    assert "Not compared" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert one_minus_cos(encode(tmp_path / "out"), encode(adapter)) < 1e-8


# --- a bad merge is not written ---------------------------------------------------------------------------------------


def without_scaling(update: LoraUpdate, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    delta = update.b_OR @ update.a_RI
    return weight + (delta.T if transposed else delta)


@pytest.mark.parametrize("before", [False, True])
def test_a_merge_with_bad_arithmetic_changes_no_file(
    before: bool, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if before:
        merged(adapter, tmp_path / "out")
    kept = files_below(tmp_path)
    monkeypatch.setattr(LoraUpdate, "merged", without_scaling)
    with pytest.raises(SystemExit, match="1"):
        cli.run(["merge", str(adapter), str(tmp_path / "out"), "--device", "cpu"])
    shown = capsys.readouterr().err
    assert "was not written" in shown
    assert "exceeds 1e-05" in shown
    assert files_below(tmp_path) == kept


def test_an_untrained_adapter_is_refused(tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))  # its B is zero
    encoder.save_pretrained(tmp_path / "adapter")
    with pytest.raises(VerificationError, match="equals its base"):
        merge(tmp_path / "adapter", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its fingerprint before the work; without one, by the comparison."""
    base = (tmp_path / "base").rename(tmp_path / "kept")
    other = save_tiny_base("llama", tmp_path / "base", seed=1)
    with pytest.raises(ArtifactError, match="trained on weights with fingerprint"):
        merge(adapter, tmp_path / "out")
    other = locate(str(other.rename(tmp_path / "other")))
    base.rename(tmp_path / "base")
    card = json.loads((adapter / CARD_NAME).read_text())
    (adapter / CARD_NAME).write_text(json.dumps(card | {"base_fingerprint": None}))
    monkeypatch.setattr(
        sys.modules["angle_llm.export.merge"],
        "open_adapters_base",
        lambda source, card, original: open_base(other, dtype=card.dtype),
    )
    with pytest.raises(VerificationError, match="was not written"):
        merge(adapter, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_values_that_are_too_large_for_the_dtype_are_refused(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraUpdate, "merged", lambda update, weight, transposed: weight.float() * 1e6)
    with pytest.raises(ArtifactError, match=r"not finite in float16.*choose another --dtype"):
        merge(adapter, tmp_path / "out", dtype="float16")


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["around/adapter", "base", "around/adapter/inside", "base/inside", "link", "around"])
def test_inputs_are_never_overwritten(target: str, tmp_path: Path) -> None:
    for name in ("base", "around"):  # saved encoders, which a target may replace
        tiny_encoder("llama").save_pretrained(tmp_path / name)
    run = save_tiny_adapter(tmp_path / "base", tmp_path / "around" / "adapter")
    (tmp_path / "link").symlink_to(run)
    kept = files_below(tmp_path)
    with pytest.raises(ArtifactError, match=r"the (adapter|base), "):
        merge(run, tmp_path / target)
    assert files_below(tmp_path) == kept
    assert is_saved_encoder(run)


def test_a_source_that_is_not_an_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "whole")
    with pytest.raises(ArtifactError, match="holds a whole model"):
        merge(tmp_path / "whole", tmp_path / "out")
    (tmp_path / "run").mkdir()
    adapter.rename(tmp_path / "run" / "model")
    with pytest.raises(FileNotFoundError, match=r"has no angle_llm\.json.*run/model is one"):
        merge(tmp_path / "run", tmp_path / "out")


# --- memory -----------------------------------------------------------------------------------------------------------

_MEASURE = """
import sys, threading, time
from pathlib import Path
from angle_llm.export.merge import merge
import safetensors.torch, transformers.models.llama.modeling_llama, torch
torch.ones(64, 64).to(torch.bfloat16) @ torch.ones(64, 64).to(torch.bfloat16)

def anonymous():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line) / 1e3

def watch():
    while True:
        seen.append(anonymous())
        time.sleep(0.001)

seen = [anonymous()]
threading.Thread(target=watch, daemon=True).start()
before = anonymous()
merge(sys.argv[1], sys.argv[2], shard_bytes=20_000_000, check=False)
print("grew", max(seen) - before, "samples", len(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_shard(tmp_path: Path) -> None:
    """A base of 200 MB in one file, shards of 20 MB, no layer above 8 MB."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
    )
    base = tmp_path / "base"
    LlamaModel(config).save_pretrained(base, max_shard_size="1GB")
    tiny_encoder("llama").tokenizer.save_pretrained(base)
    assert (base / "model.safetensors").stat().st_size > 190e6
    run = save_tiny_adapter(base, tmp_path / "adapter", dtype="bfloat16")
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(run), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    words = result.stdout.split()
    grew, samples = float(words[words.index("grew") + 1]), int(words[words.index("samples") + 1])
    assert samples > 50
    assert grew < 80, f"{grew} MB"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) >= math.ceil(190 / 20)
    read_adapter(run).check_fits(open_base(locate(str(base)), dtype="float32").skeleton)
