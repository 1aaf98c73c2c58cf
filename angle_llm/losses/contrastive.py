"""In-batch contrastive loss: each anchor should be closer to its positives than to all other texts of the batch.

Index letters, at the end of tensor names:

    N  rows of the embedding matrix (unique texts)
    P  scored pairs
    A  anchors: rows with a positive
    M  edges: an anchor with one of its positives
    L  lines, each with a sum over negatives: one line per anchor, or per edge if false negatives are skipped
    C  candidates for negatives
    K  pairs of a line and a candidate

`line_of_M` has for each of the M edges the number of its line, 0 .. L - 1. The partners of a row are the rows with which
it forms a positive pair, in either direction.

A text is a single row, no matter how often it occurs in the batch. So the detection of identical sentences in the AnglE
paper is not needed: a text is never its own negative, and its partners are never its negatives. This also holds for a
text with two rows, such as a query and a document with the same text (`Relation.text`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.device import on_device
from angle_llm.losses.blocks import WholeMatrix, add_rows, rows
from angle_llm.losses.negatives import FalseNegativeFilter, FalseNegatives, MaskIndices, NegativeLogSum
from angle_llm.losses.relation import Relation
from angle_llm.losses.similarity import unit
from angle_llm.losses.terms import NO_FIELDS, BatchPairs, BatchTerm, Term


class Edges(NamedTuple):
    """M pairs of anchor and positive, and C candidates for negatives, as row numbers of the embedding matrix."""

    anchor_M: Tensor
    """Row number of the anchor of each edge; edges are distinct and ordered by anchor."""
    positive_M: Tensor
    """Row number of the positive of each edge."""
    candidate_C: Tensor
    """Distinct row numbers of the candidates for negatives of every anchor.

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
class InBatchTerm(Term):
    """InfoNCE loss with in-batch negatives, a scalar >= 0.

        loss_ap = -log( exp(s_ap) / (exp(s_ap) + Σ_k exp(s_ak)) ),   s = cosine / temperature

    The loss is the mean of loss_ap over the positives p of an anchor a, then the mean over the anchors. A pair is
    positive if its score is above a threshold. The form (a value of `CONTRASTIVE_FORMS`) chooses the anchors and the
    candidates. k runs over the candidates that have neither the text of a nor the text of a partner of a. So a pair
    that occurs both as positive and as negative is positive. Pairs of a row with itself are ignored. Other positives of
    a are not in the denominator of loss_ap.

    Without a positive pair, the loss and its gradient are exactly 0, and `backward` works. An anchor without negatives
    adds 0 to the mean.

    The loss reads only short vectors from the embeddings: the cosine of every scored pair, and the sum over negatives of
    every line. Memory: a gradient as large as the embeddings, and a block of the L × C similarities at a time (module
    `blocks`).

    Source: arXiv 2309.12871, in-batch negative objective; the differences from angle-emb 0.6.1 are described at
    `symmetric` and `forward`.
    """

    weight: float
    temperature: float
    positive_above: float
    """A pair is positive if its score is above this value."""
    form: ContrastiveForm
    false_negatives: FalseNegatives | None = None
    """Rule for candidates that are too similar to be negatives; None: all candidates are negatives."""
    hardness_strength: float = 0.0
    """Negatives have the weight exp(strength · cosine); 0: all weights are 1."""
    name: str = "in_batch"

    @property
    def needs(self) -> frozenset[str]:
        guided = self.false_negatives is not None and self.false_negatives.guided
        return frozenset({"guide"}) if guided else NO_FIELDS

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        relation, rows = pairs.relation, pairs.rows
        is_positive_P = (relation.score > self.positive_above) & (relation.left != relation.right)
        edges = self.form(relation, is_positive_P, rows)

        # One sum over negatives per anchor. Which negatives are false depends on the positive: then one per edge.
        anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor_M, return_inverse=True, return_counts=True)
        if self.false_negatives is None:
            anchor_L, line_of_M = anchor_A, anchor_of_M
        else:
            anchor_L = edges.anchor_M
            line_of_M = torch.arange(len(edges.anchor_M), device=edges.anchor_M.device)
        negatives = self._negatives(pairs, edges, anchor_L, is_positive_P)

        # The mean over the positives of an anchor, then over the anchors.
        divisor_M = positives_A[anchor_of_M] * len(positives_A)
        indices = (_pair_of_edge(edges, relation, rows), line_of_M, divisor_M)
        loss = partial(contrastive_loss, self.temperature, *(on_device(index, pairs.device) for index in indices))
        return BatchTerm((pairs.similarities(), negatives), loss)

    def _negatives(self, pairs: BatchPairs, edges: Edges, anchor_L: Tensor, is_positive_P: Tensor) -> NegativeLogSum:
        """Return the sums over negatives of the lines, whose anchors are the rows `anchor_L`."""
        relation = pairs.relation
        rule = self.false_negatives
        device = pairs.device
        false_negatives = None
        if rule is not None:
            guide_NG = on_device(relation.required("guide", "false_negatives"), device) if rule.guided else None
            false_negatives = FalseNegativeFilter(rule, on_device(edges.positive_M, device), guide_NG)
        explicit = None
        if self.hardness_strength or (rule is not None and rule.scope == "in_batch"):
            either_side = self.form is symmetric
            explicit = _explicit_negatives(relation, is_positive_P, anchor_L, edges.candidate_C, either_side)
        skips = _partners(edges, anchor_L, relation.text_numbers(pairs.rows))
        rows = on_device(anchor_L, device), on_device(edges.candidate_C, device)
        return NegativeLogSum(self.temperature, *rows, skips, explicit, false_negatives, self.hardness_strength)


