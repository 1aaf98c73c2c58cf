"""A base in 4 or 8 bits: LoRA trains on it as on plain layers of the same values, also after an evaluation."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import one_in
from peft.tuners.lora import LoraLayer
from tiny import KINDS, PeftLora, add_adapter, micro_batches_of, tiny_backbone, train_a_little, write_gguf
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import Tensor, nn
from transformers import AutoModel, BitsAndBytesConfig, LlamaConfig, LlamaModel

from angle_llm import SentenceEncoder
from angle_llm.model.layers import replacements
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.layers.lora import add_lora, count_parameters
from angle_llm.model.layers.quantization import QuantizationError, bits_of, dequantize, quantize, without_outliers
from angle_llm.model.source.backbone import load_backbone
from angle_llm.model.source.checks import CARD_NAME
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.train import LoraSettings

bnb: Any = pytest.importorskip("bitsandbytes", reason="needs the extra: pip install 'angle_llm[quantization]'")
bnb_layers: Any = importlib.import_module("peft.tuners.lora.bnb")

TEXTS = ["A man is eating.", 'Someone eats something, and it seems to be "bread".', "A man is asleep.", "Birds!"]
BITS = pytest.mark.parametrize("bits", [4, 8])
LEAST_COSINE = {4: 0.999, 8: 0.99}


def wide_backbone(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny LLaMA with rows of whole blocks of 64, like real models."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes, **heads))
        for parameter in model.parameters():
            parameter.data = (parameter.data + 0.05 * torch.randn_like(parameter)).to(dtype)
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "wide"
    wide_backbone().save_pretrained(folder)
    TOKENIZERS["llama2"]().save_pretrained(folder)
    return folder


def trained(folder: Path, **options: Any) -> SentenceEncoder:
    """With the same trained adapter at each call."""
    return with_lora(SentenceEncoder.from_pretrained(folder, device="cpu", **options))


def with_lora(encoder: SentenceEncoder, **options: Any) -> SentenceEncoder:
    torch.manual_seed(0)
    add_adapter(encoder, PeftLora(rank=4, alpha=8, **options))
    train_a_little(encoder.model)
    return encoder


def on_the_dequantized_base(folder: Path, *, computed: torch.dtype | None = None, **options: Any) -> SentenceEncoder:
    """The same values in plain layers; computed in the same dtype or a wider one."""
    encoder = SentenceEncoder.from_pretrained(folder, device="cpu", **options)
    dequantize(encoder.model.backbone)
    for parameter in encoder.model.parameters():
        parameter.data = parameter.data.to(computed or parameter.dtype)
    assert {type(layer) for layer in encoder.model.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    return with_lora(encoder)


def rows_and_gradient(encoder: SentenceEncoder, training: bool = True) -> tuple[Tensor, Tensor]:
    """Rows (N, D), and the gradient of a random projection of them for all weights of the adapter, in one vector."""
    encoder.model.train(training).zero_grad()
    (micro,) = micro_batches_of(encoder.plan(TEXTS, 10_000))
    torch.manual_seed(3)  # of dropout
    rows = encoder.model(**micro.inputs(encoder.device))
    (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    parts = [p.grad.flatten() for p in encoder.model.parameters() if p.requires_grad and p.grad is not None]
    assert len(parts) == sum(p.requires_grad for p in encoder.model.parameters()) > 0
    return rows.detach(), torch.cat(parts)


def cosine(one: Any, other: Any) -> float:
    """Of two vectors, or the smallest of the rows of two matrices."""
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return float(torch.cosine_similarity(one, other, dim=-1).min())


@one_in(5, "training, bits, dtype", [True, False], [4, 8], ["float32", "bfloat16", "float16"])
def test_gradients_equal_those_on_the_dequantized_base_before_and_after_an_evaluation(
    bits: int, dtype: str, training: bool, base: Path
) -> None:
    """bitsandbytes 0.50.2 on a CPU with AVX512-BF16: the evaluation repacked the weights, and later gradients had cosine 0.26
    to the expected ones. The effect of half precision is measured on plain layers."""
    truth = rows_and_gradient(on_the_dequantized_base(base, bits=bits, dtype=dtype, computed=torch.float32))
    plain = rows_and_gradient(on_the_dequantized_base(base, bits=bits, dtype=dtype))
    encoder = trained(base, bits=bits, dtype=dtype)
    assert encoder.bits == bits
    for _ in ("before", "after"):
        for found, rounded, expected in zip(rows_and_gradient(encoder, training), plain, truth, strict=True):
            assert 1 - cosine(found, expected) < max(1 - LEAST_COSINE[bits], 2 * (1 - cosine(rounded, expected)))
        encoder.encode(TEXTS)  # an evaluation


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@BITS
def test_the_adapter_on_a_quantized_base_computes_what_that_of_peft_computes(
    bits: int, dropout: float, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 to the order of sums. In bfloat16 both are off from rounding all states, by about the same."""

    def found(dtype: str) -> list[Tensor]:
        encoder = with_lora(
            SentenceEncoder.from_pretrained(base, device="cpu", bits=bits, dtype=dtype), dropout=dropout
        )
        kinds = [type(layer) for layer in encoder.model.modules() if isinstance(layer, LoraLayer)]
        assert {kind in (bnb_layers.Linear4bit, bnb_layers.Linear8bitLt) for kind in kinds} == {of_peft}
        return [*rows_and_gradient(encoder)]

    of_peft = False
    short, short_half = found("float32"), found("bfloat16")
    monkeypatch.setattr(replacements, "use_fused_lora", lambda model: None)
    of_peft = True
    plain, plain_half = found("float32"), found("bfloat16")
    assert max(relative_errors(short, plain)) < 1e-5
    assert sum(relative_errors(short_half, plain)) < 1.5 * sum(relative_errors(plain_half, plain))


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def can_be_repacked(model: nn.Module) -> set[bool]:
    return {layer.support_avx512bf16_for_cpu for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)}


