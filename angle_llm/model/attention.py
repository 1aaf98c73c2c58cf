"""Attention of a prefix trie, and whether a backbone gives the same states with it as without.

Legend: T nodes (tokens) of a trie; in a group of texts of like length: U texts, Q nodes they add to the trie, L nodes
of a whole text; H heads, K key-value heads, G = H / K, S dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.model.activation_checkpointing import uses_other_checkpointing
from angle_llm.model.checks import evaluating, relative_difference
from angle_llm.model.micro_batches import PrefixSharing
from angle_llm.model.prefix_trie import Trie, build_trie, shared_prefixes

ATTENTION_NAME = "angle_llm_trie"

_UNUSED = {"sliding_window", "is_causal", "position_ids", "use_cache"}
"""Arguments of attention without effect on a trie: windows are wider than its texts, and states contain positions."""


class _TrieContext:
    """The trie of a forward pass, with the masks that all layers share."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self._masks: dict[tuple[int, int], Tensor] = {}

    def mask(self, number: int, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of a group's scores, (U, 1, repeats × Q, L): 0 for visible keys, else -inf."""
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
    trie_context: _TrieContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention of a trie in the interface of `transformers`: nodes that a text adds attend to its nodes.

    Query (1, H, T, S), key and value (1, K, T, S); returns (1, T, H, S). Keys and values are gathered for each text of
    a group; scores are computed within texts only.

    Raises:
        ValueError: for arguments of a kind of attention that is not supported.
    """
    if unknown := sorted(name for name, value in others.items() if name not in _UNUSED and value is not None):
        raise ValueError(f"attention with {', '.join(unknown)} cannot be computed on a trie")
    heads, kv_heads = query.shape[1], key.shape[1]
    repeats = heads // kv_heads
    query_TD, key_TD, value_TD = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    outputs = []
    for number, group in enumerate(trie_context.trie.groups):
        (texts, added), length = group.query_UQ.shape, group.key_UL.shape[1]
        # Heads that share keys become more queries, so keys need no copies.
        query_UKQS = (
            query_TD.index_select(0, group.query_UQ.flatten())
            .view(texts, added, kv_heads, repeats, -1)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        key_UKLS, value_UKLS = (
            _gathered(states, group.key_UL.flatten()).view(texts, length, kv_heads, -1).transpose(1, 2)
            for states in (key_TD, value_TD)
        )
        mask = trie_context.mask(number, repeats, query.dtype)
        if softcap is None:
            output_UKQS = nn.functional.scaled_dot_product_attention(
                query_UKQS, key_UKLS, value_UKLS, attn_mask=mask, dropout_p=dropout, scale=scaling
            )
        else:
            output_UKQS = _softcapped(query_UKQS, key_UKLS, value_UKLS, mask, dropout, scaling, softcap)
        output_UQKGS = output_UKQS.view(texts, kv_heads, repeats, added, -1).permute(0, 3, 1, 2, 4)
        outputs.append(output_UQKGS.reshape(texts * added, -1))
    output_TD = torch.cat(outputs).index_select(0, trie_context.trie.place_T)
    return output_TD.view(1, len(output_TD), heads, -1), None


class _Gather(torch.autograd.Function):
    """states_TD[index_I]. The gradients of a node that several texts share are summed in float32 and rounded once, in
    the same order on every run; torch's own indexing does so on a CPU only."""

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
        for some in range(0, len(index_I), _BLOCK_ROWS):
            index, terms = index_I[some : some + _BLOCK_ROWS], gradient_ID[some : some + _BLOCK_ROWS].to(wide)
            if sum_TD.device.type == "cpu":
                sum_TD.index_add_(0, index, terms)
            else:  # index_add_ is not deterministic there; this sorts
                sum_TD.index_put_((index,), terms, accumulate=True)
        return sum_TD.to(gradient_ID.dtype), None


_BLOCK_ROWS = 8192
"""Rows converted to float32 at a time."""


def _gathered(states_TD: Tensor, index_I: Tensor) -> Tensor:
    rows_ID: Tensor = _Gather.apply(states_TD, index_I)  # type: ignore[no-untyped-call]
    return rows_ID


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None, softcap: float
) -> Tensor:
    """Return attention with scores squashed to ±softcap (Gemma 2), which no fused kernel computes."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = (torch.tanh(scores / softcap) * softcap + mask).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def trie_states(backbone: nn.Module, ids_1T: Tensor, trie: Trie) -> Tensor:
    """Return the last hidden states (1, T, D) of the nodes. Not thread-safe: `EmbeddingModel` holds a lock.

    Raises:
        RuntimeError: under the activation checkpointing of transformers, which would compute the layers again with the
            usual attention.
    """
    if backbone.training and uses_other_checkpointing(backbone):
        raise RuntimeError(
            "prefix sharing does not work with the activation checkpointing of transformers. Call "
            "activation_checkpointing_disable() on the backbone, and checkpoint_activations(True) on the EmbeddingModel "
            "(setting: activation_checkpointing)."
        )
    with _trie_attention(backbone):
        states_1TD: Tensor = backbone(
            input_ids=ids_1T,
            # With four dimensions a mask counts as prepared: no mask of T × T elements is made. This one is not used.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids_1T.device),
            position_ids=trie.depth_1T,
            use_cache=False,
            trie_context=_TrieContext(trie),
        ).last_hidden_state
    return states_1TD


@contextmanager
def _trie_attention(backbone: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, path_attention)
    config = backbone.config.get_text_config()
    usual = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


MOST_TOKENS = 1024
"""Longer texts are padded: attention of a trie needs a mask of queries × keys of a text, and that of one text needs
none."""

_NO_WINDOW = {"max_window_layers"}  # Qwen: the first layer with a window

_DYNAMIC_ROPE = {"longrope", "dynamic"}
"""Rotary embeddings with frequencies that depend on the longest text of the batch, beyond the original positions."""


def find_sharing(backbone: nn.Module, pooling: str, *, causal: bool) -> PrefixSharing:
    """Return whether texts of the backbone can share prefixes: by its config, and by comparing states."""
    if not causal:
        return PrefixSharing("in a bidirectional model the state of a token depends on later tokens")
    if pooling != "last":
        return PrefixSharing(f"pooling {pooling} reads more than the last token of a text")
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        return PrefixSharing(f"layers of type {min(odd)} are not plain attention")
    windows = {
        name: value
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name)
        and not name.startswith("_")
        and not name.endswith("_pattern")
        and name not in _NO_WINDOW
        and type(value) is int
        and value > 0
    }
    # The mask of a sliding window depends on positions, so it masks nothing in a trie that is no deeper. Other windows
    # depend on the order of nodes in the trie.
    longest = min(MOST_TOKENS, windows.pop("sliding_window", MOST_TOKENS), _steady_positions(config))
    if windows:
        return PrefixSharing(f"its config has an unknown window, {next(iter(windows))}")
    if longest < max(map(len, _probe_texts(backbone))):
        return PrefixSharing(f"its attention window has {longest} tokens")
    return PrefixSharing(_probe(backbone), longest)


def _steady_positions(config: Any) -> int:
    """Return the longest text whose rotary embedding does not depend on other texts."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    rope = rope if isinstance(rope, dict) else {}
    steady = MOST_TOKENS
    for rotary in [rope, *rope.values()]:  # Gemma has one per type of layer
        if isinstance(rotary, dict) and rotary.get("rope_type") in _DYNAMIC_ROPE:
            own = rotary.get("original_max_position_embeddings")
            own = own or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            steady = min(steady, int(own))
    return steady


