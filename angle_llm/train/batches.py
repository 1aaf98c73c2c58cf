"""The optimizer steps of a run: their schedule, and their batches from example indices to planned micro-batches.

`StepSchedule` chooses the examples, learning rate, evaluation and checkpoint of every step. `BatchPlanner` makes the
batches of a step and plans their micro-batches. `prefetch` makes the next step in a thread during the current step.

Steps are numbered from 1. No step has learning rate 0. Common schedulers start at 0, which would waste a thirtieth of a
run of 30 steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.data.order import Draws
from angle_llm.losses import AngleObjective, MixedObjective, NestedObjective, Objective, Part
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.memory.token_budget import TokenBudget
from angle_llm.prompts import SIDES
from angle_llm.settings.train import TrainSettings
from angle_llm.train.precomputed_vectors import PrecomputedVectors

DIGEST_EXAMPLES = 1_000
Item = TypeVar("Item")


class StepSchedule:
    """The optimizer steps of a run: their batches of example indices, learning rates, evaluations and checkpoints.

    A batch depends only on the seed, the epoch and the position of the batch in the epoch.
    """

    def __init__(self, draws: Draws, settings: TrainSettings) -> None:
        self._draws = draws
        self._settings = settings
        self._steps_per_epoch = math.ceil(draws.batches(settings.batch_size) / settings.accumulation)
        steps = self._steps_per_epoch * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        self.warmup = settings.optimizer.warmup_steps(self.steps)

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect."""
        settings, found = self._settings, []
        if settings.max_steps is not None and settings.max_steps > self.steps:
            found.append(
                f"--max-steps is {settings.max_steps}, but the run ends after {self.steps} (epochs: {settings.epochs}, steps in "
                f"an epoch: {self._steps_per_epoch}). For more steps, raise --epochs."
            )
        if self.warmup >= self.steps:
            found.append(f"the warm-up takes {self.warmup} of {self.steps} steps: the learning rate never falls")
        return found

    def after(self, done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the epoch and the batches of every step after the first `done` steps.

        A batch is a list of example indices; a step has up to `accumulation` batches, whose gradients are averaged.
        """
        settings = self._settings
        epoch, skipped = divmod(done, self._steps_per_epoch)
        first = skipped * settings.accumulation
        while done < self.steps:
            batches = self._draws.epoch(epoch, settings.batch_size, seed=settings.seed, first=first)
            while done < self.steps and (together := list(islice(batches, settings.accumulation))):
                yield epoch, together
                done += 1
            epoch, first = epoch + 1, 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self._settings.optimizer.learning_rate * rate_share(step, self.warmup, self.steps)

    def evaluates_at(self, step: int) -> bool:
        """Return whether the encoder is evaluated after a step; step 0 means before the first step."""
        every = self._settings.evaluation.every_steps
        return step in (0, self.steps) or (every > 0 and step % every == 0)

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is written after a step; always after the last step, for a rerun of the run."""
        every = self._settings.checkpoint.every_steps
        return every > 0 and (step == self.steps or step % every == 0)


def rate_share(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1, as a fraction of the peak learning rate.

    It rises during `warmup` steps, then falls linearly to the last of `steps`.
    """
    if step <= warmup:
        return step / warmup
    return (steps - step + 1) / (steps - warmup + 1)


class PlannedBatch(NamedTuple):
    """A batch and its loss."""

    batch: TextBatch
    loss: Objective
    counts: dict[str, int]
    """Number of examples by dataset name; empty for a single dataset."""
    vectors: Mapping[str, Tensor] = MappingProxyType({})
    """Embeddings of the texts by a guide or teacher, by field of `Relation`."""


class PlannedGroup(NamedTuple):
    """Batches that are encoded together, and the plan of their concatenated texts."""

    batches: list[PlannedBatch]
    plan: Plan
    budget: TokenBudget
    """The budget for which the plan was made."""


class BatchPlanner:
    """Makes batches from example indices, the same on every rank.

    A dataset may have prompts of its own. Prompts are numbered, 0 is the encoder's for queries; equal prompts have one
    number.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        data: Mixture,
        losses: Sequence[Objective],
        world_size: int,
        budget: TokenBudget,
        vectors: Mapping[str, PrecomputedVectors] | None = None,
    ) -> None:
        """`losses`: one per dataset. `budget` may be lowered between batches. `vectors`: see `PlannedBatch`."""
        self._vectors = vectors or {}
        self.encoder, self.data, self.losses, self.world_size, self.budget = encoder, data, losses, world_size, budget
        self._tokenizers: list[Callable[[Sequence[str]], list[list[int]]]] = []
        self.prompts: list[tuple[int, int]] = []
        """Prompt numbers of each dataset: of queries, and of documents."""
        known: dict[str, int] = {}
        for each in [None, *(one.prompt for one in data.sets)]:
            own = encoder if each is None else encoder.with_prompt(each)
            numbers = []
            for side in SIDES:
                mark = own.prompts.of(side).fingerprint
                if mark not in known:
                    known[mark] = len(self._tokenizers)
                    self._tokenizers.append(own.for_side(side).tokenize)
                numbers.append(known[mark])
            self.prompts.append((numbers[0], numbers[1]))
        del self.prompts[0]  # of the encoder

    def sets_without_pairs(self) -> Iterator[str]:
        """Yield the names of datasets whose pairs are all a text with itself, read up to the first other pair.

        Such a pair is one row, so no term learns from it. Exceptions: a text with two prompts is two rows, and vectors
        of a teacher are learned from single texts.
        """
        for each, loss, (query, document) in zip(self.data.sets, self.losses, self.prompts, strict=True):
            plain = loss.plain if isinstance(loss, NestedObjective) else loss
            if query == document and isinstance(plain, AngleObjective) and not plain.teacher_vector_weight:
                pairs = chain.from_iterable(map(pairs_of, each.examples))
                if all(left == right for left, right, _ in pairs):
                    yield each.name

    def steps(self, steps: Iterator[tuple[int, list[list[int]]]]) -> Iterator[tuple[int, list[PlannedGroup]]]:
        """Yield the epoch and the batches of each optimizer step, given their example indices."""
        for epoch, batches in steps:
            yield epoch, self.grouped([self._batch(indices) for indices in batches])

    def batch(self, indices: Sequence[int]) -> TextBatch:
        """Return the texts and relation of some examples."""
        prompts = [self.prompts[self.data.set_of(index)] for index in indices]
        return TextBatch.from_examples([self.data[index] for index in indices], prompts)

    def tokenize(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Return the token ids of texts, each formatted with its prompt."""
        ids: list[list[int]] = [[] for _ in texts]
        for prompt in set(prompts):
            places = [place for place, one in enumerate(prompts) if one == prompt]
            for place, made in zip(places, self._tokenizers[prompt]([texts[place] for place in places]), strict=True):
                ids[place] = made
        return ids

    def grouped(self, batches: Sequence[PlannedBatch]) -> list[PlannedGroup]:
        """Group the batches of a step and plan each group: as many batches together as can keep their activations.

        Batches are together, in order, only if no rank computes more than `graph_tokens` tokens of them. So a batch
        that is encoded twice is alone, and none is encoded twice that would be encoded once if it were alone. The
        result depends on token ids, budget and number of ranks only.
        """
        budget = self.budget  # another thread may lower it
        ids = [self.tokenize(each.batch.texts, each.batch.prompts) for each in batches]
        tokens = [sum(map(len, texts)) for texts in ids]
        groups: list[PlannedGroup] = []
        share = 0.0  # tokens of the largest rank per token of the texts, in the last plan
        first = 0
        while first < len(batches):
            count = left = len(batches) - first
            while True:
                while count > 1 and share * sum(tokens[first : first + count]) > budget.graph_tokens:
                    count -= 1
                count = -(-left // -(-left // count))  # as many groups, of about equally many batches
                together = list(chain.from_iterable(ids[first : first + count]))
                plan = self.encoder.plan_ids(together, budget.micro_batch_tokens, self.world_size)
                share = plan.largest_share / sum(tokens[first : first + count])
                if plan.largest_share <= budget.graph_tokens or count == 1:
                    break
            groups.append(PlannedGroup(list(batches[first : first + count]), plan, budget))
            first += count
        return groups

    def digest(self) -> str:
        """Return a hash of layout, pooling, padding, and the token ids of the first examples, which determine the plans."""
        some = self.batch(range(min(DIGEST_EXAMPLES, len(self.data))))
        encoder = self.encoder
        values = (encoder.layouts, encoder.pooling, encoder.pad_id, self.tokenize(some.texts, some.prompts))
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def _batch(self, indices: list[int]) -> PlannedBatch:
        batch = self.batch(indices)
        sets = [self.data.set_of(index) for index in indices]
        names = [each.name for each in self.data.sets]
        counts = {name: sets.count(number) for number, name in enumerate(names)} if len(names) > 1 else {}
        vectors = {name: each.rows(batch) for name, each in self._vectors.items()}
        return PlannedBatch(batch, self._loss(batch, sets), counts, vectors)

    def _loss(self, batch: TextBatch, sets: list[int]) -> Objective:
        """Return the loss of the datasets in a batch. If losses or prompts differ, each applies to the pairs of its
        datasets only: with another prompt, the same text is another row and would be its own negative."""
        kinds = [(self.losses[number], self.prompts[number]) for number in sets]
        different = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
        if len(different) == 1:
            return different[0][0]
        part_of_example = np.array([different.index(kind) for kind in kinds])
        part_of_pair = part_of_example[batch.group.numpy()]
        parts = []
        for number, (loss, _) in enumerate(different):
            of_part = torch.from_numpy(np.flatnonzero(part_of_pair == number))
            parts.append(Part(loss, float((part_of_example == number).mean()), of_part))
        return MixedObjective(parts)


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items; a thread computes the next item while the current item is used."""
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
        following = worker.submit(next, items, end)
        while (item := following.result()) is not end:
            following = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
