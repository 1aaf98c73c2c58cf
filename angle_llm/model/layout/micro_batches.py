"""Split a batch of texts into micro-batches (`plan_micro_batches`), so that the model computes few tokens.

Texts with equal token ids are computed once. Three layouts of a micro-batch give the same embeddings:

trie     common prefixes of texts are computed once (see `token_sequence`); for causal models with last-token pooling.
packed   texts are concatenated into one sequence; for other models.
padded   texts of similar length are padded on the right; for every model.

`plan_micro_batches` chooses the layout with the lower cost.

Legend: B texts of a padded micro-batch, T tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from angle_llm.device import on_device
from angle_llm.model.layout.flex import with_mask
from angle_llm.model.layout.token_sequence import TokenSequence, build_sequence, cut, shared_prefixes

TOKEN_COST = {"trie": 1.1, "packed": 1.0}
"""Layout → time per computed token, relative to the layout `padded`, measured on a CPU (docs/LOG.md).

The values are constants, so that runs choose equal layouts.
"""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of the texts that the model computes in one forward pass: padded with a mask, or in one sequence."""

    rows: list[int]
    """Indices of the texts among the unique texts of the batch, in the order of the model output."""
    ids_BT: Tensor
    """Token ids: (B, T), padded on the right, or (1, T) for texts in one sequence."""
    mask_BT: Tensor | None = None
    """Mask of padded texts, 1 at real tokens and 0 at padding; None for texts in one sequence."""
    sequence: TokenSequence | None = None
    """Positions of the texts in one sequence; None for padded texts."""

    @property
    def longest_text(self) -> int:
        """Number of tokens of the longest text, padding included."""
        return self.ids_BT.shape[1] if self.sequence is None else int(self.sequence.depth_1T.max()) + 1

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of `EmbeddingModel.forward` for this micro-batch, on a device."""
        return {
            "ids_BT": on_device(self.ids_BT, device),
            "mask_BT": None if self.mask_BT is None else on_device(self.mask_BT, device),
            "sequence": self.sequence and self.sequence.to(device),
        }


@dataclass(frozen=True)
class LayoutSupport:
    """Layout of micro-batches that a model supports (prefix trie, packed or padded), and its limits.

    A layout is how the texts of a micro-batch become the input of a model. Packed texts are concatenated.
    """

    layout: Literal["trie", "packed", "padded"]
    """Possible layout with the fewest tokens. A `trie` has fewer tokens than `packed`; every model can compute `padded`."""
    reason: str = ""
    """Reason why the layout is not `trie`; "" for `trie`."""
    max_tokens: int | None = None
    """Maximum number of tokens of a text in layout `trie` or `packed`, such as the sliding window. None: no limit.

    Longer texts are padded.
    """
    causal: bool = True
    """Whether the tokens of a packed text attend only to earlier tokens of the text."""
    uses_flex: bool = field(default=False, repr=False, compare=False)
    """Whether texts in one sequence are computed by FlexAttention."""
    requested: bool = False
    """Whether the settings choose the layout, which is then `padded`."""


@dataclass(frozen=True)
class TextGroup:
    """The texts of a planned micro-batch, whose tensors are created later by `make`."""

    rows: list[int]
    """Indices of the texts among the unique texts of the batch."""
    computed_tokens: int
    """Number of tokens that the model computes in this micro-batch, padding included."""
    longest_side: int
    """Number of tokens T in a row of `ids_BT`; a prefix trie or packed texts are a single row."""
    make: Callable[[], MicroBatch]
    """Function that creates the tensors and returns the micro-batch."""


@dataclass(frozen=True)
class Plan:
    """The split of a batch of N texts into micro-batches, and the distribution of the micro-batches over processes."""

    groups: list[TextGroup]
    """All planned micro-batches, without tensors; the micro-batch with the longest rows is first."""
    row_of: list[int]
    """Index among the unique texts, for each of the N texts; texts with equal token ids have the same index."""
    layout: str
    """Layout of the batch: `trie`, `packed` or `padded`; with `trie` and `packed`, texts that are too long are padded."""
    reason: str
    """Reason for the choice of the layout."""
    lengths: list[int]
    """Number of tokens of each of the N texts, padding excluded."""
    token_budget: int
    """Maximum number of tokens in a micro-batch, padding included; a single longer text is allowed."""
    shares: list[list[int]]
    """Indices in `groups` of the micro-batches that each process computes; processes have about equally many tokens."""

    def share(self, process: int) -> list[TextGroup]:
        """Return the planned micro-batches that a process computes, filled up with dummy micro-batches of one token.

        All processes get the same number of micro-batches, because collective operations need this.
        """
        groups = [self.groups[position] for position in self.shares[process]]
        rounds = max(map(len, self.shares))
        return groups + [_DUMMY] * (rounds - len(groups))

    def prepared(self, process: int) -> Plan:
        """Return the plan with the tensors of a process made, so that they are not made again at every access."""
        groups = list(self.groups)
        for position in self.shares[process]:
            groups[position] = replace(groups[position], make=cache(groups[position].make))
            groups[position].make()
        return replace(self, groups=groups)

    @property
    def logical_tokens(self) -> int:
        """Number of tokens of the N texts, repeated texts included, padding excluded."""
        return sum(self.lengths)

    @property
    def longest_text(self) -> int:
        """Number of tokens of the longest text."""
        return max(self.lengths, default=0)

    @property
    def unique(self) -> int:
        """Number of unique texts in the batch; texts with equal token ids count once."""
        return sum(len(group.rows) for group in self.groups)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that the model computes for the batch, over all processes, padding included."""
        return _tokens(self.groups)

    @property
    def largest_share(self) -> int:
        """Number of tokens that the process with the most tokens computes for the batch."""
        return max(_tokens([self.groups[position] for position in share]) for share in self.shares)


