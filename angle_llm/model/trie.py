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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ATTENTION_NAME = "angle_llm_trie"
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


_HARMLESS = {"sliding_window", "is_causal", "position_ids", "use_cache"}
"""Arguments of attention that say nothing to a trie: windows are wider than its texts, its positions are in the states."""


class _TrieInForce:
    """A trie while it goes through the layers, with the masks they all use."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self._masks: dict[tuple[int, int], Tensor] = {}

    def mask(self, number: int, repeats: int, dtype: torch.dtype) -> Tensor:
        """What attention adds to the scores of a group, (U, 1, repeats × Q, L): 0 where a query sees a key, else -inf."""
        if (number, repeats) not in self._masks:
            group = self.trie.groups[number]
            device = group.key_UL.device
            query_Q, key_L = (
                torch.arange(indices.shape[1], device=device) for indices in (group.query_UQ, group.key_UL)
            )
            hidden_UQL = key_L > (group.shared_U[:, None] + query_Q)[:, :, None]
            mask_UQL = torch.zeros(hidden_UQL.shape, dtype=dtype, device=device).masked_fill_(hidden_UQL, -torch.inf)
            self._masks[number, repeats] = mask_UQL.repeat(1, repeats, 1).unsqueeze(1)
        return self._masks[number, repeats]


def path_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trie_in_force: _TrieInForce,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a trie: the nodes a text adds look at the nodes of that text.

    Takes query (1, H, T, S), key and value (1, K, T, S) and gives (1, T, H, S), as `transformers` wants it. A group's keys
    and values are gathered for each of its texts; the scores of one text are all that is computed.

    Raises:
        ValueError: for a kind of attention that needs more than this.
    """
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)} cannot be computed on a trie")
    heads, kv_heads = query.shape[1], key.shape[1]
    repeats = heads // kv_heads
    query_TD, key_TD, value_TD = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    answers = []
    for number, group in enumerate(trie_in_force.trie.groups):
        (texts, asked), length = group.query_UQ.shape, group.key_UL.shape[1]
        # Heads that share keys stand below one another, as more queries: keys need no copies.
        query_UKQS = (
            query_TD.index_select(0, group.query_UQ.flatten())
            .view(texts, asked, kv_heads, repeats, -1)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        key_UKLS, value_UKLS = (
            _gathered(states, group.key_UL.flatten()).view(texts, length, kv_heads, -1).transpose(1, 2)
            for states in (key_TD, value_TD)
        )
        mask = trie_in_force.mask(number, repeats, query.dtype)
        if softcap is None:
            answer_UKQS = nn.functional.scaled_dot_product_attention(
                query_UKQS, key_UKLS, value_UKLS, attn_mask=mask, dropout_p=dropout, scale=scaling
            )
        else:
            answer_UKQS = _softcapped(query_UKQS, key_UKLS, value_UKLS, mask, dropout, scaling, softcap)
        answer_UQKGS = answer_UKQS.view(texts, kv_heads, repeats, asked, -1).permute(0, 3, 1, 2, 4)
        answers.append(answer_UQKGS.reshape(texts * asked, -1))
    answer_TD = torch.cat(answers).index_select(0, trie_in_force.trie.place_T)
    return answer_TD.view(1, len(answer_TD), heads, -1), None


class _Gather(torch.autograd.Function):
    """states_TD[index_I]. A node that many texts share gets a gradient of each. They are added up in float32 and rounded once,
    in the same order on every run: as torch was seen to do on a CPU by itself. Elsewhere it promises neither."""

    @staticmethod
    def forward(ctx: Any, states_TD: Tensor, index_I: Tensor) -> Tensor:
        ctx.save_for_backward(index_I)
        ctx.nodes = len(states_TD)
        return states_TD.index_select(0, index_I)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ID: Tensor) -> tuple[Tensor, None]:
        (index_I,) = ctx.saved_tensors
        half = gradient_ID.dtype in (torch.float16, torch.bfloat16)
        sum_TD = gradient_ID.new_zeros(
            ctx.nodes, gradient_ID.shape[1], dtype=torch.float32 if half else gradient_ID.dtype
        )
        for some in range(0, len(index_I), _GATHERED_AT_ONCE):
            index, terms = index_I[some : some + _GATHERED_AT_ONCE], gradient_ID[some : some + _GATHERED_AT_ONCE]
            if sum_TD.device.type == "cpu":
                sum_TD.index_add_(0, index, terms.to(sum_TD.dtype))
            else:  # index_add_ would let threads race; this sorts
                sum_TD.index_put_((index,), terms.to(sum_TD.dtype), accumulate=True)
        return sum_TD.to(gradient_ID.dtype), None


_GATHERED_AT_ONCE = 8192
"""Rows that are made float32 at a time."""


def _gathered(states_TD: Tensor, index_I: Tensor) -> Tensor:
    rows_ID: Tensor = _Gather.apply(states_TD, index_I)  # type: ignore[no-untyped-call]
    return rows_ID


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores are bent to stay within ±softcap (Gemma 2); no fused kernel does that."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = (torch.tanh(scores / softcap) * softcap + mask).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def trie_states(backbone: nn.Module, ids_1T: Tensor, trie: Trie) -> Tensor:
    """Last hidden states (1, T, D) of the nodes.

    Raises:
        RuntimeError: under activation checkpointing, which would compute the layers again with another attention.
    """
    if backbone.training and any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules()):
        raise RuntimeError(
            "texts that share prefixes cannot be trained with activation checkpointing. Call "
            "activation_checkpointing_disable() on the backbone; a smaller graph_tokens saves the same memory."
        )
    with _attention_by_path(backbone):
        states_1TD: Tensor = backbone(
            input_ids=ids_1T,
            # Four dimensions mean "made already": no mask of T × T elements is made, and nobody looks at this one.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids_1T.device),
            position_ids=trie.depth_1T,
            use_cache=False,
            trie_in_force=_TrieInForce(trie),
        ).last_hidden_state
    return states_1TD


@contextmanager
def _attention_by_path(backbone: Any) -> Iterator[None]:
    """Not safe beside another call of the same backbone: `EmbeddingModel` holds a lock."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, path_attention)
    config = backbone.config.get_text_config()
    usual = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
