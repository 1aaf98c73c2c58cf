"""Batches of one or several datasets: prompts, plans and losses; the next batch is made while one trains."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import tiny_encoder

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import PositivePair, ScoredPair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.losses import AngleObjective, MixedObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.pipeline import prefetch
from angle_llm.train.batches import BatchPlanner, PlannedBatch
from angle_llm.train.step import boundary_step
from angle_llm.train.token_budget import TokenBudget

TRIPLES = [Triple("A man eats.", "Someone eats.", "Nobody eats."), Triple("Nobody eats.", "Two dogs run.", "Hi")]
SCORED = [ScoredPair(f"A man number {n} eats.", f"Someone eats {n} things.", n / 10) for n in range(11)]
POSITIVE = [PositivePair(f"How do I open door {n}?", f"Turn the key {n} times.") for n in range(9)]
POSITIVE.append(PositivePair(SCORED[0].left, "He eats."))  # a text of the other dataset


def planner(encoder: SentenceEncoder, sets: Sequence[LoadedSet], losses: Sequence[AngleObjective] = ()) -> BatchPlanner:
    losses = losses or [AngleObjective()] * len(sets)
    return BatchPlanner(encoder, Mixture(sets), losses, 1)


def planned(made: BatchPlanner, *indices: int) -> tuple[PlannedBatch, Plan]:
    ((_, ((batches, plan),)),) = made.steps(iter([(0, [list(indices)])]), TokenBudget(40, 0))
    (batch,) = batches
    return batch, plan


def test_plans_are_those_of_the_texts_and_follow_the_budget() -> None:
    encoder, loss = tiny_encoder("llama"), AngleObjective()
    made = planner(encoder, [LoadedSet("a", TRIPLES)], [loss])
    steps = list(made.steps(iter([(0, [[1], [0]]), (1, [[0, 1]])]), TokenBudget(60, 0)))
    assert [epoch for epoch, _ in steps] == [0, 1]
    texts = [TextBatch.from_examples(examples).texts for examples in (TRIPLES[1:], TRIPLES[:1], TRIPLES)]
    assert [each.batch.texts for _, groups in steps for group in groups for each in group.batches] == texts
    for epoch, groups in steps:
        for ((batch, given, counts, _, of_epoch),), plan in groups:
            assert of_epoch == epoch
            expected = encoder.plan(batch.texts, 60)
            assert (plan.layout, plan.row_of) == (expected.layout, expected.row_of)
            assert plan.computed_tokens == expected.computed_tokens
            assert (given, counts) == (loss, {})
    (group,) = made.grouped(steps[1][1][0].batches, TokenBudget(20, 0))
    assert group.plan.token_budget == 20


def test_each_text_is_formatted_with_its_own_prompt() -> None:
    encoder = tiny_encoder("llama")
    plain = encoder.with_prompt("plain").tokenize
    own = encoder.prompt.name
    sets = [
        LoadedSet("a", TRIPLES[:1]),
        LoadedSet("b", TRIPLES[:1], prompt=own),
        LoadedSet("c", TRIPLES[:1], prompt="plain"),
    ]
    made = planner(encoder, sets)
    assert made.prompts == [(0, 0), (0, 0), (1, 1)], "a dataset that names the prompt of the run has that prompt"
    texts = TextBatch.from_examples(TRIPLES[:1]).texts
    assert made.batch([0, 1]).texts == texts
    assert made.batch([0, 2]).texts == texts * 2
    nothing = torch.empty(0, dtype=torch.int64)
    of_pairs = {"left": nothing, "right": nothing, "score": torch.empty(0), "group": nothing, "label": nothing}
    mixed = TextBatch(
        ["Hi", "Ho", "Hi"], **of_pairs, prompts=[1, 0, 0], instructions=[None] * 3, teacher=torch.empty(0)
    )
    assert made.tokenize(mixed) == [*plain(["Hi"]), *encoder.tokenize(["Ho", "Hi"])]
    assert made.digest() == planner(encoder, sets).digest() != planner(encoder, sets[:1]).digest()


def test_datasets_with_equal_losses_and_prompts_share_negatives() -> None:
    encoder, loss = tiny_encoder("llama"), AngleObjective()
    sets = [LoadedSet("a", POSITIVE[:5]), LoadedSet("b", POSITIVE[5:])]
    assert planned(planner(encoder, sets, [loss, AngleObjective()]), 0, 7)[0].loss == loss
    sets = [LoadedSet("a", POSITIVE[:2]), LoadedSet("b", POSITIVE[:2], prompt="plain")]
    joint = planned(planner(encoder, sets), 0, 3)[0].loss  # the same text under two prompts is not a negative of itself
    assert isinstance(joint, MixedObjective)
    assert [(part.share, part.pairs.tolist()) for part in joint.parts] == [(0.5, [0]), (0.5, [1])]


@pytest.mark.parametrize("graph_tokens", [0, 10_000])
def test_a_step_on_a_mixed_batch_is_the_sum_of_the_steps_of_its_datasets(graph_tokens: int) -> None:
    torch.manual_seed(0)
    encoder = tiny_encoder("opt", torch.float64)
    sets = [LoadedSet("scored", SCORED, prompt="plain"), LoadedSet("positive", POSITIVE)]
    losses = [AngleObjective(cosine_weight=1, in_batch_weight=0), AngleObjective(in_batch_weight=2)]
    made, its_plan = planned(planner(encoder, sets, losses), 0, 12, 5, 20, 14, 9, 15)
    assert made.counts == {"scored": 3, "positive": 4}
    assert len(made.batch.texts) == 14  # the text of both datasets has two prompts
    encoder.model.eval()  # without dropout, whose masks would differ
    value = boundary_step(encoder.model, its_plan, made.batch, made.loss, graph_tokens=graph_tokens)
    together = {name: one.grad.clone() for name, one in encoder.model.named_parameters() if one.grad is not None}
    assert together

    encoder.model.zero_grad()
    total = 0.0
    for number, (some, share) in enumerate([([0, 5, 9], 3 / 7), ([12, 20, 14, 15], 4 / 7)]):
        own = encoder.with_prompt("plain") if number == 0 else encoder
        batch = TextBatch.from_examples([Mixture(sets)[index] for index in some])
        plan = own.plan(batch.texts, 40)
        step = boundary_step(encoder.model, plan, batch, losses[number], graph_tokens=graph_tokens, weight=share)
        total += share * step.loss
    assert value.loss == pytest.approx(total, rel=1e-12)
    for name, one in encoder.model.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(together[name], one.grad, rtol=1e-9, atol=1e-12)  # sums in another order


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    second_made = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        second_made.set()
        yield 2
        raise ValueError("no third")

    with ThreadPoolExecutor(max_workers=1) as worker:
        items = prefetch(numbers(), worker)
        assert next(items) == 1
        assert second_made.wait(timeout=10), "made in advance"
        assert next(items) == 2
        with pytest.raises(ValueError, match="no third"):
            next(items)
        # Another iterator in the same thread, when the first one is not used to its end.
        assert next(prefetch(iter(range(100)), worker)) == 0
        assert list(prefetch(iter("abc"), worker)) == ["a", "b", "c"]
