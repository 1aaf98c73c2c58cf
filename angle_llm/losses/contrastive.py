"""In-batch contrastive loss: each anchor should be closer to its positives than to the other texts of the batch.

Shapes: N rows (unique texts), P scored pairs, M edges, A anchors, L lines, C candidates, K pairs of a line and a
candidate.

An edge is an anchor with one of its positives. A line is an anchor or an edge: it has a sum over negatives. The
partners of a row are the rows with which it forms a positive pair, in either direction.

A text is a single row, no matter how often it occurs in the batch. So the detection of identical sentences in the AnglE
paper is not needed: a text is never its own negative, and its partners are never its negatives. This also holds for a
text with two rows, such as a query and a document with the same text (`Relation.text`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.device import on_device
from angle_llm.losses.negatives import FalseNegatives, MaskIndices, NegativeLogSum
from angle_llm.losses.relation import Relation


class Edges(NamedTuple):
    """M pairs of anchor and positive, and C candidates for negatives, as row numbers of the embedding matrix."""

    anchor: Tensor
    """(M,) row number of the anchor of each anchor-positive pair; pairs are distinct and ordered by anchor."""
    positive: Tensor
    """(M,) row number of the positive of each anchor-positive pair."""
    candidate: Tensor
    """(C,) distinct row numbers of the candidates for negatives of every anchor.

    An anchor does not use itself and its positives as negatives.
    """


ContrastiveForm = Callable[[Relation, Tensor, int], Edges]
"""Function (scored pairs, which pairs are positive, number of rows N) -> anchors, positives and candidates."""


def symmetric(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Choose both texts of every positive pair as anchors, and all texts of the batch as candidates for negatives.

    On pairs without repeated texts, the loss is `in_batch_negative_loss` of angle-emb 0.6.1 (arXiv 2309.12871, in-batch
    negative objective, both directions), except for the mean: angle-emb divides by all 2P rows, including rows of label
    0, which add nothing. Here the mean is over anchors, so the loss does not depend on the ratio of positive pairs.
    """
    left_M, right_M = relation.left[is_positive_P], relation.right[is_positive_P]
    anchor_M, positive_M = _distinct(torch.cat((left_M, right_M)), torch.cat((right_M, left_M)), rows)
    return Edges(anchor_M, positive_M, torch.arange(rows, device=left_M.device))


