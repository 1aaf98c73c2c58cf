"""Put texts in one sequence without padding, as a prefix trie or packed (concatenated).

Prefix trie: in a causal model, the state of a token depends only on the tokens before it. So texts share the states of a
common prefix, such as the start of the prompt, or the whole text if it is repeated. Each *node* of the trie is a token in
its context. The model computes the nodes as one sequence, depth first, with the depth of a node as its position.

Packed: in a bidirectional model, or with a pooling that reads more than the last token, texts share no tokens and are
concatenated.

Linear layers need no change; attention is restricted to the nodes of a text (`attention`). Values and gradients equal
the values and gradients of separate texts, up to the order of additions.

Legend: T nodes (tokens) of a sequence, R texts, D dimensions, I gathered rows; in a group of texts of similar length:
U texts, Q nodes that a text adds, L nodes of a whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, chain
from operator import sub
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from angle_llm.device import on_device

KEYS_A_NODE = 8
"""Maximum number of keys that attention gathers in a prefix trie, per token of the token budget.

Keys of a common prefix are gathered once per text. A key with its value takes about 6 % of the memory that a token keeps
for the backward pass (LLaMA without grouped queries). So a long prompt before many short texts increases the memory by at
most a half.
"""

LENGTH_STEP = 8
"""Numbers of gathered keys are rounded up to a multiple of this, because memory-efficient attention needs aligned masks."""

GATHERED_ROWS = 8192
"""Maximum number of rows that the backward pass of `gather_rows` converts to float32 at a time, to save memory."""

Indices = NDArray[np.int64]
"""NumPy array of token indices or lengths."""


class SequenceGroup(NamedTuple):
    """Token indices of the queries and keys of U texts of similar length in one sequence, for one attention call.

    Texts in a prefix trie share the tokens of common prefixes. Index arrays are padded with 0.
    """

    query_UQ: Tensor
    """Indices of the tokens that each text adds after the prefix that it shares with the text before it."""
    key_UL: Tensor
    """Indices of all tokens of each text, with the shared prefix."""
    shared_U: Tensor
    """Number of tokens that each text shares with the text before it.

    In a causal model, query q of a text attends to the keys 0 .. shared + q.
    """
    length_U: Tensor
    """Number of tokens of each text, with the shared prefix."""


@dataclass(frozen=True)
class TokenSequence:
    """Positions of R texts in one sequence of T tokens without padding (prefix trie or packed), without the token ids.

    In a prefix trie, texts share the tokens of common prefixes. Packed texts are concatenated. An index of the sequence is
    called a node.
    """

    depth_1T: Tensor
    """Position of each token of the sequence in its text, from 0."""
    end_R: Tensor
    """Index in the sequence of the last token of each text."""
    lengths_R: Indices
    """Number of tokens of each text, with the shared prefix, on the CPU."""
    shared_R: Indices
    """Number of first tokens that each text shares with the text before it, on the CPU; all 0 if texts are packed."""
    causal: bool
    """Whether a token attends only to itself and earlier tokens of its text; otherwise to all tokens of its text.

    A sequence that is not causal is packed.
    """
    mask: tuple[Tensor, ...] | None = None
    """The FlexAttention mask (`flex.mask_blocks`), if it was made with the sequence; None: the kernel makes its mask."""

    def to(self, device: torch.device) -> TokenSequence:
        """Return a copy with the tensors that the model uses on a device; NumPy arrays stay on the CPU."""
        mask = self.mask and tuple(on_device(tensor, device) for tensor in self.mask)
        return replace(self, depth_1T=on_device(self.depth_1T, device), end_R=on_device(self.end_R, device), mask=mask)

    @cached_property
    def starts(self) -> Indices:
        """Index in the sequence of the first token that each text adds after its shared prefix, then T, (R + 1,)."""
        return np.concatenate(([0], np.cumsum(self.lengths_R - self.shared_R)))

    def paths(self) -> Iterator[Indices]:
        """Yield, for each text, the indices in the sequence of its tokens, from the first to the last token."""
        path = np.empty(0, dtype=np.int64)
        for shared, first, after in zip(self.shared_R, self.starts[:-1], self.starts[1:], strict=True):
            path = np.concatenate((path[:shared], np.arange(first, after)))
            yield path

    def subtree_ends(self) -> Indices:
        """Return for each token k of the sequence the end of its subtree in the prefix trie, (T,).

        The tokens k .. end[k] - 1 are all tokens whose text contains token k, from k on. In packed texts, they are the rest
        of the text. In a causal model, query q attends to key k if k <= q < end[k]. In a bidirectional model, query q
        attends to key k if k < end[q] and q < end[k].
        """
        end_T = np.full(self.starts[-1], self.starts[-1])
        path_before = np.empty(0, dtype=np.int64)
        for shared, first, path in zip(self.shared_R, self.starts[:-1], self.paths(), strict=True):
            end_T[path_before[shared:]] = first  # subtrees of tokens that the text does not share end here
            path_before = path
        return end_T

    def groups(self) -> tuple[tuple[SequenceGroup, ...], Tensor]:
        """Group texts of similar length, whose attention is computed as one padded batch; return the groups and an index.

        The index (T,) is the position of each token in the queries of all groups, group by group.

        In a prefix trie, the texts of a group have lengths between the same powers of two, and so do the numbers of added
        tokens. So at most four times the necessary scores are computed. Packed texts in a group have lengths in the same
        interval of `LENGTH_STEP`. A text that equals the text before it adds no token and is in no group.
        """
        paths = list(self.paths())
        added_R = self.lengths_R - self.shared_R
        shares = bool(self.shared_R.any())
        texts_of_size: dict[tuple[int, int], list[int]] = {}
        for number, (length, added) in enumerate(zip(self.lengths_R.tolist(), added_R.tolist(), strict=True)):
            if added:
                powers = ((length - 1).bit_length(), (added - 1).bit_length())
                size = powers if shares else (-(-length // LENGTH_STEP), 0)
                texts_of_size.setdefault(size, []).append(number)
        query_of_token_T = np.empty(self.starts[-1], dtype=np.int64)
        groups = []
        queries_before = 0
        for _, numbers in sorted(texts_of_size.items()):
            length_U, shared_U = self.lengths_R[numbers], self.shared_R[numbers]
            max_added = int(added_R[numbers].max())
            query_UQ = np.zeros((len(numbers), max_added), dtype=np.int64)
            key_UL = np.zeros((len(numbers), -(-int(length_U.max()) // LENGTH_STEP) * LENGTH_STEP), dtype=np.int64)
            for row, number in enumerate(numbers):
                path = paths[number]
                key_UL[row, : len(path)] = path
                new = path[self.shared_R[number] :]
                query_UQ[row, : len(new)] = new
                query_of_token_T[new] = queries_before + row * max_added + np.arange(len(new))
            queries_before += query_UQ.size
            groups.append(SequenceGroup(*map(torch.from_numpy, (query_UQ, key_UL, shared_U, length_U))))
        return tuple(groups), torch.from_numpy(query_of_token_T)

    def padded_states(self, states_TD: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Split the states of packed texts into padded batches for pooling: yield states (B, L, D) and masks (B, L).

        A batch contains B consecutive texts of at most L tokens. It ends before a text whose length differs too much, so
        that at most 25 % of a batch is padding.
        """
        lengths, last_R = self.lengths_R.tolist(), self.starts[1:] - 1
        first = 0
        for after in range(1, len(lengths) + 1):
            if after < len(lengths) and 0.8 * lengths[first] <= lengths[after] <= lengths[first]:
                continue
            node_BL = self.starts[first:after, None] + np.arange(lengths[first])
            mask_BL = node_BL <= last_R[first:after, None]
            index_BL = np.minimum(node_BL, last_R[first:after, None])
            index_I, mask = (
                on_device(torch.from_numpy(array), states_TD.device) for array in (index_BL.ravel(), mask_BL)
            )
            yield gather_rows(states_TD, index_I).view(*index_BL.shape, -1), mask.long()
            first = after


