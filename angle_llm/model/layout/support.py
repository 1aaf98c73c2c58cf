"""Find the layouts of a micro-batch (prefix trie, packed, padded) that a backbone can compute.

The config is checked, hidden states of test texts are compared, and it is tested that no state crosses text borders.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.device import emulates_bfloat16, evaluating, is_out_of_memory, on_device, relative_difference
from angle_llm.io import log
from angle_llm.model.layers.fused_lora import are_plain
from angle_llm.model.layers.quantization import without_outliers
from angle_llm.model.layout.attention import sequence_output
from angle_llm.model.layout.flex import AttentionShape, flex_problem
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.model.layout.token_sequence import build_sequence, shared_prefixes

MOST_TOKENS = 1024
"""Maximum number of tokens of a text that is put in one sequence with other texts; longer texts are padded.

Attention with gathered keys needs a mask of queries × keys for every text, but a padded text needs none.
"""
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""Config keys of `transformers` models that set the attention dropout."""

_KNOWN_WINDOWS = {"sliding_window", "max_window_layers"}
"""Config keys that contain `window` and allow texts in one sequence: a window size, and in Qwen the first such layer.

The mask of a sliding window depends on positions, so it hides nothing in texts shorter than the window.
"""

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types of a config whose states come from earlier tokens by attention only.

