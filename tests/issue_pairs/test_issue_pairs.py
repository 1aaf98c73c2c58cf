"""Pairs from claims: no issue in two splits, no negative within a cluster, whatever the graph of duplicates."""

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.config import SettingsError
from angle_llm.issue_pairs.duplicates import Claim
from angle_llm.issue_pairs.negatives import NEGATIVES, TOO_ALIKE
from angle_llm.issue_pairs.overlap import Overlap
from angle_llm.issue_pairs.pairs import POSITIVES, Clusters, Made, Pair, make_pairs, split_of
from angle_llm.issue_pairs.records import Issue, Key
from angle_llm.issue_pairs.settings import KINDS, SPLITS, IssueSettings

REPOS = ("a/b", "c/d")


def made(claims: Sequence[Claim], texts: dict[Key, str], **named: Any) -> dict[str, list[Pair]]:
    return made_with(claims, texts, **named).pairs


def made_with(
    claims: Sequence[Claim],
    texts: dict[Key, str],
    suspected: Set[frozenset[Key]] = frozenset(),
    label: str = "bug",
    **named: Any,
) -> Made:
    issues = {
        key: Issue(key[0], key[1], "", "", True, "", None, (label,) if key[1] % 2 else (), "", False, False)
        for key in texts
    }
    wanted = IssueSettings(**{"repos": REPOS, "out": Path("out"), "splits": (1, 1, 1), **named})
    return make_pairs(issues, texts, claims, wanted, named=suspected)


keys = st.tuples(st.sampled_from(REPOS), st.integers(1, 25))
graphs = st.lists(
    st.builds(Claim, keys, keys, st.just("comment")).filter(lambda claim: claim[0] != claim[1]), max_size=25
)
words = st.sampled_from(["crash", "window", "menu"])
texts = st.dictionaries(keys, st.lists(words, min_size=1, max_size=2).map(" ".join), min_size=2)


@settings(max_examples=200, deadline=None)
@given(graphs, texts, st.sampled_from(["chain", "all"]))
def test_splits_and_negatives_keep_clusters_together(claims: list[Claim], texts: dict[Key, str], pairs: str) -> None:
    # Texts of three words are often the same, which makes their issues one cluster too.
    distinct = {key: text if key[1] % 3 else f"{text} {key}" for key, text in texts.items()}
    found = made(claims, distinct, pairs=pairs)
    cluster = _by_search(claims, distinct)
    split_with: dict[str, str] = {}
    for split, rows in found.items():
        for row in rows:
            one, other = _key(row.id1), _key(row.id2)
            for text in (row.text1, row.text2):
                assert split_with.setdefault(text, split) == split
            assert (cluster[one] == cluster[other]) == (row.label == 1)
            assert one != other
            if row.label == 0:
                assert one[0] == other[0] == row.repo
    both = [frozenset((row.text1, row.text2)) for each in found.values() for row in each]
    assert len(both) == len(set(both))
    positives = {frozenset((row.text1, row.text2)) for each in found.values() for row in each if row.label}
    claimed = {frozenset((distinct[one], distinct[other])) for one, other, _ in claims if {one, other} <= set(distinct)}
    claimed = {both for both in claimed if len(both) == 2}
    assert claimed == positives if pairs == "chain" else claimed <= positives


def _key(name: str) -> Key:
    repo, _, number = name.partition("#")
    return repo, int(number)


def _by_search(claims: Sequence[Claim], texts: dict[Key, str]) -> dict[Key, int]:
    """Clusters found another way: by walking through neighbours."""
    near: dict[Key, set[Key]] = {key: {other for other in texts if texts[other] == text} for key, text in texts.items()}
    for one, other, _ in claims:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
    cluster: dict[Key, int] = {}
    for number, start in enumerate(near):
        waiting = [start]
        while waiting:
            key = waiting.pop()
            if key not in cluster:
                cluster[key] = number
                waiting += near[key]
    return cluster


