"""The sum over negatives of a contrastive loss, in blocks, without false negatives and with weights of hard ones.

Shapes: N rows, D columns, G columns of a guide, L lines, C candidates, K pairs of a line and a candidate. In blocks: a
lines, c candidates, and B blocks of candidates.

A line is an anchor, or an anchor with one of its positives. It has one sum over candidates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angle_llm.losses.blocks import add_rows, pull_back, rows, slices, square_side
from angle_llm.losses.relation import on_device
from angle_llm.losses.similarity import cosine, unit

SCOPES = ("in_batch", "all")
HARDNESS_SCOPES = ("in_batch", "own", "all")
_ROUNDING = 32
"""Units of rounding that are added to a threshold. It is a sum, and the cosines of the candidates are a matrix product:
for equal texts both differ by up to 8 units (float32, D 4096)."""


@dataclass(frozen=True)
class FalseNegatives:
    """Candidates that are no negatives because they are too similar to the anchor.

    A candidate is skipped if its cosine with the anchor is above a threshold:

        cos(anchor, positive) - margin                               or
        cos(anchor, positive) - (1 - ratio) · |cos(anchor, positive)|,   which is ratio · cos for a cosine above 0

    So a larger margin and a smaller ratio skip more. With neither, the margin is 0. Cosines are those of the model
    itself, without gradient, or with `guided` those of `Relation.guide`. An anchor with several positives has one
    threshold, and one sum over negatives, for each of them. Candidates of `extra_negatives` have the same threshold.
    In scope `in_batch`, the pairs of the anchor without a positive score are never skipped; in scope `all` they are
    candidates like others.

    Source: GISTEmbed (arXiv 2402.16829); `margin` as `margin_strategy="absolute"` and `ratio` = 1 - margin of
    `"relative"` in `CachedGISTEmbedLoss` of sentence-transformers 6.2. ms-swift's `INFONCE_MASK_FAKE_NEGATIVE` is
    margin -0.1 with scope all, by the model itself. NV-Retriever (arXiv 2407.15831) has ratio 0.95 for mining.

    Raises:
        ValueError: for both margin and ratio, numbers out of range, or an unknown scope.
    """

    margin: float | None = None
    ratio: float | None = None
    scope: str = "in_batch"
    guided: bool = False

    def __post_init__(self) -> None:
        if self.margin is not None and self.ratio is not None:
            raise ValueError(
                f"false_negatives: expected a margin or a ratio, got margin {self.margin!r} and ratio {self.ratio!r}."
            )
        if self.margin is not None and not -2 <= self.margin <= 2:
            raise ValueError(
                f"false_negatives.margin: expected a difference of cosines from -2 to 2, got {self.margin!r}."
            )
        if self.ratio is not None and not 0 < self.ratio < math.inf:
            raise ValueError(
                f"false_negatives.ratio: expected a finite number greater than 0 such as 0.95, got {self.ratio!r}."
            )
        if self.scope not in SCOPES:
            raise ValueError(f"false_negatives.scope: expected one of {', '.join(SCOPES)}; got {self.scope!r}.")

    def threshold(self, positive: Tensor) -> Tensor:
        """Return the largest cosine of a negative, given the cosine of the positive."""
        if self.ratio is not None:
            return positive - (1 - self.ratio) * positive.abs()
        return positive - (self.margin or 0)


class Hardness(NamedTuple):
    """A weight of exp(strength · cosine) for each negative, without gradient; see `AngleObjective`."""

    strength: float
    scope: str


class Entries(NamedTuple):
    """Some pairs of a line and a candidate, on the device of the relation."""

    line: Tensor
    """(K,) position in L."""
    candidate: Tensor
    """(K,) position in C."""

    def inside(self, a: slice, c: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the index of the pairs in a block, relative to its start."""
        inside = (self.line >= a.start) & (self.line < a.stop) & (self.candidate >= c.start) & (self.candidate < c.stop)
        return on_device(self.line[inside] - a.start, device), on_device(self.candidate[inside] - c.start, device)


class _BlockOfLines(NamedTuple):
    """What a block of lines compares candidates with."""

    unit_aD: Tensor
    guide_aG: Tensor | None
    threshold_a: Tensor | None


