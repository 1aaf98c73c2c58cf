"""LoRA layers with the same input, which are computed together: q, k and v; gate and up."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composites import CONFIGS
from tiny import tiny_encoder, train_a_little
from tiny_tokenizers import TOKENIZERS
from torch import Tensor, nn
from transformers import AutoModel

from angle_llm import SentenceEncoder
from angle_llm.model.layers import fused_lora
from angle_llm.model.layers.fused_lora import FusedLora, PlainLora, SharedInput, lora_linears
from angle_llm.model.layers.quantization import quantize
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man is eating.", "Someone eats.", "A man is eating bread.", "Hi", "Hi"]


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (0, 2)])
def test_layers_of_one_input_equal_their_formulas_in_value_and_gradient(used: tuple[int, ...]) -> None:
    """With biases, and other ranks and sizes of each layer. A layer that is not used has no gradient."""
    sizes = ((4, 2), (5, 3), (2, 1))
    bases = [nn.Linear(6, outputs, dtype=torch.float64).requires_grad_(False) for outputs, _ in sizes]
    lora_a = [draw(rank, 6, seed=rank).requires_grad_() for _, rank in sizes]
    lora_b = [draw(*size, seed=9).requires_grad_() for size in sizes]
    x = draw(2, 7, 6).requires_grad_()

    def together(x: Tensor, *matrices: Tensor) -> list[Tensor]:
        layers = [PlainLora(base, *pair, 0.7) for base, *pair in zip(bases, matrices[:3], matrices[3:], strict=True)]
        return lora_linears(x, layers)

    def alone(x: Tensor, *matrices: Tensor) -> list[Tensor]:
        return [base(x) + 0.7 * (x @ a.T) @ b.T for base, a, b in zip(bases, matrices[:3], matrices[3:], strict=True)]

    leaves = [x, *lora_a, *lora_b]
    results = []
    for function in (together, alone):
        values = function(*leaves)
        upstream = [draw(*value.shape, seed=3) for value in values]
        some = [values[index] for index in used], [upstream[index] for index in used]
        gradients = torch.autograd.grad(some[0], leaves, some[1], allow_unused=True)
        assert [gradient is None for gradient in gradients[1:4]] == [index not in used for index in range(3)]
        results.append([*values, *(gradient for gradient in gradients if gradient is not None)])
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)  # sums of at most 14 terms in float64
    assert torch.autograd.gradcheck(lambda *given: together(*given)[used[0]], leaves)


def encoder_of(kind: str, dtype: torch.dtype = torch.float64, **lora: Any) -> SentenceEncoder:
    if kind in CONFIGS:
        torch.manual_seed(0)
        backbone = AutoModel.from_config(CONFIGS[kind]().text_config)
        encoder = SentenceEncoder(backbone, TOKENIZERS["llama2"]())
    else:
        encoder = tiny_encoder(kind)
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(**{"rank": 4, "alpha": 8, **lora}))
    encoder.model.to(dtype)
    train_a_little(encoder.model.train())
    return encoder


def values_and_gradients(encoder: SentenceEncoder) -> list[Tensor | None]:
    encoder.model.zero_grad()
    rows = [encoder.model(**micro.inputs(torch.device("cpu"))) for micro in encoder.plan(TEXTS, 40).micro_batches]
    torch.cat(rows).square().sum().backward()  # type: ignore[no-untyped-call]
    return [*rows, *(parameter.grad for parameter in encoder.model.parameters() if parameter.requires_grad)]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers of layers that are computed together."""
    numbers: list[int] = []

    def count(x: Tensor, layers: list[PlainLora], *others: Any) -> list[Tensor]:
        numbers.append(len(layers))
        return lora_linears(x, layers, *others)

    with patch.object(fused_lora, "lora_linears", count):
        yield numbers


def separate(*_: Any) -> None:
    """In place of `SharedInput.output`: compute every layer alone."""


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("llama", False), ("llama", True), ("qwen2", False), ("gemma2", True), ("gemma3n", True), ("gemma4", False)],
)
def test_a_model_equals_the_model_whose_layers_are_computed_alone(kind: str, checkpointing: bool) -> None:
    """Also with biases (Qwen2), layers without keys (Gemma), the last layer for last tokens, and layers computed again."""
    encoder = encoder_of(kind)
    encoder.model.checkpoint_activations(checkpointing)
    with patch.object(SharedInput, "output", separate), counted() as numbers:
        expected = values_and_gradients(encoder)
    assert set(numbers) == {1}
    with counted() as numbers:
        found = values_and_gradients(encoder)
    assert {2, 3} <= set(numbers)
    assert [one is None for one in found] == [one is None for one in expected]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # sums in another order


