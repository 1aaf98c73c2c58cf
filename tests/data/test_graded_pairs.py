"""The graded evaluation pairs: well-formed, evenly spread, free of repetition and of training sentences."""

import csv
import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

STARTER = Path(__file__).resolve().parents[2] / "angle_llm" / "data" / "starter"
SHARES = {"caption": 0.35, "news": 0.25, "forum": 0.20, "everyday": 0.20}


class Pair(NamedTuple):
    genre: str
    sentence1: str
    sentence2: str
    score: float

    @property
    def bin(self) -> int:
        return math.floor(self.score + 0.5)


def normalized(sentence: str) -> str:
    return " ".join(re.sub(r"[^\w\s]|_", "", sentence.lower()).split())


def read_pairs(path: Path) -> list[Pair]:
    header, *lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert header == "genre\tsentence1\tsentence2\tscore"
    pairs = []
    for line in lines:
        genre, sentence1, sentence2, score = line.split("\t")
        pairs.append(Pair(genre, sentence1, sentence2, float(score)))
    return pairs


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return read_pairs(STARTER / "graded_pairs.tsv")


def test_file_is_plain_tsv(pairs: list[Pair]) -> None:
    raw = (STARTER / "graded_pairs.tsv").read_bytes()
    assert not raw.startswith(b"\xef\xbb\xbf")
    assert b"\r" not in raw
    assert raw.endswith(b"\n")
    assert not raw.endswith(b"\n\n")
    # A reader that honours quotes must see the same fields as one that only splits at tabs.
    rows = list(csv.reader(raw.decode("utf-8").splitlines(), delimiter="\t"))[1:]
    assert [(row[0], row[1], row[2], float(row[3])) for row in rows] == [tuple(pair) for pair in pairs]


def test_there_are_enough_pairs_of_each_genre(pairs: list[Pair]) -> None:
    assert len(pairs) >= 320
    counts = Counter(pair.genre for pair in pairs)
    assert counts.keys() == SHARES.keys()
    for genre, share in SHARES.items():
        assert counts[genre] / len(pairs) == pytest.approx(share, abs=0.03), genre


def test_scores_fill_the_scale(pairs: list[Pair]) -> None:
    assert all(0.0 <= pair.score <= 5.0 for pair in pairs)
    bins = Counter(pair.bin for pair in pairs)
    assert bins.keys() == set(range(6))
    assert min(bins.values()) >= 30
    assert any(not pair.score.is_integer() for pair in pairs)


@pytest.mark.parametrize("genre", SHARES)
def test_every_genre_has_every_score(pairs: list[Pair], genre: str) -> None:
    assert {pair.bin for pair in pairs if pair.genre == genre} == set(range(6))


def test_sentences_are_clean_and_of_sensible_length(pairs: list[Pair]) -> None:
    for pair in pairs:
        for sentence in (pair.sentence1, pair.sentence2):
            assert sentence == " ".join(sentence.split()), sentence
            assert 4 <= len(sentence.split()) <= 25, sentence
        assert normalized(pair.sentence1) != normalized(pair.sentence2), pair


def test_no_pair_occurs_twice_in_either_order(pairs: list[Pair]) -> None:
    counts = Counter(frozenset((normalized(pair.sentence1), normalized(pair.sentence2))) for pair in pairs)
    assert [sorted(pair) for pair, count in counts.items() if count > 1] == []


def test_no_sentence_occurs_in_more_than_two_pairs(pairs: list[Pair]) -> None:
    counts = Counter(normalized(sentence) for pair in pairs for sentence in (pair.sentence1, pair.sentence2))
    assert [sentence for sentence, count in counts.items() if count > 2] == []


def test_word_overlap_misleads_often(pairs: list[Pair]) -> None:
    """The set must not be solvable by counting shared words."""

    def overlap(pair: Pair) -> float:
        left, right = set(normalized(pair.sentence1).split()), set(normalized(pair.sentence2).split())
        return len(left & right) / len(left | right)

    assert sum(pair.score >= 4.0 and overlap(pair) < 0.25 for pair in pairs) >= 30
    assert sum(pair.score <= 3.0 and overlap(pair) > 0.45 for pair in pairs) >= 20


def test_no_sentence_is_training_data(pairs: list[Pair]) -> None:
    ours = {normalized(sentence) for pair in pairs for sentence in (pair.sentence1, pair.sentence2)}
    with gzip.open(STARTER / "nli_triples.jsonl.gz", "rt", encoding="utf-8") as lines:
        triples = [json.loads(line) for line in lines]
    assert triples
    theirs = {normalized(triple[field]) for triple in triples for field in ("anchor", "positive", "negative")}
    assert ours & theirs == set()
