"""From texts to token ids: wording, truncation of the text (never of the prompt), inert special tokens."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.prompts import PromptTemplate

Tokenizer = Any
"""A `transformers` tokenizer; the library gives fast and slow ones no common type that says enough."""

TEXT_ENDS = [
    *string.printable, "...", "?!", '."', ".'", ").", '""', "  ", "\n\n", "é", "。", "」", "”", "’", "…", "й", "ر", "😀",
    "\u0301",
]  # fmt: skip
"""What the last characters of a text may be: a representative of each sort, to see how far a tail reacts to them."""


class SpecialTokens(NamedTuple):
    """The special ids a tokenizer puts around every sequence, such as BOS or [CLS] … [SEP]."""

    before: list[int]
    after: list[int]


def load_tokenizer_file(folder: Path) -> Tokenizer:
    """The tokenizer in a folder's `tokenizer.json` as it stands there, whatever a model's own class would make of it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


TEXTS_TOGETHER, CHARACTERS_TOGETHER = 1024, 2**20
"""A tokenizer keeps offsets, masks and strings of every token of a call; the ids are what is wanted."""


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
    """Ids of the texts alone, the first `most` of each; `</s>` or `<|im_end|>` in them are encoded as the characters they are
    made of."""
    ids: list[list[int]] = []
    for some in _together(texts):
        found = tokenizer(
            some, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        ids += (one[:most] for one in found)  # the rest of a long text may be a hundred times what is kept
    return ids


def _together(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts of one call of a tokenizer: not too many, nor too long together."""
    some: list[str] = []
    characters = 0
    for text in texts:
        if some and (len(some) == TEXTS_TOGETHER or characters + len(text) > CHARACTERS_TOGETHER):
            yield some
            some, characters = [], 0
        some.append(text)
        characters += len(text)
    if some:
        yield some


def find_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Finds the frame by encoding one text with and without special tokens."""
    bare = plain_ids(tokenizer, ["a"])[0]
    # As in `plain_ids`: the flag is kept in the tokenizer, and turning it would disturb another thread.
    framed: list[int] = tokenizer("a", split_special_tokens=True, return_attention_mask=False)["input_ids"]
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return SpecialTokens(framed[:start], framed[start + len(bare) :])
    raise ValueError(
        f"{type(tokenizer).__name__} changes a text's ids when it adds special tokens ({bare} became {framed}), "
        "so the text cannot be shortened safely. Set the tokenizer's post-processor to add tokens around the text only."
    )


def check_texts(texts: Sequence[str], first: int = 0) -> None:
    """Refuses what no tokenizer can read or what has no meaning to embed; the message gives the position, counted from
    `first`."""
    for position, text in enumerate(texts, first):
        if not isinstance(text, str):
            raise TypeError(f"text {position} must be a string, got {type(text).__name__}: {text!r:.80}")
        if not text.strip():
            raise ValueError(f"text {position} is empty. Remove it, or put something to embed in its place.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {position} is not valid Unicode: a lone surrogate {text[error.start]!r} at character {error.start}. "
                "Decode the text with its right encoding, or replace such characters: text.encode(errors='replace').decode()."
            ) from None


class TokenizedTemplate(NamedTuple):
    """A prompt as a tokenizer applies it: `before + ids(head + text + merge_span) + after`, where only the middle is cut."""

    before: list[int]
    head: str
    merge_span: str
    after: list[int]


class SentenceTokenizer:
    """Words texts with a prompt and turns them into ids of at most `max_length`, special tokens included.

    A text that is too long loses its last tokens; the prompt and the special tokens stay whole, for the embedding of a
    decoder is read off the last token. One thing goes with the text's end: under `joined`, the merge_span, the few characters
    of the tail that may merge with a text (the quote that closes it, in the bundled prompts). Where a tail is nothing but
    merge_span, as in `"{text}"`, it is lost whole; `segments` keeps it. Edits see the whole text, so a full stop they append
    is cut off with the end. Ids depend on the text alone, not on other texts or on the padding side.

    Raises:
        ValueError: if `max_length` leaves no room for a text, or a text is empty or not valid Unicode.
        TypeError: if a text is not a string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: PromptTemplate, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_length = max_length
        self.special_tokens = find_special_tokens(tokenizer)
        """The special ids around every text."""
        self.template = _WORDINGS[prompt.tokenization](tokenizer, prompt)
        """The prompt around every text."""
        before, head, merge_span, after = self.template
        special = len(self.special_tokens.before) + len(self.special_tokens.after)
        overhead = len(before) + sum(map(len, plain_ids(tokenizer, [head, merge_span]))) + len(after)
        if max_length - special <= overhead:
            raise ValueError(
                f"max_length {max_length} leaves no room for a text: prompt {prompt.name!r} takes {overhead} tokens and "
                f"special tokens {special}. Raise max_length or choose a shorter prompt."
            )
        self._room = max_length - special - len(before) - len(after)
        (self._textless_ids,) = self._word([""])

    def __call__(self, texts: Sequence[str], first: int = 0) -> list[list[int]]:
        """The ids of each text; a message counts positions from `first`."""
        check_texts(texts, first)
        worded = self._word([self.prompt.edit(text) for text in texts])
        for position, ids in enumerate(worded):
            if ids == self._textless_ids:
                told = f"text {first + position}: nothing of {texts[position]!r:.80} is left beside prompt {self.prompt.name!r}"
                raise ValueError(
                    f"{told}. Either the tokenizer drops all its characters, or max_length {self.max_length} has no room for its "
                    "first one."
                )
        return [self.special_tokens.before + ids + self.special_tokens.after for ids in worded]

    def _word(self, texts: Sequence[str]) -> list[list[int]]:
        before, head, merge_span, after = self.template
        worded = plain_ids(self.tokenizer, [head + text + merge_span for text in texts], self._room)
        return [before + ids + after for ids in worded]


def _joined(tokenizer: Tokenizer, prompt: PromptTemplate) -> TokenizedTemplate:
    """The ids of the whole wording as one string, in two parts: what may depend on the text, and the rest of the tail.

    The merge_span is the shortest beginning of the tail behind which the ids are the same after each of `TEXT_ENDS`: often one
    character, the whole tail if nothing shorter will do. It never ends inside a word, for words merge in more ways than
    can be tried."""
    head, tail = prompt.head, prompt.tail
    probes = [*TEXT_ENDS, *(f"A man eats{end}" for end in TEXT_ENDS)]
    whole = plain_ids(tokenizer, [head + text + tail for text in probes])
    for length in range(len(tail) + 1):
        if tail[length : length + 1].isalnum() and (length == 0 or tail[length - 1].isalnum()):
            continue
        begun = plain_ids(tokenizer, [head + text + tail[:length] for text in probes])
        rest = whole[0][len(begun[0]) :]
        if all(ids + rest == full for ids, full in zip(begun, whole, strict=True)):
            return TokenizedTemplate([], head, tail[:length], rest)
    raise AssertionError("the whole tail is a merge_span without a rest")


def _segments(tokenizer: Tokenizer, prompt: PromptTemplate) -> TokenizedTemplate:
    """Head and tail as ids of their own, whatever the text."""
    head_ids, tail_ids = plain_ids(tokenizer, [prompt.head, prompt.tail])
    return TokenizedTemplate(head_ids, "", "", tail_ids)


_WORDINGS: dict[str, Callable[[Tokenizer, PromptTemplate], TokenizedTemplate]] = {
    "joined": _joined,
    "segments": _segments,
}
