"""The last layer, for pooled positions only.

Last-token pooling reads one state of each text. After the last layer's keys and values, which need every token, nothing
is computed for the others: the output projection of attention, the MLP and the final norm run on R rows, not B × T.

Legend: B sequences, T tokens, D dimensions, R pooled positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class PooledLastLayer:
    """Makes a backbone return rows (R, D) in place of states (B, T, D), while `pooled` is in force.

    For decoders whose layers are *norm, attention, add, norm, MLP, add* (LLaMA, Mistral, Qwen, …); `find` asks the
    backbone whether it is one, and compares states.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @classmethod
    def find(cls, backbone: nn.Module) -> PooledLastLayer | None:
        """The last layer of the backbone, or None if it has another form."""
        layers = getattr(backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList) or {name for name, _ in layers[-1].named_children()} != _PARTS:
            return None
        if not isinstance(getattr(layers[-1].self_attn, "o_proj", None), nn.Linear) or "forward" in vars(layers[-1]):
            return None  # a forward of its own: somebody, such as accelerate's hooks, has wrapped the layer
        last = cls(layers[-1])
        return last if last._agrees(backbone) else None

    @contextmanager
    def pooled(self, end_R: Tensor) -> Iterator[None]:
        """Within this, the layer goes on with the positions `end_R` of the flattened B × T alone."""
        self._layer.forward = lambda states_BTD, **named: self._pooled_forward(states_BTD, end_R, named)
        try:
            yield
        finally:
            del self._layer.forward  # the class's own shows again

    def _pooled_forward(self, states_BTD: Tensor, end_R: Tensor, named: dict[str, Any]) -> Tensor:
        layer = self._layer
        # After the hook attention's last step sees the pooled rows only, and returns (R, D).
        hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[end_R],))
        try:
            attended_RD, _ = layer.self_attn(hidden_states=layer.input_layernorm(states_BTD), **named)
        finally:
            hook.remove()
        middle_RD = states_BTD.flatten(0, 1)[end_R] + attended_RD
        rows_RD: Tensor = middle_RD + layer.mlp(layer.post_attention_layernorm(middle_RD))
        return rows_RD

    @torch.no_grad()
    def _agrees(self, backbone: nn.Module) -> bool:
        """Layers of the same parts may put them together otherwise (Granite scales what it adds)."""
        ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=next(backbone.parameters()).device)
        end_R = torch.tensor([2, 7], device=ids_BT.device)
        was_training = backbone.training
        backbone.eval()
        try:
            with self.pooled(end_R):
                rows_RD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
            states_BTD = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        except Exception:  # an architecture that is put together otherwise may fail in any way
            return False
        finally:
            backbone.train(was_training)
        if rows_RD.shape != (2, states_BTD.shape[-1]):
            return False
        similarity_R = torch.cosine_similarity(rows_RD.cpu().double(), states_BTD.flatten(0, 1)[end_R].cpu().double())
        # The sums are the same ones, of fewer rows; half precision rounds them to three digits.
        half = states_BTD.dtype in (torch.float16, torch.bfloat16)
        return bool((1 - similarity_R).max() < (1e-3 if half else 1e-6))