@settings(max_examples=100, deadline=None)
@given(graphs, graphs)
def test_later_duplicates_do_not_move_a_cluster(claims: list[Claim], later: list[Claim]) -> None:
    links = [(one, other) for one, other, _ in claims]
    # Each later issue has a higher number, and is a duplicate of one issue.
    new = [((one[0], 100 + at), other) for at, (one, other, _) in enumerate(later)]
    before, after = Clusters(links), Clusters([*new, *links])
    assert [split_of(before[key], (8, 1, 1)) for link in links for key in link] == [
        split_of(after[key], (8, 1, 1)) for link in links for key in link
    ]


def test_splits_have_their_shares() -> None:
    splits = [split_of(("a/b", number), (0.8, 0.1, 0.1)) for number in range(5000)]
    for name, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert splits.count(name) / 5000 == pytest.approx(share, abs=0.02)  # three standard deviations are 0.017
    assert {split_of(("a/b", number), (0, 0, 1)) for number in range(99)} == {"test"}


def test_each_kind_of_negative_has_its_share_and_is_what_it_says() -> None:
    texts = {
        ("a/b", number): f"issue {number} of the {'window' if number % 7 else 'menu'} {number % 11}"
        for number in range(1, 200)
    }
    claims = [Claim(("a/b", number), ("a/b", number - 100), "comment") for number in range(150, 190)]
    found = made(claims, texts, negatives={"random": 1.0, "overlap": 0.5, "labels": 0.5})
    kinds = [row.kind for each in found.values() for row in each]
    assert kinds.count("duplicate") == 40
    assert kinds.count("random") + kinds.count("overlap") + kinds.count("labels") == pytest.approx(
        80, abs=2
    )  # three splits round
    assert kinds.count("overlap") == pytest.approx(20, abs=2)
    same_label = [row for each in found.values() for row in each if row.kind == "labels"]
    assert same_label
    assert all(_key(row.id1)[1] % 2 == _key(row.id2)[1] % 2 == 1 and row.why == "same label bug" for row in same_label)


