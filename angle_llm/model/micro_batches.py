"""The plan of a batch: which tokens go through the model together, so that as few as possible are computed.

Two ways give the same rows. **trie**: prefixes that texts share are computed once (`trie`), for causal models. **padded**:
unique texts of like length side by side, padded on the right, for every model. `plan_micro_batches` decides, by counting
the tokens each would compute, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angle_llm.model.prefix_trie import Trie, build_trie, cut, shared_prefixes


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

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """What `EmbeddingModel.forward` takes, on a device."""
        given = {"ids_BT": self.ids_BT, "mask_BT": self.mask_BT, "trie": self.trie}
        return {name: value.to(device) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class PrefixSharing:
    """What a model allows."""

    disabled_because: str | None
    """Why its texts cannot share prefixes; None if they can."""
    max_tokens: int | None = None
    """Longest text that may share: no sliding window may end within it. None: any."""


@dataclass(frozen=True)
class Group:
    """Texts that go through the model together, before they are made into tensors."""

    rows: list[int]
    """Which of the plan's unique texts they are, in the order the model returns them."""
    computed_tokens: int
    """Tokens the model computes, padding included."""
    longest_side: int
    """Tokens of its sequences: of the longest text if padded, of all nodes if a trie."""
    make: Callable[[], MicroBatch]
    """The tensors."""


@dataclass(frozen=True)
class Plan:
    """How a batch of N texts is computed, by one process or by several that each take a share."""

    groups: list[Group]
    row_of: list[int]
    """For each of the N texts, its row among the unique ones; texts with equal ids are one."""
    layout: str
    """trie or padded."""
    reason: str
    """Why this way."""
    logical_tokens: int
    """Tokens of all texts asked for, repeats counted."""
    longest_text: int
    """Tokens of the longest one."""
    token_budget: int
    """Of a micro-batch."""
    shares: list[list[int]]
    """For each process the positions of its groups. They hold about the same number of tokens."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]:
        """Of all groups, each made when it is asked for: a large batch's tensors are never there at once."""
        return _Made(self.groups)

    @property
    def rounds(self) -> int:
        """Micro-batches that every process computes; one with fewer groups makes up for them with stand-ins."""
        return max(map(len, self.shares))

    def share(self, process: int) -> Sequence[MicroBatch]:
        """The micro-batches of a process: as many as those of any other, so that processes may meet in each of them."""
        mine = [self.groups[position] for position in self.shares[process]]
        return _Made(mine + [_STAND_IN] * (self.rounds - len(mine)))

    @property
    def unique(self) -> int:
        """Rows the model computes."""
        return sum(len(group.rows) for group in self.groups)

    @property
    def computed_tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return sum(group.computed_tokens for group in self.groups)

    @property
    def largest_share(self) -> int:
        """Tokens of the process that has most."""
        return max(sum(self.groups[position].computed_tokens for position in share) for share in self.shares)


