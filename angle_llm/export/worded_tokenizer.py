"""A `tokenizer.json` that words texts by itself: the prompt, its tail and its edits as parts of the tokenizer.

Tools that take a plain text and a tokenizer know prompts as prefixes at best. But a tokenizer has places of its own where
text and ids can be added, and every tool that reads `tokenizer.json` goes through them, without any code of ours:

    text ──► normalizer ──► pre-tokenizer ──► model ──► truncation ──► post-processor ──► ids
             edits, head,                               the text's     special tokens, and what
             merge_span                                      last tokens    no text changes: rest of the tail

The encoder's `TokenizedTemplate` gives what goes where: the head and the merge span of a prompt are written around the
text, for its ends may merge with them; ids that no text changes are added behind the cut. So texts have their
encoder's ids, however long they are.

Names of added tokens that are not special (`<tool_call>` in Qwen's) stay tokens in a text where nothing is written around it.
The normalizer sees the text between two of them, not the whole of it; so where it has something to write, they are plain
characters (`WordedTokenizer.plain_names`), and a text that contains one becomes other ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from angle_llm.export.sentences import SENTENCES
from angle_llm.model.checks import ArtifactError
from angle_llm.model.tokenizer import TEXT_ENDS, SentenceTokenizer, Tokenizer

_EDITS: dict[str, dict[str, Any]] = {
    "append_full_stop": {"type": "Replace", "pattern": {"Regex": r"""(?<![.?"'])\z"""}, "content": "."},
    "double_quotes_to_single": {"type": "Replace", "pattern": {"String": '"'}, "content": "'"},
    "final_question_mark_to_full_stop": {"type": "Replace", "pattern": {"Regex": r"\?\z"}, "content": "."},
}
"""`prompts.TEXT_EDITS` as normalizers."""


@dataclass(frozen=True)
class WordedTokenizer:
    """The two files of a tokenizer that `AutoTokenizer` reads."""

    spec: dict[str, Any]
    """tokenizer.json"""
    config: dict[str, Any]
    """tokenizer_config.json"""
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
    (before, head, merge_span, after), special = sentences.template, sentences.special_tokens
    steps = [_EDITS[name] for name in prompt.edits]
    if merge_span:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\z"}, "content": merge_span})
    if head:  # not Replace at \A: tokenizers 0.23 doubles tokens after it
        steps.append({"type": "Prepend", "prepend": head})
    plain_names: list[str] = []
    if steps:
        own = spec["normalizer"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *([] if own is None else [own])]}
        for token in spec["added_tokens"]:
            if not token["special"]:
                plain_names.append(token["content"])
                token["special"] = True  # and `split_special_tokens` leaves special ones alone
    spec["post_processor"] = _around(tokenizer, [*special.before, *before], [*after, *special.after])
    spec["truncation"] = spec["padding"] = None
    return WordedTokenizer(spec, _config(tokenizer, sentences.max_length), plain_names)


def check_same_ids(exported: Tokenizer, sentences: SentenceTokenizer) -> None:
    """Refuses an exported tokenizer, as it was loaded again, unless texts of all sorts have their encoder's ids.

    Raises:
        ArtifactError: with the first text that has others.
    """
    around = [text for end in TEXT_ENDS for text in (f"A man eats{end}", f"{end}A man eats")]
    for text in [*SENTENCES, *around]:
        try:
            (ids,) = sentences([text])
        except ValueError:  # the tokenizer leaves nothing of it
            continue
        found = exported(text, truncation=True)["input_ids"]
        if found != ids:
            raise ArtifactError(
                f"{type(sentences.tokenizer).__name__} cannot be given the prompt {sentences.prompt.template!r}: {text!r:.60} "
                f"should become the ids {ids[:30]}, and becomes {found[:30]}. Use the encoder with angle_llm."
            )


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