def contrastive_loss(
    temperature: float, pair_of_M: Tensor, line_of_M: Tensor, divisor_M: Tensor, cosine_P: Tensor, negatives_L: Tensor
) -> Tensor:
    """Compute the InfoNCE loss of the edges, Σ loss_ap / divisor, a scalar.

    Args:
        pair_of_M: index of a scored pair with the two rows of the edge.
        line_of_M: index of the sum over negatives that the edge uses.
        divisor_M: positives of the anchor times number of anchors.
        cosine_P: cosines of the scored pairs.
        negatives_L: log-sum-exp over the negatives of each line (`NegativeLogSum`).
    """
    attraction_M = cosine_P[pair_of_M] / temperature
    loss_M: Tensor = -logsigmoid(attraction_M - negatives_L[line_of_M])
    return loss_M.div(divisor_M).sum()


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs of anchor and positive row numbers, ordered by anchor, then by positive.

    `rows` is the number of rows of the embedding matrix.
    """
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _pair_of_edge(edges: Edges, relation: Relation, rows: int) -> Tensor:
    """Return for each edge the index (M,) of a scored pair with the same two rows in any order."""

    def key(row: Tensor, partner: Tensor) -> Tensor:
        return torch.minimum(row, partner) * rows + torch.maximum(row, partner)

    key_P, pair_P = key(relation.left, relation.right).sort(stable=True)
    return pair_P[torch.searchsorted(key_P, key(edges.anchor_M, edges.positive_M))]


def _partners(edges: Edges, anchor_L: Tensor, text_N: Tensor) -> MaskIndices:
    """Return the candidates that are not negatives of a line: they have the text of the anchor or of a partner.

    `anchor_L` are the anchors of the lines; `text_N` is the text number of each embedding row.
    """
    # Distinct pairs of texts that are not negatives of each other: texts of an edge, in both directions, and equal texts.
    anchor_A = torch.unique(anchor_L)
    text = text_N[torch.cat((edges.anchor_M, edges.positive_M, anchor_A))]
    partner = text_N[torch.cat((edges.positive_M, edges.anchor_M, anchor_A))]
    texts = int(text_N.max()) + 1 if len(text_N) else 1
    key = torch.unique(text * texts + partner)
    return _linked(text_N[anchor_L], key // texts, key % texts, text_N[edges.candidate_C])


def _explicit_negatives(
    relation: Relation, is_positive_P: Tensor, anchor_L: Tensor, candidate_C: Tensor, either_side: bool
) -> MaskIndices:
    """Return the (line, candidate) entries whose texts form a pair of the data that is not positive.

    `anchor_L` are the anchors of the lines. With `either_side`, the anchor may be the left or the right row of the pair;
    otherwise the anchor is the left row.
    """
    left, right = relation.left[~is_positive_P], relation.right[~is_positive_P]
    if either_side:
        left, right = torch.cat((left, right)), torch.cat((right, left))
    return _linked(anchor_L, left, right, candidate_C)


def _linked(anchor_L: Tensor, start: Tensor, end: Tensor, candidate_C: Tensor) -> MaskIndices:
    """Return all pairs of a line and a candidate that a link connects: anchor == start[i] and end[i] == candidate."""
    line, link = equal_entries(anchor_L, start)
    line_and_link, candidate = equal_entries(end[link], candidate_C)
    return MaskIndices(line[line_and_link], candidate)


def equal_entries(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two index tensors i and j, shape (K,), of all index pairs with left[i] == right[j], ordered by i."""
    sorted_right, order = right.sort(stable=True)
    first = torch.searchsorted(sorted_right, left)
    count = torch.searchsorted(sorted_right, left, right=True) - first
    i = torch.arange(len(left), device=left.device).repeat_interleave(count)
    rank_among_equal = torch.arange(len(i), device=left.device) - (count.cumsum(0) - count)[i]
    return i, order[first[i] + rank_among_equal]


