"""Models with Dense modules: open, train and export with the vectors of sentence-transformers.

The folders have the module files and prompts of EmbeddingGemma and Qwen3-Embedding, with tiny random weights.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import open_hub
from tiny import KINDS, POSITIONS, micro_batches_of, save_tiny_base
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from tokenizers import processors
from torch import nn
from transformers import Gemma3TextConfig, Gemma3TextModel

from angle_llm import SentenceEncoder, fine_tune
from angle_llm.export.card import CardFacts, model_card
from angle_llm.export.formats.gguf_file import export_gguf
from angle_llm.export.formats.onnx_graph import export_onnx
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.vectors import fingerprint
from angle_llm.settings.train import DataSettings, LoraSettings, ModelSettings, TrainSettings

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
TEXTS = ["A man is eating.", "Where?", "Two dogs run through the snow, and nobody sees them.", "They went on. " * 40]
GEMMA = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "Clustering": "task: clustering | query: ",
}
QWEN = {"query": "Instruct: Given a web search query, retrieve passages that answer the query\nQuery:", "document": ""}


def load(folder: Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options)


def saved_library(base: Path, folder: Path, parts: list[Any], prompts: dict[str, str], length: int = 80) -> Path:
    transformer = modules.Transformer(str(base), max_seq_length=length)
    model = library.SentenceTransformer(modules=[transformer, *parts], device="cpu", prompts=prompts)
    model.save(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EmbeddingGemma: Gemma-3 with bidirectional attention, mean, two Dense modules, Normalize."""
    base = tmp_path_factory.mktemp("gemma") / "base"
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=POSITIONS, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention=True,
    )  # fmt: skip
    Gemma3TextModel(config).save_pretrained(base)
    TOKENIZERS["gemma"]().save_pretrained(base)
    dense = [
        modules.Dense(32, 128, bias=False, activation_function=nn.Identity()),
        modules.Dense(128, 32, bias=False, activation_function=nn.Identity()),
    ]
    return saved_library(
        base, base.with_name("model"), [modules.Pooling(32, "mean"), *dense, modules.Normalize()], GEMMA
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Embedding: causal, last token, EOS after the text, padding on the left, Normalize."""
    base = save_tiny_base("qwen3", tmp_path_factory.mktemp("qwen") / "base")
    tokenizer = copy.deepcopy(TOKENIZERS[KINDS["qwen3"].tokenizer]())
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.pad_token, tokenizer.padding_side = end, "left"
    tokenizer.save_pretrained(base)
    return saved_library(base, base.with_name("model"), [modules.Pooling(32, "lasttoken"), modules.Normalize()], QWEN)


def settings_of(model: Path, folder: Path, **changed: Any) -> TrainSettings:
    return TrainSettings(
        run_dir=str(folder),
        model=ModelSettings(path=str(model), dtype="float32"),
        batch_size=8,
        report_to=[],
        **changed,
    )


def assert_equal(encoder: SentenceEncoder, folder: Path) -> None:
    """The vectors of queries and documents equal those of sentence-transformers in float32."""
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    assert np.abs(encoder.encode_query(TEXTS) - theirs.encode_query(TEXTS)).max() <= 2e-6
    assert np.abs(encoder.encode_document(TEXTS) - theirs.encode_document(TEXTS)).max() <= 2e-6


@pytest.mark.parametrize("name", ["gemma", "qwen"])
def test_the_folder_opens_with_the_vectors_of_the_library(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    encoder = load(folder)
    assert_equal(encoder, folder)
    assert encoder.prompts.query.template == {"gemma": GEMMA, "qwen": QWEN}[name]["query"] + "{text}"
    assert (encoder.pooling, encoder.dimensions, encoder.normalize) == (
        {"gemma": "mean", "qwen": "last"}[name],
        32,
        True,
    )
    # transformers 5.6 gives Gemma-3 another mask, so its texts are padded there
    assert encoder.layouts.layout in {"gemma": ("packed", "padded"), "qwen": ("trie",)}[name]


def test_every_activation_and_size(tmp_path: Path) -> None:
    base = save_tiny_base("bert", tmp_path / "base")
    kinds = [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Identity]
    dense = [modules.Dense(32 + n, 33 + n, bias=n % 2 == 0, activation_function=kind()) for n, kind in enumerate(kinds)]
    folder = saved_library(base, tmp_path / "model", [modules.Pooling(32, "cls"), *dense], {})
    encoder = load(folder)
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(encoder.encode(TEXTS) - expected).max() <= 1e-6
    assert encoder.dimensions == 38
    assert np.array_equal(encoder.truncated(dimensions=5).encode(TEXTS), encoder.encode(TEXTS)[:, :5])


@pytest.mark.parametrize(
    ("train_dense", "rank"),
    [(True, 2), *(pytest.param(False, rank, marks=pytest.mark.slow) for rank in (2, 0))],
)
def test_training_keeps_or_trains_the_dense_modules(
    train_dense: bool, rank: int, gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter or a whole model is saved with them, merged, exported, and read back by the library."""
    before = load(gemma)
    run = settings_of(
        gemma, tmp_path / "run", lora=LoraSettings(rank=rank, train_dense=train_dense), data=DataSettings(limit=16)
    )
    folder = fine_tune(run).folder
    encoder = load(folder)
    assert encoder.model.dense is not None
    assert before.model.dense is not None
    changed = [
        not torch.equal(new, old)
        for new, old in zip(encoder.model.dense.parameters(), before.model.dense.parameters(), strict=True)
    ]
    assert changed == [train_dense or rank == 0] * 2
    assert fingerprint(encoder) != fingerprint(before)
    again = fine_tune(replace(run, model=ModelSettings(path=str(folder)), run_dir=str(tmp_path / "again"))).folder
    continued = load(again).model.dense
    assert continued is not None
    trained = not torch.equal(continued[0].linear.weight, encoder.model.dense[0].linear.weight)  # type: ignore[union-attr,arg-type]
    assert trained == (train_dense or rank == 0)

    whole = folder
    if rank:
        assert merge(folder, tmp_path / "merged") is not None
        whole = tmp_path / "merged"
    assert_equal(encoder, whole)
    if not train_dense and rank:  # exports of the other cases have trained Dense modules
        return
    for source in {folder, whole}:
        report = export_sentence_transformers(source, tmp_path / f"{source.name}-library")
        assert report is not None
        assert report.holds
        assert_equal(encoder, tmp_path / f"{source.name}-library")
    with pytest.raises(ArtifactError, match="Dense"):
        export_gguf(whole, tmp_path / "gguf", check=False)
    hub = open_hub(tmp_path / "cache", monkeypatch)
    files = {str(path.relative_to(whole)): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    hub.put("user/model", files)
    fetched = SentenceEncoder.from_pretrained("user/model", device="cpu")
    assert np.array_equal(fetched.encode_query(TEXTS), load(whole).encode_query(TEXTS))


def test_layers_of_a_bidirectional_decoder_are_computed_again_without_a_cache(gemma: Path) -> None:
    """Its config has `use_cache`; a second run with the cache of the first would read every key twice."""
    encoder = load(gemma)
    encoder.model.backbone.requires_grad_(True)
    gradients = []
    for enabled in (False, True):
        encoder.model.checkpoint_activations(enabled)
        encoder.model.zero_grad()
        micro = micro_batches_of(encoder.for_side("query").plan(TEXTS, 10**6))[0]
        encoder.model(**micro.inputs(encoder.device)).square().sum().backward()
        gradients.append([parameter.grad for parameter in encoder.model.backbone.parameters()])
    assert all(torch.equal(again, once) for once, again in zip(*gradients, strict=True))


def test_model_cards_name_the_dense_modules(gemma: Path, tmp_path: Path) -> None:
    load(gemma, prompt="plain").save_pretrained(tmp_path / "whole")
    assert "then 2 Dense modules" in model_card(CardFacts.read(tmp_path / "whole"), "user/model")


def test_a_folder_like_qwen3_embedding_is_trained_and_exported(qwen: Path, tmp_path: Path) -> None:
    """Last token, EOS, and a prompt of queries alone."""
    lora = LoraSettings(rank=2)
    folder = fine_tune(settings_of(qwen, tmp_path / "run", lora=lora, data=DataSettings(limit=16))).folder
    report = export_sentence_transformers(folder, tmp_path / "library")
    assert report is not None
    assert report.holds
    assert_equal(load(folder), tmp_path / "library")


@pytest.mark.needs("onnx", "onnxruntime", "onnxscript")
def test_onnx_graph_contains_the_dense_modules(gemma: Path, tmp_path: Path) -> None:
    load(gemma).save_pretrained(tmp_path / "saved")
    report = export_onnx(tmp_path / "saved", tmp_path / "onnx", side="document")
    assert report is not None
    assert report.holds


def test_any_name_of_a_dense_folder_opens_from_the_hub(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of the model is loaded with frozen Dense modules; `verify` names a server without them."""
    folder = tmp_path / "model"
    shutil.copytree(gemma, folder)
    (folder / "3_Dense").rename(folder / "3_Dense_32")
    described = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(described.replace("3_Dense", "3_Dense_32"))
    hub = open_hub(tmp_path / "cache", monkeypatch)
    hub.put("user/model", {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")})
    encoder = SentenceEncoder.from_pretrained("user/model", device="cpu")
    assert_equal(encoder, folder)
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "adapter")
    assert not any(weight.requires_grad for weight in load(tmp_path / "adapter").model.dense.parameters())


def test_the_dense_modules_are_part_of_the_hash(gemma: Path) -> None:
    encoder = load(gemma)
    before = fingerprint(encoder)
    assert encoder.model.dense is not None
    encoder.model.dense[0].linear.weight.data[0, 0] += 1  # type: ignore[union-attr,index,operator]
    assert fingerprint(encoder) != before


def test_encoders_with_other_dense_modules_are_not_merged(gemma: Path, tmp_path: Path) -> None:
    runs = []
    for seed, train_dense in ((1, False), (2, True)):
        lora = LoraSettings(rank=2, train_dense=train_dense)
        runs.append(
            fine_tune(
                settings_of(gemma, tmp_path / f"run{seed}", lora=lora, data=DataSettings(limit=8), seed=seed)
            ).folder
        )
    with pytest.raises(ArtifactError, match="do not belong together: Dense modules"):
        merge(runs[0], tmp_path / "soup", others=runs[1:])


def dense_config(folder: Path, **values: object) -> None:
    path = folder / "2_Dense/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("named", "damage"),
    [
        ("activation_function", lambda f: dense_config(f, activation_function="os.system")),
        ("use_residual", lambda f: dense_config(f, use_residual=True)),
        ("module_input_name", lambda f: dense_config(f, module_input_name="token_embeddings")),
        ("2_Dense cannot be opened: FileNotFoundError", lambda f: (f / "2_Dense/config.json").unlink()),
        ("2_Dense cannot be opened: KeyError", lambda f: (f / "2_Dense/config.json").write_text("{}")),
        ("2_Dense cannot be opened: FileNotFoundError", lambda f: (f / "2_Dense/model.safetensors").unlink()),
        ("2_Dense cannot be opened", lambda f: (f / "2_Dense/model.safetensors").write_bytes(b"damaged")),
        ("2_Dense cannot be opened", lambda f: dense_config(f, out_features=7)),
        ("activation_function", lambda f: dense_config(f, activation_function=["x"])),
    ],
)
def test_refused_by_name(named: str, damage: Callable[[Path], object], gemma: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(gemma, folder)
    damage(folder)
    with pytest.raises(ArtifactError, match=named):
        load(folder)
