"""Batches ready before the model wants them: texts tokenised once, the next batch planned while this one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.modeling.microbatches import Plan

TEXTS_AT_ONCE = 10_000
Item = TypeVar("Item")


class PlannedBatch(NamedTuple):
    """A batch and how its texts are computed."""

    batch: TextBatch
    plan: Plan


class TokenStore:
    """The ids of texts, tokenised once, in a memory-mapped file; memory holds where each text's ids begin.

    Use it as a context manager: the file goes with it.

    Raises:
        TypeError, ValueError: for a text the tokenizer cannot read, before anything is trained.
    """

    def __init__(self, texts: Sequence[str], tokenize: Callable[[Sequence[str]], list[list[int]]], path: Path) -> None:
        self._path = path
        self._number = {text: number for number, text in enumerate(texts)}
        self._start = np.zeros(len(texts) + 1, dtype=np.int64)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                for first in tqdm(range(0, len(texts), TEXTS_AT_ONCE), desc="tokenise", leave=False, disable=None):
                    ids = _tokenized(tokenize, texts, first)
                    np.concatenate([np.asarray(text, dtype=np.int32) for text in ids]).tofile(file)
                    self._start[first + 1 : first + 1 + len(ids)] = [len(text) for text in ids]
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._start.cumsum(out=self._start)
        self._ids = np.memmap(path, dtype=np.int32, mode="r")

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that were stored."""
        numbers = [self._number[text] for text in texts]
        return [self._ids[self._start[number] : self._start[number + 1]].tolist() for number in numbers]

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._ids
        self._path.unlink(missing_ok=True)


def _tokenized(
    tokenize: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str], first: int
) -> list[list[int]]:
    try:
        return tokenize(texts[first : first + TEXTS_AT_ONCE])
    except ValueError as error:
        raise ValueError(f"{error} (Counted from the run's different text {first}.)") from error


def plan_batches(
    encoder: SentenceEncoder,
    tokens: TokenStore,
    examples: Sequence[Example],
    steps: Iterator[tuple[int, list[list[int]]]],
    token_budget: int,
) -> Iterator[tuple[int, list[PlannedBatch]]]:
    """For each optimizer step its epoch and its batches."""
    for epoch, batches in steps:
        planned = []
        for indices in batches:
            batch = TextBatch.from_examples([examples[index] for index in indices])
            planned.append(PlannedBatch(batch, encoder.plan_ids(tokens(batch.texts), token_budget)))
        yield epoch, planned


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the next one is made in a thread while this one is used."""
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
        following = worker.submit(next, items, end)
        while (item := following.result()) is not end:
            following = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
