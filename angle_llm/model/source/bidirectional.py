"""Check that a decoder-only model with `is_causal: false` in its configuration is bidirectional, in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.device import evaluating, relative_difference
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layout.support import other_layers
from angle_llm.model.source.backbone import probes_as_causal
from angle_llm.model.source.checks import ArtifactError

_PADDING_TOLERANCE = 0.05
"""Largest relative difference of states with and without padding that rounding to bfloat16 or 8 bits can cause; other
attention gives differences near 1."""

_PARALLEL_LAYERS = {"hybrid", "hybrid_sliding"}
"""Layer types of a config with attention and a causal part in one layer, as in Falcon-H1."""


def check_and_simplify_bidirectional(backbone: Any) -> None:
    """Check that `is_causal: false` in the configuration makes a backbone bidirectional, with and without padding.

    If the backbone is bidirectional without this key, such as BERT, the key is removed from the configuration: transformers
    4 would refuse a saved model with it.

    Raises:
        ArtifactError: if a layer of the architecture ignores the key, or ignores it for texts without padding.
    """
    config = backbone.config.get_text_config()
    if probes_as_causal(backbone) or _has_causal_layer(backbone) or _padding_difference(backbone) > _PADDING_TOLERANCE:
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


def _has_causal_layer(backbone: Any) -> bool:
    """Return whether there is a layer whose output for the first token does not depend on its input for later tokens.

    Some models have a convolution or linear attention in place of attention in some layers. There, the gradient of the first
    output by later inputs is exactly 0. The result is False if the gradients are not available: in inference mode, or if the
    layers are not found or do not map states (…, T, D) to such states. A layer that adds attention and a causal part is found
    by its type in the config (`_PARALLEL_LAYERS`). Layers that attend to keys of an earlier layer (Gemma-4) are left out.
    """
    if other_layers(backbone.config.get_text_config()) & _PARALLEL_LAYERS:
        return True
    try:
        layers = LayerStack.of(backbone).layers
    except ValueError:
        return False
    if torch.is_inference_mode_enabled() or next(backbone.parameters()).is_inference():
        return False
    pairs: list[tuple[Tensor, Tensor]] = []  # input and output of a layer

    def with_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return 1 * output.detach().requires_grad_()  # not the leaf, which a model could not change in place

    def record(_: nn.Module, positional: Any, named: Any, output: Any) -> None:
        states = positional[0] if positional else named["hidden_states"]
        pairs.append((states, output[0] if isinstance(output, tuple) else output))

    embeddings = backbone.get_input_embeddings()
    handles = [
        layer.register_forward_hook(record, with_kwargs=True)
        for layer in layers
        if not getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False)
    ]
    handles.append(embeddings.register_forward_hook(with_gradient))
    try:
        with evaluating(backbone) as device, torch.enable_grad():
            ids_1T = torch.tensor([[7, 5, 3, 1]], device=device)
            backbone(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
    finally:
        for handle in handles:
            handle.remove()
    return any(_ignores_later_tokens(before, after) for before, after in pairs if before.shape[-2] == ids_1T.shape[1])


def _ignores_later_tokens(before: Tensor, after: Tensor) -> bool:
    """Return whether the first token of a state (…, T, D) has gradient 0 by all later tokens of an earlier state."""
    first_D = after[..., 0, :].float()
    # Equal weights would not do: their sum over a LayerNorm is constant.
    weight_D = torch.arange(first_D.shape[-1], device=first_D.device).mul(1.7).cos()
    (gradient,) = torch.autograd.grad((first_D * weight_D).sum(), before, retain_graph=True, allow_unused=True)
    return gradient is not None and not bool(gradient[..., 1:, :].any())


def _padding_difference(backbone: nn.Module) -> float:
    """Return the largest relative difference between the states of a text alone and of the same text with padding."""
    with evaluating(backbone) as device:
        ids_1T = torch.tensor([[7, 5, 3, 1, 0, 0]], device=device)
        mask_1T = torch.tensor([[1, 1, 1, 1, 0, 0]], device=device)
        alone = backbone(input_ids=ids_1T[:, :4], attention_mask=mask_1T[:, :4]).last_hidden_state
        return relative_difference(backbone(input_ids=ids_1T, attention_mask=mask_1T).last_hidden_state[:, :4], alone)
