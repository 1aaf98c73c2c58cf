"""Losses of texts without labels: masked next-token prediction (MNTP), and two views of each text (unsupervised SimCSE).

Shapes: N rows (unique texts), D columns of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from angle_llm.losses.relation import Relation
from angle_llm.losses.terms import Objective, ObjectiveValue


@dataclass(frozen=True)
class TwoViews(Objective):
    """A loss on two embeddings of each text that differ by dropout: unsupervised SimCSE (arXiv 2104.08821, eq. 4).

    A row (N, 2D) has both embeddings of a text side by side. They are a positive pair with score 1 for `plain`, and the
    embeddings of other texts are negatives. The pairs of the dataset are not used.
    """

    plain: Objective
    embeddings_per_text: int = 2

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss. Only `relation.text` is used."""
        return self.plain(*self.views(embeddings, relation))

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return mean cosines of the views; the two views of a text are a positive pair."""
        return self.plain.cosines(*self.views(embeddings, relation))

    def views(self, x_N2D: Tensor, relation: Relation) -> tuple[Tensor, Relation]:
        """Return the embeddings (2N, D), first views first, and their positive pairs."""
        rows = len(x_N2D)
        first_N, text_N = torch.arange(rows, device=relation.left.device), relation.text_numbers(rows)
        views = Relation(first_N, first_N + rows, torch.ones(rows), text=torch.cat((text_N, text_N)))
        return torch.cat(x_N2D.chunk(2, dim=1)), views


@dataclass(frozen=True)
class MaskedTokenLoss(Objective):
    """Mean cross-entropy of the masked tokens of a batch.

    The input (N, 3) is made by `TokenPrediction.sums`: sum of the cross-entropies of a text, number of its predicted
    tokens, and 1, which is not used here.
    """

    embeddings_per_text: int = 0

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss; `relation` is not used. Without a masked token, loss and gradient are 0."""
        loss = embeddings[:, 0].sum() / embeddings[:, 1].detach().sum().clamp(min=1)
        return ObjectiveValue(loss, {"mntp": loss.detach()})

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return nothing: a row has no embedding."""
        return {}