class _Made(Sequence[MicroBatch]):
    """Micro-batches, each made anew when it is asked for."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, position: Any) -> Any:
        some = self._groups[position]
        return _Made(some) if isinstance(some, list) else some.make()


def _stand_in() -> MicroBatch:
    ids_BT = torch.ones(1, 1, dtype=torch.int64)
    return MicroBatch([], ids_BT, torch.ones_like(ids_BT))


_STAND_IN = Group([], 0, 0, _stand_in)
"""One token that nobody asked for, and whose row nobody reads."""


def plan_micro_batches(
    ids: Sequence[Sequence[int]], token_budget: int, pad_id: int, sharing: PrefixSharing, processes: int = 1
) -> Plan:
    """Plans N texts, in micro-batches of at most `token_budget` tokens with padding (a longer text goes alone).

    Texts that are too long to share go padded beside the trie of the others. Several processes take shares of about as
    many tokens, in the same number of micro-batches.
    """
    row_of_ids: dict[tuple[int, ...], int] = {}
    row_of = [row_of_ids.setdefault(tuple(text), len(row_of_ids)) for text in ids]
    texts = list(row_of_ids)
    padded = _Padded(texts, pad_id)
    fitting = [row for row in range(len(texts)) if sharing.max_tokens is None or len(texts[row]) <= sharing.max_tokens]
    rest = sorted(set(range(len(texts))) - set(fitting))
    layout = "padded"
    grouped: Callable[[int], list[Group]] = partial(padded, range(len(texts)))
    if sharing.disabled_because is not None:
        reason = sharing.disabled_because
    elif not fitting and texts:
        reason = f"every text is longer than {sharing.max_tokens} tokens, more than may share prefixes"
    else:
        branches = _Branches(texts, fitting)
        nodes, padded_tokens = (
            sum(group.computed_tokens for group in groups)
            for groups in (branches(token_budget), padded(fitting, token_budget))
        )
        reason = f"{nodes} tokens as a trie, {padded_tokens} padded"
        if nodes < padded_tokens:
            layout = "trie"
            grouped = lambda budget: branches(budget) + padded(rest, budget)  # noqa: E731  # shorter than a def
        if rest:
            reason += f"; {len(rest)} texts longer than {sharing.max_tokens} tokens are padded"
    groups, lengths = _even(grouped, token_budget, processes), [len(text) for text in ids]
    # Largest first: if memory is short, it is short at once.
    groups.sort(key=lambda group: -group.longest_side)
    return Plan(
        groups, row_of, layout, reason, sum(lengths), max(lengths, default=0), token_budget, _deal(groups, processes)
    )


class _Branches:
    """Texts that share prefixes, in groups of neighbours."""

    def __init__(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._order = sorted(rows, key=lambda row: tuple(texts[row]))
        self._ordered = [texts[row] for row in self._order]
        self._shared = shared_prefixes(self._ordered)

    def __call__(self, token_budget: int) -> list[Group]:
        starts, _ = cut([len(text) for text in self._ordered], self._shared, token_budget)
        return [self._group(first, last) for first, last in pairwise([*starts, len(self._order)])]

    def _group(self, first: int, last: int) -> Group:
        # The first text of a group is computed whole, of each later one what it does not share with the one before.
        nodes = len(self._ordered[first]) + sum(
            len(self._ordered[position]) - self._shared[position] for position in range(first + 1, last)
        )
        return Group(self._order[first:last], nodes, nodes, partial(self._make, first, last))

    def _make(self, first: int, last: int) -> MicroBatch:
        ids_1T, trie = build_trie(self._ordered[first:last], self._shared[first:last])
        return MicroBatch(self._order[first:last], ids_1T, trie=trie)


class _Padded:
    """Texts of like length side by side, longest first, so that little is padded."""

    def __init__(self, texts: Sequence[Sequence[int]], pad_id: int) -> None:
        self._texts = texts
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[int], token_budget: int) -> list[Group]:
        groups: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (-len(self._texts[row]), row)):
            if groups and (len(groups[-1]) + 1) * len(self._texts[groups[-1][0]]) <= token_budget:
                groups[-1].append(row)
            else:
                groups.append([row])
        return [self._group(group) for group in groups]

    def _group(self, rows: list[int]) -> Group:
        longest = len(self._texts[rows[0]])
        return Group(rows, len(rows) * longest, longest, partial(self._make, rows))

    def _make(self, rows: list[int]) -> MicroBatch:
        ids_BT = np.full((len(rows), len(self._texts[rows[0]])), self._pad_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for position, row in enumerate(rows):
            ids_BT[position, : len(self._texts[row])] = self._texts[row]
            mask_BT[position, : len(self._texts[row])] = 1
        return MicroBatch(rows, torch.from_numpy(ids_BT), torch.from_numpy(mask_BT))


def _even(grouped: Callable[[int], list[Group]], token_budget: int, processes: int) -> list[Group]:
    """Groups within the budget; for several processes, of a budget so small that as many groups as they compute in the
    same number of rounds hold about as many tokens each."""
    groups = grouped(token_budget)
    if processes == 1 or not groups:
        return groups
    most = math.ceil(len(groups) / processes) * processes
    low = sum(group.computed_tokens for group in groups) // most
    high = max(group.computed_tokens for group in groups)
    while low < high:
        middle = (low + high) // 2
        tried = grouped(max(middle, 1))
        if len(tried) <= most:
            groups, high = tried, middle
        else:
            low = middle + 1
    return groups


def _deal(groups: Sequence[Group], processes: int) -> list[list[int]]:
    """Each group, the largest first, to the process that has fewest tokens and is not full."""
    rounds = math.ceil(len(groups) / processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for position in sorted(range(len(groups)), key=lambda position: -groups[position].computed_tokens):
        least = min(
            (process for process in range(processes) if len(shares[process]) < rounds),
            key=lambda one: (tokens[one], one),
        )
        shares[least].append(position)
        tokens[least] += groups[position].computed_tokens
    return [sorted(share) for share in shares]
