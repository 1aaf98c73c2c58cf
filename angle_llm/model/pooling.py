"""From a micro-batch to one row of `E` for each of its texts: backbone and pooling.

Legend: B texts of a micro-batch, T tokens, R pooled positions, D dimensions. `mask_BT` is 1 at real tokens. Names of
poolings are the paper's (arXiv 2309.12871, table 6) where it has one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from angle_llm.config import unknown_name
from angle_llm.model.attention import trie_states
from angle_llm.model.depth import LayerStack, first_layers, without_adapter
from angle_llm.model.fast_paths import PooledLastLayer
from angle_llm.model.prefix_trie import Trie


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
        raise ValueError(unknown_name("pooling", name, POOLINGS))
    return POOLINGS[name]


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()

_ONE_LOCK_A_BACKBONE = threading.Lock()


def _one_at_a_time(backbone: nn.Module) -> threading.RLock:
    """A forward puts its trie in force in the backbone; another thread's would meet it there. Other backbones need not wait."""
    with _ONE_LOCK_A_BACKBONE:
        return _LOCKS.setdefault(without_adapter(backbone), threading.RLock())


class EmbeddingModel(nn.Module):
    """Backbone and pooling: a micro-batch in, float32 rows out. This is what training wraps and calls.

    The inputs of a micro-batch come in one of two forms (see `microbatches`). A causal backbone gets no mask for padding:
    on the right it lies after every real token, which cannot see it, and without a mask attention may take its fast path.

    A row is the first `dimensions` of the pooled state (None: all). After `read_layers` it is that and the same of states
    after fewer layers, side by side. `cut_to` tells how many layers were kept if some were dropped (None: none were).
    """

    def __init__(self, backbone: nn.Module, pooling: str, causal: bool, dimensions: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.causal = causal
        self.dimensions = dimensions
        self.cut_to: int | None = None
        self.inner_layers: tuple[int, ...] = ()
        self._depth: LayerStack | None = None
        self._last_layer = PooledLastLayer.find(without_adapter(backbone)) if causal and pooling == "last" else None
        self.train(backbone.training)

    def read_layers(self, layers: Sequence[int]) -> None:
        """From here on a row is `1 + len(layers)` vectors side by side: the usual one, after all layers, and after it those
        after so many layers.

        Raises:
            ValueError: for numbers that are not of inner layers, or a backbone whose inner states are not understood.
        """
        depth = None
        if layers:
            if pooling_named(self.pooling).averages_first_layer:
                raise ValueError(
                    f"pooling {self.pooling!r} has the first layer in every row. Choose another one to read inner layers."
                )
            depth = LayerStack.of(self.backbone)
            last = len(depth.layers)
            if len(set(layers)) < len(layers) or not all(1 <= layer < last for layer in layers):
                raise ValueError(
                    f"layers must be different numbers in 1 .. {last - 1}, as the backbone has {last} layers and the last is "
                    f"always read; got {list(layers)}."
                )
            if next(self.backbone.parameters()).device.type != "meta":
                depth.check(self.backbone)
        self.inner_layers, self._depth = tuple(layers), depth

    @contextmanager
    def reading(self, layers: Sequence[int]) -> Iterator[None]:
        """Within this, rows are of these inner layers; other threads wait."""
        with _one_at_a_time(self.backbone):
            before = self.inner_layers, self._depth
            self.read_layers(layers)
            try:
                yield
            finally:
                self.inner_layers, self._depth = before

    def truncated(self, dimensions: int | None, layers: int | None) -> EmbeddingModel:
        """The model of the first layers and dimensions, on the same weights; None keeps what there is.

        Raises:
            ValueError: if it has not so many layers, or is something else without the rest.
        """
        backbone = self.backbone if layers is None else first_layers(self.backbone, layers)
        short = EmbeddingModel(backbone, self.pooling, self.causal, dimensions or self.dimensions)
        short.cut_to = layers or self.cut_to
        return short

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None, trie: Trie | None = None) -> Tensor:
        """Rows (B, D) of right-padded texts, given `mask_BT`; or rows (R, D) of the texts of a trie."""
        with _one_at_a_time(self.backbone):
            if trie is not None:
                rows = self._rows_at(trie.end_R, lambda: trie_states(self.backbone, ids_BT, trie))
            else:
                assert mask_BT is not None, "a micro-batch is padded texts with a mask, or a trie"
                if self.causal and self.pooling == "last":
                    rows = self._rows_at(last_position(mask_BT), lambda: self._causal_states(ids_BT))
                else:
                    rows = self._padded_rows(ids_BT, mask_BT)
        return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows

    def _rows_at(self, end_R: Tensor, states: Callable[[], Tensor]) -> Tensor:
        """Rows from the states at some positions, by the shorter way if the last layer has it."""

        def at_end(states_BTD: Tensor) -> Tensor:
            return states_BTD.flatten(0, 1)[end_R]

        # Positions are picked first: the final norm then runs on R rows, not B × T.
        with self._inner(lambda depth, states_BTD: depth.finish(at_end(states_BTD))) as inner:
            if self._last_layer is None:
                rows_RD = at_end(states())
            else:
                with self._last_layer.pooled(end_R):
                    rows_RD = states()
        return self._side_by_side(rows_RD, inner)

    def _causal_states(self, ids_BT: Tensor) -> Tensor:
        states_BTD: Tensor = self.backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        return states_BTD

    def _padded_rows(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        pooling = pooling_named(self.pooling)
        with self._inner(lambda depth, states_BTD: pooling.function(depth.finish(states_BTD), mask_BT)) as inner:
            output = self.backbone(
                input_ids=ids_BT,
                attention_mask=None if self.causal else mask_BT,
                output_hidden_states=pooling.averages_first_layer,
                **({"use_cache": False} if self.causal else {}),
            )
        states_BTD = output.last_hidden_state
        if pooling.averages_first_layer:
            states_BTD = (output.hidden_states[1] + states_BTD) / 2
        return self._side_by_side(pooling.function(states_BTD, mask_BT), inner)

    @contextmanager
    def _inner(self, row: Callable[[LayerStack, Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
        """Within this, a forward pass fills the dictionary with the rows (R, D) of the inner layers that are read."""
        depth = self._depth
        if depth is None:
            yield {}
        else:
            with depth.states_after(self.inner_layers, lambda states_BTD: row(depth, states_BTD)) as found:
                yield found

    def _side_by_side(self, rows_RD: Tensor, inner: dict[int, Tensor]) -> Tensor:
        rows = [rows_RD, *(inner[layer] for layer in self.inner_layers)]
        rows = rows if self.dimensions is None else [part_RD[:, : self.dimensions] for part_RD in rows]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
