"""The optimizer steps of a run: their schedule, and their batches from example indices to planned micro-batches.

`StepSchedule` chooses the examples, learning rate, evaluation and checkpoint of every step. `BatchPlanner` makes the
batches of a step and plans their micro-batches, in a thread during the step before (`prefetch`).

Steps are numbered from 1. No step has learning rate 0. Common schedulers start at 0, which would waste a thirtieth of a
run of 30 steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import INSTRUCTIONS, DataError, pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.data.order import Draws
from angle_llm.losses import MixedObjective, Objective, Part
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.text_vectors import PrecomputedVectors
from angle_llm.prompts import INSTRUCTION, SIDES
from angle_llm.settings.train import TrainSettings
from angle_llm.train.token_budget import TokenBudget

DIGEST_EXAMPLES = 1_000
"""Number of examples whose token ids ranks compare before training."""


class StepSchedule:
    """Schedule of a training run: example indices, learning rate, evaluation and checkpoint of every optimizer step.

    The example indices of a batch depend only on the seed, the epoch and the position of the batch in the epoch.
    """

    def __init__(self, draws: Draws, settings: TrainSettings) -> None:
        self._draws = draws
        self._settings = settings
        self.steps_per_epoch = math.ceil(draws.batches(settings.batch_size) / settings.accumulation)
        """Number of optimizer steps in an epoch."""
        steps = self.steps_per_epoch * settings.epochs
        self.steps = min(steps, settings.max_steps or steps)
        """Number of optimizer steps of the run."""
        self.warmup = settings.optimizer.warmup_steps(self.steps)
        """Number of warm-up steps, in which the learning rate rises."""

    def warnings(self) -> list[str]:
        """Return messages about `max_steps` above the length of the run, and a warm-up as long as the run."""
        settings = self._settings
        messages = []
        if settings.max_steps is not None and settings.max_steps > self.steps:
            messages.append(
                f"--max-steps is {settings.max_steps}, but the run ends after {self.steps} (epochs: {settings.epochs}, steps in "
                f"an epoch: {self.steps_per_epoch}). For more steps, raise --epochs."
            )
        if self.warmup >= self.steps and settings.optimizer.schedule != "constant":
            messages.append(
                f"the warm-up ({self.warmup} steps) is not shorter than the run ({self.steps}). Lower --optimizer.warmup."
            )
        return messages

    def after(self, done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield (epoch, batches) for every optimizer step after the first `done` steps.

        A batch is a list of example indices. A step has up to `accumulation` batches, whose gradients are averaged.
        """
        settings = self._settings
        epoch, skipped = divmod(done, self.steps_per_epoch)
        first = skipped * settings.accumulation
        while done < self.steps:
            batches = self._draws.epoch(epoch, settings.batch_size, seed=settings.seed, first=first)
            while done < self.steps and (together := list(islice(batches, settings.accumulation))):
                yield epoch, together
                done += 1
            epoch, first = epoch + 1, 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step; steps are counted from 1."""
        optimizer = self._settings.optimizer
        return optimizer.learning_rate * rate_share(step, self.warmup, self.steps, optimizer.schedule)

    def evaluates_at(self, step: int) -> bool:
        """Return whether the encoder is evaluated after an optimizer step; step 0 is before training."""
        every = self._settings.evaluation.every_steps
        return step in (0, self.steps) or (every > 0 and step % every == 0)

    def saves_at(self, step: int, *, stops: bool = False) -> bool:
        """Return whether a checkpoint is written after an optimizer step; `stops`: it is the last of a stopped run.

        If checkpoints are on, the last step has a checkpoint too, so that a rerun of the command does not train again.
        """
        every = self._settings.checkpoint.every_steps
        return every > 0 and (stops or step == self.steps or step % every == 0)


def rate_share(step: int, warmup: int, steps: int, schedule: str = "linear") -> float:
    """Return the learning rate of an optimizer step as a fraction of the peak learning rate.

    The schedules are those of transformers: a rise during `warmup` steps, then for example a linear fall. The first step
    is 1 and the last is `steps`. They get one more step, so that no step has rate 0.
    """
    from transformers.optimization import get_scheduler

    unused = torch.optim.SGD([torch.zeros(1)])
    scheduler: Any = get_scheduler(schedule, unused, num_warmup_steps=warmup, num_training_steps=steps + 1)
    return float(scheduler.lr_lambdas[0](step))


class PlannedBatch(NamedTuple):
    """A training batch with its loss, and vectors of a guide or teacher encoder."""

    batch: TextBatch
    loss: Objective
    counts: dict[str, int]
    """Number of examples in the batch by dataset name; empty if the run has a single dataset."""
    vectors: Mapping[str, Tensor] = MappingProxyType({})
    """Vectors of the texts from other encoders, (N texts, dimensions).

    The keys are fields of `Relation`: `guide` for the encoder that filters false negatives, `teacher_vectors` for the
    encoder that the model learns from.
    """
    epoch: int = 0
    """Epoch of the batch, from 0."""


class PlannedGroup(NamedTuple):
    """Batches of an optimizer step that are encoded together, and the micro-batches of all their texts."""

    batches: list[PlannedBatch]
    plan: Plan
    """Micro-batches of the concatenated texts of the batches."""


class BatchPlanner:
    """Converts example indices to batches with their losses, and plans the micro-batches of an optimizer step.

    The results are equal on every rank. A dataset may have different prompts than the encoder, so prompts are
    numbered. Number 0 is the query prompt of the encoder, and equal prompts have the same number.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        data: Mixture,
        losses: Sequence[Objective],
        world_size: int,
        vectors: Mapping[str, PrecomputedVectors] | None = None,
    ) -> None:
        """Prepare a tokenizer for every prompt of the encoder and the datasets.

        Args:
            losses: one loss per dataset of `data`.
            world_size: number of processes that share the micro-batches.
            vectors: vectors of the training texts from a guide or teacher encoder, by field of `Relation`.
        """
        self._vectors = vectors or {}
        self.encoder, self.data, self.losses, self.world_size = encoder, data, losses, world_size
        set_encoders = [encoder if part.prompt is None else encoder.with_prompt(part.prompt) for part in data.sets]
        tokenizers = {
            set_encoder.prompts.of(side).fingerprint: set_encoder.for_side(side).tokenizers.selected
            for set_encoder in (encoder, *set_encoders)
            for side in SIDES
        }
        self._tokenizers = list(tokenizers.values())
        self.prompt_fingerprints = list(tokenizers)
        """Hashes of the prompts by number."""
        number_of_prompt = {fingerprint: number for number, fingerprint in enumerate(tokenizers)}
        self.prompts = [
            (number_of_prompt[prompts.query.fingerprint], number_of_prompt[prompts.document.fingerprint])
            for prompts in (set_encoder.prompts for set_encoder in set_encoders)
        ]
        """(query prompt number, document prompt number) of each dataset."""
        # A loss whose rows are not embeddings has no negatives, so prompts do not matter. A class belongs to its dataset.
        keys = [
            (loss, prompts if loss.embeddings_per_text else None, -1 if data.draws.classes[number] is None else number)
            for number, (loss, prompts) in enumerate(zip(losses, self.prompts, strict=True))
        ]
        self._first_set_with_same_loss = np.array([keys.index(key) for key in keys])
        """Number of the first dataset with the same loss and prompts, for each dataset."""
        self.warnings = self._check_instructions()
        """Messages about instructions in the data that no prompt uses."""

    def _check_instructions(self) -> list[str]:
        """Return messages about unused instructions; raise `DataError` for an instruction that leaves no token for a text."""
        messages = set()
        for dataset, numbers in zip(self.data.sets, self.prompts, strict=True):
            if dataset.report is not None and not dataset.report.columns.keys() & set(INSTRUCTIONS):
                continue  # no column of instructions: the examples are not read
            query_of: dict[tuple[int, str | None], str] = {}  # prompt number and instruction → first query
            for example in dataset.examples:
                for key in zip(numbers, (example.instruction, example.document_instruction), strict=True):
                    query_of.setdefault(key, pairs_of(example)[0][0])
            for (number, instruction), query in query_of.items():
                tokenizer = self._tokenizers[number]
                if instruction is not None and not tokenizer.prompt.takes_instruction:
                    messages.add(
                        f"{dataset.name}: its instructions are not used, because prompt {tokenizer.prompt.name!r} has no "
                        f"{INSTRUCTION}. Choose another --model.prompt: `query e5_mistral_query document plain_eos`."
                    )
                elif instruction is not None:
                    row = f"{dataset.name}: instruction {instruction!r:.80} of the query {query!r:.80}"
                    try:
                        tokenizer.with_instruction(instruction)
                    except ValueError as error:
                        raise DataError(f"{row}: {error}") from None
        return sorted(messages)

    def sets_without_pairs(self) -> Iterator[str]:
        """Yield the names of datasets from which nothing can be learned, because every pair is a text with itself.

        Both texts of such a pair are the same row of the embedding matrix. Datasets with different prompts for queries
        and documents are not named, because a text is then two rows. Nor are datasets whose loss needs no pairs, such as
        a loss on teacher vectors. A dataset is read up to its first pair of different texts.
        """
        for dataset, loss, (query, document) in zip(self.data.sets, self.losses, self.prompts, strict=True):
            if query == document and loss.needs_pairs:
                pairs = chain.from_iterable(map(pairs_of, dataset.examples))
                if all(left == right for left, right, _ in pairs):
                    yield dataset.name

    def steps(
        self, steps: Iterator[tuple[int, list[list[int]]]], budget: TokenBudget, rank: int = 0
    ) -> Iterator[tuple[int, list[PlannedGroup]]]:
        """Yield (epoch, planned groups of batches) for each optimizer step, for a token budget of a process.

        `steps` yields (epoch, batches of example indices), as `StepSchedule.after` does. A group is a list of batches
        that are encoded together. The tensors of the micro-batches of `rank` are made in advance.
        """
        for epoch, batches in steps:
            groups = self.grouped([self._batch(indices, epoch) for indices in batches], budget)
            yield epoch, [PlannedGroup(group, plan.prepared(rank)) for group, plan in groups]

    def batch(self, indices: Sequence[int]) -> TextBatch:
        """Return a batch with the unique texts and scored pairs of the examples at `indices`."""
        prompts = [self.prompts[self.data.set_of(index)] for index in indices]
        return TextBatch.from_examples([self.data[index] for index in indices], prompts)

    def tokenize(self, batch: TextBatch) -> list[list[int]]:
        """Return the token ids of each text of a batch inside its prompt, with its instruction if the prompt takes one."""
        ids: list[list[int]] = [[] for _ in batch.texts]
        for prompt in set(batch.prompts):
            tokenizer = self._tokenizers[prompt]
            positions = [position for position, number in enumerate(batch.prompts) if number == prompt]
            texts = [batch.texts[position] for position in positions]
            instructions = [batch.instructions[position] for position in positions]
            ids_of_prompt = tokenizer(texts, 0, instructions if tokenizer.prompt.takes_instruction else ())
            for position, text_ids in zip(positions, ids_of_prompt, strict=True):
                ids[position] = text_ids
        return ids

    def grouped(self, batches: Sequence[PlannedBatch], budget: TokenBudget) -> list[PlannedGroup]:
        """Split the batches of an optimizer step into groups that are encoded together, and plan their micro-batches.

        A group has consecutive batches, as many as fit if every rank computes at most `budget.graph_tokens` tokens of
        the group. A single batch with more tokens is its own group and is encoded twice (gradient caching). So grouping
        never causes a batch to be encoded twice. The result depends on token ids, budget and number of ranks only.
        """
        ids = [self.tokenize(planned.batch) for planned in batches]
        head = self.encoder.model.head
        ids = [head.input_ids(texts, batch.epoch) for texts, batch in zip(ids, batches, strict=True)]
        groups: list[PlannedGroup] = []
        first, share = 0, 0.0
        while first < len(batches):
            count, plan, share = self._next_group(ids[first:], budget, share)
            groups.append(PlannedGroup(list(batches[first : first + count]), plan))
            first += count
        return groups

    def _next_group(self, ids: Sequence[list[list[int]]], budget: TokenBudget, share: float) -> tuple[int, Plan, float]:
        """Plan the next group of the batches that are left: return its number of batches, its plan and its share.

        `ids` has the token ids of the texts of each batch. The share of a plan is the tokens of the rank with the most
        tokens / the tokens of all texts; `share` is the share of the plan before, 0 without a plan.
        """
        count = len(ids)
        totals = list(accumulate(sum(map(len, texts)) for texts in ids))  # tokens of the first 1, 2, … batches
        while True:
            # The batches that fit if the share is as in the plan before.
            count = max(1, sum(share * total <= budget.graph_tokens for total in totals[:count]))
            # The same number of groups, with about equal numbers of batches; both divisions round up.
            groups_left = -(-len(ids) // count)
            count = -(-len(ids) // groups_left)
            together = list(chain.from_iterable(ids[:count]))
            plan = self.encoder.plan_ids(together, budget.micro_batch_tokens, self.world_size)
            share = plan.largest_share / totals[count - 1]
            if plan.largest_share <= budget.graph_tokens or count == 1:
                return count, plan, share

    def digest(self) -> str:
        """Return a hash that differs if another rank would plan other micro-batches.

        The hash covers layouts, pooling, and the token ids of the first examples.
        """
        some = self.batch(range(min(DIGEST_EXAMPLES, len(self.data))))
        encoder = self.encoder
        values = (encoder.layouts, encoder.pooling, self.tokenize(some))
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def _batch(self, indices: list[int], epoch: int) -> PlannedBatch:
        """Return the batch of the examples at `indices`, with its loss, dataset counts and precomputed vectors."""
        batch = self.batch(indices)
        sets = [self.data.set_of(index) for index in indices]
        names = [dataset.name for dataset in self.data.sets]
        counts = {name: sets.count(number) for number, name in enumerate(names)} if len(names) > 1 else {}
        vectors = {name: text_vectors.rows(batch) for name, text_vectors in self._vectors.items()}
        return PlannedBatch(batch, self._loss(batch, sets), counts, vectors, epoch)

    def _loss(self, batch: TextBatch, sets: list[int]) -> Objective:
        """Return the loss of a batch; `sets` has the dataset number of each example in the batch.

        If the losses or prompts of the datasets differ, a loss applies only to pairs of datasets with the same loss and
        prompts.
        """
        set_of_example = self._first_set_with_same_loss[sets]
        first_sets: list[int] = list(dict.fromkeys(set_of_example.tolist()))  # in the order of first occurrence
        if len(first_sets) == 1:
            return self.losses[first_sets[0]]
        set_of_pair = set_of_example[batch.group.numpy()]
        parts = []
        for number in first_sets:
            pairs = torch.from_numpy(np.flatnonzero(set_of_pair == number))
            # Weighted by examples, so that an example counts the same in a mixed batch as in a batch of its own set.
            share = float((set_of_example == number).mean())
            parts.append(Part(objective=self.losses[number], share=share, pairs=pairs))
        return MixedObjective(parts)
