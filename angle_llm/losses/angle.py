"""The AnglE objective: cosine ranking, in-batch contrast, angle ranking and regression, as one weighted sum of named parts.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from angle_llm.config import ObjectiveSettings
from angle_llm.errors import unknown
from angle_llm.losses.blocks import PairSimilarity, RowVector, from_rows
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, Contrast
from angle_llm.losses.ranking import check_scores, check_temperature, ranking_loss
from angle_llm.losses.regression import regression_loss
from angle_llm.losses.similarity import ANGLE_FORMS, cosine


@dataclass(frozen=True)
class ObjectiveValue:
    """What an objective says about a batch."""

    loss: Tensor  # scalar; call backward on this
    parts: dict[str, Tensor]  # each part before its weight, detached scalars, for logs; parts of weight 0 are absent


@dataclass(frozen=True)
class AngleObjective(ObjectiveSettings):
    """L = w₁·L_cosine + w₂·L_in_batch + w₃·L_angle + w₄·L_regression over embeddings (arXiv 2309.12871, total objective).

    ``cosine`` and ``angle`` rank the scored pairs (``ranking_loss``), ``in_batch`` contrasts partners with the rest of
    the batch (``contrastive_loss``), ``regression``, which is not in the paper, asks cosines to equal the scores
    (``regression_loss``). A part of weight 0 is not computed. Beyond float32 embeddings and their gradient it
    takes a quarter of a GB, however large the batch (``blocks``).

    Coming from angle-emb 0.6.1: temperatures divide here, as in the paper, and its tau multiplies. Its
    ``cosine_tau=20`` and ``ibn_tau=20`` are 0.05 here, its ``angle_tau=1`` (published runs) is 1.0, its
    ``angle_tau=20`` (the default of its ``AngleLoss``) 0.05. On scored pairs without repeats its losses are ours with
    ``angle_form="reference"`` and ``contrastive_form="symmetric"``, except that its in-batch mean divides by all 2P
    rows, ours by the anchors: theirs is ours times anchors / 2P.

    Its fields are those of ``ObjectiveSettings``. Raises ``ValueError`` for a setting that cannot be meant.
    """

    def __post_init__(self) -> None:
        names = ("cosine_weight", "in_batch_weight", "angle_weight", "regression_weight")
        weights = {name: getattr(self, name) for name in names}
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be a finite number, 0 or more; got {weight!r}. 0 switches the part off.")
        if not any(weights.values()):
            raise ValueError(
                f"At least one of {', '.join(weights)} must be greater than 0, or nothing is learnt; all are 0."
            )
        for name in ("cosine_temperature", "in_batch_temperature", "angle_temperature"):
            check_temperature(name, getattr(self, name))
        if not math.isfinite(self.positive_above):
            raise ValueError(f"positive_above must be a finite number, such as 0.5; got {self.positive_above!r}.")
        if self.angle_form not in ANGLE_FORMS:
            raise ValueError(unknown("angle_form", self.angle_form, ANGLE_FORMS))
        if self.contrastive_form not in CONTRASTIVE_FORMS:
            raise ValueError(unknown("contrastive_form", self.contrastive_form, CONTRASTIVE_FORMS))

    def __call__(self, embeddings_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> ObjectiveValue:
        """The loss of a batch: pair p says that rows left_P[p] and right_P[p] of ``embeddings_ND`` have score_P[p].

        Computes in float32 at least, also under autocast: half precision is raised, float64 stays. The relation may
        live on another device than the embeddings. A batch without a positive, or with one score only, has parts that
        are exactly 0; ``backward`` works on them.

        Raises ``ValueError`` for shapes that do not fit, rows that do not exist, and scores that are no numbers.
        """
        _check_batch(embeddings_ND, left_P, right_P, score_P)
        device = embeddings_ND.device
        left_P, right_P, score_P = left_P.to(device).long(), right_P.to(device).long(), score_P.to(device)
        with torch.autocast(device.type, enabled=False):
            weighted = self._parts(_at_least_float32(embeddings_ND), left_P, right_P, _at_least_float32(score_P))
            loss = torch.stack([weight * part for weight, part in weighted.values()]).sum()
        return ObjectiveValue(loss, {name: part.detach() for name, (_, part) in weighted.items()})

    def _parts(self, x_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> dict[str, tuple[float, Tensor]]:
        """Weight and value of every part whose weight is not 0."""
        wanted: dict[str, RowVector] = {}
        if self.cosine_weight or self.in_batch_weight or self.regression_weight:
            wanted["cosine"] = PairSimilarity(cosine, left_P, right_P)
        if self.in_batch_weight:
            contrast = Contrast.of(
                left_P,
                right_P,
                score_P,
                len(x_ND),
                temperature=self.in_batch_temperature,
                positive_above=self.positive_above,
                form=CONTRASTIVE_FORMS[self.contrastive_form],
            )
            wanted["repulsion"] = contrast.repulsion
        if self.angle_weight:
            wanted["angle"] = PairSimilarity(ANGLE_FORMS[self.angle_form], left_P, right_P)
        # All at once, so that their gradients meet in one matrix.
        vector = dict(zip(wanted, from_rows(x_ND, *wanted.values()), strict=True))

        parts: dict[str, tuple[float, Tensor]] = {}
        if self.cosine_weight:
            parts["cosine"] = self.cosine_weight, ranking_loss(vector["cosine"], score_P, self.cosine_temperature)
        if self.in_batch_weight:
            parts["in_batch"] = self.in_batch_weight, contrast.loss(vector["cosine"], vector["repulsion"])
        if self.angle_weight:
            parts["angle"] = self.angle_weight, ranking_loss(vector["angle"], score_P, self.angle_temperature)
        if self.regression_weight:
            parts["regression"] = self.regression_weight, regression_loss(vector["cosine"], score_P)
        return parts


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_batch(embeddings_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> None:
    if embeddings_ND.ndim != 2 or not embeddings_ND.is_floating_point():
        raise ValueError(
            "embeddings must be a floating-point matrix (N, D), one row per unique text; got "
            f"{embeddings_ND.dtype} of shape {tuple(embeddings_ND.shape)}."
        )
    shapes = {"left": left_P.shape, "right": right_P.shape, "score": score_P.shape}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"left, right and score must be vectors of one length (P,), one entry per pair; got {got}.")
    rows = len(embeddings_ND)
    for name, index_P in (("left", left_P), ("right", right_P)):
        if index_P.is_floating_point() or index_P.dtype == torch.bool:
            raise ValueError(f"{name} must hold row numbers, so an integer dtype; got {index_P.dtype}. Use int64.")
        if len(index_P) and not 0 <= int(index_P.min()) <= int(index_P.max()) < rows:
            raise ValueError(
                f"{name} must hold row numbers in 0 .. {rows - 1}, as there are {rows} embeddings; got "
                f"{int(index_P.min())} .. {int(index_P.max())}. Do texts and pairs come from the same batch?"
            )
    check_scores(score_P)
