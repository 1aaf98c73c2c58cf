"""Decoder-only models with bidirectional attention: `attention="bidirectional"`."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import POSITIONS, micro_batches_of, save_tiny_base, tiny_backbone
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import nn
from transformers import (
    AutoModel,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPTJConfig,
    Lfm2Config,
    NemotronConfig,
    OlmoConfig,
    StableLmConfig,
    XLNetConfig,
)

from angle_llm import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel, EmbeddingOptions
from angle_llm.model.layout.micro_batches import LayoutSupport, plan_micro_batches
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.source.backbone import probes_as_causal
from angle_llm.model.source.bidirectional import check_and_simplify_bidirectional
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.model.source.resolve import resolve_model

KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "paligemma", "opt", "gpt2"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
TEXTS = ["A man eats.", "A dog runs over the wet grass and barks at an old tree.", "Hi", "One two three four."]


@pytest.fixture
def _norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes RMSNorm in float32 in every dtype."""
    to, narrow, softmax = torch.Tensor.to, torch.Tensor.float, nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda x, *to_what, **options: (
            x if x.dtype == torch.float64 and torch.float32 in to_what else to(x, *to_what, **options)
        ),
    )
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))


def backbone_of(kind: str) -> Any:
    if kind not in ("gemma3", "paligemma"):
        return tiny_backbone(kind, torch.float64)
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config: Any = GemmaConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    if kind == "gemma3":
        config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6, layer_types=layers)
    model = with_noise(AutoModel.from_config(config).eval())
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.double()
    return model


def with_noise(model: nn.Module) -> nn.Module:
    """Add noise to all weights, so that every state depends on every visible token."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_norms_in_float64")
def test_single_padded_and_packed_texts_are_equal_in_value_and_gradient(kind: str) -> None:
    backbone = backbone_of(kind)
    assert probes_as_causal(backbone) is (kind != "paligemma")
    backbone.config.is_causal = False
    check_and_simplify_bidirectional(backbone)
    assert not probes_as_causal(backbone)
    model = EmbeddingModel(backbone, EmbeddingOptions("mean", False))
    ids = [[5, 7], [9, 11, 13, 15, 17, 3, 4, 6, 8], [21], [5, 7, 2, 1]]  # longer and shorter than a window of 6
    packed = probe_layouts(backbone, "mean", causal=False)
    assert (packed.layout, packed.max_tokens) == ("packed", 6 if kind in ("mistral", "gemma2", "gemma3") else 1024)
    found = []
    for groups, layouts in (
        ([[one] for one in ids], LayoutSupport("padded", "test")),
        ([ids], LayoutSupport("padded", "test")),
        ([ids], packed),
    ):
        rows = []
        for group in groups:
            plan = plan_micro_batches(group, 100, layouts)
            rows_UD = torch.zeros(plan.unique, model.width, dtype=torch.float64)
            for micro in micro_batches_of(plan):
                rows_UD[micro.rows] = model(**micro.inputs(torch.device("cpu")))
            rows.append(rows_UD[plan.row_of])
        rows_ND = torch.cat(rows)
        rows_ND.sin().sum().backward()
        found.append((rows_ND.detach(), [one.grad for one in backbone.parameters() if one.grad is not None]))
        backbone.zero_grad()
    (expected, gradients), *others = found
    for rows_ND, other in others:
        # Sums of some dozen float64 terms in another order.
        torch.testing.assert_close(rows_ND, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other, gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_a_sliding_window_reaches_as_far_to_both_sides(kind: str) -> None:
    """The first layer has a window of 6 tokens."""
    backbone = backbone_of(kind)
    backbone.config.is_causal = False
    ids_1T = torch.arange(1, 21)[None]
    inputs_1TD = backbone.get_input_embeddings()(ids_1T).detach().requires_grad_()
    first, second = backbone(inputs_embeds=inputs_1TD, output_hidden_states=True).hidden_states[:2]
    (gradient_1TD,) = torch.autograd.grad(second[0, 10].sum(), first)
    assert gradient_1TD[0].any(dim=-1).nonzero().flatten().tolist() == list(range(4, 17))


TINY: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        # read the configuration, not the argument of a forward pass
        BloomConfig(**TINY),
        FalconConfig(**TINY),
        GPTJConfig(**TINY, rotary_dim=4),
        # norms with equal or no weights, other states between layers
        OlmoConfig(**SIZES),
        XLNetConfig(vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=48),
    ],
    ids=lambda config: config.model_type,
)
def test_families_with_other_norms_and_layers_are_accepted(config: Any) -> None:
    """As created: equal weights of all norms."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.is_causal = False
    backbone = AutoModel.from_config(config).eval()
    check_and_simplify_bidirectional(backbone)
    assert not probes_as_causal(backbone)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (StableLmConfig(**SIZES), "stablelm do not support bidirectional attention"),
        (NemotronConfig(**SIZES), "nemotron do not support bidirectional attention"),
        (
            Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
            "lfm2 do not support bidirectional attention.* layer is causal",
        ),
    ],
)
def test_a_family_that_ignores_the_setting_is_refused_by_name(config: Any, text: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with_noise(AutoModel.from_config(config)).save_pretrained(tmp_path)
    TOKENIZERS["llama2"]().save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=text):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu", attention="bidirectional")


def test_the_setting_has_no_effect_on_an_encoder(tmp_path: Path) -> None:
    base = save_tiny_base("bert", tmp_path / "base")
    encoder = SentenceEncoder.from_pretrained(base, device="cpu", attention="bidirectional")
    np.testing.assert_array_equal(encoder.encode(TEXTS), encode(base))
    encoder.save_pretrained(tmp_path / "saved")
    assert "is_causal" not in (tmp_path / "saved/config.json").read_text()
    assert json.loads((tmp_path / "saved" / CARD_NAME).read_text())["attention"] is None


def encode(path: Path, **options: Any) -> np.ndarray:
    return SentenceEncoder.from_pretrained(path, device="cpu", **options).encode(TEXTS)


def test_a_source_has_its_own_attention(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    source = resolve_model(str(base), attention="bidirectional")
    assert not SentenceEncoder.from_pretrained(source, device="cpu", attention="bidirectional").model.options.causal
    with pytest.raises(ValueError, match="attention"):
        SentenceEncoder.from_pretrained(resolve_model(str(base)), device="cpu", attention="bidirectional")


def test_the_text_model_of_paligemma_has_equal_vectors_with_padding(tmp_path: Path) -> None:
    """Its padded texts have a causal mask in transformers, and texts without padding have none."""
    torch.manual_seed(0)
    config = GemmaConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    with_noise(AutoModel.from_config(config)).save_pretrained(tmp_path / "base")
    TOKENIZERS["gemma"]().save_pretrained(tmp_path / "base")
    encoders = [SentenceEncoder.from_pretrained(tmp_path / "base", layout=layout) for layout in ("auto", "padded")]
    assert encoders[0].layouts.layout == "packed"
    alone = np.concatenate([encoders[0].encode([text]) for text in TEXTS])
    for encoder in encoders:
        # Rounding of float32, in micro-batches of other texts.
        np.testing.assert_allclose(encoder.encode(TEXTS), alone, rtol=0, atol=1e-5 * np.abs(alone).max())
