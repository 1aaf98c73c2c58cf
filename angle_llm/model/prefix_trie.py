"""Texts as a prefix trie: a token that several texts begin with is computed once, for all of them.

In a causal model the state at a token depends on the tokens before it alone. So texts that share a prefix share its
states: repeated texts are the whole-text case, the constant head of a prompt the everyday one, common beginnings the
general one. A trie goes through the model as one sequence without padding: every node once, depth first, its position its
depth. Linear layers do not see the difference; attention lets the nodes a text adds look at the nodes of that text
(`path_attention`). Values and gradients are those of the texts one by one; only the order of additions differs.

Legend: T nodes (tokens) of a trie, R texts of a micro-batch; in a group of texts of like length: U texts, Q nodes they
add to the trie, L nodes of a whole text; H heads, K key-value heads, G = H / K, S dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEYS_A_NODE = 8
"""Most keys gathered for a node of the token budget. By their elements a key and its
value take some 6 % of what a node keeps for the backward pass (LLaMA without grouped queries), so
sharing a long prompt head among many short texts costs at most half as much memory again."""

MOST_TEXTS = 2048
"""Most texts of a trie: bounds the time to find where to cut."""

LENGTH_STEP = 8
"""Lengths are rounded up to this in attention: memory-efficient kernels want rows of masks aligned."""


class TrieGroup(NamedTuple):
    """Texts of like length, for one call of attention. Padding entries point at node 0."""

    query_UQ: Tensor
    """The nodes each text adds."""
    key_UL: Tensor
    """The nodes of each whole text, from its first token."""
    shared_U: Tensor
    """Tokens each text shares with the one before it: query q of a text sees its keys up to shared + q."""


class Trie(NamedTuple):
    """What a model needs beside the ids of the nodes."""

    depth_1T: Tensor
    """Position of each node in its texts."""
    end_R: Tensor
    """The node each text ends at."""
    groups: tuple[TrieGroup, ...]
    place_T: Tensor
    """Where each node stands among the queries of all groups, flattened."""

    def to(self, device: torch.device) -> Trie:
        """The same on a device."""
        groups = tuple(TrieGroup(*(tensor.to(device, non_blocking=True) for tensor in group)) for group in self.groups)
        depth, end, place = (
            tensor.to(device, non_blocking=True) for tensor in (self.depth_1T, self.end_R, self.place_T)
        )
        return Trie(depth, end, groups, place)


def shared_prefixes(texts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens each text shares with the one before it; 0 for the first."""
    shared = [0] * len(texts)
    for number in range(1, len(texts)):
        before, text = texts[number - 1], texts[number]
        length = min(len(before), len(text))
        while shared[number] < length and before[shared[number]] == text[shared[number]]:
            shared[number] += 1
    return shared


def cut(lengths: Sequence[int], shared: Sequence[int], most_nodes: int) -> tuple[list[int], int]:
    """Where to cut the sorted texts into tries, so that the fewest nodes are computed: the first text of every trie, and the
    nodes. A trie has at most `most_nodes` nodes and `KEYS_A_NODE` times as many gathered keys (a longer text goes alone).

    A cut computes again what its neighbours shared. Found by dynamic programming over the first texts of tries.
    """
    count = len(lengths)
    lengths_N, shared_N = np.asarray(lengths, dtype=np.int64), np.asarray(shared, dtype=np.int64)
    # A trie of the texts first..last has the nodes they add, and those that the first one shares with the trie before.
    added_N1 = np.concatenate(([0], np.cumsum(lengths_N - shared_N)))
    keys_N1 = np.concatenate(([0], np.cumsum(lengths_N)))
    least_N1 = np.zeros(count + 1, dtype=np.int64)
    start_N = np.zeros(count, dtype=np.int64)
    earliest = 0
    for last in range(count):
        while earliest < last and (
            added_N1[last + 1] - added_N1[earliest] > most_nodes
            or keys_N1[last + 1] - keys_N1[earliest] > KEYS_A_NODE * most_nodes
            or last - earliest >= MOST_TEXTS
        ):
            earliest += 1
        first = np.arange(earliest, last + 1)
        nodes = added_N1[last + 1] - added_N1[first] + shared_N[first]
        fits = nodes <= most_nodes
        fits[-1] = True
        total = np.where(fits, least_N1[first] + nodes, np.iinfo(np.int64).max)
        best = int(total.argmin())
        least_N1[last + 1], start_N[last] = total[best], first[best]
    starts: list[int] = []
    last = count
    while last > 0:
        last = int(start_N[last - 1])
        starts.append(last)
    return starts[::-1], int(least_N1[count])


def build_trie(texts: Sequence[Sequence[int]], shared: Sequence[int]) -> tuple[Tensor, Trie]:
    """Ids (1, T) and trie of sorted texts, each of which shares so much with the one before; `shared[0]` is not looked at."""
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
    """Puts texts side by side whose lengths, and whose numbers of added nodes, lie between the same powers of two: so no more
    than four times the scores are computed that are needed. Texts that add no node ask nothing."""
    asking: dict[tuple[int, int], list[int]] = {}
    for number, path in enumerate(paths):
        added = len(path) - shared[number]
        if added:
            asking.setdefault(((len(path) - 1).bit_length(), (added - 1).bit_length()), []).append(number)
    place_T = np.empty(first_node[-1], dtype=np.int64)
    groups = []
    queries_before = 0
    for _, numbers in sorted(asking.items()):
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