_ONE = torch.ones(1, 1, dtype=torch.int64)
_DUMMY = TextGroup([], 0, 0, lambda: MicroBatch([], _ONE, _ONE))
"""Dummy micro-batch of one token, whose output is not used; it makes the numbers of micro-batches of processes equal."""


@dataclass(frozen=True)
class EncodeStats:
    """Numbers of texts and tokens, and duration of a call of `SentenceEncoder.encode`."""

    texts: int
    """Number of texts, repeated texts included."""
    unique_texts: int
    """Number of texts with different token ids."""
    lengths: list[int]
    """Number of tokens of each text, prompt and special tokens included, without padding."""
    computed_tokens: int
    """Number of tokens that the model computed, padding included; shared prefixes and repeated texts count once."""
    seconds: float
    """Duration of the call in seconds, tokenization and planning included."""

    @classmethod
    def of(cls, plans: Sequence[Plan], seconds: float) -> EncodeStats:
        """Return the statistics of a call that encoded the batches `plans` in `seconds`; numbers are summed over batches."""
        return cls(
            texts=sum(len(plan.row_of) for plan in plans),
            unique_texts=sum(plan.unique for plan in plans),
            lengths=[length for plan in plans for length in plan.lengths],
            computed_tokens=sum(plan.computed_tokens for plan in plans),
            seconds=seconds,
        )

    @property
    def logical_tokens(self) -> int:
        """Number of tokens of all texts, repeated texts included, without padding."""
        return sum(self.lengths)


def plan_micro_batches(
    ids: Sequence[Sequence[int]], token_budget: int, layouts: LayoutSupport, processes: int = 1
) -> Plan:
    """Split a batch of N texts into micro-batches, choose their layout, and distribute them over processes.

    The layout is `layouts.layout` (prefix trie or packed, that is, concatenated texts) or padded texts: the layout with the
    lower cost. Texts longer than `layouts.max_tokens` are always padded, in separate micro-batches. Processes get equally
    many micro-batches with about equally many tokens.

    Args:
        ids: token ids of the N texts.
        token_budget: maximum number of tokens in a micro-batch, padding included. A longer text is a micro-batch alone.
        layouts: the layouts that the model can compute.
        processes: number of processes.
    """
    # Distinct texts.
    row_of_ids: dict[tuple[int, ...], int] = {}
    row_of = [row_of_ids.setdefault(tuple(text), len(row_of_ids)) for text in ids]
    texts = list(row_of_ids)
    padded = partial(_padded, texts)
    limit = layouts.max_tokens or math.inf
    fitting = [row for row, text in enumerate(texts) if len(text) <= limit]
    # Layout with the lower cost.
    layout, reason = "padded", layouts.reason
    split: Callable[[int], list[TextGroup]] = partial(padded, range(len(texts)))
    if layouts.layout != "padded":
        is_trie = layouts.layout == "trie"
        make = partial(_in_one_sequence, layouts=layouts)
        layout_class = _Tries if is_trie else _Packed
        sequences = cache(layout_class(texts, fitting, make))  # `_balanced` repeats the call with `token_budget`
        too_long = [row for row, text in enumerate(texts) if len(text) > limit]
        nodes = _tokens(sequences(token_budget))
        tokens = _tokens(padded(fitting, token_budget))
        reason = f"{reason}; " if reason else ""
        reason += f"{nodes} tokens {'as a trie' if is_trie else 'packed'}, {tokens} padded"
        reason += f"; {len(too_long)} texts longer than {limit} tokens are padded" if too_long else ""
        if nodes * TOKEN_COST[layouts.layout] < tokens:
            layout = layouts.layout

            def split_both(budget: int) -> list[TextGroup]:
                return [*sequences(budget), *padded(too_long, budget)]

            split = split_both
    # Balanced micro-batches: longest first, so that a lack of memory shows at once; then the rank of each.
    groups = _balanced(split, token_budget, processes)
    groups.sort(key=lambda group: -group.longest_side)
    shares = _assign(groups, processes)
    return Plan(groups, row_of, layout, reason, list(map(len, ids)), token_budget, shares)


def _tokens(groups: Sequence[TextGroup]) -> int:
    """Return the number of tokens that the model computes in planned micro-batches, padding included."""
    return sum(group.computed_tokens for group in groups)


