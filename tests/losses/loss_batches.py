"""Small batches for the tests of the losses, and the fast and slow objective on them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from angle_llm.losses import Relation

Pairs = list[tuple[int, int, float]]
TRIPLES: Pairs = [(0, 2, 1.0), (1, 3, 1.0), (0, 4, 0.0), (1, 5, 0.0)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def relation(pairs: Pairs, **fields: Tensor | None) -> Relation:
    left, right, score = zip(*pairs, strict=True) if pairs else ((), (), ())
    return Relation(
        torch.tensor(left, dtype=torch.long),
        torch.tensor(right, dtype=torch.long),
        torch.tensor(score, dtype=torch.float64),
        **fields,
    )


@st.composite
def batches(draw: st.DrawFn, scores: tuple[tuple[float, ...], ...]) -> tuple[Tensor, Pairs]:
    """Repeated texts, contradictory pairs, a row paired with itself, ties, a single score, zero or identical rows."""
    rows = draw(st.integers(2, 6))
    row = st.integers(0, rows - 1)
    pairs = draw(st.lists(st.tuples(row, row, st.sampled_from(draw(st.sampled_from(scores)))), max_size=8))
    embeddings_ND = random(rows, draw(st.sampled_from([2, 4, 6])), seed=draw(st.integers(0, 99)))
    special = draw(st.sampled_from(["none", "zero", "identical"]))
    if special != "none":
        embeddings_ND[0] = 0 if special == "zero" else embeddings_ND[1]
    return embeddings_ND, pairs
