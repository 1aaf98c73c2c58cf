"""Encode blocks of texts in three stages that overlap: tokenizer, model and writer.

    tokenizer   a thread reads and tokenizes a block of texts, and plans its micro-batches
    model       the calling thread computes the micro-batches of a block and starts the copy of its embeddings to the CPU
    writer      a thread waits for the copy, and passes the embeddings on, block by block in order

At most three blocks are in memory, one per stage. Legend: N texts of a block, U unique texts, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from angle_llm.device import (
    evaluating,
    is_gpu,
    is_out_of_memory,
    is_partitioned,
    keep_freed_memory,
    on_device,
    release_cached_memory,
    start_copy_to_cpu,
    time_mark,
)
from angle_llm.io import log
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.activation_checkpointing import forward_lock
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.layout.micro_batches import Plan

Item = TypeVar("Item")
TokenIds: TypeAlias = Sequence[Sequence[int]]
Rows = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class StageRates:
    """Number of encoded texts, and seconds of each stage without waiting; the tokenizer also reads and plans."""

    texts: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"tokenizer": 0.0, "model": 0.0, "writer": 0.0})

    def __str__(self) -> str:
        rates = [f"{stage} {self.texts / max(seconds, 1e-9):,.0f}" for stage, seconds in self.seconds.items()]
        slowest = max(self.seconds, key=self.seconds.__getitem__)
        return f"texts/s: {', '.join(rates)}; the {slowest} limits the speed"


class _Planned(NamedTuple):
    """A block of texts in micro-batches, the function that splits it again, and the seconds of reading and planning."""

    label: Any
    plan: Plan
    make_plan: Callable[[int], Plan]
    seconds: float


def prefetch(items: Iterator[Item], worker: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield the items of an iterator; `worker` computes the next item while the caller uses the current item."""
    end = object()
    following = worker.submit(next, items, end)
    while (item := following.result()) is not end:
        following = worker.submit(next, items, end)
        yield item  # type: ignore[misc]


def encode_blocks(
    model: EmbeddingModel,
    plan_ids: Callable[[TokenIds, int], Plan],
    blocks: Iterable[tuple[Item, TokenIds]],
    finish: Callable[[Item, Rows], object],
    *,
    micro_batch_tokens: int | None = None,
    progress: Callable[[int], object],
    overlap: bool = True,
    restores_budget: bool = False,
    plans: list[Plan] | None = None,
) -> StageRates:
    """Encode blocks of tokenized texts, and call `finish(label, rows_ND)` for each block, in order.

    Returns the rates of the stages. Forward passes in other threads wait until the end. If a stage fails, the blocks before
    are finished, and the error of the first block that failed is raised.

    Args:
        plan_ids: `SentenceEncoder.plan_ids`.
        blocks: pairs of any label and the token ids of N texts.
        finish: called with the label and the embeddings (N, D) of a block.
        micro_batch_tokens: maximum number of tokens in a micro-batch. None: 2,048 on a CPU, 16,384 on other devices.
        progress: called with the number of texts of each micro-batch, negative before texts are encoded again.
        overlap: whether threads run the first and the last stage; a single block has nothing to overlap.
        restores_budget: whether embeddings do not depend on an out-of-memory error in another block.
        plans: list that gets the split of each block into micro-batches, which keeps all token ids in memory.
    """
    device = next(model.parameters()).device
    budget = first_budget = micro_batch_tokens or (16384 if is_gpu(device) else 2048)  # a Mac has the memory of a CPU
    rates = StageRates()
    pending_write: Future[None] | None = None

    def write(label: Item, plan: Plan, wait: Callable[[], tuple[torch.Tensor, float]]) -> None:
        copied_UD, seconds = wait()
        rates.seconds["model"] += seconds
        started = time.perf_counter()
        finish(label, copied_UD.numpy()[plan.row_of])
        rates.seconds["writer"] += time.perf_counter() - started

    memory = keep_freed_memory() if device.type == "cpu" else nullcontext()
    with (
        ThreadPoolExecutor(1, "tokenizer") as tokenizer,
        ThreadPoolExecutor(1, "writer") as writer,
        forward_lock(model.backbone),
        evaluating(model),
        attention_kernels(device),
        memory,
    ):
        planned = _planned(plan_ids, blocks, first_budget)
        try:
            for block in prefetch(planned, tokenizer) if overlap else planned:
                plan, wait = _encode_planned(model, block, budget, progress)
                budget = first_budget if restores_budget else plan.token_budget
                if plans is not None:
                    plans.append(plan)
                rates.texts += len(plan.row_of)
                rates.seconds["tokenizer"] += block.seconds
                if not overlap:
                    write(block.label, plan, wait)
                    continue
                if pending_write is not None:
                    pending_write.result()
                pending_write = writer.submit(write, block.label, plan, wait)
        finally:  # an error of the writer is about an earlier block than the error of another stage
            if pending_write is not None:
                pending_write.result()
    return rates


