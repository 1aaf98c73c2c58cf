"""Measure which fraction of the gradient of each loss term goes to pairs with a given cosine.

AnglE motivates its angle term by saturation: near a cosine of ±1 the derivative of the cosine by the angle, sin θ, is
near 0, so these pairs get little gradient (arXiv 2309.12871, section 1).

For batches of scored pairs, the gradient of each loss term by the embeddings is computed, with weight 1 and without the
other terms. The gradient of a row x is measured as ‖x‖·‖∂L/∂x‖, which does not depend on the length of x, and divided
equally among the pairs that contain x. The gradient of a pair is the sum over its two rows. Gradients are summed by
ranges of the cosine.

Dimensions: N rows, D columns, P pairs of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import Example
from angle_llm.losses import AngleObjective

EDGES = (-1.0, -0.9, -0.5, 0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Limits of the ranges of the cosine."""
SATURATED = 0.9
"""Smallest |cosine| of a saturated pair; there, the derivative sin θ is below 0.44."""


def _alone(**term: Any) -> AngleObjective:
    """Return an objective with a single loss term, such as `cosine_weight=1`."""
    return AngleObjective(**{"in_batch_weight": 0.0, **term})


TERMS = {
    "cosine": _alone(cosine_weight=1.0),
    "in_batch": _alone(in_batch_weight=1.0),
    "angle (phase)": _alone(angle_weight=1.0),
    "angle (reference)": _alone(angle_weight=1.0, angle_form="reference", angle_temperature=1.0),
    "regression": _alone(regression_weight=1.0),
}


def saturation(rows_of: dict[str, Tensor], examples: Sequence[Example], *, batch_size: int = 64) -> dict[str, Any]:
    """Return the fraction of the pairs, and of the gradient of each loss term, by range of the cosine.

    `rows_of` maps every text of the examples to its embedding (D,). The result contains:

    * `edges`: limits of the ranges of the cosine
    * `pairs`: fraction of the pairs in each range
    * `terms`: for each loss term, fraction of its gradient in each range
    * `saturated`: fraction of the pairs, and of the gradient of each loss term, at a |cosine| of 0.9 or more

    Raises:
        ValueError: if there are no examples, or a loss term has no gradient.
    """
    if not examples:
        raise ValueError("saturation: expected at least one scored pair, got none.")
    cosines: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in ("pairs", *TERMS)}
    for start in range(0, len(examples), batch_size):
        batch = TextBatch.from_examples(examples[start : start + batch_size])
        x_ND = torch.stack([rows_of[text] for text in batch.texts]).double()
        cosines.append(torch.cosine_similarity(x_ND[batch.left], x_ND[batch.right]))
        parts["pairs"].append(torch.ones_like(cosines[-1]))
        for name, objective in TERMS.items():
            parts[name].append(_pair_gradients(objective, x_ND, batch))
    cosine_P = torch.cat(cosines).clamp(-1, 1)
    edges = torch.tensor(EDGES, dtype=cosine_P.dtype)
    zones, saturated = {}, {}
    for name, tensors in parts.items():
        weight_P = torch.cat(tensors)
        if not weight_P.sum() > 0:
            raise ValueError(
                f"saturation: {name} has no gradient on these pairs. Check that their scores are not all equal."
            )
        share_P = weight_P / weight_P.sum()
        zones[name] = torch.histogram(cosine_P, edges, weight=share_P).hist.tolist()
        saturated[name] = float(share_P[cosine_P.abs() >= SATURATED].sum())
    return {"edges": list(EDGES), "pairs": zones.pop("pairs"), "terms": zones, "saturated": saturated}


def _pair_gradients(objective: AngleObjective, x_ND: Tensor, batch: TextBatch) -> Tensor:
    """Return the size (P,) of the gradient of a loss term for each pair of embeddings.

    The size for a row x is ‖x‖·‖∂L/∂x‖, divided equally among the pairs that contain x. A pair gets the sum of its two
    rows.
    """
    leaf_ND = x_ND.detach().clone().requires_grad_()
    loss = objective(leaf_ND, batch.left, batch.right, batch.score).loss
    (gradient_ND,) = torch.autograd.grad(loss, leaf_ND)
    of_row_N = leaf_ND.detach().norm(dim=1) * gradient_ND.norm(dim=1)
    each_N = of_row_N / torch.bincount(torch.cat([batch.left, batch.right]), minlength=len(batch)).clamp(min=1)
    each_P: Tensor = each_N[batch.left] + each_N[batch.right]
    return each_P
