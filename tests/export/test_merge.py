"""The merged directory is the adapter's encoder, or it is not written."""

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
from tiny import KINDS, save_tiny_base, tiny_encoder, train_a_little
from transformers import AutoModel, BitsAndBytesConfig, LlamaConfig, LlamaModel

from angle_llm import PromptTemplate, SentenceEncoder, __version__
from angle_llm.config import LoraSettings
from angle_llm.export.card import REPORT_NAME
from angle_llm.export.merge import merge
from angle_llm.export.verify import VerificationError
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import locate
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.lora import LoraUpdate, read_adapter
from angle_llm.model.weights import open_base

TEXTS = ["A man is eating.", 'Someone says "no", then eats something that takes a long time.', "Where is it?"]
PROMPT = PromptTemplate(name="mine", template='This sentence: "{text}" means in one word: "')


def save_adapter(base: Path, folder: Path, lora: LoraSettings | None = None, **options: Any) -> Path:
    """An adapter on a base that does something."""
    encoder = SentenceEncoder.from_pretrained(base, device="cpu", **options)
    encoder.add_lora(lora or LoraSettings(rank=2, alpha=6))
    train_a_little(encoder.model)
    encoder.save_pretrained(folder)
    return folder


def encode(folder: Path, **options: Any) -> np.ndarray:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options).encode(TEXTS)


def one_minus_cos(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).max())


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter", prompt=PROMPT, max_length=99)


# --- the same encoder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tmp_path: Path) -> None:
    run = save_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter")
    found = merge(run, tmp_path / "out", device="cpu")
    assert found is not None
    assert found.holds
    assert one_minus_cos(encode(tmp_path / "out"), encode(run)) < 1e-8
    assert one_minus_cos(encode(tmp_path / "out"), encode(tmp_path / "base")) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lora",
    [
        LoraSettings(rank=3, alpha=1, rslora=True),
        LoraSettings(rank=2, alpha=1, dora=True),
        LoraSettings(rank=2, alpha=1, targets=["q_proj", "v_proj"]),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2"])
def test_every_sort_of_adapter(kind: str, lora: LoraSettings, dtype: str, tmp_path: Path) -> None:
    run = save_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter", lora, dtype=dtype)
    found = merge(run, tmp_path / "out", device="cpu")
    assert found is not None
    assert found.comparisons[0].largest_difference < 1e-8


@pytest.mark.parametrize("lora", [LoraSettings(rank=2, alpha=1, rslora=True), LoraSettings(rank=2, alpha=1, dora=True)])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_every_sort_of_layer(kind: str, lora: LoraSettings, tmp_path: Path) -> None:
    run = save_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter", lora, dtype="bfloat16")
    found = merge(run, tmp_path / "out", device="cpu")
    assert found is not None
    assert found.comparisons[0].largest_difference < 1e-8


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_in_half(stored: str, tmp_path: Path) -> None:
    """Each number is the float32 merge's, rounded once."""
    run = save_adapter(save_tiny_base("bert", tmp_path / "base"), tmp_path / "adapter")
    merge(run, tmp_path / "full", device="cpu")
    found = merge(run, tmp_path / "half", dtype=stored, device="cpu")
    assert found is not None
    assert found.comparisons[0].form.dtype == stored
    full, half = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "half"))
    assert all(torch.equal(full[name].to(getattr(torch, stored)), tensor) for name, tensor in half.items())
    assert SentenceEncoder.from_pretrained(tmp_path / "half").dtype == getattr(torch, stored)


def test_the_base_is_the_one_of_training(tmp_path: Path) -> None:
    """A float32 base that was trained on in bfloat16: the adapter saw rounded weights."""
    base = save_tiny_base("llama", tmp_path / "base")
    run = save_adapter(base, tmp_path / "adapter", LoraSettings(rank=2, alpha=1, targets=["q_proj"]), dtype="bfloat16")
    stored = load_file(base / "model.safetensors")
    for choice in ("dequantised", "original"):
        merge(run, tmp_path / choice, base=choice, device="cpu")
    rounded, original = (load_file(tmp_path / name / "model.safetensors") for name in ("dequantised", "original"))
    assert not torch.equal(stored["norm.weight"], stored["norm.weight"].bfloat16().float())
    for name, tensor in stored.items():
        if "q_proj" not in name:
            assert torch.equal(rounded[name], tensor.bfloat16().float()), name
            assert torch.equal(original[name], tensor), name
        else:
            assert (rounded[name] - tensor.bfloat16().float()).abs().max() > 1e-3


