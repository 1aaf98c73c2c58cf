"""The plan of a batch: which tokens go through the model together, so that as few as possible are computed.

Two ways give the same rows. **trie**: prefixes that texts share are computed once (`trie`), for causal models. **padded**:
unique texts of like length side by side, padded on the right, for every model. `plan_micro_batches` decides, by counting
the tokens each would compute, and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angle_llm.modeling.trie import Trie, build_trie, cut, shared_prefixes


@dataclass(frozen=True)
class MicroBatch:
    """Texts that go through the model together: padded with a mask, or as a trie."""

    rows: list[int]
    """Which of the plan's unique texts they are, in the order the model returns them."""
    ids_BT: Tensor
    mask_BT: Tensor | None = None
    """1 at real tokens, which come first."""
    trie: Trie | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return self.ids_BT.numel()

    @property
    def longest_side(self) -> int:
        """Tokens of its sequences: of the longest text if padded, of all nodes if a trie."""
        return self.ids_BT.shape[1]

    def on(self, device: torch.device) -> dict[str, Any]:
        """What `EmbeddingModel.forward` takes, on a device."""
        given = {"ids_BT": self.ids_BT, "mask_BT": self.mask_BT, "trie": self.trie}
        return {name: value.to(device) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class PrefixSharing:
    """What a model allows."""

    refused: str | None
    """Why its texts cannot share prefixes; None if they can."""
    longest: int | None = None
    """Longest text that may share: no sliding window may end within it. None: any."""


@dataclass(frozen=True)
class Plan:
    """How a batch of N texts is computed."""

    micro_batches: list[MicroBatch]
    row_of: list[int]
    """For each of the N texts, its row among the unique ones; texts with equal ids are one."""
    way: str
    """trie or padded."""
    reason: str
    """Why this way."""
    logical_tokens: int
    """Tokens of all texts asked for, repeats counted."""

    @property
    def unique(self) -> int:
        """Rows the model computes."""
        return sum(len(micro.rows) for micro in self.micro_batches)

    @property
    def computed_tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return sum(micro.computed_tokens for micro in self.micro_batches)


def plan_micro_batches(ids: Sequence[Sequence[int]], token_budget: int, pad_id: int, sharing: PrefixSharing) -> Plan:
    """Plans N texts, in micro-batches of at most `token_budget` tokens with padding (a longer text goes alone).

    Texts that are too long to share go padded beside the trie of the others.
    """
    row_of_ids: dict[tuple[int, ...], int] = {}
    row_of = [row_of_ids.setdefault(tuple(text), len(row_of_ids)) for text in ids]
    texts = list(row_of_ids)
    rows = range(len(texts))
    fitting = [row for row in rows if sharing.longest is None or len(texts[row]) <= sharing.longest]
    way = "padded"
    if sharing.refused is not None:
        reason = sharing.refused
    elif not fitting and texts:
        reason = f"every text is longer than {sharing.longest} tokens, more than may share prefixes"
    else:
        order = sorted(fitting, key=texts.__getitem__)
        ordered = [texts[row] for row in order]
        shared = shared_prefixes(ordered)
        starts, nodes = cut([len(text) for text in ordered], shared, token_budget)
        padded_tokens = sum(len(group) * len(texts[group[0]]) for group in _padded_groups(fitting, texts, token_budget))
        way = "trie" if nodes < padded_tokens else "padded"
        reason = f"{nodes} tokens as a trie, {padded_tokens} padded"
        if len(fitting) < len(texts):
            reason += f"; {len(texts) - len(fitting)} texts longer than {sharing.longest} tokens are padded"
    micro_batches = []
    if way == "trie":
        for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
            ids_1T, trie = build_trie(ordered[first:last], shared[first:last])
            micro_batches.append(MicroBatch(order[first:last], ids_1T, trie=trie))
    for some in (set(rows) - set(fitting), fitting if way == "padded" else []):
        micro_batches += [_padded(group, texts, pad_id) for group in _padded_groups(sorted(some), texts, token_budget)]
    # Largest first: if memory is short, it is short at once.
    micro_batches.sort(key=lambda micro: -micro.longest_side)
    return Plan(micro_batches, row_of, way, reason, sum(map(len, ids)))


def _padded_groups(rows: Sequence[int], texts: Sequence[Sequence[int]], token_budget: int) -> list[list[int]]:
    """Texts of like length, longest first, so that little is padded."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-len(texts[row]), row)):
        if groups and (len(groups[-1]) + 1) * len(texts[groups[-1][0]]) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _padded(rows: list[int], texts: Sequence[Sequence[int]], pad_id: int) -> MicroBatch:
    ids_BT = np.full((len(rows), len(texts[rows[0]])), pad_id, dtype=np.int64)
    mask_BT = np.zeros_like(ids_BT)
    for position, row in enumerate(rows):
        ids_BT[position, : len(texts[row])] = texts[row]
        mask_BT[position, : len(texts[row])] = 1
    return MicroBatch(rows, torch.from_numpy(ids_BT), torch.from_numpy(mask_BT))
