"""Models with a convolution or a recurrent state beside or in place of attention: Qwen3.5, LFM2, Falcon-H1, Mamba, ….

Random weights of each family; kernels of other packages for a GPU (`mamba_ssm`, `fla`) are not covered.
"""

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composites import CONFIGS
from tiny import (
    FEW_TARGETS,
    HYBRID,
    KINDS,
    NO_LORA,
    micro_batches_of,
    save_tiny_base,
    tiny_backbone,
    tiny_encoder,
    train_a_little,
)
from tiny_tokenizers import TOKENIZERS
from torch import Tensor
from transformers import AutoModel
from transformers.models.auto import tokenization_auto

from angle_llm import PromptTemplate, SentenceEncoder
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import ScoredPair
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.losses import AngleObjective
from angle_llm.model.layers.lora import add_lora
from angle_llm.model.layers.quantization import bits_of_layer, dequantize, quantize
from angle_llm.model.layout import support
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.source.bidirectional import check_and_simplify_bidirectional
from angle_llm.model.source.checks import ArtifactError
from angle_llm.settings.train import LoraSettings
from angle_llm.train.step import boundary_step

QUICK = {"qwen3_5_text", "lfm2", "falcon_h1", "mamba"}
TEXTS = ["A man eats.", "A dog runs over the wet grass and barks at an old tree.", "Hi", "One two three four."]
CPU = torch.device("cpu")


def families(*without: str, quick: Collection[str] = QUICK) -> Any:
    """Parametrize a test by family; the families that are not `quick` are slow."""
    kinds = [kind for kind in HYBRID if kind not in without]
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[] if kind in quick else [pytest.mark.slow]) for kind in kinds]
    )


def targets_of(kind: str) -> tuple[str, ...]:
    return FEW_TARGETS.get(kind, ("all-linear",))


def adapted(kind: str) -> SentenceEncoder:
    encoder = tiny_encoder(kind, prompt=None, max_length=60)
    torch.manual_seed(0)  # of the matrices A
    encoder.add_lora(LoraSettings(rank=2, alpha=4, targets=targets_of(kind)))
    train_a_little(encoder.model)
    return encoder


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Largest difference of gradients, relative to the largest gradient of the tensor."""
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max() / others[name].abs().max()) for name in others)


@families()
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_padded_batches_equal_the_plain_call_on_each_text_in_value_and_gradient(kind: str, pooling: str) -> None:
    encoder = tiny_encoder(kind, pooling=pooling, max_length=60)
    assert encoder.layouts.layout == "padded"
    assert encoder.model.options.causal
    plain = copy.deepcopy(encoder.model.backbone)
    plan = encoder.plan(TEXTS, 10_000)
    (micro,) = micro_batches_of(plan)
    assert micro.mask_BT is not None
    assert not micro.mask_BT.all()
    rows = encoder.model(**micro.inputs(CPU))
    rows.sin().sum().backward()
    found = gradients(encoder.model.backbone)
    ids = encoder.tokenize(TEXTS)
    states = [plain(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0] for text in ids]
    alone = torch.stack([state[-1] if pooling == "last" else state.mean(0) for state in states])
    alone = alone[[ids.index(micro.ids_BT[row][micro.mask_BT[row].bool()].tolist()) for row in range(len(ids))]]
    alone.sin().sum().backward()
    # float32: sums over 60 tokens in another order.
    assert float((rows - alone).detach().abs().max() / alone.detach().abs().max()) < 1e-5
    assert largest_difference(found, gradients(plain)) < 2e-4


@families()
def test_the_probe_finds_the_state_of_another_text(kind: str) -> None:
    """In bfloat16, with the small weights of a new model, some states of packed texts differ by less than rounding."""
    backbone = AutoModel.from_config(HYBRID[kind].config()).eval().to(torch.bfloat16)
    for shares in (True, False):
        assert support._probe(backbone, causal=True, shares=shares) is not None


def test_an_effect_below_rounding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = AutoModel.from_config(HYBRID["lfm2"].config()).eval().to(torch.bfloat16)
    monkeypatch.setattr(support, "other_layers", lambda config: set())
    assert "crosses the borders" in probe_layouts(backbone, "last", causal=True).reason
    monkeypatch.setattr(support, "_crosses_borders", lambda *_, **__: False)
    assert probe_layouts(backbone, "last", causal=True).layout == "trie"


@families()
def test_bidirectional_attention_is_refused_by_name(kind: str) -> None:
    backbone = tiny_backbone(kind)
    backbone.config.is_causal = False
    with pytest.raises(ArtifactError, match=f"models of type {kind} do not support bidirectional"):
        check_and_simplify_bidirectional(backbone)


@families(*NO_LORA, quick={"lfm2", "mamba"})
def test_every_adapter_gets_the_gradient_of_peft(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fused and plain layers, with activation checkpointing, and with cached graphs."""
    encoder = adapted(kind)
    encoder.model.train()
    batch = TextBatch.from_examples([ScoredPair(TEXTS[n], TEXTS[n - 1], n / 4) for n in range(4)])
    plan = encoder.plan(batch.texts, 20)
    assert len(micro_batches_of(plan)) > 1

    def step(graph_tokens: int = 10_000) -> dict[str, Tensor]:
        result = boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens)
        assert result.cached == (graph_tokens == 0)
        return gradients(encoder.model)

    kept = step()
    assert kept.keys() == {name for name, weight in encoder.model.named_parameters() if weight.requires_grad}
    assert all(gradient.any() for gradient in kept.values())
    assert largest_difference(step(graph_tokens=0), kept) < 1e-5  # sums over micro-batches in another order
    encoder.model.checkpoint_activations(True)
    assert largest_difference(step(), kept) == 0
    monkeypatch.setenv("ANGLE_LLM_PLAIN", "1")
    encoder = adapted(kind)
    encoder.model.train()
    assert largest_difference(kept, step()) < 2e-4  # float32, sums in another order


