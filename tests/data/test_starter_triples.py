"""The committed starter triples: are they what the generator writes, and do they keep to their own rules?"""

import gzip
import json
import re
from collections import Counter

import pytest

from angle_llm.data.starter import starter_path
from angle_llm.data.starter.generator import COMMITTED_COUNT, COMMITTED_SEED, SHARES, generate_triples, to_lines
from angle_llm.data.starter.grammar import finish, ing, participle, plural, third
from angle_llm.data.starter.lexicon import COLORS, NOUNS, OPPOSITES, SYNONYMS
from angle_llm.data.starter.tables import read_blocks, read_nouns

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


SLIPS = {
    "a wrong verb form": r"\b(?:haves|doed|dos|goed|gos|maked|havs|bes|\w+ieing|\w+[kvz]eing|(?:run|sit|swim|cut|get|put)ing)\b",
    "a wrong plural": r"\b(?:peoples|childs|(?:wo)?mans|(?:wo)?mens|sheeps|deers|mouses|gooses|foots|knifes|loafs)\b",
    "two determiners": r"\b(?:an?|the|some|any|no|my|your|his|her|their|its) (?:an?|the|some|any|my|your)\b",
    "an article inside a noun phrase": r"\b(?:homemade|fresh|used|(?<!years )old|new|red|blue|large|small|game of|match of)"
    r" an? \w",
    "a person that is a thing": r"\b(?:nobody|no one|someone|somebody|a person)\b(?! but).* (?:its|itself)\b",
    "two verbs": r"\b(?:is|are|was|were) (?:is|are|was|were)\b",
    "a number with a singular": r"(?i)\b(?:two|three|four|five|six|several|a few|a couple of) (?:\w+ )?"
    r"(?:man|woman|child|person|boy|girl|guy|adult|kid|dog|cat|horse|student|worker)\b(?! \w+s\b)",
    "plural people in one thing": r"\b(?:men|women|people|workers) (?:with|in) an? (?:beard|hard hat)\b",
    "is with a plural": r"(?i)\bthere is (?:two|three|four|five|six|several|a few|a couple)\b",
    "are with a singular": r"(?i)\bthere are (?:an? (?!few|couple|pair|lot|number)|one )"
    r"|^an? (?!few|couple|pair|lot|number)\w+ are\b",
    "an article before a pronoun": r"(?i)\ban? (?:something|someone|somebody|anything)\b",
    "an article before a plural": r"(?i)\ban? (?:drums|trousers|scissors|jeans|goggles|sunglasses|shorts)\b",
    "a mass with a plural verb or some": r"\bsome (?:checkers|dominoes|chess|poker|mahjong|soccer|football)\b"
    r"|play\w* soccer ball",
    "a question with a wrong auxiliary": r"^(?:Why is my [\w ]+? run\b|Why does my [\w ]+? so slow\b)"
    r"|\bshould I (?:have|need) to\b|\bhow (?:is|can) [^?]* treated in an\b",
    "two crossed comparisons": r"\blike [\w ]+ to [\w ]+ by far|\bprefer [\w ]+ better than\b",
    "a missing preposition": r"^Which person do we owe|\bhas recovered (?!from)\w|were beaten to\b"
    r"|^Leave the \w+ (?:dry|harden|rest) ",
    "the present with since": r"\b(?:is|are) [^,;]*? since (?:childhood|[A-Z]\w+day)\b",
    "a number cut at its comma": r"(?<![\d,.])0\d\d\b|\b[1-9] dollars\b",
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_no_sentence_has(slip: str, triples: list[dict[str, str]]) -> None:
    for sentence in (triple[name] for triple in triples for name in SENTENCES):
        assert not re.search(SLIPS[slip], sentence), sentence


@pytest.mark.parametrize(
    ("slip", "sentence"),
    [
        ("a wrong verb form", "A bearded man haves a picnic."),
        ("an article inside a noun phrase", "What is a simple recipe for homemade a cheesecake?"),
        ("an article inside a noun phrase", "A lady is sitting over a game of a game."),
        ("a number with a singular", "Three man are eating."),
        ("are with a singular", "A man are eating."),
        ("an article before a pronoun", "Some people study a something to read."),
        ("a question with a wrong auxiliary", "Why is my laptop run so slowly lately?"),
        ("a missing preposition", "Which person do we owe the invention of the elevator?"),
        ("a number cut at its comma", "Thieves took jewels worth 000 dollars."),
    ],
)
def test_slips_are_recognized(slip: str, sentence: str) -> None:
    assert re.search(SLIPS[slip], sentence)


def test_only_headlines_end_without_punctuation(triples: list[dict[str, str]]) -> None:
    """Questions end in "?", news triples are sentences or headlines throughout, all else are sentences."""
    for triple in triples:
        domain = triple["kind"].split("/")[0]
        for sentence in (triple[name] for name in SENTENCES):
            if domain == "question":
                assert sentence.endswith("?"), sentence
            elif domain != "news":
                assert sentence.endswith((".", "?")), sentence


def test_every_adjective_and_color_has_an_opposite() -> None:
    nouns = [noun for members in read_nouns(NOUNS).values() for noun in members]
    assert {adjective for noun in nouns for adjective in noun.adjectives} | set(COLORS) <= OPPOSITES.keys()


def test_a_synonym_is_no_sister() -> None:
    """Else "a spade" for "a shovel" would stand in the positive of one triple and in the negative of another."""
    for members in read_nouns(NOUNS).values():
        assert not {SYNONYMS.get(noun.word) for noun in members} & {noun.word for noun in members}


def test_a_comma_inside_a_number_does_not_separate() -> None:
    (block,) = read_blocks("= {price}.\n& price: 80, 1,500\n+ synonym: a\n- antonym: b")
    assert block.slots == {"price": ["80", "1,500"]}


@pytest.mark.parametrize(
    ("verb", "progressive", "present", "passive"),
    [
        ("lie", "lying", "lies", "lied"),
        ("chop", "chopping", "chops", "chopped"),
        ("carry", "carrying", "carries", "carried"),
        ("write", "writing", "writes", "written"),
        ("wash", "washing", "washes", "washed"),
        ("row", "rowing", "rows", "rowed"),
        ("do", "doing", "does", "done"),
    ],
)
def test_verb_forms(verb: str, progressive: str, present: str, passive: str) -> None:
    assert (ing(verb), third(verb), participle(verb)) == (progressive, present, passive)


def test_have_is_irregular() -> None:
    assert (ing("have"), third("have")) == ("having", "has")


def test_noun_phrases() -> None:
    assert [plural(noun) for noun in ("loaf of bread", "young woman", "man with a beard", "taxi", "box")] == [
        "loaves of bread", "young women", "men with beards", "taxis", "boxes",
    ]  # fmt: skip
    assert finish("a hour  with a university , a old uncle .") == "An hour with a university, an old uncle."


def test_an_unknown_file_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"nli_triples\.jsonl\.gz"):
        starter_path("nothing.txt")
