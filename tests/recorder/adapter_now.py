"""Access to internals that the recorder needs, in the current tree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from angle_llm import SentenceEncoder, TextBatch, TrainSettings
from angle_llm.cli import main as command_line
from angle_llm.config import load_settings
from angle_llm.data.mixture import load_mixture
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import BatchPlan

__all__ = ["command_line"]
STS_COMMAND = ["eval", "sts"]
METRICS = {"layout": "way"}
"""Names in metrics.jsonl that differ from those at the tag: {name here: name at the tag}."""


def token_ids(encoder: SentenceEncoder, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, prompt and special tokens included."""
    return encoder.tokenize(texts)


def plan(encoder: SentenceEncoder, texts: list[str], token_budget: int, processes: int) -> dict[str, list[Any]]:
    """Row of each text, rows of each group, groups of each process, and the tensors of each micro-batch."""
    made = encoder.plan(texts, token_budget, processes)
    tensors = []
    for micro in made.micro_batches:
        tensors += [micro.ids_BT] if micro.mask_BT is None else [micro.ids_BT, micro.mask_BT]
        if micro.trie is not None:
            tensors += [micro.trie.depth_1T, micro.trie.end_R, micro.trie.place_T, *sum(micro.trie.groups, ())]
    return {
        "row of each text": [made.row_of],
        "rows of each group": [group.rows for group in made.groups],
        "groups of each process": made.shares,
        "logical and computed tokens, longest text": [[made.logical_tokens, made.computed_tokens, made.longest_text]],
        "tensors of micro-batches": [tensor.flatten().tolist() for tensor in tensors],
    }


def batches(config: Path, encoder: SentenceEncoder) -> Iterator[tuple[int, list[list[int]], list[TextBatch]]]:
    """For each optimizer step: the epoch, the examples of its batches, and the batches."""
    settings = load_settings(TrainSettings, config)
    data = load_mixture(settings.data, Path("cache"))
    planner = BatchPlanner(encoder, data, make_losses(settings), 1, TokenBudget(settings.micro_batch_tokens, 0))
    for epoch, together in BatchPlan(data.draws, settings).after(0):
        yield epoch, together, [planner.batch(indices) for indices in together]


def sts_scores(path: Path) -> list[float]:
    """Correlations, then cosines, from the JSON file of the STS command."""
    values = json.loads(path.read_text(encoding="utf-8"))
    correlations = [task[name] for task in values["tasks"].values() for name in ("spearman", "pearson")]
    return correlations + [cosine for scores in values["pairs"].values() for cosine in scores["cosine"]]