@pytest.mark.parametrize(
    ("kind", "target", "others"),
    [
        ("mamba", "out_proj", "--lora.targets in_proj, or"),
        ("mamba", "dt_proj", "--lora.targets in_proj, or"),
        ("mamba", "conv1d", "Known: in_proj."),
        ("falcon_h1", "out_proj", "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj, or"),
        pytest.param("bamba", "out_proj", "in_proj k_proj", marks=pytest.mark.slow),  # not refused by peft
        pytest.param("jamba", "dt_proj", "in_proj k_proj", marks=pytest.mark.slow),
    ],
)
def test_layers_of_mamba_that_cannot_be_adapted_are_refused_with_the_targets_to_choose(
    kind: str, target: str, others: str
) -> None:
    with pytest.raises(ValueError, match=others):
        add_lora(tiny_backbone(kind), LoraSettings(targets=(target,)))


def test_layers_that_share_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Zamba2Model share weights.*--lora\.rank 0"):
        add_lora(tiny_backbone("zamba2"), LoraSettings())


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_mamba_that_are_read_directly_are_not_quantized(bits: int) -> None:
    backbone = tiny_backbone("mamba")
    quantize(backbone, bits)
    names = {name.rpartition(".")[2] for name, layer in backbone.named_modules() if bits_of_layer(layer)}
    assert names == {"in_proj"}
    ids = torch.tensor([[5, 7, 9]])
    quantized = backbone(input_ids=ids, use_cache=False).last_hidden_state
    dequantize(backbone)
    # 8 bits also round activations.
    torch.testing.assert_close(backbone(input_ids=ids, use_cache=False).last_hidden_state, quantized, rtol=0, atol=0.1)


def test_coefficients_of_gemma_3n_are_not_quantized_or_adapted() -> None:
    """In training, the model clamps their weights in place."""
    backbone = AutoModel.from_config(CONFIGS["gemma3n"]().text_config)
    quantize(backbone, "fp8")
    layers = {name.rpartition(".")[2]: layer for name, layer in backbone.named_modules()}
    assert bits_of_layer(layers["down_proj"]) == "fp8"
    adapted = add_lora(backbone, LoraSettings(rank=2)).train()
    for name in ("prediction_coefs", "correction_coefs"):
        assert any(layer is layers[name] for layer in adapted.modules()), "not replaced by an adapter"
        assert type(layers[name]) is torch.nn.Linear
    assert adapted(input_ids=torch.tensor([[5, 7, 9]]), use_cache=False).last_hidden_state.isfinite().all()


def test_an_adapter_of_rwkv_has_the_same_states_in_training_and_evaluation(tmp_path: Path) -> None:
    """The library divides weights by 2 for every second layer here, but not their adapters."""
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("rwkv", tmp_path), device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    (micro,) = micro_batches_of(encoder.plan(TEXTS, 10_000))
    rows = []
    for training in (True, False):
        encoder.model.train(training)
        rows.append(encoder.model(**micro.inputs(CPU)).detach().numpy())
    assert np.array_equal(*rows)


