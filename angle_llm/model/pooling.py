"""From the hidden states of a text's tokens to one row of `E`.

Legend: B texts, T tokens, D dimensions. `mask_BT` is 1 at real tokens. Names are the paper's (arXiv 2309.12871, table 6)
where it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from angle_llm.errors import unknown


def last_position(mask_BT: Tensor) -> Tensor:
    """Where the last real token stands among the flattened B × T, whichever side the padding is on."""
    texts, tokens = mask_BT.shape
    position_B = (mask_BT * torch.arange(1, tokens + 1, device=mask_BT.device)).argmax(dim=1)
    return position_B + tokens * torch.arange(texts, device=mask_BT.device)


def last_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The state of the last real token."""
    return states_BTD.flatten(0, 1)[last_position(mask_BT)]


def first_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The state of the first real token ([CLS] of a BERT-like encoder)."""
    position_B = mask_BT.long().argmax(dim=1)
    return states_BTD[torch.arange(len(states_BTD), device=states_BTD.device), position_B]


def mean_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The mean over real tokens, prompt and special tokens included."""
    weight_BT1 = mask_BT.unsqueeze(-1).to(states_BTD.dtype)
    # In half precision a long text's sum overflows (float16) and its length is rounded (bfloat16 counts to 256).
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    return (states_BTD * weight_BT1).sum(dim=1, dtype=wide) / weight_BT1.sum(dim=1, dtype=wide)


def max_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The maximum over real tokens, dimension by dimension."""
    return states_BTD.masked_fill(~mask_BT.bool().unsqueeze(-1), float("-inf")).amax(dim=1)


def cls_and_mean(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The average of the first token's state and the mean over tokens."""
    return (first_token(states_BTD, mask_BT) + mean_of_tokens(states_BTD, mask_BT)) / 2


@dataclass(frozen=True)
class Pooling:
    """A named pooling: a function of states and mask, over the last layer or the average of first and last layer."""

    function: Callable[[Tensor, Tensor], Tensor]
    averages_first_layer: bool = False


POOLINGS: dict[str, Pooling] = {
    "last": Pooling(last_token),
    "cls": Pooling(first_token),
    "mean": Pooling(mean_of_tokens),
    "last-avg": Pooling(mean_of_tokens),  # the paper's word for `mean`
    "last-max": Pooling(max_of_tokens),
    "cls-last-avg": Pooling(cls_and_mean),
    "first-last-avg": Pooling(mean_of_tokens, averages_first_layer=True),
}


def pooling_named(name: str) -> Pooling:
    """Looks a pooling up; an unknown name is a `ValueError` that tells the nearest."""
    if name not in POOLINGS:
        raise ValueError(unknown("pooling", name, POOLINGS))
    return POOLINGS[name]