def _in_one_sequence(
    texts: Sequence[Sequence[int]], rows: list[int], shared: Sequence[int] | None = None, *, layouts: LayoutSupport
) -> TextGroup:
    """Return the planned micro-batch of texts in one sequence, with the indices `rows` among the unique texts.

    `texts` and `shared` are arguments of `build_sequence`.
    """
    # The first text is computed in full, later texts without the tokens shared with the text before.
    tokens = sum(map(len, texts)) - sum(shared[1:] if shared else ())

    def make() -> MicroBatch:
        ids_1T, sequence = build_sequence(texts, shared, causal=layouts.causal)
        return MicroBatch(rows, ids_1T, sequence=with_mask(sequence) if layouts.uses_flex else sequence)

    return TextGroup(rows, tokens, tokens, make)


class _Tries:
    """Splits texts into micro-batches with the layout `trie`: texts that are adjacent in sorted order share prefixes."""

    def __init__(self, texts: Sequence[Sequence[int]], rows: Sequence[int], make: Callable[..., TextGroup]) -> None:
        self._make = make
        self._order = sorted(rows, key=lambda row: tuple(texts[row]))
        self._ordered = [texts[row] for row in self._order]
        self._shared = shared_prefixes(self._ordered)

    def __call__(self, token_budget: int) -> list[TextGroup]:
        starts = cut([len(text) for text in self._ordered], self._shared, token_budget)
        parts = [slice(first, last) for first, last in pairwise([*starts, len(self._order)])]
        return [self._make(self._ordered[part], self._order[part], self._shared[part]) for part in parts]


class _Packed:
    """Splits texts into micro-batches with the layout `packed` (texts concatenated), longest text first."""

    def __init__(self, texts: Sequence[Sequence[int]], rows: Sequence[int], make: Callable[..., TextGroup]) -> None:
        self._texts, self._make = texts, make
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
        return [self._make([self._texts[row] for row in rows], rows) for rows in groups]


SPLIT_SHARE, SPLIT_TOKENS = 1 / 32, 128
"""Maximum padding in a micro-batch: the larger of a fraction of the token budget and a number of tokens.

This is about the cost of another micro-batch.
"""


def _padded(texts: Sequence[Sequence[int]], rows: Sequence[int], token_budget: int) -> list[TextGroup]:
    """Split the texts with the indices `rows` into padded micro-batches of similar length, longest text first."""
    max_padding = max(SPLIT_TOKENS, SPLIT_SHARE * token_budget)
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(rows, key=lambda row: (-len(texts[row]), row)):
        padding += longest - len(texts[row])
        if not groups or (len(groups[-1]) + 1) * longest > token_budget or padding > max_padding:
            groups.append([])
            longest = len(texts[row])
            padding = 0
        groups[-1].append(row)
    return [_padded_group(texts, group) for group in groups]


def _padded_group(texts: Sequence[Sequence[int]], rows: list[int]) -> TextGroup:
    """Return the planned micro-batch of the padded texts with the indices `rows`, longest text first.

    The token id of the padding is 0 for every model: padding is masked, or follows the last token in a causal model.
    """
    longest = len(texts[rows[0]])

    def make() -> MicroBatch:
        ids = [torch.tensor(texts[row]) for row in rows]
        ids_BT = pad_sequence(ids, batch_first=True)
        return MicroBatch(rows, ids_BT, pad_sequence(list(map(torch.ones_like, ids)), batch_first=True))

    return TextGroup(rows, len(rows) * longest, longest, make)


def _balanced(split: Callable[[int], list[TextGroup]], token_budget: int, processes: int) -> list[TextGroup]:
    """Return planned micro-batches of at most `token_budget` tokens, of about equal size for several processes.

    For equal sizes, the smallest budget is used that does not increase the number of micro-batches per process.
    `split` returns the micro-batches for a token budget.
    """
    groups = split(token_budget)
    if processes == 1 or not groups:
        return groups
    max_groups = math.ceil(len(groups) / processes) * processes
    low = _tokens(groups) // max_groups
    high = max(group.computed_tokens for group in groups)
    budget = low + bisect_left(range(low, high), True, key=lambda tokens: len(split(max(tokens, 1))) <= max_groups)
    return groups if budget == high else split(max(budget, 1))


def _assign(groups: Sequence[TextGroup], processes: int) -> list[list[int]]:
    """Distribute planned micro-batches over processes: return a list of indices in `groups` for each process.

    Every micro-batch, the largest first, goes to the process with the fewest tokens among the processes that have fewer
    than ceil(number of micro-batches / processes).
    """
    rounds = math.ceil(len(groups) / processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for position in sorted(range(len(groups)), key=lambda position: -groups[position].computed_tokens):
        open_processes = [process for process in range(processes) if len(shares[process]) < rounds]
        chosen = min(open_processes, key=tokens.__getitem__)
        shares[chosen].append(position)
        tokens[chosen] += groups[position].computed_tokens
    return [sorted(share) for share in shares]
