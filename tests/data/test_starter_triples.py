"""The committed starter triples: are they what the generator writes, and do they keep to their own rules?"""

import gzip
import json
import re
from collections import Counter

import pytest

from angle_llm.data.starter import starter_path
from angle_llm.data.starter.generator import COMMITTED_COUNT, COMMITTED_SEED, SHARES, generate_triples, to_lines
from angle_llm.data.starter.grammar import finish, ing, participle, plural, third

SENTENCES = ("anchor", "positive", "negative")
CAPTION_RELATIONS = {"hypernym", "synonym", "drop", "reorder", "passive", "number"}
CAPTION_OPPOSITIONS = {"antonym", "negation", "agent", "object", "number", "place", "attribute", "circumstance"}


@pytest.fixture(scope="module")
def committed() -> bytes:
    return gzip.decompress(starter_path("nli_triples.jsonl.gz").read_bytes())


@pytest.fixture(scope="module")
def triples(committed: bytes) -> list[dict[str, str]]:
    return [json.loads(line) for line in committed.decode().splitlines()]


def test_regeneration_equals_the_committed_file(committed: bytes) -> None:
    assert to_lines(generate_triples(COMMITTED_COUNT, COMMITTED_SEED)) == committed


def test_the_seed_decides() -> None:
    assert generate_triples(300, 1) == generate_triples(300, 1)
    assert generate_triples(300, 1) != generate_triples(300, 2)


def test_there_are_enough_and_all_differ(triples: list[dict[str, str]]) -> None:
    assert len(triples) >= 6000
    assert len({triple["anchor"] for triple in triples}) == len(triples)
    assert all(len({triple[name] for name in SENTENCES}) == 3 for triple in triples)
    assert all(triple.keys() == {*SENTENCES, "kind"} for triple in triples)


def test_every_domain_and_relation_is_present(triples: list[dict[str, str]]) -> None:
    kinds = [triple["kind"].split("/") for triple in triples]
    domains = Counter(domain for domain, _, _ in kinds)
    assert all(abs(domains[domain] / len(triples) - share / 100) < 0.01 for domain, share in SHARES.items())
    assert {relation for domain, relation, _ in kinds if domain == "caption"} == CAPTION_RELATIONS
    assert {opposition for domain, _, opposition in kinds if domain == "caption"} == CAPTION_OPPOSITIONS
    assert {relation for domain, relation, _ in kinds if domain == "question"} == {"paraphrase"}


def test_a_negative_never_repeats_the_words_of_its_anchor(triples: list[dict[str, str]]) -> None:
    """Guards against a contradiction whose contradicting part was left out: same words but for the grammar."""
    grammar = {"there", "is", "are", "a", "an", "the"}
    reordering = {"agent", "order", "antonym", "place", "object"}  # "A sues B" and "B sues A" share all their words
    for triple in triples:
        anchor, negative = (set(re.findall(r"[\w']+", triple[name].lower())) - grammar for name in SENTENCES[::2])
        domain, _, opposition = triple["kind"].split("/")
        if domain in ("caption", "scene") or opposition not in reordering:
            assert not negative <= anchor or "not" in negative or "no" in negative, triple


def test_sentences_are_well_formed(triples: list[dict[str, str]]) -> None:
    for sentence in (triple[name] for triple in triples for name in SENTENCES):
        assert re.match(r"[A-Z0-9]", sentence), sentence
        assert not re.search(r"  |\s[.,?;]|[{}|()]|\.\.|^\s|\s$", sentence), sentence
        assert 2 <= len(sentence.split()) <= 40, sentence


def test_articles_fit_the_next_word(triples: list[dict[str, str]]) -> None:
    vowel = r"(?!uni(?!n)|use|euro|Euro|one\b|once|ukulele|U-|ute)(?:[aeiouAEIOU]|hour|honest)"
    for sentence in (triple[name] for triple in triples for name in SENTENCES):
        assert not re.search(rf"\b[Aa] {vowel}", sentence), sentence
        assert not re.search(rf"\b[Aa]n (?!{vowel}|SUV|X-ray|MRI|8|11|18)", sentence), sentence


def test_no_word_is_doubled(triples: list[dict[str, str]]) -> None:
    for sentence in (triple[name] for triple in triples for name in SENTENCES):
        assert not re.search(r"\b([a-z]+) \1\b", sentence), sentence


@pytest.mark.parametrize(
    ("verb", "progressive", "present", "passive"),
    [
        ("lie", "lying", "lies", "lied"),
        ("chop", "chopping", "chops", "chopped"),
        ("carry", "carrying", "carries", "carried"),
        ("write", "writing", "writes", "written"),
        ("wash", "washing", "washes", "washed"),
        ("row", "rowing", "rows", "rowed"),
    ],
)
def test_verb_forms(verb: str, progressive: str, present: str, passive: str) -> None:
    assert (ing(verb), third(verb), participle(verb)) == (progressive, present, passive)


def test_noun_phrases() -> None:
    assert [plural(noun) for noun in ("loaf of bread", "young woman", "man with a beard", "taxi", "box")] == [
        "loaves of bread", "young women", "men with a beard", "taxis", "boxes",
    ]  # fmt: skip
    assert finish("a hour  with a university , a old uncle .") == "An hour with a university, an old uncle."


def test_an_unknown_file_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"nli_triples\.jsonl\.gz"):
        starter_path("nothing.txt")
