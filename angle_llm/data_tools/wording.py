"""Texts as the model will see them: worded, tokenised, cut; only the tokenizer is loaded, no weights."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np

from angle_llm.config import ModelSettings
from angle_llm.data.keys import sound
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import is_saved_encoder
from angle_llm.model.tokenizer import SentenceTokenizer
from angle_llm.prompts import PromptTemplate, load_prompt

_BATCH = 1024
_HEAD, _TAIL = 48, 16
"""Tokens of a long text that are shown, from its beginning and its end."""
_ENDLESS = 1 << 30
_POOLED = {"last": -1, "cls": 0}
"""Pooling → the one token whose state is the embedding; any other pooling reads all of them."""


@dataclass(frozen=True)
class Wording:
    """How a model reads texts."""

    model: str
    prompt: PromptTemplate
    pooling: str
    max_length: int
    sentences: SentenceTokenizer

    @property
    def endless(self) -> SentenceTokenizer:
        """The same without a limit, to see how long texts are."""
        return SentenceTokenizer(self.sentences.tokenizer, self.prompt, _ENDLESS)

    def shown(self, text: str) -> str:
        """The tokens one by one between bars, the pooled one in ⟦ ⟧, each decoded alone; line ends are written out."""
        (ids,) = self.sentences([text])
        marked = _POOLED.get(self.pooling)
        tokens = [self.sentences.tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in ids]
        tokens = [sound(token).replace("\n", "\\n").replace("\r", "\\r") for token in tokens]
        if marked is not None:
            tokens[marked] = f"⟦{tokens[marked]}⟧"
        if len(tokens) > _HEAD + _TAIL:
            tokens[_HEAD:-_TAIL] = [f" … {len(tokens) - _HEAD - _TAIL:,} tokens … "]
        return "|".join(tokens)


def open_wording(settings: ModelSettings) -> Wording:
    """How a saved encoder, or a backbone with these settings, reads texts.

    Raises FileNotFoundError, ArtifactError, PromptError, ValueError as opening the model would.
    """
    from angle_llm.model.backbone import BackboneLocation, load_tokenizer
    from angle_llm.model.outline import encoder_twin

    if not is_saved_encoder(settings.path):
        encoder, _ = encoder_twin(settings)
        return Wording(settings.path, encoder.prompt, encoder.pooling, encoder.max_length, encoder.sentence_tokenizer)
    folder = Path(settings.path).expanduser()
    card = EncoderCard.read(folder)
    prompt = card.prompt if settings.prompt is None else load_prompt(settings.prompt)
    length = settings.max_length or card.max_length
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    sentences = SentenceTokenizer(tokenizer, prompt, length)
    return Wording(settings.path, prompt, settings.pooling or card.pooling, length, sentences)


@dataclass
class Lengths:
    """How long the distinct texts of a file are, in tokens of the worded text."""

    tokens: array[int] = field(default_factory=lambda: array("L"))
    unreadable: list[str] = field(default_factory=list)
    """What the tokenizer says of texts of which it leaves nothing."""

    def quantiles(self) -> dict[str, int]:
        """Tokens of the shortest text, of those at half, 0.9 and 0.99 of all, and of the longest."""
        shares = {"shortest": 0, "50%": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1}
        return {name: int(np.quantile(self.tokens, share, method="lower")) for name, share in shares.items()}

    def longer_than(self, max_length: int) -> int:
        """How many texts will lose their end."""
        return int((np.asarray(self.tokens) > max_length).sum())


def measure(texts: Iterable[str], wording: Wording | None, samples: int) -> tuple[Lengths, list[str]]:
    """Lengths of all texts, and `samples` of them drawn evenly (seeded); reads `texts` to its end, with or without a model."""
    lengths, kept, random, seen = Lengths(), list[str](), Random(0), 0
    endless = None if wording is None else wording.endless
    stream = iter(texts)
    while batch := list(islice(stream, _BATCH)):
        for text in batch:  # reservoir sampling
            seen += 1
            if len(kept) < samples:
                kept.append(text)
            elif (place := random.randrange(seen)) < samples:
                kept[place] = text
        if endless is not None:
            _count(batch, endless, lengths)
    return lengths, kept


def _count(batch: list[str], endless: SentenceTokenizer, lengths: Lengths) -> None:
    try:
        lengths.tokens.extend(len(ids) for ids in endless(batch))
    except ValueError as error:
        if len(batch) == 1:
            lengths.unreadable.append(str(error))
            return
        for text in batch:
            _count([text], endless, lengths)
