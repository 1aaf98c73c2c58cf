"""Tiny real tokenizers of the kinds that sentence encoders are built on, trained here on the starter sentences.

`TOKENIZERS[name]()` gives a tokenizer of at most `VOCABULARY` ids; it is made once per test session, so do not change it
(`copy.deepcopy` gives one to change). The file is not called `tokenizers.py`: `tests/` is on `sys.path` and would hide
the library of that name.
"""

import csv
import json
import string
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GemmaTokenizer,
    MPNetTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

VOCABULARY = 400
"""More than the largest id of any tokenizer here: a `vocab_size` for tiny models."""


@cache
def sentences() -> tuple[str, ...]:
    """The first 120 pairs of the starter set, sentence by sentence."""
    with (files("angle_llm.data.starter") / "graded_pairs.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))[:120]
    return tuple(dict.fromkeys(text for row in rows for text in (row["sentence1"], row["sentence2"])))


MARKUP = (
    "<table><tr><td>{0}</td><td>{1}</td></tr></table>",
    "<h1>{0}</h1>\n\n<b>{1}</b>",
    "<b>{0}</b> <s>{1}</s>",
    '<html><body><div class="a">{0}<br/></div></body></html>',
    "<code>{0}</code>",
    "</s>{0}",
    "{0} </s> {1}<s>",
    "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n<think>\n{1}\n</think>\n",
    "<start_of_turn>user\n{0}<end_of_turn>\n<start_of_turn>model\n",
    "[INST] {0} [/INST] {1} </s>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{0}<|eot_id|>",
    '<tool_call>\n{{"name": "search", "text": "{0}"}}\n</tool_call>',
    "<unk> {0} <pad><pad><bos><eos> <mask> {1}",
    "[CLS] {0} [SEP] {1} [SEP] [PAD] [UNK] [MASK]",
    "# {0}\n\n\n- **{1}**\n- [{0}](https://example.org)\n\n```html\n<b>{1}</b>\n```",
    "| {0} |\n|---|\n| <b>{1}</b> |",
    "<<b>b>{0}<b</b><table",
    "<unused0>[multimodal]{0}\t\t{1}",
    "{2}",
    "<h1>{0}</h1> {1} <tool_call> </table>     " * 20,
)
MARKUP_NAMES = (
    "<table>", "<b>", "</s>", "<|im_start|>", "<start_of_turn>", "[INST]", "<unk>", "<pad>", "<think>", "<tool_call>",
)  # fmt: skip


def markup() -> list[str]:
    """200 texts with HTML, Markdown and the markup of chats; ten are longer than 100 tokens of all tokenizers."""
    texts = sentences()
    return [form.format(*texts[at : at + 2], name) for at, name in enumerate(MARKUP_NAMES) for form in MARKUP]


def corpus() -> list[str]:
    """Sentences with and without a prompt, so that prompts are short in tokens and a full stop may merge with a closing quote."""
    return [*sentences(), *(f'Summarize sentence "{text}" in one word:"' for text in sentences())]


def unigram() -> PreTrainedTokenizerBase:
    """The tokenizer of XLM-R, whose special tokens are pieces of a Unigram model."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=VOCABULARY - 1, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(corpus(), trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    return XLMRobertaTokenizer(vocab=[(piece, score) for piece, score in pieces] + [("<mask>", 0.0)])


def write_llama2_folder(folder: Path) -> None:
    """Trains a sentencepiece model with LLaMA-2's own trainer settings and writes its `tokenizer.model` and
    `tokenizer_config.json`, the files a LLaMA-2 checkpoint has."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        byte_fallback=True,
        character_coverage=0.99995,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def llama2() -> PreTrainedTokenizerBase:
    """LLaMA-2's kind: sentencepiece BPE with byte fallback and dummy prefix, `<s>` in front, no padding token."""
    with tempfile.TemporaryDirectory() as folder:
        write_llama2_folder(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def _byte_level(special_tokens: list[str], *, split: str = "", ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), tokenizer.pre_tokenizer]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - 10 if split else VOCABULARY,
            special_tokens=special_tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


@cache
def smollm2() -> PreTrainedTokenizerBase:
    """SmolLM2's kind: byte-level BPE, nothing around a text, the padding token is the end token `<|im_end|>`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )


SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How LLaMA-3 and Qwen (with one digit a piece) split a text."""


@cache
def llama3() -> PreTrainedTokenizerBase:
    """LLaMA-3's kind: byte-level BPE with a split of its own, `<|begin_of_text|>` put in front by the post-processor, special
    tokens outside the model, no padding token."""
    tokenizer = _byte_level([], split=SPLIT, ignore_merges=True)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        extra_special_tokens=["<|eot_id|>"],
        clean_up_tokenization_spaces=False,
    )


