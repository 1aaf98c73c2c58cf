"""`TextBatch`: unique texts and the pairs between them."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.data import Example, Group, PositivePair, ScoredPair, Triple
from angle_llm.data.batch import TextBatch

texts = st.sampled_from(["a", "b", "c", "d", "é", " a"])
examples = st.one_of(
    st.builds(ScoredPair, texts, texts, st.floats(0, 1, width=32)),
    st.builds(PositivePair, texts, texts),
    st.builds(Triple, texts, texts, texts),
    st.builds(Group, texts, st.just(("a", "b")), st.just(("c",)), st.none() | st.just((3.0, -1.0, 0.5))),
    st.builds(Group, texts, st.just(("d",))),
)


def pairs(example: Example) -> list[tuple[str, str, float]]:
    """The table of formats in the design, written independently."""
    match example:
        case ScoredPair(left, right, score):
            return [(left, right, score)]
        case PositivePair(left, right):
            return [(left, right, 1.0)]
        case Triple(anchor, positive, negative):
            return [(anchor, positive, 1.0), (anchor, negative, 0.0)]
        case Group(query, positives, negatives):
            return [(query, text, 1.0) for text in positives] + [(query, text, 0.0) for text in negatives]


def test_texts_are_numbered_by_first_occurrence() -> None:
    batch = TextBatch.from_examples([Triple("a", "p", "n"), ScoredPair("p", "a", 0.25), PositivePair("x", "n")])
    assert batch.texts == ["a", "p", "n", "x"]
    assert len(batch) == 4
    assert batch.left.tolist() == [0, 0, 1, 3]
    assert batch.right.tolist() == [1, 2, 0, 2]
    assert batch.score.tolist() == [1.0, 0.0, 0.25, 1.0]
    assert (batch.left.dtype, batch.right.dtype, batch.score.dtype) == (torch.int64, torch.int64, torch.float32)


@given(st.lists(examples, max_size=12), st.data())
def test_batch_holds_the_pairs_of_its_examples(some: list[Example], data: st.DataObject) -> None:
    sides = st.tuples(st.integers(0, 2), st.integers(0, 2))
    prompts = data.draw(st.just([]) | st.lists(sides, min_size=len(some), max_size=len(some)))
    batch = TextBatch.from_examples(some, prompts)
    rows = zip(batch.left.tolist(), batch.right.tolist(), batch.score.tolist(), strict=True)
    assert [(batch.texts[i], batch.texts[j], score) for i, j, score in rows] == [
        pair for example in some for pair in pairs(example)
    ]
    assert batch.group.tolist() == [number for number, example in enumerate(some) for _ in pairs(example)]
    scores = [getattr(example, "scores", None) or [math.nan] * len(pairs(example)) for example in some]
    np.testing.assert_array_equal(batch.teacher, [score for each in scores for score in each])
    keys = list(zip(batch.prompts, batch.texts, strict=True))
    assert len(set(keys)) == len(keys)
    if prompts:
        of_pair = [own for example, own in zip(some, prompts, strict=True) for _ in pairs(example)]
        rows = zip(batch.left.tolist(), batch.right.tolist(), strict=True)
        assert [(batch.prompts[i], batch.prompts[j]) for i, j in rows] == of_pair
    if not any(map(any, prompts)):
        assert len(set(batch.texts)) == len(batch.texts)
