"""Training with two prompts: rows of queries and documents, and the exact loss and gradient."""

from typing import Any

import pytest
import reference
import torch
from runs import float64_forward, largest_difference
from tiny import tiny_encoder
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm import PromptTemplate, SentenceEncoder
from angle_llm.data.formats import Example, PositivePair, ScoredPair, Triple, pairs_of
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.losses import AngleObjective
from angle_llm.prompts import SidePrompts
from angle_llm.train.batches import BatchPlanner, PlannedBatch
from angle_llm.train.step import group_step, relations, text_of_row
from angle_llm.train.token_budget import TokenBudget

BOTH = SidePrompts(PromptTemplate("ask", "Question: {text}"), PromptTemplate("answer", "Answer: {text}."))
EXAMPLES: list[Example] = [
    PositivePair("Who eats?", "A man eats."),
    PositivePair("A man eats.", "Someone has food."),  # a document, and here a query
    PositivePair("Two dogs run.", "Two dogs run."),  # one text, two rows
    Triple("Who eats?", "He eats.", "Nobody eats."),
    Triple("Nobody eats.", "They do not eat.", "Who eats?"),
    ScoredPair("He eats.", "Shares rose.", 0.1),
]
FORMS = ["symmetric", "forward"]


def planner(encoder: SentenceEncoder, sets: list[LoadedSet], form: str = "symmetric", **weights: float) -> BatchPlanner:
    loss = AngleObjective(contrastive_form=form, **weights)  # type: ignore[arg-type]
    return BatchPlanner(encoder, Mixture(sets), [loss] * len(sets), 1)


def step(made: BatchPlanner, indices: list[int]) -> tuple[float, dict[str, Tensor], PlannedBatch, Any]:
    ((_, (group,)),) = made.steps(iter([(0, [indices])]), TokenBudget(60, 10**9))
    model = made.encoder.model
    model.zero_grad(set_to_none=True)
    result = group_step(model, group.plan, group.batches, graph_tokens=10**9)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result.loss, gradients, group.batches[0], group.plan


def slow(encoder: SentenceEncoder, examples: list[Example], form: str) -> tuple[float, dict[str, Tensor]]:
    """Every text alone, formatted with the prompt of its side, and the slow formulas."""
    rows: dict[tuple[str, str], int] = {}
    pairs = []
    for left, right, score in (pair for example in examples for pair in pairs_of(example)):
        of = [rows.setdefault(key, len(rows)) for key in (("query", left), ("document", right))]
        pairs.append((*of, score))
    vectors = []
    for side, text in rows:
        ids = encoder.for_side(side).tokenize([text])  # type: ignore[arg-type]
        vectors.append(encoder.model.backbone(input_ids=torch.tensor(ids), use_cache=False).last_hidden_state[0, -1])
    texts = [text for _, text in rows]
    embeddings = reference.rows_of(torch.stack(vectors))
    cosines = [reference.cosine(embeddings[left], embeddings[right]) for left, right, _ in pairs]
    in_batch = reference.CONTRASTIVE_FORMS[form](embeddings, pairs, 0.05, 0.5, [texts.index(text) for text in texts])
    loss = 2 * in_batch + 0.5 * reference.ranking_loss(cosines, [score for _, _, score in pairs], 0.05)
    encoder.model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in encoder.model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_step_equals_the_slow_formulas_in_float64(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_forward)
    encoder = tiny_encoder("llama", torch.float64, prompt=BOTH)
    made = planner(encoder, [LoadedSet("a", EXAMPLES)], form, in_batch_weight=2.0, cosine_weight=0.5)
    loss, gradients, batch, _ = step(made, list(range(len(EXAMPLES))))
    assert len(batch.batch) == len(set(batch.batch.texts)) + 5, "five texts are a query and a document"
    expected, slow_gradients = slow(encoder, EXAMPLES, form)
    assert loss == pytest.approx(expected, rel=1e-12)
    # Sums of a few hundred float64 terms in another order.
    assert largest_difference(slow_gradients, gradients) < 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_equal_templates_give_the_bits_of_one_prompt(form: str) -> None:
    one = PromptTemplate("one", "Say: {text}!")
    equal = SidePrompts(one, PromptTemplate("another name", "Say: {text}!"))
    found = []
    for prompt in (one, equal):
        made = planner(tiny_encoder("llama", prompt=prompt), [LoadedSet("a", EXAMPLES)], form, cosine_weight=1.0)
        loss, gradients, batch, plan = step(made, list(range(len(EXAMPLES))))
        ((_, relation),) = relations(plan, [batch])
        assert (relation.text, set(batch.batch.prompts)) == (None, {0})
        found.append((loss, made.digest(), batch.batch.texts, plan.row_of, gradients))
    assert found[0][:4] == found[1][:4]
    assert all(torch.equal(found[0][4][name], gradient) for name, gradient in found[1][4].items())


def test_datasets_with_prompts_of_their_own() -> None:
    encoder = tiny_encoder("llama", prompt=BOTH)
    sets = [
        LoadedSet("both", EXAMPLES[:2]),
        LoadedSet("one", EXAMPLES[:2], prompt="plain"),
        LoadedSet("two", EXAMPLES[:2], prompt={"query": "plain", "document": "prompteol"}),
        LoadedSet("both again", EXAMPLES[:2]),
    ]
    made = planner(encoder, sets)
    assert made.prompts == [(0, 1), (2, 2), (2, 3), (0, 1)]
    assert made.batch([0, 6]).texts == ["Who eats?", "A man eats."]
    batch = made.batch([0, 2, 4])
    assert list(zip(batch.prompts, batch.texts, strict=True)) == [
        (0, "Who eats?"), (1, "A man eats."), (2, "Who eats?"), (2, "A man eats."), (3, "A man eats."),
    ]  # fmt: skip
    plain = encoder.with_prompt("plain").tokenize(["Who eats?"])
    assert made.tokenize(batch)[2] == plain[0]
    # Texts of datasets with other prompts are no negatives: the loss is the mean of the losses of the parts.
    parts = [step(made, [at, at + 1]) for at in (0, 2, 4)]
    loss, gradients, _, _ = step(made, [0, 1, 2, 3, 4, 5])
    assert loss == pytest.approx(sum(part[0] for part in parts) / 3, rel=1e-5)
    for name, gradient in gradients.items():
        mean = sum(part[1][name] for part in parts) / 3
        torch.testing.assert_close(gradient, mean, rtol=1e-3, atol=1e-4)  # float32, sums in another order


def test_rows_that_share_a_text_have_one_number() -> None:
    assert text_of_row(["a", "b", "c"], torch.tensor([0, 1, 2])) is None
    assert text_of_row(["a", "b", "c"], torch.tensor([0, 0, 1])) is None
    # a and c are two rows each, b is one.
    found = text_of_row(["a", "b", "a", "c", "c"], torch.tensor([0, 1, 2, 3, 4]))
    assert found is not None
    assert [found[i] == found[j] for i, j in ((0, 2), (3, 4), (0, 1), (0, 3), (1, 3))] == [
        True,
        True,
        False,
        False,
        False,
    ]
    # As documents, a and b are cut to the same ids (row 2): their rows as queries have its number.
    found = text_of_row(["a", "b", "a", "b", "c"], torch.tensor([0, 1, 2, 2, 3]))
    assert found is not None
    assert found.tolist()[:3] == [found[0]] * 3 != [found[3]] * 3
