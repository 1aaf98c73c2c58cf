"""Activation checkpointing: layers save only their inputs, and run a second time in the backward pass.

`EmbeddingModel` changes the attention of its backbone during the forward pass (`layout/attention`). The second run of a
layer comes later, so `CheckpointedForward` sets the same attention again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.checkpoint import checkpoint

from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layers.lora import without_adapter

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def forward_lock(backbone: nn.Module) -> threading.RLock:
    """Return the lock that a thread must hold while it runs a backbone or its layers.

    A forward pass changes the attention and the layer outputs of the backbone, which other threads would also use.
    """
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(without_adapter(backbone), threading.RLock())


@contextmanager
def attention_set(backbone: Any, name: str) -> Iterator[None]:
    """Set the attention implementation of a backbone inside this context; `name` is registered in `transformers`."""
    config = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


class CheckpointedForward:
    """Forward pass of a layer through `torch.utils.checkpoint`, with equal attention and dropout masks in both runs.

    It replaces `layer.forward`, so that hooks of the layer run once. `GradientCheckpointingLayer` of transformers before
    5.21 also repeats the hooks, which would then keep states of the second run.
    """

    def __init__(self, backbone: nn.Module, layer: nn.Module) -> None:
        self._backbone, self._forward = backbone, layer.forward

    def __call__(self, *states: Any, **named: Any) -> Any:
        return checkpoint(self._forward, *states, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the first and the second run of the layer."""
        backbone: Any = without_adapter(self._backbone)
        return nullcontext(), self._recompute_context(backbone.config.get_text_config()._attn_implementation)

    @contextmanager
    def _recompute_context(self, attention: str) -> Iterator[None]:
        """Set the attention of the forward pass while the backward pass recomputes the layer."""
        # On a GPU, the backward pass runs in another thread than the forward pass.
        with forward_lock(self._backbone), attention_set(self._backbone, attention):
            yield


def uses_other_checkpointing(backbone: nn.Module) -> bool:
    """Return whether the activation checkpointing of transformers is enabled in the backbone."""
    return any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())


def checkpointing_problem(backbone: nn.Module) -> str | None:
    """Return the reason why the layers of a backbone cannot be checkpointed, or None if they can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        layers = LayerStack.of(backbone).layers
    except ValueError as error:
        return str(error)
    other = [type(layer).__name__ for layer in layers if not isinstance(layer, GradientCheckpointingLayer)]
    name = type(without_adapter(backbone)).__name__
    if not other:
        return None
    return f"activation checkpointing: {name} has layers of type {other[0]}, which do not support it."


def checkpoint_layers(backbone: nn.Module, *, enabled: bool) -> None:
    """Enable or disable activation checkpointing for all layers but the last, where it would save no memory.

    Raises:
        ValueError: if the layers of the backbone cannot be checkpointed.
    """
    if problem := checkpointing_problem(backbone):
        raise ValueError(problem)
    for layer in list(LayerStack.of(backbone).layers)[:-1]:
        if isinstance(layer.forward, CheckpointedForward):
            del layer.forward
        if enabled:
            layer.forward = CheckpointedForward(backbone, layer)
