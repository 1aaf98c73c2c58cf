"""Convert texts to token ids with a prompt.

Only the text is truncated. Names of special tokens in a text, such as `</s>`, are plain characters.
"""

from __future__ import annotations

import copy
import re
import string
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from angle_llm.model.source.checks import PROBE_TEXTS
from angle_llm.prompts import PLACEHOLDER, PromptTemplate, Side, SidePrompts

Instructions: TypeAlias = Sequence[str | None]
Tokenizer = Any
"""Type of a `transformers` tokenizer. It is `Any`, because fast and slow tokenizers have no useful common type."""

TEXT_ENDS = [
    *string.printable, "...", "?!", '."', ".'", ").", '""', "  ", "\n\n", "é", "。", "」", "”", "’", "…", "й", "ر", "😀",
    "\u0301",
]  # fmt: skip
"""Representative last characters of a text. They test which characters after a text can merge with its last token."""


class SpecialTokens(NamedTuple):
    """Ids of the special tokens that a tokenizer adds before and after every text, such as [CLS] and [SEP]."""

    before: list[int]
    after: list[int]


TEXTS_TOGETHER, CHARACTERS_TOGETHER = 1024, 2**20
"""Maximum number of texts and maximum number of characters in a tokenizer call.

The limits save memory, because a call keeps offsets and strings of all its tokens.
"""