def cosine_difference(some: np.ndarray, others: np.ndarray) -> float:
    """Largest difference of two matrices whose rows are scaled to length 1."""
    unit, other_unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (some, others))
    return float(np.abs(unit - other_unit).max())


@pytest.mark.needs("sentence_transformers")
@families(*NO_LORA, quick={"lfm2"})
def test_saved_merged_and_exported_encoders_have_the_vectors(kind: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    prompt = "plain_eos" if kind == "qwen3_5_moe_text" else None  # AutoTokenizer rebuilds its tokenizer
    base = save_tiny_base(kind, tmp_path / "base")
    encoder = SentenceEncoder.from_pretrained(base, device="cpu", max_length=60, prompt=prompt)
    encoder.add_lora(LoraSettings(rank=2, alpha=4, targets=targets_of(kind)))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "run")
    expected = encoder.encode(TEXTS)
    assert np.array_equal(SentenceEncoder.from_pretrained(tmp_path / "run", device="cpu").encode(TEXTS), expected)
    merge(tmp_path / "run", tmp_path / "merged")
    merged = SentenceEncoder.from_pretrained(tmp_path / "merged", device="cpu").encode(TEXTS)
    found = export_sentence_transformers(tmp_path / "run", tmp_path / "out", device="cpu")
    assert found is not None
    assert found.holds
    exported = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS)
    # float32: base and update are added before the product with the states, not after it.
    assert max(cosine_difference(rows, expected) for rows in (merged, exported)) < 2e-5


@pytest.mark.skipif(
    not hasattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS")
    or "qwen3_5_moe_text" not in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    reason="this version of transformers does not rebuild the tokenizer",
)
@pytest.mark.needs("sentence_transformers")
def test_a_prompt_of_a_rebuilt_tokenizer_is_added_by_the_library(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    base = save_tiny_base("qwen3_5_moe_text", tmp_path / "base")
    TOKENIZERS["smollm2"]().save_pretrained(base)  # without added tokens, for which the library adds the prompt anyway
    for name, template in (("prefix", "query: {text}"), ("both", "say {text} in one word:")):
        prompt = PromptTemplate(name, template)
        encoder = SentenceEncoder.from_pretrained(base, device="cpu", max_length=60, prompt=prompt)
        encoder.save_pretrained(tmp_path / name)
    export_sentence_transformers(tmp_path / "prefix", tmp_path / "out", device="cpu")
    library = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert library.prompts == {"query": "query: ", "document": "query: "}
    expected = SentenceEncoder.from_pretrained(tmp_path / "prefix", device="cpu").encode(TEXTS)
    assert cosine_difference(library.encode(TEXTS), expected) < 1e-6
    with pytest.raises(ArtifactError, match="train with a prompt that is text before"):
        export_sentence_transformers(tmp_path / "both", tmp_path / "none", device="cpu")


def test_the_table_of_the_guide_is_what_the_tests_run() -> None:
    """Layout and LoRA targets of the quick families; that every family is in the table, and is seen."""
    guide = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    lines = guide.partition("## Model families")[2].partition("\n* ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    rows = {kind: row for row in cells for kind in re.findall("`([a-z0-9_]+)`", row[0])}
    assert rows.keys() - {kind for kind, row in rows.items() if row[-1] == "read"} == HYBRID.keys() | KINDS.keys() - {
        "llama-tied"
    }
    for kind in (*QUICK, "llama", "bert"):
        layout, targets, merged, _ = rows[kind][1:]
        encoder = tiny_encoder(kind)
        assert encoder.layouts.layout == layout
        linear = {path for path, layer in encoder.model.backbone.named_modules() if isinstance(layer, torch.nn.Linear)}
        encoder.add_lora(LoraSettings(rank=1))
        weights = [name for name, _ in encoder.model.backbone.named_parameters() if ".lora_A" in name]
        names = {name.partition(".lora_A")[0].removeprefix("base_model.model.") for name in weights}
        skipped = {path for path in linear if "mamba" in path and not path.endswith(".in_proj")}
        expected = {
            "all linear layers": linear,
            "`in_proj`": {path for path in linear if path.endswith(".in_proj")},
            "all but some of Mamba": linear - skipped,
        }
        assert (names, merged) == (expected[targets], "yes")