@BITS
def test_weights_stored_in_bits_are_used_unchanged(bits: int, base: Path, tmp_path: Path) -> None:
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} if bits == 4 else {}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **options)
    AutoModel.from_pretrained(base, quantization_config=config, dtype="float32").save_pretrained(tmp_path / "base")
    TOKENIZERS["llama2"]().save_pretrained(tmp_path / "base")
    encoder = trained(tmp_path / "base")
    assert encoder.bits == bits
    assert can_be_repacked(encoder.model) == ({False} if bits == 4 else set())
    assert cosine(encoder.encode(TEXTS), trained(base, bits=bits).encode(TEXTS)) > 0.999999
    rows, gradient = rows_and_gradient(encoder)
    assert cosine(rows_and_gradient(trained(base, bits=bits))[1], gradient) > 0.999999
    encoder.save_pretrained(tmp_path / "adapter")
    again = SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    dequantize(encoder.model.backbone)
    torch.testing.assert_close(rows_and_gradient(encoder)[0], rows, rtol=1e-4, atol=1e-4)


@BITS
def test_every_linear_layer_is_quantized_and_only_a_float32_adapter_trains(bits: int) -> None:
    plain = wide_backbone(torch.bfloat16)
    names = {name for name, layer in plain.named_modules() if isinstance(layer, nn.Linear)}
    others = {name: p.clone() for name, p in plain.named_parameters() if name.removesuffix(".weight") not in names}
    quantize(plain, bits)
    assert not any(layer.training for layer in plain.modules())
    adapted: Any = add_lora(plain, LoraSettings(rank=2))
    held = {name: p for name, p in adapted.named_parameters() if "lora_" not in name}
    assert {p.dtype for name, p in adapted.named_parameters() if p.requires_grad} == {torch.float32}
    assert sum(p.dtype in (torch.uint8, torch.int8) for p in held.values()) == len(names) == 21
    for name, expected in others.items():  # embedding and norms: no upcast, no change
        found = held[f"base_model.model.{name}"]
        assert torch.equal(found, expected), name
        assert found.dtype == torch.bfloat16, name


@BITS
def test_a_gguf_file_is_dequantized_and_quantized(bits: int, tmp_path: Path) -> None:
    published = tiny_backbone("llama-tied")
    held = load_backbone(locate(str(write_gguf(published, tmp_path / "tiny.gguf"))), bits=bits)
    assert bits_of(held) == bits
    assert weights_fingerprint(held) == weights_fingerprint(published)
    quantize(published, bits)
    ids = torch.tensor([[3, 9, 27, 81, 5]])
    found, expected = (model(input_ids=ids).last_hidden_state for model in (held, published))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["qwen2", "bert", "opt"])
@BITS
def test_other_architectures_and_partial_blocks_equal_their_plain_form(kind: str, bits: int) -> None:
    """Rows of 32 weights; Qwen2 has biases in some layers."""
    one, other = quantized(kind, bits), quantized(kind, bits)
    dequantize(other)
    ids = torch.tensor([[3, 9, 27, 81, 5]])
    found, expected = (model.train()(input_ids=ids).last_hidden_state for model in (one, other))
    if kind == "qwen2":  # the others have dropout
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    encoder, plain = (SentenceEncoder(model.eval(), TOKENIZERS[KINDS[kind].tokenizer]()) for model in (one, other))
    assert cosine(encoder.encode(TEXTS), plain.encode(TEXTS)) > LEAST_COSINE[bits]
    assert encoder.pooling == plain.pooling


def quantized(kind: str, bits: int) -> Any:
    backbone = tiny_backbone(kind)
    quantize(backbone, bits)
    return backbone


