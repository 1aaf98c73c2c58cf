"""Build a `tokenizer.json` that applies the prompt of an encoder, including its tail and its text edits.

Programs that encode a plain text with a tokenizer support at most a prefix as prompt. But `tokenizer.json` can change
text and ids, and every program applies this without additional code:

    text ──► normalizer ──► pre-tokenizer ──► model ──► truncation ──► post-processor ──► ids
             edits, head,                               last tokens     special tokens, and the ids of the
             merge_span                                 of the text     tail that no text changes

The parts come from the `TokenizedTemplate` of the encoder. The head and the merge span are added to the text, because
their tokens can merge with it. Ids that are equal for all texts are added after truncation. So texts of any length get
the ids of the encoder.

Special tokens are in the vocabulary but are no added tokens, so that their names in a text are plain characters in every
program, as in the encoder. Added tokens that are not special (`<table>` in Gemma, `<tool_call>` in Qwen) are tokens, as in
the encoder. `tokenizers` would apply the normalizer to each part of the text between two added tokens. So these tokens are
`normalized`: they are searched in the text after the normalizer, which is then applied to the whole text. Their names are
normalized too, and are stored between two marks, at which the normalizer removes the prompt from a name. So their names
have the marks in the exported vocabulary. Normalizers of an encoder that do more than NFC or the replacement of spaces
need the parts: added tokens are then plain characters (`changed_names`), and texts with them get other ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from angle_llm.export.texts import SENTENCES
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.sentence_transformers_folder import tokenizer_config
from angle_llm.model.source.tokenizer import TEXT_ENDS, SentenceTokenizer, Tokenizer, plain_ids

_EDITS: dict[str, dict[str, Any]] = {
    "append_full_stop": {"type": "Replace", "pattern": {"Regex": r"""(?<![.?"'])\z"""}, "content": "."},
    "double_quotes_to_single": {"type": "Replace", "pattern": {"String": '"'}, "content": "'"},
    "final_question_mark_to_full_stop": {"type": "Replace", "pattern": {"Regex": r"\?\z"}, "content": "."},
}
"""The text edits in `prompts.TEXT_EDITS` by name, as JSON of normalizers for the library `tokenizers`."""
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
"""The normalizer of Gemma."""
_MARKS = (chr(0xFDD0), chr(0xFDD1))
"""Characters before and after the name of an added token. Unicode reserves them for uses inside a program."""


@dataclass(frozen=True)
class PromptTokenizer:
    """A tokenizer that adds the prompt of an encoder to texts, as the content of two files for `AutoTokenizer`."""

    spec: dict[str, Any]
    """Content of tokenizer.json."""
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    plain_names: list[str]
    """Names of added tokens of the encoder that this tokenizer splits like plain text; the token ids differ."""
    changes_text: bool
    """Whether the normalizer adds a part of the prompt or edits the text."""


