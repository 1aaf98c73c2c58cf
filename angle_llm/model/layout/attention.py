"""Attention function for `transformers` that restricts attention to the tokens of a text in one sequence; two kernels.

The sequence is a prefix trie or packed texts (see `token_sequence`).

gathered  Keys and values are gathered for texts of similar length, and scores are computed within texts. It runs on every
          device, in every dtype and with dropout, and is the fastest kernel on a CPU.
flex      FlexAttention (arXiv 2412.05496): one compiled call per layer, without gathered keys. Query q attends to key k
          if k <= q < end[k] (see `subtree_ends`), so a vector defines the mask. It runs on CUDA; a CPU computes only the
          forward pass, slowly. With attention dropout, in float64, or if FlexAttention cannot be compiled, the kernel
          `gathered` is used instead.

Legend: T nodes (tokens) of a sequence; in a group of texts of similar length: U texts, Q nodes that a text adds, L nodes
of a whole text; H heads, K key-value heads, G = H / K, S dimensions of a head; D = H x S or K x S; R texts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from angle_llm.device import is_gpu, on_device
from angle_llm.model.layers.activation_checkpointing import attention_set, uses_other_checkpointing
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.layout.flex import block_mask, compiled_flex, flex_call, padded_length
from angle_llm.model.layout.token_sequence import SequenceGroup, TokenSequence, gather_rows

ATTENTION_NAME = "angle_llm_sequence"
"""Name under which `sequence_attention` is registered in `AttentionInterface` of `transformers`."""
Kernel = Literal["gathered", "flex"] | None
PLAIN_ATTENTION_TOKENS = 128
"""Number of tokens of the longest text up to which a CPU uses attention without a fused kernel.

For such texts the flash kernel on a CPU is slower (2x in bfloat16). From 256 tokens it is faster, and attention without a
fused kernel would save the scores of every layer.
"""

_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels of torch that are allowed on a GPU.

cuDNN is excluded, because it caches a plan for every shape without limit, and micro-batches have many shapes.
"""


def attention_kernels(device: torch.device, longest_text: int | None = None) -> AbstractContextManager[None]:
    """Return a context that selects the attention kernels of torch, with or without a fused kernel, for a device.

    On a CPU, a training step whose longest text has at most `PLAIN_ATTENTION_TOKENS` tokens uses no fused kernel.
    `longest_text` is the number of tokens of this text; None in inference.
    """
    if device.type != "cpu":
        return sdpa_kernel(_GPU_KERNELS)
    plain = longest_text is not None and longest_text <= PLAIN_ATTENTION_TOKENS
    return sdpa_kernel(SDPBackend.MATH) if plain else nullcontext()


_UNUSED = {"sliding_window", "is_causal", "position_ids", "use_cache", "deterministic", "output_hidden_states"}
"""Arguments of a `transformers` attention function that have no effect on texts in one sequence.

Texts are shorter than sliding windows, and positions are already applied to queries and keys.
"""


