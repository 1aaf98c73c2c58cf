"""Encoders truncated to their first layers and dimensions: equal to inner rows of one pass, also when saved and loaded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import KINDS, LIKE_ANOTHER, micro_batches_of, save_tiny_base, tiny_encoder, train_a_little
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import nn
from transformers import AutoModel, GPTNeoConfig

from angle_llm import SentenceEncoder
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.heads import DepthsHead
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", "A man is eating a large meal.", "Shares rose in London.", "A"]
ROUNDING = 2e-6
"""Float32 sums in another order, about 1e-7 of states of size 1 to 10 each."""


def adapted(encoder: SentenceEncoder) -> SentenceEncoder:
    encoder.add_lora(LoraSettings(rank=2, alpha=6))
    train_a_little(encoder.model)
    return encoder


def save_adapter(kind: str, tmp_path: Path) -> Path:
    base = save_tiny_base(kind, tmp_path / "base")
    adapted(load(base)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def load(folder: Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options)


def card(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CARD_NAME).read_text()))


def assert_same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING * np.abs(other).max())


def rows_by_depth(encoder: SentenceEncoder, layers: Sequence[int]) -> Any:
    """Rows of `TEXTS` after all layers and after each number of layers in one pass, as in training, (N, 1 + M, D)."""
    model = encoder.model.changed(DepthsHead(encoder.model, layers)).eval()
    model.training = True  # the head applies, without dropout
    plan = encoder.plan(TEXTS, 10**6)
    rows_UMD = np.empty((plan.unique, 1 + len(layers), encoder.dimensions), dtype=np.float32)
    with torch.no_grad():
        for micro in micro_batches_of(plan):
            rows = model(**micro.inputs(encoder.device)).numpy()
            rows_UMD[micro.rows] = rows.reshape(len(rows), 1 + len(layers), -1)
    return rows_UMD[plan.row_of]


@pytest.mark.parametrize(
    ("kind", "with_adapter"),
    [
        ("llama", False),
        *(pytest.param(kind, True, marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER)) for kind in KINDS),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS if kind != "llama"),
    ],
)
def test_one_pass_gives_the_rows_of_shorter_encoders(kind: str, with_adapter: bool) -> None:
    encoder = tiny_encoder(kind)
    if with_adapter:
        adapted(encoder)
    inner = list(range(1, encoder.layers))
    rows_NMD = rows_by_depth(encoder, inner)
    assert_same(rows_NMD[:, 0], encoder.encode(TEXTS))
    for layer in inner:
        assert_same(encoder.truncated(layers=layer).encode(TEXTS), rows_NMD[:, layer])
    assert np.abs(rows_NMD[:, 0] - rows_NMD[:, -1]).max() > 0.1, "layers must differ for this test"


@pytest.mark.parametrize("pooling", ["mean", "last-max", "cls", "cls-last-avg", "last"])
def test_every_pooling_pools_inner_states(pooling: str) -> None:
    encoder = tiny_encoder("bert", pooling=pooling)
    assert_same(rows_by_depth(encoder, [1])[:, 1], encoder.truncated(layers=1).encode(TEXTS))


def test_inner_layers_do_not_change_encode() -> None:
    """Training reads them while evaluation encodes."""
    encoder = tiny_encoder("llama")
    before = encoder.encode(TEXTS)
    encoder.model = encoder.model.changed(DepthsHead(encoder.model, [1]))
    assert np.array_equal(encoder.encode(TEXTS), before)
    inputs = micro_batches_of(encoder.plan(TEXTS, 10**6))[0].inputs(encoder.device)
    assert encoder.model.eval()(**inputs).shape[1] == 32
    assert encoder.model.train()(**inputs).shape[1] == 64


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_truncated_encoder_has_the_first_layers_on_the_same_weights(with_adapter: bool) -> None:
    encoder = tiny_encoder("gemma2")
    if with_adapter:
        adapted(encoder)
    before, kinds = encoder.encode(TEXTS), encoder.model.backbone.config.layer_types
    short = encoder.truncated(layers=2)
    weights = {parameter.data_ptr() for parameter in short.model.parameters()}
    assert weights < {parameter.data_ptr() for parameter in encoder.model.parameters()}
    assert (short.layers, encoder.layers) == (2, 3)
    assert short.model.backbone.config.num_hidden_layers == 2
    assert (short.model.backbone.config.layer_types, len(kinds)) == (kinds[:2], 3)
    assert np.array_equal(encoder.encode(TEXTS), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "opt", "bert"])
def test_a_whole_model_is_saved_without_the_dropped_layers(kind: str, tmp_path: Path) -> None:
    short = tiny_encoder(kind).truncated(layers=1, dimensions=8)
    short.save_pretrained(tmp_path / "short")
    again = load(tmp_path / "short")
    assert np.array_equal(again.encode(TEXTS), short.encode(TEXTS))
    assert (again.layers, again.dimensions) == (1, 8)
    assert set(load_file(tmp_path / "short" / "model.safetensors")) == set(short.model.backbone.state_dict())
    assert (card(tmp_path / "short")["dimensions"], card(tmp_path / "short")["layers"]) == (8, None)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_an_adapter_of_fewer_layers_is_saved_loaded_merged_and_verified(kind: str, tmp_path: Path) -> None:
    short = load(save_adapter(kind, tmp_path)).truncated(layers=1, dimensions=8)
    short.save_pretrained(tmp_path / "short")
    again = load(tmp_path / "short")
    assert (again.layers, again.dimensions) == (1, 8)
    # The same values at other addresses: kernels can sum in another order.
    np.testing.assert_allclose(again.encode(TEXTS), short.encode(TEXTS), rtol=1e-5, atol=1e-5)
    kept, everything = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("short", "adapter"))
    assert set(kept) < set(everything)
    assert not any(".1." in name for name in kept)
    assert (card(tmp_path / "short")["dimensions"], card(tmp_path / "short")["layers"]) == (8, 1)
    assert card(tmp_path / "short")["base_fingerprint"] == card(tmp_path / "adapter")["base_fingerprint"]

    found = merge(tmp_path / "short", tmp_path / "merged", device="cpu")
    assert found is not None
    assert found.holds
    merged = load(tmp_path / "merged")
    assert (merged.layers, merged.dimensions) == (1, 8)
    assert_same(merged.encode(TEXTS), again.encode(TEXTS))
    back = verify([tmp_path / "merged", tmp_path / "short"], VerifyOptions(device="cpu"))
    assert back.holds
    assert back.base_difference == pytest.approx(found.base_difference, rel=1e-3)


def test_options_of_loading_truncate(tmp_path: Path) -> None:
    adapter = save_adapter("llama", tmp_path)
    for folder in (adapter, tmp_path / "base"):
        assert np.array_equal(load(folder, dimensions=10).encode(TEXTS), load(folder).encode(TEXTS)[:, :10])
        short = load(folder, layers=2, dimensions=10)
        expected = load(folder).truncated(layers=2, dimensions=10).encode(TEXTS)
        assert np.array_equal(short.encode(TEXTS), expected)
    load(adapter, layers=2, dimensions=10).save_pretrained(tmp_path / "two")
    assert load(tmp_path / "two", layers=1).layers == 1
    for more in ({"layers": 3}, {"dimensions": 11}):
        with pytest.raises(ValueError, match=rf"{next(iter(more))}.*got {next(iter(more.values()))}"):
            load(tmp_path / "two", **more)
    load(adapter, layers=3, dimensions=32).save_pretrained(tmp_path / "same")
    assert card(tmp_path / "same") == card(adapter)
    assert not verify([adapter, tmp_path / "two"], VerifyOptions(device="cpu")).holds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": True}, "dimensions"),
        ({"layers": 9}, "layers: expected 1"),
        ({"layers": 1}, r"layers\.[12]\."),  # layers of the adapter that the base does not have
    ],
)
def test_a_card_that_does_not_match_the_model_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapter = save_adapter("llama", tmp_path)
    (adapter / CARD_NAME).write_text(json.dumps(card(adapter) | change))
    with pytest.raises(ValueError, match=message):
        load(adapter)


def test_an_adapter_trained_on_a_truncated_base_has_the_fingerprint_of_the_whole_one(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    short = adapted(load(base, layers=2))
    short.save_pretrained(tmp_path / "adapter")
    assert card(tmp_path / "adapter")["layers"] == 2
    assert np.array_equal(load(tmp_path / "adapter").encode(TEXTS), short.encode(TEXTS))
    save_tiny_base("llama", base, seed=1)
    with pytest.raises(ArtifactError, match="fingerprint"):
        load(tmp_path / "adapter")


def test_an_export_drops_layers_but_cannot_drop_dimensions(tmp_path: Path) -> None:
    adapter = save_adapter("llama", tmp_path)
    load(adapter, layers=1).save_pretrained(tmp_path / "short")
    export_sentence_transformers(tmp_path / "short", tmp_path / "out", check=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 1
    load(adapter, dimensions=8).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ArtifactError, match="truncate_dim=8"):
        export_sentence_transformers(tmp_path / "narrow", tmp_path / "narrow_out", check=False)


def test_layers_and_dimensions_that_do_not_exist_are_refused() -> None:
    encoder = tiny_encoder("llama")
    for layers in ([0], [3], [1, 1]):
        with pytest.raises(ValueError, match="layers"):
            DepthsHead(encoder.model, layers)
    for cut in ({"layers": 0}, {"layers": 4}, {"dimensions": 0}, {"dimensions": 33}):
        with pytest.raises(ValueError, match=next(iter(cut))):
            encoder.truncated(**cut)


def test_a_pooling_of_two_layers_has_no_inner_rows_but_can_be_truncated() -> None:
    encoder = tiny_encoder("bert", pooling="first-last-avg")
    with pytest.raises(ValueError, match="first-last-avg"):
        DepthsHead(encoder.model, [1])
    assert encoder.truncated(layers=1).encode(TEXTS).shape == (len(TEXTS), 32)


def test_a_backbone_with_unknown_layers_or_steps_after_them_is_refused() -> None:
    encoder = tiny_encoder("llama")
    backbone: Any = encoder.model.backbone
    backbone.register_forward_hook(lambda _, __, output: output.__class__(last_hidden_state=output[0] * 1.01))
    for use in (lambda: DepthsHead(encoder.model, [1]), lambda: encoder.truncated(layers=1)):
        with pytest.raises(ValueError, match="LlamaModel"):
            use()
    assert encoder.truncated(dimensions=8).dimensions == 8
    for layer in backbone.layers:  # as many experts as layers
        layer.experts = nn.ModuleList([nn.Identity() for _ in range(3)])
    assert LayerStack.of(backbone).name == "layers"
    backbone.twins = nn.ModuleList([nn.Identity() for _ in range(3)])
    with pytest.raises(ValueError, match="LlamaModel"):
        LayerStack.of(backbone)


def test_the_layers_of_gpt_neo_are_listed_twice(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 64}
    config = GPTNeoConfig(**sizes, num_layers=4, attention_types=[[["global", "local"], 2]], window_size=8)
    torch.manual_seed(0)
    encoder = SentenceEncoder(AutoModel.from_config(config).eval(), TOKENIZERS["smollm2"]())
    short = encoder.truncated(layers=3)
    short.save_pretrained(tmp_path / "short")
    assert np.array_equal(load(tmp_path / "short").encode(TEXTS), short.encode(TEXTS))