def _probe_texts(backbone: nn.Module) -> list[list[int]]:
    """Return all prefixes of eight texts that branch early, late and not at all, with ids from the whole vocabulary."""
    vocabulary: int = backbone.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]

    def token(number: int) -> int:
        return number * 7919 % vocabulary

    texts = [
        [token(1), token(2), token(branch + 3), token(5), token(6 + leaf)] for branch in (0, 1) for leaf in range(4)
    ]
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, 6)}
    return sorted([list(text) for text in prefixes])


def _probe(backbone: nn.Module) -> str | None:
    """Compare the states of some texts as a trie and one by one,
    relative to the effect of rounding; return why they differ."""
    texts = _probe_texts(backbone)
    full = [text for text in texts if len(text) == max(map(len, texts))]
    ids_1T, trie = build_trie(texts, shared_prefixes(texts))
    try:
        with evaluating(backbone) as device:

            def states(some: list[list[int]]) -> Tensor:
                ids_BT = torch.tensor(some, device=device)
                states_BTD: Tensor = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
                return states_BTD

            shared_RD = trie_states(backbone, ids_1T.to(device), trie.to(device))[0, trie.end_R.to(device)]
            together_BTD = states(full)
            alone_BTD = torch.cat([states([text]) for text in full])
    except Exception as error:  # an architecture can refuse unknown arguments in any way
        return f"the architecture does not accept positions or attention as arguments ({type(error).__name__})"
    place = {tuple(text[: end + 1]): (row, end) for row, text in enumerate(full) for end in range(len(text))}
    plain_RD = torch.stack([alone_BTD[place[tuple(text)]] for text in texts])
    # float32 sums in another order differ by about 1e-7 of a state; half precision and TF32 show in `rounding`.
    rounding = relative_difference(together_BTD, alone_BTD)
    if relative_difference(shared_RD, plain_RD) <= max(1e-4, min(4 * rounding, 0.05)):
        return None
    return "the architecture gives other states as a trie"
