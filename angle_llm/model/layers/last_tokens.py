"""The last layer of a causal backbone, computed for the last tokens of texts in one sequence only.

If the pooling reads the last token of each text, the last layer needs keys and values of all tokens, but attention, MLP
and output of the last tokens only. The keys and values are those that the layer passes to a cache of `transformers`; most
layers have also computed the queries of all tokens by then.

Legend: T tokens of a sequence, R texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class _KeysReadyError(Exception):
    """Raised to end the forward pass of a layer when it has computed its keys and values."""


class _LastLayerCache:
    """Cache of `transformers` that keeps the keys and values of the first update, and returns them in later updates."""

    _states: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if self._states is None:
            self._states = key, value
            raise _KeysReadyError
        return self._states


@contextmanager
def computing_last_tokens(layer: nn.Module, end_R: Tensor) -> Iterator[None]:
    """Make a layer return the states (1, R, D) of the tokens `end_R` only, in forward passes inside this context.

    The attention function gets queries (1, heads, R, …) with keys of all T tokens. Hooks of the layer run once.
    """
    replaced = vars(layer).get("forward")
    layer.forward = partial(_forward, layer.forward, end_R)
    try:
        yield
    finally:
        if replaced is None:
            del layer.forward
        else:
            layer.forward = replaced


def _forward(forward: Callable[..., Any], end_R: Tensor, states_1TD: Tensor, **named: Any) -> Any:
    """Call the forward method of a layer for the tokens `end_R`, with keys and values of all tokens."""
    tokens = states_1TD.shape[1]
    cache = _LastLayerCache()
    # The first call ends when the cache has the keys and values, which the second call reads.
    with suppress(_KeysReadyError):
        forward(states_1TD, **named | {"past_key_values": cache})

    def last(tensor: Tensor) -> Tensor:
        """Select the last tokens of a tensor with an entry for every token, such as the position embeddings."""
        return tensor.index_select(1, end_R) if tensor.ndim > 1 and tensor.shape[1] == tokens else tensor

    return forward(last(states_1TD), **tree_map_only(Tensor, last, named) | {"past_key_values": cache})
