"""Batches ready before the model wants them: texts tokenised, and the next batch planned while this one trains."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from angle_llm.data.batching import TextBatch
from angle_llm.data.formats import Triple
from angle_llm.data.mixture import Mixture
from angle_llm.modeling.encoder import SentenceEncoder
from angle_llm.modeling.microbatches import Plan
from angle_llm.objectives.joint import JointObjective, Part
from angle_llm.objectives.nested import Objective
from angle_llm.training.memory import TokenBudget
from angle_llm.training.processes import Processes

TEXTS_AT_ONCE = 10_000
MOST_STORED = 200_000
"""Examples. The texts of more are tokenised batch by batch: that starts at once, and is far faster than any model."""

Item = TypeVar("Item")
Tokenize = Callable[[Sequence[str]], list[list[int]]]


class PlannedBatch(NamedTuple):
    """A batch, how its texts are computed, and what is asked of their vectors."""

    batch: TextBatch
    plan: Plan
    objective: Objective
    sets: dict[str, int]
    """How many of its examples are of which set; empty if there is one set."""


class Tokens:
    """The ids of texts, tokenised when they are asked for. `tokenizers` has one for each prompt of the run."""

    def __init__(self, tokenizers: Sequence[Tokenize], some: TextBatch) -> None:
        self._tokenizers = tokenizers
        self._some = some

    def __call__(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Ids of texts under their prompts."""
        ids: list[list[int]] = [[] for _ in texts]
        for prompt in set(prompts):
            places = [place for place, one in enumerate(prompts) if one == prompt]
            for place, made in zip(places, self._tokenizers[prompt]([texts[place] for place in places]), strict=True):
                ids[place] = made
        return ids

    def digest(self) -> str:
        """Tells tokens of other ids apart, by some texts."""
        return hashlib.sha256(repr(self(self._some.texts, self._some.prompts)).encode()).hexdigest()

    def __enter__(self) -> Tokens:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to remove."""


class TokenStore(Tokens):
    """The ids of texts, tokenised once on each machine, in memory-mapped files.

    Use it as a context manager: the files go with it.

    Raises:
        TypeError, ValueError: for a text a tokenizer cannot read, before anything is trained.
    """

    def __init__(
        self,
        tokenizers: Sequence[Tokenize],
        batch: TextBatch,
        folder: Path,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(tokenizers, batch)
        processes = processes or Processes.alone()
        self._number = {each: number for number, each in enumerate(zip(batch.prompts, batch.texts, strict=True))}
        machine = processes.rank - processes.local_rank  # machines may share the folder
        self._paths = [folder / f"tokens-{machine}.int32", folder / f"tokens-{machine}.starts.npy"]
        self._owns = processes.local_rank == 0
        try:
            processes.from_main(lambda: _clear(folder))  # what a killed run has left
            processes.once_a_machine(self._write)
        except BaseException:
            self._remove()
            raise
        self._ids = np.memmap(self._paths[0], dtype=np.int32, mode="r")
        self._start = np.load(self._paths[1], mmap_mode="r", allow_pickle=False)
        processes.gather(None)  # nobody removes what another has not opened

    def _write(self) -> None:
        texts, prompts = self._some.texts, self._some.prompts
        starts = np.zeros(len(texts) + 1, dtype=np.int64)
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        with self._paths[0].open("wb") as file:
            for first in tqdm(range(0, len(texts), TEXTS_AT_ONCE), desc="tokenise", leave=False, disable=None):
                together = slice(first, first + TEXTS_AT_ONCE)
                try:
                    ids = super().__call__(texts[together], prompts[together])
                except ValueError as error:
                    raise ValueError(f"{error} (Counted from the run's different text {first}.)") from error
                np.concatenate([np.asarray(text, dtype=np.int32) for text in ids]).tofile(file)
                starts[first + 1 : first + 1 + len(ids)] = [len(text) for text in ids]
        np.save(self._paths[1], starts.cumsum())

    def _remove(self) -> None:
        for path in self._paths if self._owns else ():
            path.unlink(missing_ok=True)

    def digest(self) -> str:
        """Tells stores of other ids apart."""
        return hashlib.sha256(self._ids.data).hexdigest() + hashlib.sha256(self._start.data).hexdigest()

    def __call__(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Ids of texts that were stored."""
        numbers = [self._number[each] for each in zip(prompts, texts, strict=True)]
        return [self._ids[self._start[number] : self._start[number + 1]].tolist() for number in numbers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._ids, self._start
        self._remove()


def _clear(folder: Path) -> None:
    for path in folder.glob("tokens-*"):
        path.unlink(missing_ok=True)


def tokens_of(encoder: SentenceEncoder, data: Mixture, folder: Path, processes: Processes) -> Tokens:
    """The texts of a run as ids: stored if they are not too many."""
    named = _prompts(data)
    tokenizers = [encoder.sentences if one is None else encoder.with_prompt(one).sentences for one in named]
    prompt_of_set = [named.index(each.prompt) for each in data.sets]

    def batch(examples: int) -> TextBatch:
        some = range(min(examples, len(data)))
        return TextBatch.from_examples(list(islice(data, examples)), [prompt_of_set[data.set_of(i)] for i in some])

    if len(data) <= MOST_STORED:
        return TokenStore(tokenizers, batch(len(data)), folder, processes)
    return Tokens(tokenizers, batch(1_000))


def _prompts(data: Mixture) -> list[str | None]:
    """The different prompts of a run; None, its own, is the first."""
    return list(dict.fromkeys([None, *(each.prompt for each in data.sets)]))


@dataclass
class BatchPlanner:
    """Makes the batches of an optimizer step from its examples' indices; every process makes the same ones."""

    encoder: SentenceEncoder
    tokens: Tokens
    data: Mixture
    objectives: Sequence[Objective]
    """One for each set."""
    processes: int
    budget: TokenBudget
    """It may be lowered while a run goes."""

    def __post_init__(self) -> None:
        named = _prompts(self.data)
        self._prompt_of_set = [named.index(each.prompt) for each in self.data.sets]

    def all(self, steps: Iterator[tuple[int, list[list[int]]]]) -> Iterator[tuple[int, list[PlannedBatch]]]:
        """For each optimizer step its epoch and its batches."""
        for epoch, batches in steps:
            yield epoch, [self._made(indices) for indices in batches]

    def again(self, planned: PlannedBatch) -> PlannedBatch:
        """A batch with its plan at the budget of now."""
        return planned._replace(plan=self._plan(planned.batch))

    def _made(self, indices: list[int]) -> PlannedBatch:
        examples = [self.data[index] for index in indices]
        sets = [self.data.set_of(index) for index in indices]
        batch = TextBatch.from_examples(examples, [self._prompt_of_set[number] for number in sets])
        counts = Counter(self.data.sets[number].name for number in sets) if len(self.data.sets) > 1 else {}
        pairs = [2 if isinstance(example, Triple) else 1 for example in examples]
        return PlannedBatch(batch, self._plan(batch), self._objective(np.array(sets), np.array(pairs)), dict(counts))

    def _plan(self, batch: TextBatch) -> Plan:
        ids = self.tokens(batch.texts, batch.prompts)
        return self.encoder.plan_ids(ids, self.budget.micro_batch_tokens, self.processes)

    def _objective(self, set_of_example: np.ndarray, pairs_of_example: np.ndarray) -> Objective:
        """That of the batch's sets; if they differ, each for the pairs of its sets."""
        different: list[Objective] = []
        for number in dict.fromkeys(set_of_example.tolist()):
            if self.objectives[number] not in different:
                different.append(self.objectives[number])
        if len(different) == 1:
            return different[0]
        part_of_set = [different.index(one) if one in different else -1 for one in self.objectives]
        part_of_example = np.array(part_of_set)[set_of_example]
        part_of_pair = np.repeat(part_of_example, pairs_of_example)
        return JointObjective(
            [
                Part(
                    one,
                    float((part_of_example == number).mean()),
                    torch.from_numpy(np.flatnonzero(part_of_pair == number)),
                )
                for number, one in enumerate(different)
            ]
        )


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the next one is made in a thread while this one is used."""
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
        following = worker.submit(next, items, end)
        while (item := following.result()) is not end:
            following = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