@dataclass(frozen=True)
class ClassTerm(Term):
    """Supervised contrastive loss L_out (Khosla et al. 2020, arXiv 2004.11362, eq. 2), as a mean over A anchors, >= 0.

        L = 1/A Σ_i -1/|P(i)| Σ_{p in P(i)} log( exp(s_ip) / Σ_{a in A(i)} exp(s_ia) ),   s = cosine / temperature

    P(i) are the other texts with the class of text i; A(i) are all labelled texts except i, also the positives. A text
    without a positive is no anchor, but a negative of other texts. A text that occurs several times with a class is one
    text, so never its own positive. A text with two classes is an anchor of both, and one text of A(i). A text with two
    instructions has two rows (`Relation.text`), which are neither positives nor negatives of each other.

    Pairs without a class (`Relation.label` -1) are ignored. Without an anchor, loss and gradient are 0. Memory: a few
    matrices as large as the embeddings, and a block of similarities at a time (module `blocks`).
    """

    weight: float
    temperature: float
    name: str = "class"
    needs_pairs: bool = False
    needs: frozenset[str] = frozenset({"label"})

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        # Distinct labelled rows; anchors have another text of their class.
        relation = pairs.relation
        label_P = relation.required("label", "class_weight")
        text_N = relation.text_numbers(pairs.rows)
        row_T, label_T = torch.unique(torch.stack((relation.left, label_P))[:, label_P >= 0], dim=1)
        _, class_T, rows_C = torch.unique(label_T, return_inverse=True, return_counts=True)
        text_key_T = class_T * pairs.rows + text_N[row_T]
        _, text_T, rows_G = torch.unique(text_key_T, return_inverse=True, return_counts=True)
        positives_T = rows_C[class_T] - rows_G[text_T]  # rows of the class, without those of the same text
        anchor_A, candidate_C = row_T[positives_T > 0], torch.unique(row_T)
        # The log-sum-exp over A(i).
        skips = MaskIndices(*equal_entries(text_N[anchor_A], text_N[candidate_C]))
        anchors_and_candidates = on_device(anchor_A, pairs.device), on_device(candidate_C, pairs.device)
        others = NegativeLogSum(self.temperature, *anchors_and_candidates, skips)
        # The sum over positives, with the weight 1 / |P(i)|.
        weight_T = (1 / positives_T.double()).masked_fill(positives_T == 0, 0)
        indices = (on_device(index_T, pairs.device) for index_T in (row_T, class_T, text_T))
        positives = WholeMatrix(partial(cohesion, weight_T, *indices))

        def value(positives_1: Tensor, others_A: Tensor) -> Tensor:
            return (others_A.sum() - positives_1.squeeze() / self.temperature) / max(len(anchor_A), 1)

        return BatchTerm((positives, others), value)


def cohesion(weight_T: Tensor, row_T: Tensor, class_T: Tensor, text_T: Tensor, x_ND: Tensor) -> Tensor:
    """Return Σ_i weight_i · Σ_p cosine(i, p) over the rows p of other texts with the class of row i, a scalar.

    Σ_p cosine(i, p) = z_i·(s - t), where s is the sum of the vectors z of length 1 of the class, and t the sum over the
    rows of the text in the class. So a class of n texts takes n products, not n². `weight_T` is on the CPU: not every
    device has float64.
    """
    unit_TD = unit(rows(x_ND, row_T))

    def sums(number_T: Tensor) -> Tensor:
        sum_TD = torch.zeros_like(unit_TD)
        add_rows(sum_TD, number_T, unit_TD)
        return rows(sum_TD, number_T)

    cohesion_T = (unit_TD * (sums(class_T) - sums(text_T))).sum(dim=1)
    return (on_device(weight_T.to(x_ND.dtype), x_ND.device) * cohesion_T).sum()
