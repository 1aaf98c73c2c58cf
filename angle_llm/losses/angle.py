"""The AnglE objective: weighted sum of cosine ranking, in-batch contrast, angle ranking, regression and teachers.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from angle_llm.losses.blocks import PairSimilarity, RowVector, from_rows
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, EXTRA_NEGATIVES, Contrast
from angle_llm.losses.ranking import ranking_loss, regression_loss
from angle_llm.losses.relation import Relation, on_device
from angle_llm.losses.repulsion import HARDNESS_SCOPES, FalseNegatives, Hardness
from angle_llm.losses.similarity import ANGLE_FORMS, cosine
from angle_llm.losses.teachers import (
    SCORE_SIMILARITIES,
    VECTOR_DISTANCES,
    TeacherDistance,
    kl_loss,
    margin_mse_loss,
    split_projection,
)


@dataclass(frozen=True)
class ObjectiveValue:
    """The loss of a batch and its parts."""

    loss: Tensor
    """A scalar; call `backward` on this."""
    parts: dict[str, Tensor]
    """Each part before its weight, detached scalars for logs; parts of weight 0 are absent."""


@dataclass(frozen=True)
class AngleObjective:
    """L = w₁·L_cosine + w₂·L_in_batch + w₃·L_angle + w₄·L_regression (arXiv 2309.12871, total objective).

    `cosine` and `angle` rank the scored pairs (`ranking_loss`), `in_batch` contrasts positives with the rest of
    the batch (`Contrast`), `regression`, which is not in the paper, fits cosines to the scores (`regression_loss`).
    Beyond float32 embeddings and their gradient it takes a quarter of a GB for any batch size (`blocks`).

    Migration from angle-emb 0.6.1: temperatures divide, as in the paper; tau in angle-emb multiplies. Its
    `cosine_tau=20` and `ibn_tau=20` correspond to 0.05, `angle_tau=1` (published runs) to 1.0, and `angle_tau=20`
    (default of its `AngleLoss`) to 0.05. On scored pairs without repeats, its losses equal those of
    `angle_form="reference"` and `contrastive_form="symmetric"`, except for the in-batch mean. angle-emb divides by all
    2P rows, this class by the anchors: multiply by anchors / 2P to get the value of angle-emb.

    Weights of 0 omit a part. Temperatures divide cosines (`in_batch`) or differences. `angle_form` is a key of
    `ANGLE_FORMS`, `contrastive_form` of `CONTRASTIVE_FORMS`; a pair with a score above `positive_above` is a positive
    of the in-batch part. `false_negatives` (None: no candidate is skipped) and `extra_negatives` (names in
    `EXTRA_NEGATIVES`, with the form forward) are described at `FalseNegatives` and `Contrast`.

    A `hardness_strength` α weights each negative of the in-batch part by exp(α · cosine), without a gradient through the
    weight: near negatives count more. `hardness_scope`: the negatives that are not the user's own (in_batch; LLaVE, arXiv
    2503.04812, eq. 5, α 9), the user's own (own; EmbeddingGemma, arXiv 2509.20354, α 5), or all. Extra negatives have no
    weight. Equal to `hardness_mode` of `MultipleNegativesRankingLoss` in sentence-transformers 6.2.

    Three terms learn from a teacher: `kl` and `margin_mse` from its scores of the pairs of a group (`kl_loss`,
    `margin_mse_loss`), `teacher_vector` from its vectors (`TeacherDistance`, mean over the texts). The first two
    compare scores / `teacher_temperature` with similarities / `student_temperature`, a key of `SCORE_SIMILARITIES`. With
    `teacher_projection`, a row is a vector (D) and its projection (T), as `EmbeddingModel.add_projection` makes it:
    `teacher_vector` reads the projection, the other parts the vector.

    Raises:
        ValueError: for a weight or temperature out of range, or an unknown form, scope or kind of negatives.
    """

    cosine_weight: float = 0.0
    in_batch_weight: float = 1.0
    angle_weight: float = 0.0
    regression_weight: float = 0.0
    cosine_temperature: float = 0.05
    in_batch_temperature: float = 0.05
    angle_temperature: float = 0.05
    angle_form: str = "phase"
    contrastive_form: str = "symmetric"
    positive_above: float = 0.5
    false_negatives: FalseNegatives | None = None
    extra_negatives: tuple[str, ...] = ()
    hardness_strength: float = 0.0
    hardness_scope: str = "in_batch"
    kl_weight: float = 0.0
    margin_mse_weight: float = 0.0
    teacher_vector_weight: float = 0.0
    teacher_similarity: str = "cosine"
    student_temperature: float = 0.05
    teacher_temperature: float = 0.05
    teacher_vector_distance: str = "cosine"
    teacher_projection: bool = False

    def __post_init__(self) -> None:
        names = (
            "cosine_weight", "in_batch_weight", "angle_weight", "regression_weight", "kl_weight", "margin_mse_weight",
            "teacher_vector_weight",
        )  # fmt: skip
        for name in names:
            weight = getattr(self, name)
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}: expected a finite number of 0 or more (0 omits the part), got {weight!r}.")
        if not any(getattr(self, name) for name in names):
            raise ValueError(f"expected at least one of {', '.join(names)} greater than 0; all are 0.")
        for name in (
            "cosine_temperature", "in_batch_temperature", "angle_temperature", "student_temperature",
            "teacher_temperature",
        ):  # fmt: skip
            temperature = getattr(self, name)
            if not 0 < temperature < math.inf:
                raise ValueError(
                    f"{name}: expected a finite number greater than 0, as similarities are divided by it; got "
                    f"{temperature!r}. angle-emb's tau multiplies instead: its tau 20 is a temperature of 0.05."
                )
        if not math.isfinite(self.positive_above):
            raise ValueError(f"positive_above: expected a finite number such as 0.5, got {self.positive_above!r}.")
        for name, known in (
            ("angle_form", tuple(ANGLE_FORMS)),
            ("contrastive_form", tuple(CONTRASTIVE_FORMS)),
            ("hardness_scope", HARDNESS_SCOPES),
            ("teacher_similarity", tuple(SCORE_SIMILARITIES)),
            ("teacher_vector_distance", tuple(VECTOR_DISTANCES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {getattr(self, name)!r}.")
        if not 0 <= self.hardness_strength < math.inf:
            raise ValueError(
                f"hardness_strength: expected a finite number of 0 or more, got {self.hardness_strength!r}."
            )
        object.__setattr__(self, "extra_negatives", tuple(dict.fromkeys(self.extra_negatives)))
        for name in self.extra_negatives:
            if name not in EXTRA_NEGATIVES:
                raise ValueError(f"extra_negatives: expected some of {', '.join(EXTRA_NEGATIVES)}; got {name!r}.")
        if self.extra_negatives and self.contrastive_form != "forward":
            raise ValueError(
                f"extra_negatives: expected contrastive_form forward, got {self.contrastive_form}, which compares every "
                "anchor with all texts of the batch already."
            )

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
        """Return the loss of a batch, given its relation or tensors: rows left_P[p] and right_P[p] have score_P[p].

        Computes in float32 at least, also under autocast: half precision is raised, float64 stays. The relation can be
        on another device than the embeddings. In a batch without a positive, or with a single score, some parts are
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
        """Return the weight and value of every part whose weight is not 0."""
        projected_NT = x_ND
        if self.teacher_projection:
            x_ND, projected_NT = split_projection(x_ND, relation)
        needed: dict[str, RowVector] = {}
        repulsions: tuple[str, ...] = ()
        left_P, right_P = on_device(relation.left, x_ND.device), on_device(relation.right, x_ND.device)
        if self.cosine_weight or self.in_batch_weight or self.regression_weight:
            needed["cosine"] = PairSimilarity(cosine, left_P, right_P)
        if self.in_batch_weight:
            form = CONTRASTIVE_FORMS[self.contrastive_form]
            limits = self.in_batch_temperature, self.positive_above
            contrast = Contrast.of(
                relation, len(x_ND), *limits, form, x_ND.device, false_negatives=self.false_negatives,
                extra_negatives=self.extra_negatives,
                hardness=Hardness(self.hardness_strength, self.hardness_scope) if self.hardness_strength else None,
            )  # fmt: skip
            repulsions = tuple(f"repulsion {number}" for number in range(len(contrast.repulsions)))
            needed |= dict(zip(repulsions, contrast.repulsions, strict=True))
        if self.angle_weight:
            needed["angle"] = PairSimilarity(ANGLE_FORMS[self.angle_form], left_P, right_P)
        has_scores = self.kl_weight or self.margin_mse_weight
        if has_scores:
            needed["score"] = PairSimilarity(SCORE_SIMILARITIES[self.teacher_similarity], left_P, right_P)
        if self.teacher_vector_weight:
            if relation.teacher_vectors is None:
                raise ValueError("teacher_vector_weight: expected teacher vectors in the relation, got none.")
            distance = TeacherDistance(VECTOR_DISTANCES[self.teacher_vector_distance], relation.teacher_vectors)
            needed |= {} if self.teacher_projection else {"distance": distance}
        # One call, so that all gradients are added in one matrix.
        vector = dict(zip(needed, from_rows(x_ND, *needed.values()), strict=True))
        if self.teacher_vector_weight and self.teacher_projection:
            (vector["distance"],) = from_rows(projected_NT, distance)

        score_P = relation.score
        parts: dict[str, tuple[float, Tensor]] = {}
        if self.cosine_weight:
            parts["cosine"] = self.cosine_weight, ranking_loss(vector["cosine"], score_P, self.cosine_temperature)
        if self.in_batch_weight:
            parts["in_batch"] = (
                self.in_batch_weight,
                contrast.loss(vector["cosine"], tuple(vector[name] for name in repulsions)),
            )
        if self.angle_weight:
            parts["angle"] = self.angle_weight, ranking_loss(vector["angle"], score_P, self.angle_temperature)
        if self.regression_weight:
            parts["regression"] = self.regression_weight, regression_loss(vector["cosine"], score_P)
        if has_scores:
            student_P = vector["score"] / self.student_temperature
        if self.kl_weight:
            parts["kl"] = self.kl_weight, kl_loss(student_P, relation, self.teacher_temperature)
        if self.margin_mse_weight:
            limits = self.teacher_temperature, self.positive_above
            parts["margin_mse"] = self.margin_mse_weight, margin_mse_loss(student_P, relation, *limits)
        if self.teacher_vector_weight:
            distance_N = vector["distance"]
            parts["teacher_vector"] = self.teacher_vector_weight, distance_N.sum() / max(len(distance_N), 1)
        return parts