Layers of type `conv`, `linear_attention` or `hybrid` have a state that crosses the borders of texts in one sequence.
"""

_MOST_ROUNDING = 0.2
"""Largest relative difference of states that can be taken for rounding, if padded batches differ from single texts too."""

_PADDING = 3
"""Number of tokens after the test texts where rounding is measured."""

_DYNAMIC_ROPE = {"longrope", "dynamic"}
"""RoPE types whose frequencies depend on the longest text in the batch, if it exceeds the original maximum position."""


def probe_layouts(
    backbone: nn.Module,
    pooling: str,
    *,
    causal: bool,
    device: torch.device | None = None,
    autocasts: bool = False,
    trains: bool = False,
) -> LayoutSupport:
    """Return the layout of micro-batches with the fewest tokens that a backbone can compute.

    It is a prefix trie, packed (concatenated) texts or padded texts. The config is checked, and hidden states of texts in
    one sequence are compared with hidden states of single texts.

    Args:
        pooling: name of the pooling.
        device: device of later forward passes; None: the device of the weights.
        autocasts: whether matrix products of training are computed in bfloat16.
        trains: whether the model is trained, with the dropout in its config; otherwise it only encodes texts.
    """
    if are_plain():
        return LayoutSupport("padded", "ANGLE_LLM_PLAIN is set")
    # Configs with which texts cannot be in one sequence.
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    if unknown_types := other_layers(config):
        return LayoutSupport("padded", f"layers of type {min(unknown_types)} are not plain attention")
    if "clip" in config.model_type:
        return LayoutSupport("padded", "it does not accept sequences that are longer than its positions")
    # Other windows than `_KNOWN_WINDOWS` depend on the order of tokens in the sequence.
    windows = [
        name
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name)
        and not name.startswith("_")
        and not name.endswith("_pattern")
        and name not in _KNOWN_WINDOWS
        and type(value) is int
        and value > 0
    ]
    if windows:
        return LayoutSupport("padded", f"its config has an unknown window, {windows[0]}")
    window = getattr(config, "sliding_window", None)  # in ModernBERT a property, which is not in the dictionary
    limit = min(MOST_TOKENS, window if window and window > 0 else MOST_TOKENS, _steady_positions(config, MOST_TOKENS))
    if limit < max(map(len, _probe_texts(backbone))):
        return LayoutSupport("padded", f"its attention window has {limit} tokens")
    # A prefix trie if possible, else packed texts.
    reason = None
    if not causal:
        reason = "in a bidirectional model the state of a token depends on later tokens"
    elif pooling != "last":
        reason = f"pooling {pooling} reads more than the last token of a text"
    shares = reason is None
    # Trials of the attention kernel and of the backbone.
    device = device or next(backbone.parameters()).device
    problem = None
    if device.type == "cuda":
        if trains and any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT):
            problem = "texts in one sequence with attention dropout have no fused kernel on a GPU"
        else:
            problem = _flex_problem(backbone, causal, shares, device, autocasts)
    with without_outliers(backbone):
        problem = problem or _probe(backbone, causal=causal, shares=shares)
    if problem is not None:
        return LayoutSupport("padded", problem if shares else f"{reason}; {problem}", limit)
    uses_flex = device.type == "cuda" and device.index is not None  # without an index, only memory is counted
    return LayoutSupport("trie" if shares else "packed", reason or "", limit, causal, uses_flex)


def other_layers(config: Any) -> set[str]:
    """Return the layer types in a config that are not plain attention, such as `conv` and `linear_attention`."""
    return set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS


def _flex_problem(backbone: nn.Module, causal: bool, shares: bool, device: torch.device, autocasts: bool) -> str | None:
    """Return why FlexAttention cannot be used on a GPU with the heads of a backbone; None if it can.

    For a device without an index (`angle-llm plan` on a machine without a GPU), only the config is checked.
    """
    # Limits that follow from the config.
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")
    try:
        heads, kv_heads, width, other_width = (getattr(config, name, None) for name in names)
    except RuntimeError:  # of transformers, for Gemma-4
        return "its layers have different attention heads"
    if other_width not in (None, width):  # Gemma-4 in earlier versions of transformers
        return "its layers have different attention heads"
    if not heads:
        return "its config does not contain the number of attention heads"
    width = width or config.hidden_size // heads
    if device.index is None:
        return None
    if emulates_bfloat16(device):  # torch does not compile the kernel there, and would compute all scores
        return "FlexAttention needs a GPU with bfloat16"
    # Trial of the kernel, in every precision that the model computes in.
    scalings = (getattr(layer, "scaling", None) for layer in backbone.modules())
    scaling = next((value for value in scalings if isinstance(value, float)), width**-0.5)
    softcap = getattr(config, "attn_logit_softcapping", None)
    dtype = next(backbone.parameters()).dtype
    precisions = [(dtype, "highest")]
    precisions += [(dtype, "high")] if dtype == torch.float32 else []  # training uses TF32 for float32 models
    precisions += [(torch.bfloat16, "highest")] if autocasts else []
    shape = AttentionShape(heads, kv_heads or heads, width, softcap, scaling, causal, shares)
    try:
        problem = next(filter(None, (flex_problem(shape, *precision, device) for precision in precisions)), None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = "not enough memory for the trial"
    if problem is None:
        return None
    log(f"warning: texts are padded, because FlexAttention cannot be used on {device}: {problem}")
    return f"FlexAttention cannot be used: {problem}"


def _steady_positions(config: Any, limit: int) -> int:
    """Return the number of tokens up to which the RoPE of a text does not depend on other texts, at most `limit`.

    For some RoPE types, frequencies depend on the longest text in the batch if it exceeds the original positions.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    positions = limit
    for parameters in [rope, *rope.values()]:  # Gemma has a dictionary for every layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") in _DYNAMIC_ROPE:
            name = "original_max_position_embeddings"
            original = parameters.get(name) or getattr(config, name, None) or config.max_position_embeddings
            positions = min(positions, int(original))
    return positions


def _probe_texts(backbone: nn.Module) -> list[list[int]]:
    """Return the token ids of test texts: all prefixes of eight texts that have common prefixes, sorted.

    The eight texts have 5 tokens and share the first 2 or 4 tokens. Ids are spread over the vocabulary of the backbone.
    """
    vocabulary: int = backbone.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]

    def token(number: int) -> int:
        return number * 7919 % vocabulary

    texts = [
        [token(1), token(2), token(branch + 3), token(5), token(6 + leaf)] for branch in (0, 1) for leaf in range(4)
    ]
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, 6)}
    return sorted([list(text) for text in prefixes])


