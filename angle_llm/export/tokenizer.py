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
program, as in the encoder. Added tokens that are not special (`<tool_call>` in Qwen) stay added tokens if the normalizer
adds nothing to the text. Otherwise they become plain characters, because the normalizer would be applied to each part of
the text between two added tokens. A text with a name in `PromptTokenizer.plain_names` gets other ids than in the encoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from angle_llm.export.texts import SENTENCES
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.sentence_transformers_folder import tokenizer_config
from angle_llm.model.tokenizer import TEXT_ENDS, SentenceTokenizer, Tokenizer, plain_ids

_EDITS: dict[str, dict[str, Any]] = {
    "append_full_stop": {"type": "Replace", "pattern": {"Regex": r"""(?<![.?"'])\z"""}, "content": "."},
    "double_quotes_to_single": {"type": "Replace", "pattern": {"String": '"'}, "content": "'"},
    "final_question_mark_to_full_stop": {"type": "Replace", "pattern": {"Regex": r"\?\z"}, "content": "."},
}
"""The text edits in `prompts.TEXT_EDITS` by name, as JSON of normalizers for the library `tokenizers`."""


@dataclass(frozen=True)
class PromptTokenizer:
    """A tokenizer that adds the prompt of an encoder to texts, as the content of two files for `AutoTokenizer`."""

    spec: dict[str, Any]
    """Content of tokenizer.json."""
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    plain_names: list[str]
    """Names of added tokens of the encoder that this tokenizer splits like plain text."""
    changes_text: bool
    """Whether the normalizer adds a part of the prompt or edits the text."""


def prompt_tokenizer(sentences: SentenceTokenizer) -> PromptTokenizer:
    """Build a tokenizer that adds the prompt and special tokens of an encoder, and truncates at its maximum length.

    `sentences` is the tokenizer of the encoder.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`, or without a token for padding.
    """
    tokenizer, prompt = sentences.tokenizer, sentences.prompt
    spec = _read_spec(tokenizer)
    (before, head, merge_span, after), special = sentences.template, sentences.special_tokens
    config = tokenizer_config(tokenizer, sentences.max_length)
    steps = [_EDITS[name] for name in prompt.edits]
    if merge_span:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\z"}, "content": merge_span})
    if head:  # not Replace at \A: tokenizers 0.23 doubles tokens after it
        steps.append({"type": "Prepend", "prepend": head})
    plain_names: list[str] = []
    if steps:
        original = spec["normalizer"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *([] if original is None else [original])]}
        plain_names = changed_names(tokenizer)
    # `tokenizers` finds special tokens in a text too, unless they are in the vocabulary only.
    kept = [token for token in spec["added_tokens"] if not (token["special"] or steps)]
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        names = {*map(str, config.values()), *(token["content"] for token in kept)}
        vocabulary |= {token["content"]: token["id"] for token in spec["added_tokens"] if token["content"] in names}
        spec["added_tokens"] = kept
    else:
        for token in spec["added_tokens"] if steps else ():
            token["special"] = True  # and `split_special_tokens` does not split special tokens
    spec["post_processor"] = _post_processor(tokenizer, [*special.before, *before], [*after, *special.after])
    spec["truncation"] = {
        "direction": "Right", "max_length": sentences.max_length, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    spec["padding"] = None
    return PromptTokenizer(spec, config, plain_names, changes_text=bool(steps))


def changed_names(tokenizer: Tokenizer) -> list[str]:
    """Return the names of added tokens whose token ids change if the tokenizer reads the names as plain text.

    Special tokens are not included.

    Raises:
        ArtifactError: for a tokenizer without a `tokenizer.json`.
    """
    spec = _read_spec(tokenizer)
    names = [token["content"] for token in spec["added_tokens"] if not token["special"]]
    spec |= {"added_tokens": [], "post_processor": None}
    plain = type(tokenizer.backend_tokenizer).from_str(json.dumps(spec))
    texts = [f"a{name}b" for name in names]
    found = plain.encode_batch(texts, add_special_tokens=False)
    expected = plain_ids(tokenizer, texts)
    return [name for name, ids, plainly in zip(names, expected, found, strict=True) if ids != plainly.ids]


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
    around = [text for end in TEXT_ENDS for text in (f"A man eats{end}", f"{end}A man eats")]
    for text in [*SENTENCES, *around]:
        if any(name in text for name in plain_names):
            continue
        try:
            (ids,) = sentences([text])
        except ValueError:  # the tokenizer has no token for the text
            continue
        if encode(head + text) != ids:
            raise ArtifactError(
                f"The exported tokenizer cannot include the prompt {sentences.prompt.template!r}: {text!r:.60} gets other token "
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
