"""The in-batch contrastive loss: an anchor's positives are closer to it than the other rows of the batch.

Shapes: N rows (unique texts), P scored pairs, M (anchor, positive) edges, A anchors, L lines (an anchor, or an edge), C
candidates, K pairs of a line and a candidate.

A text is one row however often it occurs. So the paper's detection of identical sentences holds by construction: a text
is never its own negative, and its partners are positives wherever it occurs. A text that is two rows, such as a query
and a document (`Relation.text`), is no negative of itself or of its partners either.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from angle_llm.losses.relation import Relation, on_device
from angle_llm.losses.repulsion import Entries, FalseNegatives, Hardness, Repulsion


class Edges(NamedTuple):
    """Anchors with their positives, and the candidates for negatives, as row numbers of the embedding matrix."""

    anchor: Tensor
    """(M,) the anchor of each edge; edges are distinct and ordered by anchor."""
    positive: Tensor
    """(M,) the positive of each edge."""
    candidate: Tensor
    """(C,) rows that serve as negatives, distinct; an anchor skips itself and its partners."""


ContrastiveForm = Callable[[Relation, Tensor, int], Edges]
"""(relation, is_positive_P, rows N) -> Edges"""


def symmetric(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Return edges whose anchors are both ends of every positive pair; every row is a candidate.

    On pairs without repeated texts this is angle-emb 0.6.1's `in_batch_negative_loss` (arXiv 2309.12871, in-batch
    negative objective, with both directions), except for the mean: angle-emb divides by all 2P rows, of which those of
    label 0 add nothing; here the mean is over anchors, so the loss does not shrink when a batch holds fewer positives.
    """
    left_M, right_M = relation.left[is_positive_P], relation.right[is_positive_P]
    anchor_M, positive_M = _distinct(torch.cat((left_M, right_M)), torch.cat((right_M, left_M)), rows)
    return Edges(anchor_M, positive_M, torch.arange(rows, device=left_M.device))


def forward(relation: Relation, is_positive_P: Tensor, rows: int) -> Edges:
    """Return edges whose anchors are the left ends of positive pairs; rows on the right of any pair are candidates.

    Queries against [positives; hard negatives], as in supervised SimCSE (Gao et al. 2021) and angle-emb 0.6.1's
    `contrastive_with_negative_loss`. Queries do not repel each other. Where p is a partner only by (p, a, 1), p is
    neither a positive nor a negative of a.
    """
    anchor_M, positive_M = _distinct(relation.left[is_positive_P], relation.right[is_positive_P], rows)
    return Edges(anchor_M, positive_M, torch.unique(relation.right[relation.left != relation.right]))


CONTRASTIVE_FORMS: dict[str, ContrastiveForm] = {"symmetric": symmetric, "forward": forward}


EXTRA_NEGATIVES = ("query_query", "document_query", "document_document", "positive_positive")


