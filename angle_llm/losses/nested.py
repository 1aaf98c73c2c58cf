"""Objectives made of others: one objective at several depths and widths, and several objectives on one batch.

Shapes: N rows (unique texts), D columns of one vector, S vectors side by side in a row, one per depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angle_llm.losses.angle import AngleObjective, ObjectiveValue
from angle_llm.losses.relation import Relation, on_device

Objective = Callable[[Tensor, Relation], ObjectiveValue]
"""(embeddings, relation) -> value: what training expects of an objective."""


@dataclass(frozen=True)
class NestedObjective:
    """L = Σ w_mk · L_plain(E_mk): E_mk are the first k columns of the vectors after m layers; the weights sum to 1.

    Widths are the full width D and each of `dimensions`: Matryoshka representation learning (arXiv 2205.13147). Depths
    are all layers and each of `layers`; every depth is combined with every width: 2D Matryoshka, espresso sentence
    embeddings (arXiv 2402.14776), without its additional terms that align shallow vectors with the deep one. w_mk is
    the product of the weight of m and the weight of k. A term of weight 0 is not computed.

    A row of the embeddings (N, S·D) holds the vector after all layers, then one vector for each of `layers`, as
    `EmbeddingModel.read_layers` makes it. An angle term reads the halves of the k columns, so every k must be even.

    The parts of its value are those of the plain objective on the full vector after all layers, under their names, and
    the loss of every other term: `dim64`, `layer12`, `layer12_dim64`.

    Raises:
        ValueError: for an odd width with an angle weight.
    """

    plain: AngleObjective
    dimensions: Sequence[int] = ()
    layers: Sequence[int] = ()
    dimension_weights: Sequence[float] = ()
    """Relative weights of `dimensions`, and last of the full width; empty: equal."""
    layer_weights: Sequence[float] = ()
    """Relative weights of `layers`, and last of all layers; empty: equal."""

    def __post_init__(self) -> None:
        odd = [width for width in self.dimensions if width % 2]
        if odd and self.plain.angle_weight:
            raise ValueError(
                f"nested.dimensions: expected even numbers, as an angle reads two halves of the columns; got {odd[0]}. "
                "Use even numbers, or set objective.angle_weight to 0."
            )

    def check_width(self, columns: int) -> None:
        """Raise `ValueError` if a vector of so many columns is too narrow for the widths."""
        too_wide = [width for width in self.dimensions if width >= columns]
        if too_wide:
            raise ValueError(
                f"nested.dimensions: expected numbers below {columns}, the full width, which is always included; "
                f"got {too_wide[0]}."
            )

    def weight(self, layer: int | None, width: int | None) -> float:
        """Return w_mk for a number of layers and of columns (None: all)."""
        weight = 1.0
        for values, weights, value in (
            (self.layers, self.layer_weights, layer),
            (self.dimensions, self.dimension_weights, width),
        ):
            weights = weights or [1.0] * (len(values) + 1)
            weight *= weights[len(values) if value is None else values.index(value)] / sum(weights)
        return weight

    def __call__(self, embeddings_NC: Tensor, relation: Relation) -> ObjectiveValue:
        """Return the loss of a batch, given rows (N, S·D).

        Raises:
            ValueError: for rows that are not S vectors, or as `AngleObjective` does.
        """
        depths = [None, *self.layers]
        columns = embeddings_NC.shape[-1] // len(depths)
        if embeddings_NC.ndim != 2 or columns * len(depths) != embeddings_NC.shape[1]:
            raise ValueError(
                f"embeddings: expected a matrix (N, {len(depths)}·D), the vectors of all and of {len(depths) - 1} inner "
                f"layers side by side; got shape {tuple(embeddings_NC.shape)}. Call read_layers on the model first."
            )
        self.check_width(columns)
        parts: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for place, depth in enumerate(depths):
            for width in (None, *self.dimensions):
                weight = self.weight(depth, width)
                if not weight:
                    continue
                start = place * columns
                value = self.plain(embeddings_NC[:, start : start + (width or columns)], relation)
                losses.append(weight * value.loss)
                names = ([f"layer{depth}"] if depth else []) + ([f"dim{width}"] if width else [])
                parts |= {"_".join(names): value.loss.detach()} if names else value.parts
        return ObjectiveValue(torch.stack(losses).sum(), parts)


class Part(NamedTuple):
    """Some pairs of a batch, and their objective."""

    objective: Objective
    share: float
    """Its weight in the sum; the shares of all parts of a batch sum to 1."""
    pairs: Tensor
    """(P_part,) int64: positions of its pairs in the relation."""


@dataclass(frozen=True)
class MixedObjective:
    """L = Σ_g share_g · L_g: objective g gets only the pairs of its part and their rows.

    So texts of different parts are not negatives of one another, and are not ranked against one another. A text in
    pairs of several parts is a row of each. A part of the value is the mean over the objectives that have it, by share.
    """

    parts: Sequence[Part]

    def __call__(self, embeddings_ND: Tensor, relation: Relation) -> ObjectiveValue:
        """Return the loss of a batch whose pairs are those of all parts together."""
        losses: list[Tensor] = []
        weighted: dict[str, Tensor] = {}
        shares: dict[str, float] = {}
        for objective, share, pairs in self.parts:
            rows, own = relation.subset(pairs)
            value = objective(embeddings_ND[on_device(rows, embeddings_ND.device)], own)
            losses.append(share * value.loss)
            for name, part in value.parts.items():
                weighted[name] = weighted.get(name, 0) + share * part
                shares[name] = shares.get(name, 0.0) + share
        return ObjectiveValue(torch.stack(losses).sum(), {name: part / shares[name] for name, part in weighted.items()})
