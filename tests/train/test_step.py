"""The step is exact: kept graphs, cached graphs, truncated encoders and plain back-propagation give one gradient."""

import weakref
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import one_in
from runs import float64_forward, largest_difference
from tiny import KINDS, POSITIONS, QUICK_KINDS, tiny_backbone
from tiny_tokenizers import TOKENIZERS
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import PositivePair, ScoredPair, Triple
from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Objective, ObjectiveValue, Part, Relation
from angle_llm.losses.terms import mean_cosines
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import DepthsHead, Head
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.settings.train import LoraSettings
from angle_llm.train.step import DivergedError, StepResult, boundary_step, loss_and_gradient

EXAMPLES = [
    Triple("A man is eating a large meal.", "Someone eats.", "Nobody is eating."),
    Triple("A man is eating a large meal.", "A person has food.", "A man sleeps on the grass behind the old house."),
    ScoredPair("Shares rose in London.", "Stocks went up.", 0.8),
    ScoredPair("Shares rose in London.", "Someone eats.", 0.1),
    PositivePair("How do I clean a kettle?", "What removes scale from a kettle?"),
    PositivePair("Two dogs run.", "Two dogs run."),
]
OBJECTIVE = AngleObjective(cosine_weight=1.0, in_batch_weight=2.0, angle_weight=0.5, contrastive_form="symmetric")
KEEP, CACHE = 10**9, 0


@pytest.fixture
def _float64_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_forward)


def trainable_encoder(
    kind: str, dtype: torch.dtype, dropout: float = 0.0, pooling: str | None = None
) -> SentenceEncoder:
    """A tiny encoder with a non-zero adapter (a new one is zero)."""
    backbone = tiny_backbone(kind, window=POSITIONS if kind in ("mistral", "gemma2") else None)
    encoder = SentenceEncoder(backbone, TOKENIZERS[KINDS[kind].tokenizer](), pooling=pooling)
    encoder.add_lora(LoraSettings(rank=4, alpha=8, dropout=dropout))
    encoder.model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) / 10
    return encoder


def step(encoder: SentenceEncoder, micro_batch_tokens: int, graph_tokens: int, **named: Any) -> StepResult:
    batch = TextBatch.from_examples(EXAMPLES)
    plan = encoder.plan(batch.texts, micro_batch_tokens)
    objective = named.pop("objective", OBJECTIVE)
    return boundary_step(encoder.model, plan, batch, objective, graph_tokens=graph_tokens, **named)


def force(layout: str, encoder: SentenceEncoder) -> SentenceEncoder:
    """The trie, or packing, wherever it computes fewer tokens; or padding always."""
    encoder.layouts = LayoutSupport(layout, "the test needs it", causal=encoder.model.options.causal)  # type: ignore[arg-type]
    return encoder