@dataclass(frozen=True)
class Contrast:
    """Mean over anchors of the mean over their positives of the cross-entropy against their negatives; a scalar >= 0.

        loss_ap = -log( exp(s_ap) / (exp(s_ap) + Σ_k exp(s_ak)) ),   s = cosine / temperature

    A pair is positive if its score exceeds a threshold; the form (a value of `CONTRASTIVE_FORMS`) gives the anchors and
    the candidates. k runs over the candidates that are neither a nor a partner of a, in either direction and by text; so
    a pair given both as positive and as negative is positive. Pairs of a row with itself are dropped. An anchor's other
    positives are not in the denominator of loss_ap: there they do not repel.

    Without a positive pair the loss and its gradient are exactly 0, and `backward` works. An anchor without negatives
    adds 0 to the mean.

    `extra_negatives` of the forward form add further similarities to the sum. Queries are the rows on the left of pairs,
    documents those on the right:

        query_query        Σ_q exp(s_aq) over queries that have no positive in common with this edge
        document_query     Σ_q exp(s_pq) over queries that are no partner of p, and exp(s_ap) once more, so that the loss is
                           >= log 2
        document_document  Σ_d exp(s_pd) over documents that are in no pair with a
        positive_positive  the same over the documents that are a positive

    The embeddings enter as short vectors: the cosine of every scored pair, and `repulsions`. Memory: one gradient as
    large as the embeddings, and a block (`blocks`) of the L × C similarities at a time.

    Source: arXiv 2309.12871, in-batch negative objective; `symmetric` and `forward` describe angle-emb 0.6.1's. Extra
    negatives: GTE (arXiv 2308.03281, improved contrastive loss), as `directions` with `partition_mode="joint"` of
    `MultipleNegativesRankingLoss` in sentence-transformers 6.2; query_query and positive_positive are
    `contrast_anchors` and `contrast_positives` of its `CachedGISTEmbedLoss`.
    """

    temperature: float
    pair_of_M: Tensor
    """A scored pair of the two rows of each edge."""
    line_of_M: Tensor
    """The line of each edge."""
    divisor_M: Tensor
    """Divides the loss of each edge: number of positives of its anchor, times number of anchors."""
    repulsions: tuple[Repulsion, ...]
    copies: int = 1
    """How often exp(s_ap) occurs in the sum."""

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
        extra_negatives: tuple[str, ...] = (),
        hardness: Hardness | None = None,
    ) -> "Contrast":
        """Return the contrast of a relation on `rows` rows, for embeddings on a device.

        Raises:
            ValueError: if `guided` is set and the relation has no guide vectors.
        """
        is_positive_P = (relation.score > positive_above) & (relation.left != relation.right)
        edges = form(relation, is_positive_P, rows)
        anchor_A, anchor_of_M, positives_A = torch.unique(edges.anchor, return_inverse=True, return_counts=True)
        divisor_M = positives_A[anchor_of_M] * len(positives_A)
        anchor_L, line_of_M, partner_L = anchor_A, anchor_of_M, None
        if false_negatives is not None or extra_negatives:  # they depend on the positive
            anchor_L, partner_L = edges.anchor, edges.positive
            line_of_M = torch.arange(len(edges.anchor), device=edges.anchor.device)
        guide_NG = None
        if false_negatives is not None and false_negatives.guided:
            if relation.guide is None:
                raise ValueError(
                    "false_negatives: expected guide vectors in the relation, as a guide is set; got none."
                )
            guide_NG = on_device(relation.guide, device)
        text_N = (
            torch.arange(rows, device=edges.anchor.device)
            if relation.text is None
            else torch.unique(relation.text, return_inverse=True)[1]
        )
        shared = partial(Repulsion, temperature, false_negatives=false_negatives, guide_NG=guide_NG)

        own = None
        keeps_own = false_negatives is not None and false_negatives.scope == "in_batch"
        if keeps_own or (hardness is not None and hardness.scope != "all"):
            own = _own_negatives(relation, is_positive_P, anchor_L, edges.candidate, rows, form is symmetric)
        skips = _partners(edges, anchor_L, edges.candidate, text_N)
        anchor_L, candidate_C = on_device(anchor_L, device), on_device(edges.candidate, device)
        partner_L = None if partner_L is None else on_device(partner_L, device)
        repulsions = [shared(anchor_L, candidate_C, skips, own=own, partner_L=partner_L, hardness=hardness)]
        for name in extra_negatives:
            extra = _Extra.of(name, relation, edges)
            of_text, of_pairs = _partners(edges, extra.anchor, extra.candidate, text_N), extra.skips(rows)
            skips = Entries(*(torch.cat(both) for both in zip(of_text, of_pairs, strict=True)))
            anchor_L, candidate_C, partner_L = (on_device(index, device) for index in extra[:3])
            repulsions.append(shared(anchor_L, candidate_C, skips, partner_L=partner_L))
        pair_of_M, line_of_M, divisor_M = (
            on_device(index, device) for index in (_pair_of_edge(edges, relation, rows), line_of_M, divisor_M)
        )
        copies = 1 + ("document_query" in extra_negatives)
        return cls(temperature, pair_of_M, line_of_M, divisor_M, tuple(repulsions), copies)

    def loss(self, cosine_P: Tensor, repulsions: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, from the cosine of every scored pair and the values of `repulsions`."""
        attraction_M = cosine_P[self.pair_of_M] / self.temperature + math.log(self.copies)
        repulsion_L = repulsions[0]
        if len(repulsions) > 1:  # the gradient of a log-sum-exp of -inf alone is NaN
            repulsion_L = torch.stack(repulsions).clamp(min=torch.finfo(repulsion_L.dtype).min).logsumexp(dim=0)
        loss_M: Tensor = math.log(self.copies) - logsigmoid(attraction_M - repulsion_L[self.line_of_M])
        return loss_M.div(self.divisor_M).sum()


class _Extra(NamedTuple):
    """The rows that extra negatives compare; a line for each edge."""

    anchor: Tensor
    candidate: Tensor
    partner: Tensor
    links: tuple[Tensor, Tensor]
    """Two rows of each pair: a line whose partner is the first skips the second."""

    @classmethod
    def of(cls, name: str, relation: Relation, edges: Edges) -> "_Extra":
        is_pair_P = relation.left != relation.right
        query, document = torch.unique(relation.left[is_pair_P]), torch.unique(relation.right[is_pair_P])
        pairs, none = (relation.left, relation.right), edges.anchor[:0]
        return {
            "query_query": cls(edges.anchor, query, edges.positive, (edges.positive, edges.anchor)),
            "document_query": cls(edges.positive, query, edges.anchor, (none, none)),
            "document_document": cls(edges.positive, document, edges.anchor, pairs),
            "positive_positive": cls(edges.positive, torch.unique(edges.positive), edges.anchor, pairs),
        }[name]

    def skips(self, rows: int) -> Entries:
        line, link = equal_entries(self.partner, self.links[0])
        return _entries(line, self.links[1][link], self.candidate, rows)


def _distinct(anchor_M: Tensor, positive_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return edges, each once, ordered by anchor."""
    key_M = torch.unique(anchor_M * rows + positive_M)
    return key_M // max(rows, 1), key_M % max(rows, 1)


def _pair_of_edge(edges: Edges, relation: Relation, rows: int) -> Tensor:
    """Return a scored pair of the two rows of each edge, (M,), in either direction."""

    def key(one: Tensor, other: Tensor) -> Tensor:
        return torch.minimum(one, other) * rows + torch.maximum(one, other)

    key_P, pair_P = key(relation.left, relation.right).sort(stable=True)
    return pair_P[torch.searchsorted(key_P, key(edges.anchor, edges.positive))]


def _partners(edges: Edges, anchor_L: Tensor, candidate_C: Tensor, text_N: Tensor) -> Entries:
    """Return the rows that each line skips: those of its own text, and of the texts of its partners, in either direction
    of the pair."""
    texts = int(text_N.max()) + 1 if len(text_N) else 1
    own_A = torch.unique(anchor_L)
    one = text_N[torch.cat((edges.anchor, edges.positive, own_A))]
    other = text_N[torch.cat((edges.positive, edges.anchor, own_A))]
    key = torch.unique(one * texts + other)
    line, link = equal_entries(text_N[anchor_L], key // texts)
    place, candidate = equal_entries((key % texts)[link], text_N[candidate_C])
    return Entries(line[place], candidate)


def _own_negatives(
    relation: Relation, is_positive_P: Tensor, anchor_L: Tensor, candidate_C: Tensor, rows: int, both: bool
) -> Entries:
    """Return the rows that are in a pair with the anchor of each line and no positive; `both`: in either direction."""
    left, right = relation.left[~is_positive_P], relation.right[~is_positive_P]
    if both:
        left, right = torch.cat((left, right)), torch.cat((right, left))
    line, link = equal_entries(anchor_L, left)
    return _entries(line, right[link], candidate_C, rows)


def _entries(line_K: Tensor, row_K: Tensor, candidate_C: Tensor, rows: int) -> Entries:
    """Return the pairs of a line and a row whose row is a candidate."""
    place_N = torch.full((rows,), -1, device=candidate_C.device)
    place_N[candidate_C] = torch.arange(len(candidate_C), device=candidate_C.device)
    place_K = place_N[row_K]
    return Entries(line_K[place_K >= 0], place_K[place_K >= 0])


def equal_entries(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return all positions (i, j), (K,) each, with one[i] == other[j], ordered by i."""
    sorted_other, order = other.sort(stable=True)
    first = torch.searchsorted(sorted_other, one)
    count = torch.searchsorted(sorted_other, one, right=True) - first
    i = torch.arange(len(one), device=one.device).repeat_interleave(count)
    of_i = torch.arange(len(i), device=one.device) - (count.cumsum(0) - count)[i]
    return i, order[first[i] + of_i]
