"""Block search finds what comparing everything with everything finds, to the last bit."""

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.corpus.exact import best, cosines, cosines_of_all, on_grid
from angle_llm.data.formats import DataError
from angle_llm.mining.search import ExactIndex, FaissIndex, MissingIndexError, grid_rows


def brute_force(anchors: np.ndarray, candidates: np.ndarray, ranks: int) -> tuple[list[list[int]], list[list[float]]]:
    """N x N, one product after another, sorted by cosine and then by number."""
    left, right = grid_rows(anchors), grid_rows(candidates)
    places, scores = [], []
    for anchor in left:
        found = [float(sum(a * b for a, b in zip(anchor, candidate, strict=True)) / 2**52) for candidate in right]
        order = sorted(range(len(found)), key=lambda place: (-found[place], place))[:ranks]
        places.append(order)
        scores.append([found[place] for place in order])
    return places, scores


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    anchors=st.integers(1, 7),
    candidates=st.integers(1, 40),
    dimensions=st.integers(1, 33),
    block=st.integers(1, 45),
    repeats=st.booleans(),
    data=st.data(),
)
def test_blocks_of_any_size_find_what_brute_force_finds(
    seed: int, anchors: int, candidates: int, dimensions: int, block: int, repeats: bool, data: st.DataObject
) -> None:
    draw = np.random.default_rng(seed)
    vectors = draw.standard_normal((anchors + candidates, dimensions)).astype(np.float32)
    if repeats:  # equal vectors: the earlier candidate comes first
        vectors = vectors[draw.integers(0, max(1, len(vectors) // 3), len(vectors))]
    ranks = data.draw(st.integers(1, candidates))
    rows = np.arange(anchors, anchors + candidates)
    place, score = ExactIndex(vectors, rows, block).nearest(grid_rows(vectors[:anchors]), ranks)
    due_places, due_scores = brute_force(vectors[:anchors], vectors[anchors:], ranks)
    assert place.tolist() == due_places
    assert score.tolist() == due_scores, "equal to the last bit, in whatever order sums were made"


def test_cosines_are_exact_sums_of_the_rounded_vectors() -> None:
    rows = grid_rows(np.random.default_rng(1).standard_normal((2, 4096)))
    exact = sum(Fraction(int(a)) * int(b) for a, b in zip(*rows, strict=True)) / 2**52
    assert Fraction(float(cosines(rows[:1], rows[1:])[0])) == exact
    assert Fraction(float((rows[0] @ rows[1]) / 2**52)) == exact


def test_the_rounding_moves_a_cosine_less_than_float32_does() -> None:
    vectors = np.random.default_rng(2).standard_normal((50, 384))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    left, right = grid_rows(vectors[:25]), grid_rows(vectors[25:])
    # Each of 384 parts is off by 2^-27 at most, weighted by a vector of length 1, on both sides: 2 * sqrt(384) * 2^-27.
    assert np.abs(cosines(left, right) - (unit[:25] * unit[25:]).sum(axis=1)).max() < 3e-7


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_vector_without_a_direction_is_refused(bad: float) -> None:
    vectors = np.ones((3, 4), dtype=np.float32)
    vectors[1] = bad
    with pytest.raises(DataError, match="vector 1 of a block is 0 or not finite"):
        grid_rows(vectors)


def test_equal_rows_have_equal_cosines_wherever_they_stand() -> None:
    # A float32 product gives some of them other last digits: with 10 or 43 rows in 3 of 10 draws on one machine.
    draw = np.random.default_rng(4)
    for count in range(1, 51):
        query, row = draw.standard_normal((2, 31)).astype(np.float32)
        scores = cosines_of_all(on_grid(query[None]), on_grid(np.repeat(row[None], count, axis=0)))
        assert len(np.unique(scores)) == 1


def test_of_equal_scores_the_first_ones_are_kept() -> None:
    place, score = best(np.arange(6)[None], np.array([[1.0, 2, 1, 3, 1, 2]]), 4)
    assert place.tolist() == [[3, 1, 5, 0]]
    assert score.tolist() == [[3, 2, 2, 1]]


def test_faiss_finds_what_the_exact_index_finds() -> None:
    pytest.importorskip("faiss", reason="optional: pip install 'angle_llm[mining]'")
    vectors = np.random.default_rng(3).standard_normal((500, 24)).astype(np.float32)
    vectors[300:] = vectors[100:300]  # every candidate twice
    rows, anchors = np.arange(50, 500), grid_rows(vectors[:50])
    for ranks in (1, 40, 450):
        exact, faiss = (
            ExactIndex(vectors, rows, 64).nearest(anchors, ranks),
            FaissIndex(vectors, rows, 64).nearest(anchors, ranks),
        )
        assert exact[0].tolist() == faiss[0].tolist()
        assert exact[1].tolist() == faiss[1].tolist()


def test_without_faiss_its_index_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingIndexError, match=r"pip install 'angle_llm\[mining\]'"):
        FaissIndex(np.ones((2, 2)), np.arange(2), 1)
