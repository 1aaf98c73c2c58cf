"""Mean cosines of the texts of a batch by kind of pair, for the logs of a run.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from angle_llm.device import on_device
from angle_llm.losses.relation import Relation
from angle_llm.objective import POSITIVE_ABOVE


def mean_cosines(x_ND: Tensor, relation: Relation) -> dict[str, Tensor]:
    """Return mean cosines of pairs of texts, as scalars on the device; a kind without a pair is missing.

    positives: scored pairs of two rows with a score above 0.5; negatives: other scored pairs; in_batch: all pairs of two
    rows without a score (a text with two prompts has two rows); margin: positives - in_batch.
    """
    unit_ND = normalize(x_ND.detach(), dim=1)
    left_P, right_P = relation.left, relation.right
    rows = len(x_ND)
    # The pairs of each kind; in_batch are all pairs of the batch without the distinct scored pairs.
    positive_P = relation.score > POSITIVE_ABOVE
    two_rows_P = left_P != right_P
    distinct_P = _first_of_equal(torch.minimum(left_P, right_P) * rows + torch.maximum(left_P, right_P))
    chosen_3P = torch.stack([positive_P, ~positive_P, distinct_P]) & two_rows_P
    # Sums of cosines by kind.
    index_2P = on_device(torch.stack([left_P, right_P]), unit_ND.device)
    cosine_P = (unit_ND[index_2P[0]] * unit_ND[index_2P[1]]).sum(dim=1)
    sums_3 = on_device(chosen_3P.to(unit_ND.dtype), unit_ND.device) @ cosine_P
    positives, negatives, scored = chosen_3P.sum(dim=1).tolist()
    means = {"positives": sums_3[0] / positives} if positives else {}
    means |= {"negatives": sums_3[1] / negatives} if negatives else {}
    if unscored := rows * (rows - 1) // 2 - scored:
        # Sum over all pairs of rows: half of (|Σ u|² - Σ |u|²).
        total = (unit_ND.sum(dim=0).square().sum() - unit_ND.square().sum()) / 2
        means["in_batch"] = (total - sums_3[2]) / unscored
        if positives:
            means["margin"] = means["positives"] - means["in_batch"]
    return means


def _first_of_equal(key_P: Tensor) -> Tensor:
    """Return a boolean mask (P,) of the first entry of each distinct value."""
    sorted_P, order_P = key_P.sort(stable=True)
    first_P = torch.ones(len(key_P), dtype=torch.bool)
    first_P[order_P[1:]] = sorted_P[1:] != sorted_P[:-1]
    return first_P
