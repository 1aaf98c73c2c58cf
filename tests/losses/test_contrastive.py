"""The in-batch contrast: equal to the slow formulas in value and gradient; which rows are positives and negatives."""

import math
from unittest.mock import patch

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import TRIPLES, Pairs, batches, random, relation
from torch import Tensor
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, blocks
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS

every_form = pytest.mark.parametrize("form", CONTRASTIVE_FORMS)


def loss(
    x_ND: Tensor,
    pairs: Pairs,
    form: str,
    *,
    temperature: float = 0.3,
    positive_above: float = 0.5,
    text: list[int] | None = None,
) -> Tensor:
    objective = AngleObjective(in_batch_temperature=temperature, contrastive_form=form, positive_above=positive_above)
    return objective(x_ND, relation(pairs, text=None if text is None else torch.tensor(text))).loss


@every_form
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    batch=batches(((0.0, 0.3, 0.5, 0.8, 1.0),)),
    temperature=st.sampled_from([0.05, 1.0]),
    block_elements=st.sampled_from([1, 24, blocks.BLOCK_ELEMENTS]),
    texts=st.none() | st.lists(st.sampled_from([3, 5, 8, 9, 11]), min_size=6, max_size=6),
)
def test_equals_the_slow_formula_in_value_and_gradient(
    form: str, batch: tuple[Tensor, Pairs], temperature: float, block_elements: int, texts: list[int] | None
) -> None:
    """In blocks of one row a side, of three, and in one block; with a text as one row, and as several."""
    embeddings_ND, pairs = batch
    text = None if texts is None else texts[: len(embeddings_ND)]

    def slow(x: Tensor) -> Tensor:
        return reference.CONTRASTIVE_FORMS[form](reference.rows_of(x), pairs, temperature, 0.5, text)

    with patch.object(blocks, "BLOCK_ELEMENTS", block_elements):
        found = reference.value_and_gradient(
            lambda x: loss(x, pairs, form, temperature=temperature, text=text), embeddings_ND
        )
    assert found[1].isfinite().all()
    assert_close(found, reference.value_and_gradient(slow, embeddings_ND), rtol=1e-10, atol=1e-10)


def test_triples_equal_torch_cross_entropy() -> None:
    """Queries 0, 1; positives 2, 3; hard negatives 4, 5. Forward: cross-entropy of each query over rows 2 .. 5."""
    embeddings_ND = random(6, 4)
    unit_ND = torch.nn.functional.normalize(embeddings_ND)
    logits = unit_ND[:2] @ unit_ND[2:].T / 0.3
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]))
    assert_close(loss(embeddings_ND, TRIPLES, "forward"), expected)

    all_logits = (unit_ND @ unit_ND.T / 0.3).fill_diagonal_(-math.inf)
    expected = torch.nn.functional.cross_entropy(all_logits[:4], torch.tensor([2, 3, 0, 1]))
    assert_close(loss(embeddings_ND, TRIPLES, "symmetric"), expected)


@every_form
def test_positive_above_is_the_threshold(form: str) -> None:
    pairs = [(0, 1, 3.0), (2, 3, 4.0), (0, 3, 1.0)]
    assert_close(
        loss(random(4, 4), pairs, form, positive_above=3.5),
        loss(random(4, 4), [(0, 1, 0.0), (2, 3, 1.0), (0, 3, 0.0)], form),
    )


@every_form
def test_large_logits_neither_overflow_nor_give_nan(form: str) -> None:
    embeddings_ND = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0]])
    found = reference.value_and_gradient(
        lambda x: loss(x, [(0, 1, 1.0), (2, 3, 1.0), (0, 2, 0.0)], form, temperature=1e-4), embeddings_ND
    )
    assert all(part.isfinite().all() for part in found)
