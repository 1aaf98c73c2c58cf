"""Replaced layers equal the layers of the library (LoRA, norms, MLPs, checkpointed layers); memory settings of a CPU."""

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from cases import one_in
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from tiny import PeftLora, add_adapter, micro_batches_of, save_tiny_base, tiny_backbone, tiny_encoder, train_a_little
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, LlamaConfig, Olmo2Config, Phi3Config, SeedOssConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from angle_llm import SentenceEncoder
from angle_llm.model.layers import compiled_rotary, fused_lora, lora, low_memory_layers, replacements
from angle_llm.model.layers.compiled_rotary import CompiledRotary, use_compiled_rotary
from angle_llm.model.layers.fused_lora import lora_linear, swiglu, swiglu_slopes
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.layout.token_sequence import gather_rows
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", "Someone eats.", "A man is eating bread.", "Hi", "Hi"]
CPU = torch.device("cpu")


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frozen_linear(bias: bool) -> nn.Linear:
    base = nn.Linear(6, 4, bias, dtype=torch.float64).requires_grad_(False)
    for number, parameter in enumerate(base.parameters()):
        parameter.copy_(draw(*parameter.shape, seed=10 + number))
    return base


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6)])
def test_lora_linear_equals_its_formula_in_value_and_gradient(bias: bool, shape: tuple[int, ...], gated: bool) -> None:
    base = frozen_linear(bias)
    sizes = [shape, (3, 6), (4, 3), *([shape] if gated else [])]
    leaves = [draw(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]
    upstream = draw(*shape[:-1], 4, seed=4)

    def plain(x: Tensor, a: Tensor, b: Tensor, up: Tensor | None = None) -> Tensor:
        x = x if up is None else nn.functional.silu(x) * up
        return base(x) + 0.7 * (x @ a.T) @ b.T

    def short(x: Tensor, a: Tensor, b: Tensor, up: Tensor | None = None) -> Tensor:
        return lora_linear(x, base, a, b, 0.7, 0.0, up)

    torch.testing.assert_close(short(*leaves), plain(*leaves), rtol=1e-14, atol=1e-14)  # sums of six float64 terms
    found, expected = (torch.autograd.grad(each(*leaves), leaves, upstream) for each in (short, plain))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(short, leaves)


@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6)])
@pytest.mark.parametrize("replaced", ["lora", "lora, gated", "swiglu", "norm", "rows"])
def test_the_output_of_a_replaced_layer_can_be_changed_in_place(replaced: str, shape: tuple[int, ...]) -> None:
    base, a, b, other = frozen_linear(True), draw(3, 6, seed=1), draw(4, 3, seed=2), draw(*shape, seed=3)
    weight, index = draw(6, seed=4), torch.tensor([1, 1, 0])
    a.requires_grad_(), b.requires_grad_()

    def plain_lora(x: Tensor) -> Tensor:
        return base(x) + 0.7 * (x @ a.T) @ b.T

    functions: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "lora": (lambda x: lora_linear(x, base, a, b, 0.7, 0.0), plain_lora),
        "lora, gated": (
            lambda x: lora_linear(x, base, a, b, 0.7, 0.0, other),
            lambda x: plain_lora(nn.functional.silu(x) * other),
        ),
        "swiglu": (lambda x: swiglu(x, other), lambda x: nn.functional.silu(x) * other),
        "norm": (
            lambda x: low_memory_layers._FrozenNorm.apply(x, weight, 1e-6),
            lambda x: nn.functional.rms_norm(x.float(), (6,), eps=1e-6).double() * weight,
        ),
        "rows": (lambda x: gather_rows(x.flatten(0, -2), index), lambda x: x.flatten(0, -2)[index]),
    }
    found = []
    for function in functions[replaced]:
        leaves = [draw(*shape, seed=5).requires_grad_(), *([a, b] if "lora" in replaced else [])]
        y = function(leaves[0])
        y /= 3.0  # as Longformer's attention
        y[..., 0] *= 2.0
        found.append([y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=6))])
    tolerance = 1e-5 if replaced == "norm" else 1e-13  # the norm is computed in float32
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 6), (2, 35, 6)])
def test_dropout_of_lora_is_that_of_peft_with_the_same_random_numbers(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found: list[list[Tensor]] = []
    for use in (fused_lora.use_fused_lora, lambda model: None):
        layer = get_peft_model(
            nn.Sequential(frozen_linear(True)), LoraConfig(r=3, lora_dropout=0.3, target_modules=["0"])
        )
        for number, parameter in enumerate(layer.parameters()):
            wide = dtype if not parameter.requires_grad else torch.promote_types(dtype, torch.float32)
            parameter.data = draw(*parameter.shape, seed=number).to(dtype).to(wide)
        use(layer)
        x = draw(*shape, seed=20).to(dtype).requires_grad_()
        torch.manual_seed(5)
        y = layer(x)
        y.backward(draw(*y.shape, seed=21).to(dtype))
        gradients = [parameter.grad for parameter in (x, *layer.parameters()) if parameter.grad is not None]
        found.append([y.detach(), *gradients, torch.rand(3)])  # the next random numbers are equal, too
    # Sums of up to 70 terms in another order; in bfloat16 all sums are rounded to 8 bits, in peft those of the base are.
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert len(found[0]) == len(found[1]) == 5
    assert max(errors(*found)) < tolerance
    assert torch.equal(found[0][-1], found[1][-1])


def adapted(dtype: torch.dtype) -> SentenceEncoder:
    """The same weights in every dtype: those that bfloat16 can hold."""
    encoder = tiny_encoder("qwen2", torch.bfloat16)  # with biases
    for parameter in encoder.model.parameters():
        parameter.data = parameter.data.to(dtype)
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model)
    return encoder


