"""A tokenizer that contains the prompt gives the ids of its encoder, loaded and called as other tools do."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import transformers
from cases import one_in
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tiny import KINDS, LIKE_ANOTHER, tiny_backbone
from tiny_tokenizers import TOKENIZERS, markup, sentences, unigram
from tokenizers import AddedToken, Tokenizer

from angle_llm.export.tokenizer import PromptTokenizer, check_same_ids, prompt_tokenizer
from angle_llm.model.source.backbone import BackboneLocation, load_tokenizer
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.sentence_transformers_folder import tokenizer_config
from angle_llm.model.source.tokenizer import SentenceTokenizer
from angle_llm.prompts import PromptTemplate, load_prompt

PROMPTS = {
    "tail": load_prompt("summarize_one_word"),
    "edits": load_prompt("summarize_one_word_edited"),
    "plain": load_prompt("plain"),
    "head": PromptTemplate("head", "query: {text}"),
    "seams": PromptTemplate("seams", "{{a}}\\A ({text}). $1 \\z\n?"),
    "joint": PromptTemplate("joint", '"{text}"'),
}
SPECIAL_NAMES = sorted({token for make in TOKENIZERS.values() for token in make().all_special_tokens})
NAMES = ["<think>", "</think>", "<tool_call>", "<table>", "</table>", "<b>", "<s>", "</s>", "<unused0>", "\n\n", "    "]
"""Added tokens of Qwen, Gemma and ModernBERT."""
ODD = [
    *SPECIAL_NAMES, *NAMES,
    "😀", "e\u0301", "\u200d", "日本語", "ﷺ", "\u00a0", "\r\n", "   ", '."', '"', "?", "’", "{text}", "$A",
    "\\z",
]  # fmt: skip
pieces = st.one_of(
    st.sampled_from([*ODD, *(word for text in sentences()[:20] for word in (text, f" {text[:9]}"))]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
texts_of_all_kinds = st.lists(pieces, min_size=1, max_size=6).map("".join).filter(str.strip)

FOLDERS = TemporaryDirectory()
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)
TOKENIZATIONS = ("joined", "segments")
every_tokenization = pytest.mark.parametrize("tokenization", TOKENIZATIONS)


def written(built: PromptTokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(built.spec), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(built.config), encoding="utf-8")
    return folder


@cache
def both(kind: str, tokenization: str, prompt: str, max_length: int) -> tuple[SentenceTokenizer, Any]:
    """Ours (padded on the left, which must not affect the ids), and the exported one."""
    tokenizer = copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    ours = SentenceTokenizer(tokenizer, replace(PROMPTS[prompt], tokenization=tokenization), max_length)
    built = prompt_tokenizer(ours, len(ours.tokenizer))
    assert built.plain_names == []
    return ours, transformers.PreTrainedTokenizerFast.from_pretrained(written(built, Path(mkdtemp(dir=FOLDERS.name))))


def as_the_library_calls_it(exported: Any, texts: list[str]) -> list[list[int]]:
    batch = exported(texts, padding=True, truncation="longest_first", return_tensors="pt")
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def ids_of(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, truncation=True)["input_ids"]


@one_in(7, "kind, tokenization, prompt", TOKENIZERS, TOKENIZATIONS, PROMPTS)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    text=texts_of_all_kinds | st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
    repeats=st.sampled_from([1, 1, 2, 5, 13]),
    max_length=st.sampled_from([1000, 51, 64]),  # odd and even, so that tokens of several bytes are cut apart
)
@example(text="A man is eating.", repeats=1, max_length=1000)
@example(text="A man is eating.", repeats=13, max_length=51)
@example(text='Who said "no"?', repeats=1, max_length=1000)
@example(text="<tool_call> [CLS] </s> <|im_end|>", repeats=1, max_length=1000)
def test_short_and_long_texts_get_the_ids_of_the_encoder(
    kind: str, tokenization: str, prompt: str, text: str, repeats: int, max_length: int
) -> None:
    text = text if repeats == 1 else f"{text} " * repeats
    ours, exported = both(kind, tokenization, prompt, max_length)
    try:
        expected = ours([text])
    except ValueError as error:
        if "adds no token to prompt" not in str(error):
            raise
        return
    assert as_the_library_calls_it(exported, [text]) == expected


LONG = [
    'He said "no". ',
    "{text} {{0}} ",
    "日本語のテキスト。",
    "😀 👩‍👩‍👧 ",
    "".join(SPECIAL_NAMES),
    "ﷺ e\u0301\u200d ",
]


@one_in(11, "kind, tokenization, unit", TOKENIZERS, TOKENIZATIONS, LONG)
def test_texts_around_and_far_beyond_the_limit_are_cut_as_the_encoder_cuts(
    kind: str, tokenization: str, unit: str
) -> None:
    """Lengths around the limit, character by character, then 100,000 characters."""
    ours, exported = both(kind, tokenization, "tail", 64)
    uncut, _ = both(kind, tokenization, "tail", 1000)
    endless = unit * (100_000 // len(unit) + 1)
    first = next(n for n in range(1, 400) if endless[:n].strip())
    fits = max(n for n, ids in enumerate(uncut([endless[:n] for n in range(first, 400)]), first) if len(ids) <= 64)
    texts = [endless[:n].strip() for n in range(max(1, fits - 8), fits + 25)]
    lengths = [len(ids) for ids in uncut(texts)]
    assert min(lengths) <= 64 < max(lengths)
    texts.append(endless[:100_000])
    assert as_the_library_calls_it(exported, texts) == ours(texts)


@every_tokenization
@pytest.mark.parametrize("prompt", ["plain", "head", "tail", "edits"])
def test_special_tokens_that_are_pieces_of_a_unigram_model(prompt: str, tokenization: str) -> None:
    """XLM-R (multilingual-e5, bge-m3): read by `tokenizers` and by transformers."""
    ours = SentenceTokenizer(unigram(), replace(PROMPTS[prompt], tokenization=tokenization), 64)
    built = prompt_tokenizer(ours, len(ours.tokenizer))
    folder = written(built, Path(mkdtemp(dir=FOLDERS.name)))
    check_same_ids(lambda text: Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, ours)
    check_same_ids(ids_of(transformers.PreTrainedTokenizerFast.from_pretrained(folder)), ours)
    texts = ["<s>old</s> price", "a <pad> b", "<mask>", "A man eats."]
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert as_the_library_calls_it(exported, texts) == ours(texts)


@every_kind
def test_a_batch_is_padded_on_the_right_and_masked(kind: str) -> None:
    ours, exported = both(kind, "joined", "tail", 1000)
    texts = list(sentences()[:9])
    assert as_the_library_calls_it(exported, texts) == ours(texts)
    assert exported(texts, padding=True, return_tensors="pt")["attention_mask"][:, 0].all()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER - {"qwen2", "qwen3"})) for kind in KINDS],
)
@every_tokenization
def test_the_tokenizer_loads_with_a_model_config(kind: str, tokenization: str, tmp_path: Path) -> None:
    """`AutoTokenizer` takes the class that the config names; Qwen2's is rebuilt without the normalizer (see `export`)."""
    prompt = replace(PROMPTS["edits"], tokenization=tokenization)
    ours = SentenceTokenizer(TOKENIZERS[KINDS[kind].tokenizer](), prompt, 64)
    built = prompt_tokenizer(ours, len(ours.tokenizer))
    tiny_backbone(kind).config.save_pretrained(written(built, tmp_path))
    exported = load_tokenizer(BackboneLocation(str(tmp_path)))
    if kind == "qwen2" and Version(transformers.__version__) >= Version("5.7"):  # before, it is not rebuilt
        with pytest.raises(ArtifactError, match="cannot include the prompt"):
            check_same_ids(ids_of(exported), ours)
    else:
        check_same_ids(ids_of(exported), ours)
        assert exported.model_max_length == 64


