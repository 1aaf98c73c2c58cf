"""Who is asked: a language model on this machine, or a server that speaks OpenAI's chat completions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from angle_llm.generation.wording import Side

LOCAL = "local:"


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn."""

    max_new_tokens: int = 128
    """Tokens of an answer at most; its last line is left out when it is cut there."""
    temperature: float = 0.7
    """0: always the likeliest token."""
    top_p: float = 0.9
    """Tokens are drawn from the fewest likely ones that have this probability together."""


@dataclass(frozen=True)
class Request:
    """One message to one generator."""

    row: int
    """Number of the source row, from 0."""
    text: str
    """The source sentence."""
    side: Side
    generator: str
    message: str
    seed: int
    """Of this request: from the command's seed, the row, and the side."""
    key: str
    """Equal for requests whose answers may stand for each other."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    text: str
    finished: bool
    """False: it was cut at the token limit."""
    read_tokens: int
    """Of the message."""
    new_tokens: int


@dataclass(frozen=True)
class Failure:
    """Nothing came back."""

    reason: str
    because_of: Literal["request", "generator", "settings"] = "generator"
    """request: others may fare better. settings: none will."""
    read_tokens: int = 0
    """Of the message, where it was paid for."""
    new_tokens: int = 0
    """Of an answer that is none, where it was paid for."""


class Generator(Protocol):
    """Answers requests; each of a batch gets its answer or its failure."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def batch_size(self) -> int:
        """Requests that are answered together."""

    @property
    def workers(self) -> int:
        """Batches that are answered at a time."""

    @property
    def decides(self) -> dict[str, Any]:
        """What answers follow from, beside message and seed."""

    def answer(self, requests: Sequence[Request]) -> list[Answer | Failure]:
        """In the order of the requests."""


def make_request(generator: Generator, row: int, text: str, side: Side, message: str, seed: int) -> Request:
    """A request with its seed and its key."""
    own_seed = int.from_bytes(_digest([seed, row, side])[:4], "big") >> 1  # servers take 31 bits
    key = _digest([generator.name, generator.decides, message, own_seed]).hex()[:24]
    return Request(row, text, side, generator.name, message, own_seed, key)


def _digest(values: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


class LocalGenerator:
    """A causal language model that `transformers` opens, many requests at a time."""

    workers = 1

    def __init__(self, name: str, sampling: Sampling, *, batch_size: int, dtype: str, device: str | None) -> None:
        self.name = name
        self.batch_size = batch_size
        self.sampling = sampling
        self.dtype = dtype
        self.device = device
        self.decides: dict[str, Any] = {**vars(sampling), "dtype": dtype}
        self._opened: Any = None

    def answer(self, requests: Sequence[Request]) -> list[Answer | Failure]:
        from angle_llm.model.text_generator import TextGenerator

        if self._opened is None:  # a finished command never opens it
            name = self.name.removeprefix(LOCAL)
            self._opened = TextGenerator.open(name, dtype=self.dtype, device=self.device)
        lacks = [self._opened.lacks_room(request.message, self.sampling.max_new_tokens) for request in requests]
        fit = [request for request, lack in zip(requests, lacks, strict=True) if lack is None]
        messages, seeds = [request.message for request in fit], [request.seed for request in fit]
        written = iter(self._opened.write(messages, seeds, **vars(self.sampling)) if fit else [])
        return [Failure(lack, "request") if lack is not None else Answer(**vars(next(written))) for lack in lacks]