def some_texts(count: int) -> dict[Key, str]:
    names = ["crash", "window", "menu", "save", "slow", "font", "thread", "login"]
    return {
        ("a/b", number): " ".join(combination)
        for number, combination in enumerate(itertools.islice(itertools.permutations(names, 4), count), 1)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_negative_is_of_two_issues_that_anybody_named_together(kind: str) -> None:
    texts = {("a/b", number): f"number{number} of{number % 3} the" for number in range(1, 30, 2)}
    claims = [Claim(("a/b", 3), ("a/b", 1), "comment")]
    # What is named of 3 goes for 1 too, and with 5 it is 7 that is named.
    claims.append(Claim(("a/b", 7), ("a/b", 5), "comment"))
    but = {("a/b", 29)}
    suspected = {frozenset((("a/b", 3), key)) for key in texts if key not in but | {("a/b", 1), ("a/b", 3), ("a/b", 7)}}
    found = made_with(claims, texts, suspected, splits=(1, 0, 0), negatives={kind: 4.0}).pairs["train"]
    of_one = [row for row in found if row.label == 0 and _key(row.id1) == ("a/b", 3)]
    assert {row.id2 for row in of_one} <= {"a/b#29"}
    assert any(row.label == 0 for row in found)


@pytest.mark.parametrize("kind", KINDS)
def test_no_negative_of_any_kind_has_nearly_the_same_words(kind: str) -> None:
    texts = some_texts(201)
    claims = [Claim(("a/b", number), ("a/b", 1), "comment") for number in range(2, 30)]
    found = made(claims, texts, splits=(1, 0, 0), negatives={kind: 2.0})["train"]
    negatives = [row for row in found if row.label == 0]
    assert negatives
    index = Overlap([texts[key] for key in texts])
    places = {key: place for place, key in enumerate(texts)}
    alike = [index.cosine(places[_key(row.id1)], places[_key(row.id2)]) for row in negatives]
    assert max(alike) <= TOO_ALIKE
    assert all(index.nearest(place, 1)[0][0] > TOO_ALIKE for place in range(30))  # there were such


def test_of_a_large_cluster_the_claims_come_first_and_memory_stays_small() -> None:
    texts = {("a/b", number): f"issue {number}" for number in range(1, 601)}
    claims = [Claim(("a/b", number), ("a/b", 1), "comment") for number in range(2, 601)]
    tracemalloc.start()
    found = made_with(claims, texts, pairs="all", cluster_pairs=50, negatives={})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.positives() == {"comment": 50}
    assert found.claims_left_out == {"more than cluster_pairs": 549}
    assert peak < 4e6  # 0.4 MB were seen; the 180,000 pairs, as tuples of 56 bytes, are 10 MB
    more = made(claims[:5], texts, pairs="all", cluster_pairs=8, negatives={})
    assert Counter(row.why for rows in more.values() for row in rows) == {"comment": 5, "same cluster": 3}


@settings(max_examples=100, deadline=None)
@given(graphs, texts, st.sampled_from(["chain", "all"]))
def test_the_account_adds_up(claims: list[Claim], texts: dict[Key, str], pairs: str) -> None:
    found = made_with(claims, texts, pairs=pairs, cluster_pairs=2)
    positives = found.positives()
    assert len(claims) == sum(positives.values()) - positives.get("same cluster", 0) + sum(
        found.claims_left_out.values()
    )
    negatives = [row for rows in found.pairs.values() for row in rows if row.label == 0]
    assert len(negatives) <= found.negatives_wanted


def test_half_a_character_in_a_label_can_be_written() -> None:
    texts = {("a/b", number): f"number{number} of {number % 3}" for number in range(1, 30, 2)}
    claims = [Claim(("a/b", 3), ("a/b", 1), "comment")]
    found = made_with(claims, texts, label="bug \ud800", splits=(1, 0, 0), negatives={"labels": 1.0}).pairs["train"]
    (row,) = [row for row in found if row.kind == "labels"]
    assert row.why.encode() == b"same label bug \\ud800"


def test_overlap_is_cosine_and_finds_the_nearest() -> None:
    index = Overlap(["crash in the menu", "crash in the menu", "the menu is green", "nothing alike", ""])
    (same, first), (less, second) = index.nearest(0, 5)
    assert (first, second) == (1, 2)
    assert same == pytest.approx(1.0)  # the same words
    assert (index.cosine(0, 1), index.cosine(0, 2), index.cosine(0, 4)) == pytest.approx((same, less, 0.0))
    assert 0 < less < 0.6
    assert index.nearest(4, 5) == []


def test_the_settings_offer_what_there_is() -> None:
    assert tuple(NEGATIVES) == KINDS
    assert set(POSITIVES) == {"chain", "all"}


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"repos": ()}, "needs a repository"),
        ({"repos": ("https://github.com/a/b",)}, "OWNER/REPO; came"),
        ({"repos": ("a/..",)}, "OWNER/REPO; came"),
        ({"negatives": {"hard": 1}}, "unknown kind of negatives 'hard'"),
        ({"splits": (0, 0, 0)}, "--splits one above 0"),
        ({"negatives": {"random": float("nan")}}, "numbers of 0 and more"),
        ({"max_issues": 0}, "--max-issues must be above 0"),
        ({"since": "yesterday"}, "as 2024-01-31"),
        ({"api": "https://me:secret@host"}, "plain address"),
        ({"api": "https://[bad"}, "plain address"),
        ({"api": "https://host:99999"}, "plain address"),
    ],
)
def test_settings_that_cannot_be_meant_are_told(named: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        IssueSettings(**{"repos": ("a/b",), "out": Path("out"), **named})  # type: ignore[arg-type]


def test_a_token_does_not_travel_for_all_to_read() -> None:
    plain = IssueSettings(repos=("a/b",), out=Path("out"), api="http://host.example")
    assert plain.token({}) is None
    with pytest.raises(SettingsError, match="not sent over http"):
        plain.token({"GITHUB_TOKEN": "x"})
    with pytest.raises(SettingsError, match="no token has"):
        plain.token({"GITHUB_TOKEN": "x\ny: z"})
