"""Pooling functions, and the module that maps a micro-batch of texts to an embedding per text (`EmbeddingModel`).

Poolings have the names of the AnglE paper (arXiv 2309.12871, table 4), if they are in the paper.

Legend: B texts of a micro-batch, T tokens, R pooled positions (texts in one sequence), D dimensions. `mask_BT` is 1 at
real tokens and 0 at padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from angle_llm.model.layers.activation_checkpointing import checkpoint_layers, forward_lock
from angle_llm.model.layers.depth import LayerStack, first_layers
from angle_llm.model.layout.attention import Kernel, sequence_output
from angle_llm.model.layout.token_sequence import TokenSequence
from angle_llm.model.masked_tokens import TokenPrediction
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


POOLINGS: dict[str, Pooling] = {
    "last": Pooling(last_token),  # the last token, whereas `last-…` is the last layer in names of the paper
    "cls": Pooling(first_token),
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


def checked_pooling(name: str | None, backbone: nn.Module, *, causal: bool) -> str:
    """Check that a pooling is possible for a backbone, and return the name of the pooling.

    `name` None selects `last` for a causal backbone, and `mean` for a bidirectional backbone.

    Raises:
        ValueError: for an unknown pooling, or a pooling that is not possible for the backbone.
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


def embedding_size(backbone: nn.Module, dense: nn.Sequential) -> int:
    """Return the output size of the last Dense module, or of the pooled state without Dense modules."""
    return int(dense[-1].linear.out_features) if len(dense) else state_sizes(backbone)[0]  # type: ignore[union-attr,arg-type]