def take_gradients(module: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return gradients


def plain_gradients(encoder: SentenceEncoder) -> tuple[float, dict[str, Tensor]]:
    """No boundary, no trie: every text alone through the plain backbone, one graph, one backward."""
    batch = TextBatch.from_examples(EXAMPLES)
    rows = []
    for ids in encoder.tokenize(batch.texts):
        ids_1T = torch.tensor([ids])
        if encoder.model.options.causal:
            rows.append(encoder.model.backbone(input_ids=ids_1T, use_cache=False).last_hidden_state[:, -1])
        else:
            rows.append(encoder.model(ids_1T, torch.ones_like(ids_1T)))
    value = OBJECTIVE(torch.cat(rows), batch.left, batch.right, batch.score)
    value.loss.backward()
    return float(value.loss.detach()), take_gradients(encoder.model)


@one_in(
    5,
    "model, micro_batch_tokens, graph_tokens",
    [
        ("llama", "trie"),
        ("llama", "packed"),
        ("llama", "padded"),
        ("llama-tied", "trie"),
        ("bert", "packed"),
        ("bert", "padded"),
        ("roberta", "packed"),
    ],
    [1, 60, 10**6],
    [KEEP, CACHE],
)
@pytest.mark.usefixtures("_float64_norm")
def test_any_micro_batches_kept_or_cached_equal_plain_back_propagation_in_float64(
    model: tuple[str, str], micro_batch_tokens: int, graph_tokens: int
) -> None:
    kind, layout = model
    encoder = force(layout, trainable_encoder(kind, torch.float64))
    loss, expected = plain_gradients(encoder)
    result = step(encoder, micro_batch_tokens, graph_tokens)
    assert result.plan.layout == (layout if micro_batch_tokens > 1 else result.plan.layout)
    assert result.cached == (graph_tokens == CACHE)
    # Sums of a few hundred float64 terms in another order: 1e-16 a term.
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert largest_difference(expected, take_gradients(encoder.model)) < 1e-12


@pytest.mark.parametrize("layout", ["trie", "padded"])
@pytest.mark.usefixtures("_float64_norm")
def test_the_kernel_of_long_texts_gives_the_same_gradient(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = force(layout, trainable_encoder("llama", torch.float64))
    loss, expected = plain_gradients(encoder)
    for plain_up_to in (0, 10**6):
        monkeypatch.setattr("angle_llm.model.layout.attention.PLAIN_ATTENTION_TOKENS", plain_up_to)
        flash: list[bool] = []
        hook = encoder.model.register_forward_pre_hook(lambda *_: flash.append(torch.backends.cuda.flash_sdp_enabled()))  # noqa: B023
        assert step(encoder, 60, KEEP).loss == pytest.approx(loss, rel=1e-12)
        hook.remove()
        assert set(flash) == {plain_up_to == 0}
        assert largest_difference(expected, take_gradients(encoder.model)) < 1e-12


CUT = "A man is eating a large meal in the old house and nobody "


@pytest.mark.parametrize(
    "examples",
    [
        [PositivePair(CUT + "looks.", CUT + "cares.")],
        [ScoredPair(CUT + "looks.", CUT + "cares.", 0.2), ScoredPair(CUT + "sees.", CUT + "cares.", 0.9)],
        [
            PositivePair(CUT + "looks.", CUT + "cares."),
            PositivePair("Hi.", "Hello."),
            PositivePair("Hi.", CUT + "sees."),
        ],
        [Triple(CUT + "looks.", "Hi.", CUT + "cares.")],
        [ScoredPair(CUT + "looks.", "Hi.", 0.2), ScoredPair(CUT + "cares.", "Hello.", 0.9)],
    ],
    ids=["one pair", "all equal", "some", "a negative of itself", "another anchor"],
)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.usefixtures("_float64_norm")
def test_texts_with_equal_ids_are_treated_as_one_text(examples: list[Any], joint: bool) -> None:
    """Two rows would be each other's hardest negatives."""
    encoder = trainable_encoder("llama", torch.float64)
    encoder = SentenceEncoder(encoder.model.backbone, encoder.tokenizer, max_length=25)

    def first_of(text: str) -> str:
        return CUT + "looks." if text.startswith(CUT) else text

    texts = [{name: first_of(value) for name, value in asdict(e).items() if isinstance(value, str)} for e in examples]
    same = [replace(example, **changed) for example, changed in zip(examples, texts, strict=True)]
    found = []
    for each in (examples, same):
        batch = TextBatch.from_examples(each)
        half = len(batch.left) // 2
        pairs = [torch.arange(half), torch.arange(half, len(batch.left))]
        parts = [Part(OBJECTIVE, 0.5, one) for one in pairs if len(one)]
        objective = MixedObjective(parts) if joint else OBJECTIVE
        result = boundary_step(encoder.model, encoder.plan(batch.texts, 60), batch, objective, graph_tokens=KEEP)
        found.append((result.loss, take_gradients(encoder.model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for name, gradient in found[1][1].items():
        assert torch.allclose(found[0][1][name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_every_kind_of_backbone_agrees_in_float32(kind: str) -> None:
    encoder = trainable_encoder(kind, torch.float32)
    loss, expected = plain_gradients(encoder)
    for graph_tokens in (KEEP, CACHE):
        result = step(encoder, 60, graph_tokens)
        assert result.plan.layout == ("trie" if encoder.model.options.causal else "packed")
        assert result.loss == pytest.approx(loss, rel=1e-5)
        # float32 sums in another order: 1e-7 a term, some hundred terms, divided by temperatures of 0.05
        assert largest_difference(expected, take_gradients(encoder.model)) < 2e-3


@one_in(5, "layout, kind, graph_tokens", ["trie", "padded", "packed"], ["llama", "bert"], [KEEP, CACHE])
def test_products_in_bfloat16_give_about_the_gradient_of_float32(kind: str, layout: str, graph_tokens: int) -> None:
    """bfloat16 has 8 bits, a relative error of 1/256 in each product; `encode` is in float32."""
    encoder = force(layout, trainable_encoder(kind, torch.float32))
    before = encoder.encode(["Two dogs run."])
    exact = step(encoder, 64, graph_tokens)
    expected = take_gradients(encoder.model)
    encoder.model = encoder.model.changed(autocasts=True)
    encoder.model.training = True  # but no dropout: its parts stay in evaluation mode
    result = step(encoder, 64, graph_tokens)
    found = take_gradients(encoder.model)
    step(encoder, 64, KEEP)
    # The first pass of a cached step is in bfloat16 too; sums of float32 in another order.
    assert largest_difference(take_gradients(encoder.model), found) < 2e-3
    assert 0 < abs(result.loss - exact.loss) < 0.02 * exact.loss
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    one, other = (torch.cat([value.flatten() for value in of.values()]) for of in (found, expected))
    assert 1e-4 < (one - other).norm() / other.norm() < 0.1
    assert np.array_equal(encoder.encode(["Two dogs run."]), before)


@pytest.mark.parametrize("graph_tokens", [KEEP, CACHE], ids=["kept", "cached"])
@pytest.mark.parametrize(
    ("kind", "pooling", "layout"),
    [
        ("llama", None, "trie"),
        pytest.param("llama", None, "padded", marks=pytest.mark.slow),
        ("gpt2", None, "trie"),
        ("llama", "mean", "padded"),
        pytest.param("bert", None, "padded", marks=pytest.mark.slow),
        ("bert", "cls", "padded"),
    ],
)
@pytest.mark.usefixtures("_float64_norm")
def test_a_nested_step_equals_the_sum_over_truncated_encoders(
    kind: str, pooling: str | None, layout: str, graph_tokens: int
) -> None:
    encoder = trainable_encoder(kind, torch.float64, pooling=pooling)
    if layout == "padded":
        force(layout, encoder)
    last = encoder.layers
    nested = NestedObjective(OBJECTIVE, dimensions=[8, 20], layers=[1])
    expected = 0.0
    for layers in (1, None):
        for dimensions in (8, 20, None):
            short = encoder.truncated(dimensions=dimensions, layers=layers)  # its gradients add up in the same weights
            assert short.layers == (layers or last)
            expected += step(short, 64, graph_tokens, weight=1 / 6).loss / 6
    separately = take_gradients(encoder.model)

    encoder.model = encoder.model.changed(DepthsHead(encoder.model, nested.layers))
    encoder.model.training = True  # but no dropout: its parts stay in evaluation mode
    result = step(encoder, 64, graph_tokens, objective=nested)
    assert (result.plan.layout, result.cached) == (layout, graph_tokens == CACHE)
    assert result.loss == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(take_gradients(encoder.model), separately, rtol=1e-10, atol=1e-12)


def test_dropout_is_the_same_in_both_passes_of_a_cached_step() -> None:
    encoder = trainable_encoder("llama", torch.float32, dropout=0.5)
    encoder.model.train()
    results = []
    for graph_tokens in (KEEP, CACHE):
        torch.manual_seed(5)
        loss = step(encoder, 60, graph_tokens).loss
        results.append((loss, take_gradients(encoder.model), torch.rand(1)))
    (kept_loss, kept, kept_next), (cached_loss, cached, cached_next) = results
    assert cached_loss == kept_loss
    assert largest_difference(kept, cached) < 1e-4  # float32, other order of sums
    assert kept_next == cached_next, "the generator is left where a kept step leaves it"
    torch.manual_seed(6)
    assert step(encoder, 60, KEEP).loss != kept_loss, "dropout was on"


@one_in(
    3,
    "model, nested, graph_tokens",
    [
        ("llama", None, "trie"),
        ("llama", None, "padded"),
        ("llama", "mean", "padded"),
        ("qwen3", None, "trie"),
        ("gpt2", None, "trie"),
        ("opt", None, "trie"),
        ("bert", None, "padded"),
        ("roberta", "cls", "padded"),
    ],
    [False, True],
    [KEEP, CACHE],
)
@pytest.mark.usefixtures("_float64_norm")
def test_layers_computed_again_give_the_same_gradient_with_dropout(
    model: tuple[str, str | None, str], nested: bool, graph_tokens: int
) -> None:
    kind, pooling, layout = model
    encoder = force(layout, trainable_encoder(kind, torch.float64, dropout=0.3, pooling=pooling))
    objective = NestedObjective(OBJECTIVE, dimensions=[8], layers=[1]) if nested else OBJECTIVE
    encoder.model = encoder.model.changed(DepthsHead(encoder.model, [1]) if nested else Head())
    encoder.model.training = True  # but no dropout: its parts stay in evaluation mode
    encoder.model.train()
    calls: list[object] = []
    layer: Any = LayerStack.of(encoder.model.backbone).layers[0]
    next(layer.children()).register_forward_hook(lambda module, *_: calls.append(module))
    results = []
    for enabled in (False, True):
        encoder.model.checkpoint_activations(enabled)
        calls.clear()
        torch.manual_seed(5)
        result = step(encoder, 60, graph_tokens, objective=objective)
        assert (result.plan.layout, result.cached) == (layout, graph_tokens == CACHE)
        results.append((result.loss, take_gradients(encoder.model), len(calls), torch.rand(1)))
    (loss, gradients, once, next_number), (again_loss, again_gradients, twice, again_number) = results
    assert again_loss == loss
    assert largest_difference(gradients, again_gradients) < 1e-12
    passes = 2 if graph_tokens == CACHE else 1
    assert twice == once * (passes + 1) / passes, "a layer is computed once more for the backward pass"
    assert next_number == again_number, "the generator is left where the step without checkpointing leaves it"


def test_the_graph_of_the_loss_is_freed_before_the_second_pass() -> None:
    """It holds the rows of the whole batch, whose memory the second pass may need."""
    encoder = trainable_encoder("llama", torch.float32)
    given: list[weakref.ref[Tensor]] = []
    there: list[bool] = []

    class Observed(Objective):
        def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
            given.append(weakref.ref(embeddings))
            return OBJECTIVE(embeddings, relation)

    encoder.model.register_forward_pre_hook(lambda *_: there.extend(rows() is not None for rows in given))
    assert step(encoder, 60, CACHE, objective=Observed()).cached
    assert len(there) > 1, "the second pass has several micro-batches"
    assert not any(there)


@pytest.mark.parametrize("graph_tokens", [KEEP, CACHE], ids=["kept", "cached"])
def test_a_loss_that_is_not_finite_stops_the_step(graph_tokens: int) -> None:
    encoder = trainable_encoder("llama", torch.float32)
    next(p for p in encoder.model.parameters() if p.requires_grad).data.fill_(float("nan"))
    with pytest.raises(DivergedError, match=r"loss is nan .*embeddings"):
        step(encoder, 60, graph_tokens)


@pytest.mark.parametrize("rows", [2, 7])
def test_mean_cosines_equal_a_loop_over_pairs(rows: int) -> None:
    """With repeated pairs, pairs in both orders, and pairs of a text with itself."""
    generator = torch.Generator().manual_seed(rows)
    rows_BD = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    left, right = (torch.randint(rows, (9,), generator=generator) for _ in range(2))
    left, right = torch.cat([left, right[:2]]), torch.cat([right, left[:2]])
    score = torch.rand(len(left), generator=generator, dtype=torch.float64)
    found = mean_cosines(rows_BD, Relation(left, right, score))

    def cosine(a: int, b: int) -> float:
        return float(torch.cosine_similarity(rows_BD[a], rows_BD[b], dim=0))

    kinds: dict[str, list[float]] = {"positives": [], "negatives": [], "in_batch": []}
    for a, b, value in zip(left.tolist(), right.tolist(), score.tolist(), strict=True):
        if a != b:
            kinds["positives" if value > 0.5 else "negatives"].append(cosine(a, b))
    scored = {frozenset(pair) for pair in zip(left.tolist(), right.tolist(), strict=True)}
    kinds["in_batch"] = [cosine(a, b) for a in range(rows) for b in range(a) if {a, b} not in scored]
    expected = {name: sum(values) / len(values) for name, values in kinds.items() if values}
    if {"positives", "in_batch"} <= expected.keys():
        expected["margin"] = expected["positives"] - expected["in_batch"]
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-12)
    assert ("in_batch" in found) == (rows > 2)


def test_mean_cosines_of_nested_vectors_are_of_all_layers() -> None:
    rows_BD = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    relation = Relation(torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([1.0, 0.0]))
    objective = NestedObjective(AngleObjective(), layers=(1,))
    value, _ = loss_and_gradient(objective, relation, 1.0, rows_BD)
    expected = mean_cosines(rows_BD[:, :4], relation)
    assert {name: float(one) for name, one in value.cosines.items()} == {n: float(one) for n, one in expected.items()}
