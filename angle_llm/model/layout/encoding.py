"""Encode texts in micro-batches, with smaller ones after an out-of-memory error.

Legend: U unique texts of a plan, R texts of a micro-batch, C columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from angle_llm.device import is_out_of_memory, on_device
from angle_llm.io import log
from angle_llm.model.layout.micro_batches import Plan


def encode_planned(
    model: nn.Module,
    head: nn.Module,
    make_plan: Callable[[int], Plan],
    token_budget: int,
    columns: int,
    progress: Callable[[int], object],
) -> tuple[Plan, Tensor]:
    """Encode texts in micro-batches; after every out-of-memory error, encode again with half the token budget.

    With weights partitioned by ZeRO-3 the error is raised, because all other ranks wait in the failed forward pass.

    Args:
        head: decides what a row of `model` is (see `heads`).
        make_plan: splits the texts into micro-batches for a token budget (maximum number of tokens in a micro-batch).
        columns: number of columns of the model's output, C.
        progress: called with the number of texts of each micro-batch; with a negative number before texts are encoded
            again.

    Returns:
        The split that was used, and the embeddings of the U unique texts, (U, C) float32 on the CPU. They are copied from
        a GPU once, at the end.

    Raises:
        RuntimeError: if the memory is too small for a single text.
    """
    device = next(model.parameters()).device
    partitioned = not all(parameter.numel() for parameter in model.parameters())
    while True:
        plan = make_plan(token_budget)
        done = 0
        repeats = len(plan.row_of) / max(plan.unique, 1)
        try:
            rows_UC = torch.empty(plan.unique, columns, device=device)
            for micro in plan.micro_batches:
                rows_UC[on_device(torch.tensor(micro.rows), device)] = model(**micro.inputs(device), head=head).float()
                texts = round(len(micro.rows) * repeats)
                progress(texts)
                done += texts
            return plan, rows_UC.cpu()
        except (RuntimeError, MemoryError) as error:
            if partitioned or not is_out_of_memory(error):
                raise
            if all(len(group.rows) == 1 for group in plan.groups):
                raise RuntimeError(
                    f"out of memory with a single text per micro-batch, of up to {plan.longest_text} tokens. Lower max_length "
                    "(--model.max-length in training), or use a smaller model or more memory."
                ) from error
        # Outside of `except`, the error and the tensors of its frames are freed.
        rows_UC = micro = None  # type: ignore[assignment]
        progress(-done)
        token_budget = max(min(token_budget, max(group.computed_tokens for group in plan.groups)) // 2, 1)
        log(f"out of memory: encoding with at most {token_budget} tokens per micro-batch")
        torch.cuda.empty_cache()
