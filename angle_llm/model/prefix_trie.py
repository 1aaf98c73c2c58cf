"""Texts in one sequence without padding: as a prefix trie, or one after the other.

In a causal model the state of a token depends on the tokens before it only. So texts share the states of a common
prefix: of the whole text if it is repeated, of the head of a prompt, of any common beginning. The model computes a trie
as one sequence: every node once, depth first, with its depth as its position. Linear layers need no change; attention
follows the trie (`attention`). In a bidirectional model nothing is shared, and the texts of a sequence follow each
other (layout `packed`). Values and gradients are those of the texts one by one, up to the order of additions.

Legend: T nodes (tokens) of a sequence, R texts; in a group of texts of similar length: U texts, Q nodes they add, L
nodes of a whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, chain
from operator import sub
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angle_llm.losses.relation import on_device
from angle_llm.model.gather import gathered

KEYS_A_NODE = 8
"""Most gathered keys per node of the token budget. A key and its value take about 6 % of the memory that a node keeps
for the backward pass (LLaMA without grouped queries), so a long prompt head of many short texts adds at most half as
much memory."""

LENGTH_STEP = 8
"""Lengths are rounded up to a multiple of this: memory-efficient attention needs aligned masks."""

Indices = NDArray[np.int64]


class TrieGroup(NamedTuple):
    """Texts of similar length, for one call of attention. Padding entries are node 0."""

    query_UQ: Tensor
    """The nodes each text adds."""
    key_UL: Tensor
    """The nodes of each whole text, from its first token."""
    shared_U: Tensor
    """Tokens each text shares with the one before it: in a causal model, query q sees keys up to shared + q."""
    length_U: Tensor
    """Tokens of each text."""


@dataclass(frozen=True)
class Trie:
    """The structure of a sequence of texts, without the ids of its nodes."""

    depth_1T: Tensor
    """Position of each node in its texts."""
    end_R: Tensor
    """The last node of each text."""
    lengths_R: Indices
    """Tokens of each text; on the host, like `shared_R`."""
    shared_R: Indices
    """Tokens that each text shares with the one before it."""
    causal: bool
    """Whether a node sees the nodes before it in its texts only, or all nodes of its text; then nothing is shared."""

    def to(self, device: torch.device) -> Trie:
        """Return the trie with its tensors on a device."""
        return replace(self, depth_1T=on_device(self.depth_1T, device), end_R=on_device(self.end_R, device))

    @cached_property
    def starts(self) -> Indices:
        """The first node that each text adds, and last the number of nodes, (R + 1,)."""
        return np.concatenate(([0], np.cumsum(self.lengths_R - self.shared_R)))

    def paths(self) -> Iterator[Indices]:
        """Yield the nodes of each text."""
        path = np.empty(0, dtype=np.int64)
        for shared, first, after in zip(self.shared_R, self.starts[:-1], self.starts[1:], strict=True):
            path = np.concatenate((path[:shared], np.arange(first, after)))
            yield path

    def subtree_ends(self) -> Indices:
        """Return for each node k the first later node that does not continue it, (T,). Nodes k .. end − 1 are the
        subtree of k, or in a packed sequence the rest of its text: query q sees key k iff k <= q < end[k]; in a
        bidirectional model iff k < end[q] and q < end[k]."""
        end_T = np.full(self.starts[-1], self.starts[-1])
        path = np.empty(0, dtype=np.int64)
        for number, following in enumerate(self.paths()):
            end_T[path[self.shared_R[number] :]] = self.starts[number]
            path = following
        return end_T

    def groups(self) -> tuple[tuple[TrieGroup, ...], Tensor]:
        """Return groups of texts for attention with gathered keys, and the position of each node in the flattened
        queries of all groups, (T,).

        The lengths of a group, and its numbers of added nodes, are between the same powers of two, so that at most four
        times the necessary scores are computed; or, if nothing is shared, in the same interval of `LENGTH_STEP`. Texts
        that add no node are in no group.
        """
        paths, added_R, shares = list(self.paths()), self.lengths_R - self.shared_R, bool(self.shared_R.any())
        adding: dict[tuple[int, int], list[int]] = {}
        for number, (length, added) in enumerate(zip(self.lengths_R.tolist(), added_R.tolist(), strict=True)):
            if added:
                bits = ((length - 1).bit_length(), (added - 1).bit_length())
                adding.setdefault(bits if shares else (-(-length // LENGTH_STEP), 0), []).append(number)
        place_T = np.empty(self.starts[-1], dtype=np.int64)
        groups = []
        queries_before = 0
        for _, numbers in sorted(adding.items()):
            length_U, shared_U = self.lengths_R[numbers], self.shared_R[numbers]
            most_added = int(added_R[numbers].max())
            query_UQ = np.zeros((len(numbers), most_added), dtype=np.int64)
            key_UL = np.zeros((len(numbers), -(-int(length_U.max()) // LENGTH_STEP) * LENGTH_STEP), dtype=np.int64)
            for u, number in enumerate(numbers):
                path, new = paths[number], paths[number][self.shared_R[number] :]
                query_UQ[u, : len(new)], key_UL[u, : len(path)] = new, path
                place_T[new] = queries_before + u * most_added + np.arange(len(new))
            queries_before += query_UQ.size
            groups.append(TrieGroup(*map(torch.from_numpy, (query_UQ, key_UL, shared_U, length_U))))
        return tuple(groups), torch.from_numpy(place_T)

    def padded_states(self, states_TD: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the states of packed texts, padded, and their masks, for pooling: (B, L, D) and (B, L), for consecutive
        texts with at most 25 % padding; then the next ones."""
        lengths, last_R = self.lengths_R.tolist(), self.starts[1:] - 1
        first = 0
        for after in range(1, len(lengths) + 1):
            if after < len(lengths) and 0.8 * lengths[first] <= lengths[after] <= lengths[first]:
                continue
            node_BL = self.starts[first:after, None] + np.arange(lengths[first])
            mask_BL = node_BL <= last_R[first:after, None]
            index_BL = np.minimum(node_BL, last_R[first:after, None])
            index_I, mask = (on_device(torch.from_numpy(one), states_TD.device) for one in (index_BL.ravel(), mask_BL))
            yield gathered(states_TD, index_I).view(*index_BL.shape, -1), mask.long()
            first = after


