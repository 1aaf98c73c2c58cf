"""The short LoRA layer equals peft's own, and steps aside where peft does more."""

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import Linear
from tiny import tiny_encoder, train_a_little
from torch import Tensor, nn

from angle_llm import SentenceEncoder
from angle_llm.config import LoraSettings
from angle_llm.model import fast_paths, lora
from angle_llm.model.fast_paths import lora_linear

TEXTS = ["A man is eating.", "Someone eats.", "Hi"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6)])
def test_value_and_gradients_are_the_formulas(bias: bool, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight, offset = draw(4, 6), draw(4) if bias else None
    leaves = [draw(*shape).requires_grad_(), draw(3, 6).requires_grad_(), draw(4, 3).requires_grad_()]
    upstream = draw(*shape[:-1], 4)
    x, a, b = leaves
    plain = nn.functional.linear(x, weight, offset) + 0.7 * (x @ a.T) @ b.T
    short = lora_linear(x, weight, offset, a, b, 0.7)
    torch.testing.assert_close(short, plain, rtol=1e-14, atol=1e-14)  # sums of six float64 terms
    for one, other in zip(
        torch.autograd.grad(short, leaves, upstream), torch.autograd.grad(plain, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(
        lambda *given: lora_linear(given[0], weight, offset, given[1], given[2], 0.7), leaves
    )


def adapted(dtype: torch.dtype) -> SentenceEncoder:
    """The same weights in every dtype: those that bfloat16 can hold."""
    encoder = tiny_encoder("qwen2", torch.bfloat16)  # with biases
    for parameter in encoder.model.parameters():
        parameter.data = parameter.data.to(dtype)
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model)
    return encoder


def gradients(encoder: SentenceEncoder) -> list[Tensor]:
    """The rows, and the gradient of their squares' sum for every weight of the adapter."""
    plan = encoder.plan(TEXTS, 10_000)
    rows = torch.cat([encoder.model(**micro.inputs(torch.device("cpu"))) for micro in plan.micro_batches])
    rows.square().sum().backward()  # type: ignore[no-untyped-call]
    return [rows.detach(), *(p.grad for p in encoder.model.parameters() if p.grad is not None)]


def error(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    assert len(found) == len(expected) > 1
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def test_an_adapted_model_computes_what_peft_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    short, short_half = adapted(torch.float32), adapted(torch.bfloat16)
    monkeypatch.setattr(lora, "shorten", lambda model: None)
    plain, plain_half = adapted(torch.float32), adapted(torch.bfloat16)
    for encoder, expected in ((short, False), (short_half, False), (plain, True), (plain_half, True)):
        kinds = {type(layer) for layer in encoder.model.modules() if isinstance(layer, Linear)}
        assert (kinds == {Linear}) == expected
    truth = gradients(plain)
    assert max(error(gradients(short), truth)) < 1e-5  # float32, sums in another order
    # In bfloat16 both are some percent off, by the rounding of every state; rounding the adapter's products adds little.
    ours, pefts = error(gradients(short_half), truth), error(gradients(plain_half), truth)
    assert sum(ours) < 1.5 * sum(pefts), (sum(ours), sum(pefts))
    assert all(p.dtype == torch.float32 for p in short_half.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("settings", [LoraSettings(rank=2, dropout=0.5), LoraSettings(rank=2, dora=True)])
def test_dropout_and_dora_are_pefts(settings: LoraSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("the short way knows plain LoRA only")

    encoder = tiny_encoder("llama")
    encoder.add_lora(settings)
    monkeypatch.setattr(fast_paths, "lora_linear", refuse)
    encoder.model.train()
    plan = encoder.plan(TEXTS, 10_000)
    assert encoder.model(**plan.micro_batches[0].inputs(torch.device("cpu"))).requires_grad


def test_merging_is_pefts() -> None:
    encoder = tiny_encoder("llama")
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    train_a_little(encoder.model)
    adapted = encoder.encode(TEXTS)
    encoder.model.backbone = encoder.model.backbone.merge_and_unload()
    merged = encoder.encode(TEXTS)
    assert abs(merged - adapted).max() < 1e-5 * abs(adapted).max() + 1e-5
    assert abs(merged - tiny_encoder("llama").encode(TEXTS)).max() > 1e-2, "the adapter did something"
