"""Each guard refuses what it is there for, and nothing else does in its place: without it the candidate would be taken."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pairs_for_mining import PAIRS, material, settings

from angle_llm.data.formats import ScoredPair, Triple
from angle_llm.mining.guards import GUARDS, Guards, Judge, Window
from angle_llm.mining.pairs import Material, gather


def asked(
    found: Material, anchor: str, negative: str, *, cosine: float = 0.1, judge: Judge | None = None, **changed: Any
) -> list[str]:
    """The reasons a candidate is refused for as negative of an anchor's first pair, whose positive has cosine 0.8."""
    pair = next(pair for pair in found.pairs if found.texts[pair.anchor] == anchor)
    window = Window(
        anchor=pair.anchor,
        positive=pair.positive,
        positive_cosine=0.8,
        text_W=np.array([found.texts.index(negative)]),
        cosine_W=np.array([cosine]),
        rank_W=np.array([1]),
    )
    refused: Counter[str] = Counter()
    left = Guards(found, settings(**changed), judge).left(window, refused)
    assert len(left.text_W) + refused.total() == 1
    return [reason for reason, count in refused.items() if count]


def test_a_text_that_nothing_speaks_against_is_left() -> None:
    assert asked(material(), "A man eats.", "An animal moves.") == []


def test_the_anchor_is_no_negative_of_itself_however_it_is_written() -> None:
    found = material([*PAIRS, ("Hungry?", "a MAN  eats")])
    assert asked(found, "A man eats.", "a MAN  eats", same_cluster="allow") == ["the anchor itself"]


@pytest.mark.parametrize("positive", ["Someone eats.", "Someone has food."])
def test_a_positive_of_any_row_is_no_negative(positive: str) -> None:
    assert asked(material(), "A man eats.", positive, same_cluster="allow") == ["a positive of it"]


def test_a_text_written_like_a_positive_is_no_negative() -> None:
    found = material([*PAIRS, ("Something else.", "someone has food!")])
    assert asked(found, "A man eats.", "someone has food!", same_cluster="allow") == ["a positive of it"]


def test_a_text_whose_positive_the_anchor_is_is_no_negative() -> None:
    assert asked(material(), "Someone has food.", "A man eats.", same_cluster="allow") == ["a positive of it"]


def test_a_text_linked_over_several_pairs_is_refused_unless_it_is_allowed() -> None:
    assert asked(material(), "A man eats.", "There is food.") == ["of its cluster"]
    assert asked(material(), "A man eats.", "There is food.", same_cluster="allow") == []


def test_clusters_hold_together_through_texts_that_differ_in_writing_alone() -> None:
    found = material([("one", "two"), ("TWO!", "three"), ("four", "five")])
    assert asked(found, "one", "three") == ["of its cluster"]
    assert asked(found, "one", "five") == []


def test_a_negative_that_its_row_had_already_is_not_mined_again() -> None:
    found = gather([Triple("one", "two", "Three"), Triple("four", "three", "six")], None, 0.8)
    assert asked(found, "one", "three") == ["known from another row"]


def test_a_text_scored_with_the_anchor_is_not_mined() -> None:
    """A score of 0.7 is no positive, and no good negative either."""
    found = gather(
        [ScoredPair("one", "two", 1.0), ScoredPair("one", "three", 0.7), ScoredPair("four", "three", 0.9)], None, 0.8
    )
    assert asked(found, "one", "three") == ["known from another row"]


@pytest.mark.parametrize(
    ("cosine", "changed", "reason"),
    [
        (0.61, {"max_score": 0.6}, "above --max-score"),
        (0.19, {"min_score": 0.2}, "below --min-score"),
        (0.71, {"margin": 0.1}, "within --margin"),
        (0.80, {"margin": 0.0}, "within --margin"),
        (0.77, {"relative_margin": 0.05}, "within --relative-margin"),
    ],
)
def test_a_cosine_out_of_bounds_is_refused(cosine: float, changed: dict[str, float], reason: str) -> None:
    assert asked(material(), "A man eats.", "An animal moves.", cosine=cosine, **changed) == [reason]
    assert asked(material(), "A man eats.", "An animal moves.", cosine=cosine) == [], "the bound alone refuses it"


@pytest.mark.parametrize(
    ("cosine", "changed"),
    [
        (0.6, {"max_score": 0.6}),
        (0.2, {"min_score": 0.2}),
        (0.69, {"margin": 0.1}),
        (0.75, {"relative_margin": 0.05}),
    ],
)
def test_a_cosine_within_bounds_is_left(cosine: float, changed: dict[str, float]) -> None:
    assert asked(material(), "A man eats.", "An animal moves.", cosine=cosine, **changed) == []


def test_the_judge_refuses_what_it_finds_as_near_as_the_positive() -> None:
    found = material()
    assert asked(found, "A man eats.", "An animal moves.", judge=judging(0.5)) == ["the judge disagrees"]
    assert asked(found, "A man eats.", "An animal moves.", judge=judging(0.49)) == []


def test_a_share_of_a_negative_cosine_lies_below_it() -> None:
    pair = material().pairs[0]
    window = Window(pair.anchor, pair.positive, -0.4, np.array([6, 7]), np.array([-0.41, -0.43]), np.array([1, 2]))
    left = Guards(material(), settings(relative_margin=0.05)).left(window, Counter())
    assert left.cosine_W.tolist() == [-0.43], "5 % of -0.4 below it is -0.42"


def judging(negative: float) -> Judge:
    """Finds the positive's cosine 0.5."""
    return lambda anchor, texts: np.array([negative] * (len(texts) - 1) + [0.5])


CASES: dict[str, Callable[[], list[str]]] = {
    "the anchor itself": lambda: asked(
        material([*PAIRS, ("Hungry?", "a MAN  eats")]), "A man eats.", "a MAN  eats", same_cluster="allow"
    ),
    "a positive of it": lambda: asked(material(), "A man eats.", "Someone has food.", same_cluster="allow"),
    "known from another row": lambda: asked(
        gather([Triple("one", "two", "Three"), Triple("four", "three", "six")], None, 0.8), "one", "three"
    ),
    "of its cluster": lambda: asked(material(), "A man eats.", "There is food."),
    "above --max-score": lambda: asked(material(), "A man eats.", "A dog runs.", cosine=0.61, max_score=0.6),
    "below --min-score": lambda: asked(material(), "A man eats.", "A dog runs.", cosine=0.19, min_score=0.2),
    "within --margin": lambda: asked(material(), "A man eats.", "A dog runs.", cosine=0.71, margin=0.1),
    "within --relative-margin": lambda: asked(
        material(), "A man eats.", "A dog runs.", cosine=0.77, relative_margin=0.05
    ),
    "the judge disagrees": lambda: asked(material(), "A man eats.", "A dog runs.", judge=judging(0.5)),
}
"""Guard → a candidate that it alone refuses."""


@pytest.mark.parametrize("reason", GUARDS)
def test_every_guard_refuses_what_would_be_taken_without_it(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CASES[reason]() == [reason]
    monkeypatch.delitem(GUARDS, reason)
    assert CASES[reason]() == []
