"""From texts to token ids: wording, truncation of the text (never of the prompt), inert special tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from angle_llm.prompts import PromptTemplate

Tokenizer = Any
"""A `transformers` tokenizer; the library gives fast and slow ones no common type that says enough."""


class Frame(NamedTuple):
    """The special ids a tokenizer puts around every sequence, such as BOS or [CLS] … [SEP]."""

    before: list[int]
    after: list[int]


def load_tokenizer_file(folder: Path) -> Tokenizer:
    """The tokenizer in a folder's `tokenizer.json` as it stands there, whatever a model's own class would make of it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of the texts alone; `</s>` or `<|im_end|>` in them are encoded as the characters they are made of."""
    if not texts:
        return []  # transformers fails on an empty batch
    ids: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    return ids


def special_frame(tokenizer: Tokenizer) -> Frame:
    """Finds the frame by encoding one text with and without special tokens."""
    bare = plain_ids(tokenizer, ["a"])[0]
    framed: list[int] = tokenizer("a", return_attention_mask=False)["input_ids"]
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return Frame(framed[:start], framed[start + len(bare) :])
    raise ValueError(
        f"{type(tokenizer).__name__} changes a text's ids when it adds special tokens ({bare} became {framed}), "
        "so the text cannot be shortened safely. Set the tokenizer's post-processor to add tokens around the text only."
    )


def check_texts(texts: Sequence[str]) -> None:
    """Refuses what no tokenizer can read or what has no meaning to embed; the message gives the position."""
    for position, text in enumerate(texts):
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


class SentenceTokenizer:
    """Words texts with a prompt and turns them into ids of at most `max_length`, special tokens included.

    A text that is too long loses its last tokens; the prompt and the special tokens stay whole, for the embedding of a
    decoder is read off the last token. Ids depend on the text alone, not on other texts or on the padding side.

    Raises:
        ValueError: if `max_length` leaves no room for a text, or a text is empty or not valid Unicode.
        TypeError: if a text is not a string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: PromptTemplate, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_length = max_length
        self.frame = special_frame(tokenizer)
        """The special ids around every text."""
        self._room = max_length - len(self.frame.before) - len(self.frame.after)
        self._head_ids, self._tail_ids, joined_ids = plain_ids(
            tokenizer, [prompt.head, prompt.tail, prompt.head + prompt.tail]
        )
        self._textless_ids = {"joined": joined_ids, "segments": self._head_ids + self._tail_ids}[prompt.tokenization]
        overhead = len(self._head_ids) + len(self._tail_ids)
        if self._room <= overhead:
            raise ValueError(
                f"max_length {max_length} leaves no room for a text: prompt {prompt.name!r} takes {overhead} tokens and "
                f"special tokens {max_length - self._room}. Raise max_length or choose a shorter prompt."
            )

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        check_texts(texts)
        edited = [self.prompt.edit(text) for text in texts]
        inner = _TOKENIZATIONS[self.prompt.tokenization](self, edited)
        for position, ids in enumerate(inner):
            if ids == self._textless_ids:
                raise ValueError(
                    f"text {position}: nothing of {texts[position]!r:.80} is left beside prompt {self.prompt.name!r}. Either the "
                    f"tokenizer drops all its characters, or max_length {self.max_length} has no room for its first one."
                )
        return [self.frame.before + ids + self.frame.after for ids in inner]

    def _joined(self, texts: Sequence[str]) -> list[list[int]]:
        head, tail = self.prompt.head, self.prompt.tail
        worded = plain_ids(self.tokenizer, [head + text + tail for text in texts])
        if not tail:  # nothing to keep behind the text: cut as everybody cuts
            return [ids[: self._room] for ids in worded]
        return [
            ids if len(ids) <= self._room else self._joined_and_shortened(text)
            for text, ids in zip(texts, worded, strict=True)
        ]

    def _joined_and_shortened(self, text: str) -> list[int]:
        """Cuts where one more character would not fit. Joined tokens may span text and prompt, so only counting the ids
        of the whole wording tells what fits; bisection needs few counts, and starts from a short piece of a huge text."""

        def worded(characters: int) -> list[int]:
            return plain_ids(self.tokenizer, [self.prompt.head + text[:characters] + self.prompt.tail])[0]

        def length(characters: int) -> int:
            return len(worded(characters))

        bound = min(len(text), 8 * self.max_length)
        while bound < len(text) and length(bound) <= self._room:
            bound = min(len(text), 2 * bound)
        # A longer piece can have fewer tokens (a merge), so there may be several such cuts; bisection ends at one of them:
        # it has seen that the piece fits and that a character more does not. (-1: not even the prompt alone fits joined.)
        kept = bisect_right(range(bound + 1), self._room, key=length) - 1
        return worded(max(kept, 0))

    def _segments(self, texts: Sequence[str]) -> list[list[int]]:
        room = self._room - len(self._head_ids) - len(self._tail_ids)
        return [self._head_ids + ids[:room] + self._tail_ids for ids in plain_ids(self.tokenizer, texts)]


_TOKENIZATIONS: dict[str, Callable[[SentenceTokenizer, Sequence[str]], list[list[int]]]] = {
    "joined": SentenceTokenizer._joined,
    "segments": SentenceTokenizer._segments,
}
