"""Settings of the loss of a training run; part of `config`."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from angle_llm.settings_io import NonNegativeFloat, PositiveFloat, SettingsError, settings_class


@settings_class
class FalseNegativeSettings:
    """Skip candidates that are too similar to the anchor as in-batch negatives. Off unless margin or ratio is set."""

    margin: Annotated[float, Ge(-2), Le(2)] | None = None
    """A candidate is skipped if its cosine with the anchor is above that of the positive minus this. 0: more similar than the
    positive (GISTEmbed)."""
    ratio: PositiveFloat | None = None
    """The same with a share of the cosine of the positive: 0.95 skips candidates above 95 % of it."""
    scope: Literal["in_batch", "all"] = "in_batch"
    """in_batch: your own negatives (pairs with this anchor that are not positive) are always kept. all: they can be
    skipped too."""
    guide: str | None = None
    """An encoder whose cosines decide: a folder, hub id, or package:NAME/path. Its vectors of the training texts are
    computed once and kept in the run directory. None: the model in training."""

    def __post_init__(self) -> None:
        if self.margin is not None and self.ratio is not None:
            raise SettingsError("objective.false_negatives: expected a margin or a ratio, got both.")
        if self.scope != "in_batch" and not self.is_on:
            raise SettingsError("objective.false_negatives.scope: expected a margin or a ratio too, such as margin 0.")
        if self.guide is not None and not self.is_on:
            raise SettingsError("objective.false_negatives.guide: expected a margin or a ratio too, such as margin 0.")

    @property
    def is_on(self) -> bool:
        """Whether candidates are skipped."""
        return self.margin is not None or self.ratio is not None


@settings_class
class ObjectiveSettings:
    """The loss: a weighted sum of terms (formulas in `angle_llm.losses`, measurements in docs/results.md)."""

    cosine_weight: float = 0.0
    """Weight of the cosine ranking term (CoSENT)."""
    in_batch_weight: float = 1.0
    """Weight of the in-batch contrastive term."""
    angle_weight: float = 0.0
    """Weight of the angle ranking term."""
    regression_weight: float = 0.0
    """Weight of the regression term: squared difference of cosine and score (SBERT). For graded pairs."""
    cosine_temperature: float = 0.05
    """Divides cosine differences."""
    in_batch_temperature: float = 0.05
    """Divides cosines of the in-batch term."""
    angle_temperature: float = 0.05
    """Divides angle differences (published runs: 1.0)."""
    angle_form: str = "phase"
    """phase, reference (as in angle-emb) or paper (equations 7 and 8)."""
    contrastive_form: str = "symmetric"
    """forward: left texts against all right texts. symmetric: every text with a positive against all texts."""
    positive_above: float = 0.5
    """A pair with a score (0..1) above this is a positive of the in-batch term."""
    false_negatives: FalseNegativeSettings = field(default_factory=FalseNegativeSettings)
    extra_negatives: list[str] = field(default_factory=list)
    """Further negatives of the form forward: query_query (queries against queries), document_query, document_document
    (the positive against documents of other queries), positive_positive (the positive against positives of other
    queries)."""
    hardness_strength: NonNegativeFloat = 0.0
    """Weights each in-batch negative by exp(strength · cosine): near negatives count more. 0: equal weights. Published:
    9 with in_batch (LLaVE), 5 with own (EmbeddingGemma)."""
    hardness_scope: Literal["in_batch", "own", "all"] = "in_batch"
    """Negatives that are weighted: those of other examples, your own, or all."""
    kl_weight: float = 0.0
    """Weight of the KL divergence between teacher and student over the texts of a group. For groups with scores."""
    margin_mse_weight: float = 0.0
    """Weight of the squared difference of margins (positive minus negative) of teacher and student. For groups with
    scores."""
    teacher_similarity: Literal["cosine", "dot"] = "cosine"
    """Similarity that is compared with teacher scores: cosine, or dot product (of vectors that are not normalised)."""
    student_temperature: PositiveFloat = 0.05
    """Divides the similarities that are compared with teacher scores. 1 with a dot product."""
    teacher_temperature: PositiveFloat = 0.05
    """Divides teacher scores: 0.05 for cosines, about 1 for logits of a reranker."""
    teacher: str | None = None
    """An encoder whose vectors are learned: a folder, hub id, or package:NAME/path. Its vectors of the training texts are
    computed once and kept in the run directory."""
    teacher_vector_weight: float = 0.0
    """Weight of the distance to the vectors of the teacher. If widths differ, the first dimensions of the wider vector
    are compared, unless teacher_projection is set."""
    teacher_vector_distance: Literal["cosine", "mse"] = "cosine"
    """cosine: 1 - cosine. mse: mean squared difference."""
    teacher_projection: bool = False
    """Compare the vectors of the teacher with a linear map of the vectors of the model, for a teacher of another width.
    The map is trained with the model and not saved with it."""

    def __post_init__(self) -> None:
        if self.teacher_vector_weight and self.teacher is None:
            raise SettingsError("objective.teacher_vector_weight: expected objective.teacher too, got none.")
        if self.teacher_projection and self.teacher is None:
            raise SettingsError("objective.teacher_projection: expected objective.teacher too, got none.")


@settings_class
class NestedSettings:
    """Layers and dimensions at which the loss is computed too, so that the encoder can be truncated (Matryoshka). The
    full vector after all layers is always included; all numbers of layers and of dimensions are combined."""

    dimensions: list[int] = field(default_factory=list)
    """Numbers of leading dimensions, ascending, such as 64 128 256."""
    layers: list[int] = field(default_factory=list)
    """Numbers of leading layers, ascending, such as 10 20."""
    dimension_weights: list[float] = field(default_factory=list)
    """Relative weights of the dimensions, and last the weight of the full width. Empty: equal."""
    layer_weights: list[float] = field(default_factory=list)
    """Relative weights of the layers, and last the weight of all layers. Empty: equal."""

    def __post_init__(self) -> None:
        for name, values, weights in (
            ("dimensions", self.dimensions, self.dimension_weights),
            ("layers", self.layers, self.layer_weights),
        ):
            if values != sorted(set(values)) or any(value < 1 for value in values):
                raise SettingsError(f"nested.{name}: expected ascending numbers of 1 or more, got {values}.")
            which = f"nested.{name.removesuffix('s')}_weights"
            if weights and len(weights) != len(values) + 1:
                raise SettingsError(
                    f"{which}: expected {len(values) + 1} numbers, the last for all {name}; got {weights}."
                )
            if weights and not (all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0):
                raise SettingsError(f"{which}: expected finite numbers of 0 or more, not all 0; got {weights}.")
