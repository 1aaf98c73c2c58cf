"""A `tokenizer.json` that contains the prompt, its tail and its text edits.

Tools that take a plain text and a tokenizer support prompts as prefixes at best. But `tokenizer.json` has fields for
text and ids, which every tool applies without any code:

    text ──► normalizer ──► pre-tokenizer ──► model ──► truncation ──► post-processor ──► ids
             edits, head,                               last tokens     special tokens, and the ids of the
             merge_span                                 of the text     tail that no text changes

The `TokenizedTemplate` of the encoder has the parts: the head and the merge span are added to the text, since they may
merge with it; ids that no text changes are added after truncation. So texts of any length get the ids of their encoder.

Special tokens are tokens of the vocabulary but no added tokens, so that their names in a text are plain characters in
every program, as in the encoder. Added tokens that are not special (`<tool_call>` in Qwen) stay added tokens if nothing
is added to the text. Otherwise the normalizer would be applied to each text between two of them, so they become plain
characters. A text that contains one of `PromptTokenizer.plain_names` gets other ids than in the encoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from angle_llm.export.texts import SENTENCES
from angle_llm.model.checks import ArtifactError
from angle_llm.model.library_folder import tokenizer_config
from angle_llm.model.tokenizer import TEXT_ENDS, SentenceTokenizer, Tokenizer, plain_ids

_EDITS: dict[str, dict[str, Any]] = {
    "append_full_stop": {"type": "Replace", "pattern": {"Regex": r"""(?<![.?"'])\z"""}, "content": "."},
    "double_quotes_to_single": {"type": "Replace", "pattern": {"String": '"'}, "content": "'"},
    "final_question_mark_to_full_stop": {"type": "Replace", "pattern": {"Regex": r"\?\z"}, "content": "."},
}
"""`prompts.TEXT_EDITS` as normalizers."""


@dataclass(frozen=True)
class PromptTokenizer:
    """The two tokenizer files that `AutoTokenizer` reads."""

    spec: dict[str, Any]
    """tokenizer.json"""
    config: dict[str, Any]
    """tokenizer_config.json"""
    plain_names: list[str]
    """Added tokens of the encoder that are plain characters here."""
    changes_text: bool
    """Whether the normalizer adds a part of the prompt or edits the text."""


def prompt_tokenizer(sentences: SentenceTokenizer) -> PromptTokenizer:
    """Build the tokenizer of an encoder with prompt, special tokens and maximum length.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`, or without a token for padding.
    """
    tokenizer, prompt = sentences.tokenizer, sentences.prompt
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ArtifactError(
            f"{type(tokenizer).__name__} has no tokenizer.json for the prompt. Save the encoder with a tokenizer of the "
            "`tokenizers` library; AutoTokenizer returns one for most models."
        )
    spec: dict[str, Any] = json.loads(backend.to_str())
    (before, head, merge_span, after), special = sentences.template, sentences.special_tokens
    config = tokenizer_config(tokenizer, sentences.max_length)
    steps = [_EDITS[name] for name in prompt.edits]
    if merge_span:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\z"}, "content": merge_span})
    if head:  # not Replace at \A: tokenizers 0.23 doubles tokens after it
        steps.append({"type": "Prepend", "prepend": head})
    plain_names: list[str] = []
    if steps:
        own = spec["normalizer"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *([] if own is None else [own])]}
        plain_names = _changed_names(
            tokenizer, [token["content"] for token in spec["added_tokens"] if not token["special"]]
        )
    # `tokenizers` finds special tokens in a text too, unless they are tokens of the vocabulary only.
    vocabulary, kept = (
        spec["model"]["vocab"],
        [token for token in spec["added_tokens"] if not (token["special"] or steps)],
    )
    if isinstance(vocabulary, dict):
        names = {*map(str, config.values()), *(token["content"] for token in kept)}
        vocabulary |= {token["content"]: token["id"] for token in spec["added_tokens"] if token["content"] in names}
        spec["added_tokens"] = kept
    else:
        for token in spec["added_tokens"] if steps else ():
            token["special"] = True  # and `split_special_tokens` does not split special tokens
    spec["post_processor"] = _around(tokenizer, [*special.before, *before], [*after, *special.after])
    spec["truncation"] = {
        "direction": "Right", "max_length": sentences.max_length, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    spec["padding"] = None
    return PromptTokenizer(spec, config, plain_names, changes_text=bool(steps))


def _changed_names(tokenizer: Tokenizer, names: Sequence[str]) -> list[str]:
    """Return the added tokens that get other ids as plain characters."""
    without: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) | {
        "added_tokens": [],
        "post_processor": None,
    }
    plain = type(tokenizer.backend_tokenizer).from_str(json.dumps(without))
    texts = [f"a{name}b" for name in names]
    found = plain.encode_batch(texts, add_special_tokens=False)
    return [name for name, ids, one in zip(names, plain_ids(tokenizer, texts), found, strict=True) if ids != one.ids]


def check_same_ids(
    encode: Callable[[str], list[int]], sentences: SentenceTokenizer, head: str = "", plain_names: Sequence[str] = ()
) -> None:
    """Check that a reloaded exported tokenizer gives the ids of the encoder for all kinds of texts, each after `head`.

    Texts that contain one of `plain_names` are skipped.

    Raises:
        ArtifactError: with the first text that has other ids.
    """
    around = [text for end in TEXT_ENDS for text in (f"A man eats{end}", f"{end}A man eats")]
    for text in [*SENTENCES, *around]:
        if any(name in text for name in plain_names):
            continue
        try:
            (ids,) = sentences([text])
        except ValueError:  # no token
            continue
        if encode(head + text) != ids:
            raise ArtifactError(
                f"The exported tokenizer cannot hold the prompt {sentences.prompt.template!r}: {text!r:.60} gets other token "
                "ids. Use this encoder with angle_llm, or train with a prompt that is text before {text} only."
            )


def _around(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """Return a post-processor that adds ids before and after the text."""
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