_MARGIN = 64
"""Number of tokens at the end of the start of a text that are not used, because they can depend on the rest."""
_CHARACTERS_OF_TOKEN = 8
"""Number of characters of a token, more than usual."""


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
    """Return the token ids of texts without special tokens, at most `most` ids per text (None: all).

    Special tokens in a text, such as `</s>`, are encoded as plain characters. Only the start of a long
    text is encoded, or the whole text if the start has too few tokens. The last `_MARGIN` tokens of a start are not used,
    because they can depend on the rest.
    """

    def encode(part: Sequence[str]) -> list[list[int]]:
        ids_of_part: list[list[int]] = tokenizer(
            part, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids_of_part

    ids: list[list[int]] = []
    part: list[str] = []
    characters = 0
    starts = texts if most is None else [_start(text, most + _MARGIN) for text in texts]
    for number, start in enumerate(starts, 1):
        part.append(start)
        characters += len(start)
        if number == len(texts) or len(part) == TEXTS_TOGETHER or characters >= CHARACTERS_TOGETHER:
            for position, text_ids in enumerate(encode(part), number - len(part)):
                if most is not None and len(text_ids) < most + _MARGIN and len(starts[position]) < len(texts[position]):
                    (text_ids,) = encode([texts[position]])
                ids.append(text_ids[:most])  # cut now: a text can be much longer than `most`
            part, characters = [], 0
    return ids


def _start(text: str, tokens: int) -> str:
    """Return the start of a text, up to a space, that probably has the number of tokens; the whole text if it is short."""
    limit = _CHARACTERS_OF_TOKEN * tokens
    end = text.rfind(" ", 0, limit) if len(text) > 2 * limit else -1
    return text[:end] if end > limit // 2 and not text[end - 1].isspace() else text


def find_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens that a tokenizer adds before and after a text.

    A short text is encoded with and without special tokens, and the results are compared.

    Raises:
        ValueError: if no test text has a token, or if the tokenizer also changes the ids of the text when it adds special
            tokens.
    """
    # Some tokenizers, such as for DNA, have no token for "a".
    text, bare = next(
        ((text, ids) for text in ("a", *PROBE_TEXTS) if (ids := plain_ids(tokenizer, [text])[0])), ("", [])
    )
    if not bare:
        raise ValueError(f"{type(tokenizer).__name__} has no token for any test text, such as {PROBE_TEXTS[0]!r}.")
    # As in `plain_ids`, because the tokenizer stores the flag: another value would affect other threads.
    with_special: list[int] = tokenizer(text, split_special_tokens=True, return_attention_mask=False)["input_ids"]
    for start in range(len(with_special) - len(bare) + 1):
        if with_special[start : start + len(bare)] == bare:
            return SpecialTokens(with_special[:start], with_special[start + len(bare) :])
    raise ValueError(
        f"{type(tokenizer).__name__} changes the ids of a text when it adds special tokens ({bare} to {with_special}), so texts "
        "cannot be truncated safely. Set the post-processor of the tokenizer to add tokens around the text only."
    )


def checked_texts(texts: Sequence[str], first: int = 0) -> list[str]:
    """Check texts, and return them as a list. A text must be a string that is not empty, of valid Unicode.

    Error messages give the position of the text in `texts` plus `first`.

    Raises:
        TypeError: if a text is not a string.
        ValueError: if a text is empty or contains a lone surrogate.
    """
    if isinstance(texts, str):
        raise TypeError("texts: expected a sequence of strings, got one string. Put it in a list.")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):
        raise TypeError(f"texts: expected a sequence of strings, got a {type(texts).__name__}. Pass one column.")
    texts = list(texts)  # the index of a pandas Series is not a position
    for position, text in enumerate(texts, first):
        if not isinstance(text, str):
            raise TypeError(f"text {position} must be a string, got {type(text).__name__}: {text!r:.80}")
        if not text.strip():
            raise ValueError(f"text {position} is empty. Remove or replace it.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {position} is not valid Unicode: a lone surrogate {text[error.start]!r} at character {error.start}. "
                "Decode it with the right encoding, or replace such characters: text.encode(errors='replace').decode()."
            ) from None
    return texts


DEFAULT_MAX_LENGTH = 512
"""Default maximum number of tokens in a text, prompt and special tokens included."""


def checked_length(max_length: int | None, backbone: nn.Module) -> int:
    """Check the maximum number of tokens in a text and return it; None selects the default.

    The default is 512, or the number of positions of the backbone if the backbone has fewer.

    Raises:
        ValueError: if `max_length` is less than 1, or more than the number of positions of the backbone.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length: expected 1 or more, got {max_length}.")
    positions = count_positions(backbone)
    if max_length is not None and positions is not None and max_length > positions:
        raise ValueError(f"max_length: expected at most {positions}, the positions of the backbone; got {max_length}.")
    return min(positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH) if max_length is None else max_length


def count_positions(backbone: nn.Module) -> int | None:
    """Return the maximum number of tokens that a backbone has positions for; None if its config sets no limit."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    positions: int | None = getattr(config, "max_position_embeddings", None)
    positions = positions or getattr(config, "max_seq_len", None)  # MPT
    if positions is None or positions < 0:  # XLNet: -1
        return None
    for name, module in backbone.named_modules():
        padding_id = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding_id is not None:
            positions -= padding_id + 1  # RoBERTa counts from padding_idx + 1
    return positions


class TokenizedTemplate(NamedTuple):
    """A tokenized prompt: the token ids of a text with the prompt are `before + ids(head + text + merge_span) + after`.

    Only `ids(…)` is truncated. `merge_span` is the start of the part of the prompt after the text. Its characters, such as
    a closing quote, can be in the same token as the end of the text.
    """

    before: list[int]
    """Token ids of the part of the prompt that is tokenized separately, before the text."""
    head: str
    """Part of the prompt before the text that is tokenized together with the text."""
    merge_span: str
    """Part of the prompt after the text that is tokenized together with the text."""
    after: list[int]
    """Token ids of the rest of the prompt, after the text and `merge_span`."""


class SentenceTokenizer:
    """Converts texts with a prompt to at most `max_length` token ids per text, special tokens included.

    A text that is too long loses its last tokens. Prompt and special tokens are kept, because last-token pooling reads the
    last token. There is one exception. With tokenization `joined`, the first characters of the prompt after the text, such
    as the closing quote of `"{text}"`, can be in the same token as the end of the text. They are truncated with the text;
    tokenization `segments` keeps them. Edits of the prompt apply before truncation, so a full stop that an edit appends can
    be truncated. The ids of a text do not depend on other texts.

    Raises:
        ValueError: from the constructor, if `max_length` is too small for the prompt and a token of text, or for a chat
            template that cannot be used (see `with_chat_template`). From a call, for texts that are empty, not valid
            Unicode, or without a token.
        TypeError: from a call, if a text is not a string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: PromptTemplate, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt = with_chat_template(tokenizer, prompt)
        self.max_length = max_length
        is_chat = prompt.tokenization == "chat"
        self.special_tokens = SpecialTokens([], []) if is_chat else find_special_tokens(tokenizer)
        tokens = [name for name in tokenizer.all_special_tokens if prompt.takes_instruction and name in prompt.template]
        if tokens:
            raise ValueError(
                f"prompt {prompt.name!r} has special tokens of the tokenizer, {', '.join(tokens)}, which would be read as plain "
                "text, unlike in sentence-transformers. Choose another prompt."
            )
        make_template = {"joined": _joined, "segments": _segments, "chat": _chat}[prompt.tokenization]
        self.template = make_template(tokenizer, prompt)
        if prompt.append == "eos":
            self.template = self.template._replace(after=[*self.template.after, *self._end_of_sequence()])
        self._set_lengths()

    def _set_lengths(self) -> None:
        """Set the maximum number of tokens of a text; raise `ValueError` if `max_length` is too small for the prompt."""
        tokenizer, prompt, max_length = self.tokenizer, self.prompt, self.max_length
        before, head, merge_span, after = self.template
        special = len(self.special_tokens.before) + len(self.special_tokens.after)
        overhead = len(before) + sum(map(len, plain_ids(tokenizer, [head, merge_span]))) + len(after)
        if max_length - special <= overhead:
            raise ValueError(
                f"max_length {max_length} is too small for a text: prompt {prompt.name!r} takes {overhead} tokens and special "
                f"tokens {special}. Raise max_length, or choose a shorter prompt or instruction."
            )
        self._text_tokens = max_length - special - len(before) - len(after)
        (self._textless_ids,) = self._apply([""])

    def with_instruction(self, instruction: str) -> SentenceTokenizer:
        """Return a tokenizer with another instruction in the prompt. Raises `ValueError` if the instruction is too long."""
        changed = copy.copy(self)
        prompt = changed.prompt = self.prompt.with_instruction(instruction)
        # The part after the text does not depend on the instruction, which is before the text.
        if prompt.tokenization == "joined":
            changed.template = self.template._replace(head=prompt.head)
        else:
            changed.template = self.template._replace(before=plain_ids(self.tokenizer, [prompt.head])[0])
        changed._set_lengths()
        return changed

    def _end_of_sequence(self) -> list[int]:
        """Return a list with the EOS id that the prompt appends; an empty list if the tokenizer adds EOS itself.

        Raises:
            ValueError: if the tokenizer has no EOS token.
        """
        eos: int | None = self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                f"prompt {self.prompt.name!r} has `append: eos`, but {type(self.tokenizer).__name__} has no eos_token. Set it "
                "in tokenizer_config.json, or choose a prompt without `append`."
            )
        return [] if eos in self.special_tokens.after else [eos]

    def __call__(self, texts: Sequence[str], first: int = 0, instructions: Instructions = ()) -> list[list[int]]:
        """Return the token ids of each text, with prompt and special tokens.

        Error messages give the position of the text in `texts` plus `first`. `instructions` has the instruction of each
        text; None or blank: the default of the prompt. Empty: the default for all texts.
        """
        texts = checked_texts(texts, first)
        positions_of: defaultdict[str | None, list[int]] = defaultdict(list)
        for position, instruction in enumerate(instructions or [None] * len(texts)):
            is_missing = type(instruction).__name__ == "NAType" or instruction != instruction  # in pandas: NA, NaN
            is_blank = is_missing or (isinstance(instruction, str) and not instruction.strip())
            positions_of[None if is_blank else instruction].append(position)
        ids_of_texts: list[list[int]] = [[] for _ in texts]
        for instruction, positions in positions_of.items():
            try:
                tokenizer = self if instruction is None else self.with_instruction(instruction)
            except ValueError as error:
                raise ValueError(f"text {first + positions[0]}: instruction {instruction!r:.80}: {error}") from None
            ids_of_group = tokenizer._apply([self.prompt.edit(texts[position]) for position in positions])
            for position, ids in zip(positions, ids_of_group, strict=True):
                if ids == tokenizer._textless_ids:
                    raise ValueError(
                        f"text {first + position}: {texts[position]!r:.80} adds no token to prompt {self.prompt.name!r}. "
                        f"Either the tokenizer drops all characters of the text, or max_length {self.max_length} is too "
                        "small for the first token."
                    )
                ids_of_texts[position] = self.special_tokens.before + ids + self.special_tokens.after
        return ids_of_texts

    def _apply(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the truncated token ids of texts with the prompt, without special tokens; edits are already applied."""
        before, head, merge_span, after = self.template
        ids_of_texts = plain_ids(self.tokenizer, [head + text + merge_span for text in texts], self._text_tokens)
        return [before + ids + after for ids in ids_of_texts]


@dataclass(frozen=True)
class SideTokenizers:
    """The tokenizer of queries and the tokenizer of documents, which are the same object if the prompts are the same.

    `side` selects a tokenizer for all texts.
    """

    query: SentenceTokenizer
    document: SentenceTokenizer
    side: Side | None = None
    """`query` or `document`: whether all texts are encoded as queries or as documents; None if this is not selected."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompts: SidePrompts, max_length: int) -> SideTokenizers:
        """Create the tokenizers for the query prompt and the document prompt. Raises the errors of `SentenceTokenizer`."""
        query = SentenceTokenizer(tokenizer, prompts.query, max_length)
        return cls(query, SentenceTokenizer(tokenizer, prompts.document, max_length) if prompts.differ else query)

    @property
    def prompts(self) -> SidePrompts:
        """The prompt of queries and the prompt of documents."""
        return SidePrompts(self.query.prompt, self.document.prompt)

    @property
    def distinct(self) -> list[SentenceTokenizer]:
        """List of the different tokenizers: query and document tokenizer if their prompts differ, else the common one."""
        return [self.query, self.document] if self.prompts.differ else [self.query]

    @property
    def selected(self) -> SentenceTokenizer:
        """The tokenizer of the selected side (query or document), or the common tokenizer if the prompts are the same.

        Raises:
            ValueError: if the prompts of queries and documents differ and no side is selected.
        """
        if self.side is None and self.prompts.differ:
            raise ValueError(
                f"this encoder has {self.prompts}: expected the side of the texts. Use encode_query or encode_document, or "
                "for_side('query') or for_side('document')."
            )
        return self.document if self.side == "document" else self.query


def warn_of_other_tokens(tokenizers: SideTokenizers, config: Mapping[str, Any]) -> None:
    """Warn if BOS or EOS of texts contradict `tokenizer_config.json`, whose content is `config`.

    transformers 4 follows `add_bos_token` and `add_eos_token` for some classes; version 5 follows `tokenizer.json`.
    """
    follows = re.fullmatch(r"((Code)?Llama|Gemma|Cohere|GPTNeoX)Tokenizer(Fast)?", str(config.get("tokenizer_class")))
    has_code = "auto_map" in config  # as of GTE-Qwen2; it is never executed
    for sentence_tokenizer in tokenizers.distinct if follows or has_code else ():
        if sentence_tokenizer.prompt.tokenization == "chat":  # the keys do not apply
            continue
        before, after = sentence_tokenizer.special_tokens
        tokenizer = sentence_tokenizer.tokenizer
        # An EOS of the prompt satisfies the key, but never contradicts it.
        appended = sentence_tokenizer.template.after if config.get("add_eos_token") else []
        has_bos, has_eos = tokenizer.bos_token_id in before, tokenizer.eos_token_id in after + appended
        for key, has_token in (("add_bos_token", has_bos), ("add_eos_token", has_eos)):
            if config.get(key) in (None, has_token):
                continue
            warnings.warn(
                f"tokenizer_config.json of {tokenizer.name_or_path} has `{key}`: {config[key]}, but transformers 5 follows "
                f"tokenizer.json, and texts with prompt {sentence_tokenizer.prompt.name!r} differ. If the model was trained as "
                "the key says (E5-Mistral was), change the post-processor in tokenizer.json; or, for EOS, set a prompt with "
                "`append: eos`, such as plain_eos.",
                UserWarning,
                stacklevel=3,
            )


def _joined(tokenizer: Tokenizer, prompt: PromptTemplate) -> TokenizedTemplate:
    """Return the tokenized template of a prompt that is tokenized together with the text, as one string (`joined`).

    The tail is the part of the prompt after the text. The merge span is the start of the tail that can be in the same token
    as the end of a text. Test texts that end with `TEXT_ENDS` determine the merge span. It is the shortest start of the
    tail after which the ids of the rest are equal for all test texts: often one character, at most the whole tail. It never
    ends inside a word, because the parts of a word can merge in more ways than the test texts cover.
    """
    head, tail = prompt.head, prompt.tail
    probes = [*TEXT_ENDS, *(f"A man eats{end}" for end in TEXT_ENDS)]
    whole = plain_ids(tokenizer, [head + text + tail for text in probes])
    for length in range(len(tail) + 1):
        if tail[length : length + 1].isalnum() and (length == 0 or tail[length - 1].isalnum()):
            continue
        starts = plain_ids(tokenizer, [head + text + tail[:length] for text in probes])
        rest = whole[0][len(starts[0]) :]
        if all(ids + rest == full for ids, full in zip(starts, whole, strict=True)):
            return TokenizedTemplate([], head, tail[:length], rest)
    raise AssertionError("the whole tail is always a merge span")


def _segments(tokenizer: Tokenizer, prompt: PromptTemplate) -> TokenizedTemplate:
    """Return the tokenized template of a prompt that is tokenized separately from the text (`segments`)."""
    head_ids, tail_ids = plain_ids(tokenizer, [prompt.head, prompt.tail])
    return TokenizedTemplate(head_ids, "", "", tail_ids)


def _chat(tokenizer: Tokenizer, prompt: PromptTemplate) -> TokenizedTemplate:
    """Return the tokenized template of a prompt in which names of special tokens are these tokens (`chat`).

    A special token separates what is before it from what is after it. So only the parts of head and tail next to the text
    are tokenized together with the text.
    """
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    *before, head = re.split(f"({names})", prompt.head)
    tail, *after = re.split(f"({names})", prompt.tail)

    def ids_of(parts: Sequence[str]) -> list[int]:
        ids = [[special[part]] if part in special else plain_ids(tokenizer, [part])[0] for part in parts]
        return [number for ids_of_part in ids for number in ids_of_part]

    inner = _joined(tokenizer, replace(prompt, template=head + PLACEHOLDER + tail))
    return inner._replace(before=ids_of(before), after=inner.after + ids_of(after))


CHAT_PROBES = (
    "A man eats.", " x\n", "\n\nX.\t", "x" * 5000, "é 你好 😀", "[INST] <b> {{ x }} {% if %} \\n &amp; \"''", "https://x.org/y.png",
)  # fmt: skip
"""Texts for which a chat template must render the same text before and after the text."""


def with_chat_template(tokenizer: Tokenizer, prompt: PromptTemplate) -> PromptTemplate:
    """Return a prompt with the chat template of the tokenizer as head and tail; a prompt without `chat_template` unchanged.

    The token ids equal `apply_chat_template`, except that names of special tokens in a text are plain characters.

    Raises:
        ValueError: if there is no chat template; if the rendering depends on the date or the text, or changes the text; or
            if the token ids of a message are not those of a head, a text and a tail.
    """
    if prompt.chat_template is None:
        return prompt
    subject = f"prompt {prompt.name!r}: the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
    advice = (
        "Write the text of a rendering as `template` of a prompt with `tokenization: chat`, without `chat_template`."
    )
    options = {"tokenize": False, "strftime_now": ""}  # a template that calls this function fails
    generation = prompt.chat_template == "generation_prompt"
    try:
        rendered = {text: _apply_chat(tokenizer, prompt, text, generation, **options) for text in CHAT_PROBES}
        empty = _apply_chat(tokenizer, prompt, "", False, **options)
    except Exception as error:  # a template can raise any error
        reason = "depends on the date" if "strftime_now" in str(tokenizer.chat_template) else "cannot be applied"
        raise ValueError(f"{subject} {reason} ({type(error).__name__}: {error}). {advice}") from error
    # The text must be the only part that changes.
    head, _, tail = rendered[CHAT_PROBES[0]].partition(CHAT_PROBES[0])
    changed = [text for text in CHAT_PROBES if rendered[text] != head + text + tail]
    if changed or prompt.system not in head + tail:
        what = f"changes the text {changed[0]!r:.30}, or depends on it" if changed else "has no such `system` message"
        raise ValueError(f"{subject} {what}. If it removes spaces, write words before and after {{text}}. Or: {advice}")
    # Added tokens that are not special are also found in a text, so the template must not use them.
    for number, token in tokenizer.added_tokens_decoder.items():
        name = token.content
        used = name.strip() and name in empty and name not in prompt.template + prompt.system
        if used and number in plain_ids(tokenizer, [name])[0]:
            raise ValueError(
                f"{subject} uses {name!r}, which would be this token in a text, too. Make it a special token."
            )
    template = head + PLACEHOLDER + tail
    resolved = replace(prompt, template=template, tokenization="chat", chat_template=None, system="")
    before, start, merge_span, after = _chat(tokenizer, resolved)
    for text in CHAT_PROBES:
        ids = [*before, *plain_ids(tokenizer, [start + text + merge_span])[0], *after]
        whole = {"split_special_tokens": False}  # True in saved models, also for the names in the template
        if ids != _apply_chat(tokenizer, prompt, text, generation, return_dict=False, tokenizer_kwargs=whole):
            raise ValueError(f"{subject} gives other ids for {text!r:.30} than its parts. Choose another prompt.")
    return resolved


def _apply_chat(tokenizer: Tokenizer, prompt: PromptTemplate, text: str, generation: bool, **options: Any) -> Any:
    """Return the result of `apply_chat_template` for a text; `generation`: with the start of the answer."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.head + text + prompt.tail})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **options)