def shared_prefixes(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens each text shares with the one before it; 0 for the first."""
    shared = [0] * len(texts)
    for number in range(1, len(texts)):
        before, text = texts[number - 1], texts[number]
        length = min(len(before), len(text))
        while shared[number] < length and before[shared[number]] == text[shared[number]]:
            shared[number] += 1
    return shared


def cut(lengths: Sequence[int], shared: Sequence[int], most_nodes: int) -> tuple[list[int], int]:
    """Cut sorted texts into tries with the fewest nodes; return the first text of each trie, and the nodes.

    A trie has at most `most_nodes` nodes and `KEYS_A_NODE` times as many gathered keys (a longer text is alone). The
    tokens that two texts share are computed twice if a cut separates them. Dynamic programming over the first texts of
    tries, in O(N log N): a first text that no longer fits never fits again.
    """
    count = len(lengths)
    # The trie of texts first..last has the nodes they add, and those that the first one shares with the trie before.
    added = list(accumulate(map(sub, lengths, shared), initial=0))
    keys = list(accumulate(lengths, initial=0))
    least, start = [0] * (count + 1), [0] * count
    heap: list[tuple[int, int]] = []  # nodes of the best cut before a first text, without what texts add; first text
    for last in range(count):
        heappush(heap, (least[last] - added[last] + shared[last], last))
        while True:
            nodes_before, first = heap[0]
            nodes = added[last + 1] - added[first] + shared[first]
            fits = nodes <= most_nodes and keys[last + 1] - keys[first] <= KEYS_A_NODE * most_nodes
            if fits or first == last:
                break
            heappop(heap)  # nor does it fit with a later text
        least[last + 1], start[last] = nodes_before + added[last + 1], first
    starts: list[int] = []
    last = count
    while last > 0:
        last = start[last - 1]
        starts.append(last)
    return starts[::-1], least[count]


def build_trie(
    texts: Sequence[Sequence[int]], shared: Sequence[int] | None = None, *, causal: bool = True
) -> tuple[Tensor, Trie]:
    """Return ids (1, T) and structure of texts in one sequence.

    `shared`: for sorted texts, the tokens each shares with the one before it (`shared[0]` is ignored). None: nothing is
    shared.
    """
    shared = [0] * len(texts) if shared is None else [0, *shared[1:]]
    added = [text[common:] for text, common in zip(texts, shared, strict=True)]
    ids_T = np.fromiter(chain.from_iterable(added), dtype=np.int64, count=sum(map(len, added)))
    depth_T = np.concatenate([np.arange(common, len(text)) for text, common in zip(texts, shared, strict=True)])
    lengths_R, shared_R = np.array([len(text) for text in texts]), np.array(shared)
    # A text that adds no node is equal to the one before it, since texts are sorted.
    last_R = np.cumsum(lengths_R - shared_R) - 1
    ids_1T, depth_1T, end_R = (torch.from_numpy(one) for one in (ids_T[None], depth_T[None], last_R))
    return ids_1T, Trie(depth_1T, end_R, lengths_R, shared_R, causal)
