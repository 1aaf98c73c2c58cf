"""Log-sum-exp over the negatives of each anchor, in blocks; skips false negatives, weights hard ones.

Shapes: N rows, D columns, G columns of a guide, L lines, C candidates, K pairs of a line and a candidate. In a block: a
lines, c candidates; B blocks of candidates.

A line is a row of the (L, C) logits: an anchor, or an anchor with one of its positives. Its explicit negatives are the
rows that form a pair with its anchor in the data, if this pair is not positive.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import add_rows, pull_back, rows, slices, square_side
from angle_llm.losses.similarity import cosine, unit
from angle_llm.objective import FalseNegativeFields

_ROUNDING = 32
"""Tolerance for rounding, in multiples of eps, that is added to the cosine threshold for false negatives.

The cosine of the positive is a sum, the cosines of candidates are a matrix product: for equal texts they differ by up
to 8 eps (float32, D 4096)."""


@dataclass(frozen=True)
class FalseNegatives(FalseNegativeFields):
    """Rule for false negatives: texts of the batch that are too similar to the anchor to be used as its negatives.

    A candidate is skipped if its cosine with the anchor is above a threshold:

        cos(anchor, positive) - margin                               or
        cos(anchor, positive) - (1 - ratio) · |cos(anchor, positive)|,   which is ratio · cos for a cosine above 0

    So a larger margin and a smaller ratio skip more candidates. Without margin and ratio, the margin is 0. Cosines are
    computed from the embeddings of the model, without gradient; with `guided`, from `Relation.guide`. An anchor with
    several positives has a threshold and a sum over negatives for each positive. In scope `in_batch`, the explicit
    negatives of the anchor in the data are never skipped; in scope `all`, they can be skipped.

    Source: GISTEmbed (arXiv 2402.16829); `margin` as `margin_strategy="absolute"` and `ratio` = 1 - margin of
    `"relative"` in `CachedGISTEmbedLoss` of sentence-transformers 6.2. ms-swift's `INFONCE_MASK_FAKE_NEGATIVE` is
    margin -0.1 with scope all, by the model itself. NV-Retriever (arXiv 2407.15831) has ratio 0.95 for mining.
    """

    guided: bool = False

    def threshold(self, positive: Tensor) -> Tensor:
        """Return the largest cosine with the anchor that a negative may have, given cosines of anchor and positive."""
        if self.ratio is not None:
            return positive - (1 - self.ratio) * positive.abs()
        return positive - (self.margin or 0)


class MaskIndices(NamedTuple):
    """Indices of K entries of a matrix (L, C) of anchors and candidates for negatives.

    A row of the matrix is called a line: an anchor, or an anchor with one of its positives.
    """

    line: Tensor
    """(K,) row index in the matrix of anchors and candidates, from 0 to L - 1."""
    candidate: Tensor
    """(K,) column index in the matrix of anchors and candidates, from 0 to C - 1."""

    def inside(self, a: slice, c: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row and column indices of the entries in the block [a, c] of the matrix, relative to the block."""
        inside = (self.line >= a.start) & (self.line < a.stop) & (self.candidate >= c.start) & (self.candidate < c.stop)
        return on_device(self.line[inside] - a.start, device), on_device(self.candidate[inside] - c.start, device)


@dataclass(frozen=True, eq=False)
class FalseNegativeFilter:
    """Thresholds of a `FalseNegatives` rule for the lines of a batch, each with one positive."""

    rule: FalseNegatives
    positive_L: Tensor
    """(L,) row numbers of the positives that belong to the anchors."""
    guide_NG: Tensor | None
    """(N, G) vectors of the texts from a guide encoder, whose cosines decide. None: the cosines of the embeddings decide."""

    def thresholds(self, x_ND: Tensor, anchor_L: Tensor, a: slice) -> Tensor:
        """Return the cosine with the anchor above which a candidate is a false negative, (a,), for the lines `a`."""
        vectors = x_ND if self.guide_NG is None else self.guide_NG
        with torch.no_grad():
            threshold_a = self.rule.threshold(cosine(rows(vectors, anchor_L[a]), rows(vectors, self.positive_L[a])))
            return threshold_a + _ROUNDING * torch.finfo(threshold_a.dtype).eps


