"""The module that maps a micro-batch of texts to rows (`EmbeddingModel`), and its heads, which decide what a row is.

Legend: B texts of a micro-batch, T tokens, R texts of a micro-batch in any layout, D dimensions. `mask_BT` is 1 at real
tokens and 0 at padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from angle_llm.model.layers.activation_checkpointing import checkpoint_layers, forward_lock
from angle_llm.model.layers.depth import LayerStack, first_layers
from angle_llm.model.layout.attention import Kernel, sequence_output
from angle_llm.model.layout.token_sequence import TokenSequence
from angle_llm.model.pooling import embedding_size, pooling_named


class ModelInput(NamedTuple):
    """The tensors of a micro-batch: padded texts with a mask, or texts in one sequence."""

    ids_BT: Tensor
    """Token ids: (B, T) of padded texts, or (1, T) of a sequence."""
    mask_BT: Tensor | None
    """1 for tokens and 0 for padding; None for a sequence."""
    sequence: TokenSequence | None
    """Positions of the texts in the sequence; None for padded texts."""


class Head(nn.Module):
    """Decides what a row of an `EmbeddingModel` is in training mode: with this head, the embedding of the text."""

    passes: ClassVar[int] = 1
    """Number of forward passes of a micro-batch, for counts of operations."""
    unit: ClassVar[str] = "pairs"
    """What the speed of training is counted in: `pairs` or `texts`."""
    logits_per_token: float = 0.0
    """Expected number of logits per token, for forecasts of memory."""

    def outputs(self, model: EmbeddingModel, batch: ModelInput) -> list[Tensor]:
        """Return pooled states (R, D), from which `rows` makes the rows; autocast applies."""
        return [model.pooled(batch)]

    def rows(self, model: EmbeddingModel, outputs: list[Tensor]) -> Tensor:
        """Return a row for each text, (R, D for each entry of `outputs`): the embeddings side by side, in float32."""
        rows = [model.embeddings(states_RD) for states_RD in outputs]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def input_ids(self, ids: Sequence[Sequence[int]], epoch: int) -> list[list[int]]:
        """Return what the model reads in place of the token ids of training texts in an epoch: here, the same ids."""
        return [list(text) for text in ids]

    def without_weights(self) -> Head:
        """Return the head for a forecast of memory, with which the model runs on the meta device."""
        return Head()


_EMBEDDING = Head()
"""The head in evaluation mode."""


class DepthsHead(Head):
    """A row has several embeddings of the text side by side: after all layers, then after the first m, for each m.

    An adapter of the backbone must be added before, because it may replace the output projection of an OPT model.
    """

    def __init__(self, model: EmbeddingModel, layers: Sequence[int]) -> None:
        """Find the layers of the backbone. `layers` has the numbers of layers m after which embeddings are computed, too.

        Raises:
            ValueError: if a number is repeated or not in 1 .. number of layers - 1; if the pooling uses the first layer; or
                if states between the layers of the backbone are not available.
        """
        super().__init__()
        pooling = model.options.pooling
        if pooling_named(pooling).averages_first_layer:
            raise ValueError(f"layers: pooling {pooling!r} uses the first layer in every row. Choose another pooling.")
        stack = LayerStack.of(model.backbone)
        last = len(stack.layers)
        if len(set(layers)) < len(layers) or not all(1 <= layer < last for layer in layers):
            raise ValueError(
                f"layers: expected different numbers in 1 .. {last - 1} (the last of {last} layers is always read), got "
                f"{list(layers)}."
            )
        if next(model.backbone.parameters()).device.type != "meta":  # the check computes states
            stack.check(model.backbone)
        self.layers = tuple(layers)
        self._stack = stack

    def outputs(self, model: EmbeddingModel, batch: ModelInput) -> list[Tensor]:
        stack = self._stack

        def pooled(states_BTD: Tensor) -> Tensor:
            # With last-token pooling, the final norm runs on R rows instead of B × T.
            if model.pools_last:
                return stack.finish(model.pool(states_BTD, batch))
            return model.pool(stack.finish(states_BTD), batch)

        with stack.states_after(self.layers, pooled) as states_of_layer:
            states_RD = model.pooled(batch)
        return [states_RD, *(states_of_layer[layer] for layer in self.layers)]


@dataclass(frozen=True)
class EmbeddingOptions:
    """How an `EmbeddingModel` computes embeddings from the states of its backbone."""

    pooling: str
    """Name of the pooling."""
    causal: bool
    """Whether a token attends to earlier tokens only."""
    dimensions: int | None = None
    """Number of first dimensions that an embedding keeps; None: all."""
    normalize: bool = False
    """Whether embeddings are scaled to length 1."""
    cut_to: int | None = None
    """Number of layers if the last layers were removed, else None."""
    autocasts: bool = False
    """Whether the forward pass runs under autocast to bfloat16, in training mode."""
    attention_kernel: Kernel = None
    """Attention kernel for texts in one sequence, `gathered` or `flex` (see `attention`); None: the default of the
    device."""


class EmbeddingModel(nn.Module):
    """Backbone, pooling and optional Dense modules; returns a float32 embedding per text of a micro-batch.

    In training mode, `head` decides what a row is. The texts of a micro-batch are padded, or in one sequence (see
    `micro_batches`). A causal backbone gets no mask for padded texts. Its tokens do not attend to padding on the right,
    and attention without a mask can use a faster kernel.
    """

    def __init__(
        self,
        backbone: nn.Module,
        options: EmbeddingOptions,
        dense: nn.Sequential | None = None,
        head: Head | None = None,
    ) -> None:
        """Set the parts of the model.

        Args:
            dense: Dense modules that are applied to the pooled state; None: no Dense modules.
            head: None: a row is an embedding.
        """
        super().__init__()
        self.backbone = backbone
        self.options = options
        self.dense = nn.Sequential() if dense is None else dense
        self.head = head or Head()
        self.train(backbone.training)

    def changed(self, head: Head | None = None, **options: Any) -> EmbeddingModel:
        """Return a model with another head and other `EmbeddingOptions` that shares all weights; None keeps the head."""
        return EmbeddingModel(self.backbone, replace(self.options, **options), self.dense, head or self.head)

    @property
    def width(self) -> int:
        """Number of dimensions of an embedding, D."""
        return self.options.dimensions or embedding_size(self.backbone, self.dense)

    @property
    def pools_last(self) -> bool:
        """Whether the embedding is the state of the last token, and the tokens of a text are not needed for it."""
        return self.options.causal and self.options.pooling == "last"

    def checkpoint_activations(self, enabled: bool) -> None:
        """Enable or disable activation checkpointing, which saves memory in training but computes layers twice.

        Layers save only their inputs for the backward pass. Gradients are the same.

        Raises:
            ValueError: if the layers of the backbone cannot be checkpointed.
        """
        checkpoint_layers(self.backbone, enabled=enabled)

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
        kept = self.options.dimensions if dimensions in (None, self.width) else dimensions
        options = replace(self.options, dimensions=kept, cut_to=layers or self.options.cut_to)
        return EmbeddingModel(backbone, options, self.dense)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None, sequence: TokenSequence | None = None) -> Tensor:
        """Return a row per text: (B, D) for B right-padded texts, or (R, D) for R texts in one sequence.

        The arguments are the fields of `ModelInput`. In training mode, the head defines the rows, and D can be the size of
        several embeddings; otherwise a row is an embedding.
        """
        head = self.head if self.training else _EMBEDDING
        autocasts = self.options.autocasts and self.training
        # With the cache, a forward pass without gradients would keep a copy of every weight.
        autocast: AbstractContextManager[Any] = (
            torch.autocast(ids_BT.device.type, torch.bfloat16, cache_enabled=False) if autocasts else nullcontext()
        )
        with forward_lock(self.backbone):
            with autocast:
                outputs = head.outputs(self, ModelInput(ids_BT, mask_BT, sequence))
            return head.rows(self, outputs)

    def pooled(self, batch: ModelInput) -> Tensor:
        """Run the backbone on a micro-batch and return the pooled states, (R, D)."""
        averages = pooling_named(self.options.pooling).averages_first_layer
        output = self.states(batch, all_layers=averages)
        states_BTD = output.last_hidden_state
        if averages:
            states_BTD = (output.hidden_states[1] + states_BTD) / 2  # hidden_states[0]: token embeddings
        return self.pool(states_BTD, batch)

    def states(self, batch: ModelInput, *, all_layers: bool = False) -> Any:
        """Run the backbone on a micro-batch and return its output; with `all_layers`, also the states of every layer."""
        if batch.sequence is not None:
            kernel = self.options.attention_kernel
            return sequence_output(self.backbone, batch.ids_BT, batch.sequence, kernel, all_states=all_layers)
        options = {"use_cache": False} if self.options.causal else {"attention_mask": batch.mask_BT}
        return self.backbone(input_ids=batch.ids_BT, output_hidden_states=all_layers, **options)

    def pool(self, states_BTD: Tensor, batch: ModelInput) -> Tensor:
        """Return the pooled states (R, D) of a micro-batch from the states of its tokens."""
        function = pooling_named(self.options.pooling).function
        sequence = batch.sequence
        if sequence is None:
            assert batch.mask_BT is not None, "a micro-batch has a mask or a sequence"
            return function(states_BTD, batch.mask_BT)
        if self.pools_last:
            return states_BTD.flatten(0, 1)[sequence.end_R]
        return torch.cat([function(*padded) for padded in sequence.padded_states(states_BTD[0])])

    def embeddings(self, states_RD: Tensor) -> Tensor:
        """Return embeddings (R, D), in float32 at least, from pooled states: Dense modules, truncation, length 1."""
        rows_RD: Tensor = self.dense(states_RD.to(torch.promote_types(states_RD.dtype, torch.float32)))
        if self.options.dimensions is not None:
            rows_RD = rows_RD[:, : self.options.dimensions]
        return functional.normalize(rows_RD, dim=1) if self.options.normalize else rows_RD
