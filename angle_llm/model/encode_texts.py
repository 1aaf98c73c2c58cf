"""Vectors of any number of texts, in parts that bound the memory.

Legend: N texts, U unique texts of a plan, C columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.io import progress_bar
from angle_llm.model.checks import evaluating
from angle_llm.model.fast_paths import attention_kernels, keep_freed_memory
from angle_llm.model.micro_batches import EncodeStats, Plan
from angle_llm.model.out_of_memory import encode_planned
from angle_llm.model.tokenizer import check_texts

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

TEXTS_PLANNED = 32_768
"""Texts that are planned together and can share prefixes; bounds the memory for a corpus of any size."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


def encode_texts(
    encoder: SentenceEncoder, texts: Sequence[str], micro_batch_tokens: int | None, show_progress: bool
) -> tuple[Rows, EncodeStats]:
    """Return the model's rows of the texts, (N, C), and counts: C = D columns, and D more for each inner layer."""
    started = time.perf_counter()
    check_texts(texts)
    model, on_cpu = encoder.model, encoder.device.type == "cpu"
    budget = micro_batch_tokens or (2048 if on_cpu else 16384)
    columns = encoder.dimensions * (1 + len(model.inner_layers))
    rows_NC = np.empty((len(texts), columns), dtype=np.float32)
    plans: list[Plan] = []
    bar = progress_bar("encode", len(texts), "text", enabled=show_progress, transient=True)
    memory = keep_freed_memory() if on_cpu else nullcontext()
    with evaluating(model), attention_kernels(encoder.device), memory, bar as progress:
        for first in range(0, len(texts), TEXTS_PLANNED):
            make_plan = partial(encoder.plan_ids, encoder.tokenize(texts[first : first + TEXTS_PLANNED], first))
            plan, rows_UC = encode_planned(model, make_plan, budget, columns, progress.update)
            budget = plan.token_budget
            rows_NC[first : first + TEXTS_PLANNED] = rows_UC.numpy()[plan.row_of]
            plans.append(plan)
    return rows_NC, EncodeStats.of(plans, time.perf_counter() - started)
