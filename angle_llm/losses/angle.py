"""The AnglE objective: weighted sum of cosine ranking, in-batch contrast, angle ranking, regression, teachers and classes.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, ClassTerm, InBatchTerm
from angle_llm.losses.negatives import FalseNegatives
from angle_llm.losses.ranking import RankingTerm, RegressionTerm
from angle_llm.losses.relation import Relation
from angle_llm.losses.similarity import ANGLE_FORMS, cosine
from angle_llm.losses.teachers import (
    TeacherScoreTerm,
    TeacherSimilarityTerm,
    TeacherVectorTerm,
    kl_loss,
    margin_mse_loss,
)
from angle_llm.losses.terms import ObjectiveValue, SumOfTerms, Term
from angle_llm.objective import POSITIVE_ABOVE, ObjectiveFields


@dataclass(frozen=True)
class AngleObjective(ObjectiveFields, SumOfTerms):
    """The AnglE training loss: a weighted sum of loss terms on scored pairs of embeddings.

        L = w₁·L_cosine + w₂·L_in_batch + w₃·L_angle (arXiv 2309.12871, total objective)
            + w₄·L_regression + w₅·L_kl + w₆·L_margin_mse + w₇·L_teacher_vector + w₈·L_teacher_similarity + w₉·L_class

    `cosine` and `angle` rank the scored pairs (`ranking_loss`). `in_batch` contrasts positives with all other texts of
    the batch (`InBatchTerm`). `regression`, which is not in the paper, fits cosines to the scores (`regression_loss`). Four
    terms learn from a teacher: `kl` and `margin_mse` from teacher scores of a query with its positives and negatives
    (`kl_loss`, `margin_mse_loss`), `teacher_vector` from teacher embeddings (`TeacherVectorTerm`), `teacher_similarity`
    from the cosines of teacher embeddings (`TeacherSimilarityTerm`). `class` contrasts the classes of labelled texts
    (`ClassTerm`). A weight of 0 omits a term.
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
    positive_above: float = POSITIVE_ABOVE
    """A pair with a score above this value is a positive pair of the in-batch term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.positive_above):
            raise ValueError(f"positive_above: expected a finite number such as 0.5, got {self.positive_above!r}.")
        for name, known in (("angle_form", ANGLE_FORMS), ("contrastive_form", CONTRASTIVE_FORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {getattr(self, name)!r}.")
        if not self.terms:
            weights = ", ".join(name for name in vars(self) if name.endswith("_weight"))
            raise ValueError(f"expected at least one of {weights} greater than 0; all are 0.")

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms with a weight above 0."""
        temperature, teacher_temperature = self.in_batch_temperature, self.teacher_temperature
        contrast = InBatchTerm(
            weight=self.in_batch_weight,
            temperature=temperature,
            positive_above=self.positive_above,
            form=CONTRASTIVE_FORMS[self.contrastive_form],
            false_negatives=self.false_negatives,
            hardness_strength=self.hardness_strength,
        )
        angle = ANGLE_FORMS[self.angle_form]
        kl = partial(kl_loss, temperature=temperature, teacher_temperature=teacher_temperature)
        teacher_scale = temperature / teacher_temperature
        margin_mse = partial(margin_mse_loss, teacher_scale=teacher_scale, positive_above=self.positive_above)
        terms: tuple[Term, ...] = (
            RankingTerm("cosine", self.cosine_weight, cosine, self.cosine_temperature),
            contrast,
            RankingTerm("angle", self.angle_weight, angle, self.angle_temperature),
            RegressionTerm(self.regression_weight),
            TeacherScoreTerm("kl", self.kl_weight, kl),
            TeacherScoreTerm("margin_mse", self.margin_mse_weight, margin_mse),
            TeacherVectorTerm(self.teacher_vector_weight),
            TeacherSimilarityTerm(self.teacher_similarity_weight, temperature, teacher_temperature),
            ClassTerm(self.class_weight, self.class_temperature),
        )
        return tuple(term for term in terms if term.weight)

    def __call__(
        self,
        embeddings_ND: Tensor,
        left_P: Tensor | Relation,
        right_P: Tensor | None = None,
        score_P: Tensor | None = None,
    ) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings and scored pairs of their rows.

        Pair p consists of rows left_P[p] and right_P[p] and has score score_P[p]. The pairs are given as these three
        tensors, or as a single `Relation`, which may also contain teacher data. In a batch without a positive, or with
        a single score, some parts are exactly 0; `backward` works on them.

        Raises:
            ValueError: as in `SumOfTerms`, and for scores that are not finite.
        """
        if not isinstance(left_P, Relation):
            if right_P is None or score_P is None:
                raise TypeError("expected embeddings and a Relation, or embeddings, left, right and score.")
            left_P = Relation(left_P, right_P, score_P)
        return super().__call__(embeddings_ND, left_P)
