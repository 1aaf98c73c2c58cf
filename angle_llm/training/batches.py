"""Batches ready before the model wants them: texts tokenised once, the next batch planned while this one trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Example
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.modeling.microbatches import Plan
from angle_llm.training.memory import TokenBudget
from angle_llm.training.processes import Processes

TEXTS_AT_ONCE = 10_000
Item = TypeVar("Item")


class PlannedBatch(NamedTuple):
    """A batch and how its texts are computed."""

    batch: TextBatch
    plan: Plan


class TokenStore:
    """The ids of texts, tokenised once on each machine, in memory-mapped files.

    Use it as a context manager: the files go with it.

    Raises:
        TypeError, ValueError: for a text the tokenizer cannot read, before anything is trained.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenize: Callable[[Sequence[str]], list[list[int]]],
        folder: Path,
        processes: Processes | None = None,
    ) -> None:
        processes = processes or Processes.alone()
        self._number = {text: number for number, text in enumerate(texts)}
        machine = processes.rank - processes.local_rank  # machines may share the folder
        self._paths = [folder / f"tokens-{machine}.int32", folder / f"tokens-{machine}.starts.npy"]
        self._owns = processes.local_rank == 0
        try:
            processes.from_main(lambda: _clear(folder))  # what a killed run has left
            processes.once_a_machine(lambda: self._write(texts, tokenize))
        except BaseException:
            self._remove()
            raise
        self._ids = np.memmap(self._paths[0], dtype=np.int32, mode="r")
        self._start = np.load(self._paths[1], mmap_mode="r", allow_pickle=False)
        processes.gather(None)  # nobody removes what another has not opened

    def _write(self, texts: Sequence[str], tokenize: Callable[[Sequence[str]], list[list[int]]]) -> None:
        starts = np.zeros(len(texts) + 1, dtype=np.int64)
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        with self._paths[0].open("wb") as file:
            for first in tqdm(range(0, len(texts), TEXTS_AT_ONCE), desc="tokenise", leave=False, disable=None):
                ids = _tokenized(tokenize, texts, first)
                np.concatenate([np.asarray(text, dtype=np.int32) for text in ids]).tofile(file)
                starts[first + 1 : first + 1 + len(ids)] = [len(text) for text in ids]
        np.save(self._paths[1], starts.cumsum())

    def _remove(self) -> None:
        for path in self._paths if self._owns else ():
            path.unlink(missing_ok=True)

    def digest(self) -> str:
        """Tells stores of other ids apart."""
        return hashlib.sha256(self._ids.data).hexdigest() + hashlib.sha256(self._start.data).hexdigest()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that were stored."""
        numbers = [self._number[text] for text in texts]
        return [self._ids[self._start[number] : self._start[number + 1]].tolist() for number in numbers]

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._ids, self._start
        self._remove()


def _clear(folder: Path) -> None:
    for path in folder.glob("tokens-*"):
        path.unlink(missing_ok=True)


def _tokenized(
    tokenize: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str], first: int
) -> list[list[int]]:
    try:
        return tokenize(texts[first : first + TEXTS_AT_ONCE])
    except ValueError as error:
        raise ValueError(f"{error} (Counted from the run's different text {first}.)") from error


@dataclass
class BatchPlanner:
    """Makes the batches of an optimizer step from its examples' indices; every process makes the same ones."""

    encoder: SentenceEncoder
    tokens: TokenStore
    examples: Sequence[Example]
    processes: int
    budget: TokenBudget
    """It may be lowered while a run goes."""

    def all(self, steps: Iterator[tuple[int, list[list[int]]]]) -> Iterator[tuple[int, list[PlannedBatch]]]:
        """For each optimizer step its epoch and its batches."""
        for epoch, batches in steps:
            made = [TextBatch.from_examples([self.examples[index] for index in indices]) for indices in batches]
            yield epoch, [self.planned(batch) for batch in made]

    def planned(self, batch: TextBatch) -> PlannedBatch:
        """A batch with its plan at the budget of now."""
        ids = self.tokens(batch.texts)
        return PlannedBatch(batch, self.encoder.plan_ids(ids, self.budget.micro_batch_tokens, self.processes))


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the next one is made in a thread while this one is used."""
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
        following = worker.submit(next, items, end)
        while (item := following.result()) is not end:
            following = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
