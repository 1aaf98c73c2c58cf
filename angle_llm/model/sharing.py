"""Whether a backbone can compute texts as a trie: asked of the model itself, and of what its config says of windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from angle_llm.model.microbatches import PrefixSharing
from angle_llm.model.trie import build_trie, shared_prefixes, trie_states

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
