"""Attention of a prefix trie, and whether a backbone computes with it what it computes without.

Legend: T nodes (tokens) of a trie; in a group of texts of like length: U texts, Q nodes they add to the trie, L nodes of a
whole text; H heads, K key-value heads, G = H / K, S dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from angle_llm.model.micro_batches import PrefixSharing
from angle_llm.model.prefix_trie import Trie, build_trie, shared_prefixes

ATTENTION_NAME = "angle_llm_trie"

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


LONGEST = 1024
"""Texts beyond this are padded: attention on a trie takes an explicit mask, queries × keys of a text, which a kernel for
one long text does without."""

_NO_WINDOW = {"max_window_layers"}  # Qwen: from which layer on there is one, if there is one

_BY_LONGEST_TEXT = {"longrope", "dynamic"}
"""Rotary embeddings whose frequencies depend on the longest text beside, once it is beyond the original positions."""


def find_sharing(backbone: nn.Module, pooling: str, *, causal: bool) -> PrefixSharing:
    """What the backbone allows, with the reason where it does not."""
    if not causal:
        return PrefixSharing("in a bidirectional model a token's state depends on what follows it")
    if pooling != "last":
        return PrefixSharing(f"pooling {pooling} reads more than a text's last token")
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        return PrefixSharing(f"its layers of type {min(odd)} are not plain attention")
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
    # The mask of a sliding window is made from positions, so it hides nothing from a trie that is no deeper; what other
    # windows hide depends on where a node stands in the trie.
    longest = min(LONGEST, windows.pop("sliding_window", LONGEST), _steady_positions(config))
    if windows:
        return PrefixSharing(f"its config has a {next(iter(windows))}, which is not understood")
    if longest < max(map(len, _probe_texts(backbone))):
        return PrefixSharing(f"its attention window is {longest} tokens")
    return PrefixSharing(_probe(backbone), longest)


def _steady_positions(config: Any) -> int:
    """Longest text whose rotary embedding does not depend on the texts beside it."""
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    told = told if isinstance(told, dict) else {}
    steady = LONGEST
    for rotary in [told, *told.values()]:  # Gemma has them by type of layer
        if isinstance(rotary, dict) and rotary.get("rope_type") in _BY_LONGEST_TEXT:
            own = rotary.get("original_max_position_embeddings")
            own = own or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            steady = min(steady, int(own))
    return steady


def _probe_texts(backbone: nn.Module) -> list[list[int]]:
    """Every beginning of eight texts that branch early, late and not at all, with ids from all over the vocabulary."""
    vocabulary: int = backbone.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]

    def token(number: int) -> int:
        return number * 7919 % vocabulary

    texts = [
        [token(1), token(2), token(branch + 3), token(5), token(6 + leaf)] for branch in (0, 1) for leaf in range(4)
    ]
    beginnings = {tuple(text[:length]) for text in texts for length in range(1, 6)}
    return sorted([list(text) for text in beginnings])


@torch.no_grad()
def _probe(backbone: nn.Module) -> str | None:
    """Encodes some texts as a trie and one by one, and compares every state; rounding is measured beside it."""
    device = next(backbone.parameters()).device
    texts = _probe_texts(backbone)
    ids_1T, trie = build_trie(texts, shared_prefixes(texts))
    was_training = backbone.training
    backbone.eval()
    try:
        shared_RD = trie_states(backbone, ids_1T.to(device), trie.to(device))[0, trie.end_R].cpu().double()
        full = [text for text in texts if len(text) == max(map(len, texts))]
        alone = {
            tuple(text[: length + 1]): states_D
            for text in full
            for length, states_D in enumerate(_states(backbone, [text], device)[0])
        }
        together_BTD = _states(backbone, full, device)
    except Exception as error:  # whatever an architecture does with arguments it does not know, it is refused
        return f"the architecture does not take positions or attention from outside ({type(error).__name__})"
    finally:
        backbone.train(was_training)
    plain_RD = torch.stack([alone[tuple(text)] for text in texts])
    rounding = max(
        _difference(together_TD, torch.stack([alone[tuple(text[: length + 1])] for length in range(len(text))]))
        for text, together_TD in zip(full, together_BTD, strict=True)
    )
    # float32 sums in another order differ by some 1e-7 of a state; half precision, or TF32, shows in the rounding.
    if _difference(shared_RD, plain_RD) <= max(1e-4, min(4 * rounding, 0.05)):
        return None
    return "as a trie the architecture gives other states"


def _states(backbone: nn.Module, texts: list[list[int]], device: torch.device) -> torch.Tensor:
    """Of texts of one length, (B, T, D)."""
    states_BTD: torch.Tensor = backbone(input_ids=torch.tensor(texts, device=device), use_cache=False).last_hidden_state
    return states_BTD.cpu().double()  # MPS has no float64


def _difference(one_RD: torch.Tensor, other_RD: torch.Tensor) -> float:
    """The largest relative difference of two states."""
    return float(((one_RD - other_RD).norm(dim=1) / other_RD.norm(dim=1).clamp(min=1e-30)).max())
