"""Which layouts a backbone can compute, by its config and by comparing states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from angle_llm.losses.relation import on_device
from angle_llm.model.attention import trie_output
from angle_llm.model.checks import evaluating, relative_difference
from angle_llm.model.flex import flex_problem
from angle_llm.model.micro_batches import PrefixSharing
from angle_llm.model.prefix_trie import build_trie, shared_prefixes

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

MOST_TOKENS = 1024
"""Longer texts are padded: attention with gathered keys needs a mask of queries × keys of a text, and that of one text
needs none."""
MOST_TOKENS_CUDA = 16_384
"""The same where FlexAttention runs, which needs no such mask."""
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")

_FLEX_WIDTH = 16
"""Smallest head of FlexAttention's kernel."""

_NO_WINDOW = {"max_window_layers"}  # Qwen: the first layer with a window

_DYNAMIC_ROPE = {"longrope", "dynamic"}
"""Rotary embeddings with frequencies that depend on the longest text of the batch, beyond the original positions."""


def find_sharing(
    backbone: nn.Module, pooling: str, *, causal: bool, device: torch.device | None = None
) -> PrefixSharing:
    """Return whether texts of the backbone can share prefixes, or be packed without padding: by its config, and by
    comparing states. `device` is the one that will compute; None: that of the weights."""
    reason = None
    if not causal:
        reason = "in a bidirectional model the state of a token depends on later tokens"
    elif pooling != "last":
        reason = f"pooling {pooling} reads more than the last token of a text"
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
    # The mask of a sliding window depends on positions, so it masks nothing in texts that are no longer. Other windows
    # depend on the order of tokens in the sequence.
    windows.pop("sliding_window", None)
    window = getattr(config, "sliding_window", None)  # of ModernBERT a property, not in the dictionary
    device = device or next(backbone.parameters()).device
    on_gpu = device.type == "cuda"
    most = MOST_TOKENS_CUDA if on_gpu and _flex_runs(backbone, device) else MOST_TOKENS
    longest = min(most, window if window and window > 0 else most, _steady_positions(config, most))
    if windows:
        return PrefixSharing(f"its config has an unknown window, {next(iter(windows))}")
    if longest < max(map(len, _probe_texts(backbone))):
        return PrefixSharing(f"its attention window has {longest} tokens")
    if reason is not None and on_gpu and _has_attention_dropout(config):
        return PrefixSharing(f"{reason}; packed texts with attention dropout have no fused kernel on a GPU", longest)
    problem = _probe(backbone, causal=causal, shares=reason is None)
    if problem is None:
        return PrefixSharing(reason, longest, packs=reason is not None, causal=causal)
    return PrefixSharing(problem if reason is None else f"{reason}; {problem}", longest)


def sharing_on(encoder: SentenceEncoder, device: str | torch.device) -> PrefixSharing:
    """Return `find_sharing` of an encoder for another device than that of its weights. One without index, such as cuda,
    need not exist."""
    device = torch.device(device)
    return find_sharing(encoder.model.backbone, encoder.pooling, causal=encoder.model.causal, device=device)


def _has_attention_dropout(config: Any) -> bool:
    return any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT)


def _flex_runs(backbone: nn.Module, device: torch.device) -> bool:
    """Return whether FlexAttention runs on a GPU, with heads as in the config of a backbone; on a machine without one (a
    plan) whether it is expected to."""
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    heads = getattr(config, "num_attention_heads", None)
    if not heads or _has_attention_dropout(config):
        return False
    kv_heads, width = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    width = width or config.hidden_size // heads
    if device.index is None:
        return bool(width >= _FLEX_WIDTH)
    softcap = getattr(config, "attn_logit_softcapping", None)
    shape = heads, kv_heads or heads, width
    dtype = next(backbone.parameters()).dtype
    return flex_problem(*shape, dtype, softcap, width**-0.5, device, False) is None


def _steady_positions(config: Any, most: int) -> int:
    """Return the longest text, up to `most` tokens, whose rotary embedding does not depend on other texts."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    rope = rope if isinstance(rope, dict) else {}
    steady = most
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


def _probe(backbone: nn.Module, *, causal: bool, shares: bool) -> str | None:
    """Compare the states of some texts in one sequence and one by one, relative to the effect of rounding; return why
    they differ."""
    texts = _probe_texts(backbone)
    full = [text for text in texts if len(text) == max(map(len, texts))]
    try:
        with evaluating(backbone) as device:

            def states(some: list[list[int]]) -> Tensor:
                ids_BT = torch.tensor(some, device=device)
                mask, options = None if causal else torch.ones_like(ids_BT), {"use_cache": False} if causal else {}
                states_BTD: Tensor = backbone(input_ids=ids_BT, attention_mask=mask, **options).last_hidden_state
                return states_BTD

            some = texts if shares else [*full[:3], *(text for text in texts if len(text) < 4)]
            ids_1T, trie = build_trie(some, shared_prefixes(some) if shares else None, causal=causal)
            output = trie_output(backbone, on_device(ids_1T, device), trie.to(device))
            sequence_RD = output.last_hidden_state[0, : ids_1T.shape[1]]
            together_BTD = states(full)
            alone_BTD = torch.cat([states([text]) for text in full])
            if shares:  # each prefix is a text, so each node is the last one of a text
                sequence_RD = sequence_RD[trie.end_R.to(device)]
                place = {tuple(text[:end]): (row, end - 1) for row, text in enumerate(full) for end in range(1, 6)}
                plain_RD = torch.stack([alone_BTD[place[tuple(text)]] for text in texts])
            else:
                plain_RD = torch.cat([states([text])[0] for text in some])
    except Exception as error:  # an architecture can refuse unknown arguments in any way
        return f"the architecture does not accept positions or attention as arguments ({type(error).__name__})"
    # float32 sums in another order differ by about 1e-7 of a state; half precision and TF32 show in `rounding`, which
    # can be 0 by chance for a few texts.
    rounding = relative_difference(together_BTD, alone_BTD)
    least = 0.02 if sequence_RD.dtype.itemsize == 2 else 1e-4
    if relative_difference(sequence_RD, plain_RD) <= max(least, min(4 * rounding, 0.05)):
        return None
    return f"the architecture gives other states {'as a trie' if shares else 'when texts are packed'}"
