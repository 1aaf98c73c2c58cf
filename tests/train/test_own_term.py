"""Loss terms that are no part of the package, one from a function and one from a class.

test_python_processes.py trains with them in several processes.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from angle_llm.losses import AngleObjective, FunctionTerm, Relation, SumOfTerms, blocks
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term


def uniformity(embeddings: Tensor, relation: Relation) -> Tensor:
    """Of all texts (Wang and Isola 2020)."""
    return torch.pdist(normalize(embeddings)).square().mul(-2).exp().mean().log()


def distance(left: Tensor, right: Tensor) -> Tensor:
    return (normalize(left) - normalize(right)).square().sum(dim=1)


@dataclass(frozen=True)
class Alignment(Term):
    """Mean squared distance of the pairs weighted by their scores, from a vector that is computed in blocks."""

    weight: float
    name: str = "alignment"

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        score_P = pairs.relation.score
        return BatchTerm((pairs.similarities(distance),), lambda distance_P: (score_P * distance_P).mean())


LOSS = SumOfTerms(*AngleObjective().terms, FunctionTerm("uniformity", uniformity, weight=0.5), Alignment(0.3))


@pytest.mark.parametrize("elements", [48, blocks.BLOCK_ELEMENTS])
def test_a_sum_with_own_terms_equals_plain_autograd(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(12, 6, dtype=torch.float64, generator=generator).requires_grad_()
    left, right = torch.arange(12).chunk(2)
    relation = Relation(left, right, torch.rand(6, dtype=torch.float64, generator=generator))
    value, in_batch = LOSS(x_ND, relation), AngleObjective()(x_ND, relation)
    alignment = (relation.score * distance(x_ND[left], x_ND[right])).mean()
    expected = in_batch.loss + 0.5 * uniformity(x_ND, relation) + 0.3 * alignment
    assert_close(value.loss, expected)
    assert_close(torch.autograd.grad(value.loss, x_ND), torch.autograd.grad(expected, x_ND))
    assert list(value.parts) == ["in_batch", "uniformity", "alignment"]
    assert not LOSS.needs_pairs, "uniformity changes without pairs"
