"""Texts of like length side by side, so that little is padded, and no more tokens at once than fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """Texts that go through the model together."""

    rows: list[int]
    """Which rows of `E` they are."""
    ids_BT: Tensor
    """Token ids, padded on the right."""
    mask_BT: Tensor
    """1 at real tokens."""


def plan_micro_batches(ids: Sequence[Sequence[int]], token_budget: int, pad_id: int) -> list[MicroBatch]:
    """Cuts texts, longest first, into micro-batches of at most `token_budget` padded tokens (a longer text goes alone).

    Longest first: if memory is short, it is short at once.
    """
    order = sorted(range(len(ids)), key=lambda row: (-len(ids[row]), row))
    groups: list[list[int]] = []
    for row in order:
        if groups and (len(groups[-1]) + 1) * len(ids[groups[-1][0]]) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_padded(rows, ids, pad_id) for rows in groups]


def padded_tokens(batches: Sequence[MicroBatch]) -> int:
    """Tokens the model computes, padding included."""
    return sum(batch.ids_BT.numel() for batch in batches)


def _padded(rows: list[int], ids: Sequence[Sequence[int]], pad_id: int) -> MicroBatch:
    longest = max(len(ids[row]) for row in rows)
    ids_BT = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    mask_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    for position, row in enumerate(rows):
        ids_BT[position, : len(ids[row])] = torch.tensor(ids[row], dtype=torch.long)
        mask_BT[position, : len(ids[row])] = 1
    return MicroBatch(rows, ids_BT, mask_BT)