def _planned(
    plan_ids: Callable[[TokenIds, int], Plan], blocks: Iterable[tuple[Any, TokenIds]], token_budget: int
) -> Iterator[_Planned]:
    """Read and tokenize texts by iterating over `blocks`, and yield the blocks with their micro-batches."""
    started = time.perf_counter()
    for label, ids in blocks:
        plan = plan_ids(ids, token_budget)
        yield _Planned(label, plan, partial(plan_ids, ids), time.perf_counter() - started)
        started = time.perf_counter()


def _encode_planned(
    model: EmbeddingModel, block: _Planned, token_budget: int, progress: Callable[[int], object]
) -> tuple[Plan, Callable[[], tuple[torch.Tensor, float]]]:
    """Encode a block in micro-batches; after every out-of-memory error, encode again with half the token budget.

    With partitioned weights (ZeRO-3, FSDP) the error is raised, because all other ranks wait in the failed forward pass.

    Returns the split that was used, and a function that waits for the embeddings of the U unique texts, (U, D) float32 on
    the CPU, and returns them and the seconds of the model. They are copied from a GPU once, at the end.

    Raises:
        RuntimeError: if the memory is too small for a single text.
    """
    device = next(model.parameters()).device
    partitioned = any(map(is_partitioned, model.parameters()))
    plan = block.plan if token_budget == block.plan.token_budget else block.make_plan(token_budget)
    while True:
        reported = 0
        texts_per_row = len(plan.row_of) / max(plan.unique, 1)
        try:
            started = time_mark(device)
            rows_UD = torch.empty(plan.unique, model.width, device=device)
            for group in plan.groups:
                micro = group.make()  # one at a time, to save memory
                rows_UD[on_device(torch.tensor(micro.rows), device)] = model(**micro.inputs(device)).float()
                texts = round(len(micro.rows) * texts_per_row)
                progress(texts)
                reported += texts
            return plan, start_copy_to_cpu(rows_UD, started)
        except (RuntimeError, MemoryError) as error:
            if partitioned or not is_out_of_memory(error):
                raise
            if all(len(group.rows) == 1 for group in plan.groups):
                raise RuntimeError(
                    f"out of memory with a single text per micro-batch, of up to {plan.longest_text} tokens. Lower max_length "
                    "(--model.max-length in training), or use a smaller model or more memory."
                ) from error
        # Outside of `except`, the error and the tensors of its frames are freed.
        rows_UD = micro = None  # type: ignore[assignment]
        progress(-reported)
        largest = max(group.computed_tokens for group in plan.groups)  # a single text can exceed the budget
        token_budget = max(min(token_budget, largest) // 2, 1)
        log(f"out of memory: encoding with at most {token_budget} tokens per micro-batch")
        release_cached_memory()
        plan = block.make_plan(token_budget)