@BITS
def test_work_and_parameters_are_counted_like_those_of_the_plain_model(bits: int, base: Path) -> None:
    plain, held = (SentenceEncoder.from_pretrained(base, device="cpu", bits=b) for b in (None, bits))
    assert count_parameters(held.model)[1] == count_parameters(plain.model)[1]
    assert FlopsPerToken.of(held.model).forward == FlopsPerToken.of(plain.model).forward
    assert with_lora(held).bits == bits
    backward = FlopsPerToken.of(held.model).backward
    assert backward == FlopsPerToken.of(with_lora(plain).model).backward


@pytest.mark.parametrize("training", [True, False])
def test_without_outliers_is_temporary(training: bool) -> None:
    """A token of usual size with another one that has an outlier."""
    backbone = quantized("llama", 8).train(training)
    layer = backbone.layers[0].mlp.up_proj
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    x[1, 3] = 20.0

    def difference() -> float:
        return float((layer(x)[0] - layer(x[:1])[0]).detach().abs().max())

    before = difference()
    assert (before < 1e-5) is training  # training on a CPU does not round activations
    with without_outliers(backbone):
        assert difference() < 1e-5
    assert difference() == before


@pytest.mark.parametrize("dora", [False, True])
@BITS
def test_dequantized_under_an_adapter_it_computes_the_same(bits: int, dora: bool, base: Path) -> None:
    encoder = with_lora(SentenceEncoder.from_pretrained(base, device="cpu", bits=bits), dora=dora)
    in_bits, expected = encoder.encode(TEXTS), rows_and_gradient(encoder)[0]
    dequantize(encoder.model.backbone, torch.float32)
    torch.testing.assert_close(rows_and_gradient(encoder)[0], expected, rtol=1e-4, atol=1e-4)  # float32 sums
    assert encoder.bits is None
    assert cosine(encoder.encode(TEXTS), in_bits) > LEAST_COSINE[bits]


@BITS
def test_dequantized_weights_are_those_of_products_and_close_to_the_original(bits: int) -> None:
    held, plain = wide_backbone(torch.bfloat16), wide_backbone(torch.bfloat16)
    quantize(held, bits)
    layer, original = held.layers[1].mlp.up_proj.train(), plain.layers[1].mlp.up_proj.weight.detach()
    products = layer(torch.eye(128, dtype=torch.bfloat16)).T  # training on a CPU: no rounding of activations
    dequantize(held, torch.float32)
    weight = held.layers[1].mlp.up_proj.weight
    assert torch.equal(weight, products.detach().float())
    assert weight.dtype == torch.float32
    error = float((weight - original.float()).norm() / original.float().norm())
    assert 0 < error < {4: 0.1, 8: 0.01}[bits]
    assert not hasattr(held, f"is_loaded_in_{bits}bit")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@BITS
def test_an_adapter_is_read_back_exactly_on_the_same_quantized_base(
    bits: int, dtype: str, base: Path, tmp_path: Path
) -> None:
    encoder = trained(base, bits=bits, dtype=dtype)
    encoder.save_pretrained(tmp_path / "adapter")
    card = json.loads((tmp_path / "adapter" / CARD_NAME).read_text())
    assert (card["bits"], card["dtype"], card["base"]) == (bits, dtype, str(base))
    again = SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")
    assert (again.bits, str(again.dtype)) == (bits, f"torch.{dtype}")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / CARD_NAME).read_text()) == card


@pytest.mark.parametrize(("trained_in", "used"), [(None, 4), (4, 8), (8, None)])
def test_other_bits_can_be_chosen_for_the_same_base(
    trained_in: int | None, used: int | None, base: Path, tmp_path: Path
) -> None:
    encoder = trained(base, bits=trained_in, dtype="bfloat16")
    encoder.save_pretrained(tmp_path)
    other = SentenceEncoder.from_pretrained(tmp_path, device="cpu", bits=used, dtype="float32")
    assert (other.bits, other.dtype) == (used, torch.float32)
    assert cosine(other.encode(TEXTS), encoder.encode(TEXTS)) > 0.8


@BITS
def test_a_quantized_base_alone_is_not_saved(bits: int, base: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base, device="cpu", bits=bits)
    with pytest.raises(QuantizationError, match=f"{bits} bits without an adapter.*bits=None"):
        encoder.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: quantize(wide_backbone(), 3), "bits.*got 3"),
        (lambda: quantize(tiny_backbone("gpt2"), 4), "GPT2Model has no torch.nn.Linear layers"),
        (lambda: quantize(quantized("llama", 8), 4), "already quantized to 8 bits"),
    ],
    ids=["bits", "no-linear", "twice"],
)
def test_impossible_quantization_is_refused(act: Callable[[], None], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        act()


def test_without_bitsandbytes_everything_else_works(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`optional_packages` checks that importing angle_llm does not import it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    encoder = SentenceEncoder.from_pretrained(base, device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    assert encoder.encode(["A man."]).shape == (1, 128)
    with pytest.raises(RuntimeError, match=r"pip install 'angle_llm\[quantization\]'"):
        SentenceEncoder.from_pretrained(base, device="cpu", bits=4)
