"""Backbone and pooling: map a micro-batch to one row of `E` per text.

Legend: B texts of a micro-batch, T tokens, R pooled positions, D dimensions. `mask_BT` is 1 at real tokens. Poolings
have the names of the paper (arXiv 2309.12871, table 6) where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from angle_llm.model.activation_checkpointing import checkpoint_layers, forward_lock
from angle_llm.model.attention import trie_output
from angle_llm.model.backbone import state_sizes
from angle_llm.model.depth import LayerStack, first_layers
from angle_llm.model.fast_paths import PooledLastLayer
from angle_llm.model.lora import without_adapter
from angle_llm.model.prefix_trie import Trie
from angle_llm.settings_io import unknown_name


def last_position(mask_BT: Tensor) -> Tensor:
    """Return the position of the last real token of each text in the flattened B × T, with padding on either side."""
    texts, tokens = mask_BT.shape
    position_B = (mask_BT * torch.arange(1, tokens + 1, device=mask_BT.device)).argmax(dim=1)
    return position_B + tokens * torch.arange(texts, device=mask_BT.device)


def last_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the state of the last real token."""
    return states_BTD.flatten(0, 1)[last_position(mask_BT)]


def first_token(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the state of the first real token ([CLS] of a BERT)."""
    position_B = mask_BT.long().argmax(dim=1)
    return states_BTD[torch.arange(len(states_BTD), device=states_BTD.device), position_B]


def mean_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over real tokens, prompt and special tokens included."""
    weight_BT1 = mask_BT.unsqueeze(-1).to(states_BTD.dtype)
    # In half precision the sum of a long text overflows (float16), and its length is rounded (bfloat16 counts to 256).
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    return (states_BTD * weight_BT1).sum(dim=1, dtype=wide) / weight_BT1.sum(dim=1, dtype=wide)


def mean_with_root_of_length(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum over real tokens, divided by the square root of their number."""
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    length_B1 = mask_BT.sum(dim=1, keepdim=True, dtype=wide)
    return mean_of_tokens(states_BTD, mask_BT) * length_B1.sqrt()


def weighted_mean_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over real tokens with weights 1, 2, 3, … (SGPT, arXiv 2202.08904), for padding on either side."""
    wide = torch.promote_types(states_BTD.dtype, torch.float32)
    weight_BT1 = (mask_BT.cumsum(dim=1) * mask_BT).unsqueeze(-1).to(wide)
    return (states_BTD * weight_BT1).sum(dim=1) / weight_BT1.sum(dim=1)


def max_of_tokens(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the maximum over real tokens in each dimension."""
    return states_BTD.masked_fill(~mask_BT.bool().unsqueeze(-1), float("-inf")).amax(dim=1)


def cls_and_mean(states_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the average of the first token's state and the mean over tokens."""
    return (first_token(states_BTD, mask_BT) + mean_of_tokens(states_BTD, mask_BT)) / 2


@dataclass(frozen=True)
class Pooling:
    """A function of states and mask, over the last layer or the average of first and last layer."""

    function: Callable[[Tensor, Tensor], Tensor]
    averages_first_layer: bool = False


POOLINGS: dict[str, Pooling] = {
    "last": Pooling(last_token),  # the last token; in the names of the paper, `last-…` is the last layer
    "cls": Pooling(first_token),
    "mean": Pooling(mean_of_tokens),
    "max": Pooling(max_of_tokens),
    "mean_sqrt_len": Pooling(mean_with_root_of_length),
    "weightedmean": Pooling(weighted_mean_of_tokens),
    "last-avg": Pooling(mean_of_tokens),  # the paper's names for `mean` and `max`
    "last-max": Pooling(max_of_tokens),
    "cls-last-avg": Pooling(cls_and_mean),
    "first-last-avg": Pooling(mean_of_tokens, averages_first_layer=True),
}


def pooling_named(name: str) -> Pooling:
    """Return a pooling; an unknown name is a `ValueError` with the nearest one."""
    if name not in POOLINGS:
        raise ValueError(unknown_name("pooling", name, POOLINGS))
    return POOLINGS[name]


def checked_pooling(name: str | None, backbone: nn.Module, *, causal: bool) -> str:
    """Return the name of a pooling; None: last for a causal backbone, mean for a bidirectional one.

    Raises:
        ValueError: for an unknown pooling, or one that is not possible for the backbone.
    """
    name = name or ("last" if causal else "mean")
    last_size, inner_size = state_sizes(backbone)
    if pooling_named(name).averages_first_layer and last_size != inner_size:
        raise ValueError(
            f"pooling {name!r} averages the first and the last layer, but their states have {inner_size} and {last_size} "
            "dimensions. Choose another pooling."
        )
    if causal and name == "cls":
        raise ValueError(
            "pooling 'cls' reads the first token, whose state in a causal model does not depend on the text: all texts would "
            "get the same vector. Use last or mean."
        )
    return name


class EmbeddingModel(nn.Module):
    """Backbone and pooling: maps a micro-batch to float32 rows. Training wraps and calls this module.

    A micro-batch has one of three layouts (see `micro_batches`). A causal backbone gets no mask for padding: on the
    right, padding follows every real token and is invisible to it, and without a mask attention can use its fast
    kernel.

    A row is the first `dimensions` of the pooled state (None: all), of length 1 with `normalize`. After `read_layers`
    it is that, and the same after fewer layers, side by side. After `add_projection` it ends with the projection. With
    `autocasts`, products are computed in bfloat16. `cut_to` is the number of layers if some were dropped, else None.
    `attention_kernel` computes attention of texts in one sequence (see `attention`); None: the usual one of the device.
    """

    def __init__(
        self, backbone: nn.Module, pooling: str, causal: bool, dimensions: int | None = None, normalize: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.causal = causal
        self.dimensions = dimensions
        self.normalize = normalize
        self.autocasts = False
        self.cut_to: int | None = None
        self.attention_kernel: str | None = None
        self.projection: nn.Linear | None = None
        self.inner_layers: tuple[int, ...] = ()
        self._stack: LayerStack | None = None
        self._last_layer = PooledLastLayer.find(without_adapter(backbone)) if causal and pooling == "last" else None
        self.train(backbone.training)

    @property
    def width(self) -> int:
        """D, the length of a vector."""
        return self.dimensions or state_sizes(self.backbone)[0]

    def read_layers(self, layers: Sequence[int]) -> None:
        """Make each row `1 + len(layers)` vectors side by side: after all layers, then after each of these numbers.

        Raises:
            ValueError: for numbers that are not of inner layers, or a backbone without known states between layers.
        """
        stack = None
        if layers:
            if pooling_named(self.pooling).averages_first_layer:
                raise ValueError(
                    f"layers: pooling {self.pooling!r} uses the first layer in every row. Choose another pooling."
                )
            stack = LayerStack.of(self.backbone)
            last = len(stack.layers)
            if len(set(layers)) < len(layers) or not all(1 <= layer < last for layer in layers):
                raise ValueError(
                    f"layers: expected different numbers in 1 .. {last - 1} (the last of {last} layers is always read), got "
                    f"{list(layers)}."
                )
            if next(self.backbone.parameters()).device.type != "meta":
                stack.check(self.backbone)
        self.inner_layers, self._stack = tuple(layers), stack

    def add_projection(self, columns: int, seed: int) -> None:
        """Make each row end with a trained linear map of it: (R, D + columns). `columns` is the width of a teacher
        (`TeacherDistance`).

        The map is trained with the model and not saved with it. Equal seeds give equal weights.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.projection = nn.Linear(self.width, columns)

    def checkpoint_activations(self, enabled: bool) -> None:
        """Keep the inputs of layers only in training, and compute the layers again in the backward pass: the same
        gradient with less memory and about 50 % more operations.

        Raises:
            ValueError: if the layers of the backbone cannot be checkpointed.
        """
        checkpoint_layers(self.backbone, enabled=enabled)

    @contextmanager
    def reading(self, layers: Sequence[int]) -> Iterator[None]:
        """Apply `read_layers` inside this context, in the dtype of the weights and without the projection; other threads
        wait."""
        with forward_lock(self.backbone):
            before = self.inner_layers, self._stack, self.projection, self.autocasts
            self.read_layers(layers)
            self.projection, self.autocasts = None, False
            try:
                yield
            finally:
                self.inner_layers, self._stack, self.projection, self.autocasts = before

    def truncated(self, dimensions: int | None, layers: int | None) -> EmbeddingModel:
        """Return the model of the first dimensions and layers, on the same weights; None keeps all.

        Raises:
            ValueError: if it has fewer, or gives other states without the last layers.
        """
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise ValueError(f"dimensions: expected 1 .. {self.width}, the length of a vector; got {dimensions}.")
        if layers is not None and layers == len(LayerStack.of(self.backbone).layers):
            layers = None
        backbone = self.backbone if layers is None else first_layers(self.backbone, layers)
        dimensions = self.dimensions if dimensions in (None, self.width) else dimensions
        short = EmbeddingModel(backbone, self.pooling, self.causal, dimensions, self.normalize)
        short.cut_to = layers or self.cut_to
        short.attention_kernel = self.attention_kernel
        return short

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None, trie: Trie | None = None) -> Tensor:
        """Return rows (B, D) of right-padded texts, given `mask_BT`; or rows (R, D) of texts in one sequence. After
        `add_projection` rows have more columns."""
        with forward_lock(self.backbone):
            with self._half(ids_BT.device):
                rows = self._rows(ids_BT, mask_BT, trie)
            rows = rows if self.dimensions is None else [part_RD[:, : self.dimensions] for part_RD in rows]
            rows = [part_RD.to(torch.promote_types(part_RD.dtype, torch.float32)) for part_RD in rows]
            rows = [functional.normalize(part_RD, dim=1) for part_RD in rows] if self.normalize else rows
            if self.projection is not None:  # a zero row, which training reports, stays zero
                rows.append(self.projection(rows[0]) * (rows[0] != 0).any(dim=1, keepdim=True))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def _half(self, device: torch.device) -> AbstractContextManager[Any]:
        # Without the cache, a pass without gradients keeps no copy of a weight.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.autocasts else nullcontext()

    def _rows(self, ids_BT: Tensor, mask_BT: Tensor | None, trie: Trie | None) -> list[Tensor]:
        """Return the pooled states after all layers, and after each of `inner_layers`."""
        if trie is not None and self.causal and self.pooling == "last":
            return self._rows_at(trie.end_R, lambda: self._sequence_output(ids_BT, trie).last_hidden_state)
        if trie is not None:
            return self._packed_rows(ids_BT, trie)
        assert mask_BT is not None, "a micro-batch has a mask or a trie"
        if self.causal and self.pooling == "last":
            return self._rows_at(last_position(mask_BT), lambda: self._output(ids_BT).last_hidden_state)
        return self._padded_rows(ids_BT, mask_BT)

    def _rows_at(self, end_R: Tensor, states: Callable[[], Tensor]) -> list[Tensor]:
        """Return the rows from the states at some positions, with the short last layer if there is one."""

        def at_end(states_BTD: Tensor) -> Tensor:
            return states_BTD.flatten(0, 1)[end_R]

        # Positions are picked first: the final norm then runs on R rows, not B × T.
        with self._inner(lambda stack, states_BTD: stack.finish(at_end(states_BTD))) as inner:
            if self._last_layer is None:
                rows_RD = at_end(states())
            else:
                with self._last_layer.pooled(end_R):
                    rows_RD = states()
        return [rows_RD, *(inner[layer] for layer in self.inner_layers)]

    def _padded_rows(self, ids_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
        pooling = pooling_named(self.pooling)
        both = pooling.averages_first_layer
        with self._inner(lambda stack, states_BTD: pooling.function(stack.finish(states_BTD), mask_BT)) as inner:
            mask = None if self.causal else mask_BT
            output = self._output(ids_BT, attention_mask=mask, output_hidden_states=both)
        states_BTD = (output.hidden_states[1] + output.last_hidden_state) / 2 if both else output.last_hidden_state
        return [pooling.function(states_BTD, mask_BT), *(inner[layer] for layer in self.inner_layers)]

    def _packed_rows(self, ids_1T: Tensor, trie: Trie) -> list[Tensor]:
        pooling = pooling_named(self.pooling)
        both = pooling.averages_first_layer

        def rows_of(states_1TD: Tensor) -> Tensor:
            return torch.cat([pooling.function(*padded) for padded in trie.padded_states(states_1TD[0])])

        with self._inner(lambda stack, states_1TD: rows_of(stack.finish(states_1TD))) as inner:
            output = self._sequence_output(ids_1T, trie, all_states=both)
        states_1TD = (output.hidden_states[1] + output.last_hidden_state) / 2 if both else output.last_hidden_state
        return [rows_of(states_1TD), *(inner[layer] for layer in self.inner_layers)]

    def _sequence_output(self, ids_1T: Tensor, trie: Trie, *, all_states: bool = False) -> Any:
        return trie_output(self.backbone, ids_1T, trie, self.attention_kernel, all_states=all_states)

    def _output(self, ids_BT: Tensor, **options: Any) -> Any:
        return self.backbone(input_ids=ids_BT, **options, **({"use_cache": False} if self.causal else {}))

    @contextmanager
    def _inner(self, row: Callable[[LayerStack, Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
        """Yield a dictionary that a forward pass fills with the rows (R, D) of `inner_layers`."""
        stack = self._stack
        if stack is None:
            yield {}
        else:
            with stack.states_after(self.inner_layers, lambda states_BTD: row(stack, states_BTD)) as found:
                yield found
