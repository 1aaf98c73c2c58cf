"""The plan of a batch: which tokens are computed together, so that as few as possible are computed.

Three layouts give the same rows. **trie**: shared prefixes are computed once (`prefix_trie`), for causal models that
read the last token. **packed**: unique texts one after the other, for other models. **padded**: unique texts of similar
length, padded on the right, for every model. `plan_micro_batches` takes the one that needs less time.
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

from angle_llm.losses.relation import on_device
from angle_llm.model.prefix_trie import Trie, build_trie, cut, shared_prefixes

TOKEN_COST = {"trie": 1.1, "packed": 1.0}
"""Time per computed token relative to the padded layout, measured on a CPU (docs/LOG.md). It is a constant because a
measurement at the start of a run would make the layout vary between runs."""


@dataclass(frozen=True)
class MicroBatch:
    """Texts that the model computes together: padded with a mask, or in one sequence, as a trie or packed."""

    rows: list[int]
    """Their rows among the plan's unique texts, in the order of the model's output."""
    ids_BT: Tensor
    mask_BT: Tensor | None = None
    """1 at real tokens, on the left."""
    trie: Trie | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return self.ids_BT.numel()

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of `EmbeddingModel.forward`, on a device."""
        given: dict[str, Any] = {"ids_BT": on_device(self.ids_BT, device)}
        if self.mask_BT is not None:
            given["mask_BT"] = on_device(self.mask_BT, device)
        if self.trie is not None:
            given["trie"] = self.trie.to(device)
        return given


@dataclass(frozen=True)
class PrefixSharing:
    """Whether texts of a model can share prefixes, or at least be packed without padding."""

    disabled_because: str | None
    """The reason why they cannot share prefixes; None if they can."""
    max_tokens: int | None = None
    """Longest text that can share or be packed, such as the sliding window; None: any."""
    packs: bool = False
    """Whether texts that do not share prefixes can be packed."""
    causal: bool = False
    """Whether a token of a packed text sees the tokens before it only."""


@dataclass(frozen=True)
class TextGroup:
    """A micro-batch before its tensors are made; fields as there."""

    rows: list[int]
    computed_tokens: int
    longest_side: int
    """Tokens of the longest sequence; a trie and packed texts are one sequence."""
    make: Callable[[], MicroBatch]


@dataclass(frozen=True)
class Plan:
    """How a batch of N texts is computed, by one or several processes."""

    groups: list[TextGroup]
    row_of: list[int]
    """For each of the N texts, its row among the unique ones; texts with equal ids share a row."""
    layout: str
    reason: str
    """Why this layout: trie, packed or padded."""
    logical_tokens: int
    """Tokens of the N texts, repeats counted."""
    longest_text: int
    """Tokens of the longest text."""
    token_budget: int
    """Most tokens of a micro-batch."""
    shares: list[list[int]]
    """For each process, the positions of its groups; processes have about equally many tokens."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]:
        """The micro-batches of all groups, each made on access: a large batch never has all its tensors in memory."""
        return _LazyMicroBatches(self.groups)

    @property
    def rounds(self) -> int:
        """Micro-batches of every process; one with fewer groups gets dummies."""
        return max(map(len, self.shares))

    def share(self, process: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of a process, equally many for all, as collective operations need."""
        mine = [self.groups[position] for position in self.shares[process]]
        return _LazyMicroBatches(mine + [_DUMMY] * (self.rounds - len(mine)))

    @property
    def unique(self) -> int:
        """Number of rows, U."""
        return sum(len(group.rows) for group in self.groups)

    @property
    def computed_tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return _tokens(self.groups)

    @property
    def largest_share(self) -> int:
        """Most tokens of a process."""
        return max(_tokens([self.groups[position] for position in share]) for share in self.shares)


