"""A `tokenizer.json` that words texts by itself: the prompt, its tail and its edits as parts of the tokenizer.

Tools that take a plain text and a tokenizer know prompts as prefixes at best. But a tokenizer has places of its own where
text and ids can be added, and every tool that reads `tokenizer.json` goes through them, without any code of ours:

    text ──► normalizer ──► pre-tokenizer ──► model ──► truncation ──► post-processor ──► ids
             edits, head,                               the text's     special tokens, and what
             joint                                      last tokens    no text changes: head, tail

Two routes, one for each way a prompt is tokenised:

segments  head and tail are ids around the text's own, which the post-processor adds after truncation. The same ids as
          `SentenceTokenizer` for every text, however long.
joined    the text's ends may merge with the prompt, so the normalizer writes the head in front of the text, and behind it
          the joint: the beginning of the tail up to where no text reaches (the closing quote, for the bundled prompts).
          The post-processor adds the ids of the rest. The same ids for every text that fits. A text that is too long
          loses its last tokens, and the joint with them: `SentenceTokenizer` counts the tokens of whole wordings to find
          its cut, which no tokenizer can do, so there the ids are others, and so is the vector. (Not where a prompt has no
          tail: then both cut the ids.) `over_long` tells which promise a tokenizer gives.

Names of added tokens that are not special (`<tool_call>` in Qwen's) stay tokens in a text by the first route without edits.
The normalizer sees the text between two of them, not the whole of it; so where it has something to write, they are plain
characters (`WordedTokenizer.plain_names`), and a text that contains one becomes other ids.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from angle_llm.artifact import ArtifactError
from angle_llm.export.sentences import SENTENCES
from angle_llm.modeling.tokenization import SentenceTokenizer, Tokenizer, plain_ids

_EDITS: dict[str, dict[str, Any]] = {
    "append_full_stop": {"type": "Replace", "pattern": {"Regex": r"""(?<![.?"'])\z"""}, "content": "."},
    "double_quotes_to_single": {"type": "Replace", "pattern": {"String": '"'}, "content": "'"},
    "final_question_mark_to_full_stop": {"type": "Replace", "pattern": {"Regex": r"\?\z"}, "content": "."},
}
"""`prompts.TEXT_EDITS` as normalizers."""

_ENDS = [
    *string.printable, "...", "?!", '."', ".'", ").", '""', "  ", "\n\n", "é", "。", "」", "”", "’", "…", "й", "ر", "😀",
    "\u0301",
]  # fmt: skip
"""What the last characters of a text may be: a representative of each sort, to see how far a tail reacts to them."""


@dataclass(frozen=True)
class WordedTokenizer:
    """The two files of a tokenizer that `AutoTokenizer` reads."""

    spec: dict[str, Any]
    """tokenizer.json"""
    config: dict[str, Any]
    """tokenizer_config.json"""
    over_long: str
    """What a text that is too long becomes: the `same` ids as in `SentenceTokenizer`, or `other` ones."""
    joint: str
    """The part of the prompt that a text which is too long loses with its end."""
    plain_names: list[str]
    """Added tokens that are no longer found in a text."""


