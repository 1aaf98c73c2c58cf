"""Whether a backbone can compute texts as a trie: asked of the model itself, and of what its config says of windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from angle_llm.modeling.microbatches import PrefixSharing
from angle_llm.modeling.trie import build_trie, shared_prefixes, trie_states

_NO_WINDOW = {"max_window_layers"}  # Qwen: from which layer on there is one, if there is one
_PROBE = [[7, 5, 3, 1, 4], [7, 5, 3, 2, 6, 8], [7, 5, 3, 2, 6, 9, 10]]


def find_sharing(backbone: nn.Module, pooling: str, *, causal: bool) -> PrefixSharing:
    """What the backbone allows, with the reason where it does not."""
    if not causal:
        return PrefixSharing("in a bidirectional model a token's state depends on what follows it")
    if pooling != "last":
        return PrefixSharing(f"pooling {pooling} reads more than a text's last token")
    config: Any = backbone.config.get_text_config()  # type: ignore[operator,union-attr]
    windows = {
        name: value
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name) and type(value) is int and value > 0 and name not in _NO_WINDOW
    }
    # The mask of a sliding window is made from positions, so it hides nothing from a trie that is no deeper; what other
    # windows hide depends on where a node stands in the trie.
    longest = windows.pop("sliding_window", None)
    if windows:
        return PrefixSharing(f"its config has a {next(iter(windows))}, which is not understood")
    if longest is not None and longest < max(map(len, _PROBE)):
        return PrefixSharing(f"its attention window is {longest} tokens")
    return PrefixSharing(_probe(backbone), longest)


@torch.no_grad()
def _probe(backbone: nn.Module) -> str | None:
    """Encodes three texts as a trie and one by one."""
    device = next(backbone.parameters()).device
    ids_1T, trie = build_trie(_PROBE, shared_prefixes(_PROBE))
    was_training = backbone.training
    backbone.eval()
    try:
        shared_RD = trie_states(backbone, ids_1T.to(device), trie.to(device))[0, trie.end_R]
        plain_RD = torch.stack(
            [backbone(input_ids=torch.tensor([text], device=device)).last_hidden_state[0, -1] for text in _PROBE]
        )
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the architecture does not take positions or attention from outside ({type(error).__name__})"
    finally:
        backbone.train(was_training)
    difference = (1 - torch.cosine_similarity(shared_RD.double(), plain_RD.double())).max()
    return None if difference <= 1e-3 else "as a trie the architecture gives other states"