class _LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are made on each access."""

    def __init__(self, groups: list[TextGroup]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, position: Any) -> Any:
        some = self._groups[position]
        return _LazyMicroBatches(some) if isinstance(some, list) else some.make()


_ONE = torch.ones(1, 1, dtype=torch.int64)
_DUMMY = TextGroup([], 0, 0, lambda: MicroBatch([], _ONE, _ONE))
"""One token whose row is not used."""


@dataclass(frozen=True)
class EncodeStats:
    """Counts and time of one call of `encode`."""

    texts: int
    unique_texts: int
    """Texts with different ids."""
    logical_tokens: int
    """Tokens of all texts, repeats counted, without padding."""
    computed_tokens: int
    """Tokens computed by the model, with padding; shared prefixes and repeats once."""
    layout: str
    """trie, packed or padded; of several plans, that of the first."""
    reason: str
    """Why this layout."""
    seconds: float
    """With tokenization and planning."""

    @classmethod
    def of(cls, plans: Sequence[Plan], seconds: float) -> EncodeStats:
        """Sum over plans."""
        return cls(
            sum(len(plan.row_of) for plan in plans),
            sum(plan.unique for plan in plans),
            sum(plan.logical_tokens for plan in plans),
            sum(plan.computed_tokens for plan in plans),
            plans[0].layout if plans else "",
            plans[0].reason if plans else "",
            seconds,
        )

    @property
    def texts_per_second(self) -> float:
        """Texts per second, repeats counted."""
        return self.texts / self.seconds

    @property
    def computed_share(self) -> float:
        """Computed tokens per logical one; below 1 where texts share more than padding adds."""
        return self.computed_tokens / max(self.logical_tokens, 1)


def plan_micro_batches(
    ids: Sequence[Sequence[int]], token_budget: int, pad_id: int, sharing: PrefixSharing, processes: int = 1
) -> Plan:
    """Plan N texts, in micro-batches of at most `token_budget` tokens with padding (a longer text is alone).

    Texts that are too long to share or to be packed are padded beside the others. Several processes get equally many
    micro-batches, of about equally many tokens.
    """
    row_of_ids: dict[tuple[int, ...], int] = {}
    row_of = [row_of_ids.setdefault(tuple(text), len(row_of_ids)) for text in ids]
    texts = list(row_of_ids)
    padded = _Padded(texts, pad_id)
    longest = sharing.max_tokens or math.inf
    fitting = [row for row, text in enumerate(texts) if len(text) <= longest]
    shares = sharing.disabled_because is None
    layout, reason = "padded", sharing.disabled_because or ""
    grouped: Callable[[int], list[TextGroup]] = partial(padded, range(len(texts)))
    if shares or sharing.packs:
        wanted, name = ("trie", "as a trie") if shares else ("packed", "packed")
        reason += "; " if reason else ""
        if not fitting and texts:
            reason += f"every text is longer than {longest} tokens, the longest that can be {name}"
        else:
            sequences = _Tries(texts, fitting) if shares else _Packed(texts, fitting, sharing.causal)
            rest = [row for row, text in enumerate(texts) if len(text) > longest]
            nodes, tokens = (_tokens(groups) for groups in (sequences(token_budget), padded(fitting, token_budget)))
            reason += f"{nodes} tokens {name}, {tokens} padded"
            reason += f"; {len(rest)} texts longer than {longest} tokens are padded" if rest else ""
            if nodes * TOKEN_COST[wanted] < tokens:
                layout = wanted
                grouped = lambda budget: sequences(budget) + padded(rest, budget)  # noqa: E731
    groups, lengths = _balanced(grouped, token_budget, processes), [len(text) for text in ids]
    # Largest first: a lack of memory shows at once.
    groups.sort(key=lambda group: -group.longest_side)
    return Plan(
        groups, row_of, layout, reason, sum(lengths), max(lengths, default=0), token_budget, _assign(groups, processes)
    )


def _tokens(groups: Sequence[TextGroup]) -> int:
    return sum(group.computed_tokens for group in groups)


class _Tries:
    """Groups of texts that share prefixes, adjacent in sorted order."""

    def __init__(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._order = sorted(rows, key=lambda row: tuple(texts[row]))
        self._ordered = [texts[row] for row in self._order]
        self._shared = shared_prefixes(self._ordered)

    def __call__(self, token_budget: int) -> list[TextGroup]:
        starts, _ = cut([len(text) for text in self._ordered], self._shared, token_budget)
        return [self._group(first, last) for first, last in pairwise([*starts, len(self._order)])]

    def _group(self, first: int, last: int) -> TextGroup:
        # The first text of a group is computed in full, each later one without what it shares with the one before.
        nodes = len(self._ordered[first]) + sum(
            len(self._ordered[position]) - self._shared[position] for position in range(first + 1, last)
        )
        return TextGroup(self._order[first:last], nodes, nodes, partial(self._make, first, last))

    def _make(self, first: int, last: int) -> MicroBatch:
        ids_1T, trie = build_trie(self._ordered[first:last], self._shared[first:last])
        return MicroBatch(self._order[first:last], ids_1T, trie=trie)


class _Packed:
    """Groups of texts one after the other, longest first."""

    def __init__(self, texts: Sequence[Sequence[int]], rows: Sequence[int], causal: bool) -> None:
        self._texts, self._causal = texts, causal
        self._order = sorted(rows, key=lambda row: (-len(texts[row]), row))

    def __call__(self, token_budget: int) -> list[TextGroup]:
        groups: list[list[int]] = []
        tokens = 0
        for row in self._order:
            tokens += len(self._texts[row])
            if not groups or tokens > token_budget:
                groups.append([])
                tokens = len(self._texts[row])
            groups[-1].append(row)
        return [self._group(rows) for rows in groups]

    def _group(self, rows: list[int]) -> TextGroup:
        tokens = sum(len(self._texts[row]) for row in rows)
        return TextGroup(rows, tokens, tokens, partial(self._make, rows))

    def _make(self, rows: list[int]) -> MicroBatch:
        ids_1T, trie = build_trie([self._texts[row] for row in rows], causal=self._causal)
        return MicroBatch(rows, ids_1T, trie=trie)


SPLIT_SHARE, SPLIT_TOKENS = 1 / 32, 128
"""Most padding of a micro-batch, as a share of the budget or in tokens: about what a further micro-batch costs."""


class _Padded:
    """Groups of texts of similar length, longest first."""

    def __init__(self, texts: Sequence[Sequence[int]], pad_id: int) -> None:
        self._texts = texts
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[int], token_budget: int) -> list[TextGroup]:
        most_padding = max(SPLIT_TOKENS, SPLIT_SHARE * token_budget)
        groups: list[list[int]] = []
        longest = padding = 0
        for row in sorted(rows, key=lambda row: (-len(self._texts[row]), row)):
            padding += longest - len(self._texts[row])
            if not groups or (len(groups[-1]) + 1) * longest > token_budget or padding > most_padding:
                groups.append([])
                longest, padding = len(self._texts[row]), 0
            groups[-1].append(row)
        return [self._group(group) for group in groups]

    def _group(self, rows: list[int]) -> TextGroup:
        longest = len(self._texts[rows[0]])
        return TextGroup(rows, len(rows) * longest, longest, partial(self._make, rows))

    def _make(self, rows: list[int]) -> MicroBatch:
        ids_BT = np.full((len(rows), len(self._texts[rows[0]])), self._pad_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for position, row in enumerate(rows):
            ids_BT[position, : len(self._texts[row])] = self._texts[row]
            mask_BT[position, : len(self._texts[row])] = 1
        return MicroBatch(rows, torch.from_numpy(ids_BT), torch.from_numpy(mask_BT))


def _balanced(grouped: Callable[[int], list[TextGroup]], token_budget: int, processes: int) -> list[TextGroup]:
    """Return groups within the budget; for several processes, with the smallest budget that needs no further round, so
    that all groups have about equally many tokens."""
    groups = grouped(token_budget)
    if processes == 1 or not groups:
        return groups
    most = math.ceil(len(groups) / processes) * processes
    low = _tokens(groups) // most
    high = max(group.computed_tokens for group in groups)
    while low < high:
        middle = (low + high) // 2
        tried = grouped(max(middle, 1))
        if len(tried) <= most:
            groups, high = tried, middle
        else:
            low = middle + 1
    return groups


def _assign(groups: Sequence[TextGroup], processes: int) -> list[list[int]]:
    """Assign each group, largest first, to the process with the fewest tokens that has a round left."""
    rounds = math.ceil(len(groups) / processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for position in sorted(range(len(groups)), key=lambda position: -groups[position].computed_tokens):
        free = [process for process in range(processes) if len(shares[process]) < rounds]
        least = min(free, key=tokens.__getitem__)
        shares[least].append(position)
        tokens[least] += groups[position].computed_tokens
    return [sorted(share) for share in shares]
