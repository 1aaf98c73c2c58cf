"""Activation checkpointing: layers save only their inputs, and are computed a second time in the backward pass.

`EmbeddingModel` changes the attention function of its backbone during the forward pass (`layout/attention`). A layer is
computed again after this change has ended, so `CheckpointedForward` sets the same attention function again.
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

    A forward pass temporarily changes the attention function and the hooks of the backbone, which would affect a forward
    pass in another thread.
    """
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(without_adapter(backbone), threading.RLock())


@contextmanager
def attention_set(backbone: Any, name: str) -> Iterator[None]:
    """Set the attention function of a backbone inside this context; `name` is its name in `AttentionInterface`."""
    config = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    with forward_lock(backbone):  # on a GPU, the backward pass runs in another thread than the forward pass
        usual = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = usual


class CheckpointedForward:
    """Forward method of a layer with activation checkpointing; replaces `layer.forward`.

    The second run, in the backward pass, has the same attention function and dropout masks as the first. Hooks of the
    layer run once, because only `forward` is replaced. `GradientCheckpointingLayer` of transformers before 5.21 also
    repeats the hooks, which would then keep states of the second run.
    """

    def __init__(self, backbone: nn.Module, layer: nn.Module) -> None:
        self._backbone, self._forward = backbone, layer.forward

    def __call__(self, *states: Any, **named: Any) -> Any:
        if "past_key_values" in named:  # of a bidirectional decoder, whose second run would add its keys again
            named["past_key_values"] = None
        return checkpoint(self._forward, *states, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the first and the second run of the layer, for `torch.utils.checkpoint`."""
        backbone: Any = without_adapter(self._backbone)
        return nullcontext(), attention_set(backbone, backbone.config.get_text_config()._attn_implementation)


def uses_other_checkpointing(backbone: nn.Module) -> bool:
    """Return whether the activation checkpointing of `transformers`, not of this package, is enabled in a backbone."""
    return any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())


def checkpointing_problem(backbone: nn.Module) -> str | None:
    """Return the reason why the layers of a backbone cannot be checkpointed, or None if they can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        layers = LayerStack.of(backbone).layers
    except ValueError:
        return f"the layers of {type(backbone).__name__} are not in one list, which activation checkpointing needs."
    unsupported = {type(layer).__name__ for layer in layers if not isinstance(layer, GradientCheckpointingLayer)}
    return f"layers of type {min(unsupported)} do not support activation checkpointing." if unsupported else None


def checkpoint_layers(backbone: nn.Module, *, enabled: bool) -> None:
    """Enable or disable activation checkpointing for all layers of a backbone but the last.

    Checkpointing the last layer would save no memory, because the backward pass starts there.

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
