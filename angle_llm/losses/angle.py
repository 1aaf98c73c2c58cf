"""The AnglE objective: weighted sum of cosine ranking, in-batch contrast, angle ranking, regression and teachers.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from angle_llm.device import on_device
from angle_llm.losses.blocks import PairSimilarity, RowVector, from_rows
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, Contrast
from angle_llm.losses.negatives import FalseNegatives
from angle_llm.losses.ranking import ranking_loss, regression_loss
from angle_llm.losses.relation import Relation
from angle_llm.losses.similarity import ANGLE_FORMS, cosine
from angle_llm.losses.teachers import TeacherDistance, TeacherSimilarity, kl_loss
from angle_llm.objective import ObjectiveFields


@dataclass(frozen=True)
class ObjectiveValue:
    """The loss of a batch, and the values of its terms for logs."""

    loss: Tensor
    """Total loss, a scalar tensor; call `loss.backward()`."""
    parts: dict[str, Tensor]
    """Name of a loss term → value before its weight is applied, a detached scalar; terms with weight 0 are missing."""


@dataclass(frozen=True)
class AngleObjective(ObjectiveFields):
    """The AnglE training loss: a weighted sum of loss terms on scored pairs of embeddings.

        L = w₁·L_cosine + w₂·L_in_batch + w₃·L_angle (arXiv 2309.12871, total objective)
            + w₄·L_regression + w₅·L_kl + w₆·L_teacher_vector + w₇·L_teacher_similarity

    `cosine` and `angle` rank the scored pairs (`ranking_loss`). `in_batch` contrasts positives with the other texts of
    the batch (`Contrast`). `regression`, which is not in the paper, fits cosines to the scores (`regression_loss`). Three
    terms learn from a teacher: `kl` from teacher scores of a query with its positives and negatives (`kl_loss`),
    `teacher_vector` from teacher embeddings (`TeacherDistance`, mean over the texts), `teacher_similarity` from the
    cosines of teacher embeddings (`TeacherSimilarity`). A weight of 0 omits a term.
    Memory beyond float32 embeddings and their gradient: a quarter of a GB for any batch size (`blocks`).

    Migration from angle-emb 0.6.1: temperatures divide, as in the paper; tau in angle-emb multiplies. Its
    `cosine_tau=20` and `ibn_tau=20` correspond to 0.05, `angle_tau=1` (published runs) to 1.0, and `angle_tau=20`
    (default of its `AngleLoss`) to 0.05. On scored pairs without repeats, its losses equal the losses of
    `angle_form="reference"` and `contrastive_form="symmetric"`, except for the in-batch mean. angle-emb divides by all
    2P rows, this class by the anchors: multiply by anchors / 2P to get the value of angle-emb.

    `angle_form` is a key of `ANGLE_FORMS`, `contrastive_form` of `CONTRASTIVE_FORMS`. `hardness_strength` α weights
    each negative of the in-batch term by exp(α · cosine), without a gradient through the weight (LLaVE, arXiv
    2503.04812, eq. 5): `hardness_mode` "in_batch_negatives" of `MultipleNegativesRankingLoss` in sentence-transformers
    6.2.

    Raises:
        ValueError: for a weight or temperature out of range, an unknown form, or if all weights are 0.
    """

    false_negatives: FalseNegatives | None = None
    """Rule that excludes in-batch negatives that are too similar to the anchor. None: no exclusion."""
    positive_above: float = 0.5
    """A pair with a score above this value is a positive pair of the in-batch term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.positive_above):
            raise ValueError(f"positive_above: expected a finite number such as 0.5, got {self.positive_above!r}.")
        weights = [name for name in vars(self) if name.endswith("_weight")]
        if not any(getattr(self, name) for name in weights):
            raise ValueError(f"expected at least one of {', '.join(weights)} greater than 0; all are 0.")
        for name, known in (("angle_form", ANGLE_FORMS), ("contrastive_form", CONTRASTIVE_FORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {getattr(self, name)!r}.")

    @property
    def learns_vectors(self) -> bool:
        """Whether a term learns from teacher vectors. Such a term needs no pairs."""
        return self.teacher_vector_weight + self.teacher_similarity_weight > 0

    @overload
    def __call__(self, embeddings_ND: Tensor, left_P: Relation, /) -> ObjectiveValue: ...

    @overload
    def __call__(self, embeddings_ND: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> ObjectiveValue: ...

    def __call__(
        self,
        embeddings_ND: Tensor,
        left_P: Tensor | Relation,
        right_P: Tensor | None = None,
        score_P: Tensor | None = None,
    ) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings and scored pairs of their rows.

        Pair p consists of rows left_P[p] and right_P[p] and has score score_P[p]. The pairs are given as these three
        tensors, or as a single `Relation`, which may also contain teacher data.

        Computes in float32 at least, also under autocast: half precision is raised, float64 stays. The pairs can be on
        another device than the embeddings. In a batch without a positive, or with a single score, some parts are
        exactly 0; `backward` works on them.

        Raises:
            ValueError: for shapes that do not fit, row numbers out of range, and scores that are not finite.
        """
        if not isinstance(left_P, Relation):
            if right_P is None or score_P is None:
                raise TypeError("expected embeddings and a Relation, or embeddings, left, right and score.")
            left_P = Relation(left_P, right_P, score_P)
        if embeddings_ND.ndim != 2 or not embeddings_ND.is_floating_point():
            raise ValueError(
                "embeddings: expected a floating-point matrix (N, D), one row per unique text; got "
                f"{embeddings_ND.dtype} of shape {tuple(embeddings_ND.shape)}."
            )
        left_P.check_rows(len(embeddings_ND))
        device = embeddings_ND.device
        with torch.autocast(device.type, enabled=False):
            x_ND = embeddings_ND.to(torch.promote_types(embeddings_ND.dtype, torch.float32))
            weighted = self._parts(x_ND, left_P.widened())
            loss = torch.stack([weight * part for weight, part in weighted.values()]).sum()
        return ObjectiveValue(loss, {name: part.detach() for name, (_, part) in weighted.items()})

    def _parts(self, x_ND: Tensor, relation: Relation) -> dict[str, tuple[float, Tensor]]:
        """Return loss term → (weight, value before the weight is applied), for terms with a weight above 0."""
        needed: dict[str, RowVector] = {}
        left_P, right_P = on_device(relation.left, x_ND.device), on_device(relation.right, x_ND.device)
        if self.cosine_weight or self.in_batch_weight or self.regression_weight or self.kl_weight:
            needed["cosine"] = PairSimilarity(cosine, left_P, right_P)
        if self.in_batch_weight:
            contrast = Contrast.of(
                relation,
                len(x_ND),
                self.in_batch_temperature,
                self.positive_above,
                CONTRASTIVE_FORMS[self.contrastive_form],
                x_ND.device,
                false_negatives=self.false_negatives,
                hardness_strength=self.hardness_strength,
            )
            needed["repulsion"] = contrast.repulsion
        if self.angle_weight:
            needed["angle"] = PairSimilarity(ANGLE_FORMS[self.angle_form], left_P, right_P)
        if self.teacher_vector_weight:
            if relation.teacher_vectors is None:
                raise ValueError("teacher_vector_weight: expected teacher vectors in the relation, got none.")
            needed["distance"] = TeacherDistance(relation.teacher_vectors)
        if self.teacher_similarity_weight:
            taught = TeacherSimilarity.of(relation, self.in_batch_temperature, self.teacher_temperature, x_ND.device)
            needed["expectation"], needed["log_sum"] = taught.expectation, taught.log_sum
        # One call, so that all gradients are added in one matrix.
        vector = dict(zip(needed, from_rows(x_ND, *needed.values()), strict=True))

        score_P = relation.score
        parts: dict[str, tuple[float, Tensor]] = {}
        if self.cosine_weight:
            parts["cosine"] = self.cosine_weight, ranking_loss(vector["cosine"], score_P, self.cosine_temperature)
        if self.in_batch_weight:
            parts["in_batch"] = self.in_batch_weight, contrast.loss(vector["cosine"], vector["repulsion"])
        if self.angle_weight:
            parts["angle"] = self.angle_weight, ranking_loss(vector["angle"], score_P, self.angle_temperature)
        if self.regression_weight:
            parts["regression"] = self.regression_weight, regression_loss(vector["cosine"], score_P)
        if self.kl_weight:
            student_P = vector["cosine"] / self.in_batch_temperature
            parts["kl"] = self.kl_weight, kl_loss(student_P, relation, self.teacher_temperature)
        if self.teacher_vector_weight:
            distance_N = vector["distance"]
            parts["teacher_vector"] = self.teacher_vector_weight, distance_N.sum() / max(len(distance_N), 1)
        if self.teacher_similarity_weight:
            similarity = taught.loss(vector["expectation"], vector["log_sum"])
            parts["teacher_similarity"] = self.teacher_similarity_weight, similarity
        return parts
