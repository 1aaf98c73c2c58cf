"""Check that a decoder-only model with `is_causal: false` in its configuration is bidirectional, in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from angle_llm.device import evaluating, relative_difference
from angle_llm.model.layout.support import other_layers
from angle_llm.model.source.backbone import probes_as_causal
from angle_llm.model.source.checks import ArtifactError

_PADDING_TOLERANCE = 0.05
"""Largest relative difference of states with and without padding that rounding to bfloat16 or 8 bits can cause; other
attention gives differences near 1."""


def check_and_simplify_bidirectional(backbone: Any) -> None:
    """Check that `is_causal: false` in the configuration makes a backbone bidirectional, with and without padding.

    If the backbone is bidirectional without this key, such as BERT, the key is removed from the configuration: transformers
    4 would refuse a saved model with it.

    Raises:
        ArtifactError: if a layer of the architecture ignores the key, or ignores it for texts without padding.
    """
    config = backbone.config.get_text_config()
    if probes_as_causal(backbone) or other_layers(config) or _padding_difference(backbone) > _PADDING_TOLERANCE:
        raise ArtifactError(
            f"models of type {config.model_type} do not support bidirectional attention in this version of transformers: a "
            "layer is causal, or the states of a padded text and of the text alone differ. Omit attention, or use another model. "
            "Without the setting, remove is_causal from config.json."
        )
    # Is the model still bidirectional without the key?
    del config.is_causal
    if probes_as_causal(backbone) or _padding_difference(backbone) > _PADDING_TOLERANCE:
        config.is_causal = False
        config.use_cache = False  # otherwise a forward pass of the library keeps keys and values for generation


def _padding_difference(backbone: nn.Module) -> float:
    """Return the largest relative difference between the states of a text alone and of the same text with padding."""
    with evaluating(backbone) as device:
        ids_1T = torch.tensor([[7, 5, 3, 1, 0, 0]], device=device)
        mask_1T = torch.tensor([[1, 1, 1, 1, 0, 0]], device=device)
        alone = backbone(input_ids=ids_1T[:, :4], attention_mask=mask_1T[:, :4]).last_hidden_state
        return relative_difference(backbone(input_ids=ids_1T, attention_mask=mask_1T).last_hidden_state[:, :4], alone)