@dataclass(frozen=True, eq=False)
class NegativeLogSum:
    """Log-sum-exp of the similarities between an anchor and its negatives, for L anchors, shape (L,); a `RowVector`.

        value = log Σ_k w_k · exp(cosine(anchor, k) / temperature)

    With `false_negatives`, an anchor with several positives occurs once per positive. k runs over the candidates that
    are not in `skips` and are not false negatives. w_k is exp(hardness_strength · cosine), and 1 for the explicit
    negatives of the anchor in the data. The choice of false negatives and the weights have no gradient.
    """

    temperature: float
    anchor_L: Tensor
    """(L,) row numbers of the anchors in the embedding matrix."""
    candidate_C: Tensor
    """(C,) row numbers, in the embedding matrix, of the candidates for negatives."""
    skips: MaskIndices
    """Pairs of anchor and candidate that are excluded from the sum, as indices into a matrix (L, C)."""
    explicit: MaskIndices | None = None
    """Pairs of an anchor and its explicit negatives in the data, as indices into a matrix (L, C).

    Needed for scope `in_batch` of `false_negatives`, and for `hardness_strength` above 0.
    """
    false_negatives: FalseNegativeFilter | None = None
    """Rule for candidates that are too similar to be negatives; None: no candidate is a false negative."""
    hardness_strength: float = 0.0
    """Strength α of the weights exp(α · cosine) of the negatives; 0: all weights are 1."""

    def fits(self, columns: int) -> bool:
        return max(len(self.anchor_L), len(self.candidate_C)) <= square_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        side = square_side(x_ND.shape[1])
        value_L = x_ND.new_empty(len(self.anchor_L))
        for a in slices(len(self.anchor_L), side):
            unit_aD = unit(rows(x_ND, self.anchor_L[a]))
            threshold_a = self._thresholds(x_ND, a)
            part_Ba = x_ND.new_empty(len(list(slices(len(self.candidate_C), side))), len(unit_aD))
            for part, (c, candidate_cD) in enumerate(self._candidates(x_ND)):
                part_Ba[part] = self._logits(unit_aD, unit(candidate_cD), threshold_a, a, c).logsumexp(dim=1)
            value_L[a] = part_Ba.logsumexp(dim=0)
        return value_L

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        """Backward pass: add the gradient with respect to the embeddings to `into_ND` in place, block by block.

        The derivative of value = logsumexp(s), for the logits s of `_logits`, with respect to s_k is exp(s_k - value).
        """
        value_L = value_V.masked_fill(value_V == -math.inf, 0)  # a line without negatives: exp(-inf - 0) is 0
        for a in slices(len(self.anchor_L), square_side(x_ND.shape[1])):
            anchor_aD = rows(x_ND, self.anchor_L[a])
            unit_aD = unit(anchor_aD)
            threshold_a = self._thresholds(x_ND, a)
            to_unit_aD = torch.zeros_like(unit_aD)
            for c, candidate_cD in self._candidates(x_ND):
                unit_cD = unit(candidate_cD)
                logits_ac = self._logits(unit_aD, unit_cD, threshold_a, a, c)
                weight_ac = logits_ac.sub_(value_L[a, None]).exp_().mul_(gradient_V[a, None] / self.temperature)
                to_unit_aD.addmm_(weight_ac, unit_cD)
                (to_candidate_cD,) = pull_back(unit, (candidate_cD,), weight_ac.T @ unit_aD)
                add_rows(into_ND, self.candidate_C[c], to_candidate_cD)
            (to_anchor_aD,) = pull_back(unit, (anchor_aD,), to_unit_aD)
            add_rows(into_ND, self.anchor_L[a], to_anchor_aD)

    def _candidates(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the candidates for negatives in blocks: slice of the candidates, and their embeddings (c, D)."""
        for c in slices(len(self.candidate_C), square_side(x_ND.shape[1])):
            yield c, rows(x_ND, self.candidate_C[c])

    def _thresholds(self, x_ND: Tensor, a: slice) -> Tensor | None:
        """Return the thresholds (a,) for false negatives of the anchors `a`; None without a rule."""
        return None if self.false_negatives is None else self.false_negatives.thresholds(x_ND, self.anchor_L, a)

    def _logits(self, unit_aD: Tensor, unit_cD: Tensor, threshold_a: Tensor | None, a: slice, c: slice) -> Tensor:
        """Return log w + cosine / temperature between the anchors `a` and the candidates `c`, shape (a, c).

        w is the weight of the candidate. The value is -inf for skipped candidates and false negatives.
        """
        logits_ac = (unit_aD / self.temperature) @ unit_cD.T
        false_ac = None if threshold_a is None else self._false_mask(logits_ac.detach(), threshold_a, a, c)
        # In place, because this is the largest matrix; the backward pass of the product does not need its result.
        if self.hardness_strength:
            logits_ac += self._log_weight(logits_ac.detach(), a, c)
        if false_ac is not None:
            logits_ac.masked_fill_(false_ac, -math.inf)
        logits_ac[self.skips.inside(a, c, logits_ac.device)] = -math.inf
        return logits_ac

    def _false_mask(self, logits_ac: Tensor, threshold_a: Tensor, a: slice, c: slice) -> Tensor:
        """Return a boolean mask (a, c): whether a candidate is a false negative of an anchor.

        `logits_ac` is cosine / temperature between the anchors `a` and the candidates `c`.
        """
        assert self.false_negatives is not None
        guide_NG = self.false_negatives.guide_NG
        if guide_NG is None:
            false_ac = logits_ac > threshold_a[:, None] / self.temperature
        else:
            guide_aG, guide_cG = unit(rows(guide_NG, self.anchor_L[a])), unit(rows(guide_NG, self.candidate_C[c]))
            false_ac = guide_aG @ guide_cG.T > threshold_a[:, None]
        if self.false_negatives.rule.scope == "in_batch" and self.explicit is not None:
            false_ac[self.explicit.inside(a, c, false_ac.device)] = False
        return false_ac

    def _log_weight(self, logits_ac: Tensor, a: slice, c: slice) -> Tensor:
        """Return the logarithms of the weights of the candidates `c` for the anchors `a`, shape (a, c).

        The logarithm is hardness_strength · cosine, and 0 for explicit negatives in the data. `logits_ac` is
        cosine / temperature.
        """
        weight_ac = logits_ac * (self.hardness_strength * self.temperature)
        if self.explicit is not None:
            weight_ac[self.explicit.inside(a, c, weight_ac.device)] = 0
        return weight_ac
