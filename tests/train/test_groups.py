"""Accumulated batches that are planned and encoded together give the gradient of the batches one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import one_in
from runs import float64_forward, largest_difference
from test_step import CACHE, KEEP, OBJECTIVE, force, take_gradients, trainable_encoder
from tiny import tiny_encoder
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example, PositivePair, ScoredPair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.losses import (
    AngleObjective,
    FunctionTerm,
    NestedObjective,
    Objective,
    ObjectiveValue,
    Relation,
    SumOfTerms,
)
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import DepthsHead, Head
from angle_llm.settings.train import DataSource
from angle_llm.train.batches import BatchPlanner, PlannedBatch, PlannedGroup
from angle_llm.train.step import DivergedError, StepResult, boundary_step, group_step
from angle_llm.train.token_budget import TokenBudget


@pytest.fixture
def _float64_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_forward)


pytestmark = pytest.mark.usefixtures("_float64_norm")
BATCHES: list[list[Example]] = [  # "A man eats." is a text of three batches, and a positive of another text in each
    [Triple("A man eats.", "Someone eats.", "Nobody eats."), Triple("Two dogs run.", "Dogs move.", "A cat sleeps.")],
    [ScoredPair("A man eats.", "A person has food.", 0.9), ScoredPair("Shares rose.", "Stocks went up.", 0.4)],
    [
        PositivePair("Someone is there.", "A man eats."),
        PositivePair("Dogs move.", "Animals move."),
        PositivePair("A", "B"),
    ],
]
NLI = load_examples(DataSource(limit=128)).examples

BUDGET = TokenBudget(60, KEEP)


def batches_of(examples: Sequence[Sequence[Example]], loss: Any = OBJECTIVE) -> list[PlannedBatch]:
    return [PlannedBatch(TextBatch.from_examples(some), loss, {}) for some in examples]


def planner(encoder: SentenceEncoder, processes: int = 1) -> BatchPlanner:
    return BatchPlanner(encoder, Mixture([LoadedSet("nli", NLI)]), [OBJECTIVE], processes)


def one_by_one(made: BatchPlanner, batches: Sequence[PlannedBatch], budget: TokenBudget = BUDGET) -> list[PlannedGroup]:
    return [made.grouped([batch], budget)[0] for batch in batches]


def run(encoder: SentenceEncoder, groups: Sequence[PlannedGroup], graph_tokens: int) -> list[StepResult]:
    weight = 1 / sum(len(group.batches) for group in groups)
    model = encoder.model
    return [group_step(model, plan, some, graph_tokens=graph_tokens, weight=weight) for some, plan in groups]


@one_in(
    3,
    "model, micro_batch_tokens, graph_tokens",
    [
        ("llama", "trie", False),
        ("llama", "padded", False),
        ("bert", "packed", False),
        ("bert", "padded", False),
        ("llama", "trie", True),
    ],
    [40, 10**6],
    [KEEP, CACHE],
)
def test_batches_together_have_the_gradient_of_the_batches_one_by_one(
    model: tuple[str, str, bool], micro_batch_tokens: int, graph_tokens: int
) -> None:
    kind, layout, nested = model
    encoder = trainable_encoder(kind, torch.float64)
    force(layout, encoder)
    encoder.model = encoder.model.changed(DepthsHead(encoder.model, [1]) if nested else Head())
    encoder.model.training = True  # but no dropout: its parts stay in evaluation mode
    loss = NestedObjective(OBJECTIVE, dimensions=[8], layers=[1]) if nested else OBJECTIVE
    batches = batches_of(BATCHES, loss)
    made, budget = planner(encoder), TokenBudget(micro_batch_tokens, KEEP)
    alone = run(encoder, one_by_one(made, batches, budget), graph_tokens)
    expected = take_gradients(encoder.model)

    groups = made.grouped(batches, budget)
    assert [len(group.batches) for group in groups] == [3]
    (together,) = run(encoder, groups, graph_tokens)
    assert (together.plan.layout, together.cached) == (layout, graph_tokens == CACHE)
    assert [each.loss for each in together.losses] == pytest.approx([step.loss for step in alone], rel=1e-12)
    assert together.loss == pytest.approx(sum(step.loss for step in alone) / 3, rel=1e-12)
    for one, step in zip(together.losses, alone, strict=True):
        assert one.parts == pytest.approx(step.losses[0].parts, rel=1e-12)
    assert largest_difference(expected, take_gradients(encoder.model)) < 1e-12
    for name in ("texts", "pairs"):
        assert getattr(together, name) == sum(getattr(step, name) for step in alone)
    assert together.plan.logical_tokens == sum(step.plan.logical_tokens for step in alone)
    assert together.plan.unique < together.texts, "a text of two batches is encoded once"


def test_a_text_of_another_batch_is_no_negative() -> None:
    """The objective gets the rows of the batch only, in the order in which the batch alone would have them."""
    encoder = trainable_encoder("llama", torch.float64)
    given: list[Tensor] = []

    class Observed(Objective):
        def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
            given.append(embeddings.detach())
            return OBJECTIVE(embeddings, relation)

    made, batches = planner(encoder), batches_of(BATCHES, Observed())
    run(encoder, [*made.grouped(batches, BUDGET), *one_by_one(made, batches)], KEEP)
    assert [len(rows_BD) for rows_BD in given[:3]] == [len(each.batch) for each in batches]
    for together, alone in zip(given[:3], given[3:], strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-14)


def test_batches_of_a_mixture_keep_their_losses_and_prompts() -> None:
    encoder = trainable_encoder("llama", torch.float64)
    sets = [LoadedSet("scored", BATCHES[1], prompt="plain"), LoadedSet("positive", [*BATCHES[2], *BATCHES[0]])]
    losses = [AngleObjective(cosine_weight=1, in_batch_weight=0), AngleObjective(in_batch_weight=2)]
    indices = [[0, 1], [2, 5, 3], [0, 2, 4]]  # one dataset, the other, and both
    made = BatchPlanner(encoder, Mixture(sets), losses, 1)
    ((_, groups),) = made.steps(iter([(0, indices)]), BUDGET)
    ((batches, _),) = groups
    expected = [{"scored": 2, "positive": 0}, {"scored": 0, "positive": 3}, {"scored": 1, "positive": 2}]
    assert [each.counts for each in batches] == expected
    found = []
    for some in (one_by_one(made, batches), groups):
        steps = run(encoder, some, KEEP)
        found.append(([each for step in steps for each in step.losses], take_gradients(encoder.model)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-12)
    assert [set(each.parts) for each in found[1][0]] == [{"cosine"}, {"in_batch"}, {"cosine", "in_batch"}]
    assert largest_difference(found[0][1], found[1][1]) < 1e-12


@pytest.mark.parametrize("graph_tokens", [KEEP, CACHE], ids=["kept", "cached"])
def test_one_batch_whose_loss_is_not_finite_stops_the_group(graph_tokens: int) -> None:
    encoder = trainable_encoder("llama", torch.float64)
    infinite = SumOfTerms(FunctionTerm("angle", lambda rows_BD, _: rows_BD.sum() * torch.inf))
    batches = batches_of(BATCHES)
    batches[1] = batches[1]._replace(loss=infinite)
    with pytest.raises(DivergedError, match=r"loss is -?inf \(angle -?inf\)"):
        run(encoder, planner(encoder).grouped(batches, BUDGET), graph_tokens)


@pytest.mark.parametrize("processes", [1, 2])
def test_tensors_of_the_next_steps_are_made_in_advance_for_one_rank(processes: int) -> None:
    """And give the same losses and gradients."""
    encoder = trainable_encoder("llama", torch.float64)
    made, rank = planner(encoder, processes), processes - 1
    ((_, groups),) = made.steps(iter([(0, [[0, 1, 2, 3], [4, 5, 6, 7]])]), TokenBudget(60, KEEP), rank)
    for _, plan in groups:
        assert len(plan.shares[rank]) > 1
        for process in range(processes):
            first, second = ([group.make() for group in plan.share(process)] for _ in range(2))
            same = [one is other for one, other in zip(first, second, strict=True)]
            assert all(same) if process == rank else not any(same[: len(plan.shares[process])])
    if processes == 1:
        found = []
        for some in (groups, made.grouped([batch for group, _ in groups for batch in group], TokenBudget(60, KEEP))):
            steps = run(encoder, some, KEEP)
            found.append(([each for step in steps for each in step.losses], take_gradients(encoder.model)))
        assert found[0][0] == found[1][0]
        assert largest_difference(found[0][1], found[1][1]) == 0


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("graph_tokens", [0, 150, 300, 600, 10**6])
def test_batches_are_together_only_if_their_activations_are_kept(processes: int, graph_tokens: int) -> None:
    encoder = tiny_encoder("llama")
    long = [PositivePair(f"A very long sentence about {n} things and nothing at all. " * 3, "Short.") for n in range(9)]
    batches = batches_of([NLI[:5], NLI[5:9], long, NLI[9:10], NLI[10:16], NLI[16:22], NLI[22:26]])
    made, budget = planner(encoder, processes), TokenBudget(100, graph_tokens)
    groups = made.grouped(batches, budget)
    again = planner(encoder, processes).grouped(batches, budget)
    assert [group.plan.shares for group in groups] == [group.plan.shares for group in again]
    assert [each for group in groups for each in group.batches] == batches, "in order"
    for group in groups:
        if len(group.batches) > 1:
            assert group.plan.largest_share <= graph_tokens
        else:
            assert group.plan.shares == one_by_one(made, group.batches, budget)[0].plan.shares
    alone = [group.plan.largest_share <= graph_tokens for group in one_by_one(made, batches, budget)]
    kept = [group.plan.largest_share <= graph_tokens for group in groups for _ in group.batches]
    assert kept == alone, "what is encoded once alone is encoded once"
    if not any(alone):
        assert len(groups) == len(batches)
    elif graph_tokens == 10**6:
        assert len(groups) == 1
    elif all(alone):
        assert len(groups) < len(batches)


def test_the_step_of_one_batch_is_a_group_of_one() -> None:
    encoder = trainable_encoder("llama", torch.float64)
    made, (batch, *_) = planner(encoder), batches_of(BATCHES)
    (group,) = made.grouped([batch], BUDGET)
    (step,) = run(encoder, [group], KEEP)
    expected = take_gradients(encoder.model)
    assert boundary_step(encoder.model, group.plan, batch.batch, OBJECTIVE, graph_tokens=KEEP) == step
    assert all(torch.equal(one, expected[name]) for name, one in take_gradients(encoder.model).items())
