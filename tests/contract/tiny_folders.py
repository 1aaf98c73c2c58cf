"""Tiny model folders and data files for the contract tests, made with transformers and tokenizers alone.

`write_model("llama", folder)` writes the files of a model on the hub: weights, configuration and tokenizer. Every parameter is
random and seeded, biases and norms too, so that an embedding depends on every token and on its position.
"""

import json
import random
import string
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    BertConfig,
    BertTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCABULARY = 420
POSITIONS = 128
DIMENSIONS = 32
SUBJECTS = ["A man", "A woman", "A child", "The dog", "A cat", "Two girls", "Someone", "The old man"]
VERBS = ["runs", "eats", "sleeps", "sings", "plays the violin", "reads a book", "waits", "opens the door"]
PLACES = ["in the park", "on the street", "at home", "near the river", "in a small house"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different sentences, the same for a seed."""
    draw = random.Random(seed)
    every = [f"{who} {does} {where}." for who in SUBJECTS for does in VERBS for where in PLACES]
    return draw.sample(every, count)


def _corpus() -> list[str]:
    alphabet = [
        string.ascii_lowercase + string.ascii_lowercase + string.digits + string.digits,
        " ".join(string.printable),
    ]
    plain = sentences(200)
    return [*plain, *(f'Summarize sentence "{text}" in one word:"' for text in plain), *alphabet]


@cache
def byte_level() -> PreTrainedTokenizerBase:
    """LLaMA-3's kind: byte-level BPE, `<s>` in front of every text, no padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    first = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), first])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )


@cache
def word_piece() -> PreTrainedTokenizerBase:
    """BERT's kind: lower-casing WordPiece, `[CLS]` … `[SEP]`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokens = [*special, *sorted(set(tokenizer.get_vocab()) - set(special))]  # the trainer's order differs between runs
    return BertTokenizer(vocab={token: number for number, token in enumerate(tokens)})


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIMENSIONS,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}


def write_model(kind: str, folder: Path) -> Path:
    """Writes a model folder of the kind `llama`, `mistral` (a sliding window of 6 tokens) or `bert`."""
    config = {
        "llama": lambda: LlamaConfig(**_SIZES, num_key_value_heads=2, bos_token_id=0, eos_token_id=1),
        "mistral": lambda: MistralConfig(
            **_SIZES, num_key_value_heads=2, sliding_window=6, bos_token_id=0, eos_token_id=1
        ),
        "bert": lambda: BertConfig(**_SIZES),
    }[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    if kind == "bert":
        model.pooler = None
    model.save_pretrained(folder)
    (word_piece() if kind == "bert" else byte_level()).save_pretrained(folder)
    return folder


def triples(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of the format `triple`; anchors repeat, as in NLI."""
    texts = sentences(3 * count, seed)
    return [
        {"anchor": texts[3 * (n - n % 2)], "positive": texts[3 * n + 1], "negative": texts[3 * n + 2]}
        for n in range(count)
    ]


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A JSONL file; a string is written as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_pairs(path: Path, rows: Sequence[tuple[str, str, float]]) -> Path:
    """A TSV file of scored pairs, as `--evaluation.tasks` and `eval/sts.py --tasks` read them."""
    path.write_text("sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{s}\n" for a, b, s in rows), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