@pytest.mark.parametrize("lora", [LoraSettings(rank=2, alpha=1), LoraSettings(rank=2, alpha=1, dora=True)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base(bits: int, lora: LoraSettings, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = save_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "adapter", lora, bits=bits)
    found = merge(run, tmp_path / "trained", device="cpu")
    assert found is not None
    assert found.first.dtype == f"float32 in {bits} bits"
    assert found.comparisons[0].largest_difference < 1e-8
    on_original = merge(run, tmp_path / "original", base="original", device="cpu")
    assert on_original is not None
    assert on_original.holds, "it is the adapter on the original base, as asked"
    drift = one_minus_cos(encode(tmp_path / "original"), encode(tmp_path / "trained"))
    assert drift > 1e-5
    (note,) = on_original.notes
    assert "The difference from the adapter on the values it was trained on is 1-cos" in note
    assert note in (tmp_path / "original" / "README.md").read_text(encoding="utf-8")


def test_a_base_that_is_stored_in_bits(tmp_path: Path) -> None:
    """As the hub has them, `…-bnb-4bit`: there are no original weights, and the merge is plain all the same."""
    pytest.importorskip("bitsandbytes")
    save_tiny_base("llama", tmp_path / "plain")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    stored = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=options)
    stored.save_pretrained(tmp_path / "base")
    tiny_encoder("llama").tokenizer.save_pretrained(tmp_path / "base")
    run = save_adapter(tmp_path / "base", tmp_path / "adapter")
    assert EncoderCard.read(run).bits == 4
    found = merge(run, tmp_path / "out", device="cpu")
    assert found is not None
    assert found.comparisons[0].largest_difference < 1e-8
    assert SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").bits is None


def test_shards_in_and_out(tmp_path: Path) -> None:
    encoder = tiny_encoder("qwen2")
    encoder.model.backbone.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    encoder.tokenizer.save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 2
    run = save_adapter(tmp_path / "base", tmp_path / "adapter")
    merge(run, tmp_path / "one", device="cpu")
    merge(run, tmp_path / "many", shard_bytes=20_000, device="cpu")
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


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_it_is_written_as_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    run = save_adapter(save_tiny_base(kind, tmp_path / "base"), tmp_path / "adapter")
    merge(run, tmp_path / "out", device="cpu")
    SentenceEncoder.from_pretrained(tmp_path / "out", device="cpu").save_pretrained(tmp_path / "again")
    written, again = files_below(tmp_path / "out"), files_below(tmp_path / "again")
    assert written.keys() - again.keys() == {"README.md", "merge.json", REPORT_NAME}
    assert {name: again[name] for name in again if name != "model.safetensors"} == {
        name: written[name] for name in again if name != "model.safetensors"
    }
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_knows_where_it_comes_from(adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "out", dtype="bfloat16", device="cpu")
    card, origin = EncoderCard.read(tmp_path / "out"), EncoderCard.read(adapter)
    assert (card.prompt, card.pooling, card.max_length) == (PROMPT, "last", 99)
    assert (card.dtype, card.base, card.bits) == ("bfloat16", None, None)
    made = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert made == {
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


def test_the_model_card_tells_how_to_use_it(adapter: Path, tmp_path: Path) -> None:
    found = merge(adapter, tmp_path / "out", device="cpu")
    assert found is not None
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"\n    {PROMPT.template}\n" in card
    assert "Pooling `last`; at most 99 tokens" in card
    assert f"{found.comparisons[0].largest_difference:.1e}" in card
    assert str(tmp_path) not in card, "a card is published; the author's folders are nobody's business"
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert report["holds"] is True
    assert report["texts"] == found.texts > 40
    assert report["comparisons"][0]["form"]["name"] == str(tmp_path / "out")


def test_unverified_if_asked(adapter: Path, tmp_path: Path) -> None:
    assert merge(adapter, tmp_path / "out", check=False) is None
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text()) == {"holds": None}
    assert "Not compared" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert one_minus_cos(encode(tmp_path / "out"), encode(adapter)) < 1e-8


# --- a bad merge is not written -------------------------------------------------------------------------------------


def in_bfloat16(update: LoraUpdate, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """What `model.bfloat16().merge_and_unload()` does."""
    delta = (update.b_OR.bfloat16() @ update.a_RI.bfloat16()) * update.scaling
    return (weight.bfloat16() + (delta.T if transposed else delta)).float()


def without_scaling(update: LoraUpdate, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    delta = update.b_OR @ update.a_RI
    return weight + (delta.T if transposed else delta)


def nothing(update: LoraUpdate, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    return weight.float()


@pytest.mark.parametrize("arithmetic", [in_bfloat16, without_scaling, nothing])
@pytest.mark.parametrize("before", [False, True])
def test_bad_arithmetic(arithmetic: Any, before: bool, adapter: Path, monkeypatch: Any, tmp_path: Path) -> None:
    """The source stays, the half-made target goes, and what lay there before stays."""
    if before:
        merge(adapter, tmp_path / "out", device="cpu")
    kept = files_below(tmp_path)
    monkeypatch.setattr(LoraUpdate, "merged", arithmetic)
    with pytest.raises(VerificationError, match=r"was not written(.|\n)*exceeds 1e-05"):
        merge(adapter, tmp_path / "out", device="cpu")
    assert files_below(tmp_path) == kept


def test_an_adapter_that_learnt_nothing(tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))  # its B is zero
    encoder.save_pretrained(tmp_path / "adapter")
    with pytest.raises(VerificationError, match="equals its base"):
        merge(tmp_path / "adapter", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_base_are_refused_before_the_work(adapter: Path, tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path / "base", seed=1)
    with pytest.raises(ArtifactError, match="trained on weights with fingerprint"):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_wrong_base_is_caught_without_a_fingerprint_too(adapter: Path, monkeypatch: Any, tmp_path: Path) -> None:
    card = json.loads((adapter / CARD_NAME).read_text())
    (adapter / CARD_NAME).write_text(json.dumps(card | {"base_fingerprint": None}))
    other = locate(str(save_tiny_base("llama", tmp_path / "other", seed=1)))
    monkeypatch.setattr(
        sys.modules["angle_llm.export.merge"],
        "open_adapters_base",
        lambda source, card, original: open_base(other, dtype=card.dtype),
    )
    with pytest.raises(VerificationError, match="was not written"):
        merge(adapter, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_numbers_that_do_not_fit(adapter: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(LoraUpdate, "merged", lambda update, weight, transposed: weight.float() * 1e6)
    with pytest.raises(ArtifactError, match=r"not finite in float16.*choose another --dtype"):
        merge(adapter, tmp_path / "out", dtype="float16")


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["adapter", "base", "adapter/inside", "base/inside", "link"])
def test_never_onto_what_is_read(target: str, tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "base")  # a saved encoder, which a target may replace
    run = save_adapter(tmp_path / "base", tmp_path / "adapter")
    (tmp_path / "link").symlink_to(run)
    kept = files_below(tmp_path)
    with pytest.raises(ArtifactError, match=r"the (adapter|base), "):
        merge(run, tmp_path / target)
    assert files_below(tmp_path) == kept


def test_never_around_what_is_read(tmp_path: Path) -> None:
    tiny_encoder("llama").save_pretrained(tmp_path / "around")
    run = save_adapter(save_tiny_base("llama", tmp_path / "base"), tmp_path / "around" / "adapter")
    with pytest.raises(ArtifactError, match="overwrite the adapter"):
        merge(run, tmp_path / "around")
    assert is_saved_encoder(run)


def test_what_is_no_encoder_is_left_alone(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("dear")
    with pytest.raises(ArtifactError, match="is not a saved encoder, so it is left alone"):
        merge(adapter, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "dear"


def test_a_run_that_is_no_adapter(adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "whole", device="cpu")
    with pytest.raises(ArtifactError, match="holds a whole model"):
        merge(tmp_path / "whole", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"has no angle_llm\.json"):
        merge(tmp_path / "base", tmp_path / "out")
    (tmp_path / "run").mkdir()
    adapter.rename(tmp_path / "run" / "model")
    with pytest.raises(FileNotFoundError, match=r"run/model is one"):
        merge(tmp_path / "run", tmp_path / "out")


# --- memory ---------------------------------------------------------------------------------------------------------

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
def test_memory_is_a_shards(tmp_path: Path) -> None:
    """A base of 200 MB in one file, shards of 20 MB, no layer above 8 MB: nothing near 200 MB is ever held."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
    )
    base = tmp_path / "base"
    LlamaModel(config).save_pretrained(base, max_shard_size="1GB")
    tiny_encoder("llama").tokenizer.save_pretrained(base)
    assert (base / "model.safetensors").stat().st_size > 190e6
    run = save_adapter(base, tmp_path / "adapter", dtype="bfloat16")
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(run), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    words = result.stdout.split()
    grew, samples = float(words[words.index("grew") + 1]), int(words[words.index("samples") + 1])
    assert samples > 50
    assert grew < 80, f"{grew} MB"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) >= math.ceil(190 / 20)
    read_adapter(run).check_fits(open_base(locate(str(base)), dtype="float32").skeleton)
