"""Combined objectives: an objective at several depths and widths, and several objectives on parts of a batch.

Shapes: N rows (unique texts), D columns of a vector, S vectors side by side in a row, one per depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.relation import Relation
from angle_llm.losses.terms import Objective, ObjectiveValue


@dataclass(frozen=True)
class NestedObjective(Objective):
    """Mean of a loss over truncated embeddings (Matryoshka) and embeddings after fewer layers (2D Matryoshka).

        L = mean of L_plain(E_mk),   E_mk = the first k columns of the vectors after m layers

    Widths k are the full width D and `dimensions`: Matryoshka representation learning (arXiv 2205.13147). Depths m are
    all layers and `layers`. Every depth is combined with every width, as in espresso sentence embeddings (2D
    Matryoshka, arXiv 2402.14776), but without the terms that align shallow vectors with deep vectors.

    A row of the embeddings (N, S·D) contains the vector after all layers, then a vector for each number in `layers`, as
    `DepthsHead` returns it. An angle term reads the two halves of the k columns, so k must be even.

    `ObjectiveValue.parts` contains the loss terms on the full embeddings, and the loss of every truncation under names
    such as `dim64`, `layer12` and `layer12_dim64`.
    """

    plain: Objective
    """Loss that is computed at every number of dimensions and layers."""
    dimensions: Sequence[int] = ()
    """Numbers of leading embedding dimensions at which the loss is computed, besides all dimensions."""
    layers: Sequence[int] = ()
    """Numbers of leading layers after which the loss is computed, besides all layers."""

    @property
    def embeddings_per_text(self) -> int:
        return 1 + len(self.layers)

    @property
    def needs_pairs(self) -> bool:
        return self.plain.needs_pairs

    @property
    def needs(self) -> frozenset[str]:
        return self.plain.needs

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return mean cosines of the embeddings after all layers."""
        return self.plain.cosines(embeddings[:, : embeddings.shape[1] // self.embeddings_per_text], relation)

    def check_width(self, columns: int) -> None:
        """Raise `ValueError` if a number in `dimensions` is not below `columns`, the embedding size of the model."""
        too_wide = [width for width in self.dimensions if width >= columns]
        if too_wide:
            raise ValueError(
                f"nested.dimensions: expected numbers below {columns}, the full width, which is always included; "
                f"got {too_wide[0]}."
            )

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings (N, S·D) and scored pairs of their rows.

        A row contains S = 1 + len(layers) embeddings of a text side by side: after all layers, then after `layers`.

        Raises:
            ValueError: if the number of columns is not a multiple of S, and as in the plain objective.
        """
        depths = [None, *self.layers]
        columns = embeddings.shape[1] // len(depths)
        self.check_width(columns)
        weight = (1 / len(depths)) * (1 / (len(self.dimensions) + 1))
        parts: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for start, depth in zip(range(0, embeddings.shape[1], columns), depths, strict=True):
            for width in (None, *self.dimensions):
                value = self.plain(embeddings[:, start : start + (width or columns)], relation)
                losses.append(weight * value.loss)
                names = [f"layer{depth}"] if depth else []
                names += [f"dim{width}"] if width else []
                # The whole vector after all layers adds the terms of the plain loss.
                parts |= {"_".join(names): value.loss.detach()} if names else value.parts
        return ObjectiveValue(torch.stack(losses).sum(), parts)


class Part(NamedTuple):
    """A loss function, its weight, and the pairs of a batch to which the loss applies."""

    objective: Objective
    share: float
    """Weight of this loss in the loss of the batch; the weights of all losses of a batch sum to 1."""
    pairs: Tensor
    """(n,) int64: indices, among the P scored pairs of the batch, of the pairs to which the loss applies."""


@dataclass(frozen=True)
class MixedObjective(Objective):
    """Weighted sum of different losses on different pairs of a batch: L = Σ_g share_g · L_g.

    Loss g (a `Part`) gets only its pairs and the embeddings of these pairs. So a text is never a negative of a text
    that occurs only in pairs of another loss, and pairs of different losses are not ranked against each other. A text
    may occur in several losses. A loss term in the result is the mean over all losses with this term, weighted by
    share.
    """

    parts: Sequence[Part]
    """The losses, whose rows have the same number of embeddings. What they need is checked per dataset."""

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return mean cosines of all texts of the batch."""
        return self.parts[0].objective.cosines(embeddings, relation)

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings and scored pairs of their rows.

        Every pair must belong to an entry of `parts`.
        """
        losses: list[Tensor] = []
        weighted: dict[str, Tensor] = {}
        shares: dict[str, float] = {}
        for objective, share, pairs in self.parts:
            rows, of_part = relation.subset(pairs)
            value = objective(embeddings[on_device(rows, embeddings.device)], of_part)
            losses.append(share * value.loss)
            for name, part in value.parts.items():
                weighted[name] = weighted.get(name, 0) + share * part
                shares[name] = shares.get(name, 0.0) + share
        return ObjectiveValue(torch.stack(losses).sum(), {name: part / shares[name] for name, part in weighted.items()})