def forward(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Choose the left texts of positive pairs as anchors, the right texts of all pairs as candidates for negatives.

    Queries are compared with all positives and hard negatives, as in supervised SimCSE (Gao et al. 2021) and
    `contrastive_with_negative_loss` of angle-emb 0.6.1. Queries are not negatives of other queries. A left text whose
    positive is the anchor itself is neither a positive nor a negative of this anchor.
    """
    anchor_M, positive_M = _distinct(relation.left[is_positive_P], relation.right[is_positive_P], rows)
    return Edges(anchor_M, positive_M, torch.unique(relation.right[relation.left != relation.right]))


CONTRASTIVE_FORMS: dict[str, ContrastiveForm] = {"symmetric": symmetric, "forward": forward}


@dataclass(frozen=True)
class Contrast:
    """InfoNCE loss with in-batch negatives (a scalar >= 0), with all indices for the pairs of a batch.

        loss_ap = -log( exp(s_ap) / (exp(s_ap) + Σ_k exp(s_ak)) ),   s = cosine / temperature

    The loss is the mean of loss_ap over the positives p of an anchor a, then the mean over the anchors. A pair is
    positive if its score is above a threshold. The form (a value of `CONTRASTIVE_FORMS`) chooses the anchors and the
    candidates. k runs over the candidates that have neither the text of a nor the text of a partner of a. So a pair
    that occurs both as positive and as negative is positive. Pairs of a row with itself are ignored. Other positives of
    a are not in the denominator of loss_ap.

    Without a positive pair, the loss and its gradient are exactly 0, and `backward` works. An anchor without negatives
    adds 0 to the mean.

    The loss reads only short vectors from the embeddings: the cosine of every scored pair, and `repulsion`. Memory: a
    gradient as large as the embeddings, and a block of the L × C similarities at a time (module `blocks`).

    Source: arXiv 2309.12871, in-batch negative objective; the differences from angle-emb 0.6.1 are described at
    `symmetric` and `forward`.
    """

    temperature: float
    pair_of_M: Tensor
    """(M,) index, among the P scored pairs of the batch, of each anchor-positive pair."""
    line_of_M: Tensor
    """(M,) index, among the L sums of `repulsion`, of the sum over negatives that each anchor-positive pair uses."""
    divisor_M: Tensor
    """(M,) divisor of the loss of each anchor-positive pair: positives of the anchor times number of anchors."""
    repulsion: NegativeLogSum
    """Log-sum-exp of the similarities to the in-batch negatives, shape (L,), computed from the embeddings in blocks.

    An anchor has one sum, or with `false_negatives` one sum per positive.
    """

    @classmethod
    def of(
        cls,
        relation: Relation,
        rows: int,
        temperature: float,
        positive_above: float,
        form: ContrastiveForm,
        device: torch.device,
        *,
        false_negatives: FalseNegatives | None = None,
        hardness_strength: float = 0.0,
    ) -> "Contrast":
        """Prepare the in-batch contrastive loss (InfoNCE) for the scored pairs of a batch.

        Args:
            rows: Number of rows of the embedding matrix.
            positive_above: A pair is positive if its score is above this value.
            device: Device of the embeddings.
            false_negatives: Rule for candidates that are too similar to be negatives; None: all candidates are
                negatives.
            hardness_strength: Negatives have the weight exp(strength · cosine); 0: all weights are 1.

        Raises:
            ValueError: if `false_negatives.guided` is set and the relation has no guide vectors.
        """
        is_positive_P = (relation.score > positive_above) & (relation.left != relation.right)
        edges = form(relation, is_positive_P, rows)
        anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor, return_inverse=True, return_counts=True)
        divisor_M = positives_A[anchor_of_M] * len(positives_A)
        anchor_L, line_of_M, partner_L = anchor_A, anchor_of_M, None
        if false_negatives is not None:  # the sum depends on the positive: a line for each edge
            anchor_L, partner_L = edges.anchor, edges.positive
            line_of_M = torch.arange(len(edges.anchor), device=edges.anchor.device)
        guide_NG = None
        if false_negatives is not None and false_negatives.guided:
            if relation.guide is None:
                raise ValueError(
                    "false_negatives: expected guide vectors in the relation, because a guide is set; got none."
                )
            guide_NG = on_device(relation.guide, device)
        text_N = (
            torch.arange(rows, device=edges.anchor.device)
            if relation.text is None
            else torch.unique(relation.text, return_inverse=True)[1]
        )
        own_negatives = None
        keeps_own = false_negatives is not None and false_negatives.scope == "in_batch"
        if keeps_own or hardness_strength:
            own_negatives = _own_negatives(relation, is_positive_P, anchor_L, edges.candidate, form is symmetric)
        skips = _partners(edges, anchor_L, edges.candidate, text_N)
        anchor_L, candidate_C = on_device(anchor_L, device), on_device(edges.candidate, device)
        partner_L = None if partner_L is None else on_device(partner_L, device)
        repulsion = NegativeLogSum(
            temperature,
            anchor_L,
            candidate_C,
            skips,
            own_negatives,
            partner_L,
            false_negatives,
            guide_NG,
            hardness_strength,
        )
        pair_of_M, line_of_M, divisor_M = (
            on_device(index, device) for index in (_pair_of_edge(edges, relation, rows), line_of_M, divisor_M)
        )
        return cls(temperature, pair_of_M, line_of_M, divisor_M, repulsion)

    def loss(self, cosine_P: Tensor, repulsion_L: Tensor) -> Tensor:
        """Compute the loss, a scalar.

        Args:
            cosine_P: Cosines of the scored pairs.
            repulsion_L: Log-sum-exp over the negatives, as computed by `repulsion.value`.
        """
        attraction_M = cosine_P[self.pair_of_M] / self.temperature
        loss_M: Tensor = -logsigmoid(attraction_M - repulsion_L[self.line_of_M])
        return loss_M.div(self.divisor_M).sum()


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs of anchor and positive row numbers, ordered by anchor, then by positive.

    `rows` is the number of rows of the embedding matrix.
    """
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _pair_of_edge(edges: Edges, relation: Relation, rows: int) -> Tensor:
    """Return for each anchor-positive pair the index (M,) of a scored pair with the same two rows in any order."""

    def key(one: Tensor, other: Tensor) -> Tensor:
        return torch.minimum(one, other) * rows + torch.maximum(one, other)

    key_P, pair_P = key(relation.left, relation.right).sort(stable=True)
    return pair_P[torch.searchsorted(key_P, key(edges.anchor, edges.positive))]


def _partners(edges: Edges, anchor_L: Tensor, candidate_C: Tensor, text_N: Tensor) -> MaskIndices:
    """Return the candidates that are not negatives of an anchor: they have the text of the anchor or of a positive.

    `anchor_L` are the anchors of the L sums over negatives; `text_N` is the text number of each embedding row.
    """
    texts = int(text_N.max()) + 1 if len(text_N) else 1
    own_A = torch.unique(anchor_L)
    one = text_N[torch.cat((edges.anchor, edges.positive, own_A))]
    other = text_N[torch.cat((edges.positive, edges.anchor, own_A))]
    key = torch.unique(one * texts + other)
    line, link = equal_entries(text_N[anchor_L], key // texts)
    place, candidate = equal_entries((key % texts)[link], text_N[candidate_C])
    return MaskIndices(line[place], candidate)


def _own_negatives(
    relation: Relation, is_positive_P: Tensor, anchor_L: Tensor, candidate_C: Tensor, both: bool
) -> MaskIndices:
    """Return the candidates that form a pair with an anchor in the data that is not positive: explicit negatives.

    `anchor_L` are the anchors of the L sums over negatives. With `both`, the anchor may be the left or the right row of
    the pair; otherwise the anchor is the left row.
    """
    left, right = relation.left[~is_positive_P], relation.right[~is_positive_P]
    if both:
        left, right = torch.cat((left, right)), torch.cat((right, left))
    line, link = equal_entries(anchor_L, left)
    place, candidate = equal_entries(right[link], candidate_C)
    return MaskIndices(line[place], candidate)


def equal_entries(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two index tensors i and j, shape (K,), with all index pairs for which one[i] == other[j], ordered by i."""
    sorted_other, order = other.sort(stable=True)
    first = torch.searchsorted(sorted_other, one)
    count = torch.searchsorted(sorted_other, one, right=True) - first
    i = torch.arange(len(one), device=one.device).repeat_interleave(count)
    of_i = torch.arange(len(i), device=one.device) - (count.cumsum(0) - count)[i]
    return i, order[first[i] + of_i]