def shared_prefixes(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each text, the number of first tokens that are equal in the text before it; 0 for the first text."""
    shared = [0] * len(texts)
    for number in range(1, len(texts)):
        before, text = texts[number - 1], texts[number]
        length = min(len(before), len(text))
        while shared[number] < length and before[shared[number]] == text[shared[number]]:
            shared[number] += 1
    return shared


def cut(lengths: Sequence[int], shared: Sequence[int], most_nodes: int) -> list[int]:
    """Split sorted texts into prefix tries so that the total number of nodes, the computed tokens, is minimal.

    Returns the index of the first text of each trie. A trie has at most `most_nodes` nodes and `KEYS_A_NODE` times as many
    gathered keys; a longer text is a trie by itself. A common prefix of two texts is computed twice if the texts are in
    different tries. Complexity for N texts is O(N log N), by dynamic programming over the first texts of tries: if a trie
    is too large, it is also too large with later texts.

    Args:
        lengths: number of tokens of each text.
        shared: number of tokens that each text shares with the text before it.
    """
    count = len(lengths)
    # The trie of texts first..last has the nodes they add, and the nodes that text `first` shares with the trie before.
    added = list(accumulate(map(sub, lengths, shared), initial=0))
    keys = list(accumulate(lengths, initial=0))
    fewest = [0] * (count + 1)  # nodes of the best cut of the first texts, by their number
    start = [0] * count  # first text of the last trie in the best cut up to a text
    heap: list[tuple[int, int]] = []  # (nodes if the last trie starts at `first`, less added[last + 1]; first)
    for last in range(count):
        heappush(heap, (fewest[last] - added[last] + shared[last], last))
        while True:
            offset, first = heap[0]
            nodes = added[last + 1] - added[first] + shared[first]
            fits = nodes <= most_nodes and keys[last + 1] - keys[first] <= KEYS_A_NODE * most_nodes
            if fits or first == last:
                break
            heappop(heap)  # it does not fit with later texts either
        fewest[last + 1] = offset + added[last + 1]
        start[last] = first
    starts: list[int] = []
    last = count
    while last > 0:
        last = start[last - 1]
        starts.append(last)
    return starts[::-1]


def build_sequence(
    texts: Sequence[Sequence[int]], shared: Sequence[int] | None = None, *, causal: bool = True
) -> tuple[Tensor, TokenSequence]:
    """Put texts in one sequence without padding: return the token ids (1, T) and the positions of the texts.

    Args:
        texts: token ids of each text; sorted for a prefix trie.
        shared: number of tokens that each text shares with the text before it (`shared[0]` is ignored), for a prefix
            trie. None: the texts are packed.
    """
    shared = [0] * len(texts) if shared is None else [0, *shared[1:]]
    added = [text[common:] for text, common in zip(texts, shared, strict=True)]
    ids_T = np.fromiter(chain.from_iterable(added), dtype=np.int64, count=sum(map(len, added)))
    depth_T = np.concatenate([np.arange(common, len(text)) for text, common in zip(texts, shared, strict=True)])
    lengths_R, shared_R = np.array([len(text) for text in texts]), np.array(shared)
    # A text that adds no node equals the text before it, because texts are sorted. So its last node is the last node of
    # that text: the cumulative sum does not move.
    last_R = np.cumsum(lengths_R - shared_R) - 1
    ids_1T, depth_1T, end_R = map(torch.from_numpy, (ids_T[None], depth_T[None], last_R))
    return ids_1T, TokenSequence(depth_1T, end_R, lengths_R, shared_R, causal)


class _GatherRows(torch.autograd.Function):
    """Autograd function for `states_TD[index_I]` with a deterministic gradient, summed in float32 (`gather_rows`)."""

    @staticmethod
    def forward(ctx: Any, states_TD: Tensor, index_I: Tensor) -> Tensor:
        ctx.save_for_backward(index_I)
        ctx.nodes = len(states_TD)
        return states_TD.index_select(0, index_I)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ID: Tensor) -> tuple[Tensor, None]:
        (index_I,) = ctx.saved_tensors
        wide = torch.promote_types(gradient_ID.dtype, torch.float32)
        sum_TD = gradient_ID.new_zeros(ctx.nodes, gradient_ID.shape[1], dtype=wide)
        for first in range(0, len(index_I), GATHERED_ROWS):
            index = index_I[first : first + GATHERED_ROWS]
            terms = gradient_ID[first : first + GATHERED_ROWS].to(wide)
            if sum_TD.device.type == "cpu":
                sum_TD.index_add_(0, index, terms)
            else:  # index_add_ is not deterministic on a GPU; index_put_ sorts
                sum_TD.index_put_((index,), terms, accumulate=True)
        return sum_TD.to(gradient_ID.dtype), None


def gather_rows(states_TD: Tensor, index_I: Tensor) -> Tensor:
    """Return the rows `states_TD[index_I]`, (I, D), with a deterministic gradient on every device.

    The gradients of a row that is gathered several times are summed in float32 and rounded once.
    """
    rows_ID: Tensor = _GatherRows.apply(states_TD, index_I)  # type: ignore[no-untyped-call]
    return rows_ID
