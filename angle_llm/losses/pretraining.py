"""Losses of texts without labels: masked next-token prediction (MNTP), and two views of each text (unsupervised SimCSE).

Shapes: N rows (unique texts), D columns of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from angle_llm.losses.angle import AngleObjective, ObjectiveValue
from angle_llm.losses.relation import Relation


@dataclass(frozen=True)
class TwoViews:
    """A loss on two embeddings of each text that differ by dropout: unsupervised SimCSE (arXiv 2104.08821, eq. 4).

    A row (N, 2D) has both embeddings of a text side by side. They are a positive pair with score 1 for `plain`, and the
    embeddings of other texts are negatives. The pairs of the dataset are not used.
    """

    vectors: ClassVar[int] = 2
    """Number of embeddings in a row."""
    plain: AngleObjective

    def __call__(self, x_N2D: Tensor, relation: Relation) -> ObjectiveValue:
        """Compute the loss. Only `relation.text` is used."""
        return self.plain(*self.views(x_N2D, relation))

    def views(self, x_N2D: Tensor, relation: Relation) -> tuple[Tensor, Relation]:
        """Return the embeddings (2N, D), first views first, and their positive pairs."""
        first_N = torch.arange(len(x_N2D), device=relation.left.device)
        text_N = first_N if relation.text is None else relation.text
        views = Relation(first_N, first_N + len(first_N), torch.ones(len(first_N)), text=torch.cat((text_N, text_N)))
        return torch.cat(x_N2D.chunk(2, dim=1)), views


@dataclass(frozen=True)
class MaskedTokenLoss:
    """Mean cross-entropy of the masked tokens of a batch.

    The input (N, 3) is made by `TokenPrediction.sums`: sum of the cross-entropies of a text, number of its predicted
    tokens, and 1, which is not used here.
    """

    vectors: ClassVar[int] = 0
    """Number of embeddings in a row: none, so no cosines are logged."""

    def __call__(self, sums_N3: Tensor, relation: Relation) -> ObjectiveValue:
        """Compute the loss; `relation` is not used. Without a masked token, loss and gradient are 0."""
        loss = sums_N3[:, 0].sum() / sums_N3[:, 1].detach().sum().clamp(min=1)
        return ObjectiveValue(loss, {"mntp": loss.detach()})
