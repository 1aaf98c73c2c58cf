"""The fields of the AnglE objective, declared once: `losses.AngleObjective` computes it, `settings.train` sets it.

This module imports neither torch nor settings. The text below a field is its `--help` text.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

POSITIVE_ABOVE = 0.5
"""Two texts with a score (0 to 1) above this value count as a positive pair, such as a question and its answer."""


@dataclass(frozen=True)
class FalseNegativeFields:
    """Rule that skips negatives which are too similar to the anchor.

    Raises:
        ValueError: for both margin and ratio, a number out of range, or an unknown scope.
    """

    PREFIX: ClassVar[str] = ""
    """Prefix of the setting names in error messages, such as `objective.`."""

    margin: float | None = None
    """Skip an in-batch negative if its cosine with the anchor is above the cosine of the positive minus this margin, from
    -2 to 2. 0: skip negatives that are more similar than the positive (GISTEmbed)."""
    ratio: float | None = None
    """Skip an in-batch negative if its cosine with the anchor is above this ratio times the cosine of the positive,
    such as 0.95."""
    scope: Literal["in_batch", "all"] = "in_batch"
    """Which negatives can be skipped. in_batch: all except negatives from your data (pairs of this anchor that are not
    positive). all: negatives from your data too."""

    def __post_init__(self) -> None:
        setting = f"{self.PREFIX}false_negatives"
        if self.margin is not None and self.ratio is not None:
            raise ValueError(
                f"{setting}: expected a margin or a ratio, got margin {self.margin!r} and ratio {self.ratio!r}."
            )
        if self.margin is not None and not -2 <= self.margin <= 2:
            raise ValueError(f"{setting}.margin: expected a difference of cosines from -2 to 2, got {self.margin!r}.")
        if self.ratio is not None and not 0 < self.ratio < math.inf:
            raise ValueError(
                f"{setting}.ratio: expected a finite number greater than 0 such as 0.95, got {self.ratio!r}."
            )
        if self.scope not in ("in_batch", "all"):
            raise ValueError(f"{setting}.scope: expected one of in_batch, all; got {self.scope!r}.")


@dataclass(frozen=True)
class ObjectiveFields:
    """Weights, temperatures and variants of the terms of the training loss (the AnglE objective).

    Raises:
        ValueError: for a weight or temperature out of range.
    """

    PREFIX: ClassVar[str] = ""
    """Prefix of the setting names in error messages, such as `objective.`."""

    cosine_weight: float = 0.0
    """Weight of the cosine ranking term (CoSENT)."""
    in_batch_weight: float = 1.0
    """Weight of the in-batch contrastive term."""
    angle_weight: float = 0.0
    """Weight of the angle ranking term."""
    regression_weight: float = 0.0
    """Weight of the regression term: squared difference of cosine and score (SBERT). For graded pairs."""
    cosine_temperature: float = 0.05
    """Divides the cosine differences of the cosine ranking term; the in-batch term has in_batch_temperature."""
    in_batch_temperature: float = 0.05
    """Divides the cosines of the in-batch term and, with kl_weight or teacher_similarity_weight, the student's cosines."""
    angle_temperature: float = 0.05
    """Divides the angle differences of the angle ranking term (published runs: 1.0)."""
    angle_form: Literal["phase", "reference", "paper"] = "phase"
    """How the angle of a pair is computed. phase: symmetric. reference: as in angle-emb. paper: equations 6 and 7 of AnglE
    as printed, which move similar pairs apart."""
    contrastive_form: Literal["symmetric", "forward"] = "symmetric"
    """Which texts the in-batch term contrasts. forward: left texts against all right texts. symmetric: every text with a
    positive against all texts."""
    hardness_strength: float = 0.0
    """Weights each in-batch negative by exp(strength · cosine), so that near negatives count more. 0: equal weights.
    Negatives from your data have weight 1. LLaVE uses 9."""
    kl_weight: float = 0.0
    """Weight of the KL divergence between teacher and student scores of a query's texts. For data of
    format group with teacher scores."""
    margin_mse_weight: float = 0.0
    """Weight of the squared difference of the student's and the teacher's margins: score of a positive minus score of a
    negative of the same query (Margin-MSE). For data of format group with teacher scores."""
    teacher_temperature: float = 0.05
    """Divides teacher scores and cosines: 0.05 for cosines, about 1 for logits of a reranker. With margin_mse_weight,
    margins of the teacher are multiplied by in_batch_temperature / teacher_temperature."""
    teacher_vector_weight: float = 0.0
    """Weight of 1 - cosine between the embedding and the teacher's vector of a text. If widths differ, the first
    dimensions of the wider vector are compared."""
    teacher_similarity_weight: float = 0.0
    """Weight of the KL divergence between the teacher's and the student's cosines of each text to the other texts of the
    batch (RankCSE). Widths can differ."""
    class_weight: float = 0.0
    """Weight of the supervised contrastive term: texts of a class against all other texts. For data of format
    labelled_text."""
    class_temperature: float = 0.1
    """Divides the cosines of the supervised contrastive term."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (name.endswith("_weight") or name == "hardness_strength") and not 0 <= value < math.inf:
                raise ValueError(f"{self.PREFIX}{name}: expected a finite number of 0 or more, got {value!r}.")
            if name.endswith("_temperature") and not 0 < value < math.inf:
                raise ValueError(
                    f"{self.PREFIX}{name}: expected a finite number greater than 0, as similarities are divided by it; got "
                    f"{value!r}. angle-emb's tau multiplies instead: its tau 20 is a temperature of 0.05."
                )