def with_token(kind: str, token: AddedToken, prompt: str) -> tuple[SentenceTokenizer, PromptTokenizer, Any]:
    tokenizer = copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.add_tokens([token])
    ours = SentenceTokenizer(tokenizer, PROMPTS[prompt], 100)
    built = prompt_tokenizer(ours, len(ours.tokenizer))
    return (
        ours,
        built,
        transformers.PreTrainedTokenizerFast.from_pretrained(written(built, Path(mkdtemp(dir=FOLDERS.name)))),
    )


@pytest.mark.parametrize(
    ("kind", "name", "side", "prompt", "plain_names"),
    [
        ("gemma", "<x>", "lstrip", "tail", ["<x>"]),
        ("gemma", "<x>", "rstrip", "tail", ["<x>"]),
        ("qwen", "<x>", "lstrip", "head", []),
        ("qwen", "<x>", "rstrip", "tail", []),
        ("qwen", '<a "b">', None, "tail", []),
        ("qwen", '<a "b">', None, "edits", []),
    ],
)
def test_tokens_with_spaces_around_or_quotes(
    kind: str, name: str, side: str | None, prompt: str, plain_names: list[str]
) -> None:
    """Gemma replaces the spaces that `lstrip` and `rstrip` remove; the edit of quotes removes a name from every text."""
    token = AddedToken(name, normalized=False, **({side: True} if side else {}))
    ours, built, exported = with_token(kind, token, prompt)
    assert built.plain_names == plain_names
    texts = [f"A man {name} eats", f"A man{name}eats", f"{name} eats", f"A man {name}", name, name.replace('"', "'")]
    if not plain_names:
        assert as_the_library_calls_it(exported, texts) == ours(texts)
    check_same_ids(ids_of(exported), ours, plain_names=plain_names)