def rows_and_gradients(encoder: SentenceEncoder) -> list[Tensor]:
    plan = encoder.plan(TEXTS, 10_000)
    rows = torch.cat([encoder.model(**micro.inputs(CPU)) for micro in micro_batches_of(plan)])
    rows.square().sum().backward()  # type: ignore[no-untyped-call]
    return [rows.detach(), *(p.grad for p in encoder.model.parameters() if p.grad is not None)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    assert len(found) == len(expected) > 1
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def test_an_adapted_model_equals_that_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    short, short_half = adapted(torch.float32), adapted(torch.bfloat16)
    monkeypatch.setattr(replacements, "use_fused_lora", lambda model: None)
    plain, plain_half = adapted(torch.float32), adapted(torch.bfloat16)
    for encoder, expected in ((short, False), (short_half, False), (plain, True), (plain_half, True)):
        kinds = {type(layer) for layer in encoder.model.modules() if isinstance(layer, Linear)}
        assert (kinds == {Linear}) == expected
    truth = rows_and_gradients(plain)
    assert max(errors(rows_and_gradients(short), truth)) < 1e-5  # float32 sums in another order
    # In bfloat16 both are off by some percent, from rounding every state; rounding the products of the adapter adds little.
    ours, pefts = errors(rows_and_gradients(short_half), truth), errors(rows_and_gradients(plain_half), truth)
    assert sum(ours) < 1.5 * sum(pefts), (sum(ours), sum(pefts))
    assert all(p.dtype == torch.float32 for p in short_half.model.parameters() if p.requires_grad)


def test_layers_and_layouts_of_the_libraries_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_and_gradients(adapted(torch.float32))
    monkeypatch.setenv("ANGLE_LLM_PLAIN", "1")
    plain = adapted(torch.float32)
    assert (plain.layouts.layout, plain.layouts.reason) == ("padded", "ANGLE_LLM_PLAIN is set")
    assert replacements.replaced_layers(plain.model) == "none"
    assert {type(layer) for layer in plain.model.modules() if isinstance(layer, Linear)} == {Linear}
    plan = plain.plan(TEXTS, 10_000)
    rows = torch.cat([plain.model(**micro.inputs(CPU)) for micro in micro_batches_of(plan)])
    order = [row for micro in micro_batches_of(plan) for row in micro.rows]
    found = dict(zip(order, rows.detach(), strict=True))
    monkeypatch.delenv("ANGLE_LLM_PLAIN")
    trie = adapted(torch.float32)
    (micro,) = micro_batches_of(trie.plan(TEXTS, 10_000))
    assert micro.sequence is not None
    ours = dict(zip(micro.rows, expected[0], strict=True))
    for row, vector in ours.items():
        torch.testing.assert_close(found[row], vector, rtol=1e-4, atol=1e-5)  # float32 sums in another order


class WideProducts(TorchDispatchMode):
    """Counts matrix products of float32 matrices (rotary angles of transformers 5.6 are a batched product)."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "aten::addmm") and args[-1].dtype == torch.float32:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_adapters_on_partitioned_weights_compute_in_the_dtype_of_the_base() -> None:
    """ZeRO-3 needs the layer of peft, whose float32 products are slow on a GPU."""
    encoder, partitioned = adapted(torch.bfloat16), adapted(torch.bfloat16)
    fused = rows_and_gradients(encoder)
    for layer in partitioned.model.modules():
        if isinstance(layer, Linear):
            layer.base_layer.weight.ds_id = 0
    with WideProducts() as products:
        rows = rows_and_gradients(partitioned)
    assert products.count == 0
    assert max(errors(rows, fused)) < 0.1  # both round to bfloat16, at other places
    truth = rows_and_gradients(adapted(torch.float32))
    assert sum(errors(rows, truth)) < 1.5 * sum(errors(fused, truth))


def test_dora_uses_the_layer_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("llama")
    add_adapter(encoder, PeftLora(rank=2, dora=True))
    monkeypatch.setattr(fused_lora, "lora_linear", lambda *_: pytest.fail("only plain LoRA can use it"))
    encoder.model.train()
    assert encoder.model(**micro_batches_of(encoder.plan(TEXTS, 10_000))[0].inputs(CPU)).requires_grad


def replaced_layers(model: nn.Module) -> Counter[str]:
    kinds = (low_memory_layers.LowMemoryNorm, low_memory_layers.LowMemoryMlp)
    return Counter(kind.__name__ for layer in model.modules() for kind in kinds if isinstance(layer, kind))


@one_in(
    3,
    "model, dtype, dropout",
    [("llama", 7), ("mistral", 7), ("qwen2", 7), ("qwen3", 13)],
    [torch.float32, torch.bfloat16],
    [0.0, 0.3],
)
def test_norms_and_mlps_that_keep_less_equal_the_unchanged_ones(
    model: tuple[str, int], dtype: torch.dtype, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, norms = model
    found = []
    for expected in ({"LowMemoryNorm": norms, "LowMemoryMlp": 3}, {}):
        encoder = tiny_encoder(kind, dtype)
        torch.manual_seed(0)
        encoder.add_lora(LoraSettings(rank=4, alpha=8, dropout=dropout))
        train_a_little(encoder.model.train())
        assert replaced_layers(encoder.model) == expected
        found.append(rows_and_gradients(encoder))
        monkeypatch.setattr(replacements, "use_low_memory_layers", lambda model: None)
    assert len(found[0]) == len(found[1]) == 1 + 2 * 3 * 7
    assert torch.equal(found[0][0], found[1][0])
    # In float32, gradients of the residual and of the two uses in a norm are added in another order.
    assert max(errors(*found)) <= (1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("with_product", [False, True])
def test_slopes_of_swiglu_are_its_gradients(with_product: bool) -> None:
    gradient, gate, up = draw(3, 5, 6)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    expected = nn.functional.silu(leaves[0]) * leaves[1]
    *found, value = swiglu_slopes(gate, up, gradient, with_product)
    # float64, at most four operations
    torch.testing.assert_close(found, list(torch.autograd.grad(expected, leaves, gradient)), rtol=1e-14, atol=1e-14)
    assert (value is not None) == with_product
    if value is not None:
        torch.testing.assert_close(value, expected.detach(), rtol=1e-15, atol=1e-15)


def rotary_encoder(kind: str) -> SentenceEncoder:
    encoder = tiny_encoder(kind)
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model.train())
    return encoder


def compiled_layers(model: nn.Module) -> int:
    return sum(isinstance(layer, CompiledRotary) for layer in model.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which would stop at an error
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "decorated"])
def test_compiled_rotary_embeddings_equal_the_original_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that computes each operation of the graph as torch does. Other models are not changed.

    transformers 5.24 decorates the forward methods of attention layers.
    """
    if kind == "decorated":
        kind, forward = "llama", LlamaAttention.forward
        monkeypatch.setattr(LlamaAttention, "forward", wraps(forward)(lambda *given, **named: forward(*given, **named)))
        compiled_rotary._compiled_class.cache_clear()
    encoder, other = rotary_encoder(kind), rotary_encoder(kind)
    use_compiled_rotary(other.model)
    assert compiled_layers(other.model) == 0  # on a CPU
    use_compiled_rotary(encoder.model, "aot_eager")
    assert (compiled_layers(encoder.model), compiled_layers(other.model)) == (3, 0)
    assert max(errors(rows_and_gradients(encoder), rows_and_gradients(other))) == 0


def test_rotary_embeddings_of_a_llama_are_compiled_for_all_lengths_before_the_first_step() -> None:
    torch._dynamo.reset()
    compiled_rotary._compiled.cache_clear()
    encoder, stats = rotary_encoder("llama"), torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    use_compiled_rotary(encoder.model, "aot_eager")
    assert compiled_layers(encoder.model) == 3
    tried = stats["unique_graphs"]
    assert tried - before == 3  # the first length; any length, without and with gradients
    rows_and_gradients(encoder)
    encoder.encode([*TEXTS, "A longer text than the other texts of this test."])
    assert stats["unique_graphs"] == tried


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which would stop at an error
@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_an_encoder_on_a_gpu_has_the_replaced_layers_of_training(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those of a published folder, which could be trained. An adapter can be added later."""
    folder = save_tiny_base("llama", tmp_path)
    plain = SentenceEncoder.from_pretrained(folder, device="cpu", layout=layout)
    monkeypatch.setattr(replacements, "is_gpu", lambda device: True)
    monkeypatch.setattr(replacements, "use_compiled_rotary", partial(use_compiled_rotary, backend="aot_eager"))
    encoder = SentenceEncoder.from_pretrained(folder, device="cpu", layout=layout)
    replaced = {"3 LowMemoryMlp", "7 LowMemoryNorm", *(["3 CompiledRotary"] if layout == "auto" else [])}
    assert set(replacements.replaced_layers(encoder.model).split(", ")) == replaced
    with patch.object(LlamaRMSNorm, "forward", autospec=True, side_effect=LlamaRMSNorm.forward) as original:
        rows = encoder.encode(TEXTS)
        assert original.call_count == 0
        np.testing.assert_array_equal(rows, plain.encode(TEXTS))
        assert original.call_count >= 7
    for one in (encoder, plain):
        torch.manual_seed(0)
        one.add_lora(LoraSettings(rank=4, alpha=8))
        train_a_little(one.model.train())
    assert max(errors(rows_and_gradients(encoder), rows_and_gradients(plain))) == 0


@pytest.mark.parametrize("part", ["value", "gradient", "long texts", "NaN", "error"])
def test_rotary_embeddings_that_differ_when_compiled_are_not_replaced(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(rotate: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def rotated(query: Tensor, key: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
            if part == "error":
                raise RuntimeError("no compiler")
            found = rotate(query, key.detach() if part == "gradient" else key, *angles)
            scale = 1.01 if part == "value" or (part == "long texts" and query.shape[2] > 256) else 1.0
            extra = key.sum() * 0 if part == "gradient" else float("nan") if part == "NaN" else 0.0
            return found[0] * scale, found[1] + extra

        return rotated

    monkeypatch.setattr(torch, "compile", wrong)
    compiled_rotary._compiled.cache_clear()
    model = tiny_backbone("llama")
    use_compiled_rotary(model, "eager")
    compiled_rotary._compiled.cache_clear()
    assert compiled_layers(model) == 0
    warning = "RuntimeError: no compiler" if part == "error" else "its results differ"
    assert f"warning: rotary position embeddings are not compiled: {warning}" in capsys.readouterr().out


def test_attention_of_another_form_keeps_its_rotary_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    """A function of one tensor (Gemma-4), one projection for queries, keys and values (Phi-3), and no rotation (OPT)."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    phi = Phi3Config(**sizes, num_attention_heads=4, bos_token_id=1, eos_token_id=2)
    models = [tiny_backbone("opt"), AutoModel.from_config(phi)]
    if hasattr(transformers, "Gemma4TextConfig"):
        sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}
        models.append(AutoModel.from_config(transformers.Gemma4TextConfig(**sizes, num_attention_heads=4, head_dim=8)))
    for model in models:
        use_compiled_rotary(model, "eager")
        assert compiled_layers(model) == 0
    assert "rotary" not in capsys.readouterr().out


def test_a_layer_keeps_each_input_of_a_product_once_and_nothing_in_float32() -> None:
    encoder = adapted(torch.bfloat16)
    micro = micro_batches_of(encoder.plan(TEXTS, 10_000))[0]
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder.model(**micro.inputs(CPU))
    weights = {parameter.untyped_storage()._cdata for parameter in encoder.model.parameters()}
    states = [
        one for key, one in kept.items() if key not in weights and one.ndim > 1 and micro.ids_BT.numel() in one.shape
    ]
    wide = [tuple(one.shape) for one in states if one.dtype == torch.float32 and one.shape[-1] > 1]
    assert not wide
    assert sum(one.shape[-1] == 48 for one in states) == 2 * 3, "gate and up of each of three layers"


def test_layers_of_another_form_are_unchanged() -> None:
    for kind in ("gemma2", "opt", "gpt2", "bert"):
        assert not replaced_layers(lora.add_lora(tiny_backbone(kind), LoraSettings(rank=2)))
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    gelu = AutoModel.from_config(LlamaConfig(**sizes, num_attention_heads=2, hidden_act="gelu"))
    assert replaced_layers(lora.add_lora(gelu, LoraSettings(rank=2))) == {"LowMemoryNorm": 3}
    late = AutoModel.from_config(Olmo2Config(**sizes, num_attention_heads=2, pad_token_id=0))  # rounds after the weight
    assert replaced_layers(lora.add_lora(late, LoraSettings(rank=2))) == {"LowMemoryMlp": 1}
    dropout = AutoModel.from_config(SeedOssConfig(**sizes, num_attention_heads=2, residual_dropout=0.1)).eval()
    assert replaced_layers(lora.add_lora(dropout, LoraSettings(rank=2))) == {"LowMemoryNorm": 3}, "in its forward"


def test_a_layer_whose_replacement_gives_a_gradient_of_nan_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        low_memory_layers._FrozenNorm, "backward", lambda _, gradient: (gradient * torch.nan, None, None)
    )
    assert replaced_layers(lora.add_lora(tiny_backbone("llama"), LoraSettings(rank=2))) == {"LowMemoryMlp": 3}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no message"), RuntimeError("[enforce] can't allocate memory")]
)
def test_a_lack_of_memory_is_no_difference_of_a_replaced_layer(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(low_memory_layers._FrozenNorm, "apply", fail)
    with pytest.raises(type(error), match=re.escape(str(error))):
        lora.add_lora(tiny_backbone("llama"), LoraSettings(rank=2))


def test_a_norm_that_trains_or_is_partitioned_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone: Any = lora.add_lora(tiny_backbone("llama"), LoraSettings(rank=2)).get_base_model()  # type: ignore[operator]
    x = torch.randn(1, 3, 32, requires_grad=True)
    expected = backbone.norm(x)
    monkeypatch.setattr(low_memory_layers._FrozenNorm, "apply", lambda *_: pytest.fail("must be unchanged"))
    backbone.norm.weight.ds_id = 0  # of DeepSpeed ZeRO-3
    assert torch.equal(backbone.norm(x), expected)
    backbone.layers[0].input_layernorm.weight.requires_grad_(True)
    backbone.layers[0].input_layernorm(x).sum().backward()
    assert backbone.layers[0].input_layernorm.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_a_gpu_rounds_once(dtype: torch.dtype) -> None:
    """On a CPU the same function of torch is a composition of other operations; the kernel needs a GPU."""
    weight, x, upstream = draw(32).to(dtype), draw(5, 32, seed=1).to(dtype), draw(5, 32, seed=2).to(dtype)
    results = []
    for wide in (False, True):
        leaf = (x.double() if wide else x).clone().requires_grad_()
        if wide:  # the formula
            value = leaf * torch.rsqrt(leaf.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        else:
            value = low_memory_layers._fused_norm(leaf, weight, 1e-6)
        results.append((value.detach(), *torch.autograd.grad(value, leaf, upstream.to(value.dtype))))
    (value, gradient), (expected, expected_gradient) = results
    # Half a digit of the value; a gradient is a difference of terms that are rounded on a CPU.
    error = torch.finfo(dtype).eps
    torch.testing.assert_close(
        value.double(), expected, rtol=0.51 * error if dtype == torch.bfloat16 else 4 * error, atol=0
    )
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=4 * error, atol=4 * error)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_norm_of_a_gpu_passes_the_trial(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_memory_layers, "is_gpu", lambda _: True)
    monkeypatch.setattr(low_memory_layers._FrozenNorm, "apply", lambda *_: pytest.fail("not on a GPU"))
    backbone = tiny_backbone(kind)
    for layer in backbone.modules():
        if low_memory_layers._is_norm(layer):
            replacement = fused_lora.mixed_class(low_memory_layers.LowMemoryNorm, type(layer))
            for dtype in (torch.float32, torch.bfloat16):
                # The limit of `_are_equal` on a GPU.
                assert low_memory_layers._difference(layer, replacement, dtype, CPU) <= 8 * torch.finfo(dtype).eps


def test_layers_below_the_lowest_adapter_are_not_in_the_graph() -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LoraSettings(rank=2, alpha=2, targets=["layers.2.mlp.down_proj"]))
    kept: list[bool] = []
    for layer in encoder.model.backbone.get_base_model().layers[:2]:
        layer.register_forward_hook(lambda _, __, output: kept.append(output.requires_grad))
    assert encoder.model(**micro_batches_of(encoder.plan(TEXTS, 10**6))[0].inputs(CPU)).requires_grad
    assert kept == [False, False]


needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer"
)
FREED = """
import ctypes


class Usage(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "heap a b c mapped d e used free f".split()]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Usage
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
from angle_llm.device import keep_freed_memory


def held_after_freeing():
    blocks = [libc.malloc(20 << 20) for _ in range(20)]
    for block in reversed(blocks):
        libc.free(block)
    usage = libc.mallinfo2()
    return (usage.heap + usage.mapped) >> 20


print(held_after_freeing())
with keep_freed_memory():
    print(held_after_freeing())
print(held_after_freeing())
"""


@needs_glibc
def test_freed_memory_is_kept_inside_and_returned_afterwards() -> None:
    """In a new process that inherits no settings."""
    set_here = ("LRU_CACHE", "ONEDNN", "MALLOC", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(set_here)}
    done = subprocess.run([sys.executable, "-c", FREED], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    before, inside, after = map(int, done.stdout.split())
    # MiB, of 20 blocks of 20: glibc keeps less than 64 of the free end of its heap; 110 in all with torch 2.9.
    assert before < 150
    assert inside >= 400
    assert after < 150


def test_attention_on_a_gpu_does_not_use_cudnn() -> None:
    def enabled() -> tuple[bool, bool, bool]:
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()

    before = enabled()
    with attention_kernels(torch.device("cuda"), longest_text=50):
        assert enabled() == (True, True, False)
    assert enabled() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # inside torch.compile
def test_torch_compile_traces_a_model_in_one_graph() -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    encoder.model.to(torch.float64)
    train_a_little(encoder.model.train())
    backbone: Any = encoder.model.backbone
    ids = torch.tensor([[5, 6, 7, 8]])
    compiled: Any = torch.compile(backbone, backend="eager", fullgraph=True)
    found, expected = (one(input_ids=ids).last_hidden_state for one in (compiled, backbone))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # sums in another order