@cache
def qwen() -> PreTrainedTokenizerBase:
    """Qwen's kind: NFC, byte-level BPE, special and other added tokens outside the model, no BOS."""
    trained = json.loads(_byte_level([], split=SPLIT.replace("{1,3}", "")).to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_call>")])
    return tokenizer


@cache
def gemma() -> PreTrainedTokenizerBase:
    """Gemma's kind: BPE with byte fallback in which a text is one word, `<bos>` in front; runs of line breaks and HTML are
    added tokens. Runs of spaces and line breaks merge first, as in Gemma-3."""
    trained = json.loads(llama2().backend_tokenizer.to_str())["model"]
    renamed = {"<unk>": "<unk>", "<s>": "<bos>", "</s>": "<eos>"}
    pieces = [renamed.get(piece, piece) for piece in trained["vocab"]][: VOCABULARY - 20]
    names = [
        "\n", "\n\n", "\n\n\n", "▁▁", "<table>", "</table>", "<h1>", "</h1>", "<b>", "</b>", "<s>", "</s>", "<unused0>",
        "[multimodal]",
    ]  # fmt: skip
    vocab = {piece: number for number, piece in enumerate([*pieces, "<pad>", "<mask>", "<start_of_turn>", *names])}
    merges = [("\n", "\n"), ("\n\n", "\n"), ("▁", "▁")]
    merges += [tuple(merge) for merge in trained["merges"] if "".join(merge) in vocab]
    tokenizer = GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    tokenizer.add_tokens(["<start_of_turn>"], special_tokens=True)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


@cache
def bert() -> PreTrainedTokenizerBase:
    """BERT's kind: lower-casing WordPiece, `[CLS]` … `[SEP]`, pad id 0. The library's trainer breaks ties at random."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    clean, split = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in corpus() for word, _ in split.pre_tokenize_str(clean.normalize_str(text)))
    letters = sorted({*string.punctuation, *"".join(words)})
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for length in range(2, len(word) + 1):
            pieces[word[:length]] += count
            pieces[f"##{word[-length:]}"] += count
    common = sorted(pieces, key=lambda piece: (-pieces[piece] * len(piece), piece))
    tokens = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *common])
    return BertTokenizer(vocab={token: number for number, token in enumerate(list(tokens)[:VOCABULARY])})


@cache
def roberta() -> PreTrainedTokenizerBase:
    """RoBERTa's kind: byte-level BPE, `<s>` … `</s>`, pad id 1."""
    trained = json.loads(_byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]).to_str())["model"]
    return RobertaTokenizer(vocab=trained["vocab"], merges=[tuple(merge) for merge in trained["merges"]])


@cache
def mpnet() -> PreTrainedTokenizerBase:
    """MPNet's kind: lower-casing WordPiece with `<s>` … `</s>`, pad id 1."""
    vocab = dict(bert().vocab)
    renamed = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[MASK]": "<mask>"}
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    return MPNetTokenizer(vocab={renamed.get(piece, piece): number for number, piece in enumerate(pieces)})


@cache
def modernbert() -> PreTrainedTokenizerBase:
    """ModernBERT's kind: NFC, byte-level BPE, `[CLS]` … `[SEP]`; runs of spaces are added tokens."""
    tokenizer = _byte_level([], split=SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(" " * width, normalized=True) for width in (4, 3, 2)])
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer.add_special_tokens(special)
    ids = {name: tokenizer.token_to_id(name) for name in special}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, ids[name]) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        clean_up_tokenization_spaces=False,
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "llama2": llama2,
    "smollm2": smollm2,
    "llama3": llama3,
    "qwen": qwen,
    "gemma": gemma,
    "bert": bert,
    "mpnet": mpnet,
    "roberta": roberta,
    "modernbert": modernbert,
}
