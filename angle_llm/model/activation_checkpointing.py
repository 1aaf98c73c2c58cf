"""Activation checkpointing: a layer keeps its input only, and is computed again in the backward pass.

The attention of a prefix trie is set on the configuration of the backbone during its forward pass. The second
computation of a layer runs later, so `CheckpointedForward` sets the same attention again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.checkpoint import checkpoint

from angle_llm.model.depth import LayerStack
from angle_llm.model.lora import without_adapter

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def forward_lock(backbone: nn.Module) -> threading.RLock:
    """Return the lock of a backbone.

    A forward pass and a recomputed layer change its attention and layer outputs; another thread would use them.
    """
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(without_adapter(backbone), threading.RLock())


@contextmanager
def attention_set(backbone: Any, name: str) -> Iterator[None]:
    """Set the attention of a backbone, by its name in `transformers`, inside this context."""
    config = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


class CheckpointedForward:
    """The forward pass of a layer by `torch.utils.checkpoint`: with the same attention and dropout masks both times.

    It replaces `forward`, so hooks of the layer run once. `GradientCheckpointingLayer` of transformers before 5.21
    recomputes them too: the states they keep would belong to another pass.
    """

    def __init__(self, backbone: nn.Module, layer: nn.Module) -> None:
        self._backbone, self._forward = backbone, layer.forward

    def __call__(self, *states: Any, **named: Any) -> Any:
        return checkpoint(self._forward, *states, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        backbone: Any = without_adapter(self._backbone)
        return nullcontext(), self._again(backbone.config.get_text_config()._attn_implementation)

    @contextmanager
    def _again(self, attention: str) -> Iterator[None]:
        # On a GPU, another thread than that of the forward pass.
        with forward_lock(self._backbone), attention_set(self._backbone, attention):
            yield


def uses_other_checkpointing(backbone: nn.Module) -> bool:
    """Return whether transformers checkpoints activations of the backbone."""
    return any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())


def checkpoint_layers(backbone: nn.Module, *, enabled: bool) -> None:
    """Enable or disable activation checkpointing for all layers but the last, where it would save no memory.

    Raises:
        ValueError: if the layers of the backbone cannot be checkpointed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = list(LayerStack.of(backbone).layers)
    other = [type(layer).__name__ for layer in layers if not isinstance(layer, GradientCheckpointingLayer)]
    if other:
        name = type(without_adapter(backbone)).__name__
        raise ValueError(f"activation checkpointing: {name} has layers of type {other[0]}, which do not support it.")
    for layer in layers[:-1]:
        if isinstance(layer.forward, CheckpointedForward):
            del layer.forward
        if enabled:
            layer.forward = CheckpointedForward(backbone, layer)
