"""The two starter data files: their format, and no sentence in both."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

import angle_llm

STARTER = Path(angle_llm.__file__).parent / "data" / "starter"
SENTENCES = ("anchor", "positive", "negative")


def normalized(sentence: str) -> str:
    return " ".join(re.findall(r"[\w']+", sentence.lower()))


@pytest.fixture(scope="module")
def triples() -> list[dict[str, str]]:
    content = gzip.decompress((STARTER / "nli_triples.jsonl.gz").read_bytes()).decode("utf-8")
    return [json.loads(line) for line in content.splitlines()]


@pytest.fixture(scope="module")
def pairs() -> list[list[str]]:
    header, *rows = (STARTER / "graded_pairs.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "genre\tsentence1\tsentence2\tscore"
    return [row.split("\t") for row in rows]


def test_triples_are_distinct_sentences(triples: list[dict[str, str]]) -> None:
    assert len(triples) == len({triple["anchor"] for triple in triples}) == 6800
    for triple in triples:
        assert triple.keys() == {*SENTENCES, "kind"}
        assert len({triple[name] for name in SENTENCES}) == 3, triple
        assert all(re.fullmatch(r"[A-Z0-9]\S*( \S+)+", triple[name]) for name in SENTENCES), triple


def test_pairs_cover_the_scale_in_every_genre(pairs: list[list[str]]) -> None:
    assert Counter(genre for genre, *_ in pairs) == {"caption": 120, "news": 84, "forum": 68, "everyday": 68}
    for genre in ("caption", "news", "forum", "everyday"):
        assert {round(float(row[3])) for row in pairs if row[0] == genre} == set(range(6))
    assert len({frozenset(normalized(text) for text in row[1:3]) for row in pairs}) == len(pairs) == 340


def test_no_evaluation_sentence_is_training_data(triples: list[dict[str, str]], pairs: list[list[str]]) -> None:
    trained = {normalized(triple[name]) for triple in triples for name in SENTENCES}
    assert not [text for row in pairs for text in row[1:3] if normalized(text) in trained]
