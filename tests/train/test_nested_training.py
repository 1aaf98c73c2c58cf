"""Nested training is exact: one pass gives the loss and the gradients of separately computed, truncated encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import KINDS, tiny_backbone
from tiny_tokenizers import TOKENIZERS
from torch import Tensor
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.config import LoraSettings, NestedSettings
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import ScoredPair, Triple
from angle_llm.losses import AngleObjective, NestedObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.micro_batches import PrefixSharing
from angle_llm.train.step import StepResult, boundary_step

BATCH = TextBatch.from_examples(
    [
        Triple("A man is eating a large meal.", "Someone eats.", "Nobody is eating."),
        Triple("A man is eating a large meal.", "A person has food.", "A man sleeps on the grass behind the house."),
        ScoredPair("Shares rose in London.", "Stocks went up.", 0.8),
        ScoredPair("Shares rose in London.", "Someone eats.", 0.1),
    ]
)
PLAIN = AngleObjective(cosine_weight=1.0, in_batch_weight=2.0, angle_weight=0.5)
KEEP, CACHE = 10**9, 0


@pytest.fixture(autouse=True)
def _float64_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' LlamaRMSNorm computes in float32 whatever the dtype, which would hide anything below 2e-7."""

    def forward(norm: Any, states: Tensor) -> Tensor:
        scaled: Tensor = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * scaled

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def adapted_encoder(kind: str, pooling: str | None = None) -> SentenceEncoder:
    """With an adapter that does something: a fresh one is zero on one side."""
    encoder = SentenceEncoder(tiny_backbone(kind), TOKENIZERS[KINDS[kind].tokenizer](), pooling=pooling)
    encoder.add_lora(LoraSettings(rank=4, alpha=8))
    encoder.model.to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10
    return encoder


def step(encoder: SentenceEncoder, objective: Any, graph_tokens: int, share: float = 1.0) -> StepResult:
    plan = encoder.plan(BATCH.texts, 64)
    assert len(plan.groups) > 1
    return boundary_step(encoder.model, plan, BATCH, objective, graph_tokens=graph_tokens, share=share)


def take_gradients(encoder: SentenceEncoder) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in encoder.model.named_parameters() if p.grad is not None}
    encoder.model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("graph_tokens", [KEEP, CACHE], ids=["kept", "cached"])
@pytest.mark.parametrize(
    ("kind", "pooling", "way"),
    [
        ("llama", None, "trie"),
        ("llama", None, "padded"),
        ("gpt2", None, "trie"),
        ("llama", "mean", "padded"),
        ("bert", None, "padded"),
        ("bert", "cls", "padded"),
    ],
)
def test_one_pass_equals_truncated_encoders_one_by_one_in_loss_and_gradient(
    kind: str, pooling: str | None, way: str, graph_tokens: int
) -> None:
    encoder = adapted_encoder(kind, pooling)
    if way == "padded":
        encoder.sharing = PrefixSharing("the test asks")
    last = encoder.layers
    nested = NestedObjective(PLAIN, [8, 20], [1], [1, 2, 3], [2, 3])

    expected = 0.0
    for layer in (1, None):
        for dimension in (8, 20, None):
            short = encoder.truncated(dimensions=dimension, layers=layer)
            assert short.layers == (layer or last)
            weight = nested.weight(layer, dimension)
            # It has the same parameters, so gradients of all add up in them.
            expected += weight * step(short, PLAIN, graph_tokens, weight).loss
    separately = take_gradients(encoder)

    encoder.model.read_layers(nested.layers)
    result = step(encoder, nested, graph_tokens)
    assert result.layout == way
    assert result.cached == (graph_tokens == CACHE)
    # Sums of a few hundred float64 terms in another order: 1e-16 a term.
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert_close(take_gradients(encoder), separately, rtol=1e-10, atol=1e-12)


def test_every_layer_learns_from_the_shallow_vector_only_what_lies_below_it() -> None:
    encoder = adapted_encoder("llama")
    encoder.model.read_layers([1])
    step(encoder, NestedObjective(PLAIN, layers=[1], layer_weights=[1, 0]), KEEP)
    moved = {name.split("layers.")[1][0] for name, gradient in take_gradients(encoder).items() if gradient.any()}
    assert moved == {"0"}


def test_a_run_trains_logs_and_keeps_a_plain_encoder(tmp_path: Path) -> None:
    """`encode` and what is saved know nothing of the cuts; `metrics.jsonl` has the loss of each."""
    import json

    from tiny import save_tiny_base

    from angle_llm.config import DataSettings, EvaluationSettings, ModelSettings, TrainSettings
    from angle_llm.run import fine_tune

    settings = TrainSettings(
        run_dir=str(tmp_path / "run"),
        model=ModelSettings(path=str(save_tiny_base("llama", tmp_path / "base")), dtype="float32"),
        lora=LoraSettings(rank=2),
        data=DataSettings(limit=16),
        nested=NestedSettings(dimensions=[8], layers=[2]),
        evaluation=EvaluationSettings(pairs="starter:graded_pairs.tsv"),
        batch_size=8,
        max_steps=2,
    )
    encoder = SentenceEncoder.from_pretrained(fine_tune(settings))
    assert encoder.encode(["A man eats."]).shape == (1, KINDS["llama"].dimensions)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == 2
    cuts = ("loss/in_batch", "loss/dim8", "loss/layer2", "loss/layer2_dim8")
    for line in trained:
        assert line["loss"] == pytest.approx(sum(line[name] for name in cuts) / 4, rel=1e-5)
