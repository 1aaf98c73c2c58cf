"""Several objectives on one batch, each on the pairs that are its own.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angle_llm.losses.angle import ObjectiveValue
from angle_llm.losses.nested import Objective


class Part(NamedTuple):
    """Pairs of a batch, and the objective that they are for."""

    objective: Objective
    share: float
    """Its weight in the sum; of all parts of a batch they add up to 1."""
    pairs: Tensor
    """(P_part,) int64: which of the batch's pairs."""


@dataclass(frozen=True)
class JointObjective:
    """L = Σ_g share_g · L_g: objective g sees the pairs of its part and the rows they name, and nothing else of the batch.

    So texts of different parts are no negatives of one another and are not ranked against one another. A text that pairs of
    several parts name is a row of each. The parts of its value are the means over objectives that have them, by share.
    """

    parts: Sequence[Part]

    def __call__(self, embeddings_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> ObjectiveValue:
        """The loss of a batch whose pairs are those of the parts together; otherwise as ``AngleObjective`` takes it."""
        losses: list[Tensor] = []
        weighted: dict[str, Tensor] = {}
        shares: dict[str, float] = {}
        for objective, share, pairs in self.parts:
            rows, numbers = torch.unique(torch.cat([left_P[pairs], right_P[pairs]]), return_inverse=True)
            left, right = numbers.chunk(2)
            value = objective(embeddings_ND[rows.to(embeddings_ND.device)], left, right, score_P[pairs])
            losses.append(share * value.loss)
            for name, part in value.parts.items():
                weighted[name] = weighted.get(name, 0) + share * part
                shares[name] = shares.get(name, 0.0) + share
        return ObjectiveValue(torch.stack(losses).sum(), {name: part / shares[name] for name, part in weighted.items()})