def test_a_token_that_removes_spaces_is_compared_with_spaces() -> None:
    ours, *_ = with_token("qwen", AddedToken("<x>", normalized=False, lstrip=True), "tail")
    *_, other = with_token("qwen", AddedToken("<x>", normalized=False), "tail")
    with pytest.raises(ArtifactError, match="'A man <x> eats' gets other token ids"):
        check_same_ids(ids_of(other), ours)


def test_another_prompt_is_found() -> None:
    ours, _ = both("smollm2", "joined", "tail", 1000)
    _, other = both("smollm2", "joined", "head", 1000)
    with pytest.raises(ArtifactError, match=r"cannot include the prompt 'Summarize .* gets other token ids"):
        check_same_ids(ids_of(other), ours)


@one_in(3, "kind, prompt", TOKENIZERS, ["tail", "edits", "head", "seams"])
def test_names_of_added_tokens_are_read_as_the_encoder_reads_them(kind: str, prompt: str, tmp_path: Path) -> None:
    ours, exported = both(kind, "joined", prompt, 100)
    texts = markup()
    due = ours(texts)
    assert max(map(len, due)) == 100
    raw = type(exported.backend_tokenizer).from_file(f"{exported.name_or_path}/tokenizer.json")
    exported.save_pretrained(tmp_path)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert due == as_the_library_calls_it(exported, texts) == as_the_library_calls_it(again, texts)
    assert due == [found.ids for found in raw.encode_batch(texts)]


ADDED = [AddedToken("<tool_call>", normalized=False, special=False), AddedToken("<b>", normalized=True, special=False)]


@every_tokenization
@pytest.mark.parametrize("kind", ["smollm2", "llama2", "llama3", "bert"])
def test_added_tokens_that_are_not_special(kind: str, tokenization: str) -> None:
    """Lower case in the normalizer: names are tokens where nothing is added around the text, and characters elsewhere."""
    tokenizer = copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.add_tokens(ADDED)
    ours = SentenceTokenizer(tokenizer, replace(PROMPTS["tail"], tokenization=tokenization), 200)
    built = prompt_tokenizer(ours, len(ours.tokenizer))
    exported = transformers.PreTrainedTokenizerFast.from_pretrained(written(built, Path(mkdtemp(dir=FOLDERS.name))))
    texts = ["Why <tool_call> now?", "<b>", "<tool_call> <b>B</b>", "A <TOOL_CALL>"]
    found, due = as_the_library_calls_it(exported, texts), ours(texts)
    check_same_ids(ids_of(exported), ours, plain_names=built.plain_names)
    assert set(tokenizer.convert_tokens_to_ids(["<tool_call>", "<b>"])) < {number for ids in due for number in ids}
    if (kind, tokenization) == ("bert", "joined"):
        assert built.plain_names == ["<tool_call>", "<b>"]
        assert [ids == expected for ids, expected in zip(found, due, strict=True)] == [False, False, False, True]
    else:
        assert (found, built.plain_names) == (due, [])


def test_a_tokenizer_without_a_token_for_padding_is_refused() -> None:
    tokenizer = TOKENIZERS["bert"]()
    assert tokenizer_config(tokenizer, 10, len(tokenizer))["pad_token"] == "[PAD]"
    with pytest.raises(ArtifactError, match="no pad, eos, unk or bos token with an embedding"):
        tokenizer_config(tokenizer, 10, 0)