class EmbeddingModel(nn.Module):
    """Backbone, pooling and optional Dense modules; returns a float32 embedding per text of a micro-batch.

    The texts of a micro-batch are padded, or in one sequence (see `micro_batches`). A causal backbone gets no mask for
    padded texts. Its tokens do not attend to padding on the right, and attention without a mask can use a faster kernel.

    After `read_layers`, a row contains several embeddings side by side.

    Attributes:
        dense: Dense modules that are applied to the pooled state; can be empty.
        dimensions: number of first dimensions that an embedding keeps; None: all.
        normalize: whether embeddings are scaled to length 1.
        autocasts: whether the forward pass runs under autocast to bfloat16.
        cut_to: number of layers if the last layers were removed, else None.
        attention_kernel: attention kernel for texts in one sequence, `gathered` or `flex` (see `attention`); None: the
            default of the device.
        inner_layers: numbers of the layers, from 1, after which a row also contains an embedding.
        two_views: whether a row has two embeddings of the text, with two dropout masks (in training mode only).
        prediction: output layer for MNTP; in training mode, a row is then `TokenPrediction.sums`, not an embedding.
    """

    def __init__(
        self,
        backbone: nn.Module,
        pooling: str,
        causal: bool,
        dimensions: int | None = None,
        normalize: bool = False,
        dense: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dense = nn.Sequential() if dense is None else dense
        self.pooling = pooling
        self.causal = causal
        self.dimensions = dimensions
        self.normalize = normalize
        self.autocasts = False
        self.cut_to: int | None = None
        self.attention_kernel: Kernel = None
        self.inner_layers: tuple[int, ...] = ()
        self._stack: LayerStack | None = None
        self.two_views = False
        self.prediction: TokenPrediction | None = None
        self.train(backbone.training)

    @property
    def width(self) -> int:
        """Number of dimensions of an embedding, D."""
        return self.dimensions or embedding_size(self.backbone, self.dense)

    def read_layers(self, layers: Sequence[int]) -> None:
        """Make the forward pass also return embeddings after the first m layers, for every number m in `layers`.

        A row then contains `1 + len(layers)` embeddings side by side. The first embedding is computed by all layers.

        Raises:
            ValueError: if a number is repeated or not in 1 .. number of layers - 1. Also if states between the layers of
                the backbone are not available.
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

    def checkpoint_activations(self, enabled: bool) -> None:
        """Enable or disable activation checkpointing, which saves memory in training but computes layers twice.

        Layers save only their inputs for the backward pass. Gradients are the same.

        Raises:
            ValueError: if the layers of the backbone cannot be checkpointed.
        """
        checkpoint_layers(self.backbone, enabled=enabled)

    @contextmanager
    def reading(self, layers: Sequence[int]) -> Iterator[None]:
        """Context manager for inference: rows also contain embeddings after the given layers, and autocast is off.

        `layers` as in `read_layers`; the settings are restored at the end.

        Forward passes in other threads wait until the context exits.
        """
        with forward_lock(self.backbone):
            before = self.inner_layers, self._stack, self.autocasts
            self.read_layers(layers)
            self.autocasts = False
            try:
                yield
            finally:
                self.inner_layers, self._stack, self.autocasts = before

    def truncated(self, dimensions: int | None, layers: int | None) -> EmbeddingModel:
        """Return a model that uses only the first `dimensions` and the first `layers`, and shares the weights.

        None keeps all dimensions or all layers.

        Raises:
            ValueError: if the model has fewer dimensions or layers, or if the first layers compute other states without the
                last layers.
        """
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise ValueError(f"dimensions: expected 1 .. {self.width}, the length of a vector; got {dimensions}.")
        if layers is not None and layers == len(LayerStack.of(self.backbone).layers):
            layers = None
        backbone = self.backbone if layers is None else first_layers(self.backbone, layers)
        dimensions = self.dimensions if dimensions in (None, self.width) else dimensions
        short = EmbeddingModel(backbone, self.pooling, self.causal, dimensions, self.normalize, self.dense)
        short.cut_to = layers or self.cut_to
        short.attention_kernel = self.attention_kernel
        return short

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None, sequence: TokenSequence | None = None) -> Tensor:
        """Return an embedding per text: (B, D) for B right-padded texts, or (R, D) for R texts in one sequence.

        After `read_layers([m, …])`, a row also contains the embeddings after the first m layers, side by side.

        Args:
            ids_BT: token ids (B, T) of padded texts, or (1, T) of a sequence.
            mask_BT: 1 for tokens and 0 for padding, for padded texts.
            sequence: place of each text in the sequence.
        """
        with forward_lock(self.backbone):
            with self._half(ids_BT.device):
                if self.prediction is not None and self.training:
                    return self._token_losses(self.prediction, ids_BT, mask_BT, sequence)
                rows = self._rows(ids_BT, mask_BT, sequence)
                if self.two_views and self.training:
                    rows += self._rows(ids_BT, mask_BT, sequence)
            rows = [part_RD.to(torch.promote_types(part_RD.dtype, torch.float32)) for part_RD in rows]
            rows = [self.dense(part_RD) for part_RD in rows]
            rows = rows if self.dimensions is None else [part_RD[:, : self.dimensions] for part_RD in rows]
            rows = [functional.normalize(part_RD, dim=1) for part_RD in rows] if self.normalize else rows
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def _token_losses(
        self, prediction: TokenPrediction, code_BT: Tensor, mask_BT: Tensor | None, sequence: TokenSequence | None
    ) -> Tensor:
        """Return the row of `TokenPrediction.sums` for each text, (R, 3), from the codes of its tokens."""
        ids_BT, label_BT = prediction.decode(code_BT)
        states_BTD = self._output(ids_BT, mask_BT, sequence).last_hidden_state
        if sequence is None:
            text_BT = torch.arange(len(ids_BT), device=ids_BT.device)[:, None].expand_as(ids_BT)
            return prediction.sums(states_BTD, label_BT, text_BT, len(ids_BT))
        lengths_R = torch.from_numpy(sequence.lengths_R).to(ids_BT.device)
        text_T = torch.arange(len(lengths_R), device=ids_BT.device).repeat_interleave(lengths_R)
        return prediction.sums(states_BTD, label_BT, text_T[None], len(lengths_R))

    def _half(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context with autocast to bfloat16 if `autocasts` is set, else an empty context."""
        # With the cache, a forward pass without gradients would keep a copy of every weight.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.autocasts else nullcontext()

    def _rows(self, ids_BT: Tensor, mask_BT: Tensor | None, sequence: TokenSequence | None) -> list[Tensor]:
        """Return a list of pooled states (R, D): after all layers, then after every layer in `inner_layers`."""
        pooling, at_end = pooling_named(self.pooling), self.causal and self.pooling == "last"

        def pool(states_BTD: Tensor) -> Tensor:
            if sequence is None:
                assert mask_BT is not None, "a micro-batch has a mask or a sequence"
                return last_token(states_BTD, mask_BT) if at_end else pooling.function(states_BTD, mask_BT)
            if at_end:
                return states_BTD.flatten(0, 1)[sequence.end_R]
            return torch.cat([pooling.function(*padded) for padded in sequence.padded_states(states_BTD[0])])

        def finished(stack: LayerStack, states_BTD: Tensor) -> Tensor:
            # With last-token pooling, the final norm runs on R rows instead of B × T.
            return stack.finish(pool(states_BTD)) if at_end else pool(stack.finish(states_BTD))

        with self._inner(finished) as inner:
            output = self._output(ids_BT, mask_BT, sequence, all_states=pooling.averages_first_layer)
        states_BTD = output.last_hidden_state
        if pooling.averages_first_layer:
            states_BTD = (output.hidden_states[1] + states_BTD) / 2
        return [pool(states_BTD), *(inner[layer] for layer in self.inner_layers)]

    def _output(
        self, ids_BT: Tensor, mask_BT: Tensor | None, sequence: TokenSequence | None, *, all_states: bool = False
    ) -> Any:
        """Run the backbone on a micro-batch and return its output; arguments as in `forward`.

        `all_states`: also return the states of every layer.
        """
        if sequence is not None:
            return sequence_output(self.backbone, ids_BT, sequence, self.attention_kernel, all_states=all_states)
        options = {"use_cache": False} if self.causal else {"attention_mask": mask_BT}
        return self.backbone(input_ids=ids_BT, output_hidden_states=all_states, **options)

    def _inner(self, row: Callable[[LayerStack, Tensor], Tensor]) -> AbstractContextManager[dict[int, Tensor]]:
        """Record pooled states after the layers `inner_layers` in a forward pass inside the returned context.

        Yields a dictionary from layer number to pooled states (R, D). `row` computes them from the `LayerStack` of the
        backbone and the output (B, T, D) of the layer.
        """
        stack = self._stack
        return nullcontext({}) if stack is None else stack.states_after(self.inner_layers, partial(row, stack))