def worded_tokenizer(sentences: SentenceTokenizer) -> WordedTokenizer:
    """The tokenizer of an encoder with its prompt, special tokens and length inside.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`, or without a token that may serve as padding.
    """
    tokenizer, prompt = sentences.tokenizer, sentences.prompt
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ArtifactError(
            f"{type(tokenizer).__name__} has no tokenizer.json to put the prompt in. Save the encoder with a tokenizer of the "
            "`tokenizers` library: AutoTokenizer gives one for most models."
        )
    spec: dict[str, Any] = json.loads(backend.to_str())
    frame, joined = sentences.frame, prompt.tokenization == "joined"
    head_ids, tail_ids = plain_ids(tokenizer, [prompt.head, prompt.tail])
    steps = [_EDITS[name] for name in prompt.edits]
    joint = ""
    if joined:
        joint, tail_ids = _split_tail(tokenizer, prompt.head, prompt.tail)
        head_ids = []
        if joint:
            steps.append({"type": "Replace", "pattern": {"Regex": r"\z"}, "content": joint})
        if prompt.head:  # not Replace at \A: tokenizers 0.23 doubles tokens after it
            steps.append({"type": "Prepend", "prepend": prompt.head})
    plain_names: list[str] = []
    if steps:
        own = spec["normalizer"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *([] if own is None else [own])]}
        for token in spec["added_tokens"]:
            if not token["special"]:
                plain_names.append(token["content"])
                token["special"] = True  # and `split_special_tokens` leaves special ones alone
    spec["post_processor"] = _around(tokenizer, [*frame.before, *head_ids], [*tail_ids, *frame.after])
    spec["truncation"] = spec["padding"] = None
    over_long = "other" if joined and prompt.tail else "same"
    return WordedTokenizer(spec, _config(tokenizer, sentences.max_length), over_long, joint, plain_names)


def check_same_ids(exported: Tokenizer, sentences: SentenceTokenizer, over_long: str) -> None:
    """Refuses an exported tokenizer, as it was loaded again, unless texts of all sorts have their encoder's ids.

    Raises:
        ArtifactError: with the first text that has others.
    """
    uncut = SentenceTokenizer(sentences.tokenizer, sentences.prompt, 10**9)
    for text in [*SENTENCES, *(f"A man eats{end}" for end in _ENDS), *(f"{end}A man eats" for end in _ENDS)]:
        try:
            (ids,), (whole,) = sentences([text]), uncut([text])
        except ValueError:  # the tokenizer leaves nothing of it
            continue
        found = exported(text, truncation=True)["input_ids"]
        if found != ids and (over_long == "same" or whole == ids):
            raise ArtifactError(
                f"{type(sentences.tokenizer).__name__} cannot be given the prompt {sentences.prompt.template!r}: {text!r:.60} "
                f"should become the ids {ids[:30]}, and becomes {found[:30]}. Use the encoder with angle_llm."
            )


def _split_tail(tokenizer: Tokenizer, head: str, tail: str) -> tuple[str, list[int]]:
    """The joint, as short as can be, and the ids of the rest of the tail, which are the same after any text."""
    probes = [*(f"A man eats{end}" for end in _ENDS), *_ENDS, *(text for text in SENTENCES if len(text) < 200)]
    whole = plain_ids(tokenizer, [head + text + tail for text in probes])
    for length in range(len(tail) + 1):
        begun = plain_ids(tokenizer, [head + text + tail[:length] for text in probes])
        rest = whole[0][len(begun[0]) :]
        if all(ids + rest == full for ids, full in zip(begun, whole, strict=True)):
            return tail[:length], rest
    raise AssertionError("the whole tail is a joint without a rest")


def _around(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """A post-processor that puts ids around the text's."""
    tokens = {
        name: {"id": name, "ids": list(ids), "tokens": tokenizer.convert_ids_to_tokens(list(ids))}
        for name, ids in (("before", before), ("after", after))
        if ids
    }
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    single = [
        text if name == "text" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in ("before", "text", "after")
        if name == "text" or name in tokens
    ]
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    named = {
        name: str(token)
        for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        if (token := getattr(tokenizer, name, None)) is not None
    }
    padding = next(
        (named[name] for name in ("pad_token", "eos_token", "unk_token", "bos_token") if name in named), None
    )
    if padding is None:
        raise ArtifactError(
            f"{type(tokenizer).__name__} has no token to fill shorter texts up with. Give it a pad_token and save the encoder "
            "again; it is masked, so any token will do."
        )
    return {
        # The class that takes tokenizer.json as it is; a model's own class may build parts of it anew.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "pad_token": padding,
        "padding_side": "right",
        "truncation_side": "right",
        "model_max_length": max_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": list(tokenizer.model_input_names),
    }
