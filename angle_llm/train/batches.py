"""Batches ready before the model wants them: texts tokenised, and the next batch planned while this one trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from angle_llm.config import ObjectiveSettings, TrainSettings, settings_from_dict, settings_to_dict
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Triple
from angle_llm.data.mixture import Mixture, sets_of
from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Objective, Part
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.micro_batches import Plan
from angle_llm.prompts import load_prompt
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget

TEXTS_AT_ONCE = 10_000
MOST_STORED = 200_000
"""Examples. The texts of more, or of examples on disk, are tokenised batch by batch: that starts at once, and is far faster than
any model."""

Item = TypeVar("Item")


class PlannedBatch(NamedTuple):
    """A batch, how its texts are computed, and what is asked of their vectors."""

    batch: TextBatch
    plan: Plan
    objective: Objective
    sets: dict[str, int]
    """How many of its examples are of which set; empty if there is one set."""


class Tokens:
    """The ids of texts, tokenised when they are asked for."""

    def __init__(self, wordings: Wordings, some: TextBatch) -> None:
        self._wordings = wordings
        self._some = some

    def __call__(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Ids of texts under their prompts."""
        return self._wordings.ids(texts, prompts)

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
        wordings: Wordings,
        batch: TextBatch,
        folder: Path,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(wordings, batch)
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


def tokens_of(wordings: Wordings, data: Mixture, folder: Path, processes: Processes) -> Tokens:
    """The texts of a run as ids: stored if they are not too many, and in memory anyway."""
    if len(data) <= MOST_STORED and data.in_memory:
        return TokenStore(wordings, wordings.batch(data, range(len(data))), folder, processes)
    return Tokens(wordings, wordings.batch(data, range(min(1_000, len(data)))))


@dataclass
class BatchPlanner:
    """Makes the batches of an optimizer step from its examples' indices; every process makes the same ones."""

    encoder: SentenceEncoder
    tokens: Tokens
    wordings: Wordings
    data: Mixture
    objectives: Sequence[Objective]
    """One for each set."""
    processes: int
    budget: TokenBudget
    """It may be lowered while a run goes."""

    def all(self, steps: Iterator[tuple[int, list[list[int]]]]) -> Iterator[tuple[int, list[PlannedBatch]]]:
        """For each optimizer step its epoch and its batches."""
        for epoch, batches in steps:
            yield epoch, [self._made(indices) for indices in batches]

    def again(self, planned: PlannedBatch) -> PlannedBatch:
        """A batch with its plan at the budget of now."""
        return planned._replace(plan=self._plan(planned.batch))

    def _made(self, indices: list[int]) -> PlannedBatch:
        batch = self.wordings.batch(self.data, indices)
        sets = [self.data.set_of(index) for index in indices]
        names = [each.name for each in self.data.sets]
        counts = {name: sets.count(number) for number, name in enumerate(names)} if len(names) > 1 else {}
        return PlannedBatch(batch, self._plan(batch), self._objective(indices, sets), counts)

    def _plan(self, batch: TextBatch) -> Plan:
        ids = self.tokens(batch.texts, batch.prompts)
        return self.encoder.plan_ids(ids, self.budget.micro_batch_tokens, self.processes)

    def _objective(self, indices: list[int], sets: list[int]) -> Objective:
        """That of the batch's sets. If objectives or prompts differ, each for the pairs of its sets: under another prompt the
        same text is another row, and would be its own negative."""
        kinds = [(self.objectives[number], self.wordings.of_set[number]) for number in sets]
        different = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
        if len(different) == 1:
            return different[0][0]
        part_of_example = np.array([different.index(kind) for kind in kinds])
        pairs = [2 if isinstance(self.data[index], Triple) else 1 for index in indices]
        part_of_pair = np.repeat(part_of_example, pairs)
        return MixedObjective(
            [
                Part(
                    objective,
                    float((part_of_example == number).mean()),
                    torch.from_numpy(np.flatnonzero(part_of_pair == number)),
                )
                for number, (objective, _) in enumerate(different)
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


Tokenize = Callable[[Sequence[str]], list[list[int]]]


def objectives_of(settings: TrainSettings) -> list[Objective]:
    """One for each set: the run's, with what the set has otherwise.

    Raises:
        SettingsError, ValueError: for settings that cannot be meant.
    """
    common = settings_to_dict(settings.objective)
    own = [
        settings_from_dict(ObjectiveSettings, common | each.objective, where=f"objective of {each.path}")
        for each in sets_of(settings.data)
    ]
    plain = [AngleObjective(**settings_to_dict(one)) for one in own]
    nested = settings.nested
    if not (nested.layers or nested.dimensions):
        return list(plain)
    return [NestedObjective(one, **settings_to_dict(nested)) for one in plain]


class Wordings:
    """The different prompts of a run, numbered; 0 is the encoder's own. Prompts that word alike are one."""

    def __init__(self, encoder: SentenceEncoder, data: Mixture) -> None:
        self.tokenizers: list[Tokenize] = [encoder.tokenize]
        known = {encoder.prompt.fingerprint: 0}
        self.of_set: list[int] = []
        """The number of each set's prompt."""
        for each in data.sets:
            prompt = encoder.prompt if each.prompt is None else load_prompt(each.prompt)
            if prompt.fingerprint not in known:
                known[prompt.fingerprint] = len(self.tokenizers)
                self.tokenizers.append(encoder.with_prompt(prompt).tokenize)
            self.of_set.append(known[prompt.fingerprint])

    def ids(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Ids of texts, each under its prompt."""
        ids: list[list[int]] = [[] for _ in texts]
        for prompt in set(prompts):
            places = [place for place, one in enumerate(prompts) if one == prompt]
            for place, made in zip(places, self.tokenizers[prompt]([texts[place] for place in places]), strict=True):
                ids[place] = made
        return ids

    def batch(self, data: Mixture, indices: Sequence[int]) -> TextBatch:
        """Examples of a mixture as a batch."""
        return TextBatch.from_examples(
            [data[index] for index in indices], [self.of_set[data.set_of(index)] for index in indices]
        )