@dataclass(frozen=True)
class Repulsion:
    """log Σ_k w_k · exp(cosine / temperature) of each line over the candidates k it does not skip, (L,); a `RowVector`.

    w is 1 without `hardness`. False negatives are skipped; a mask and a weight have no gradient.
    """

    temperature: float
    anchor_L: Tensor
    """The row of each line that is compared with the candidates."""
    candidate_C: Tensor
    skips: Entries
    own: Entries | None = None
    """The user's own negatives of a line: needed for a scope."""
    partner_L: Tensor | None = None
    """The row that is the other end of the positive pair of each line: needed for false negatives."""
    false_negatives: FalseNegatives | None = None
    guide_NG: Tensor | None = None
    hardness: Hardness | None = None

    def fits(self, columns: int) -> bool:
        return max(len(self.anchor_L), len(self.candidate_C)) <= square_side(columns)

    def value(self, x_ND: Tensor) -> Tensor:
        side = square_side(x_ND.shape[1])
        value_L = x_ND.new_empty(len(self.anchor_L))
        for a in slices(len(self.anchor_L), side):
            block = self._lines(x_ND, a, unit(rows(x_ND, self.anchor_L[a])))
            part_Ba = x_ND.new_empty(len(list(slices(len(self.candidate_C), side))), len(block.unit_aD))
            for part, (c, candidate_cD) in enumerate(self._candidates(x_ND)):
                part_Ba[part] = self._logits(block, unit(candidate_cD), a, c).logsumexp(dim=1)
            value_L[a] = part_Ba.logsumexp(dim=0)
        return value_L

    def add_gradient(self, x_ND: Tensor, value_V: Tensor, gradient_V: Tensor, into_ND: Tensor) -> None:
        """Add the gradient: the derivative of a log-sum-exp by each of its terms s is exp(s - value)."""
        value_L = value_V.masked_fill(value_V == -math.inf, 0)  # no negatives: exp(-inf - 0) is 0
        for a in slices(len(self.anchor_L), square_side(x_ND.shape[1])):
            anchor_aD = rows(x_ND, self.anchor_L[a])
            block = self._lines(x_ND, a, unit(anchor_aD))
            to_unit_aD = torch.zeros_like(block.unit_aD)
            for c, candidate_cD in self._candidates(x_ND):
                unit_cD = unit(candidate_cD)
                logits_ac = self._logits(block, unit_cD, a, c)
                weight_ac = logits_ac.sub_(value_L[a, None]).exp_().mul_(gradient_V[a, None] / self.temperature)
                to_unit_aD.addmm_(weight_ac, unit_cD)
                (to_candidate_cD,) = pull_back(unit, (candidate_cD,), weight_ac.T @ block.unit_aD)
                add_rows(into_ND, self.candidate_C[c], to_candidate_cD)
            (to_anchor_aD,) = pull_back(unit, (anchor_aD,), to_unit_aD)
            add_rows(into_ND, self.anchor_L[a], to_anchor_aD)

    def _candidates(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for c in slices(len(self.candidate_C), square_side(x_ND.shape[1])):
            yield c, rows(x_ND, self.candidate_C[c])

    @torch.no_grad()
    def _limits(self, x_ND: Tensor, a: slice) -> tuple[Tensor | None, Tensor | None]:
        """Return the guide rows of a block of lines, if there is a guide, and the thresholds of their candidates."""
        if self.false_negatives is None or self.partner_L is None:
            return None, None
        vectors = x_ND if self.guide_NG is None else self.guide_NG
        anchor_aG, partner_aG = rows(vectors, self.anchor_L[a]), rows(vectors, self.partner_L[a])
        threshold_a = self.false_negatives.threshold(cosine(anchor_aG, partner_aG))
        threshold_a += _ROUNDING * torch.finfo(threshold_a.dtype).eps
        return None if self.guide_NG is None else unit(anchor_aG), threshold_a

    def _lines(self, x_ND: Tensor, a: slice, unit_aD: Tensor) -> _BlockOfLines:
        return _BlockOfLines(unit_aD, *self._limits(x_ND, a))

    def _logits(self, block: _BlockOfLines, unit_cD: Tensor, a: slice, c: slice) -> Tensor:
        """Return log w + cosine / temperature of a block, (a, c); -inf where a line skips a candidate."""
        logits_ac = (block.unit_aD / self.temperature) @ unit_cD.T
        device = logits_ac.device
        false_ac = self._false(block, logits_ac.detach(), a, c)
        # In place: the product's backward does not need its result, and this is the one large matrix.
        if self.hardness is not None:
            logits_ac += self._log_weight(self.hardness, logits_ac.detach(), a, c)
        if false_ac is not None:
            logits_ac.masked_fill_(false_ac, -math.inf)
        logits_ac[self.skips.inside(a, c, device)] = -math.inf
        return logits_ac

    def _false(self, block: _BlockOfLines, logits_ac: Tensor, a: slice, c: slice) -> Tensor | None:
        """Return a mask of the false negatives of a block, given cosine / temperature."""
        if self.false_negatives is None or block.threshold_a is None:
            return None
        if self.guide_NG is None or block.guide_aG is None:
            false_ac = logits_ac > block.threshold_a[:, None] / self.temperature
        else:
            false_ac = block.guide_aG @ unit(rows(self.guide_NG, self.candidate_C[c])).T > block.threshold_a[:, None]
        if self.false_negatives.scope == "in_batch" and self.own is not None:
            false_ac[self.own.inside(a, c, false_ac.device)] = False
        return false_ac

    def _log_weight(self, hardness: Hardness, logits_ac: Tensor, a: slice, c: slice) -> Tensor:
        """Return strength · cosine of the candidates in scope, 0 for the others, given cosine / temperature."""
        weight_ac = logits_ac * (hardness.strength * self.temperature)
        if hardness.scope == "all" or self.own is None:
            return weight_ac
        own = self.own.inside(a, c, weight_ac.device)
        if hardness.scope == "in_batch":
            weight_ac[own] = 0
            return weight_ac
        only_ac = torch.zeros_like(weight_ac)
        only_ac[own] = weight_ac[own]
        return only_ac
