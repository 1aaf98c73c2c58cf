"""Attention of texts in one sequence (`prefix_trie`): one function in the interface of `transformers`, three kernels.

gathered  Keys and values are gathered for each text of a group of similar lengths, and scores computed within texts.
          For every device, dtype and dropout; fastest on a CPU.
flex      FlexAttention (arXiv 2412.05496): one compiled call per layer without gathers. Key k is visible from query q
          iff k <= q < end[k], so one vector defines the mask and its blocks. For CUDA. With attention dropout, in
          float64, or where FlexAttention cannot be compiled, keys are gathered. On a CPU forward only, and not fused.
varlen    Packed flash attention with a variable number of keys per text. The nodes that a text adds are contiguous, so
          queries need no gather; keys and values are gathered where texts share them. CUDA, half precision, no dropout;
          its gradients can differ in the last bit between runs.

Legend: T nodes (tokens) of a sequence; in a group of texts of similar length: U texts, Q nodes they add, L nodes of a
whole text; H heads, K key-value heads, G = H / K, S dimensions of a head; I gathered rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from angle_llm.losses.relation import on_device
from angle_llm.model.activation_checkpointing import attention_set, uses_other_checkpointing
from angle_llm.model.flex import BLOCK, block_mask, compiled_flex, flex_call, flex_problem
from angle_llm.model.gather import gathered
from angle_llm.model.lora import without_adapter
from angle_llm.model.prefix_trie import Trie, TrieGroup

ATTENTION_NAME = "angle_llm_trie"
KERNELS = ("gathered", "flex", "varlen")
_UNUSED = {"sliding_window", "is_causal", "position_ids", "use_cache", "deterministic", "output_hidden_states"}
"""Arguments of attention without effect here: windows are wider than the texts, and states contain positions."""


class _TrieContext:
    """The structure of a forward pass, with the masks and indices that all layers share."""

    def __init__(self, trie: Trie, device: torch.device, kernel: str | None) -> None:
        if kernel is not None and kernel not in KERNELS:
            raise ValueError(f"expected an attention kernel among {', '.join(KERNELS)}, got {kernel!r}.")
        self.trie, self.device = trie, device
        self.kernel = kernel or ("flex" if device.type == "cuda" else "gathered")
        self._fixed = kernel is not None
        nodes = int(trie.starts[-1])
        # A single block would be a compilation of its own.
        self.tokens = max(2, -(-nodes // BLOCK)) * BLOCK if self.kernel == "flex" else nodes
        self._cache: dict[Any, Any] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, softcap: float | None
    ) -> Tensor:
        """Return attention (1, T, H, S) of query (1, H, T, S), key and value (1, K, T, S)."""
        if self.kernel == "varlen":
            if dropout or softcap is not None:
                raise ValueError("attention kernel 'varlen' has no dropout and no softcap; use 'gathered' or 'flex'.")
            return self._varlen(query, key, value, scaling)
        if (
            self.kernel == "gathered"
            or dropout
            or (query.is_cuda and not self._flex_runs(query, key, scaling, softcap))
        ):
            return self._gathered(query, key, value, scaling, dropout, softcap)
        return self._flex(query, key, value, scaling, softcap)

    def _flex_runs(self, query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> bool:
        shape = query.shape[1], key.shape[1], query.shape[-1]
        problem = flex_problem(*shape, query.dtype, softcap, scaling, self.device, query.requires_grad)
        if problem and self._fixed:
            raise RuntimeError(
                f"FlexAttention does not run on {self.device}: {problem}. Use attention_kernel 'gathered', or None."
            )
        return problem is None

    def _once(self, what: object, make: Callable[[], Any]) -> Any:
        """Return a value that the first layer computes and all layers use."""
        if what not in self._cache:
            self._cache[what] = make()
        return self._cache[what]

    def _on_device(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(torch.as_tensor(numbers, dtype=dtype), self.device)

    # gathered

    def _groups(self) -> tuple[list[tuple[TrieGroup, bool]], Tensor]:
        """Return the groups on the device, each with whether its scores need a mask, and the places of all nodes."""
        groups, place_T = self.trie.groups()
        place_T = nn.functional.pad(place_T, (0, self.tokens - len(place_T)))
        masked = [self.trie.causal or int(group.length_U.min()) < group.key_UL.shape[1] for group in groups]
        groups_here = [TrieGroup(*map(self._on_device, group)) for group in groups]
        return list(zip(groups_here, masked, strict=True)), self._on_device(place_T)

    def mask(self, group: TrieGroup, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of a group's scores, (U, 1, repeats × Q, L): 0 for visible keys, else -inf. Without
        order all queries see the same keys: (U, 1, 1, L)."""
        added, length = group.query_UQ.shape[1], group.key_UL.shape[1]
        query_Q, key_L = (torch.arange(count, device=self.device) for count in (added, length))
        if self.trie.causal:
            hidden_UQL = key_L > (group.shared_U[:, None] + query_Q.repeat(repeats))[:, :, None]
        else:
            hidden_UQL = key_L >= group.length_U[:, None, None]
        mask_UQL = torch.zeros(hidden_UQL.shape, dtype=dtype, device=self.device).masked_fill_(hidden_UQL, -torch.inf)
        return mask_UQL.unsqueeze(1)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, softcap: float | None
    ) -> Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        repeats = heads // kv_heads
        query_TD, key_TD, value_TD = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
        groups, place_T = self._once("groups", self._groups)
        outputs = []
        for number, (group, masked) in enumerate(groups):
            (texts, added), length = group.query_UQ.shape, group.key_UL.shape[1]
            # Heads that share keys become more queries, so keys need no copies.
            query_UKQS = (
                query_TD.index_select(0, group.query_UQ.flatten())
                .view(texts, added, kv_heads, repeats, -1)
                .permute(0, 2, 3, 1, 4)
                .flatten(2, 3)
            )
            key_UKLS, value_UKLS = (
                gathered(states, group.key_UL.flatten()).view(texts, length, kv_heads, -1).transpose(1, 2)
                for states in (key_TD, value_TD)
            )
            make = partial(self.mask, group, repeats, query.dtype)
            mask: Tensor | None = self._once((number, repeats, query.dtype), make) if masked else None
            if softcap is None:
                output_UKQS = nn.functional.scaled_dot_product_attention(
                    query_UKQS, key_UKLS, value_UKLS, attn_mask=mask, dropout_p=dropout, scale=scaling
                )
            else:
                output_UKQS = _softcapped(query_UKQS, key_UKLS, value_UKLS, mask, dropout, scaling, softcap)
            output_UQKGS = output_UKQS.view(texts, kv_heads, repeats, added, -1).permute(0, 3, 1, 2, 4)
            outputs.append(output_UQKGS.reshape(texts * added, -1))
        output_TD = torch.cat(outputs).index_select(0, place_T)
        return output_TD.view(1, len(output_TD), heads, -1)

    # flex

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
        shared_heads = query.shape[1] != key.shape[1]
        if query.is_meta:  # for counting memory: a fused kernel without a mask saves the same tensors
            attended = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=shared_heads)
            return attended.transpose(1, 2)
        mask = self._once("blocks", lambda: block_mask(self.trie, self.tokens, self.device))
        cap = None if softcap is None else self._once("softcap", lambda: torch.tensor(softcap, device=self.device))
        attend = compiled_flex() if query.is_cuda else flex_call
        output: Tensor = attend(query, key, value, mask, cap, scaling, shared_heads)
        return output.transpose(1, 2)

    # varlen

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        queries, keys, index_I = self._once("sequences", self._sequences)
        query_THS, key_TKS, value_TKS = (states[0].transpose(0, 1) for states in (query, key, value))
        if index_I is not None:  # both at once: the gradient sorts the indices
            both_IKS = gathered(torch.cat((key_TKS, value_TKS), dim=-1).flatten(1), index_I)
            key_TKS, value_TKS = both_IKS.view(-1, key.shape[1], 2 * key.shape[-1]).chunk(2, dim=-1)
        output: Any = varlen_attn(
            query_THS.contiguous(),
            key_TKS.contiguous(),
            value_TKS.contiguous(),
            self._once("first queries", lambda: self._on_device(starts(queries), torch.int32)),
            self._once("first keys", lambda: self._on_device(starts(keys), torch.int32)),
            int(queries.max()),
            int(keys.max()),
            scale=scaling,
            # Query q of Q sees keys up to q + L − Q, which is shared + q.
            window_size=(-1, 0) if self.trie.causal else (-1, -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.unsqueeze(0)  # type: ignore[no-any-return]

    def _sequences(self) -> tuple[Any, Any, Tensor | None]:
        """Return the queries and keys of each text that adds a node, and the gathered keys if any are shared."""
        queries = self.trie.lengths_R - self.trie.shared_R
        adding = queries > 0
        index_I = None
        if self.trie.shared_R.any():
            paths = [path for path, adds in zip(self.trie.paths(), adding, strict=True) if adds]
            index_I = self._on_device(np.concatenate(paths))
        return queries[adding], self.trie.lengths_R[adding], index_I


def starts(lengths: Any) -> Any:
    """Return where each of some contiguous sequences starts, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(lengths)))


def trie_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trie_context: _TrieContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention of a sequence of texts in the interface of `transformers`; see `_TrieContext.attend`.

    Raises:
        ValueError: for arguments of a kind of attention that is not supported.
    """
    if unknown := sorted(name for name, value in others.items() if name not in _UNUSED and value is not None):
        raise ValueError(f"attention with {', '.join(unknown)} cannot be computed on a trie")
    return trie_context.attend(query, key, value, scaling, dropout, softcap), None


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Return attention with scores squashed to ±softcap (Gemma 2), which no fused kernel computes."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.tanh(scores / softcap) * softcap
    weights = (scores if mask is None else scores + mask).softmax(dim=-1, dtype=wide).to(query.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def trie_output(
    backbone: nn.Module, ids_1T: Tensor, trie: Trie, kernel: str | None = None, *, all_states: bool = False
) -> Any:
    """Return the output of a backbone for texts in one sequence; states (1, T, D), or longer with `flex`.

    A `kernel` of None is flex on CUDA, gathered elsewhere. `all_states`: also return the states of each layer. Not
    thread-safe: `EmbeddingModel` holds a lock.

    Raises:
        RuntimeError: under the activation checkpointing of transformers, which would compute the layers again with the
            usual attention.
    """
    if backbone.training and uses_other_checkpointing(backbone):
        raise RuntimeError(
            "prefix sharing does not work with the activation checkpointing of transformers. Call "
            "activation_checkpointing_disable() on the backbone (gradient_checkpointing_disable() in older versions), and "
            "checkpoint_activations(True) on the EmbeddingModel (setting: activation_checkpointing)."
        )
    from transformers import AttentionInterface

    context = _TrieContext(trie, ids_1T.device, kernel)
    options = ({"use_cache": False} if trie.causal else {}) | ({"output_hidden_states": True} if all_states else {})
    fill = (0, context.tokens - ids_1T.shape[1])
    position_1T = trie.depth_1T + _first_position(backbone)
    AttentionInterface.register(ATTENTION_NAME, trie_attention)
    with attention_set(backbone, ATTENTION_NAME):
        return backbone(
            input_ids=nn.functional.pad(ids_1T, fill),
            # With four dimensions a mask counts as prepared: no mask of T × T elements is made. This one is not used.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids_1T.device),
            position_ids=nn.functional.pad(position_1T, fill, value=_first_position(backbone)),
            trie_context=context,
            **options,
        )


def _first_position(backbone: Any) -> int:
    """Return the position of the first token: 0, or in models like RoBERTa the one after the padding index."""
    embeddings: Any = getattr(without_adapter(backbone), "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0
