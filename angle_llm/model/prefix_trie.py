"""Texts as a prefix trie: tokens of a common prefix are computed once.

In a causal model the state of a token depends on the tokens before it only. So texts share the states of a common
prefix: of the whole text if it is repeated, of the head of a prompt, of any common beginning. The model computes a trie
as one sequence without padding: every node once, depth first, with its depth as its position. Linear layers need no
change; in attention, the nodes that a text adds attend to the nodes of that text (`attention`). Values and gradients
are those of the texts one by one, up to the order of additions.

Legend: T nodes (tokens) of a trie, R texts of a micro-batch; in a group of texts of similar length: U texts, Q nodes
they add to the trie, L nodes of a whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import sub
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEYS_A_NODE = 8
"""Most gathered keys per node of the token budget. A key and its value take about 6 % of the memory that a node keeps
for the backward pass (LLaMA without grouped queries), so a long prompt head of many short texts adds at most half as
much memory."""

LENGTH_STEP = 8
"""Lengths are rounded up to a multiple of this: memory-efficient attention needs aligned masks."""


class TrieGroup(NamedTuple):
    """Texts of similar length, for one call of attention. Padding entries are node 0."""

    query_UQ: Tensor
    """The nodes each text adds."""
    key_UL: Tensor
    """The nodes of each whole text, from its first token."""
    shared_U: Tensor
    """Tokens each text shares with the one before it: query q of a text sees its keys up to shared + q."""


class Trie(NamedTuple):
    """The structure of a trie, without the ids of its nodes."""

    depth_1T: Tensor
    """Position of each node in its texts."""
    end_R: Tensor
    """The last node of each text."""
    groups: tuple[TrieGroup, ...]
    place_T: Tensor
    """Position of each node in the flattened queries of all groups."""

    def to(self, device: torch.device) -> Trie:
        """Return the trie on a device."""
        groups = tuple(TrieGroup(*(tensor.to(device, non_blocking=True) for tensor in group)) for group in self.groups)
        depth, end, place = (
            tensor.to(device, non_blocking=True) for tensor in (self.depth_1T, self.end_R, self.place_T)
        )
        return Trie(depth, end, groups, place)


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


def build_trie(texts: Sequence[Sequence[int]], shared: Sequence[int]) -> tuple[Tensor, Trie]:
    """Return ids (1, T) and trie of sorted texts,
    given the tokens shared with the previous one; `shared[0]` is ignored."""
    shared = [0, *shared[1:]]
    first_node = np.concatenate(
        ([0], np.cumsum([len(text) - common for text, common in zip(texts, shared, strict=True)]))
    )
    nodes = int(first_node[-1])
    ids_T, depth_T = np.empty(nodes, dtype=np.int64), np.empty(nodes, dtype=np.int64)
    paths: list[NDArray[np.int64]] = []
    for text, common, node in zip(texts, shared, first_node, strict=False):
        ids_T[node : node + len(text) - common] = text[common:]
        depth_T[node : node + len(text) - common] = np.arange(common, len(text))
        added = np.arange(node, node + len(text) - common)
        paths.append(np.concatenate((paths[-1][:common], added)) if paths else added)
    groups, place_T = _group(paths, shared, first_node)
    end_R = np.array([path[-1] for path in paths])
    trie = Trie(torch.from_numpy(depth_T)[None], torch.from_numpy(end_R), groups, torch.from_numpy(place_T))
    return torch.from_numpy(ids_T)[None], trie


def _group(
    paths: Sequence[NDArray[np.int64]], shared: Sequence[int], first_node: NDArray[np.int64]
) -> tuple[tuple[TrieGroup, ...], NDArray[np.int64]]:
    """Group texts whose lengths, and whose numbers of added nodes, are between the same powers of two, so that at most
    four times the necessary scores are computed. Texts that add no node are in no group."""
    adding: dict[tuple[int, int], list[int]] = {}
    for number, path in enumerate(paths):
        added = len(path) - shared[number]
        if added:
            adding.setdefault(((len(path) - 1).bit_length(), (added - 1).bit_length()), []).append(number)
    place_T = np.empty(first_node[-1], dtype=np.int64)
    groups = []
    queries_before = 0
    for _, numbers in sorted(adding.items()):
        longest = -(-max(len(paths[number]) for number in numbers) // LENGTH_STEP) * LENGTH_STEP
        most_added = max(len(paths[number]) - shared[number] for number in numbers)
        query_UQ = np.zeros((len(numbers), most_added), dtype=np.int64)
        key_UL = np.zeros((len(numbers), longest), dtype=np.int64)
        for u, number in enumerate(numbers):
            path, new = paths[number], paths[number][shared[number] :]
            query_UQ[u, : len(new)], key_UL[u, : len(path)] = new, path
            place_T[new] = queries_before + u * most_added + np.arange(len(new))
        queries_before += query_UQ.size
        shared_U = np.array([shared[number] for number in numbers])
        groups.append(TrieGroup(*(torch.from_numpy(array) for array in (query_UQ, key_UL, shared_U))))
    return tuple(groups), place_T