def _probe(backbone: nn.Module, *, causal: bool, shares: bool) -> str | None:
    """Test whether a backbone can compute texts in one sequence; return None if it can, else the reason.

    The hidden states of test texts in one sequence are compared with the hidden states of single texts. An out-of-memory
    error is raised.

    Args:
        shares: whether the sequence is a prefix trie; otherwise texts are packed (concatenated).
    """
    texts = _probe_texts(backbone)
    full = [text for text in texts if len(text) == max(map(len, texts))]
    try:
        with evaluating(backbone) as device:

            def states(ids: list[list[int]], padding: int = 0) -> Tensor:
                ids_BT = torch.tensor([text + text[:1] * padding for text in ids], device=device)
                length = ids_BT.shape[1] - padding
                mask = None if causal else torch.ones_like(ids_BT)
                if mask is not None:
                    mask[:, length:] = 0
                options = {"use_cache": False} if causal else {}
                states_BTD: Tensor = backbone(input_ids=ids_BT, attention_mask=mask, **options).last_hidden_state
                return states_BTD[:, :length]

            probes = texts if shares else [*full[:3], *(text for text in texts if len(text) < 4)]
            ids_1T, sequence = build_sequence(probes, shared_prefixes(probes) if shares else None, causal=causal)
            output = sequence_output(backbone, on_device(ids_1T, device), sequence.to(device))
            padded_RD = output.last_hidden_state[0]
            sequence_RD = padded_RD[: ids_1T.shape[1]]
            # As many tokens as the sequence, and padding: kernels, which round differently, are selected by the number of
            # tokens (a GPU) and by the length of texts (a base in NF4 on a CPU).
            together_BTD = states(full * -(-len(padded_RD) // sum(map(len, full))), _PADDING)[: len(full)]
            alone_BTD = torch.cat([states([text]) for text in full])
            if shares:  # every prefix is a text, so every node is the last node of a text
                sequence_RD = sequence_RD[sequence.end_R]
                index_of = {tuple(text[:end]): (row, end - 1) for row, text in enumerate(full) for end in range(1, 6)}
                plain_RD = torch.stack([alone_BTD[index_of[tuple(prefix)]] for prefix in texts])
            else:
                plain_RD = torch.cat([states([text])[0] for text in probes])
            crosses = _crosses_borders(backbone, full, causal=causal, device=device)
    except Exception as error:  # an architecture can refuse unknown arguments in any way
        if is_out_of_memory(error):
            raise
        return f"the architecture does not accept positions or attention as arguments ({type(error).__name__})"
    # float32 sums in another order differ by about 1e-7 of a state. `rounding` measures the larger differences of half
    # precision and TF32, but it can be 0 by chance for a few texts.
    rounding = relative_difference(together_BTD, alone_BTD)
    tolerance = 0.02 if sequence_RD.dtype.itemsize == 2 else 1e-4
    difference = relative_difference(sequence_RD, plain_RD)
    if difference <= max(tolerance, min(4 * rounding, _MOST_ROUNDING)):
        return "a convolution or a recurrent state crosses the borders of texts" if crosses else None
    how = "in a trie" if shares else "in packed texts"
    return f"hidden states {how} differ from single texts (difference {difference:.1e}, rounding {rounding:.1e})"


def _crosses_borders(backbone: Any, texts: list[list[int]], *, causal: bool, device: torch.device) -> bool:
    """Return whether the states of packed texts depend on a text before them, by any amount.

    Convolutions and recurrent states cross the borders of texts. With small weights, the effect is below the rounding of
    bfloat16, and can grow in training. So the embeddings of the second text are NaN, which remains NaN if multiplied by 0.

    `texts` have equal lengths.
    """
    # Not the first text: gathered attention uses its first token as padding.
    start, end = len(texts[0]), 2 * len(texts[0])

    def poison(_: nn.Module, __: Any, embeddings_1TD: Tensor) -> Tensor:
        poisoned_1TD = embeddings_1TD.clone()
        poisoned_1TD[:, start:end] = torch.nan
        return poisoned_1TD

    ids_1T, sequence = build_sequence(texts, None, causal=causal)
    with backbone.get_input_embeddings().register_forward_hook(poison):
        output = sequence_output(backbone, on_device(ids_1T, device), sequence.to(device), "gathered")
    return not bool(output.last_hidden_state[0, end:].isfinite().all())