def prompt_tokenizer(sentences: SentenceTokenizer, embedding_count: int) -> PromptTokenizer:
    """Build a tokenizer that adds the prompt and special tokens of an encoder, and truncates at its maximum length.

    `sentences` is the tokenizer of the encoder, and `embedding_count` the number of its token embeddings.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`, or without a token for padding.
    """
    tokenizer, prompt = sentences.tokenizer, sentences.prompt
    spec = _read_spec(tokenizer)
    before, head, merge_span, after = sentences.template
    special = sentences.special_tokens
    config = tokenizer_config(tokenizer, sentences.max_length, embedding_count)
    steps = [_EDITS[name] for name in prompt.edits]
    if merge_span:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\z"}, "content": merge_span})
    if head:  # not Replace at \A: tokenizers 0.23 doubles tokens after it
        steps.append({"type": "Prepend", "prepend": head})
    # Added tokens of the result. `tokenizers` finds special tokens in a text too, unless they are in the vocabulary only.
    kept = [token for token in spec["added_tokens"] if not token["special"]]
    plain_names: list[str] = []
    if steps:
        plain_names = changed_names(tokenizer, with_prompt=True)
        # The encoder edits quotes before it searches names, so names with quotes are never tokens.
        quotes = {'"'} if "double_quotes_to_single" in prompt.edits else set()
        kept = [token for token in _kept(spec) if quotes.isdisjoint(token["content"])]
        if kept:
            _forget(spec["model"], {token["content"] for token in kept})
            start, end = _MARKS
            # The normalizer removes the prompt that it has added to a name (see the module docstring).
            kept = [token | {"content": f"{start}{token['content']}{end}", "normalized": True} for token in kept]
            prompt_of_name = rf"\A{re.escape(head)}{start}|{end}\.?{re.escape(merge_span)}\z"
            steps.append({"type": "Replace", "pattern": {"Regex": prompt_of_name}, "content": ""})
        original = spec["normalizer"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *([] if original is None else [original])]}
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        in_config = [token for token in spec["added_tokens"] if token["content"] in config.values()]  # `pad_token` etc.
        vocabulary |= {token["content"]: token["id"] for token in (*in_config, *kept)}
        spec["added_tokens"] = kept
    else:
        pieces = {piece for piece, _ in vocabulary}
        spec["added_tokens"] = [
            token for token in spec["added_tokens"] if not (token["special"] and token["content"] in pieces)
        ]
        for token in spec["added_tokens"] if steps else ():
            token["special"] = True  # and `split_special_tokens` does not split special tokens
    spec["post_processor"] = _post_processor(tokenizer, [*special.before, *before], [*after, *special.after])
    spec["truncation"] = {
        "direction": "Right", "max_length": sentences.max_length, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    spec["padding"] = None
    return PromptTokenizer(spec, config, plain_names, changes_text=bool(steps))


def changed_names(tokenizer: Tokenizer, *, with_prompt: bool = False) -> list[str]:
    """Return the names of added tokens whose token ids change if the tokenizer reads the names as plain text.

    Special tokens are not included. `with_prompt`: only names that an exported tokenizer with a prompt reads as plain text.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`.
    """
    spec = _read_spec(tokenizer)
    kept = _kept(spec) if with_prompt else []
    names = [token["content"] for token in spec["added_tokens"] if not token["special"] and token not in kept]
    spec |= {"added_tokens": [], "post_processor": None}
    plain = type(tokenizer.backend_tokenizer).from_str(json.dumps(spec))
    texts = [f"a{name}b" for name in names]
    encodings = plain.encode_batch(texts, add_special_tokens=False)
    expected = plain_ids(tokenizer, texts)
    return [name for name, ids, encoding in zip(names, expected, encodings, strict=True) if ids != encoding.ids]


def _kept(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens that are the same if a normalizer is applied to the whole text before they are searched.

    `spec` is the content of `tokenizer.json`. Special tokens are not included.
    """
    normalizer = spec["normalizer"] or {"normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    if steps not in ([], [_SPACES], [{"type": "NFC"}]) or not isinstance(spec["model"]["vocab"], dict):
        return []
    tokens = [token for token in spec["added_tokens"] if not (token["special"] or token["single_word"])]
    if steps != [_SPACES]:
        return tokens
    # After this normalizer, names with spaces differ, and `lstrip` and `rstrip` find no spaces to remove.
    return [token for token in tokens if not (token["lstrip"] or token["rstrip"] or {" ", "▁"} & {*token["content"]})]


def _forget(model: dict[str, Any], names: set[str]) -> None:
    """Remove names of added tokens from the vocabulary and merges of a model.

    The model never receives these names. With a second name for an id, `tokenizers` would save only one name.
    """
    for name in names & model["vocab"].keys():
        del model["vocab"][name]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if names.isdisjoint((*pair, "".join(pair)))]


def _read_spec(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for a tokenizer of transformers.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ArtifactError(
            f"{type(tokenizer).__name__} has no tokenizer.json for the prompt. Save the encoder with a tokenizer of the "
            "`tokenizers` library; AutoTokenizer returns one for most models."
        )
    spec: dict[str, Any] = json.loads(backend.to_str())
    return spec


def check_same_ids(
    encode: Callable[[str], list[int]], sentences: SentenceTokenizer, head: str = "", plain_names: Sequence[str] = ()
) -> None:
    """Check that an exported tokenizer gives the same token ids as the encoder, for built-in texts of all kinds.

    Args:
        encode: function of the exported tokenizer, from a text to its token ids.
        sentences: tokenizer of the encoder, which adds the prompt.
        head: prompt that is added before each text for `encode`.
        plain_names: names of added tokens that the exported tokenizer splits like plain text; texts that contain a name
            are skipped.

    Raises:
        ArtifactError: for a text with other ids.
    """
    with_ends = [text for end in TEXT_ENDS for text in (f"A man eats{end}", f"{end}A man eats")]
    names = sentences.tokenizer.get_added_vocab()
    with_names = [f"A man{name}eats" for name in names]
    with_names += [f"A man {name} eats" for name in names if "▁" not in name]  # Gemma: other ids next to a space
    for text in [*SENTENCES, *with_ends, *with_names]:
        if any(name in text for name in plain_names):
            continue
        try:
            (ids,) = sentences([text])
        except ValueError:  # the tokenizer has no token for the text
            continue
        if encode(head + text) != ids:
            raise ArtifactError(
                f"The exported tokenizer cannot include the prompt {sentences.prompt.written!r}: {text!r:.60} gets other token "
                "ids. Use this encoder with angle_llm, or train with a prompt that is text before {text} only."
            )


def _post_processor(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """Return a post-processor for `tokenizer.json` that adds the token ids `before` and `after` around every text."""
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
