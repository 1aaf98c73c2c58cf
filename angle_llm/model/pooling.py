"""Pooling functions: from the states of the tokens of a text to one vector.

Poolings have the names of the AnglE paper (arXiv 2309.12871, table 4), if they are in the paper.

Legend: B texts of a micro-batch, T tokens, D dimensions. `mask_BT` is 1 at real tokens and 0 at padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from angle_llm.model.source.backbone import state_sizes
from angle_llm.settings.parsing import unknown_name


def last_position(mask_BT: Tensor) -> Tensor:
    """Return the index of the last real token of each text, (B,), counted in the flattened B × T tokens.

    `mask_BT` is 1 at real tokens and 0 at padding. Padding may be on the left or on the right.
    """
    texts, tokens = mask_BT.shape
    position_B = (mask_BT * torch.arange(1, tokens + 1, device=mask_BT.device)).argmax(dim=1)
    return position_B + tokens * torch.arange(texts, device=mask_BT.device)


def last_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the state of the last real token of each text, (B, D)."""
    return states_BTD.flatten(0, 1)[last_position(mask_BT)]


def first_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the state of the first real token of each text, which is [CLS] in BERT, (B, D)."""
    position_B = mask_BT.long().argmax(dim=1)
    return states_BTD[torch.arange(len(states_BTD), device=states_BTD.device), position_B]


def mean_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean state over the real tokens of each text, prompt and special tokens included, (B, D)."""
    weight_BT1 = mask_BT.unsqueeze(-1).to(states_BTD.dtype)
    # In half precision the sum of a long text overflows (float16), and its length is rounded (bfloat16 counts to 256).
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    return (states_BTD * weight_BT1).sum(dim=1, dtype=wide) / weight_BT1.sum(dim=1, dtype=wide)


def mean_with_root_of_length(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum of the states over the real tokens of each text, divided by sqrt(number of tokens), (B, D)."""
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    length_B1 = mask_BT.sum(dim=1, keepdim=True, dtype=wide)
    return mean_of_tokens(states_BTD, mask_BT) * length_B1.sqrt()


def weighted_mean_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the weighted mean state over the real tokens of each text, (B, D).

    Token i has the weight i, from 1, so later tokens count more (SGPT, arXiv 2202.08904).
    """
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    weight_BT1 = (mask_BT.cumsum(dim=1) * mask_BT).unsqueeze(-1).to(wide)
    return (states_BTD * weight_BT1).sum(dim=1) / weight_BT1.sum(dim=1)


def max_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the maximum of the states over the real tokens of each text, by dimension, (B, D)."""
    return states_BTD.masked_fill(~mask_BT.bool().unsqueeze(-1), float("-inf")).amax(dim=1)


def cls_and_mean(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the average of the first token's state and the mean state over all real tokens of each text, (B, D)."""
    return (first_token(states_BTD, mask_BT) + mean_of_tokens(states_BTD, mask_BT)) / 2


@dataclass(frozen=True)
class Pooling:
    """A pooling function, and whether it is applied to the last layer or to an average of layers."""

    function: Callable[[Tensor, Tensor], Tensor]
    """Function that maps states (B, T, D) and mask (B, T) to embeddings (B, D)."""
    averages_first_layer: bool = False
    """Whether `function` is applied to the average of the first and the last layer's states, instead of the last layer's."""
    token: int | None = None
    """Position of the token in a text whose state is the result, -1 for the last token; None: several tokens."""


POOLINGS: dict[str, Pooling] = {
    "last": Pooling(last_token, token=-1),  # the last token, whereas `last-…` is the last layer in names of the paper
    "cls": Pooling(first_token, token=0),
    "mean": Pooling(mean_of_tokens),
    "max": Pooling(max_of_tokens),
    "mean_sqrt_len": Pooling(mean_with_root_of_length),
    "weightedmean": Pooling(weighted_mean_of_tokens),
    "last-avg": Pooling(mean_of_tokens),  # in the paper, the names of `mean` and `max`
    "last-max": Pooling(max_of_tokens),
    "cls-last-avg": Pooling(cls_and_mean),
    "first-last-avg": Pooling(mean_of_tokens, averages_first_layer=True),
}
"""Name of a pooling → pooling."""


def pooling_named(name: str) -> Pooling:
    """Return the pooling with a name from `POOLINGS`.

    Raises:
        ValueError: for an unknown name; the message gives the most similar name.
    """
    if name not in POOLINGS:
        raise ValueError(unknown_name("pooling", name, POOLINGS))
    return POOLINGS[name]


def checked_pooling(name: str | None, *, causal: bool) -> str:
    """Check that a pooling is possible for a model, and return the name of the pooling.

    `name` None selects `last` for a causal model, and `mean` for a bidirectional model.

    Raises:
        ValueError: for an unknown pooling, or `cls` for a causal model.
    """
    name = name or ("last" if causal else "mean")
    pooling_named(name)  # raises for an unknown name
    if causal and name == "cls":
        raise ValueError(
            "pooling 'cls' reads the first token, whose state in a causal model does not depend on the text: all texts would "
            "get the same vector. Use last or mean."
        )
    return name


def embedding_size(backbone: nn.Module, dense: nn.Sequential) -> int:
    """Return the output size of the last Dense module, or of the pooled state without Dense modules."""
    return int(dense[-1].linear.out_features) if len(dense) else state_sizes(backbone)[0]  # type: ignore[union-attr,arg-type]