@pytest.mark.parametrize("case", ["two layers", "dropout", "autocast", "inference", "evaluation"])
def test_layers_are_computed_alone_where_they_must_be(case: str) -> None:
    encoder = tiny_encoder("llama")
    torch.manual_seed(0)
    targets = ("q_proj", "v_proj") if case == "two layers" else ("all-linear",)
    encoder.add_lora(LoraSettings(rank=4, alpha=8, dropout=0.3 if case == "dropout" else 0.0, targets=targets))
    train_a_little(encoder.model.train())

    def compute() -> list[Tensor | None]:
        torch.manual_seed(1)
        if case in ("inference", "evaluation"):
            with torch.inference_mode() if case == "inference" else torch.no_grad():
                return [encoder.model(**encoder.plan(TEXTS, 1000).micro_batches[0].inputs(torch.device("cpu")))]
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            return values_and_gradients(encoder)

    with patch.object(SharedInput, "output", separate):
        expected = compute()
    with counted() as numbers:
        found = compute()
    together = {"two layers": {2}, "dropout": {1}, "autocast": set(), "inference": {1}, "evaluation": {1, 2, 3}}
    assert set(numbers) == together[case]
    tolerance = 1e-4 if {2, 3} & set(numbers) else 0  # float32 sums in another order
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # inside torch.compile
def test_torch_compile_traces_a_model_in_one_graph() -> None:
    backbone: Any = encoder_of("llama").model.backbone
    ids = torch.tensor([[5, 6, 7, 8]])
    compiled: Any = torch.compile(backbone, backend="eager", fullgraph=True)
    found, expected = (one(input_ids=ids).last_hidden_state for one in (compiled, backbone))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # sums in another order


def attention_of(encoder: SentenceEncoder) -> tuple[nn.Module, list[FusedLora]]:
    attention = next(layer for layer in encoder.model.modules() if hasattr(layer, "q_proj"))
    return attention, [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]


@pytest.mark.parametrize(
    "bits", [*(pytest.param(bits, marks=pytest.mark.needs("bitsandbytes")) for bits in (4, 8)), "fp8"]
)
def test_layers_of_a_quantized_base_equal_layers_computed_alone(bits: Any) -> None:
    encoder = tiny_encoder("llama")
    quantize(encoder.model.backbone, bits)
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model.train())
    _, layers = attention_of(encoder)
    leaves = [
        draw(9, 32).float().requires_grad_(),
        *(one for layer in layers for one in layer.parameters() if one.requires_grad),
    ]
    results = []
    for shared in (SharedInput(layers), None):
        for layer in layers:
            layer.shared = shared
        with counted() as numbers:
            values = [layer(leaves[0]) for layer in layers]
        assert numbers == ([1, 1, 1] if shared is None else [3])
        results.append([*values, *torch.autograd.grad(values, leaves, [draw(*one.shape).float() for one in values])])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)  # float32 sums in another order


def test_an_output_is_used_for_the_tensor_it_was_computed_from_only() -> None:
    """Not for an equal tensor, for a tensor that was changed in place, or twice."""
    _, layers = attention_of(encoder_of("llama"))
    x = draw(3, 32)

    def outputs(change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        shared = SharedInput(layers)
        given = x.clone()
        first = shared.output(layers[0], given)
        changed = change(given)
        others = [shared.output(layer, changed) for layer in layers]
        return [one for one in (first, *others) if one is not None], [layer(changed) for layer in layers]

    with torch.no_grad():
        found, expected = outputs(lambda given: given)
        assert len(found) == 3
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
        assert len(outputs(torch.clone)[0]) == 1
        assert len(outputs(lambda given: given.add_(1))[0]) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_after_a_forward_pass(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, too, such as a lack of memory between the layers."""
    encoder = encoder_of("llama")
    attention, layers = attention_of(encoder)
    outputs: list[weakref.ref[Tensor]] = []

    def remember(*given: Any) -> list[Tensor]:
        values = lora_linears(*given)
        outputs.extend(weakref.ref(value) for value in values)
        return values

    def fail(*_: Any) -> None:
        assert all(layer.shared is not None for layer in layers)
        raise torch.OutOfMemoryError("no message")

    monkeypatch.setattr(fused_lora, "lora_linears", remember)
    if fails:  # k and v are not called
        monkeypatch.setattr(layers[1], "forward", fail)
    inputs = encoder.plan(TEXTS, 40).micro_batches[0].inputs(torch.device("cpu"))
    try:
        encoder.model(**inputs)
    except torch.OutOfMemoryError:
        assert fails
    assert len(outputs) > 2
    assert all(output() is None for output in outputs)
    assert all(layer.shared is None for layer in encoder.model.modules() if isinstance(layer, FusedLora))
    monkeypatch.undo()
    fused_lora.use_fused_lora(encoder.model)  # again, as after dequantization
    assert (len(attention._forward_pre_hooks), len(attention._forward_hooks)) == (1, 1)