class _SequenceContext:
    """Computes attention for texts in one sequence, in one forward pass; all layers share its masks and indices."""

    def __init__(self, sequence: TokenSequence, device: torch.device, kernel: Kernel) -> None:
        self.sequence, self.device = sequence, device
        self.kernel = kernel or ("flex" if is_gpu(device) else "gathered")
        nodes = int(sequence.starts[-1])
        self.tokens = padded_length(nodes) if self.kernel == "flex" else nodes
        self._cache: dict[Any, Any] = {}

    def _once(self, cache_key: object, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached by `cache_key`, so that only the first layer of a forward pass computes it."""
        if cache_key not in self._cache:
            self._cache[cache_key] = make()
        return self._cache[cache_key]

    # gathered

    def _groups(self) -> tuple[list[tuple[SequenceGroup, bool]], Tensor]:
        """Group the texts by length: return pairs (group, whether its scores need a mask), and an index of tokens.

        The index (T,) is the position of each token in the concatenated queries of all groups (see `TokenSequence.groups`).
        """
        groups, query_of_token_T = self.sequence.groups()
        query_of_token_T = nn.functional.pad(query_of_token_T, (0, self.tokens - len(query_of_token_T)))
        masked = [self.sequence.causal or int(group.length_U.min()) < group.key_UL.shape[1] for group in groups]
        groups_on_device = [SequenceGroup(*(on_device(index, self.device) for index in group)) for group in groups]
        return list(zip(groups_on_device, masked, strict=True)), on_device(query_of_token_T, self.device)

    def mask(self, group: SequenceGroup, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of attention scores for a group of U texts: 0 where a query attends to a key, else -inf.

        For Q queries and L keys per text, the shape is (U, 1, repeats × Q, L) in a causal model. It is (U, 1, 1, L) in a
        bidirectional model, where all queries of a text attend to the same keys. `repeats` is the number of heads per
        key-value head.
        """
        added, length = group.query_UQ.shape[1], group.key_UL.shape[1]
        query_Q, key_L = (torch.arange(count, device=self.device) for count in (added, length))
        if self.sequence.causal:
            hidden_UQL = key_L > (group.shared_U[:, None] + query_Q.repeat(repeats))[:, :, None]
        else:
            hidden_UQL = key_L >= group.length_U[:, None, None]
        mask_UQL = torch.zeros(hidden_UQL.shape, dtype=dtype, device=self.device).masked_fill_(hidden_UQL, -torch.inf)
        return mask_UQL.unsqueeze(1)

    def gathered(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, softcap: float | None
    ) -> Tensor:
        """Return the attention output by the kernel `gathered`; arguments and shapes as in `sequence_attention`.

        Keys and values are gathered, and attention is called once per group of texts of similar length.
        """
        heads, kv_heads = query.shape[1], key.shape[1]
        repeats = heads // kv_heads
        query_TD, key_TD, value_TD = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
        groups, query_of_token_T = self._once("groups", self._groups)
        outputs = []
        for number, (group, masked) in enumerate(groups):
            texts, added = group.query_UQ.shape
            length = group.key_UL.shape[1]
            # Heads that share keys become `repeats` × `added` queries of one head, so keys need no copies.
            query_UKQS = (
                query_TD.index_select(0, group.query_UQ.flatten())
                .view(texts, added, kv_heads, repeats, -1)
                .permute(0, 2, 3, 1, 4)
                .flatten(2, 3)
            )
            key_UKLS, value_UKLS = (
                gather_rows(states, group.key_UL.flatten()).view(texts, length, kv_heads, -1).transpose(1, 2)
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
        output_TD = torch.cat(outputs).index_select(0, query_of_token_T)
        return output_TD.view(1, len(output_TD), heads, -1)

    # flex

    def flex(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
        """Return the attention output by the kernel `flex`; arguments and shapes as in `sequence_attention`."""
        shared_heads = query.shape[1] != key.shape[1]
        if query.is_meta:  # to count memory (`step_memory`): a fused kernel without a mask saves the same tensors
            attended = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=shared_heads)
            return attended.transpose(1, 2)
        if torch.is_autocast_enabled(query.device.type):  # does not apply to FlexAttention
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        mask = self._once("blocks", lambda: block_mask(self.sequence, self.tokens, self.device))
        cap = None if softcap is None else self._once("softcap", lambda: torch.tensor(softcap, device=self.device))
        attend = compiled_flex() if is_gpu(query.device) else flex_call
        output: Tensor = attend(query, key, value, mask, cap, scaling, shared_heads)
        return output.transpose(1, 2)


def sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_context: _SequenceContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output (1, T, H, S) for texts in one sequence, and None in place of attention weights.

    It is an attention function for `AttentionInterface` of `transformers`. `query` is (1, H, T, S), `key` and `value` are
    (1, K, T, S); `module` and `attention_mask` are ignored. Scores are limited to ±`softcap` by tanh; None: no limit.
    `sequence_output` passes `sequence_context` through the backbone.

    Raises:
        ValueError: for arguments of an attention type that is not supported.
    """
    if unknown := sorted(name for name, value in others.items() if name not in _UNUSED and value is not None):
        raise ValueError(f"attention with {', '.join(unknown)} cannot be computed for texts in one sequence")
    if sequence_context.kernel == "gathered" or dropout:
        return sequence_context.gathered(query, key, value, scaling, dropout, softcap), None
    return sequence_context.flex(query, key, value, scaling, softcap), None


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Return the attention output with scores limited to ±softcap by tanh, as in Gemma 2, without a fused kernel.

    `mask` is added to the scores. `scaling` None is 1 / sqrt(dimensions of a head).
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.tanh(scores / softcap) * softcap
    weights = (scores if mask is None else scores + mask).softmax(dim=-1, dtype=wide).to(query.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def sequence_output(
    backbone: nn.Module, ids_1T: Tensor, sequence: TokenSequence, kernel: Kernel = None, *, all_states: bool = False
) -> Any:
    """Run a backbone on texts in one sequence of T tokens, and return its output with hidden states (1, T, D).

    The kernel `flex` pads the sequence, so the output then has more than T states. Not thread-safe: the caller must hold
    `forward_lock`.

    Args:
        ids_1T: token ids of the sequence.
        kernel: `gathered` or `flex`; None: flex on CUDA, gathered on other devices.
        all_states: also return the states of every layer.

    Raises:
        RuntimeError: if the activation checkpointing of `transformers` is enabled in training. It would compute the layers
            again with the usual attention function.
    """
    if backbone.training and uses_other_checkpointing(backbone):
        raise RuntimeError(
            "texts in one sequence cannot be computed with the activation checkpointing of transformers. Call "
            "activation_checkpointing_disable() on the backbone (gradient_checkpointing_disable() in older versions), and "
            "checkpoint_activations(True) on the EmbeddingModel (setting: activation_checkpointing)."
        )
    from transformers import AttentionInterface

    context = _SequenceContext(sequence, ids_1T.device, kernel)
    options = ({"use_cache": False} if sequence.causal else {}) | ({"output_hidden_states": True} if all_states else {})
    padding = (0, context.tokens - ids_1T.shape[1])
    position_1T = sequence.depth_1T + _first_position(backbone)
    AttentionInterface.register(ATTENTION_NAME, sequence_attention)
    with attention_set(backbone, ATTENTION_NAME):
        return backbone(
            input_ids=nn.functional.pad(ids_1T, padding),
            # transformers makes no T × T mask if it gets a mask with four dimensions. The values are not used.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids_1T.device),
            position_ids=nn.functional.pad(position_1T, padding, value=_first_position(backbone)),
            sequence_context=context,
            **options,
        )


def _first_position(backbone: Any) -> int:
    """Return the position id of the first token of a text: 0, or `padding_idx + 1` in models like RoBERTa."""
    embeddings: Any = getattr(without_adapter(backbone), "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0
